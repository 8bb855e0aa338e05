"""Let vLLM return the log-probs that the trainer computes: by the same reduction, before top-k and top-p.

verl's trainer scales logits by a temperature and knows of no truncation. vLLM has no extension point for this;
``tests/rollout/bitwise`` fails once its sampler has other functions.
"""

from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

from ...engine.compat.wrap_function import wrap
from ...engine.head.log_probs import log_softmax

__all__ = ["install"]

_GREEDY = 1e-5  # lower temperatures are greedy (``vllm/v1/sample/sampler.py``)


def install() -> None:
    """Replace the log-probs of prompts and of sampled tokens; once per process."""
    wrap(Sampler, "compute_logprobs", lambda _: _log_probs)
    wrap(Sampler, "sample", _sampling)


def _log_probs(_sampler: Any, logits: torch.Tensor) -> torch.Tensor:
    return log_softmax(logits, logits.new_ones(len(logits), dtype=torch.float32))


def _sampling(sample: Any) -> Any:
    def with_log_probs(self: Any, logits: torch.Tensor, metadata: Any, logprobs_mode_override: Any = None) -> Any:
        own, mode = None, logprobs_mode_override or self.logprobs_mode
        if mode == "processed_logprobs" and metadata.max_num_logprobs is not None and not metadata.all_greedy:
            temperature = metadata.temperature
            own = log_softmax(logits, torch.where(temperature < _GREEDY, 1.0, temperature))
        sampled, processed = sample(self, logits, metadata, logprobs_mode_override)
        return sampled, processed if own is None else own

    return with_log_probs
