"""Measured peak memory of a training step, allocation by allocation, and the planner's prediction.

Four ranks on a CPU train a tiny Qwen3-MoE in float32 under torch's profiler. It does not see a release by a thread of
gloo, so a step can look larger, never smaller. Each wait for a collective therefore ends with a pause for these
threads, and the smaller peak of two steps counts.
"""

import bisect
import json
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.ulysses import SequenceParallel
from epfsdp2.engine.head.causal_head import CausalHead, Wanted
from epfsdp2.engine.lora.adapters import Lora, lora_of
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.moe.forward import runtime_of
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.planner.memory import Batch, peak
from epfsdp2.engine.planner.model_sizes import ModelSizes
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes, build_sequence_mesh
from tests.support.moe.indexed_backend import stand_in
from tests.support.ranks import run_ranks

__all__ = ["MODEL", "Row", "peak_of", "run"]

WORLD, FLOAT = 4, 4
STEPS = ("step 1", "step 2")  # the first one makes the optimizer's states
PAUSE = 0.005
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
DENSE = {key: size for key, size in MODEL.items() if "experts" not in key and "moe" not in key} | {
    "intermediate_size": 1536
}


@dataclass(frozen=True)
class Row:
    """One setting, and its results in bytes on the rank with the most."""

    ep: int
    fsdp_size: int = -1
    shard_dim: int | str = "auto"
    checkpointing: str = "full"
    depth: int = 1
    reshard: bool = True
    tokens: int = 16
    sp: int = 1
    critic: bool = False
    lora_rank: int = 0
    chunks: int = 1
    dense: bool = False
    by_index: bool = False  # operators that read rows through an index, and fuse the activation
    measured: int = 0
    predicted: int = 0
    largest: int = 0  # single allocation
    stack: int = 0  # of all experts' gate_up_proj in a layer
    imbalance: float = 1.0  # rows that the busiest rank's experts got, over the mean

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


def predict(row: Row) -> int:
    """Bytes at the peak, from sizes and the imbalance of the routers (``engine/planner/memory.py``)."""
    topology, options = Topology.arrange(WORLD, row.ep, row.fsdp_size), sharding(row)
    batch = Batch(row.tokens, imbalance=row.imbalance, sp=row.sp)
    sizes = ModelSizes.built_by(partial(build, row), options)
    return peak(sizes, topology, options, batch, gloo=True).total


def build(row: Row, dtype: torch.dtype = torch.float32) -> Any:
    """The row's model on the meta device."""
    family, sizes = ("qwen3", DENSE) if row.dense else ("qwen3_moe", MODEL)
    config = AutoConfig.for_model(family, **sizes, num_labels=1, attn_implementation="sdpa")
    auto = AutoModelForTokenClassification if row.critic else AutoModelForCausalLM
    model: Any = build_on_meta(auto, config, dtype)
    if row.lora_rank:
        Lora(model, LoraSettings("model", row.lora_rank, row.lora_rank, "all-linear"))
    return model


def sharding(row: Row) -> ShardingOptions:
    return ShardingOptions(
        param_dtype=torch.float32,
        expert_shard_dim=row.shard_dim,
        checkpointing=row.checkpointing,
        prefetch_depth=row.depth,
        reshard_after_forward=row.reshard,
        dispatch_chunks=row.chunks,
        experts_backend="triton" if row.by_index else "auto",
        fuse_dense=False,  # as on a CPU
    )


def measure(folder: Path, row: Row, out: Path) -> None:
    """Train on this rank; rank 0 writes the largest peak of all ranks in a step, and the largest allocation."""
    rank = dist.get_rank()
    _give_threads_a_moment()
    if row.by_index:
        stand_in()
    meshes = build_meshes("cpu", Topology.arrange(WORLD, row.ep, row.fsdp_size))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(rank)
        model = build(row)
        head = None if row.critic else CausalHead(model)
        if row.sp > 1:
            SequenceParallel(model, build_sequence_mesh("cpu", WORLD, row.sp).get_group("sp"), PackedSequences(model))
        parallelize(model, meshes, sharding(row))
        materialize(model, "cpu")
        with torch.no_grad():
            for param in model.parameters():
                local_tensor(param).normal_(std=0.05)
        if row.lora_rank:
            lora_of(model).freeze_base(model)
        model.train()
        optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=0.0))  # routing stays
        for step in ("step 0", *STEPS):
            ids = torch.randint(0, MODEL["vocab_size"], (1, row.tokens), generator=torch.Generator().manual_seed(rank))
            # Given positions, transformers makes a mask, with which sdpa holds scores that it does not without.
            positions = torch.arange(row.tokens * row.sp)[None] if row.sp > 1 else None
            with record_function(step):
                if head is not None:
                    head.wanted = Wanted(ids.roll(-1), torch.ones(ids.shape), with_entropy=True)
                outputs = model(input_ids=ids, position_ids=positions, use_cache=False).logits
                loss = (outputs * outputs).mean() if head is None else -torch.stack(head.take(outputs)).mean()
                loss.backward()
                del outputs, loss
                clip_grad_norm_(model.parameters(), 1.0, meshes)
                optimizer.step()
                optimizer.zero_grad()
    figures = torch.tensor([peak_of(profiler, step) for step in STEPS]).amin(dim=0)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    rows = torch.tensor(float(sum(run.rows_computed for run in map(runtime_of, model.modules()) if run)))
    total, most = rows.clone(), rows
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        out.write_text(json.dumps([*figures.tolist(), float(most / total) * WORLD if total else 1.0]))


def _give_threads_a_moment() -> None:
    wait = dist.Work.wait

    def wait_and_a_moment(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        done = wait(work, *args, **kwargs)
        time.sleep(PAUSE)
        return done

    dist.Work.wait = wait_and_a_moment  # type: ignore[method-assign]


def peak_of(profiler: profile, window: str, mapped: Collection[int] = ()) -> tuple[int, int]:
    """Most bytes that were allocated at once in what is recorded as ``window``, and the largest single allocation.

    Allocations from before the profiler began are not counted. A new allocation at a buffer's address ends the buffer,
    because the profiler does not see releases by threads of gloo.

    Args:
        mapped: sizes of mapped files, which the profiler counts as allocations; their pages are the system's.
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
        measured, largest, imbalance = json.loads(out.read_text())
    stack = FLOAT * MODEL["num_experts"] * 2 * MODEL["moe_intermediate_size"] * MODEL["hidden_size"]
    row = replace(row, measured=measured, largest=largest, stack=stack, imbalance=imbalance)
    return replace(row, predicted=predict(row))
