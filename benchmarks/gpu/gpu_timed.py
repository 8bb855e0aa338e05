"""The sections of ``gpu_check.py`` that measure times: the experts layer, a model's step, its head, weights in FP8."""

import contextlib
import io
import math
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.experts.compare import BASE, OURS, Local
from benchmarks.experts.layer import Geometry, seconds_of
from benchmarks.gpu.gpu_rows import DEVICE, HAS_GPU, MIB, NEEDS_A_GPU, Row
from benchmarks.measure import in_turns
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.head import tiles
from epfsdp2.engine.head.causal_head import CausalHead, Wanted
from epfsdp2.engine.head.log_probs import log_probs_and_entropy
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.moe.dispatch import start_dispatch_plans
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach
from epfsdp2.engine.moe.gemm.backends import backend_named, choose_backend, inverse
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.planner.memory import Batch, peak
from epfsdp2.engine.planner.model_sizes import ModelSizes
from epfsdp2.engine.quantise import blocks
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from epfsdp2.recipes.plan.roofline import Cluster, roofline
from epfsdp2.recipes.plan.tables import time_by_part
from tests.support.models.tiny import relative_error

__all__ = ["head", "quantise", "rates", "speeds", "step"]

WITHIN = 0.1  # of the planned memory
QWEN3_30B = {"head_dim": 128, "num_experts": 128}  # beside transformers' defaults
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
_KERNELS, _NAME = 16, 100  # kernels that have a row, and letters of their names


def rates(geometry: Geometry) -> dict[str, float]:
    """Return TFLOP/s of one large product, GB/s of a copy; and GB/s of permuting rows and summing them.

    The least that these two could move is ``T + T * K`` rows each.
    """
    device, dtype = geometry.device, geometry.torch_dtype
    size = 8192 if device != "cpu" else 512
    square = torch.randn(size, size, device=device, dtype=dtype)
    matrix = 2 * size**3 / seconds_of(lambda: square @ square, device)
    backend = backend_named(choose_backend("auto", device, dtype).name)
    hidden, index, weights = (tensor.detach() for tensor in geometry.inputs())
    moved = (geometry.tokens + index.numel()) * geometry.hidden * dtype.itemsize
    into, out_of = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    (route,) = start_dispatch_plans(index, geometry.experts, None).wait()
    tokens_S, slots_TK = route.slot_order // geometry.top_k, inverse(route.slot_order).view_as(index)
    rows = backend.take(hidden, tokens_S)
    return {
        "matrix_tflops": matrix / 1e12,
        "copy_gbs": 2 * into.numel() / seconds_of(lambda: into.copy_(out_of), device) / 1e9,
        "permute_gbs": moved / seconds_of(lambda: backend.take(hidden, tokens_S), device) / 1e9,
        "sum_gbs": moved / seconds_of(lambda: backend.gather_sum(rows, slots_TK, weights, dtype), device) / 1e9,
    }


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
    sides = [BASE, "torch", *(("triton",) if HAS_GPU else ())]

    def implementation_of(side: str) -> str:
        """Return the experts implementation of a side: transformers' own, or ours with the backend of that name."""
        if side == BASE:
            return BASE
        attach(local.module, ExpertsRuntime(geometry.experts, None, side))
        return OURS

    def passes(side: str) -> dict[str, float]:
        return local.passes(implementation_of(side), 10 if HAS_GPU else 3)

    with contextlib.redirect_stdout(io.StringIO()) as said:
        turns = in_turns({side: partial(passes, side) for side in sides}, 5)
    base = statistics.median(turn["total"] for turn in turns[BASE])
    for side in sides:
        forward, total = (statistics.median(turn[key] for turn in turns[side]) for key in ("forward", "total"))
        shares = [
            flops / seconds / 1e12 / measured["matrix_tflops"]
            for flops, seconds in ((geometry.flops / 3, forward), (geometry.flops * 2 / 3, total - forward))
        ]
        value = f"{1e3 * forward:.3g} + {1e3 * (total - forward):.3g} ms, {shares[0]:.0%} and {shares[1]:.0%} of it"
        is_default = side == "triton"
        wanted = "55 % and 50 %" if is_default else ""
        holds = shares[0] >= 0.55 and shares[1] >= 0.5 if is_default else None
        yield Row(f"{side}: forward + backward", f"{value}, {total / base:.2f} x grouped_mm's", wanted, holds)
    for line in said.getvalue().splitlines():  # how long each tile took, persistent kernels among them
        if line.startswith("engine.experts_backend: "):
            yield Row(*line.removeprefix("engine.experts_backend: ").split(": ", 1))
    for side in sides:
        yield Row(f"{side}: kept for backward", f"{local.kept(implementation_of(side)) / MIB:.0f} MiB")


def step() -> Iterator[Row]:
    """Steps of a model of two layers at full width, on one rank: waits for the device, memory, speed."""
    tokens, sizes = (8192, QWEN3_30B) if HAS_GPU else (64, TINY)
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=2, attn_implementation="sdpa")

    def build(dtype: torch.dtype = torch.float32) -> Any:
        return build_on_meta(AutoModelForCausalLM, config, dtype)

    options = ShardingOptions(
        param_dtype=torch.bfloat16 if HAS_GPU else torch.float32, checkpointing="full", expert_shard_dim=0
    )
    with _one_rank():
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
        ids = torch.randint(0, config.vocab_size, (1, tokens), generator=generator).to(DEVICE)
        positions = torch.arange(tokens, device=DEVICE).remainder(tokens // SEQUENCES)[None]

        def update(micro_batches: int) -> tuple[float, float, Counter]:
            with _waits_for_the_device() as found:
                for _ in range(micro_batches):
                    head.wanted = Wanted(ids.roll(-1), torch.ones(ids.shape, device=DEVICE), with_entropy=True)
                    out = model(input_ids=ids, position_ids=positions, use_cache=False)
                    loss = -torch.stack(head.take(out.logits)).mean()
                    loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0, meshes)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item(), norm.item(), found

        waits, took, measured = Counter(), [], {}
        for number, micro_batches in enumerate((1, 1, 1, 1, 2)):
            if HAS_GPU:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            loss, norm, found = update(micro_batches)
            if number and micro_batches == 1:
                took.append(time.perf_counter() - began)
                waits = found
            measured[micro_batches] = torch.cuda.max_memory_allocated() if HAS_GPU else 0
        seconds = statistics.median(took)
        yield Row("loss and gradient norm", f"{loss:.3f}, {norm:.3f}", "finite", math.isfinite(loss + norm))
        time_planned = roofline(planned_sizes, topology, options, Batch(tokens), Cluster(1, 1), [], tokens // SEQUENCES)
        said = f"{time_planned.step:.3g} s on an H100 planned: {time_by_part(time_planned)}" if HAS_GPU else ""
        yield Row("a step", f"{seconds:.3g} s, {tokens / seconds:.3g} tokens/s", said)
        if not HAS_GPU:
            yield Row("waits for the device", NEEDS_A_GPU)
            yield Row("memory", NEEDS_A_GPU, f"{planned[1] / MIB:.0f} MiB planned")
            return
        places = "; ".join(f"{count} at {place}" for place, count in waits.most_common(6))
        # With one rank no sizes are exchanged; we and transformers ask once each where a row's sequences are.
        asked = sum(waits.values())
        yield Row("waits for the device in forward and backward", f"{asked}: {places}", "at most 2", asked <= 2)
        for n, nbytes in measured.items():
            holds, wanted = abs(nbytes / planned[n] - 1) <= WITHIN, f"{planned[n] / MIB:.0f} MiB planned, within 10 %"
            yield Row(f"memory, {n} micro-batch{'es' * (n > 1)}", f"{nbytes / MIB:.0f} MiB", wanted, holds)
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        yield Row("memory outside of torch's allocator", f"{outside / MIB:.0f} MiB")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            update(1)
            torch.cuda.synchronize()
        yield from _kernels_by_time(profiler)


def _kernels_by_time(profiler: profile) -> Iterator[Row]:
    times: Counter = Counter()
    for event in profiler.key_averages():
        times[event.key] += event.self_device_time_total / 1e3
    whole = times.total()
    yield Row("all kernels", f"{whole:.1f} ms")
    for name, milliseconds in times.most_common(_KERNELS):
        yield Row(f"kernel {name[:_NAME]}", f"{milliseconds:.1f} ms, {milliseconds / whole:.0%}")


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
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


def head() -> Iterator[Row]:
    """Log-probs and entropies of 8,192 tokens with Qwen3's vocabulary, by the kernels and by torch's operators."""
    from epfsdp2.engine.head import triton_tiles  # which is interpreted, or is not, from its import on

    tokens, outputs, width, dtype = (8192, 151936, 2048, torch.bfloat16) if HAS_GPU else (8, 64, 16, torch.float32)
    generator = torch.Generator(DEVICE).manual_seed(0)
    leaves = [
        torch.randn(size, width, device=DEVICE, generator=generator).mul_(scale).to(dtype).requires_grad_()
        for size, scale in ((tokens, 1.0), (outputs, 0.1))
    ]
    labels = torch.randint(outputs, (tokens,), device=DEVICE, generator=generator)
    ones, grad = torch.ones(tokens, device=DEVICE), torch.randn(tokens, 2, device=DEVICE, generator=generator)
    found, seconds = {}, {}

    def update() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = log_probs_and_entropy(leaves[0], leaves[1], None, labels, ones, True)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for kernels in (None, triton_tiles):
        with mock.patch.object(tiles, "_kernels", lambda *_, kernels=kernels: kernels):
            found[kernels] = update()
            seconds[kernels] = seconds_of(update, DEVICE)
    errors = [*map(relative_error, found[triton_tiles], found[None])]
    error = torch.tensor(errors).max().item()  # NaN if one is
    bound = 1e-2 if HAS_GPU else 1e-5
    yield Row("values and gradients, kernels beside torch", f"{error:.1e}", f"< {bound}", error < bound)
    if HAS_GPU:
        yield Row("forward + backward", f"{1e3 * seconds[triton_tiles]:.3g} ms, torch {1e3 * seconds[None]:.3g} ms")


def quantise() -> Iterator[Row]:
    """Weights in FP8, bit for bit as torch's operators make them, and the time beside a cast to bfloat16."""
    if not HAS_GPU:
        yield Row("kernels of FP8 blocks", NEEDS_A_GPU)
        return
    from triton.testing import do_bench

    scheme = blocks.Blocks(128)

    def fp8(values: torch.Tensor, held: IndexRange) -> tuple[torch.Tensor, torch.Tensor]:
        scales = scheme.scales(scheme.maxima(values, held))
        out = torch.empty_like(values, dtype=scheme.dtype)
        scheme.quantise(values, scales, held, out)
        return scales, out

    def all_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        held = IndexRange((0, 100, 50), (len(weight), 1500, 1999))
        whole, part = fp8(weight, IndexRange.of(weight.shape)), fp8(weight[held.slices], held)
        rounded = weight.clone()
        scheme.round_in_place(rounded)
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
    whole = IndexRange.of(weight.shape)
    cast, took = (do_bench(what, return_mode="median") for what in (weight.bfloat16, lambda: fp8(weight, whole)))
    yield Row("scales and FP8 values of float32", f"{took / cast:.2f} x a cast to bfloat16")
