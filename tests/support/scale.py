"""Cost of one rank's Python code at published sizes: fake process groups, models on meta, no byte moved.

``alone`` runs a function in a process of its own. There ``on_fake_ranks`` makes the process one of N ranks. CPU seconds
are ratios to a fixed loop in the same process; numbers of calls are the same on every machine.
"""

import cProfile
import gc
import multiprocessing
import os
import pstats
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from epfsdp2.recipes.plan.cards import config_of
from tests.support import ranks  # noqa: F401 its forkserver has imported most modules

__all__ = ["MOST_GROWTH", "SIZES", "Cost", "Size", "alone", "growth", "on_fake_ranks"]

MOST_GROWTH = 2.2  # factor of a cost with twice the ranks
_REPETITIONS = 2
_MOST_REPETITIONS = 20


@dataclass(frozen=True)
class Size:
    """A model on a number of ranks.

    Args:
        model: a name of ``recipes.plan``.
        layers: number of layers, 0 for all. Fewer are enough, because the cost per layer grows with ranks.
    """

    model: str
    world: int
    ep: int
    layers: int = 0

    @property
    def topology(self) -> Topology:
        return Topology.arrange(self.world, self.ep)

    def build(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Build the model on meta."""
        config = config_of(self.model)
        if self.layers:
            config.num_hidden_layers = self.layers
        return build_on_meta(AutoModelForCausalLM, config, dtype)

    def shard(self, model: nn.Module) -> nn.Module:
        """Parallelise a model within a fake group of this size."""
        return parallelize(model, build_meshes("cpu", self.topology), ShardingOptions(param_dtype=torch.bfloat16))

    def __str__(self) -> str:
        return f"{self.model} on {self.world}"


SIZES = (
    Size("Qwen3-30B-A3B", 16, 8),
    Size("Qwen3-235B-A22B", 64, 8),
    Size("DeepSeek-V3", 256, 32),
    Size("Kimi-K2", 1024, 64),
)


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a call, and their ratio to a fixed loop in the same process."""

    ratio: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.ratio:.1f} loops"

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any) -> tuple["Cost", Any]:
        """Call ``function(*args)`` and return its cost and its result."""
        before = _loop()
        seconds, result = _timed(function, *args)
        return cls(seconds / max(before, _loop()), seconds), result


def _timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    gc.collect()
    gc.disable()  # its cost depends on all live objects
    try:
        start = time.process_time()
        result = function(*args)
        return time.process_time() - start, result
    finally:
        gc.enable()


def _loop() -> float:
    """Return the CPU seconds of a loop over objects, dicts, strings and small operators, about 30 ms on a laptop."""

    def once() -> None:
        found: dict[tuple[int, str], list[Size]] = {}
        for i in range(10_000):
            found.setdefault((i % 97, f"layers.{i}"), []).append(Size("model", i, i + 1))
        values = torch.zeros(8, 8)
        for _ in range(2_000):
            values = values.view(64).narrow(0, 0, 64).view(8, 8)

    seconds = []
    for _ in range(_REPETITIONS):
        start = time.process_time()
        once()
        seconds.append(time.process_time() - start)
    return min(seconds)


def growth(prepare: Callable[[Size], Any], run: Callable[..., Any], size: Size) -> dict[str, float]:
    """Return the growth of a call's cost with twice the ranks, as ratios: calls of functions, and CPU seconds.

    The seconds are the least of two measurements, and of up to 20 while their growth exceeds ``MOST_GROWTH``.

    Args:
        prepare: returns the arguments of ``run`` as a tuple, within a fake group of the size's ranks.
    """
    small, large = sizes = (size, replace(size, world=2 * size.world))
    calls, seconds = {}, dict.fromkeys(sizes, float("inf"))
    for each in sizes:
        with on_fake_ranks(each.world):
            args = prepare(each)
            with cProfile.Profile() as profile:
                run(*args)
            calls[each] = cast(Any, pstats.Stats(profile)).total_calls
    for repetition in range(_MOST_REPETITIONS):
        if repetition >= _REPETITIONS and seconds[large] <= MOST_GROWTH * seconds[small]:
            break
        for each in sizes:
            with on_fake_ranks(each.world):
                seconds[each] = min(seconds[each], _timed(run, *prepare(each))[0])
    return {"calls": calls[large] / calls[small], "seconds": seconds[large] / seconds[small]}


@contextmanager
def on_fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of ``world`` ranks whose collectives return at once."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def alone(function: Callable[..., dict[str, Any]], *args: Any, timeout: float = 300.0) -> dict[str, Any]:
    """Call a function in a process with one thread; print and return its dict, with CPU seconds as ``cpu``.

    Raises:
        AssertionError: the function raised; with its traceback.
        TimeoutError: the function did not end within ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, dict(os.environ), function, args), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(timeout):
            raise TimeoutError(f"{function.__name__} did not end within {timeout:g} s")
        failure, found = receive.recv()
    finally:
        process.kill()
        process.join()
    if failure:
        raise AssertionError(failure)
    print(function.__name__, *args, {name: str(value) for name, value in found.items()})
    return found


def _child(send: Any, environment: dict[str, str], function: Callable, args: tuple) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    gc.freeze()  # collections would walk through all imported objects
    try:
        found = ("", function(*args) | {"cpu": time.process_time()})
    except BaseException:
        found = (traceback.format_exc(), {})
    send.send(found)
