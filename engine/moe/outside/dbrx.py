"""DBRX: the experts' three matrices are flattened, each one parameter ``[E * I, D]`` of a layer.

transformers up to 5.12 builds its router as wide as an expert and multiplies by the matrices transposed, so it computes
only where an expert is as wide as the model, which is so in no checkpoint, and not even then what the checkpoint means.
What is computed here is what 5.23, vLLM and the checkpoint's own code compute.
"""

from typing import Any

import torch
from torch import nn

from ..find import UnsupportedModelError
from .blocks import Block

__all__ = ["DBRX"]


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Route as ``DbrxFFN`` does, which may multiply what goes into its router with a jitter, in place."""
    router_logits = self.router(hidden_states)
    weights, ids = self.route_tokens_to_experts(router_logits)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    return self.experts(flat, ids, weights).view_as(hidden_states)


def _mend(block: Any, config: Any) -> None:
    """Give the router the width of the model, and refuse a config whose positions transformers would misread.

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
            f"attn_config.rope_theta={known} is not what transformers computes DBRX with, rope_parameters.rope_theta="
            f'{theta}; it is with "rope_parameters": {{"rope_type": "default", "rope_theta": {known}}} in config.json.'
        )


DBRX = Block(
    up="experts.mlp.v1",
    down="experts.mlp.w2",
    act_fn="experts.mlp.activation_fn",
    forward=_forward,
    gate="experts.mlp.w1",
    count="experts.num_experts",
    mend=_mend,
)
