"""Format the plan of one mesh: memory of a rank at the peak of a step, and bytes that it receives in one."""

from collections.abc import Iterable

from ..topology.mesh import Topology
from .memory import Batch, MemoryPoint
from .traffic import Collective

__all__ = ["format_plan", "format_mesh", "format_bytes", "format_step"]


def format_plan(topology: Topology, batch: Batch, peak: MemoryPoint, traffic: Iterable[Collective]) -> list[str]:
    """Format a plan in four lines: the mesh, the step, the memory and the traffic."""
    held = [f"{part} {format_bytes(nbytes)}" for part, nbytes in peak.parts.items() if nbytes]
    moved = [f"{c.name} {format_bytes(c.wire)} in {c.calls}" for c in traffic]
    return [
        f"mesh: {format_mesh(topology, batch.sp)}",
        f"a step of a rank: {format_step(batch)}",
        f"memory at its peak ({peak.when}): {format_bytes(peak.total)} = {' + '.join(held)}",
        f"received in a step: {', '.join(moved) or 'nothing'}",
    ]


def format_step(batch: Batch) -> str:
    """Format a step as ``8 micro-batches of 16384 tokens``; the tokens are those of the largest."""
    return f"{batch.micro_batches} micro-batch{'es' if batch.micro_batches > 1 else ''} of {batch.tokens} tokens"


def format_mesh(topology: Topology, sp: int = 1) -> str:
    """Format a mesh as ``16 ranks = dp_replicate 1 x ep_fsdp 2 x ep 8``, with ``dp x sp`` if ``sp`` is not 1."""
    t = topology
    rows = "" if sp == 1 else f" = dp {t.world // sp} x sp {sp}"
    return f"{t.world} ranks = dp_replicate {t.dp_replicate} x ep_fsdp {t.ep_fsdp} x ep {t.ep}{rows}"


def format_bytes(nbytes: float) -> str:
    """Format a size in the largest of GiB, MiB and KiB in which it is at least 1."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.2f} {unit}"
    return f"{nbytes / 1024:.2f} KiB"
