"""Measured peak memory of a step equals ``engine/planner/memory.py``'s; ``make memory`` has more settings."""

import pytest

from tests.support.engine.memory import Row, run

ROWS = [pytest.param(row, marks=pytest.mark.long) for row in (Row(2), Row(4))] + [Row(2, shard_dim=1)]


@pytest.mark.parametrize("row", ROWS, ids=["2", "4", "2, dim 1"])
def test_peak_memory_of_an_update_is_within_10_percent_of_the_plan(row):
    measured = run(row)
    assert measured.ratio == pytest.approx(1, abs=0.1), measured
    assert measured.largest < measured.stack, measured
