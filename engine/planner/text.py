"""One mesh's plan in words: what a rank holds at the peak of a step, and what it receives in one."""

from collections.abc import Iterable

from ..topology.mesh import Topology
from .memory import Batch, Moment
from .traffic import Collective

__all__ = ["in_words", "mesh_in_words", "size_in_words", "step_in_words"]


def in_words(topology: Topology, batch: Batch, peak: Moment, traffic: Iterable[Collective]) -> list[str]:
    """Four lines: the mesh, the step, the memory and the traffic."""
    held = [f"{part} {size_in_words(nbytes)}" for part, nbytes in peak.parts.items() if nbytes]
    moved = [f"{c.name} {size_in_words(c.wire)} in {c.calls}" for c in traffic]
    return [
        f"mesh: {mesh_in_words(topology, batch.sp)}",
        f"a step of a rank: {step_in_words(batch)}",
        f"memory at its peak ({peak.when}): {size_in_words(peak.total)} = {' + '.join(held)}",
        f"received in a step: {', '.join(moved) or 'nothing'}",
    ]


def step_in_words(batch: Batch) -> str:
    """``8 micro-batches of 16384 tokens``; where they differ, the tokens are of the largest."""
    return f"{batch.micro_batches} micro-batch{'es' if batch.micro_batches > 1 else ''} of {batch.tokens} tokens"


def mesh_in_words(topology: Topology, sp: int = 1) -> str:
    """``16 ranks = dp_replicate 1 x ep_fsdp 2 x ep 8``, and how rows are shared."""
    t = topology
    rows = "" if sp == 1 else f" = dp {t.world // sp} x sp {sp}"
    return f"{t.world} ranks = dp_replicate {t.dp_replicate} x ep_fsdp {t.ep_fsdp} x ep {t.ep}{rows}"


def size_in_words(nbytes: float) -> str:
    """In the largest of GiB, MiB and KiB of which it is at least one."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.2f} {unit}"
    return f"{nbytes / 1024:.2f} KiB"
