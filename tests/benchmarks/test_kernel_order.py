"""Programs of the Triton GEMMs run in the order by which ``kernel_model.py`` counts bytes from HBM."""

import math

import pytest
import torch

from benchmarks.kernels.kernel_model import mm_order, outer_order
from epfsdp2.engine.moe.gemm.backends import Groups
from tests.support.moe.interpreter import interpreted_kernels


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with interpreted_kernels() as backend:
        yield backend


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _written(kernel, out, *args, **constants):
    """List the first element that each program writes of ``out``, by launching one program more each time."""
    seen, corners = torch.zeros_like(out, dtype=torch.bool), []
    while not seen.all():
        out.fill_(math.nan)
        kernel[(len(corners) + 1,)](*args, BM=16, BN=16, BK=16, UPCAST=False, **constants)
        new = ~out.isnan() & ~seen
        corners.append(tuple(new.nonzero()[0].tolist()))
        seen |= new
    return corners


def test_kernel_programs_run_in_the_order_that_their_bytes_are_counted_by(kernels):
    gemms, groups = kernels.triton_gemms, Groups(torch.tensor([16, 32]), 48)
    table, rows, pre, gate = kernels.tiles_of(groups, 16).table, drawn(48, 16), drawn(48, 64), (1.0, 0.0, math.inf)
    wanted = [(16 * tile, 16 * block) for tile, block in mm_order(3, 2)]
    constants = {"HAS_INDEX": False, "HAS_BIAS": False, "EVEN_K": True}
    gated = {"INTERLEAVED": False, "LIMITED": False}
    b, out = drawn(2, 16, 32), torch.empty(48, 32)
    sizes = (*table, 2, 32, 16, *b.stride())
    assert _written(gemms.grouped_mm, out, rows, rows, b, b, out, out, *sizes, HAS_ORDER=False, **constants) == wanted
    up = drawn(2, 16, 64)
    sizes = (*table, 2, 32, 16, *up.stride(), *gate)
    found = _written(gemms.grouped_mm_gate, out, rows, rows, up, up, pre, out, *sizes, **constants, **gated)
    assert found == wanted
    down = drawn(2, 16, 32)
    sizes = (*table, 2, 32, 16, 48, *down.stride(), *gate)
    operands = rows, rows, down, pre, pre, torch.empty_like(pre), out, out
    constants |= {"SCALED": False, **gated}
    del constants["HAS_BIAS"]
    assert _written(gemms.grouped_mm_gate_backward, out, *operands, *sizes, **constants) == wanted
    out = torch.empty(2, 48, 32)
    a, b = drawn(48, 48), drawn(48, 32)
    unindexed = {"A_INDEXED": False, "B_INDEXED": False}
    found = _written(gemms.grouped_outer, out, a, a, b, b, out, groups.offsets_e, 48, 32, **unindexed)
    assert found == [(e, 16 * i, 16 * j) for e, i, j in outer_order(2, 3, 2)]
