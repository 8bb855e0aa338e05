"""Names of the tensors that are sent to vLLM, for each family."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.families import RENAMED_WHEN_PUBLISHED, TRANSPOSED_WHEN_PUBLISHED
from epfsdp2.engine.topology.dtensor import checkpoint_tensors
from epfsdp2.rollout.vllm import names
from tests.parity.families import ALL, FAMILIES
from tests.rollout.served_families import SERVED, build, randomise, sent

LAYER = "model.layers.1"
# The published names in a layer of DeepSeek-V4 with an indexer.
ATTENTION = {f"attn.{n}.weight" for n in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")}
COMPRESSOR = {"ape", "norm.weight", "wkv.weight", "wgate.weight"}
DEEPSEEK_V4 = {
    *("attn.attn_sink", "attn_norm.weight", "ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias"),
    *(f"hc_{of}_{part}" for of in ("attn", "ffn") for part in ("fn", "base", "scale")),
    *(f"ffn.{of}.{w}.weight" for of in ("experts.0", "shared_experts") for w in ("w1", "w2", "w3")),
    *(f"attn.{of}compressor.{part}" for of in ("", "indexer.") for part in COMPRESSOR),
    *("attn.indexer.wq_b.weight", "attn.indexer.weights_proj.weight", *ATTENTION),
}


@pytest.mark.parametrize(
    ("name", "stacks", "others"),
    [
        ("qwen3_next", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), ("mlp.gate.weight",)),
        ("ernie4_5_moe", ("mlp.experts.gate_up_proj",), ("mlp.moe_statics.e_score_correction_bias",)),
        ("mixtral", ("block_sparse_moe.experts.w13", "block_sparse_moe.experts.w2"), ("block_sparse_moe.gate.weight",)),
        ("minimax_m2", ("block_sparse_moe.experts.w13",), ("block_sparse_moe.e_score_correction_bias",)),
        ("gpt_oss", ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"), ("self_attn.sinks",)),
        ("gemma4", ("experts.gate_up_proj", "experts.down_proj"), ("router.per_expert_scale",)),
        ("hunyuan_v1_moe", (), ("mlp.experts.7.up_proj.weight", "mlp.gate.wg.weight")),
        ("deepseek_v3", (), ("mlp.experts.0.down_proj.weight", "mlp.gate.e_score_correction_bias")),
    ],
)
def test_for_vllm_sends_stacks_only_where_vllm_loads_them(stacks_are_sent, name, stacks, others):
    model = build(name)
    tensors = dict(names.for_vllm(model, sent(model, torch.float32)))
    for stack in stacks:
        assert tensors[f"{LAYER}.{stack}"].shape[0] == 8
    assert {f"{LAYER}.{other}" for other in others} <= tensors.keys()
    singles = [key for key in tensors if ".experts.0." in key]
    assert (singles == []) == (stacks != ())


@pytest.mark.parametrize("name", SERVED)
def test_for_vllm_and_as_checkpoint_yield_equal_values(name, stacks_are_sent):
    """Split into experts, the tensors for vLLM equal those of a checkpoint."""
    model = build(name)
    randomise(model, 1)
    written = dict(hf_names.as_checkpoint(model, sent(model, torch.float32)))
    if model.config.model_type in TRANSPOSED_WHEN_PUBLISHED:
        written = dict(part for key, tensor in written.items() for part in _one_by_one(key, tensor))
    whole = 0
    for key, tensor in names.for_vllm(model, sent(model, torch.float32)):
        if key in written:
            assert torch.equal(tensor, written.pop(key))
            continue
        whole += 1
        for own, part in _one_by_one(key, tensor):
            assert torch.equal(part, written.pop(own))
    assert written == {}
    assert (whole > 0) == (model.config.model_type in names.FUSED)


def _one_by_one(key, tensor):
    """Yield the matrices of a stack of experts ``[E, out, in]``, and every other tensor as it is."""
    prefix, _, stack = key.rpartition(".")
    if not prefix.endswith(".experts") or tensor.dim() != 3:
        yield key, tensor
        return
    gate, up, down = ("w1", "w3", "w2") if stack.startswith("w") else ("gate_proj", "up_proj", "down_proj")
    kinds = (gate, up) if stack in ("gate_up_proj", "w13") else (down,)
    for expert, matrix in enumerate(tensor):
        for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
            yield f"{prefix}.{expert}.{kind}.weight", part


def test_as_checkpoint_merges_parameters_that_share_a_tensor(tmp_path):
    """ERNIE 4.5-VL: text and vision experts are one list, and their routing biases are two rows of one tensor."""
    model = FAMILIES["ernie4_5_vl_moe"].build()
    randomise(model, 1)
    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")

    waiting: dict = {}
    found = {}
    for name, tensor in model.state_dict().items():
        used_again = tensor.clone()
        found |= {key: part.clone() for key, part in names.for_vllm(model, [(name, used_again)], waiting)}
        used_again.fill_(torch.nan)
    assert not waiting
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)

    moe = "model.language_model.layers.1.mlp"
    stack = f"{moe}.vision_moe.experts.down_proj"
    last = model.get_parameter(stack)[6:]
    assert hf_names.is_by_expert(model, stack, last.shape)
    parts = dict(hf_names.experts_from(model, stack, last, 6))
    assert list(parts) == [f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in (14, 15)]
    assert all(torch.equal(part, wanted[key]) for key, part in parts.items())

    bias = f"{moe}.text_moe.gate.moe_statics.e_score_correction_bias"
    assert not hf_names.is_by_expert(model, bias, model.state_dict()[bias].shape)
    with pytest.raises(ValueError, match=r"text_moe.*e_score_correction_bias: only a part of the parameters"):
        list(hf_names.as_checkpoint(model, [(bias, model.state_dict()[bias])]))


def test_as_checkpoint_yields_published_names_of_deepseek_v4():
    kinds = ["sliding_attention", "compressed_sparse_attention"]
    model = FAMILIES["deepseek_v4"].build(layer_types=kinds).float()
    tensors = dict(hf_names.as_checkpoint(model, model.state_dict().items()))
    assert {"embed.weight", "norm.weight", "head.weight", "hc_head_fn", "layers.0.ffn.gate.tid2eid"} <= tensors.keys()
    in_layer = {name.removeprefix("layers.1.") for name in tensors if name.startswith("layers.1.")}
    assert {name for name in in_layer if hf_names.expert_of(f".{name}") in (None, 0)} == DEEPSEEK_V4


@pytest.mark.parametrize("family", sorted(RENAMED_WHEN_PUBLISHED.keys() & ALL.keys()))
def test_as_checkpoint_yields_names_that_transformers_reads_though_it_writes_others(family, tmp_path):
    model = ALL[family].build().float()
    randomise(model, seed=1)
    own = checkpoint_tensors(model)
    tensors = dict(hf_names.as_checkpoint(model, own.items()))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_as_checkpoint_yields_views_of_stacks(name):
    """transformers 5.19 alone copies the parts, a second stack's memory for each layer."""
    model = FAMILIES[name].build()
    for own, stack in model.named_parameters():
        for part, values in hf_names.as_checkpoint(model, [(own, stack.detach())]):
            assert values.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr(), part


def test_for_vllm_before_0_27_uses_checkpoint_names_for_all_families(monkeypatch):
    model = build("qwen3_moe")
    monkeypatch.setattr(names, "_takes_stacks", lambda: False)
    old = {name for name, _ in names.for_vllm(model, sent(model, torch.float32))}
    assert old == {name for name, _ in hf_names.as_checkpoint(model, sent(model, torch.float32))}
    assert any(hf_names.expert_of(name) is not None for name in old)


@pytest.mark.parametrize("takes_stacks", [True, False])
def test_for_vllm_splits_stacks_that_not_every_vllm_loads(monkeypatch, takes_stacks):
    model = build("qwen3_vl_moe")
    tensors = dict(sent(model, torch.float32))
    monkeypatch.setattr(names, "_takes_stacks", lambda: takes_stacks)
    found = dict(names.for_vllm(model, tensors.items()))
    moe = "model.language_model.layers.1.mlp.experts"
    assert not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in found)
    gate, up = tensors[f"{moe}.gate_up_proj"][3].chunk(2)
    assert torch.equal(found[f"{moe}.3.gate_proj.weight"], gate) and torch.equal(found[f"{moe}.3.up_proj.weight"], up)
    assert torch.equal(found[f"{moe}.3.down_proj.weight"], tensors[f"{moe}.down_proj"][3])
