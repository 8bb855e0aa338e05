"""The planned and the actual layout of a worker, as they are compared before the first sync."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.rollout.layout.layout_check import (
    RANK,
    actual_layout,
    difference,
    named_layers,
    rank_entry,
    unpadded_shape,
)
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import planned_layout

HEADS = Heads(queries=4, keys=2, dim=16)
TENSORS = [
    TensorSpec("model.embed_tokens.weight", (200, 64), 2),
    TensorSpec("model.layers.0.self_attn.q_proj.weight", (64, 64), 2),
    TensorSpec("model.layers.0.self_attn.k_proj.weight", (32, 64), 2),
    TensorSpec("model.layers.0.self_attn.v_proj.weight", (32, 64), 2),
    TensorSpec("model.layers.0.mlp.gate.weight", (6, 64), 2),
    TensorSpec("model.layers.0.mlp.experts.gate_up_proj", (6, 96, 64), 2),
    TensorSpec("model.layers.0.mlp.experts.down_proj", (6, 64, 48), 2),
]


def test_planned_layout_under_tensor_parallelism_has_each_workers_slices():
    planned = [planned_layout(TENSORS, Rollout(2), worker, HEADS) for worker in (0, 1)]
    assert planned[1] == {
        RANK: "1 of 2 in tensor parallel, experts cut",
        "model.embed_tokens.weight": "[72, 64] from 128",
        "model.layers.0.self_attn.qkv_proj.weight": "[64, 64] from 0",
        "model.layers.0.mlp.gate.weight": "[6, 64] from 0",
        "model.layers.0.mlp.experts.w13_weight": "[6, 48, 64] from 0",
        "model.layers.0.mlp.experts.w2_weight": "[6, 64, 24] from 0",
    }
    assert planned[0]["model.embed_tokens.weight"] == "[128, 64] from 0"
    assert difference(planned[0], planned[1]) != "" == difference(planned[1], planned[1])


def test_named_layers_names_a_gate_outside_of_experts_and_tied_embeddings_before_the_head():
    """vLLM's runner of experts, which comes first in transformers' code, holds the block's gate too."""
    model, gate, table = torch.nn.Module(), torch.nn.Linear(2, 2), torch.nn.Embedding(2, 2)
    model.model = torch.nn.Module()
    model.model.mlp = torch.nn.Module()
    model.model.mlp.experts = torch.nn.Module()
    model.model.mlp.experts.gate = model.model.mlp.gate = gate
    model.model.embed_tokens = model.lm_head = table
    names = {layer: name for name, layer in named_layers(model)}
    assert names[gate] == "model.mlp.gate" and names[table] == "model.embed_tokens"
    assert len(names) == len(named_layers(model)) == 6


@pytest.mark.parametrize("norm", ["pre_fc_norm_hidden", "layers.0.enorm"])
def test_named_layers_of_a_drafter_beside_the_model_have_the_checkpoints_names(norm):
    drafter = torch.nn.Module()
    drafter.model = torch.nn.Module()
    drafter.model.layers = torch.nn.ModuleList([torch.nn.Module()])
    drafter.model.set_submodule(norm, torch.nn.Linear(2, 2))
    found = dict(named_layers(drafter))
    assert found[f"mtp.{norm}"] is drafter.model.get_submodule(norm)
    assert all(name.startswith("mtp") for name in found if name)


def test_planned_layout_of_a_norm_sharded_by_heads_equals_the_actual_one():
    norm = TensorSpec("model.layers.0.self_attn.q_norm.weight", (64,), 2)
    planned = planned_layout([norm], Rollout(2), 1, Heads(queries=4, keys=2, dim=16, family="minimax_m2"))
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(32, device="meta"))
    layers = [("model.layers.0.self_attn.q_norm", layer, {"weight": layer.weight})]
    held = actual_layout(layers, rank_entry(1, Rollout(2)), lambda name, own, is_parameter: True)
    assert difference(planned, held) == ""


def test_planned_layout_of_experts_that_do_not_divide_gives_the_first_workers_more():
    planned = [planned_layout(TENSORS, Rollout(2, 2, expert_parallel=True), worker, HEADS) for worker in range(4)]
    assert [p["model.layers.0.mlp.experts.w2_weight"] for p in planned] == [
        "[2, 64, 48] from 0",
        "[2, 64, 48] from 2",
        "[1, 64, 48] from 4",
        "[1, 64, 48] from 5",
    ]
    assert planned[2][RANK] == "0 of 2 in tensor parallel, experts whole"


def _held(places, unpadded=48):
    """Return the actual layout of one experts layer with the given expert map."""
    layer = torch.nn.Module()
    layer.w2_weight = torch.nn.Parameter(torch.empty(2, 64, 48, device="meta"))
    layer._expert_map = torch.tensor(places)
    layer.moe_config = SimpleNamespace(
        hidden_dim=64,
        hidden_dim_unpadded=64,
        intermediate_size_per_partition=48,
        intermediate_size_per_partition_unpadded=unpadded,
    )
    layers = [("mlp.experts.routed_experts", layer, {"w2_weight": layer.w2_weight, "_expert_map": layer._expert_map})]
    return actual_layout(layers, rank_entry(0, Rollout(1)), lambda name, own, is_parameter: is_parameter)


def test_actual_layout_names_experts():
    assert _held([-1, -1, 0, 1])["mlp.experts.w2_weight"] == "[2, 64, 48] from 2"
    assert _held([0, -1, 1, -1])["mlp.experts.w2_weight"] == "[2, 64, 48] from experts [0, 2]"
    assert _held([1, 0, -1, -1])["mlp.experts.w2_weight"] == "[2, 64, 48] from experts [1, 0]"
    assert set(_held([0, 1, -1, -1])) == {RANK, "mlp.experts.w2_weight"}


def test_actual_layout_of_padded_experts_differs_from_every_plan():
    """Slices would be placed as if there were no padding between the gate and the up projection."""
    planned, held = {"mlp.experts.w2_weight": "[2, 64, 40] from 2"}, _held([-1, -1, 0, 1], unpadded=40)
    assert held["mlp.experts.w2_weight"] == "[2, 64, 40] from 2, padded to [2, 64, 48]"
    assert "first mlp.experts.w2_weight" in difference(
        planned, {"mlp.experts.w2_weight": held["mlp.experts.w2_weight"]}
    )


def test_actual_layout_omits_a_vocabulary_part_of_padding_only():
    table = TensorSpec("embed_tokens.weight", (32, 16), 2)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(32, 16, device="meta"))
    layer.num_embeddings_per_partition = 32
    for worker, rows in ((0, 32), (1, 0)):
        layer.shard_indices = SimpleNamespace(num_org_elements=rows, org_vocab_start_index=0 if rows else 32)
        held = actual_layout(
            [("embed_tokens", layer, {"weight": layer.weight})], rank_entry(worker, Rollout(2)), lambda *_: True
        )
        assert difference(planned_layout([table], Rollout(2), worker, HEADS), held) == ""
        assert (table.name in held) == (rows > 0)


def test_unpadded_shape_excludes_padding_of_vocabularies_sinks_and_experts():
    shards = SimpleNamespace(num_org_elements=50)
    embedding = SimpleNamespace(shard_indices=shards, num_embeddings_per_partition=64)
    assert unpadded_shape(embedding, "weight", torch.empty(64, 6, device="meta")) == [50, 6]
    attention = SimpleNamespace(n_local_heads=8)  # DeepSeek-V4's kernels take 64 heads
    assert unpadded_shape(attention, "attn_sink", torch.empty(64, device="meta")) == [8]
    sizes = {"hidden_dim": 8, "hidden_dim_unpadded": 6, "intermediate_size_per_partition": 32}
    experts = SimpleNamespace(moe_config=SimpleNamespace(**sizes, intermediate_size_per_partition_unpadded=24))
    for name, padded, shape in (
        ("w13_weight", (64, 8), [48, 6]),
        ("w2_weight", (8, 32), [6, 24]),
        ("w2_bias", (8,), [6]),
    ):
        assert unpadded_shape(experts, name, torch.empty(5, *padded, device="meta")) == [5, *shape]


def test_difference_names_the_first_entry_in_the_workers_order():
    held = {"a": "[1] from 0", "b": "[2] from 0", "c": "[3] from 0"}
    planned = {"c": "[4] from 0", "b": "[5] from 0", "d": "[1] from 0"}
    message = difference(planned, held)
    assert message.endswith("differ in 4 of 4 entries, first a: planned is nothing, actual is [1] from 0")


def test_heads_of_a_config_whose_layers_differ_are_the_first_layers():
    """Since 5.19 transformers' config of Step-3.7 raises at ``num_attention_heads``; each layer's own has it."""
    layer = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    config = SimpleNamespace(model_type="step3p7", num_hidden_layers=1, is_heterogeneous=True, per_layer_config=[layer])
    config.get_text_config = lambda: config
    assert Heads.of(config) == Heads(queries=6, keys=2, dim=16, family="step3p7", decoder_layers=1)
