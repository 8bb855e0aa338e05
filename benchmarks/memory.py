"""Peak memory of a training step on each rank, allocation by allocation, beside what arithmetic says.

    python benchmarks/memory.py [--fast]

Four ranks on a CPU train a tiny Qwen3-MoE in float32. torch's profiler records every allocation and every release of
the CPU allocator; the peak of the second step is compared with the sum of what has to be there.
"""

import argparse
import bisect
import json
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.quickstart import machine
from benchmarks.tables import write_table
from epfsdp2.engine.clip import clip_grad_norm_
from epfsdp2.engine.memory_plan import Backend, Batch, ModelSizes, peak
from epfsdp2.engine.mesh import Topology, build_meshes
from epfsdp2.engine.modeling import build_on_meta, materialize
from epfsdp2.engine.optimizer import build_multi_optimizer
from epfsdp2.engine.parallelize import ShardingOptions, parallelize
from epfsdp2.engine.shards import local_tensor
from tests.support.ranks import run_ranks

COLUMNS = [
    "mesh",
    "shard dim",
    "depth",
    "reshard",
    "checkpointing",
    "tokens",
    "measured",
    "predicted",
    "ratio",
    "largest",
]
WORLD, FLOAT = 4, 4
MODEL = {
    "vocab_size": 256,
    "hidden_size": 192,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Row:
    """One setting, and what came out, in bytes on the rank where it is largest."""

    ep: int
    fsdp_size: int = -1
    shard_dim: int | str = "auto"
    checkpointing: str = "full"
    depth: int = 1
    reshard: bool = True
    tokens: int = 16
    measured: int = 0
    predicted: int = 0
    largest: int = 0  # single allocation
    stack: int = 0  # of all experts' gate_up_proj in a layer

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def holds(self) -> bool:
        """Within 10 %; and under expert parallelism nothing as large as a stack of all experts was allocated."""
        return abs(self.ratio - 1) <= 0.1 and (self.ep == 1 or self.largest < self.stack)

    @property
    def mesh(self) -> str:
        replicas = 1 if self.fsdp_size == -1 else WORLD // self.fsdp_size
        return f"{replicas} x {WORLD // replicas // self.ep} x {self.ep}"


ROWS = [
    Row(1),
    Row(2),
    Row(4),
    Row(2, shard_dim=0),
    Row(1, fsdp_size=2),
    Row(2, fsdp_size=2),
    Row(2, depth=0),
    Row(2, depth=2),
    Row(2, reshard=False),
    Row(2, checkpointing="none"),
    Row(4, checkpointing="none", tokens=1024),
    Row(4, checkpointing="full", tokens=1024),
]
FAST = ROWS[1:4]


def predict(row: Row) -> int:
    """Bytes at the peak, from sizes alone (``engine/memory_plan.py``)."""
    topology, options = Topology.plan(WORLD, row.ep, row.fsdp_size), sharding(row)
    backend = Backend(copies=True, foreach=False)
    return peak(_sizes(options), topology, options, Batch(row.tokens), backend=backend).total


def _sizes(options: ShardingOptions) -> ModelSizes:
    return ModelSizes.of(_Kind, Qwen3MoeConfig(**MODEL, attn_implementation="sdpa"), options)


def sharding(row: Row) -> ShardingOptions:
    return ShardingOptions(
        param_dtype=torch.float32,
        expert_shard_dim=row.shard_dim,
        checkpointing=row.checkpointing,
        prefetch_depth=row.depth,
        reshard_after_forward=row.reshard,
    )


def measure(folder: Path, row: Row, out: Path) -> None:
    """Train two steps on this rank; rank 0 writes the largest peak of all ranks in the second, and allocation."""
    rank = dist.get_rank()
    meshes = build_meshes("cpu", Topology.plan(WORLD, row.ep, row.fsdp_size))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build_on_meta(_Kind, Qwen3MoeConfig(**MODEL, attn_implementation="sdpa"), torch.float32)
        parallelize(model, meshes, sharding(row))
        materialize(model, "cpu")
        with torch.no_grad():
            for param in model.parameters():
                local_tensor(param).normal_(std=0.05)
        model.train()
        optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-4))
        for step in range(2):
            ids = torch.randint(0, MODEL["vocab_size"], (1, row.tokens), generator=torch.Generator().manual_seed(rank))
            with record_function(f"step {step}"):
                logits = model(input_ids=ids, use_cache=False).logits
                torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
                del logits
                clip_grad_norm_(model.parameters(), 1.0, meshes)
                optimizer.step()
                optimizer.zero_grad()
    peak, largest = peak_of(profiler, "step 1")
    figures = torch.tensor([peak, largest])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    if rank == 0:
        out.write_text(json.dumps(figures.tolist()))


class _Kind:
    @staticmethod
    def from_config(config, dtype, trust_remote_code):
        return Qwen3MoeForCausalLM._from_config(config, dtype=dtype)


def peak_of(profiler: profile, window: str, mapped: Collection[int] = ()) -> tuple[int, int]:
    """Most bytes that were allocated at once in what is recorded as ``window``, and the largest single allocation.

    What was allocated before the profiler began is not counted.

    Where the last to hold a buffer is a thread of gloo's, the profiler does not see its release. So what is allocated
    again at its address ends it.

    Args:
        mapped: sizes of files that are mapped, which the profiler takes for allocations; their pages are the system's.
    """
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    window = next(e for e in kineto.events() if e.name() == window)
    start, end = window.start_ns(), window.start_ns() + window.duration_ns()

    live: dict[int, int] = {}  # address -> bytes
    addresses: list[int] = []  # sorted
    allocated = peak = largest = 0

    def release(address: int) -> int:
        del addresses[bisect.bisect_left(addresses, address)]
        return live.pop(address)

    for event in sorted(_allocations(kineto.experimental_event_tree()), key=lambda e: e.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size < 0:
            allocated -= release(address) if address in live else 0
            continue
        if size in mapped:
            continue
        first = max(bisect.bisect_right(addresses, address) - 1, 0)
        last = bisect.bisect_left(addresses, address + size)
        for gone in [a for a in addresses[first:last] if a + live[a] > address]:
            allocated -= release(gone)
        bisect.insort(addresses, address)
        live[address] = size
        allocated += size
        if start <= event.start_time_ns <= end:
            peak, largest = max(peak, allocated), max(largest, size)
    return peak, largest


def _allocations(events: list) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def run(row: Row) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        run_ranks(measure, WORLD, Path(folder), row, out)
        peak, largest = json.loads(out.read_text())
    stack = FLOAT * MODEL["num_experts"] * 2 * MODEL["moe_intermediate_size"] * MODEL["hidden_size"]
    return Row(**{**asdict(row), "measured": peak, "predicted": predict(row), "largest": largest, "stack": stack})


def cells(row: Row) -> list[str]:
    mib = [f"{bytes_ / 2**20:.1f}" for bytes_ in (row.measured, row.predicted)]
    options = [row.mesh, row.shard_dim, row.depth, row.reshard, row.checkpointing, row.tokens]
    return [*map(str, options), *mib, f"{row.ratio:.3f}", f"{row.largest / row.stack:.2f}"]


def write(rows: list[Row]) -> None:
    where = machine()
    result = {"machine": where, "model": MODEL, "rows": [{**asdict(row), "ratio": round(row.ratio, 3)} for row in rows]}
    text = [
        "Four ranks on CPU, float32, AdamW, the second step. MiB on the rank with the largest peak. Predicted:",
        "`engine/memory_plan.py`, from sizes alone. Largest: the largest single allocation over the stack",
        "`[E, 2I, D]` of a layer's `gate_up_proj`. With `ep` = 1 FSDP gathers whole stacks by design; EP is for that.",
    ]
    on = f"{where['cpu']}; torch {where['versions']['torch']}"
    write_table("memory", result, "Peak memory of a step", "make memory", on, text, COLUMNS, [*map(cells, rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="three rows; writes no result file")
    asked = parser.parse_args()
    rows = [run(row) for row in track(FAST if asked.fast else ROWS, "measuring", console=Console(stderr=True))]
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*cells(row))
    Console(width=140).print(shown)
    if not asked.fast:
        write(rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
