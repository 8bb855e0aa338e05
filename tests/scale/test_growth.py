"""Twice the ranks cost at most 2.2 times, with few layers of Kimi-K2: calls of functions, and CPU seconds."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from epfsdp2.engine.optim import muon_partition
from epfsdp2.recipes.plan.meshes import choices
from tests.scale.work import (
    checkpoint_of,
    cluster_of,
    matrix_buckets,
    plan_export,
    plan_resume,
    plan_save,
    request_for,
    state_of,
)
from tests.support.scale import MOST_GROWTH, Size, alone, growth

SIZE = Size("Kimi-K2", 256, 32, layers=2)


def _sharding() -> dict[str, float]:
    return growth(lambda size: (size, size.build()), Size.shard, SIZE)


def _muon() -> dict[str, float]:
    def prepare(size: Size) -> tuple:
        muon_partition._shapes_and_pieces.cache_clear()
        return (size.shard(size.build()),)

    return growth(prepare, matrix_buckets, replace(SIZE, layers=6))  # whose parameters have the shapes of two


def _saving() -> dict[str, float]:
    return growth(lambda size: (state_of(size.shard(size.build())), 1, size.world), plan_save, SIZE)


def _resuming() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return growth(lambda size: checkpoint_of(Path(folder), size)[:2], plan_resume, SIZE)


def _exporting() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return growth(lambda size: (*checkpoint_of(Path(folder), size, False)[:2], 0, size.world), plan_export, SIZE)


def _listing() -> dict[str, float]:
    request = request_for(SIZE)
    few = replace(SIZE, world=16)  # whose meshes are 175, those of 64 ranks 588
    return growth(lambda size: (request, cluster_of(size.world)), choices, few)


_LONG = pytest.param(_listing, marks=pytest.mark.long)


@pytest.mark.parametrize("what", [_sharding, _muon, _saving, _resuming, _exporting, _LONG])
def test_twice_the_ranks_cost_at_most_a_little_more_than_twice(what):
    found = alone(what)
    assert found["calls"] <= MOST_GROWTH and found["seconds"] <= MOST_GROWTH, found
