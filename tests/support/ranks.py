"""Run a function on several real ranks over gloo, with an outer time-out and nothing left behind.

Ranks are forked from a server process without threads, which has imported the modules that most tests need. The imports
take longer than most tests.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["each_case", "run_ranks"]

# Importing verl's workers takes 2.5 s of a core on every rank without this.
multiprocessing.set_forkserver_preload(
    ["tests.support.models.tiny", "tests.support.engine.sharded", "tests.support.scale", "verl.workers.engine_workers"]
)


def run_ranks(
    function: Callable[..., None], world: int, *args: Any, timeout: float = 240.0, backend: str = "cpu:gloo"
) -> None:
    """Call ``function(*args)`` on ``world`` processes of a gloo group, and wait for all of them.

    Raises:
        Exception: the first failing rank's, or TimeoutError; the other ranks are killed first.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            (world, folder, dict(os.environ), backend, function, args),
            nprocs=world,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} on {world} ranks did not end within {timeout:g} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def each_case(cases: Iterable[Any], check: Callable[..., None]) -> None:
    """Check every case on these ranks, also after a failure.

    Args:
        cases: tuples of arguments of ``check``; equal on all ranks.

    Raises:
        AssertionError: lists the failures by case and rank.
    """
    failures = []
    for case in cases:
        failure = None
        try:
            check(*case)
        except Exception as error:
            name = ", ".join(map(str, case))[:100]
            failure = f"{name}, rank {dist.get_rank()}: {type(error).__name__}: {error}"
        everyones: list[str | None] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(everyones, failure)
        except RuntimeError as error:  # the other ranks are still in the case that this rank has left
            raise AssertionError("\n".join([*failures, str(failure)])) from error
        failures += [each for each in everyones if each is not None]
    assert not failures, "\n".join(failures)


def _rank(
    rank: int,
    world: int,
    folder: str,
    environment: dict[str, str],
    backend: str,
    function: Callable[..., None],
    args: tuple,
) -> None:
    faulthandler.enable()  # a rank that dies of a signal prints its threads' stacks
    os.environ.clear()
    os.environ.update(environment)  # the server process has the environment of its start
    # verl reads these. The rendezvous is a file, so no port is opened.
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        function(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
