"""Peak memory of a step is what ``engine/planner/memory.py`` says; ``make memory`` has more settings."""

import pytest

from benchmarks.memory import FAST, run


@pytest.mark.parametrize("row", FAST, ids=lambda row: f"{row.mesh}, dim {row.shard_dim}")
def test_peak_memory_is_what_the_arithmetic_says(row):
    measured = run(row)
    assert measured.ratio == pytest.approx(1, abs=0.1), measured
    assert measured.largest < measured.stack, measured
