"""Mesh arithmetic, without processes."""

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.mesh import Topology


@pytest.mark.parametrize("world", [1, 2, 6, 8, 12, 16, 64, 96, 512, 4096])
def test_every_divisor_gives_a_mesh_whose_axes_multiply_to_the_world(world):
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for replica in divisors:
        for ep in (d for d in divisors if replica % d == 0):
            t = Topology.plan(world, ep, replica)
            assert t.ep * t.ep_fsdp * t.dp_replicate == world
            assert t.fsdp == replica
            coordinates = [t.coordinate(r) for r in range(t.fsdp)]
            assert len({(at["ep_fsdp"], at["ep"]) for at in coordinates}) == t.fsdp
            assert all(0 <= at["ep_fsdp"] < t.ep_fsdp and 0 <= at["ep"] < t.ep for at in coordinates)


def test_ep_groups_are_neighbours():
    t = Topology.plan(16, 8)
    assert [t.coordinate(r)["ep"] for r in range(16)] == [*range(8), *range(8)]
    assert [t.coordinate(r)["ep_fsdp"] for r in range(16)] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("world", "ep", "fsdp", "names"),
    [
        (8, 3, -1, ["engine.ep_size=3", "8"]),
        (8, 16, -1, ["engine.ep_size=16"]),
        (8, 8, 4, ["engine.ep_size=8", "fsdp_size=4"]),
        (8, 2, 3, ["engine.fsdp_size=3"]),
        (8, 0, -1, ["engine.ep_size=0"]),
        (8, -2, -1, ["engine.ep_size=-2"]),
    ],
)
def test_a_mesh_that_cannot_be_built_names_setting_and_value(world, ep, fsdp, names):
    with pytest.raises(SettingError) as error:
        Topology.plan(world, ep, fsdp)
    assert all(name in str(error.value) for name in [*names, "What works:"])
