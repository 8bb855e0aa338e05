"""Slices from real trainer ranks to real vLLM workers, which equal a fresh engine after each of three syncs."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.servers import planned_layout, target_slices
from epfsdp2.rollout.vllm.layout import NOT_SPREAD
from tests.rollout.families import (
    ALWAYS_TIED,
    DENSE,
    FAMILIES,
    MAY_BE_TIED,
    config_of,
    known,
    model_on_meta,
    save,
)
from tests.rollout.served_families import SERVED
from tests.support.engine.sharded import sharded_model
from tests.support.ranks import run_ranks
from tests.support.rollout.verls_transport import send

pytestmark = pytest.mark.e2e

BY_EXPERTS = [name for name in FAMILIES if name not in DENSE and config_of(name).model_type not in NOT_SPREAD]


def _sync(syncs: list[str], handles: list[str], ep: int, rollout: Rollout) -> None:
    """Send slices of each sync's checkpoint as the trainer's weights."""
    from epfsdp2.engine.model.layers import layer_names
    from epfsdp2.rollout.sent_tensors import tensor_specs
    from epfsdp2.rollout.sync import RolloutSync, SyncSettings
    from epfsdp2.rollout.transport.checksums import with_checksums

    rank, workers = dist.get_rank(), dist.get_world_size()
    for folder in syncs:
        model, meshes = sharded_model(Path(folder), workers, ep=ep, attention="eager")
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("sliced", 5 << 18))
        weights = sync.weights().for_worker("sliced", rollout)
        send(with_checksums(weights.tensors()), handles, megabytes=2)
        heads, exchange = Heads.of(model.config), sync.exchange(rollout)
        kept = [(t, part) for t in tensor_specs(model) for part in target_slices(t, rollout, rank, heads)]
        needed = sum(part.block.numel * t.itemsize for t, part in kept if part.form != "zeros")
        assert exchange.plan.needed[rank] == needed
        # Short tensors come whole.
        assert needed - exchange.plan.sent[rank, rank] <= exchange.traffic.received < 1.1 * needed + (1 << 17)


def _layouts(config, rollout):
    tensors = tensors_before_sharding(model_on_meta(config), Topology.arrange(rollout.workers, 1))
    return [planned_layout(tensors, rollout, worker, Heads.of(config)) for worker in range(rollout.workers)]


def _matches_fresh_engines(start_engine, folder, family, *args, **options):
    """Sync the second and the first of two checkpoints in turn, and compare with fresh engines."""
    if not known(family):
        pytest.skip(f"how the installed vLLM shards {family} is not known")
    SERVED[family].skip_where_broken()
    # The trainer reads the environment that decides vLLM's layout in its own.
    environment = {name: value for name, value in SERVED[family].environment.items() if name.startswith("VLLM_")}
    with mock.patch.dict(os.environ, environment):
        _compare(start_engine, folder, family, *args, **options)


def _compare(start_engine, folder, family, tp, *, expert_parallel=False, **sizes):
    served = SERVED[family]
    first, second = (str(save(family, folder / str(seed), seed, **sizes)) for seed in (1, 2))
    # Towers are compared in test_vllm_images.py.
    rollout = Rollout(tp, 1, expert_parallel, "none" if "limit_mm_per_prompt" in served.settings else "sharded")
    settings = {"tp_size": tp, "dtype": served.dtype, "environment": served.environment, **served.settings}
    if tp == 1:  # in one process engines start in a moment
        settings |= {"distributed_executor_backend": "uni", "again": True}
    if expert_parallel:
        settings |= {"enable_expert_parallel": True, "extension": "idle_extension.NeverComputes"}

    def computes(engine):
        return engine.call("epfsdp2_digests"), None if expert_parallel or served.is_mute else engine.generating()

    def found(computed):
        digests, generated = computed
        return [answer["digests"] for answer in digests.result()], generated and generated.result()

    engine = start_engine(first, **settings)
    fresh = {first: found(computes(engine))}
    engine.call("epfsdp2_check_layout", layouts=_layouts(config_of(family, **sizes), rollout)).result()
    syncs = [second, first, second]
    after = []
    for _ in syncs:
        engine.call("update_weights_from_ipc", timeout=200.0, use_shm=True, sync_timeout_seconds=150.0, verify=True)
        after.append(computes(engine))
    ep = 1 if family in DENSE else tp
    run_ranks(_sync, tp, syncs, [engine.handle(rank) for rank in range(tp)], ep, rollout)
    after = [found(computed) for computed in after]
    assert engine.leftovers() == []
    fresh[second] = found(computes(start_engine(second, **settings)))
    for checkpoint, computed in zip(syncs, after, strict=True):
        assert computed == fresh[checkpoint]
    assert fresh[first] != fresh[second]
    shutil.rmtree(folder)


def test_vllm_with_expert_parallelism_of_a_family_with_biases_equals_a_fresh_engine(start_engine, tmp_path):
    """The family has biases, which vLLM's reload handles differently from weights."""
    _matches_fresh_engines(start_engine, tmp_path, "qwen2_moe", 2, expert_parallel=True)


@pytest.mark.long
@pytest.mark.parametrize("family", [name for name in BY_EXPERTS if name != "qwen2_moe"])
def test_vllm_with_expert_parallelism_of_every_other_family_equals_a_fresh_engine(start_engine, tmp_path, family):
    _matches_fresh_engines(start_engine, tmp_path, family, 2, expert_parallel=True)


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_of_every_family_after_three_syncs_of_slices_equals_a_fresh_engine(start_engine, tmp_path, family, tp):
    # The head that two workers have a part of each is the embedding, where vLLM's class knows that.
    tied = family in ALWAYS_TIED or (tp == 2 and family in MAY_BE_TIED)
    _matches_fresh_engines(start_engine, tmp_path, family, tp, tie_word_embeddings=tied)
