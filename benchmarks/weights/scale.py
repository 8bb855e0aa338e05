"""Host costs of what grows with the size: syncs, plans and loads of published models, on a fake group.

    python -m benchmarks.weights.scale [--repeats 5]

Tensors are on meta and no byte is moved, so that one core measures what one rank of 16 to 1,024 runs in Python. Each
figure is the median of repetitions in a process of its own. The constants of ``recipes/plan_sync.py`` follow from them.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measure import options
from benchmarks.tables import report
from epfsdp2.engine.checkpoint.load import match_weights
from epfsdp2.engine.model.hf_names import as_checkpoint
from epfsdp2.engine.topology.mesh import build_meshes
from epfsdp2.recipes import plan_sync
from epfsdp2.rollout.layout.specs import Rollout
from tests.scale import test_worker_load
from tests.scale.syncs import colocated, no_bytes, run, sent_model, sync_of
from tests.support.scale import SIZES, Size, alone, on_fake_ranks

SYNCS = {SIZES[0]: Rollout(4), SIZES[1]: Rollout(8), SIZES[2]: Rollout(8), SIZES[3]: Rollout(16)}
PLANS = [(Size("Qwen3-235B-A22B", ranks, 8), Rollout(8)) for ranks in (64, 128, 256, 512)] + [(SIZES[3], Rollout(16))]
LOADS = {"Qwen3-30B-A3B": test_worker_load.LAYERS_30B, "Qwen3-235B-A22B": test_worker_load.LAYERS_235B}
FULL = SIZES[:2]


def _timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = function(*args)
    return time.process_time() - start, result


def _sync(size: Size, repeats: int) -> dict[str, Any]:
    """Seconds of a trainer rank for its first sync, planning included, for later ones, and for those in full."""
    with on_fake_ranks(size.world), no_bytes():
        sync, rollout = sync_of(size), SYNCS[size]
        first, parameters = _timed(lambda: run(sync.exchange(rollout), sync.values()))
        again = [_timed(lambda: run(sync.exchange(rollout), sync.values()))[0] for _ in range(repeats)]
        rounds = len(list(sync.exchange(rollout).plan.rounds))
        found = {"first": first, "again": median(again), "parameters": parameters, "rounds": rounds}
        if size in FULL:
            full = [_timed(lambda: sum(1 for _ in sync.full())) for _ in range(repeats + 1)][1:]
            found |= {"full": median(seconds for seconds, _ in full), "tensors": full[0][1]}
        return found


def _plan(size: Size, rollout: Rollout, repeats: int) -> dict[str, Any]:
    """Seconds to plan all that a rank needs, and the megabytes that this process grows by."""
    with on_fake_ranks(size.world):
        sent = sent_model(size)
        before = getrusage(RUSAGE_SELF).ru_maxrss
        seconds = [_timed(colocated, sent, rollout)[0] for _ in range(repeats)]
        grown = (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024
        return {"seconds": median(seconds), "megabytes": grown}


def _load(layers: int, repeats: int) -> dict[str, Any]:
    """Seconds of a vLLM worker for the units of a sync, where vLLM takes tensors for device tensors."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.has_device_tensors = lambda arguments: True
    model, units = test_worker_load._worker(layers)
    seconds = [_timed(test_worker_load._sync, model, units)[0] for _ in range(repeats + 1)][1:]
    return {"seconds": median(seconds), "units": len(units)}


def _plan_sync(repeats: int) -> dict[str, Any]:
    words = ["--model", "Kimi-K2", "--world", "1024", "--ep", "64", "--rollout-tp", "16"]
    return {"seconds": median(_timed(plan_sync.main, words)[0] for _ in range(repeats))}


def _match(size: Size, repeats: int) -> dict[str, Any]:
    """Seconds to match a checkpoint of names and shapes alone."""
    with on_fake_ranks(size.world):
        model, meshes = size.build(), build_meshes("cpu", size.topology)
        shapes = {name: tuple(tensor.shape) for name, tensor in as_checkpoint(model, model.named_parameters())}
        files: Any = SimpleNamespace(folder=Path("checkpoint"), file_of=dict.fromkeys(shapes, "model.safetensors"))
        files.shape, files.dtype = shapes.__getitem__, lambda name: torch.bfloat16
        size.shard(model)
        found = [_timed(match_weights, model, files, meshes)[0] for _ in range(repeats)]
        return {"seconds": median(found), "names": len(shapes)}


def measure(repeats: int) -> Iterator[tuple[str, str]]:
    """Yield the cells of each row."""
    for size, rollout in SYNCS.items():
        found = alone(_sync, size, repeats)
        what = f"{size}, ep {size.ep}, TP {rollout.tp}"
        yield f"tensors sent, {what}", f"{found['parameters']:,} in {found['rounds']} rounds"
        yield f"a trainer rank, {what}", f"{found['again']:.2f} s, first {found['first']:.2f} s"
        if size in FULL:
            yield f"the same in full, {what}", f"{found['full']:.2f} s for {found['tensors']:,} tensors"
    for name, layers in LOADS.items():
        found = alone(_load, layers, repeats)
        each = f"{found['seconds']:.2f} s, {1e3 * found['seconds'] / found['units']:.2f} ms each"
        yield f"a worker's loads, {name}, {found['units']} parameters", each
    for size, rollout in PLANS:
        found = alone(_plan, size, rollout, repeats)
        yield f"a plan, {size}, TP {rollout.tp}", f"{found['seconds']:.2f} s, {found['megabytes']:.0f} MB"
    seconds = alone(_plan_sync, repeats)["seconds"]
    yield "`plan_sync`, Kimi-K2 on 1,024 ranks, TP 16", f"{seconds:.1f} s"
    found = alone(_match, SIZES[1], repeats)
    yield "a checkpoint's names matched, Qwen3-235B-A22B", f"{found['seconds']:.1f} s for {found['names']:,} names"


def main() -> int:
    repeats = options(__doc__).parse_args().repeats
    text = [
        "CPU seconds of one rank in Python, on a fake group with tensors on meta, so that no byte is moved.",
        f"Medians of {repeats}.",
    ]
    rows = [dict(zip(("what", "measured"), row, strict=True)) for row in measure(repeats)]
    return report("scale", "Published sizes", "make bench-scale", ("torch",), text, rows)


if __name__ == "__main__":
    raise SystemExit(main())
