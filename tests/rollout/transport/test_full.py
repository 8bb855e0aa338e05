"""Full tensors: exact on every rank, one gather per layer, bounded memory."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.topology.dtensor import shard_steps
from epfsdp2.engine.topology.index_ranges import shard_ranges
from epfsdp2.rollout import sync as rollout_sync
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.report import Traffic
from epfsdp2.rollout.vllm import names
from tests.rollout.served_families import build
from tests.support.engine.sharded import full_tensors, sharded_model
from tests.support.models.tiny import reference_model, save_glm4_moe, save_qwen3_moe, save_random
from tests.support.ranks import run_ranks


def _counted(model, meshes, bound, dtypes=None):
    """Gather full tensors; return them and the bytes of each gather."""
    with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gather:
        full = dict(full_tensors(model, meshes, layer_names(model), bound, dtypes))
    return full, [call.args[0].nbytes for call in gather.call_args_list]


def _layers(names):
    """Return the layers of tensors in order, once for consecutive ones."""
    layers = (".".join(name.split(".")[:3]) for name in names if "layers" in name)
    return [layer for layer, _ in itertools.groupby(layers)]


def _full_on_every_mesh(cases):
    for folder, (ep, fsdp_size, dim, etp) in cases:
        wanted = dict(reference_model(folder).named_parameters())
        model, meshes = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, etp, expert_shard_dim=dim)
        full, gathers = _counted(model, meshes, 1 << 30)
        assert full.keys() == wanted.keys()
        assert _layers(full) == _layers(wanted)
        for name, tensor in full.items():
            assert torch.equal(tensor, wanted[name]), (ep, fsdp_size, dim, name)
        largest = max(p.nbytes for p in wanted.values())
        again, bounded = _counted(model, meshes, largest)
        assert all(torch.equal(again[name], wanted[name]) for name in wanted)
        if meshes.topology.fsdp == 1:
            assert gathers == bounded == []
            continue
        # Embedding, three layers, and head with norm: five gathers for 31 tensors. With etp the columns of experts
        # have odd lengths here, so that layers may need further gathers.
        layers = len(layer_names(model))
        assert layers + 2 <= len(gathers) <= layers + 2 + 4 * (etp > 1) and len(gathers) < len(bounded)
        # Padding: at most one alignment per tensor and rank.
        assert max(bounded) <= largest + 16 * len(wanted) * dist.get_world_size()


def _in_parts(folder, cases):
    reference = reference_model(folder)
    wanted = dict(hf_names.as_checkpoint(reference, reference.state_dict().items()))
    for ep, fsdp_size, dim, etp in cases:
        model, meshes = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, etp, expert_shard_dim=dim)
        stack = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
        largest = max(p.nbytes for name, p in reference.named_parameters() if "experts" not in name)
        assert 3 * largest < stack.numel() * stack.element_size(), "stacks have to exceed the limit"
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("full", 6 * largest))
        traffic = Traffic()
        got = list(sync.full(traffic))
        assert sorted(name for name, _ in got) == sorted(wanted)
        for name, tensor in got:
            assert torch.equal(tensor, wanted[name]), (ep, fsdp_size, dim, name)
        # A gather has at least one expert of each rank: received and assembled, the rank's own twice, and copies.
        ranks = meshes.topology.fsdp
        firsts = {
            shard_ranges(stack.shape, shard_steps(stack), meshes.topology.coordinate(r))[0].low[0] for r in range(ranks)
        }
        at_once = len(firsts) * stack.shape[1:].numel() * 4
        assert traffic.peak <= max(6 * largest, (2 * (ranks + 1) / ranks + 1) * at_once), (ep, fsdp_size, dim)
        together = {}
        for name, _, first, step, rows in sync.gathered(Traffic(), "merged"):
            whole = reference.state_dict()[name]
            assert step == 1 or "experts" in name, name
            together.setdefault(name, torch.full(whole.shape, torch.nan))[first::step] = rows
        assert together.keys() == reference.state_dict().keys()
        assert all(torch.equal(values, reference.state_dict()[name]) for name, values in together.items())


def test_full_mode_sends_a_stack_above_the_limit_by_expert(tmp_path):
    cases = [(4, -1, 1, 1), (2, 2, 1, 1), (2, -1, 0, 2)]
    run_ranks(_in_parts, 4, save_qwen3_moe(tmp_path, num_experts=24, vocab_size=64), cases)


def _stays_whole(folder):
    model, meshes = sharded_model(folder, dist.get_world_size(), 2, attention="eager")
    lines = []
    rollout_sync.logger.addFilter(lambda record: lines.append(record.getMessage()))
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("full", 4096))
    for _ in range(2):
        got = dict(sync.full())
    assert got.keys() == model.state_dict().keys()
    wanted = "epfsdp2: engine.rollout_sync=full holds all of model.embed_tokens.weight at once, "
    assert [line.startswith(wanted) for line in lines] == [True] * (dist.get_rank() == 0)


def test_full_mode_warns_once_of_a_stack_that_checkpoints_store_as_one(tmp_path):
    run_ranks(_stays_whole, 2, save_random(build("gpt_oss"), tmp_path, 0))


MESHES = [(2, 2, 1, 1), (1, 1, 1, 1), (2, -1, 0, 2)]
MORE_MESHES = [(1, -1, 1, 2), (1, -1, 1, 1), (2, -1, 1, 1), (4, -1, 1, 1), (2, -1, 0, 1), (1, 2, 0, 2)]


@pytest.mark.parametrize("meshes", [MESHES, pytest.param(MORE_MESHES, marks=pytest.mark.long)], ids=["some", "others"])
def test_full_tensors_on_every_mesh_are_exact(tmp_path, meshes):
    untied = save_qwen3_moe(tmp_path / "untied")
    tied = save_qwen3_moe(tmp_path / "tied", tie_word_embeddings=True)
    run_ranks(_full_on_every_mesh, 4, [*((untied, mesh) for mesh in meshes), (tied, meshes[0])])


def _in_bfloat16(folder):
    low = torch.bfloat16
    options = {"param_dtype": low, "fp32_modules": ["*.mlp.gate"]}
    model, meshes = sharded_model(folder, dist.get_world_size(), 2, **options)
    dtypes = compute_dtypes(model, ShardingOptions(**options))
    wide, wide_bytes = _counted(model, meshes, 1 << 30)
    full, sent_bytes = _counted(model, meshes, 1 << 30, dtypes)
    wanted = reference_model(folder).state_dict()
    assert any("correction_bias" in name for name in wanted) and full.keys() == wanted.keys()
    for name, tensor in full.items():
        assert torch.equal(wide[name], wanted[name]), name
        stays = name.endswith(("mlp.gate.weight", "correction_bias"))
        assert tensor.dtype == (torch.float32 if stays else low), name
        assert torch.equal(tensor, wide[name].to(tensor.dtype)), name
    assert sum(sent_bytes) < 0.55 * sum(wide_bytes)

    tensors = full_tensors(model, meshes, layer_names(model), 1 << 18)
    taken = list(itertools.islice(tensors, 3 if dist.get_rank() == 1 else None))
    tensors.close()
    assert len(taken) == 3 or dist.get_rank() != 1
    dist.barrier()


def test_full_tensors_include_buffers_are_cast_before_the_gather_and_may_be_left_early(tmp_path):
    run_ranks(_in_bfloat16, 2, save_glm4_moe(tmp_path))


def test_for_vllm_has_fused_names_and_as_checkpoint_those_of_files(tmp_path, stacks_are_sent):
    model = reference_model(save_qwen3_moe(tmp_path))
    tensors = dict(model.named_parameters())
    fused = dict(names.for_vllm(model, tensors.items()))
    assert fused.keys() == tensors.keys()
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 96, 64)
    plain = dict(hf_names.as_checkpoint(model, tensors.items()))
    assert plain["model.layers.0.mlp.experts.3.up_proj.weight"].shape == (48, 64)
    assert len(plain) == len(fused) + 2 * (3 * 8 - 2)

    model.config.model_type = "some_other_moe"
    assert dict(names.for_vllm(model, tensors.items())).keys() == plain.keys()
