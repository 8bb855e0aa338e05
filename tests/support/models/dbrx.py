"""The plain DBRX to compare with: transformers' own, mended where it builds and computes it wrongly (5.9 and 5.12)."""

import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.dbrx import modeling_dbrx

__all__ = ["plain_dbrx"]


def plain_dbrx() -> type:
    """Return transformers' class if it multiplies by an expert's matrices as they are stored, else a mended one."""
    is_right = "expert_w1.T" in inspect.getsource(modeling_dbrx.DbrxExpertGLU.forward)
    return transformers.DbrxForCausalLM if is_right else DbrxForCausalLM


class DbrxExperts(modeling_dbrx.DbrxExperts):
    """Computes each expert as the checkpoint's own code does: ``(act(x @ w1.T) * (x @ v1.T)) @ w2``."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        w1, v1, w2 = (w.view(self.num_experts, -1, w.shape[-1]) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            x = tokens[token]
            made = (self.mlp.activation_fn(x @ w1[expert].T) * (x @ v1[expert].T)) @ w2[expert]
            output = output.index_add(0, token, made * top_k_weights[token, choice, None])
        return output.view_as(hidden_states)


class DbrxForCausalLM(transformers.DbrxForCausalLM):
    """Is loaded, saved and run as a mended model; what is built of its class elsewhere is transformers' own."""

    def __init__(self, config: Any):
        super().__init__(config)
        for block in self.transformer.blocks:
            block.ffn.router.layer = nn.Linear(config.d_model, config.ffn_config.moe_num_experts, bias=False)
            block.ffn.experts.__class__ = DbrxExperts

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return transformers.DbrxForCausalLM._from_config(config, **kwargs)
