"""The planner's memory and traffic, compared with arithmetic by hand, FSDP's own groups, and a real step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, GraniteMoeConfig, Qwen3Config, Qwen3MoeConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.ulysses import SequenceParallel
from epfsdp2.engine.head.causal_head import CausalHead, Wanted
from epfsdp2.engine.head.log_probs import tile_bytes
from epfsdp2.engine.lora.adapters import Lora, lora_of
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.planner.activations import trace
from epfsdp2.engine.planner.memory import Batch, peak, timeline
from epfsdp2.engine.planner.model_sizes import ModelSizes
from epfsdp2.engine.planner.traffic import collectives
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.engine.topology.mesh import Topology, build_sequence_mesh
from tests.support.engine.sharded import sharded_model
from tests.support.engine.wire import counted_collectives
from tests.support.models.tiny import VOCAB, save_glm4_moe, save_qwen3_moe
from tests.support.ranks import run_ranks

LORA = LoraSettings("model", 4, 8, "all-linear")
FLOAT32 = ShardingOptions(param_dtype=torch.float32)
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def _sizes(options=FLOAT32, master=torch.float32, **more):
    config = Qwen3MoeConfig(**{**TINY, **more})
    return ModelSizes.built_by(partial(build_on_meta, AutoModelForCausalLM, config), options, master)


def test_timeline_of_one_case_equals_arithmetic_by_hand():
    sizes, topology = _sizes(), Topology.arrange(4, 2)
    options = replace(FLOAT32, expert_shard_dim=1)
    found = {m.when: m for m in timeline(sizes, topology, options, Batch(16))}
    experts, attention = 8 * 3 * 32 * 48, 2 * 32 * 32 + 2 * 32 * 16
    dense = attention + 8 * 32 + 2 * 32 + 2 * 8
    layer = (experts + dense) // 4
    shard = 4 * (2 * layer + 2 * 64 * 32 // 4 + 32 // 4)
    last = found["model.layers.1, forward"]
    assert last.parameters == shard and last.optimizer == 2 * shard
    held = experts // 2  # of a rank, its two shards put together
    # The final norm, and this layer: a buffer of its experts, the weights, and these put together along dim 1; the head
    # is prefetched.
    assert last.buffers == 4 * (32 + dense + 3 * held + 64 * 32)
    assert found["optimizer"].gradients == shard
    # Gradients of the head and of layer 1 are there when layer 0's are packed.
    packing = found["model.layers.0, packing gradients"]
    assert packing.gradients == 4 * (layer + 64 * 32 // 4)
    assert packing.buffers == 4 * (32 + dense + 2 * held + held // 3)


def test_timeline_of_experts_that_no_rank_shares_has_neither_gathered_weights_nor_packed_gradients():
    sizes, alone = _sizes(), Topology.arrange(4, 4)
    found = {m.when: m.buffers for m in timeline(sizes, alone, FLOAT32, Batch(16), gloo=True)}
    experts, dense = 8 * 3 * 32 * 48 // 4, 2 * 32 * 32 + 2 * 32 * 16 + 8 * 32 + 2 * 32 + 2 * 8
    others = 4 * (32 + dense)  # gathered: the final norm and the rest of the layer
    assert found["model.layers.1, forward"] == others + 4 * 64 * 32  # and the head ahead
    assert found["model.layers.0, gradients"] == found["model.layers.0, reducing gradients"] == others + 4 * experts
    on_gpu = {m.when: m.buffers for m in timeline(sizes, alone, FLOAT32, Batch(16))}  # with FSDP's two copies
    assert on_gpu["model.layers.1, forward"] == found["model.layers.1, forward"] + 2 * 4 * experts
    cast = replace(FLOAT32, param_dtype=torch.bfloat16)
    half = {m.when: m.buffers for m in timeline(_sizes(cast), alone, cast, Batch(16), gloo=True)}
    assert half["model.layers.0, gradients"] == others // 2 + 2 * 2 * experts  # with weights in bfloat16


def test_timeline_counts_kept_casts_of_experts_at_every_point_of_forward_and_backward():
    cast = ShardingOptions(checkpointing="full")
    casts = 2 * 2 * (8 * 3 * 32 * 48 // 4)  # of two layers, in bfloat16
    for master, ep, kept in ((torch.float32, 4, casts), (torch.bfloat16, 4, 0), (torch.float32, 2, 0)):
        sizes = _sizes(cast, master)
        each_time, once = (
            {m.when: m.buffers for m in timeline(sizes, Topology.arrange(4, ep), options, Batch(16, 2), gloo=True)}
            for options in (cast, replace(cast, keep_casts=True))
        )
        own = casts // 2 if kept else 0  # of the layer that computes, which is there at each time
        more = {when: once[when] - each_time[when] for when in once}
        assert more.pop("optimizer") == 0
        for when, nbytes in more.items():
            computes = "layers" in when and not when.endswith(("packing gradients", "reducing gradients"))
            assert nbytes == kept - (own if computes else 0), when


def test_timeline_parts_add_up_and_the_peak_is_the_largest_point_on_every_mesh():
    sizes = _sizes()
    for world, ep in ((1, 1), (3, 1), (6, 2), (8, 4), (12, 4)):
        topology = Topology.arrange(world, ep)
        points = list(timeline(sizes, topology, FLOAT32, Batch(64)))
        assert all(point.total == sum(point.parts.values()) and min(point.parts.values()) >= 0 for point in points)
        assert peak(sizes, topology, FLOAT32, Batch(64)) == max(points, key=lambda m: m.total)


def test_planned_peak_on_more_ranks_is_never_larger():
    options = ShardingOptions(checkpointing="selective")
    sizes = _sizes(options, num_experts=16, head_dim=16)  # FSDP pads no parameter here
    for ep in (1, 2, 4, 8):
        worlds = [world for world in (1, 2, 4, 8, 16) if world % ep == 0]
        totals = [peak(sizes, Topology.arrange(world, ep), options, Batch(256)).total for world in worlds]
        assert totals == sorted(totals, reverse=True), (ep, totals)
    wider = [peak(sizes, Topology.arrange(16, ep), options, Batch(256)).buffers for ep in (1, 2, 4, 8)]
    assert wider == sorted(wider, reverse=True)


def test_timeline_changes_with_the_settings():
    bf16 = ShardingOptions(checkpointing="full")
    sizes, topology = _sizes(bf16, num_hidden_layers=4), Topology.arrange(8, 4)

    def needs(options=bf16, **batch):
        return peak(sizes, topology, options, Batch(**{"tokens": 4096, **batch}))

    none, selective = (needs(replace(bf16, checkpointing=mode)) for mode in ("none", "selective"))
    assert needs().activations < selective.activations < none.activations
    assert needs(imbalance=2.0).activations > needs().activations
    assert needs(replace(bf16, activation_offload=True)).total <= needs().total
    on_host, two = replace(bf16, activation_offload=True, experts_backend="torch"), Batch(4096, micro_batches=2)
    offloaded, on_a_gpu = (
        {p.when: p.activations for p in timeline(sizes, topology, on_host, Batch(4096), gloo=gloo)} for gloo in (1, 0)
    )
    fetched = {on_a_gpu[when] - offloaded[when] for when in offloaded if "layers.1," in when}
    assert fetched == {4096 * sizes.traced.layers["model.layers.1"].input}, "the input before it arrives ahead"
    # With ep over all ranks of a replica FSDP packs; a GPU holds what it packed of two layers' experts for a while.
    alone = Topology.arrange(8, 4, 4)
    buffers = [
        {p.when: p.buffers for p in timeline(sizes, alone, bf16, batch, gloo=gloo)}
        for batch, gloo in ((two, False), (two, True), (Batch(4096), False))
    ]
    when = next(name for name in buffers[0] if "layers.1," in name and "reducing" in name)
    assert buffers[0][when] > buffers[1][when] == buffers[2][when]
    nccl, gloo = ({m.when: m.buffers for m in timeline(sizes, topology, bf16, Batch(1), gloo=on)} for on in (0, 1))
    copied = {when for when, nbytes in nccl.items() if gloo[when] != nbytes}
    assert copied == {f"{stage.name}, reducing gradients" for stage in sizes.stages}
    small = {"tokens": 1}
    assert needs(replace(bf16, prefetch_depth=0), **small).total <= needs(**small).total
    freed, stays = (
        max(m.buffers for m in timeline(_sizes(options, num_hidden_layers=8), topology, options, Batch(1)))
        for options in (bf16, replace(bf16, reshard_after_forward=False))
    )
    assert stays > freed
    muon = max(m.optimizer for m in timeline(sizes, topology, bf16, Batch(1), "muon"))
    assert muon < max(m.optimizer for m in timeline(sizes, topology, bf16, Batch(1)))
    replicas = peak(sizes, Topology.arrange(8, 4, 4), bf16, Batch(1))
    assert replicas.parameters > peak(sizes, topology, bf16, Batch(1)).parameters


def test_model_sizes_count_tied_embeddings_once_in_the_root():
    tied, untied = _sizes(tie_word_embeddings=True), _sizes()
    assert [stage.name for stage in tied.stages] == ["root", "model.layers.0", "model.layers.1"]
    assert [stage.name for stage in untied.stages] == ["root", "embeddings", "model.layers.0", "model.layers.1", "head"]
    one, two = (peak(s, Topology.arrange(1, 1), FLOAT32, Batch(1)).parameters for s in (tied, untied))
    assert two - one == 4 * 64 * 32


def test_model_sizes_of_a_dense_model_have_no_experts_and_refuse_a_mesh_that_splits_one():
    config = Qwen3Config(num_hidden_layers=2)
    dense = ModelSizes.built_by(partial(build_on_meta, AutoModelForCausalLM, config), FLOAT32)
    assert not dense.num_experts
    with pytest.raises(SettingError, match="ep_size"):
        peak(_sizes(), Topology.arrange(16, 16), FLOAT32, Batch(1))


def _step_is_counted(folder, ep, fsdp_size, etp, options, sp, lora, expected):
    """Count the bytes of every collective of one step, from the inputs of torch's functions."""
    rank, world, head, tokens = dist.get_rank(), dist.get_world_size(), [], 24

    def before(model):
        head.append(CausalHead(model))
        if sp > 1:
            SequenceParallel(model, build_sequence_mesh("cpu", world, sp).get_group("sp"), PackedSequences(model))
        if lora is not None:
            Lora(model, lora)

    def initialize(name, tensor, fits):
        tensor.fill_(0.1)
        return is_adapter(name)

    model, meshes = sharded_model(folder, world, ep, fsdp_size, etp, before=before, initialize=initialize, **options)
    if lora is not None:
        lora_of(model).freeze_base(model)
    model.train()
    ids = torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(rank))
    with counted_collectives(meshes.etp_group) as counted:
        positions = torch.arange(tokens * sp)[None]
        head[0].wanted = Wanted(ids.roll(-1), torch.ones(ids.shape), with_entropy=False)
        log_probs, _ = head[0].take(model(input_ids=ids, position_ids=positions, use_cache=False).logits)
        log_probs.mean().backward()
    everyone = [None] * world
    dist.all_gather_object(everyone, counted)
    # Routing is not balanced: what a rank receives and sends back differs, and its sum over the ranks does not.
    total = {name: (own.calls, sum(c[name].nbytes for c in everyone)) for name, own in counted.items()}
    predicted = {name: (calls, world * nbytes) for name, (calls, nbytes) in expected.items()}
    assert total == predicted, f"{(ep, etp, options, sp, lora)}: {total} is not {predicted}"


CASES = {  # by the number of ranks: model, ep, fsdp_size, etp, options, sp, adapters
    4: [
        (save_qwen3_moe, 2, -1, 1, {}, 1, None),
        (save_qwen3_moe, 2, 2, 1, {"checkpointing": "full"}, 1, None),
        (save_qwen3_moe, 2, -1, 1, {"checkpointing": "full"}, 4, LORA),
        (save_qwen3_moe, 2, -1, 2, {"checkpointing": "full", "dispatch_chunks": 2}, 1, None),
        (save_qwen3_moe, 1, -1, 4, {}, 1, None),
        (save_qwen3_moe, 1, -1, 2, {"checkpointing": "full"}, 1, None),
        (save_qwen3_moe, 2, -1, 2, {"checkpointing": "full"}, 1, LORA),
    ],
    2: [
        (save_qwen3_moe, 2, -1, 1, {"checkpointing": "full", "dispatch_chunks": 3}, 1, None),
        (save_glm4_moe, 1, -1, 1, {"checkpointing": "selective", "reshard_experts_after_forward": False}, 1, None),
        (save_glm4_moe, 2, -1, 1, {"checkpointing": "full"}, 1, None),
        (save_qwen3_moe, 2, -1, 1, {"checkpointing": "full", "experts_backend": "reference"}, 1, None),
    ],
}


def _planned(folder, world, ep, fsdp_size, etp, options, sp, lora):
    sharding, config = replace(FLOAT32, **options), AutoConfig.from_pretrained(folder)

    def build(dtype):
        model = build_on_meta(AutoModelForCausalLM, config, dtype)
        if lora is not None:
            Lora(model, lora)
        return model

    topology = Topology.arrange(world, ep, fsdp_size, etp)
    found = collectives(ModelSizes.built_by(build, sharding), topology, sharding, Batch(tokens=24, sp=sp))
    assert {c.name for c in found} >= ({"all-to-all sp"} if sp > 1 else set())
    return {c.name: (c.calls, c.nbytes) for c in found}


def _steps_are_counted(cases):
    for case in cases:
        _step_is_counted(*case)


@pytest.mark.parametrize("world", CASES)
def test_planned_collectives_of_a_step_have_the_bytes_of_a_real_one(tmp_path, world):
    cases = []
    for i, (save, *case) in enumerate(CASES[world]):
        (tmp_path / str(i)).mkdir()
        folder = save(tmp_path / str(i))
        cases.append((folder, *case, _planned(folder, world, *case)))
    run_ranks(_steps_are_counted, world, cases)


def test_timeline_with_lora_has_no_gradients_or_states_of_frozen_weights():
    def build(dtype):
        model = build_on_meta(AutoModelForCausalLM, Qwen3MoeConfig(**TINY), dtype)
        Lora(model, LORA)
        return model

    adapted, topology = ModelSizes.built_by(build, FLOAT32), Topology.arrange(4, 2)
    last = {m.when: m for m in timeline(adapted, topology, FLOAT32, Batch(16))}["optimizer"]
    # Input plus output size of a layer's q, k, v and o, and of the two stacks of 8 experts.
    linears = (32 + 32) + (32 + 16) + (32 + 16) + (32 + 32)
    experts = 8 * ((32 + 96) + (48 + 32))
    # FSDP pads A [4, in] to 4 rows for 4 ranks: nothing to pad.
    assert last.gradients == 4 * 2 * 4 * (linears + experts) // 4
    assert last.optimizer == 2 * last.gradients and last.parameters > 6 * last.gradients


def test_trace_of_fused_experts_saves_rows_and_the_pre_activation():
    def build():
        return build_on_meta(AutoModelForCausalLM, Qwen3MoeConfig(**TINY), torch.float32)

    lean, usual = (next(iter(trace(build(), recompute_activations=lean).layers.values())) for lean in (True, False))
    # 2 experts per token: rows of 32 with their weight and order, first product of 96, and the order of slots.
    assert lean.sent == 2 * (4 * 32 + 4 + 8) and usual.sent == 0
    assert lean.experts == lean.sent + 2 * (4 * 96 + 8)
    # The activation, its product with the other half, and what combine scales.
    assert usual.experts - lean.experts == 2 * 4 * (48 + 48 + 32)
    assert lean.dense == usual.dense


@pytest.mark.parametrize("ep", [1, 2])
def test_timeline_of_backward_counts_the_copies_of_what_computes_the_experts(ep):
    """2 experts per token, rows of 32, first product of 96, activation of 48; nothing else differs between backends."""
    topology, batch, in_backward = Topology.arrange(2, ep), Batch(4096), {}
    for backend in ("torch", "auto", "triton"):
        options = replace(FLOAT32, experts_backend=backend)
        points = timeline(_sizes(options), topology, options, batch)
        in_backward[backend] = max(p.activations for p in points if "gradients" in p.when)
    layer = next(iter(_sizes(FLOAT32).traced.layers.values()))
    by_torch, row = layer.backward * 4096, 2 * 4 * 4096
    assert in_backward["auto"] == in_backward["triton"]
    # Triton holds the activation's output, in the place of its gradient, and its input's gradient. Rows are not copied,
    # and rows of gradients exist only if rows were received.
    assert in_backward["torch"] - in_backward["triton"] == by_torch - row * (96 + 48 + (32 if ep > 1 else 0))
    on_a_cpu = max(p.activations for p in timeline(_sizes(FLOAT32), topology, FLOAT32, batch, gloo=True))
    assert on_a_cpu == in_backward["torch"]


def test_timeline_counts_the_logits_of_a_tied_head_or_a_tile_of_them():
    def logits(options, tokens, **sizes):
        points = timeline(_sizes(options, tie_word_embeddings=True, **sizes), Topology.arrange(2, 1), options, tokens)
        return {m.when: m for m in points}["logits"].logits

    whole, bf16 = replace(FLOAT32, chunked_logits=False), ShardingOptions()
    assert logits(whole, Batch(64)) == 64 * 64 * 12
    assert logits(FLOAT32, Batch(64)) == 64 * 64 * 4
    # On a GPU a tile has at most 2,048 tokens and 16,384 tokens of the vocabulary; hidden states have 32.
    assert logits(FLOAT32, Batch(8192), vocab_size=32768) == 2048 * 16384 * 4
    in_bf16 = 2048 * 16384 * 2 + 32 * 4 * (8192 + 16384)
    assert logits(bf16, Batch(8192), vocab_size=32768) == in_bf16
    assert tile_bytes(8192, 32768, 32, torch.float32, "cpu") == 256 * 1024 * 8
    granite = GraniteMoeConfig(**{**TINY, "num_local_experts": 8, "intermediate_size": 48, "logits_scaling": 2.0})
    build = partial(build_on_meta, AutoModelForCausalLM, granite)
    assert not ModelSizes.built_by(build, FLOAT32).chunked_logits
    fused = replace(FLOAT32, head_in_root=True)
    assert max(m.logits for m in timeline(_sizes(fused), Topology.arrange(2, 1), fused, Batch(64))) == 0
