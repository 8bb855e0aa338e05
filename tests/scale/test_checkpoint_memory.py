"""Peak memory to load and to export a checkpoint stays within a rank's shard and one layer."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.load import load_weights, match_weights
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from epfsdp2.recipes.export import export
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.memory import MODEL, peak_of
from tests.support.engine.sharded import sharded_model
from tests.support.ranks import each_case, run_ranks

pytestmark = pytest.mark.long
WORLD = 4
# Ranks of a replica, ep, shard dim of the experts.
MESHES = [(-1, 1, "auto"), (-1, 2, "auto"), (-1, 2, 0), (-1, 4, "auto"), (2, 2, "auto")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint and the bytes of a layer."""
    folder = tmp_path_factory.mktemp("model")
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float()
    model.save_pretrained(folder)
    return folder, sum(p.nbytes for p in model.model.layers[0].parameters())


def _file_sizes(folder):
    """Files are mapped; their pages are the system's, and are not counted."""
    return {path.stat().st_size for path in folder.glob("*.safetensors")}


def _loads(folder, layer):
    def within_a_shard_and_a_layer(fsdp_size, ep, dim):
        meshes = build_meshes("cpu", Topology.arrange(WORLD, ep, fsdp_size))
        config, files = AutoConfig.from_pretrained(folder, attn_implementation="sdpa"), open_checkpoint(folder)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("load"):
            model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
            parallelize(model, meshes, ShardingOptions(param_dtype=torch.float32, expert_shard_dim=dim))
            materialize(model, "cpu")
            load_weights(model, match_weights(model, files, meshes), meshes)
        shard = sum(local_tensor(p).nbytes for p in model.parameters())
        assert shard <= peak_of(profiler, "load", _file_sizes(folder))[0] <= shard + layer

    each_case(MESHES, within_a_shard_and_a_layer)


def test_load_on_every_mesh_allocates_at_most_a_shard_and_a_layer(saved):
    run_ranks(_loads, WORLD, *saved)


def _save(folder, out):
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    save_checkpoint(out, model, None, None, {"model"}, 1, AutoConfig.from_pretrained(folder).save_pretrained)


def test_export_allocates_at_most_a_layer(saved, tmp_path):
    folder, layer = saved
    run_ranks(_save, WORLD, folder, tmp_path / "saved")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("export"):
        export(tmp_path / "saved", tmp_path / "exported")
    assert 0 < peak_of(profiler, "export", _file_sizes(tmp_path / "saved" / checkpoint.SHARDS))[0] <= layer
