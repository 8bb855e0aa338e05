"""The known families outside transformers' experts interface, by the class of their block."""

from typing import Any

import torch
from torch import nn

from ..find import UnsupportedModelError
from .blocks import Block, put_on_interface

__all__ = ["OUTSIDE", "prepare"]


def prepare(model: Any) -> None:
    """Put the known blocks of a model onto the interface; other models stay unchanged."""
    put_on_interface(model, OUTSIDE)


def _granite_forward(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """Route as ``GraniteMoeTopKGating`` does; the experts group the rows."""
    hidden = layer_input.reshape(-1, self.input_size)
    top_logits, ids = self.router.layer(hidden).float().topk(self.router.top_k, dim=1)
    weights = torch.softmax(top_logits, dim=1).type_as(hidden)
    return self.experts(hidden, ids, weights).view_as(layer_input)


# transformers up to 5.9 has two stacks of linears, called with rows grouped by expert.
_GRANITE = Block("input_linear.weight", "output_linear.weight", "activation", _granite_forward)


def _llama4_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each token to its chosen experts, scaled by its scores before them.

    transformers sends every token to every expert, scaled by zero but for the chosen ones: those rows add nothing.
    """
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden_states)
    ids = torch.topk(logits, self.top_k, dim=1).indices
    scaled = hidden_states.unsqueeze(1) * scores.gather(1, ids).unsqueeze(-1)
    rows, ids = scaled.reshape(-1, self.hidden_dim), ids.reshape(-1, 1)
    routed = self.experts(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
    return self.shared_expert(hidden_states) + routed.view_as(scaled).sum(dim=1), logits


def _dbrx_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Route as ``DbrxFFN`` does, whose router may multiply its input with a jitter, in place."""
    router_logits = self.router(hidden_states)
    weights, ids = self.route_tokens_to_experts(router_logits)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    return self.experts(flat, ids, weights).view_as(hidden_states)


def _mend_dbrx(block: Any, config: Any) -> None:
    """Set the router's width to the model's, and refuse a config whose positions transformers would misread.

    transformers up to 5.12 builds the router as wide as an expert and multiplies by the transposed matrices. So it runs
    only if an expert is as wide as the model, as in no checkpoint, and even then computes something else. This engine
    computes as transformers 5.23, vLLM and the checkpoint's own code do.

    Raises:
        UnsupportedModelError: its ``attn_config`` has another ``rope_theta`` than transformers computes with.
    """
    layer = block.router.layer
    if layer.in_features != config.hidden_size:
        block.router.hidden_size = config.hidden_size
        made = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        block.router.layer = nn.Linear(config.hidden_size, layer.out_features, bias=False, **made)
    theta, known = config.rope_parameters["rope_theta"], getattr(config.attn_config, "rope_theta", None)
    if known is not None and known != theta:
        raise UnsupportedModelError(
            f"attn_config.rope_theta={known} is not the rope_parameters.rope_theta={theta} with which transformers "
            f'computes DBRX; set "rope_parameters": {{"rope_type": "default", "rope_theta": {known}}} in config.json.'
        )


OUTSIDE: dict[str, Block | str] = {
    "DbrxFFN": Block(
        up="experts.mlp.v1",
        down="experts.mlp.w2",
        act_fn="experts.mlp.activation_fn",
        forward=_dbrx_forward,
        gate="experts.mlp.w1",
        count="experts.num_experts",
        mend=_mend_dbrx,
    ),
    "GraniteMoeHybridMoE": _GRANITE,
    "GraniteMoeMoE": _GRANITE,
    "GraniteMoeSharedMoE": _GRANITE,
    "Llama4TextMoe": Block(
        "experts.gate_up_proj", "experts.down_proj", "experts.act_fn", _llama4_forward, is_transposed=True
    ),
    "Step3p7SparseMoeBlock": "experts",
}
"""Class name of a block -> its record, or the name of its experts, if these lack transformers' decorator alone. A
module of ``model.external_lib`` may add some."""
