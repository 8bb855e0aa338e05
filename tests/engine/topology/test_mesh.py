"""Mesh arithmetic without processes, and groups of meshes."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.topology.expert_placement import EtpDim, check_inner_divides, ep_fsdp_dim, model_parallel_placements
from epfsdp2.engine.topology.index_ranges import ShardStep, shard_ranges, slices_in_shard
from epfsdp2.engine.topology.mesh import Topology, build_meshes, divisors
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("world", [1, 2, 6, 12, 96, 512])
def test_topology_axes_of_every_divisor_multiply_to_the_world_and_ep_groups_are_neighbours(world):
    for replica, ep in ((each, ep) for each in divisors(world) for ep in divisors(each)):
        t = Topology.arrange(world, ep, replica)
        assert t.ep * t.ep_fsdp * t.dp_replicate == world and t.fsdp == replica
        for rank in range(replica):
            assert t.coordinate(rank) == {"fsdp": rank, "ep_fsdp": rank // ep, "ep": rank % ep}


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((8, 3, -1), ["engine.ep_size=3", "8"]),
        ((8, 16, -1), ["engine.ep_size=16"]),
        ((8, 8, 4), ["engine.ep_size=8", "fsdp_size=4"]),
        ((8, 2, 3), ["engine.fsdp_size=3"]),
        ((8, 0, -1), ["engine.ep_size=0"]),
        ((8, -2, -1), ["engine.ep_size=-2"]),
        ((8, 4, -1, 4), ["engine.etp_size= one of [1, 2]"]),
        ((12, 2, 6, 2), ["engine.etp_size= one of [1, 3]"]),
    ],
)
def test_topology_that_cannot_be_arranged_names_setting_and_value(sizes, names):
    with pytest.raises(SettingError) as error:
        Topology.arrange(*sizes)
    assert all(name in str(error.value) for name in [*names, "What works:"])


@pytest.mark.parametrize("rank", [5, 14])
def test_build_meshes_shares_the_replicas_group_and_names_its_communicators(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
    try:
        t = Topology.arrange(16, 4, 8)
        before = set(dist.distributed_c10d._world.pg_map)
        meshes = build_meshes("cpu", t)
        made = {g for g in set(dist.distributed_c10d._world.pg_map) - before if g.size() > 1}
        ranks = {name: dist.get_process_group_ranks(meshes.experts.get_group(name)) for name in t.expert_axes}
        assert meshes.experts.get_group("dp_replicate") is meshes.dense.get_group("dp_replicate")
        first = rank % 8
        assert ranks["dp_replicate"] == [first, first + 8]
        assert ranks["ep_fsdp"] == [rank - rank % 8 + rank % 4, rank - rank % 8 + rank % 4 + 4]
        assert ranks["ep"] == list(range(rank - rank % 4, rank - rank % 4 + 4))
        assert meshes.experts_shard.mesh_dim_names == ("dp_replicate", "ep_fsdp")
        assert len(made) + 1 == len(t.communicators()) == 5
    finally:
        dist.destroy_process_group()


def _ep_of_all_ranks():
    t, rank = Topology.arrange(dist.get_world_size(), dist.get_world_size()), dist.get_rank()
    before = set(dist.distributed_c10d._world.pg_map)
    meshes = build_meshes("cpu", t)
    made = {g for g in set(dist.distributed_c10d._world.pg_map) - before if g.size() > 1}
    ep, fsdp = meshes.ep.get_group(), meshes.dense_shard.get_group()
    assert ep is not fsdp and ep.group_name != fsdp.group_name
    assert dist.get_process_group_ranks(ep) == dist.get_process_group_ranks(fsdp) == list(range(t.world))
    assert len(made) + 1 == len(t.communicators()) == 2
    assert meshes.experts.get_group("ep_fsdp").size() == meshes.experts.get_group("dp_replicate").size() == 1
    # Each group has an order of its own: ranks that issue the two collectives in different orders do not wait.
    gathered, sent = torch.empty(t.world), torch.full((t.world,), float(rank))
    received = torch.empty_like(sent)
    calls = [
        lambda: dist.all_gather_into_tensor(gathered, sent[:1].contiguous(), group=fsdp, async_op=True),
        lambda: dist.all_to_all_single(received, sent, group=ep, async_op=True),
    ]
    for work in [call() for call in (calls if rank else calls[::-1])]:
        work.wait()
    assert gathered.tolist() == received.tolist() == list(range(t.world))


def test_build_meshes_with_ep_of_all_ranks_gives_it_a_group_beside_fsdps():
    run_ranks(_ep_of_all_ranks, 2)


def test_communicators_of_axes_of_all_ranks_are_the_worlds_except_eps():
    assert Topology.arrange(1, 1).communicators() == {}
    assert Topology.arrange(8, 1).communicators() == {"world": 8}
    assert Topology.arrange(8, 8).communicators() == {"world": 8, "ep": 8}
    assert Topology.arrange(8, 2).communicators(sp=2) == {"world": 8, "ep_fsdp": 4, "ep": 2, "sp": 2, "dp": 4}


@pytest.mark.parametrize(
    ("shape", "world", "ep", "etp_dim", "wanted", "dim"),
    [
        # Whole experts, else the first dim that divides.
        ((128, 1536, 2048), 128, 8, None, "auto", 0),  # Qwen3-30B-A3B on 128 ranks: an expert each
        ((128, 1536, 2048), 256, 8, None, "auto", 1),
        ((256, 4096, 7168), 4096, 64, None, "auto", 1),  # DeepSeek-V3
        ((12, 10, 9), 9, 3, None, "auto", 2),
        ((12, 10, 7), 12, 3, None, "auto", 0),
        ((12, 10, 7), 9, 3, None, "auto", 0),  # uneven, which dim 0 alone may be
        ((32, 5760), 32, 4, None, "auto", 0),  # a bias
        ((32, 5760), 64, 4, None, "auto", 1),
        # Never the dim that etp shards.
        ((8, 64, 32), 32, 1, EtpDim(1, parts=2), "auto", 2),
        ((8, 64, 32), 32, 1, EtpDim(1, parts=2), 1, 2),
        ((8, 32, 64), 32, 1, EtpDim(2), 1, 1),
        ((8, 64), 32, 1, EtpDim(1), 1, 0),
        ((32,), 32, 1, None, 1, 0),  # one entry per expert
    ],
)
def test_ep_fsdp_dim_is_one_that_divides(shape, world, ep, etp_dim, wanted, dim):
    topology = Topology.arrange(world, ep, etp_size=1 if etp_dim is None else 2)
    assert ep_fsdp_dim(shape, topology, wanted, 0, etp_dim) == dim


def test_ep_fsdp_dim_refuses_an_explicit_dim_that_does_not_divide():
    with pytest.raises(SettingError, match="expert_shard_dim=1.*10.*ep_fsdp=4.*auto"):
        ep_fsdp_dim((12, 10, 7), Topology.arrange(12, 3), 1)


def test_topology_with_etp_has_its_coordinates_and_placements():
    t = Topology.arrange(16, 2, 8, etp_size=2)
    assert t.expert_axes == {"dp_replicate": 2, "ep_fsdp": 2, "ep": 2, "etp": 2} and t.fsdp == 8
    assert t.coordinate(5) == {"fsdp": 5, "ep_fsdp": 1, "ep": 0, "etp": 1}
    assert model_parallel_placements(t.model_parallel_axes, 0, EtpDim(2)) == [Shard(0), Shard(2)]
    halves = model_parallel_placements(t.model_parallel_axes, 0, EtpDim(1, parts=2))
    assert halves == [Shard(0), _StridedShard(1, split_factor=2)]
    assert t.communicators() == {"world": 16, "dp_replicate": 2, "fsdp": 8, "ep_fsdp": 2, "ep": 2, "etp": 2}


def test_check_inner_divides_names_the_sizes_that_fit_the_experts_and_the_ranks():
    check_inner_divides([48, 64], Topology.arrange(8, 1, etp_size=8), "Model")
    with pytest.raises(SettingError, match=r"Model has 18.*etp_size= one of \[1, 2\]"):
        check_inner_divides([18, 64], Topology.arrange(8, 1, etp_size=4), "Model")
    with pytest.raises(SettingError, match="no experts to split"):
        check_inner_divides([], Topology.arrange(4, 1, etp_size=2), "Model")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_shard_ranges_of_a_strided_step_are_what_dtensor_says(experts, inner, etp, parts, ep):
    """``_StridedShard`` cuts each part; a shard is the ranges of a rank one after the other."""
    whole = torch.arange(ep * experts * parts * etp * inner).view(ep * experts, parts * etp * inner)
    steps = [ShardStep(0, "ep", ep), ShardStep(1, "etp", etp, parts)]
    for at_ep, at_etp in itertools.product(range(ep), range(etp)):
        ranges = shard_ranges(whole.shape, steps, {"ep": at_ep, "etp": at_etp})
        shard = torch.cat([whole[held.slices] for held in ranges], dim=1)
        cut = _StridedShard(1, split_factor=parts)._split_tensor(whole, etp)[0][at_etp] if parts > 1 else None
        wanted = whole.chunk(etp, dim=1)[at_etp] if cut is None else cut
        assert torch.equal(shard, wanted.chunk(ep)[at_ep])
        for held in ranges:
            assert torch.equal(shard[slices_in_shard(held, ranges)], whole[held.slices])
