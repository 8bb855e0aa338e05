"""The tiles of the Triton GEMMs: a short list for each, of which the fastest is chosen once by time on the GPU.

All tiles of a list give the same bits, because a GEMM sums along ``k`` in the same order with each. Only
``grouped_mm_gate_backward`` also sums along the columns, in blocks of the tile.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from . import triton_rows
from .backends import Groups

__all__ = [
    "INTERPRETED",
    "Tile",
    "Tiles",
    "gate_backward_tiles",
    "gate_tiles",
    "launch_fastest",
    "mm_tiles",
    "outer_tiles",
    "tiles_of",
]

INTERPRETED = triton.knobs.runtime.interpret
_HALF = 128  # registers of a thread, so that two CTAs of eight warps fit on an SM
_TIMES = 5  # timed launches of a tile
_LEAST_ROWS = 64  # per expert: with fewer, launch overhead hides the difference between tiles
_fastest: dict[tuple, "Tile | str"] = {}


class Tile(NamedTuple):
    """Sizes of a GEMM's tile, and options of its launch."""

    m: int
    n: int
    k: int
    warps: int = 8
    stages: int = 3  # of loads
    registers: int | None = None  # of a thread, at most
    is_persistent: bool = False  # for the kernels in ``triton_persistent.py``

    def __str__(self) -> str:
        kernel = ", persistent" if self.is_persistent else ""
        return f"{self.m}x{self.n}x{self.k} with {self.stages} stages{kernel}"

    def constants(self) -> dict[str, Any]:
        """Return the constants of a kernel with this tile."""
        sizes = {"BM": self.m, "BN": self.n, "BK": self.k}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


_SMALL = (Tile(16, 16, 16),)  # for the interpreter


def mm_tiles(dtype: torch.dtype, n: int, k: int, persistent: bool = False) -> Sequence[Tile]:
    """Return the tiles of ``grouped_mm`` for ``n`` columns over ``k``; the first runs until times are known."""
    if INTERPRETED:
        return _SMALL
    if dtype == torch.float32:
        return (Tile(64, 64, _fitting(k, 32), 4),)
    if n <= 64:
        return (Tile(128, _fitting(n, 64), _fitting(k, 64), 4),)
    return _of_128_columns(k, persistent)


def gate_tiles(dtype: torch.dtype, k: int, persistent: bool = False) -> Sequence[Tile]:
    """Return the tiles of ``grouped_mm_gate``, which have ``n`` gates and their ups."""
    if INTERPRETED:
        return _SMALL
    if dtype == torch.float32:
        return (Tile(64, 32, 32, 4),)
    return tuple(tile._replace(n=tile.n // 2) for tile in _of_128_columns(k, persistent))


def gate_backward_tiles(dtype: torch.dtype, n: int, k: int) -> Sequence[Tile]:
    """Return the tiles of ``grouped_mm_gate_backward`` for ``n`` columns over ``k``.

    There are none on older GPUs, where a GEMM and a separate pass are faster, because one CTA fits on an SM.
    """
    if INTERPRETED or dtype == torch.float32 or n <= 64 or _capability() < (9, 0):
        return ()
    depth = _fitting(k, 64)
    return (Tile(128, 128, depth, registers=_HALF), Tile(128, 256, depth, stages=4))


def outer_tiles(dtype: torch.dtype, m: int, n: int, indexed: bool) -> Sequence[Tile]:
    """Return the tiles of ``grouped_outer`` for results ``(m, n)``, with rows read through an index or not."""
    if INTERPRETED:
        return _SMALL
    if dtype == torch.float32:
        tiles: Sequence[Tile] = (Tile(64, 64, 16, 4),)  # on sm_80 twice the rows don't fit into the registers
    elif min(m, n) <= 64:
        tiles = (Tile(64 if m <= 64 else 128, _fitting(n, 128), 64, 4),)
    else:
        tiles = _of_128_columns(64)
    # Half of the stages load the index, so that as many rows are in flight as without one.
    return [tile._replace(stages=2 * tile.stages - 1) for tile in tiles] if indexed else tiles


def _of_128_columns(k: int, persistent: bool = False) -> Sequence[Tile]:
    """Return tiles of 128 columns, two of which fit on an SM, and larger ones."""
    if _capability() >= (9, 0):
        depth = _fitting(k, 64)
        first, larger = Tile(128, 128, depth, registers=_HALF), Tile(128, 256, depth)
        deeper = larger._replace(stages=4)
        if persistent and _capability()[0] in (9, 10):
            return (first, deeper, deeper._replace(is_persistent=True))
        return (first, larger, deeper)
    return (Tile(128, 128, _fitting(k, 32), 4, 4), Tile(128, 128, _fitting(k, 64)))


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _fitting(size: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def launch_fastest(
    what: str,
    key: tuple,
    tiles: Sequence[Tile | str],
    groups: Groups,
    launch: Callable[[Any], Any],
    results: Sequence[torch.Tensor] = (),
) -> None:
    """Launch with the fastest of ``tiles``, which are timed at the first launch of ``key`` with enough rows.

    A launch with few rows per expert uses the first tile and leaves the choice open. A tile that does not compile here,
    or whose results differ from the first tile's in a bit, is not used. The times are printed.

    Args:
        key: the sizes, dtype and layout on which the choice depends.
        tiles: a string names a way other than one kernel.
        results: the outputs of ``launch``, which may put other tensors into a list.
    """
    key = (what, *key)
    has_enough = groups.rows >= _LEAST_ROWS * len(groups.counts_e)
    if len(tiles) > 1 and has_enough and key not in _fastest and not torch.cuda.is_current_stream_capturing():
        times, notes, wanted = {}, {}, None
        for tile in tiles:
            try:
                times[tile] = _milliseconds(functools.partial(launch, tile))
            except Exception as error:  # Triton's errors of compilation have no common class
                if tile == tiles[0]:
                    raise
                why = str(error).strip().partition("\n")[0]
                notes[tile] = f"does not run here ({type(error).__name__}: {why})"
                continue
            found = [_sum_of_bits(x) for x in results]
            wanted = found if wanted is None else wanted
            notes[tile] = f"{times[tile]:.3f} ms"
            if found != wanted:
                del times[tile]
                notes[tile] += ", not taken, for its results differ from the first's"
        _fastest[key] = min(times, key=times.__getitem__)
        notes[_fastest[key]] += " (taken)"
        lines = ", ".join(f"{tile} {text}" for tile, text in notes.items())
        print(f"engine.experts_backend: {what} {key[1:]}: {lines}", flush=True)
    launch(_fastest.get(key, tiles[0]))


def _sum_of_bits(x: torch.Tensor) -> int:
    """Return a checksum of a contiguous tensor, in parts, because torch sums integers in a wider copy."""
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32).view(-1)
    return sum(int(part.sum()) for part in bits.split(1 << 24))


def _milliseconds(launch: Callable[[], Any]) -> float:
    launch()  # compiles
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_TIMES):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _TIMES


class Tiles(NamedTuple):
    """Each tile's expert (the number of experts for no tile), first row, and end of the expert's rows.

    Expert ``i`` has the tiles from ``first_of_expert[i]`` to before ``end_of_expert[i]``.
    """

    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    first_of_expert: torch.Tensor
    end_of_expert: torch.Tensor

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.expert, self.first, self.end


def tiles_of(groups: Groups, size: int) -> Tiles:
    """Build the table of ``R // size + e`` tiles, an upper bound that needs no host sync."""
    if size not in groups.tiles:
        experts = len(groups.counts_e)
        shapes = (groups.rows // size + experts,) * 3 + (experts,) * 2
        tiles = Tiles(*(groups.offsets_e.new_empty(n) for n in shapes))
        width = triton.next_power_of_2(experts)
        triton_rows.tile_table[(shapes[0],)](groups.counts_e, *tiles, experts, SIZE=size, WIDTH=width, num_warps=1)
        groups.tiles[size] = tiles
    return groups.tiles[size]
