"""Llama 4: every token goes into every expert, scaled by its score, which is zero but for the chosen ones."""

from typing import Any

import torch

from .blocks import Block

__all__ = ["LLAMA4"]


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each token to its chosen experts, scaled before them; a row of zeros would add nothing elsewhere."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden_states)
    ids = torch.topk(logits, self.top_k, dim=1).indices
    scaled = hidden_states.unsqueeze(1) * scores.gather(1, ids).unsqueeze(-1)
    rows, ids = scaled.reshape(-1, self.hidden_dim), ids.reshape(-1, 1)
    routed = self.experts(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
    return self.shared_expert(hidden_states) + routed.view_as(scaled).sum(dim=1), logits


LLAMA4 = Block("experts.gate_up_proj", "experts.down_proj", "experts.act_fn", _forward, is_transposed=True)
