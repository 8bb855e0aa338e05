"""Syncs of trainer ranks into vLLM engines that are started for them, one after the other, and the seconds of each."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from benchmarks.measure import figures_of
from epfsdp2.rollout.vllm.adapter import send_weights

__all__ = ["WORLD", "seconds_of_syncs", "send_together"]

WORLD = 2


def seconds_of_syncs(
    model: Path,
    tp: int,
    turns: Sequence[str],
    ranks: Callable[..., dict],
    *args: Any,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    world: int = WORLD,
    **settings: Any,
) -> tuple[dict, dict[str, list[float]]]:
    """Run ``ranks(handles, *args, turns)`` on trainer ranks beside the replicas that the first two of them feed.

    Args:
        model: the checkpoint that vLLM starts with.
        turns: the side of each sync; the first of a side warms up.
        ranks: makes as many syncs. It returns figures, with the times when each was begun as ``began``.
        arguments: of vLLM's worker, by side.
        world: trainer ranks. ``handles`` are of the workers, one for each of the first two.
        settings: of ``Engine``.

    Returns:
        The figures, and by side the seconds of each sync that counts until the last engine has loaded it.
    """
    from tests.support.rollout.vllm_engine import Engine

    settings = {"dtype": "bfloat16", **settings}
    engines: list[Engine] = []
    try:
        for _ in range(WORLD // tp):
            engines.append(Engine(str(model), tp_size=tp, **settings))
        ended = [[_when_done(engine, **(arguments or {}).get(side, {})) for side in turns] for engine in engines]
        handles = [engine.handle(rank) for engine in engines for rank in range(tp)]
        figures = figures_of(ranks, world, handles, *args, turns)
        took = [max(each[i]() for each in ended) - began for i, began in enumerate(figures["began"])]
        return figures, {
            side: [seconds for turn, seconds in zip(turns, took, strict=False) if turn == side][1:] for side in turns
        }
    finally:
        for engine in engines:
            engine.stop()


def send_together(weights: Iterable[Any], handles: Sequence[str], megabytes: int) -> tuple[float, Any]:
    """Send a rank's weights to its worker, all ranks at once; a rank without a worker drops them.

    Returns:
        When the sync began, and the sender's counts; None from a rank without a worker.
    """
    rank = dist.get_rank()
    dist.barrier()
    began = time.monotonic()
    if rank >= len(handles):
        for _ in weights:
            pass
        return began, None
    sending = send_weights(
        weights, zmq_handle=handles[rank], bucket_megabytes=megabytes, use_shm=True, timeout_seconds=300, rank=rank
    )
    return began, asyncio.run(sending)


def _when_done(engine: Any, **arguments: Any) -> Callable[[], float]:
    """Ask for one sync; returns a function that waits for its end and returns the time of it, once."""
    ended: SimpleQueue[float] = SimpleQueue()
    arguments |= {"use_shm": True, "sync_timeout_seconds": 500.0}
    future = engine.call("update_weights_from_ipc", timeout=600.0, **arguments)
    future.add_done_callback(lambda _: ended.put(time.monotonic()))

    def when() -> float:
        future.result()
        return ended.get()

    return when
