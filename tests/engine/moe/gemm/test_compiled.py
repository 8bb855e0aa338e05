"""The experts' kernels compile for GPUs that are not there within their budgets, and programs run in a cached order."""

import itertools
import math

import pytest
import torch

from epfsdp2.engine.moe.gemm.backends import Groups
from tests.support.moe.interpreter import compiled_passes, drawn, interpreted_kernels

pytest.importorskip("triton")
GEMMS = {"grouped_mm", "grouped_mm_gate", "grouped_mm_gate_backward", "grouped_outer"}


def test_kernels_of_an_experts_forward_compile_for_an_h100_within_their_budgets():
    rows = compiled_passes("few")
    assert [problem for row in rows for problem in row["problems"]] == []
    assert {row["kernel"] for row in rows if row["is_indexed"]} == {"grouped_mm_gate"}  # so nothing copies tokens
    assert {row["kernel"] for row in rows} == {"tile_table", "grouped_mm_gate", "grouped_mm", "gather_sum"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_of_experts_of_every_model_compile_within_their_budgets(arch, dtype):
    rows = compiled_passes("experts", str(arch), dtype)
    assert [problem for row in rows for problem in row["problems"]] == []
    # In float32, and before sm_90, the gate's backward is a pass of its own, and no kernel is persistent (no TMA).
    has_both = arch >= 90 and dtype != "float32"
    kernels = {row["kernel"] for row in rows}
    gemms = GEMMS if has_both else GEMMS - {"grouped_mm_gate_backward"}
    assert gemms == GEMMS & kernels and kernels >= {"take", "gather_sum", "tile_table", "sum_rows"}
    assert {row["kernel"] for row in rows if row["is_indexed"]} >= gemms
    assert "take" not in {row["kernel"] for row in rows if row["is_forward"]}
    persistent = {(row["kernel"], row["is_indexed"]) for row in rows if row["is_persistent"]}
    assert persistent >= {("grouped_mm_gate", True), ("grouped_mm", False)} if has_both else not persistent
    # Under expert parallelism results are stored in the order in which they are sent.
    assert {row["is_persistent"] for row in rows if row["is_scattered"]} == {False, has_both}


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


def test_programs_of_a_wave_share_rows_and_weights_so_that_operands_come_from_memory_once():
    """Blocks of columns are the inner loop. With tiles of rows inside, Qwen3-30B-A3B would read 7 GB and not 1.3."""
    with interpreted_kernels() as kernels:
        gemms, groups = kernels.triton_gemms, Groups(torch.tensor([16, 32]), 48)
        table, rows, pre, gate = kernels.tiles_of(groups, 16).table, drawn(48, 16), drawn(48, 64), (1.0, 0.0, math.inf)
        wanted = [(16 * tile, 16 * block) for tile, block in itertools.product(range(3), range(2))]
        constants = {"HAS_INDEX": False, "HAS_BIAS": False, "EVEN_K": True}
        gated = {"INTERLEAVED": False, "LIMITED": False}
        b, out = drawn(2, 16, 32), torch.empty(48, 32)
        sizes = (*table, 2, 32, 16, *b.stride())
        found = _written(gemms.grouped_mm, out, rows, rows, b, b, out, out, *sizes, HAS_ORDER=False, **constants)
        assert found == wanted
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
        assert found == [(e, 16 * i, 16 * j) for e, i, j in itertools.product(range(2), range(3), range(2))]
