"""Names of the tensors that vLLM is sent, family by family."""

import pytest
import torch

from epfsdp2.rollout import naming

from .served_families import SERVED, build, randomise, sent

LAYER = "model.layers.1"


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
def test_stacks_where_vllm_takes_them_and_checkpoint_names_for_the_rest(name, stacks, others):
    model = build(name)
    tensors = dict(naming.for_vllm(model, sent(model, torch.float32)))
    for stack in stacks:
        assert tensors[f"{LAYER}.{stack}"].shape[0] == 8
    assert {f"{LAYER}.{other}" for other in others} <= tensors.keys()
    singles = [key for key in tensors if ".experts.0." in key]
    assert (singles == []) == (stacks != ())


@pytest.mark.parametrize("name", SERVED)
def test_a_tensor_is_the_same_under_either_name(name):
    """Cut into experts again, what vLLM is sent is what is written to a checkpoint."""
    model = build(name)
    randomise(model, 1)
    written = dict(naming.as_checkpoint(model, sent(model, torch.float32)))
    whole = 0
    for key, tensor in naming.for_vllm(model, sent(model, torch.float32)):
        if key in written:
            assert torch.equal(tensor, written.pop(key))
            continue
        whole += 1
        prefix, _, stack = key.rpartition(".")
        gate, up, down = ("w1", "w3", "w2") if stack.startswith("w") else ("gate_proj", "up_proj", "down_proj")
        for expert, matrix in enumerate(tensor):
            kinds = (gate, up) if stack in ("gate_up_proj", "w13") else (down,)
            for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                assert torch.equal(part, written.pop(f"{prefix}.{expert}.{kind}.weight"))
    assert written == {}
    assert (whole > 0) == (model.config.model_type in naming.FUSED_IN_VLLM)
