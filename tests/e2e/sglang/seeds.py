"""Makes samples of SGLang a function of the prompt, the sample's number and the probabilities, in any run.

SGLang uses the seed of a request (``sampling_seed``) with attention kernels of GPUs alone
(``enable_deterministic_inference``). Otherwise it draws from one stream of numbers, in the order in which answers are
computed. The file ``agent_loop_config_path`` names ``SeededAgentLoop`` for verl, and SGLang
calls ``install`` in each of its processes as a plug-in (``sglang.srt.plugins``).
"""

import functools
import zlib
from typing import Any

import torch

__all__ = ["gumbel_argmax", "install"]


def __getattr__(name: str) -> Any:
    # Made on first use: SGLang's processes have no agents.
    if name != "SeededAgentLoop":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    class SeededAgentLoop(SingleTurnAgentLoop):
        """verl's, with a seed for each sample of a prompt."""

        async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
            words = f"{list(kwargs['raw_prompt'])} {kwargs['session_id']}"
            seeded = sampling_params | {"sampling_seed": zlib.crc32(words.encode())}
            return await super().run(seeded, priority, **kwargs)

    return globals().setdefault(name, SeededAgentLoop)


def gumbel_argmax(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample a column of each row, ``[rows, 1]``, of the noise that the row's seed and position give."""
    noise = torch.empty(log_probs.shape, dtype=torch.float64)
    for row, seed, position in zip(noise, seeds.tolist(), positions.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed * 4096 + position))
    return (log_probs.double() - noise.log()).argmax(dim=-1, keepdim=True)


def install() -> None:
    """Make SGLang's sampler use the seeds of requests, in this process."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    stock = SamplingBatchInfo.from_schedule_batch.__func__

    @functools.wraps(stock)
    def from_schedule_batch(cls, batch, vocab_size):
        info = stock(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    sampler.multinomial_with_seed = gumbel_argmax
