"""Log-probs of sampled tokens after the processing of logits by a rollout, in vLLM's order.

Penalties come first, then the temperature, top-k and top-p (vLLM ``v1/sample/sampler.py``). SGLang has the same order.
"""

from dataclasses import dataclass

import torch

__all__ = ["PLAIN", "Sampling", "processed_log_probs"]

_AT_ONCE = 256  # positions, whose float32 logits are in memory at once


@dataclass(frozen=True)
class Sampling:
    """Settings of the rollout's sampling, under vLLM's names; the defaults change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


PLAIN = Sampling()


def processed_log_probs(
    logits: torch.Tensor, prompt: torch.Tensor, response: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Return float32 log-probs ``[R]`` of a response's tokens.

    A sampled token is never filtered out, because rounding alone decides at the border.

    Args:
        logits: ``[R, V]``, those that the response's tokens were sampled from.
        prompt, response: int64 ``[P]`` and ``[R]``; penalties count them.
    """
    counts = torch.zeros(logits.shape[-1], device=logits.device) if sampling.has_penalties else None
    in_prompt = None
    if counts is not None:
        in_prompt = torch.zeros_like(counts, dtype=torch.bool).index_fill_(0, prompt, True)
    found = []
    for part, labels in zip(logits.split(_AT_ONCE), response.split(_AT_ONCE), strict=True):
        z = part.float()
        if counts is not None and in_prompt is not None:
            chosen = torch.nn.functional.one_hot(labels, z.shape[-1]).to(z.dtype)
            before = counts + chosen.cumsum(0) - chosen
            counts = counts + chosen.sum(0)
            factor = torch.where((before > 0) | in_prompt, sampling.repetition_penalty, 1.0)
            z = torch.where(z > 0, z / factor, z * factor)
            z = z - sampling.frequency_penalty * before - sampling.presence_penalty * (before > 0)
        z = z / max(sampling.temperature, 1e-8)
        if 0 < sampling.top_k < z.shape[-1] or sampling.top_p < 1:
            z = _filtered(z, labels, sampling)
        found.append(z.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    return torch.cat(found)


def _filtered(z: torch.Tensor, labels: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    least = torch.full_like(z[:, :1], -torch.inf)  # of the logits that stay
    if 0 < sampling.top_k < z.shape[-1]:
        least = z.topk(sampling.top_k).values[:, -1:]
    if sampling.top_p < 1:
        ordered = z.masked_fill(z < least, -torch.inf).sort(-1, descending=True).values
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        stays = before < sampling.top_p
        least = ordered.gather(1, stays.sum(-1, keepdim=True).clamp(1) - 1)
    removed = (z < least).scatter(1, labels[:, None], False)
    return z.masked_fill(removed, -torch.inf)
