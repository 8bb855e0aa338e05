"""Granite's Mixtures-of-Experts up to transformers 5.9: two stacks of linears that take rows grouped by expert."""

from typing import Any

import torch

from .blocks import Block

__all__ = ["GRANITE"]


def _forward(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """Route as ``GraniteMoeTopKGating`` does; grouping the rows is the experts' own."""
    hidden = layer_input.reshape(-1, self.input_size)
    top_logits, ids = self.router.layer(hidden).float().topk(self.router.top_k, dim=1)
    weights = torch.softmax(top_logits, dim=1).type_as(hidden)
    return self.experts(hidden, ids, weights).view_as(layer_input)


GRANITE = Block("input_linear.weight", "output_linear.weight", "activation", _forward)
