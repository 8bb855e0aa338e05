"""Estimate the memory and traffic of the running step, next to what is measured.

The estimate at start is for the largest micro-batch that the settings allow, if they limit it. After each update there
is one for the actual micro-batches, which can be compared with the measurement. On a CPU nothing is measured, because
the pages of the process also hold libraries and the allocator's gaps.
"""

import logging
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config.settings import mtp_loss_coef, planned_overrides
from ..config.values import DTYPES, get_setting
from ..fsdp.options import ShardingOptions
from ..moe.deepep import buffer_bytes
from ..optim.settings import wants_muon
from ..topology.mesh import Topology
from .memory import IMBALANCE, Batch, MemoryPoint, OptimizerKind, peak, saved_bytes
from .model_sizes import ModelSizes
from .traffic import Collective, collectives

__all__ = ["StepEstimate", "configured_batch", "estimate_step", "format_mesh", "format_plan", "format_step"]

logger = logging.getLogger("epfsdp2")

_ASSUMED_TOKENS = 1024
_ADAM = ("Adam", "AdamW")


@dataclass
class StepEstimate:
    """The estimate for one training role."""

    sizes: ModelSizes
    topology: Topology
    options: ShardingOptions
    optimizer: OptimizerKind | None
    batch: Batch | None  # the largest step; None if the settings don't limit it
    uncounted: tuple[str, ...]  # descriptions of memory that the estimate leaves out
    command: str  # that estimates every other mesh
    sp: int
    gloo: bool
    measure: Callable[[], int] | None  # the most bytes that torch's allocator ever held, if it counts them
    _seen: Batch | None = None

    def peak(self, batch: Batch) -> MemoryPoint:
        return peak(self.sizes, self.topology, self.options, batch, self.optimizer, self.gloo)

    def lines(self) -> list[str]:
        batch = self.batch or Batch(_ASSUMED_TOKENS, imbalance=IMBALANCE, sp=self.sp)
        traffic = collectives(self.sizes, self.topology, self.options, batch)
        found = [f"plan of {self.sizes.name}", *format_plan(self.topology, batch, self.peak(batch), traffic)]
        if self.batch is None:
            found.append(f"the settings don't say how long sequences are: {_ASSUMED_TOKENS} tokens are an example")
        if self.uncounted:
            found.append(f"not counted: {'; '.join(self.uncounted)}")
        return [*found, f"all meshes: {self.command}"]

    def begin_update(self) -> None:
        self._seen = None

    def see(self, tokens: int) -> None:
        """Record a micro-batch of an update by its tokens on this rank."""
        seen = self._seen or Batch(0, 0, IMBALANCE, self.sp)
        self._seen = Batch(max(seen.tokens, tokens), seen.micro_batches + 1, IMBALANCE, self.sp)

    def metrics(self) -> dict[str, float]:
        """Return the planned GiB of the last update, and the most that was allocated so far.

        The names contain ``max``, so verl takes the maximum over the ranks.
        """
        if self._seen is None:
            return {}
        found = {"memory_max_planned_gib": self.peak(self._seen).total / 2**30}
        if self.measure is not None:
            found["memory_max_allocated_gib"] = self.measure() / 2**30
        return found

    def outcome(self) -> str | None:
        """Format the line that this rank prints at the end; None if nothing was measured."""
        if self._seen is None or self.measure is None:
            return None
        planned, measured = _format_bytes(self.peak(self._seen).total), _format_bytes(self.measure())
        return (
            f"memory of an update of at most {format_step(self._seen)}: planned {planned}; "
            f"measured {measured} (all tensors of the process, the most so far)"
        )


def estimate_step(
    engine: Any,
    model: Any,
    optimizer: Any,
    checkpoint: Any,
    build: Callable[[torch.dtype], Any],
    topology: Topology,
    options: ShardingOptions,
    memory: Any,
    device: str,
) -> StepEstimate | None:
    """Estimate the step of a training role; log a warning and return None if that fails, which must not end the run.

    Args:
        build: as in ``ModelSizes.built_by``.
        memory: a module with ``max_memory_allocated`` in bytes: ``torch.cuda``, or its substitute.
    """
    try:
        options = options if device == "cuda" else replace(options, fuse_dense=False)
        sizes = ModelSizes.built_by(build, options, DTYPES[engine.model_dtype])
        uncounted = _uncounted(engine, model, optimizer, sizes, device) + _outside(engine, model, topology, device)
        if get_setting(checkpoint, "async_save"):
            contents = get_setting(checkpoint, "save_contents") or ()
            copies = _format_bytes(saved_bytes(sizes, topology, options, contents, _known(optimizer)))
            uncounted.append(f"on the host {copies} of copies, kept from save to save (checkpoint.async_save)")
        plan = StepEstimate(
            sizes,
            topology,
            options,
            optimizer=_known(optimizer),
            batch=configured_batch(engine, topology),
            uncounted=tuple(uncounted),
            command=_command(engine, model, optimizer, topology, options, memory),
            sp=engine.ulysses_sequence_parallel_size,
            gloo=device == "cpu",
            measure=None if device == "cpu" else memory.max_memory_allocated,
        )
        plan.lines()
    except Exception as error:  # any family's code may fail on the meta device
        logger.warning("epfsdp2: no plan of this run's memory can be made: %s: %s", type(error).__name__, error)
        return None
    return plan


def configured_batch(engine: Any, topology: Topology) -> Batch | None:
    """Return the largest step that the settings allow; None if they don't limit the length of sequences.

    If they don't limit the number of sequences of an update either, a step is one micro-batch.
    """
    sp, longest = engine.ulysses_sequence_parallel_size, engine._longest_sequence
    each = -(-engine._sequences_per_update * sp // topology.world)  # sequences per rank, which sp ranks share
    if engine.use_dynamic_bsz and engine.max_token_len_per_gpu:
        tokens = engine.max_token_len_per_gpu
        return Batch(tokens, max(1, -(-each * longest // (tokens * sp))), IMBALANCE, sp)
    rows = engine.micro_batch_size_per_gpu
    if rows and longest:
        return Batch(-(-rows * longest // sp), max(1, -(-each // rows)), IMBALANCE, sp)
    return None


def _known(optimizer: Any) -> OptimizerKind | None:
    if wants_muon(optimizer):
        return "muon"
    return "adamw" if get_setting(optimizer, "optimizer") in _ADAM else None


def _uncounted(engine: Any, model: Any, optimizer: Any, sizes: ModelSizes, device: str) -> list[str]:
    kind, chosen = _known(optimizer), get_setting(optimizer, "override_optimizer_config") or {}
    foreach = chosen.get("foreach", device not in ("cpu", "cuda") and not chosen.get("fused"))
    sp = engine.ulysses_sequence_parallel_size
    chunked = engine.entropy_from_logits_with_chunking or engine.entropy_checkpointing or sizes.chunked_logits
    parts = {
        f"activations, and rows to and from experts ({sizes.untraced.rstrip('.')})": sizes.untraced,
        f"states of {get_setting(optimizer, 'optimizer')}": kind is None,
        "matrices while Muon orthogonalises them": kind == "muon",
        "temporaries of foreach kernels (optim.override_optimizer_config.foreach)": foreach,
        "gradients that wait to be reduced (engine.use_no_sync_for_gradient_accumulation)": (
            engine.use_no_sync_for_gradient_accumulation
        ),
        "images": hasattr(model.hf_config, "vision_config"),
        "activations of the layers that draft (engine.mtp_loss_coef)": mtp_loss_coef(engine, model),
        f"{sizes.uncounted} (engine.ulysses_sequence_parallel_size)": sp > 1 and sizes.uncounted,
        "the entropy's copies of the logits (engine.entropy_from_logits_with_chunking)": (
            not chunked and not get_setting(model, "use_fused_kernels")
        ),
    }
    return [part for part, holds in parts.items() if holds]


def _outside(engine: Any, model: Any, topology: Topology, device: str) -> list[str]:
    """Return descriptions of memory that the process holds outside of torch's GPU allocator."""
    groups = topology.communicators(engine.ulysses_sequence_parallel_size) if device == "cuda" else {}
    found = [f"buffers of {len(groups)} NCCL communicators ({', '.join(groups)})"] if groups else []
    if engine.dispatcher == "deepep" and topology.ep > 1:
        row_bytes = model.hf_config.get_text_config().hidden_size * DTYPES["bf16"].itemsize  # all that DeepEP sends
        nbytes = sum(buffer_bytes(topology.ep, row_bytes))
        found.append(f"DeepEP's buffers ({_format_bytes(nbytes)}), which the rollout has to leave free beside it")
    if engine.optimizer_offload and device == "cuda":
        # torch's allocator of pinned memory has blocks of powers of two, and keeps them; 2.11 has no setting for it.
        said = "from torch 2.13 on PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1 leaves blocks at their size"
        found.append(f"on the host up to twice the optimizer's states, pinned (engine.optimizer_offload; {said})")
    return found


def _command(engine: Any, model: Any, optimizer: Any, topology: Topology, options: ShardingOptions, memory: Any) -> str:
    sp = engine.ulysses_sequence_parallel_size
    batch = configured_batch(engine, topology) or Batch(_ASSUMED_TOKENS, sp=sp)
    gpus = int(os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or topology.world)
    gpus = gpus if topology.world % gpus == 0 else topology.world
    what = {
        "model": model.local_path,
        "nodes": topology.world // gpus,
        "gpus": gpus,
        "gib": f"{memory.mem_get_info()[1] / 2**30:.0f}",
        "tokens": batch.tokens * sp,
        "micro-batches": -(-batch.micro_batches // sp),
    }
    if lora_rank := get_setting(model, "lora_rank"):
        what["lora-rank"] = lora_rank
    if _known(optimizer) == "muon":
        what["optimizer"] = "muon"
    words = [word for name, value in what.items() for word in (f"--{name}", str(value))]
    flags = {"--activation-offload": options.activation_offload, "--fused-kernels": options.head_in_root}
    words += [flag for flag, is_set in flags.items() if is_set]
    return shlex.join(["python", "-m", "epfsdp2.recipes.plan", *words, *planned_overrides(engine, options)])


def format_plan(topology: Topology, batch: Batch, point: MemoryPoint, traffic: Iterable[Collective]) -> list[str]:
    """Format a plan in four lines: the mesh, the step, the memory and the traffic."""
    held = [f"{part} {_format_bytes(nbytes)}" for part, nbytes in point.parts.items() if nbytes]
    moved = [f"{c.name} {_format_bytes(c.wire)} in {c.calls}" for c in traffic]
    return [
        f"mesh: {format_mesh(topology, batch.sp)}",
        f"a step of a rank: {format_step(batch)}",
        f"memory at its peak ({point.when}): {_format_bytes(point.total)} = {' + '.join(held)}",
        f"received in a step: {', '.join(moved) or 'nothing'}",
    ]


def format_step(batch: Batch) -> str:
    """Format a step as ``8 micro-batches of 16384 tokens``; the tokens are those of the largest."""
    return f"{batch.micro_batches} micro-batch{'es' if batch.micro_batches > 1 else ''} of {batch.tokens} tokens"


def format_mesh(topology: Topology, sp: int = 1) -> str:
    """Format a mesh as ``16 ranks = dp_replicate 1 x ep_fsdp 2 x ep 8``, with ``dp x sp`` if ``sp`` is not 1."""
    t = topology
    rows = "" if sp == 1 else f" = dp {t.world // sp} x sp {sp}"
    etp = f" x etp {t.etp}" if t.etp > 1 else ""
    return f"{t.world} ranks = dp_replicate {t.dp_replicate} x ep_fsdp {t.ep_fsdp} x ep {t.ep}{etp}{rows}"


def _format_bytes(nbytes: float) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.2f} {unit}"
    return f"{nbytes / 1024:.2f} KiB"
