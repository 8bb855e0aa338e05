"""The weights that vLLM quantises, and the places of values and scales in vLLM's own parameters, by family."""

import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.compat import versions
from epfsdp2.engine.model import hf_names
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import is_quantised, planned_layout, slices_of_scales, target_slices
from epfsdp2.rollout.vllm.layout import FP8_FAMILIES, known_families
from tests.rollout.families import config_of, model_of
from tests.rollout.served_families import SERVED, randomise
from tests.support.models.quantised import COMPRESSED, compressed
from tests.support.ranks import run_ranks
from tests.support.rollout.loader_trace import held_tensors
from tests.support.rollout.vllm_engine import no_segments_are_left, segments_identity  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not versions.vllm_in(">=0.27"), reason="vLLM before 0.27 has other FP8 loaders")

BLOCK = 128
# Blocks divide every worker's part of these.
_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
_EXPERTS = {"intermediate_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 4}
_MANY = {**_EXPERTS, "num_experts": 4}
_SHARED = {**_MANY, "shared_expert_intermediate_size": 256}
_LOCAL = {"intermediate_size": 256, "num_local_experts": 4}
# The last block of the keys' compression is a partial one, as in DeepSeek (576 rows).
_RANKS = {"q_lora_rank": 128, "kv_lora_rank": 128}
_LATENT = {**_EXPERTS, **_RANKS, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
_DENSE = {"intermediate_size": 512}
CASES = {
    **dict.fromkeys(("qwen3_moe", "afmoe", "exaone_moe"), _MANY),
    **dict.fromkeys(("qwen2_moe", "laguna", "qwen3_5_moe", "qwen3_next"), _SHARED),
    **dict.fromkeys(("olmoe", "cohere2_moe", "flex_olmo", "jamba"), {"intermediate_size": 256, "num_experts": 4}),
    **dict.fromkeys(("mixtral", "granitemoe", "minimax_m2"), _LOCAL),
    **dict.fromkeys(("glm4_moe", "dots1", "solar_open"), _EXPERTS),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3_latent", "deepseek_v2", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("qwen3", "qwen2", "llama", "gemma3", "mistral"), _DENSE),
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4},
    "gemma4": {**_MANY, "global_head_dim": 64, "num_global_key_value_heads": 4},
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 256},
    "granitemoehybrid": {
        **_LOCAL,
        "shared_intermediate_size": 256,
        **{"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 2},
    },
    "hunyuan_v1_moe": {"intermediate_size": 256, "moe_intermediate_size": [256, 256], "num_experts": 4},
    "hy_v3": {**_MANY, "expert_hidden_dim": 256},
}
# Plain names, renamed experts, latent attention.
QUICK = ("qwen3_moe", "mixtral", "deepseek_v3_latent")

# On two workers a projection with a row per head begins inside a block, which vLLM refuses.
_WHOLE_BLOCKS = {"granitemoehybrid", "laguna", "qwen3_next"}
# Two such projections form one parameter, so that blocks do not fit on one worker either.
_WITHOUT_BLOCKS = {"qwen3_5_moe"}

# Arguments of ``Rollout`` by the name of a kind of quantisation.
KINDS = {"blocks": {"block": BLOCK}, "fp8": {"channels": "fp8"}, "int8": {"channels": "int8"}}
_SCALE = re.compile(r"weight_scale(?:_inv)?$")


def _quantised(weight, kind):
    """Values and scales of vLLM's online quantisation or of compressed-tensors, expert by expert."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if kind != "blocks":
        return compressed(weight, kind)
    if weight.dim() == 2:
        return per_block_cast_to_fp8(weight, [BLOCK, BLOCK], use_ue8m0=False)
    values, scales = zip(*(_quantised(one, kind) for one in weight), strict=True)
    return torch.stack(values), torch.stack(scales)


def _theirs(model, folder, kind):
    """vLLM's model in FP8, INT8 or bfloat16, without kernels, which not every processor has."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as moe_fp8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_int8 as moe_int8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8 as w8a8
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import deepseek_v2, registry

    model.config.architectures = [type(model).__name__]
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(model.config.num_hidden_layers)]
    blocks = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    blocks |= {"fmt": "e4m3", "ignored_layers": gates}
    if kind:
        model.config.quantization_config = blocks if kind == "blocks" else COMPRESSED[kind]
    model.config.save_pretrained(folder)
    world = dist.get_world_size()
    asked = EngineArgs(
        model=str(folder), dtype="bfloat16", tensor_parallel_size=world, skip_tokenizer_init=True, enforce_eager=True
    )
    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):  # it would import vLLM anew
        engine = asked.create_engine_config()
    triton = (Fp8MoeBackend.TRITON, None)
    config = compressed_tensors.CompressedTensorsConfig
    with (
        set_current_vllm_config(engine),
        mock.patch.object(fp8, "init_fp8_linear_kernel"),
        mock.patch.object(fp8, "select_fp8_moe_backend", return_value=triton),
        mock.patch.object(w8a8, "init_fp8_linear_kernel"),
        mock.patch.object(moe_fp8, "select_fp8_moe_backend", return_value=triton),
        mock.patch.object(moe_int8, "select_int8_moe_backend", return_value=(None, None)),
        mock.patch.object(config, "_check_scheme_supported", return_value=True),
        mock.patch.object(deepseek_v2, "MultiHeadLatentAttentionWrapper", lambda *args, **kwargs: torch.nn.Module()),
    ):
        init_distributed_environment(world, dist.get_rank(), "env://", dist.get_rank(), "gloo")
        ensure_model_parallel_initialized(world, 1)
        return initialize_model(engine)


def _quantised_parameters(theirs, plain, model, kind):
    """The parameters that vLLM's loaders fill in bfloat16, and its function quantises."""
    plain.load_weights(iter(hf_names.as_checkpoint(model, ((n, p.detach()) for n, p in model.named_parameters()))))
    loaded, params = held_tensors(plain), held_tensors(theirs)
    held = {}
    for name, param in params.items():
        if param.dtype not in (torch.float8_e4m3fn, torch.int8):
            continue
        values, scales = _quantised(loaded[name].detach().bfloat16(), kind)
        scale = f"{name}_scale_inv" if kind == "blocks" else f"{name}_scale"
        assert (values.shape, scales.shape) == (param.shape, params[scale].shape), name
        held |= {name: values, scale: scales}
    return held


def _planned(model, rank, world, held, kind):
    """The same parameters from the trainer's slices; raises if one is missing."""
    heads, rollout = Heads.of(model.config), Rollout(world, **KINDS[kind])
    found = {name: torch.zeros_like(param) for name, param in held.items()}
    for name, weight in model.named_parameters():
        if not is_quantised(heads.family, name):
            continue
        tensor = TensorSpec(name, tuple(weight.shape), 1)
        slices = target_slices(tensor, rollout, rank, heads)
        values, scales = _quantised(weight.detach(), kind)
        for parts, whole in ((slices, values), (slices_of_scales(tensor, slices, rollout, heads.family), scales)):
            for part in parts:
                found[part.parameter][tuple(map(slice, part.at, part.end))] = whole[part.block.slices]
    specs = [TensorSpec(name, tuple(p.shape), 1) for name, p in model.named_parameters()]
    layout = planned_layout(specs, rollout, rank, heads)
    missing = {name for name in layout if _SCALE.search(name)} ^ {name for name in held if _SCALE.search(name)}
    assert not missing, missing
    return found


def _compare(folder, families, kind):
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_DIST_IDENT"] = segments_identity(folder)

    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for family in families:
        stubs = SERVED[family].environment.get("PYTHONPATH")
        with mock.patch.dict(os.environ, SERVED[family].environment), mock.patch.object(sys, "path", sys.path[:]):
            sys.path += [stubs] if stubs else []
            model = model_of(config_of(family, **{**_SIZES, **CASES[family]}))
            randomise(model, 1)
            model.bfloat16().requires_grad_(False)
            plain = _theirs(model, Path(folder) / f"{family}-{rank}-plain", "")
            theirs = _theirs(model, Path(folder) / f"{family}-{rank}", kind)
            held = _quantised_parameters(theirs, plain, model, kind)
            planned = _planned(model, rank, world, held, kind)
        wrong += [
            (family, name)
            for name, param in held.items()
            if not torch.equal(param.contiguous().view(torch.uint8), planned[name].contiguous().view(torch.uint8))
        ]
        assert any(_SCALE.search(name) for name in held), family
    assert not wrong, wrong[:10]


def _known(families):
    return [family for family in families if config_of(family).model_type in known_families()]


def test_families_in_fp8_are_compared():
    assert {config_of(family).model_type for family in CASES} == FP8_FAMILIES.keys()


def test_fp8_slices_are_as_vllm_quantises_its_parameters(tmp_path):
    run_ranks(_compare, 2, str(tmp_path), _known(QUICK), "blocks", timeout=600)


@pytest.mark.long
def test_fp8_slices_of_all_families_are_as_vllm_quantises_its_parameters(tmp_path):
    cut = CASES.keys() - _WHOLE_BLOCKS - _WITHOUT_BLOCKS
    run_ranks(_compare, 2, str(tmp_path), _known(sorted(cut)), "blocks", timeout=600)
    run_ranks(_compare, 1, str(tmp_path), _known(sorted(_WHOLE_BLOCKS)), "blocks", timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_slices_with_scales_of_rows_of_all_families_are_as_vllm_quantises_its_parameters(tmp_path, kind):
    # On one worker, because the parameter of one of several may have a part of a row, whose scale differs.
    run_ranks(_compare, 1, str(tmp_path), _known(CASES), kind, timeout=600)
