"""What a kernel may need of a GPU, and what it can reach there by arithmetic: bytes from HBM, and a roofline.

Nothing here was measured. A predicted figure is an upper bound: it knows the resources below and no latency but that
of a CTA that is alone on its SM.
"""

import functools
import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = [
    "GPUS",
    "Compiled",
    "Gpu",
    "Launch",
    "Routing",
    "Work",
    "hbm_bytes",
    "mm_order",
    "outer_order",
    "over_budget",
    "routed",
    "seconds",
    "spills_in_loop",
    "work_of",
]

Panel = tuple[object, float]  # a name and its bytes


@dataclass(frozen=True)
class Gpu:
    """``flops`` of dense half-precision products at the boost clock; ``fp32`` of FMAs; ``hbm`` usable bytes a second.

    ``shared`` is bytes of shared memory a second over all SMs.
    """

    name: str
    sms: int
    flops: float
    fp32: float
    hbm: float
    l2: float
    shared: float


# 128 bytes of shared memory per clock and SM; nine tenths of the HBM's data sheet.
GPUS = {
    80: Gpu("A100 SXM 80GB", 108, 312e12, 19.5e12, 1.8e12, 40e6, 108 * 128 * 1.41e9),
    90: Gpu("H100 SXM", 132, 989e12, 67e12, 3.0e12, 50e6, 132 * 128 * 1.83e9),
    100: Gpu("B200", 148, 2250e12, 75e12, 7.2e12, 126e6, 148 * 128 * 1.85e9),
}
# For over_budget.
GEMMS = ("grouped_mm", "grouped_mm_gate", "grouped_mm_gate_backward", "grouped_outer")
_EPILOGUE_STACK = 64  # bytes of a thread that may be spilled where a tile is finished
_PRODUCTS = (re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b"), re.compile(r"\bFFMA\b"))  # in half precision, in float32
_STACK = re.compile(r"\b(STL|LDL)\b")
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes of an SM; the system takes 1 KiB of each CTA
_REGISTERS, _THREADS, _CTAS = 65536, 2048, 32  # of an SM
SUSTAINED = 0.8  # of the boost clock under a load of matrix products
_FILL = 1.5e-6  # seconds that a CTA waits for its first operands
_LOOK_UP = 0.7e-6  # more of them if it has to read an index first


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs of an SM of ``arch``, and its instructions in PTX: matrix products and asynchronous loads.

    ``stack`` is bytes of a thread; ``spills_in_loop`` says that they are used between the first product and the last.
    """

    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    stack: int
    spills_in_loop: bool
    shared: int
    instructions: dict[str, int]

    @property
    def ctas(self) -> int:
        """How many run on an SM at a time."""
        by_registers = _REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        by_shared = _SHARED[self.arch] // (self.shared + 1024)
        return min(by_registers, by_shared, _THREADS // (32 * self.warps), _CTAS)


@dataclass(frozen=True)
class Launch:
    """One launch: what it compiled to, its programs, its arguments that are numbers, and the bytes of its tensors."""

    compiled: Compiled
    programs: int
    dtype: str
    values: dict[str, Any]
    nbytes: dict[str, int]
    is_first_choice: bool  # the tile that runs where none is measured

    @property
    def tile(self) -> tuple[int, int, int] | None:
        return tuple(self.values[size] for size in ("BM", "BN", "BK")) if "BM" in self.values else None  # type: ignore[return-value]

    @property
    def is_scattered(self) -> bool:
        """Whether results are stored through an index."""
        return bool(self.values.get("HAS_ORDER"))

    @property
    def is_persistent(self) -> bool:
        return "SPECIALIZED" in self.values

    @property
    def indexed(self) -> str:
        """The operand whose rows are read through an index: ``a`` or ``b``, or none."""
        named = {"HAS_INDEX": "a", "A_INDEXED": "a", "B_INDEXED": "b"}
        return "".join(operand for flag, operand in named.items() if self.values.get(flag))


def spills_in_loop(sass: list[str]) -> bool:
    """Whether machine code, by lines, uses the stack between its first product and its last."""
    for product in _PRODUCTS:
        lines = [number for number, line in enumerate(sass) if product.search(line)]
        if lines:
            return any(_STACK.search(line) for line in sass[lines[0] : lines[-1]])
    return True


def over_budget(launch: Launch) -> list[str]:
    """Say which budgets a launch is over."""
    made, problems = launch.compiled, []
    if made.stack > _EPILOGUE_STACK or made.spills_in_loop:
        problems.append(f"{made.stack} bytes of stack{', used in its loop' if made.spills_in_loop else ''}")
    if made.kernel in GEMMS:
        product = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[made.arch]
        if launch.dtype != "float32" and not made.instructions[product]:
            problems.append(f"no {product}")
        loads, wanted = made.instructions["cp.async"], _asynchronous_loads(launch)
        if _is_aligned(launch) and loads < wanted:
            problems.append(f"{loads} asynchronous loads, not {wanted}")
        loads, wanted = made.instructions["TMA"], _loads_by_tma(launch)
        if loads < wanted:
            problems.append(f"{loads} loads by TMA, not {wanted}: its loops are not one")
        if launch.values.get("SPECIALIZED") and not made.instructions["specialized warps"]:
            problems.append("no specialized warps")
    if made.ctas < (designed := _designed_ctas(launch)):
        problems.append(
            f"{made.ctas} CTAs per SM by {made.registers} registers and {made.shared} bytes, not {designed}"
        )
    where = f"{made.kernel} {launch.tile} with {made.stages} stages, sm_{made.arch}, {launch.dtype}"
    return [f"{where}: {problem}" for problem in problems]


def _designed_ctas(launch: Launch) -> int:
    """Return how many CTAs of a kernel an SM shall have, so that one computes while another loads or stores."""
    if launch.compiled.kernel not in GEMMS:
        return 4
    return 2 if launch.is_first_choice and _is_aligned(launch) else 1


def _asynchronous_loads(launch: Launch) -> int:
    """Return how many loads of 16 bytes a thread has if both operands of each stage are loaded asynchronously.

    Where ``grouped_outer`` loads an index, the rows have half of the stages.
    """
    made, (bm, bn, bk) = launch.compiled, launch.tile or (0, 0, 0)
    stages = (made.stages + 1) // 2 if made.kernel == "grouped_outer" and launch.indexed else made.stages
    columns = 2 * bn if made.kernel == "grouped_mm_gate" else bn
    if launch.is_persistent:  # all else comes by TMA
        bm, columns = bm if launch.indexed and not launch.values["GATHERS"] else 0, 0
    nbytes = (bm + columns) * bk * (4 if launch.dtype == "float32" else 2)
    return stages * (nbytes // (16 * 32 * made.warps))


def _loads_by_tma(launch: Launch) -> int:
    """Return how many TMA loads a persistent kernel has at least: of each operand, for each stage, or by a warp of its
    own. One whose loop over tiles was not made one with that along the sum has one for each operand.
    """
    if not launch.is_persistent:
        return 0
    operands = 2 if launch.values["GATHERS"] or not launch.indexed else 1
    return operands * (1 if launch.values["SPECIALIZED"] else launch.compiled.stages)


def _is_aligned(launch: Launch) -> bool:
    """Whether rows are a multiple of 32 bytes, as all are but those of an adapter of rank 8: these load no 16 bytes."""
    return all(launch.values.get(name, 16) % 16 == 0 for name in ("K", "M", "N"))


class Routing(NamedTuple):
    """How many rows each expert has, and the token that each row is of, in the order of the experts."""

    counts: tuple[int, ...]
    tokens: tuple[int, ...]


def routed(tokens: int, top_k: int, experts: int) -> Routing:
    """Draw them, if a router chose uniformly."""
    drawn = torch.randint(experts, (tokens * top_k,), generator=torch.Generator().manual_seed(0))
    order = torch.argsort(drawn, stable=True) // top_k
    return Routing(tuple(drawn.bincount(minlength=experts).tolist()), tuple(order.tolist()))


def mm_order(tiles: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Iterate over the tile of rows and the block of columns that each program of ``grouped_mm*`` has."""
    return (divmod(program, blocks) for program in range(tiles * blocks))


def outer_order(experts: int, m_blocks: int, n_blocks: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the expert, block of ``m`` and block of ``n`` that each program of ``grouped_outer`` has."""
    for program in range(experts * m_blocks * n_blocks):
        expert, block = divmod(program, m_blocks * n_blocks)
        yield expert, *divmod(block, n_blocks)


def hbm_bytes(programs: Iterable[tuple[Panel, ...]], at_a_time: int, l2: float) -> float:
    """Count the bytes that are read from HBM.

    Programs run in waves of ``at_a_time``. Those of a wave advance together along the sum's dimension, so a panel that
    several read comes once; it comes again in a later wave if it is no longer among the ``l2`` bytes used last.
    """
    cached: OrderedDict[object, float] = OrderedDict()
    used_last = cached.move_to_end
    total, held, wave = 0.0, 0.0, 0
    for number, panels in enumerate(programs):
        if number // at_a_time != wave:
            wave = number // at_a_time
            while held > l2:
                held -= cached.popitem(last=False)[1]
        for name, nbytes in panels:
            if name in cached:
                used_last(name)
            else:
                total += nbytes
                cached[name] = nbytes
                held += nbytes
    return total


@dataclass(frozen=True)
class Work:
    """What a launch has to do: products, bytes of the operands and results once, and bytes by the order of programs."""

    flops: float
    padded: float
    least_bytes: float
    hbm_bytes: float
    epilogue_bytes: float


@functools.cache
def _mm_reads(
    tiles: tuple[tuple[int, int], ...],
    blocks: int,
    row: int,
    columns: int,
    at_a_time: int,
    l2: float,
    tokens: tuple[int, ...] = (),
) -> float:
    """Count the bytes that ``grouped_mm*`` reads; ``tiles`` are experts and rows, ``row`` and ``columns`` are bytes.

    With ``tokens``, which the rows are of, a row that is read for one expert is the same as for another.
    """
    ends = tuple(itertools.accumulate(rows for _, rows in tiles))

    def programs() -> Iterator[tuple[Panel, ...]]:
        for number, (t, block) in enumerate(mm_order(len(tiles), blocks)):
            expert, rows = tiles[t]
            b = ("b", expert, block), columns
            if not tokens:
                yield (("a", t), rows * row), b
            elif block == 0 or number % at_a_time == 0:  # other programs of the wave read what this one does
                yield *((("a", token), row) for token in tokens[ends[t] - rows : ends[t]]), b
            else:
                yield (b,)

    return hbm_bytes(programs(), at_a_time, l2)


@functools.cache
def _outer_reads(
    counts: tuple[int, ...],
    blocks: tuple[int, int],
    row: tuple[float, float],
    at_a_time: int,
    l2: float,
    indexed: str = "",
    tokens: tuple[int, ...] = (),
) -> float:
    """Count the bytes that ``grouped_outer`` reads; ``row`` has the bytes of a row of each block.

    Of the operand that is indexed all columns are read at once: the programs of a wave have most of an expert.
    """
    ends = tuple(itertools.accumulate(counts))

    def programs() -> Iterator[tuple[Panel, ...]]:
        before = -1
        for number, (e, *at) in enumerate(outer_order(len(counts), *blocks)):
            panels: list[Panel] = []
            for side, operand in enumerate("ab"):
                if operand not in indexed:
                    panels.append(((operand, e, at[side]), counts[e] * row[side]))
                elif e != before or number % at_a_time == 0:
                    whole = row[side] * blocks[side]
                    panels += [((operand, token), whole) for token in tokens[ends[e] - counts[e] : ends[e]]]
            before = e
            yield tuple(panels)

    return hbm_bytes(programs(), at_a_time, l2)


def work_of(launch: Launch, routing: Routing, gpu: Gpu) -> Work:
    """Compute it for such a routing; the operands' least bytes have a row that is indexed as often as the index has."""
    counts, tokens = routing
    values, size = launch.values, 4 if launch.dtype == "float32" else 2
    at_a_time = launch.compiled.ctas * gpu.sms
    if launch.tile is None:
        moved = float(sum(launch.nbytes.values()))
        if launch.compiled.kernel in ("take", "gather_sum"):  # each slot is read, not each row of the operand
            moved = 2.0 * launch.nbytes["out"]
            if launch.compiled.kernel == "gather_sum":
                moved = launch.nbytes["out"] * (1 + values["K"])
        elif launch.indexed:
            moved += sum(counts) * values["N"] * size - launch.nbytes["x"]
        return Work(0, 0, moved, moved, 0)
    bm, bn, bk = launch.tile
    rows, experts = sum(counts), len(counts)
    index = 8 * rows * (bool(launch.indexed) + launch.is_scattered)
    if launch.compiled.kernel == "grouped_outer":
        m, n = values["M"], values["N"]
        blocks = math.ceil(m / bm), math.ceil(n / bn)
        row = m * size / blocks[0], n * size / blocks[1]
        read = _outer_reads(counts, blocks, row, at_a_time, gpu.l2, launch.indexed, tokens if launch.indexed else ())
        operands, written = rows * (m + n) * size, experts * m * n * size
        padded_rows = sum(math.ceil(count / bk) * bk for count in counts)
        flops, padded = 2.0 * rows * m * n, 2.0 * padded_rows * blocks[0] * bm * blocks[1] * bn
    else:
        k, n = values["K"], values.get("N") or values["INNER"]
        twice = 2 if launch.compiled.kernel == "grouped_mm_gate" else 1
        tiles = tuple((e, min(bm, count - first)) for e, count in enumerate(counts) for first in range(0, count, bm))
        blocks = math.ceil(n / bn)
        columns, sources = twice * n * k * size / blocks, tokens if launch.indexed else ()
        read = _mm_reads(tiles, blocks, k * size, columns, at_a_time, gpu.l2, sources)
        flops, padded = 2.0 * twice * rows * k * n, 2.0 * twice * len(tiles) * bm * blocks * bn * math.ceil(k / bk) * bk
        per_row = {"grouped_mm": n, "grouped_mm_gate": 3 * n, "grouped_mm_gate_backward": 5 * n}
        operands, written = (rows * k + twice * experts * k * n) * size, rows * per_row[launch.compiled.kernel] * size
    return Work(flops, padded, index + operands + written, index + read + written, written)


def seconds(launch: Launch, work: Work, gpu: Gpu) -> float:
    """Return the least time of a launch: by matrix products, shared memory and HBM, the slowest of which counts.

    A CTA that is alone on its SM does not overlap its first loads and its epilogue with another's products. One that is
    persistent has first loads once, and as many tiles as the one with most.
    """
    by_hbm = work.hbm_bytes / gpu.hbm
    if launch.tile is None:
        return by_hbm
    bm, bn, bk = launch.tile
    if launch.dtype == "float32":
        return max(work.padded / (gpu.fp32 * SUSTAINED), by_hbm)
    if launch.compiled.kernel == "grouped_mm_gate":
        bn *= 2
    steps = work.padded / (2 * bm * bn * bk)
    products = max(work.padded / gpu.flops, steps * _shared_bytes(launch, bm, bn, bk) / gpu.shared) / SUSTAINED
    if launch.is_persistent:
        # The next tile's operands are loaded meanwhile; where other warps finish a tile, its products begin too.
        tiles = steps / math.ceil(launch.values["K"] / bk) / gpu.sms
        epilogue = 0.0 if launch.values["SPECIALIZED"] else work.epilogue_bytes / gpu.hbm
        return max(products * math.ceil(tiles) / tiles + epilogue, by_hbm) + _FILL + _LOOK_UP
    if launch.compiled.ctas > 1:
        return max(products, by_hbm)
    waves, fill = math.ceil(launch.programs / gpu.sms), _FILL + (_LOOK_UP if launch.indexed else 0)
    return max(products + work.epilogue_bytes / gpu.hbm + waves * fill, by_hbm)


def _shared_bytes(launch: Launch, bm: int, bn: int, bk: int) -> int:
    """Return the bytes that a step along the sum writes to shared memory and reads from it."""
    if launch.compiled.arch == 80:  # a warp reads its own part of both operands
        across = 2 if launch.compiled.warps == 8 else 1
        down = launch.compiled.warps // across
        read = bm * across + bn * down
    elif launch.compiled.arch == 90:  # each 64 rows are a warp group, which reads all columns
        read = bm + bn * math.ceil(bm / 64)
    else:
        read = bm + bn
    return 2 * bk * (bm + bn + read)
