"""The tensors that each tensor-parallel rank must hold, and how differences are reported; without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.rollout.layout.layout_check import unpadded_shape
from epfsdp2.rollout.transport.checksums import PlacedChecksums
from epfsdp2.rollout.vllm.loaded_weights import running_weights
from tests.support.rollout import verify
from tests.support.rollout.packed_weights import unpack_by_index

CONFIG = SimpleNamespace(
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=3,
    hidden_size=5,
    num_hidden_layers=1,
    num_experts=2,
    tie_word_embeddings=False,
)
LAYER = "model.layers.0"


def state() -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (70, 5),
        f"{LAYER}.self_attn.q_proj.weight": (12, 5),
        f"{LAYER}.self_attn.k_proj.weight": (6, 5),
        f"{LAYER}.self_attn.v_proj.weight": (6, 5),
        f"{LAYER}.self_attn.o_proj.weight": (5, 12),
        f"{LAYER}.self_attn.q_norm.weight": (3,),
        f"{LAYER}.self_attn.k_norm.weight": (3,),
        f"{LAYER}.input_layernorm.weight": (5,),
        f"{LAYER}.post_attention_layernorm.weight": (5,),
        f"{LAYER}.mlp.gate.weight": (2, 5),
        f"{LAYER}.mlp.experts.gate_up_proj": (2, 16, 5),
        f"{LAYER}.mlp.experts.down_proj": (2, 5, 8),
        "model.norm.weight": (5,),
        "lm_head.weight": (70, 5),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_expected_tensors_of_four_ranks_are_their_slices():
    """Four ranks and two key-value heads: neighbours share a head; the padded vocabulary ends in zeros."""
    full = state()
    ranks = [dict(verify.expected_tensors(full, CONFIG, 4, rank)) for rank in range(4)]
    qkv = ranks[3][f"{LAYER}.self_attn.qkv_proj.weight"]
    assert torch.equal(qkv[:3], full[f"{LAYER}.self_attn.q_proj.weight"][9:])
    assert torch.equal(qkv[3:6], full[f"{LAYER}.self_attn.k_proj.weight"][3:])
    assert torch.equal(qkv[6:], full[f"{LAYER}.self_attn.v_proj.weight"][3:])
    gate_up = full[f"{LAYER}.mlp.experts.gate_up_proj"]
    w13 = ranks[1][f"{LAYER}.mlp.experts.w13_weight"]
    assert torch.equal(w13, torch.cat([gate_up[:, 2:4], gate_up[:, 10:12]], 1))
    w2 = torch.cat([rank[f"{LAYER}.mlp.experts.w2_weight"] for rank in ranks], 2)
    assert torch.equal(w2, full[f"{LAYER}.mlp.experts.down_proj"])
    head = torch.cat([rank["lm_head.weight"] for rank in ranks])
    assert head.shape == (128, 5) and torch.equal(head[:70], full["lm_head.weight"]) and not head[70:].any()


def test_expected_tensors_refuses_foreign_and_missing_tensors():
    with pytest.raises(ValueError, match="1 tensors are not part of a Qwen3-MoE: model.extra"):
        verify.expected_digests({**state(), "model.extra": torch.zeros(1)}, CONFIG)
    with pytest.raises(KeyError, match="model.norm.weight"):
        verify.expected_digests({k: v for k, v in state().items() if k != "model.norm.weight"}, CONFIG)


def test_digest_differs_by_values_shape_and_dtype():
    ones = torch.ones(2, 3)
    others = [ones.view(3, 2), ones.to(torch.float64), ones.bfloat16(), torch.nextafter(ones, 2 * ones), ones.int()]
    assert len({verify.digest(t) for t in [ones, *others]}) == 6
    assert verify.digest(torch.tensor([-0.0])) == verify.digest(torch.tensor([0.0]))
    assert verify.digest(torch.ones(3, 2).t()) == verify.digest(ones)
    assert verify.digest(torch.tensor(1.0)).startswith("float32[]:")


def test_compare_names_every_kind_of_difference():
    assert verify.compare({"a": "1"}, {"a": "1"}) == ""
    report = verify.compare({"a": "1", "b": "2", "c": "3"}, {"a": "9", "b": "2", "d": "4"}, most=2)
    assert report.splitlines() == [
        "3 of 4 tensors differ:",
        "a: is 9, should be 1",
        "c: missing, should be 3",
        "and 1 more",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_unpack_by_index_inverts_a_packing_in_every_dtype(dtype):
    def pack(weight):
        return weight.view(-1, 20, 4, 30).transpose(1, 3).contiguous().view(weight.shape)

    plain = torch.randn(3, 80, 30).to(dtype)
    assert torch.equal(unpack_by_index(pack(plain), pack).float(), plain.float())
    with pytest.raises(RuntimeError, match="80 x 30 expert is not a permutation"):
        unpack_by_index(plain, lambda weight: torch.zeros_like(weight))


def _experts(backend, w13, w2):
    """A model of one experts layer as a vLLM with this backend leaves it."""
    layer, model = torch.nn.Module(), torch.nn.Module()
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w13, w2))
    layer.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend), moe_kernel=None)
    layer.moe_config = SimpleNamespace(intermediate_size_per_partition=4, is_act_and_mul=True)
    model.experts, model.norm = layer, torch.nn.LayerNorm(6)
    return model


def test_loaded_weights_with_swapped_experts_are_read_back_and_unknown_layouts_left_out(caplog):
    w13, w2 = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    placed = PlacedChecksums()
    placed.add("experts.w13_weight", (slice(0, 4, 2),), w13[::2])
    placed.add("experts.w13_weight", (slice(1, 3, 2),), w13[1::2])
    placed.add("experts.w2_weight", (slice(0, 3),), w2)
    placed.add("norm.weight", (slice(0, 6),), torch.ones(6))
    swapped, blocks = torch.cat([w13[:, 4:], w13[:, :4]], dim=1), (w13.view(3, 2, 4, 6), w2.view(3, 2, 3, 4))
    for backend, held in (
        ("TRITON", (w13, w2)),
        ("FLASHINFER_CUTLASS", (swapped, w2)),
        ("FLASHINFER_TRTLLM", blocks),  # a 4-D layout: vLLM's default on compute capability 10.x
    ):
        model = _experts(backend, *held)
        assert placed.difference(running_weights(model)) == ""
        model.norm.weight.data[0] = 2
        assert "norm.weight" in placed.difference(running_weights(model)), "the rest is still verified"
    assert "w13_weight" in placed.difference(running_weights(_experts("FLASHINFER_CUTLASS", w13, w2)))
    assert caplog.text.count("FLASHINFER_TRTLLM backend can't be read back") == 1


def test_unpadded_shape_excludes_padding():
    parameter = torch.empty(64, 6, device="meta")
    shards = SimpleNamespace(num_org_elements=50)
    embedding = SimpleNamespace(shard_indices=shards, num_embeddings_per_partition=64)
    assert unpadded_shape(embedding, "weight", parameter) == [50, 6]
    sizes = {"hidden_dim": 8, "hidden_dim_unpadded": 6, "intermediate_size_per_partition": 32}
    experts = SimpleNamespace(
        moe_config=SimpleNamespace(**sizes, intermediate_size_per_partition_unpadded=24), shard_indices=None
    )
    del experts.shard_indices
    assert unpadded_shape(experts, "w13_weight", torch.empty(5, 64, 8, device="meta")) == [5, 48, 6]
    assert unpadded_shape(experts, "w2_weight", torch.empty(5, 8, 32, device="meta")) == [5, 6, 24]
    assert unpadded_shape(experts, "w2_bias", torch.empty(5, 8, device="meta")) == [5, 6]
