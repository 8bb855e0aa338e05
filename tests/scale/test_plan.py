"""Cost of plans at the published sizes: the memory of one mesh, and the list of meshes of ``recipes.plan``."""

from typing import Any

import pytest

from epfsdp2.engine.planner.memory import peak
from epfsdp2.recipes.plan.meshes import choices, recommended, smallest
from tests.scale.work import cluster_of, request_for
from tests.support.scale import SIZES, Cost, Size, alone


def _plan(size: Size) -> dict[str, Any]:
    reading, request = Cost.of(request_for, size)
    memory, point = Cost.of(peak, request.sizes, size.topology, request.options, request.batch)
    listing, found = Cost.of(choices, request, cluster_of(size.world))
    search, larger = Cost.of(smallest, request, cluster_of(8, gib=80))
    return {
        "reading": reading,
        "memory": memory,
        "gib": point.total / 2**30,
        "listing": listing,
        "meshes": len(found),
        "fits": recommended(found) is not None,
        "search": search,
        "nodes": None if larger is None else larger[0].nodes,
        "layers": len(request.sizes.traced.layers),
    }


IN_BETWEEN = [pytest.param(size, marks=pytest.mark.long) for size in SIZES[1:-1]]


@pytest.mark.parametrize("size", [SIZES[0], *IN_BETWEEN, SIZES[-1]], ids=str)
def test_plans_take_the_same_time_for_each_mesh_and_layer(size):
    found = alone(_plan, size)
    assert found["fits"]
    assert found["reading"].ratio < 150
    assert found["memory"].ratio < 0.015 * found["layers"]
    assert found["listing"].ratio < 0.009 * found["layers"] * found["meshes"]
    assert found["search"].ratio < 200  # for the smallest cluster of 80 GiB, most of whose meshes do not fit
