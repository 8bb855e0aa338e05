"""What ``gpu_check.py`` looks at, each section in a process of its own; on a machine without a GPU everything that can.

A section yields rows. Sizes are those of a GPU of 80 GB, or so small that Triton's interpreter and gloo take seconds.
"""

import asyncio
import contextlib
import copy
import io
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.experts.compare import BASE, OURS, Local, rates
from benchmarks.experts.layer import Geometry
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.head.causal_head import CausalHead, Wanted
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.planner.memory import Batch, peak
from epfsdp2.engine.planner.model_sizes import ModelSizes
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from epfsdp2.rollout.quantise import blocks
from epfsdp2.rollout.remote.process_group import Members, SyncGroup
from tests.support.engine.sharded import sharded_model, whole_tensor
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.moe.experts import FAMILIES, Config, make, routed, tokens_with
from tests.support.ranks import run_ranks
from tests.support.rollout.verls_transport import find_verls_transport, receive

__all__ = ["SECTIONS", "Row"]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
NEEDS_A_GPU = "needs a GPU"
# A kernel may be this much further from float64 than torch's operators are, which round in other places.
WORSE = 2
RELATIVE = 1e-5  # of float32, over processes
WITHIN = 0.1  # of the planned memory
QWEN3_30B = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}
SEQUENCES = 8  # of a packed row
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """What was looked at, what came out, and what it had to be; ``holds`` is None where nothing was asked."""

    what: str
    value: str
    wanted: str = ""
    holds: bool | None = None


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernels() -> Iterator[Row]:
    """Outputs and all gradients of an experts layer, as near to float64 as torch's operators are, twice bit for bit."""
    wide = type("Wide", (Config,), {"hidden_size": 512, "intermediate_size": 384, "moe_intermediate_size": 384})
    sizes = [(Config, 11), (Config, 1), (wide, 700)] if HAS_GPU else [(Config, 11), (Config, 1)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32,)
    for backend, dtype in itertools.product(("triton", "mixed") if HAS_GPU else ("triton",), dtypes):
        worst, at, repeats = 0.0, "", True
        for family, (config, tokens) in itertools.product(FAMILIES, sizes):
            module = make(family, dtype, config=config).to(DEVICE)
            inputs = [tensor.to(DEVICE) for tensor in routed(tokens, dtype, width=config.hidden_size)]
            exact = tokens_with(copy.deepcopy(module).double(), "reference", *_doubled(inputs))
            twin, found, again = (_in_dirty_memory(module, name, inputs) for name in ("torch", backend, backend))
            repeats &= all(torch.equal(found[name], again[name]) for name in found)
            for name, value in found.items():
                error, allowed = relative_error(value, exact[name]), relative_error(twin[name], exact[name])
                ratio = error / (allowed + torch.finfo(dtype).eps)
                if not ratio <= worst:  # NaN counts
                    worst, at = ratio, f"{name} of {family}, {tokens} tokens"
        name = str(dtype).removeprefix("torch.")
        wanted = f"<= {WORSE} x torch's error"
        yield Row(f"{backend}, {name}", f"{worst:.2f} x ({at})", wanted, worst <= WORSE)
        yield Row(f"{backend}, {name}, run twice", "equal" if repeats else "differs", "equal", repeats)


def _doubled(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]


def _in_dirty_memory(module: Any, backend: str, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is not written shows: freed memory holds NaN."""
    dirty = [torch.full((size,), float("nan"), device=DEVICE) for size in (1 << 8, 1 << 14, 1 << 20, 1 << 22)]
    del dirty
    return tokens_with(module, backend, *inputs)


# -- rates ------------------------------------------------------------------------------------------------------------


def speeds() -> Iterator[Row]:
    """The experts layer of Qwen3-30B at 16k tokens: share of the matrix rate that the same run measured."""
    if HAS_GPU:
        geometry = Geometry("Qwen3-30B-A3B, 16k tokens", 16384, 128, 8, 2048, 768, "bfloat16", DEVICE)
    else:
        geometry = Geometry("small", 64, 8, 2, 64, 48)
    measured = rates(geometry)
    yield Row("matrix rate", f"{measured['matrix_tflops']:.3g} TFLOP/s")
    yield Row("copy", f"{measured['copy_gbs']:.3g} GB/s")
    for name in ("permute", "sum"):
        share = measured[f"{name}_gbs"] / measured["copy_gbs"]
        yield Row(f"{name} rows", f"{share:.0%} of the copy", ">= 70 %", share >= 0.7 if HAS_GPU else None)
    local = Local(geometry)
    sides = [BASE, "torch", *(("mixed", "triton") if HAS_GPU else ())]

    def implementation_of(side: str) -> str:
        """What transformers computes a side by: its own function, or ours with the backend of that name."""
        if side == BASE:
            return BASE
        attach(local.module, ExpertsRuntime(geometry.experts, None, side))
        return OURS

    times: dict[str, dict[str, list[float]]] = {side: {"forward": [], "total": []} for side in sides}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for turn, side in itertools.product(range(6), sides):
            took = local.passes(implementation_of(side), 3)
            if turn:  # the first compiles
                times[side]["forward"].append(took["forward"])
                times[side]["total"].append(took["total"])
    base = statistics.median(times[BASE]["total"])
    for side in sides:
        forward, total = (statistics.median(times[side][key]) for key in ("forward", "total"))
        shares = [
            flops / seconds / 1e12 / measured["matrix_tflops"]
            for flops, seconds in ((geometry.flops / 3, forward), (geometry.flops * 2 / 3, total - forward))
        ]
        value = f"{1e3 * forward:.3g} + {1e3 * (total - forward):.3g} ms, {shares[0]:.0%} and {shares[1]:.0%} of it"
        is_default = HAS_GPU and side == "mixed"
        wanted = "55 % and 50 %" if is_default else ""
        holds = shares[0] >= 0.55 and shares[1] >= 0.5 if is_default else None
        yield Row(f"{side}: forward + backward", f"{value}, {total / base:.2f} x grouped_mm's", wanted, holds)
    for line in said.getvalue().splitlines():  # how long each tile took, persistent kernels among them
        if line.startswith("engine.experts_backend: "):
            yield Row(*line.removeprefix("engine.experts_backend: ").split(": ", 1))
    for side in sides:
        yield Row(f"{side}: kept for backward", f"{local.kept(implementation_of(side)) / MIB:.0f} MiB")


# -- a step -----------------------------------------------------------------------------------------------------------


def step() -> Iterator[Row]:
    """Steps of a model of two layers at full width, on one rank: waits for the device, memory, speed."""
    tokens, sizes = (8192, QWEN3_30B) if HAS_GPU else (64, TINY)

    def build(dtype: torch.dtype = torch.float32) -> Any:
        config = Qwen3MoeConfig(**sizes, num_hidden_layers=2, attn_implementation="sdpa")
        return build_on_meta(AutoModelForCausalLM, config, dtype)

    options = ShardingOptions(
        param_dtype=torch.bfloat16 if HAS_GPU else torch.float32, checkpointing="full", expert_shard_dim=0
    )
    with tempfile.TemporaryDirectory() as folder, _one_rank(folder, "nccl" if HAS_GPU else "gloo"):
        topology = Topology.arrange(1, 1, -1)
        meshes = build_meshes(DEVICE, topology)
        planned_sizes = ModelSizes.built_by(build, options)
        planned = {n: peak(planned_sizes, topology, options, Batch(tokens, n)).total for n in (1, 2)}
        model = build()
        PackedSequences(model)
        head = CausalHead(model)
        parallelize(model, meshes, options)
        materialize(model, DEVICE)
        with torch.no_grad():
            for param in model.parameters():
                local_tensor(param).normal_(std=0.02)
        model.train()
        optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-4))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, sizes["vocab_size"], (1, tokens), generator=generator).to(DEVICE)
        positions = torch.arange(tokens, device=DEVICE).remainder(tokens // SEQUENCES)[None]
        waits, took, measured = Counter(), [], {}
        for number, micro_batches in enumerate((1, 1, 1, 1, 2)):
            if HAS_GPU:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            with _waits_for_the_device() as found:
                for _ in range(micro_batches):
                    head.wanted = Wanted(ids.roll(-1), torch.ones(ids.shape, device=DEVICE), with_entropy=True)
                    out = model(input_ids=ids, position_ids=positions, use_cache=False)
                    loss = -torch.stack(head.take(out.logits)).mean()
                    loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0, meshes)
            optimizer.step()
            optimizer.zero_grad()
            final = loss.item()
            if number and micro_batches == 1:
                took.append(time.perf_counter() - began)
                waits = found
            measured[micro_batches] = torch.cuda.max_memory_allocated() if HAS_GPU else 0
        seconds = statistics.median(took)
        finite = torch.isfinite(torch.tensor([final, float(norm)])).all().item()
        yield Row("loss and gradient norm", f"{final:.3f}, {float(norm):.3f}", "finite", bool(finite))
        yield Row("a step", f"{seconds:.3g} s, {tokens / seconds:.3g} tokens/s")
        if not HAS_GPU:
            yield Row("waits for the device", NEEDS_A_GPU)
            yield Row("memory", NEEDS_A_GPU, f"{planned[1] / MIB:.0f} MiB planned")
            return
        places = "; ".join(f"{count} at {place}" for place, count in waits.most_common(6))
        # With one rank no sizes are exchanged; a micro-batch asks once where its sequences are.
        asked = sum(waits.values())
        yield Row("waits for the device in forward and backward", f"{asked}: {places}", "at most 1", asked <= 1)
        for n, nbytes in measured.items():
            holds, wanted = abs(nbytes / planned[n] - 1) <= WITHIN, f"{planned[n] / MIB:.0f} MiB planned, within 10 %"
            yield Row(f"memory, {n} micro-batch{'es' * (n > 1)}", f"{nbytes / MIB:.0f} MiB", wanted, holds)
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        yield Row("memory outside of torch's allocator", f"{outside / MIB:.0f} MiB")


@contextlib.contextmanager
def _one_rank(folder: str, backend: str) -> Iterator[None]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _waits_for_the_device() -> Iterator[Counter]:
    """Count the operations for which the host waited, by line of Python."""
    found: Counter = Counter()
    if not HAS_GPU:
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


# -- processes --------------------------------------------------------------------------------------------------------


def _against_one_process(folder: Path, ep: int, out: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = token_batch(world).to(DEVICE)
    reference = reference_model(folder).to(DEVICE).train()
    token_loss(reference, ids).backward()
    model, meshes = sharded_model(folder, world, ep, device=DEVICE)
    model.train()
    token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
    wanted = dict(reference.named_parameters())
    errors = [relative_error(whole_tensor(p.grad), wanted[name].grad) for name, p in model.named_parameters()]
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    errors.append(abs(clip_grad_norm_(model.parameters(), 1.0, meshes).item() / norm.item() - 1))
    if rank == 0:
        out.write_text(json.dumps(max(errors)))


def processes() -> Iterator[Row]:
    """Gradients of two and four processes, on the one GPU over gloo, beside one process."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, out = save_qwen3_moe(Path(folder) / "model"), Path(folder) / "error.json"
        for world, ep in ((2, 1), (2, 2), (4, 2), (4, 4)) if HAS_GPU else ((2, 2), (4, 4)):
            run_ranks(_against_one_process, world, checkpoint, ep, out, backend="gloo")
            error = json.loads(out.read_text())
            yield Row(f"{world} ranks, ep {ep}", f"{error:.1e}", f"< {RELATIVE}", error < RELATIVE)


# -- weights ----------------------------------------------------------------------------------------------------------


def weights() -> Iterator[Row]:
    """From our sender to verl's receiver in another process, by CUDA IPC (shared memory on a CPU)."""
    find_verls_transport()
    from epfsdp2.rollout.transport.sender import is_verl_sender, new_sender

    sizes = [(1000,), (1 << 20,), (3, 5, 7), (1 << 22,), (2,)]  # the fourth fills the bucket
    sizes += [(5 << 20,)] if HAS_GPU else []  # larger than it, sent alone
    tensors = {f"{i}": torch.randn(size).to(DEVICE, torch.bfloat16) for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        handle, spawn = f"ipc://{folder}/socket", mp.get_context("spawn")
        results = spawn.SimpleQueue()
        worker = spawn.Process(target=receive, args=(handle, HAS_GPU, results), daemon=True)
        worker.start()
        before = torch.cuda.memory_reserved() if HAS_GPU else 0
        sender = new_sender(handle, bucket_size_mb=8, use_shm=not HAS_GPU)

        async def every(bucket: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
            for item in tensors.items():
                yield item

        asyncio.run(sender.async_send_weights(every))
        received = results.get()
        worker.join(30)
        left = torch.cuda.memory_reserved() - before if HAS_GPU else 0
    wanted = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    same = received == wanted
    value = f"{len(received)} of {len(wanted)}, sums {'equal' if same else 'differ'}"
    yield Row("tensors received", value, "equal", same)
    ours = not is_verl_sender(sender)
    yield Row("sender", "ours" if ours else "verl's: another release of verl", "ours", ours)
    if HAS_GPU:
        yield Row("still reserved afterwards", f"{left / MIB:.0f} MiB", "0 MiB", left <= 0)
    else:
        yield Row("still reserved afterwards", NEEDS_A_GPU)


def quantise() -> Iterator[Row]:
    """Weights in FP8, bit for bit as torch's operators make them, and the time beside a cast to bfloat16."""
    if not HAS_GPU:
        yield Row("kernels of FP8 blocks", NEEDS_A_GPU)
        return
    from triton.testing import do_bench

    def fp8(values: torch.Tensor, first: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.scales_of(blocks.block_maxima(values, first, 128))
        out = torch.empty_like(values, dtype=blocks.FP8)
        blocks.quantise(values, scales, first, 128, out)
        return scales, out

    def all_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        whole, part = fp8(weight, (0, 0)), fp8(weight[:, 100:1500, 50:1999], (100, 50))
        rounded = weight.clone()
        blocks.round_in_place(rounded, 128)
        names = ("scales", "FP8", "a shard's scales", "its FP8", "rounded")
        return dict(zip(names, (*whole, *part, rounded), strict=True))

    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(4, 1536, 2048, device=DEVICE).mul_(torch.randn(2048, device=DEVICE).exp()).to(dtype)
        found = all_of(weight)
        with mock.patch.object(blocks, "_kernels", lambda device: None):
            wanted = all_of(weight)
        differ = [name for name in found if not torch.equal(found[name].float(), wanted[name].float())]
        yield Row(f"of {dtype}, kernels and torch", ", ".join(differ) or "equal", "equal", not differ)
    weight = torch.randn(64, 1536, 2048, device=DEVICE)
    cast, took = (do_bench(what, return_mode="median") for what in (weight.bfloat16, lambda: fp8(weight, (0, 0))))
    yield Row("scales and FP8 values of float32", f"{took / cast:.2f} x a cast to bfloat16")


def nccl() -> Iterator[Row]:
    """The group between trainer and rollout, of one rank: made, used, and left."""
    group = SyncGroup(dist.HashStore(), 0, Members(1, ("one",)), DEVICE, 30.0)
    bucket = torch.arange(1000.0, device=DEVICE)
    group.broadcast(bucket).wait()
    assert group.process_group is not None
    work = group.process_group.allreduce([bucket])
    work.wait()
    if HAS_GPU:
        torch.cuda.synchronize()
    same = torch.equal(bucket.cpu(), torch.arange(1000.0))
    group.close()
    backend = "NCCL" if HAS_GPU else "gloo"
    yield Row(f"{backend} with one rank: broadcast, all-reduce, abort", "right" if same else "wrong", "right", same)


SECTIONS: dict[str, tuple[Callable[[], Iterator[Row]], float]] = {
    "kernels": (kernels, 300.0),
    "speeds": (speeds, 120.0),
    "step": (step, 120.0),
    "processes": (processes, 120.0),
    "weights": (weights, 120.0),
    "quantise": (quantise, 120.0),
    "nccl": (nccl, 120.0),
}
"""By name: what yields the rows, and the seconds that it may take."""
