"""The sections of ``gpu_check.py``, each in a process of its own.

A section yields rows. Sizes are those of a GPU of 80 GB, or so small that Triton's interpreter and gloo take seconds.
"""

import asyncio
import copy
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.gpu_attention import attention
from benchmarks.gpu.gpu_contention import contention
from benchmarks.gpu.gpu_dense import dense, invariant
from benchmarks.gpu.gpu_rows import DEVICE, HAS_GPU, MIB, Row
from benchmarks.gpu.gpu_timed import head, quantise, speeds, step
from benchmarks.measure import figures_of
from epfsdp2.engine.checkpoint.background import copied_to_host
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.rollout.remote.process_group import Members, SyncGroup
from tests.support.engine.sharded import sharded_model, whole_tensor
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.moe.experts import FAMILIES, Config, make, routed, tokens_with
from tests.support.rollout.verls_transport import find_verls_transport, receive

__all__ = ["SECTIONS"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32,)
# A kernel in half precision may be this much further from float64 than torch's operators are, which round elsewhere.
WORSE = 2
RELATIVE = 1e-5  # of float32
SAVED, NBYTES = (8, 1 << 30) if HAS_GPU else (2, 1 << 20)
LEAST_GBS = 5.0  # GB/s of the second save: a thread that copies to new memory has 2 to 3


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernels() -> Iterator[Row]:
    """Outputs and all gradients of an experts layer, beside float64 and torch's operators, twice bit for bit."""
    if not HAS_GPU:
        yield from map(_compared, DTYPES)
        return
    with ProcessPoolExecutor(len(DTYPES), mp.get_context("spawn")) as pool:  # most of the time compiles
        yield from pool.map(_compared, DTYPES)


def _compared(dtype: torch.dtype) -> Row:
    wide = type("Wide", (Config,), {"hidden_size": 512, "intermediate_size": 384, "moe_intermediate_size": 384})
    sizes = [(Config, 11), (Config, 1), (wide, 700)] if HAS_GPU else [(Config, 11), (Config, 1)]
    errors, ratios, repeats = {}, {}, True
    for family, (config, tokens) in itertools.product(FAMILIES, sizes):
        module = make(family, dtype, config=config).to(DEVICE)
        inputs = [tensor.to(DEVICE) for tensor in routed(tokens, dtype, width=config.hidden_size)]
        doubled = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
        exact = tokens_with(copy.deepcopy(module).double(), "reference", *doubled)
        twin, found, again = (_in_dirty_memory(module, name, inputs) for name in ("torch", "triton", "triton"))
        repeats &= all(torch.equal(found[name], again[name]) for name in found)
        for name, value in found.items():
            at = f"{name} of {family}, {tokens} tokens"
            errors[at] = relative_error(value, exact[name])
            ratios[at] = errors[at] / (relative_error(twin[name], exact[name]) + torch.finfo(dtype).eps)
    (error, _), (ratio, at) = _largest(errors), _largest(ratios)
    value = f"{error:.1e}; {ratio:.2f} x torch's ({at}); run twice {'equal' if repeats else 'different'}"
    if dtype == torch.float32:
        wanted, holds = f"< {RELATIVE}", error < RELATIVE
    else:
        wanted, holds = f"<= {WORSE} x torch's", ratio <= WORSE
    return Row(str(dtype).removeprefix("torch."), value, f"{wanted}, equal", holds and repeats)


def _largest(named: dict[str, float]) -> tuple[float, str]:
    values = torch.tensor([*named.values()])  # whose largest is NaN if one is
    return values.max().item(), [*named][int(values.argmax())]


def _in_dirty_memory(module: Any, backend: str, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fill freed memory with NaN, so that values that a kernel does not write show."""
    dirty = [torch.full((size,), float("nan"), device=DEVICE) for size in (1 << 8, 1 << 14, 1 << 20, 1 << 22)]
    del dirty
    return tokens_with(module, backend, *inputs)


# -- processes --------------------------------------------------------------------------------------------------------


def _against_one_process(folder: Path, ep: int) -> float:
    """Return the largest relative error of a gradient or of the norm; collective."""
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
    return torch.tensor(errors).max().item()  # NaN if one is


def processes() -> Iterator[Row]:
    """Gradients of two and four processes, on the one GPU over gloo, beside one process."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_qwen3_moe(Path(folder) / "model")
        for world, ep in ((2, 1), (2, 2), (4, 2), (4, 4)) if HAS_GPU else ((2, 2), (4, 4)):
            error = figures_of(_against_one_process, world, checkpoint, ep, backend="gloo")
            yield Row(f"{world} ranks, ep {ep}", f"{error:.1e}", f"< {RELATIVE}", error < RELATIVE)


# -- weights ----------------------------------------------------------------------------------------------------------


def weights() -> Iterator[Row]:
    """From our sender to verl's receiver in another process, by CUDA IPC (shared memory on a CPU)."""
    find_verls_transport()
    from epfsdp2.rollout.transport.sender import sender_class

    sizes = [(1000,), (1 << 20,), (3, 5, 7), (1 << 22,), (2,)]  # the fourth fills the bucket
    sizes += [(5 << 20,)] if HAS_GPU else []  # larger than it, sent alone
    tensors = {f"{i}": torch.randn(size).to(DEVICE, torch.bfloat16) for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        handle, spawn = f"ipc://{folder}/socket", mp.get_context("spawn")
        results = spawn.SimpleQueue()
        worker = spawn.Process(target=receive, args=(handle, HAS_GPU, results), daemon=True)
        worker.start()
        before = torch.cuda.memory_reserved() if HAS_GPU else 0
        sender = sender_class()(handle, bucket_size_mb=8, use_shm=not HAS_GPU)

        async def every() -> AsyncIterator[tuple[str, torch.Tensor]]:
            for item in tensors.items():
                yield item

        asyncio.run(sender.async_send_weights(every()))
        received = results.get()
        worker.join(30)
        left = torch.cuda.memory_reserved() - before if HAS_GPU else 0
    wanted = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    same = received == wanted
    value = f"{len(received)} of {len(wanted)}, sums {'equal' if same else 'differ'}"
    yield Row("tensors received", value, "equal", same)
    ours = type(sender).__name__ == "StreamSender"
    yield Row("sender", "ours" if ours else "verl's: another release of verl", "ours", ours)
    if HAS_GPU:
        yield Row("still reserved afterwards", f"{left / MIB:.0f} MiB", "0 MiB", left <= 0)


# -- saves and NCCL ---------------------------------------------------------------------------------------------------


def saves() -> Iterator[Row]:
    """Copies of a first save in the background, to new memory, and of the next, to the same."""
    tensors = {str(i): torch.randint(256, (NBYTES,), dtype=torch.uint8, device=DEVICE) for i in range(SAVED)}
    kept: dict[str, torch.Tensor] = {}
    for name in ("first", "second"):
        began = time.perf_counter()
        kept = copied_to_host(tensors, kept)
        rate = SAVED * NBYTES / (time.perf_counter() - began) / 1e9
        bounded = HAS_GPU and name == "second"
        wanted = f"at least {LEAST_GBS} GB/s" if bounded else ""
        yield Row(f"{name} save", f"{rate:.1f} GB/s", wanted, rate >= LEAST_GBS if bounded else None)
    same = all(torch.equal(kept[name], tensor.cpu()) for name, tensor in tensors.items())
    yield Row("copies", "equal" if same else "differ", "equal", same)


def nccl() -> Iterator[Row]:
    """The group between trainer and rollout, of one rank: made, used, and left."""
    group = SyncGroup(dist.HashStore(), 0, Members(1, 1), DEVICE, 30.0)
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
    "head": (head, 120.0),
    "dense": (dense, 120.0),
    "invariant": (invariant, 120.0),
    "attention": (attention, 180.0),
    "contention": (contention, 120.0),
    "saves": (saves, 120.0),
    "processes": (processes, 120.0),
    "weights": (weights, 120.0),
    "quantise": (quantise, 120.0),
    "nccl": (nccl, 120.0),
}
"""By name: the function that yields the rows, and its limit in seconds."""
