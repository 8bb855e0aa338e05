"""Syncs of trainer ranks into vLLM engines that are started for them, one after the other, and what each took."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from epfsdp2.rollout.vllm.adapter import send_weights
from tests.support.ranks import run_ranks

__all__ = ["WORLD", "seconds_of_syncs", "send_together"]

WORLD = 2


def seconds_of_syncs(
    model: Path,
    tp: int,
    syncs: Sequence[Mapping[str, Any]],
    ranks: Callable[..., None],
    *args: Any,
    out: Path,
    world: int = WORLD,
    replicas: int | None = None,
    **settings: Any,
) -> tuple[dict, list[float]]:
    """Run ``ranks(tp, handles, *args, out)`` on trainer ranks beside the replicas that the first of them feed.

    Args:
        model: the checkpoint that vLLM starts with.
        syncs: arguments of vLLM's worker for each sync, in turn.
        ranks: makes as many syncs, and has rank 0 write figures to ``out``, with ``began``, when each was begun.
        out: a JSON file.
        world: trainer ranks.
        replicas: how many of vLLM there are; as many as ``world`` feeds by default. ``handles`` are of their workers.
        settings: of ``Engine``.

    Returns:
        The figures, and the seconds of each sync until the last engine has loaded it.
    """
    from tests.support.rollout.vllm_engine import Engine

    settings = {"dtype": "bfloat16", **settings}
    engines: list[Engine] = []
    try:
        for _ in range(world // tp if replicas is None else replicas):
            engines.append(Engine(str(model), tp_size=tp, **settings))
        ended = [[_when_done(engine, **sync) for sync in syncs] for engine in engines]
        handles = [engine.handle(rank) for engine in engines for rank in range(tp)]
        run_ranks(ranks, world, tp, handles, *args, out, timeout=1800)
        figures = json.loads(out.read_text())
        return figures, [max(each[i]() for each in ended) - began for i, began in enumerate(figures["began"])]
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
    """Ask for one sync; returns what tells, once it has ended, when that was."""
    ended: list[float] = []
    done = threading.Event()
    arguments |= {"use_shm": True, "sync_timeout_seconds": 500.0}
    future = engine.call("update_weights_from_ipc", timeout=600.0, **arguments)

    def note(_):
        ended.append(time.monotonic())
        done.set()

    future.add_done_callback(note)

    def when() -> float:
        future.result()
        done.wait()
        return ended[0]

    return when
