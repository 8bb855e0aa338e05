"""The experts' kernels compile for GPUs that are not there within their budgets."""

import pytest

from tests.support.moe.interpreter import compiled_passes

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
