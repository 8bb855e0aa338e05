"""Where vLLM's own loaders put FP8 values and scales of every family that is sent them, on two workers."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.compat import versions
from epfsdp2.engine.model import hf_names
from epfsdp2.rollout.layout.layout_check import planned_layout
from epfsdp2.rollout.layout.slice_names import block_at
from epfsdp2.rollout.layout.vllm_layout import (
    FP8_FAMILIES,
    Heads,
    Rollout,
    TensorSpec,
    is_quantised,
    known_families,
    scale_slices,
    target_slices,
)
from tests.rollout.families import config_of
from tests.rollout.served_families import SERVED, randomise
from tests.support.ranks import run_ranks
from tests.support.rollout.vllm_segments import no_segments_are_left, segments_identity  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not versions.vllm_in(">=0.27"), reason="vLLM before 0.27 has other FP8 loaders")

BLOCK = 128
# Blocks divide what a worker keeps of these.
_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
_EXPERTS = {"intermediate_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 4}
CASES = {
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 256},
    "olmoe": {"intermediate_size": 256, "num_experts": 4},
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4},
    "glm4_moe": _EXPERTS,
    "dots1": _EXPERTS,
    "qwen3": {"intermediate_size": 512},
    "qwen2": {"intermediate_size": 512},
    "llama": {"intermediate_size": 512},
}


def _of_vllm(weight):
    """Values and scales as vLLM's online quantisation makes them; of stacks, expert by expert."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if weight.dim() == 2:
        return per_block_cast_to_fp8(weight, [BLOCK, BLOCK], use_ue8m0=False)
    values, scales = zip(*map(_of_vllm, weight), strict=True)
    return torch.stack(values), torch.stack(scales)


def _theirs(model, folder):
    """vLLM's model in FP8 as verl asks for it, without its kernels, which not every processor has."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.utils import initialize_model

    model.config.architectures = [type(model).__name__]
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(model.config.num_hidden_layers)]
    kind = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    model.config.quantization_config = {**kind, "fmt": "e4m3", "ignored_layers": gates}
    model.config.save_pretrained(folder)
    world = dist.get_world_size()
    engine = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        tensor_parallel_size=world,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ).create_engine_config()
    backend = (fp8.Fp8MoeBackend.TRITON, None)
    with (
        set_current_vllm_config(engine),
        mock.patch.object(fp8, "init_fp8_linear_kernel"),
        mock.patch.object(fp8, "select_fp8_moe_backend", return_value=backend),
    ):
        init_distributed_environment(world, dist.get_rank(), "env://", dist.get_rank(), "gloo")
        ensure_model_parallel_initialized(world, 1)
        return initialize_model(engine)


def _loaded(theirs, model):
    """What vLLM's loaders make of the checkpoint that verl's quantiser would write: FP8 parameters and scales."""
    from verl.utils.vllm.vllm_quant_utils import fp8_state, is_fp8_weight

    fp8_state.seen_params.clear()
    fp8_state.fp8_param_names.clear()
    tensors = []
    for name, weight in hf_names.as_checkpoint(model, model.named_parameters()):
        if is_fp8_weight(name, theirs):
            values, scales = _of_vllm(weight.detach())
            tensors += [(name, values), (f"{name}_scale_inv", scales)]
        else:
            tensors.append((name, weight.detach()))
    theirs.load_weights(iter(tensors))
    held = {name.replace(".routed_experts", ""): param.detach() for name, param in theirs.named_parameters()}
    return {n: p for n, p in held.items() if p.dtype == torch.float8_e4m3fn or n.endswith("_scale_inv")}


def _planned(model, rank, world, held):
    """The same parameters from what the trainer sends."""
    heads, rollout = Heads.of(model.config), Rollout(world, block=BLOCK)
    found = {name: torch.zeros_like(param) for name, param in held.items()}
    for name, weight in model.named_parameters():
        if not is_quantised(name):
            continue
        tensor = TensorSpec(name, tuple(weight.shape), 1)
        slices = target_slices(tensor, rollout, rank, heads)
        values, scales = _of_vllm(weight.detach())
        for parts, whole in ((slices, values), (scale_slices(tensor, slices, BLOCK), scales)):
            for part in parts:
                own = whole[part.block.slices]
                found[part.parameter][block_at(part.at, own)] = own
    specs = [TensorSpec(name, tuple(p.shape), 1) for name, p in model.named_parameters()]
    layout = planned_layout(specs, rollout, rank, heads)
    assert {name for name in layout if name.endswith("_scale_inv")} == {n for n in held if n.endswith("_scale_inv")}
    return found


def _compare(folder, families):
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_DIST_IDENT"] = segments_identity(folder)
    from transformers import AutoModelForCausalLM

    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for family in families:
        with mock.patch.dict(os.environ, SERVED[family].environment):
            model = AutoModelForCausalLM.from_config(config_of(family, **_SIZES, **CASES[family]))
            randomise(model, 1)
            model.bfloat16().requires_grad_(False)
            held = _loaded(_theirs(model, Path(folder) / f"{family}-{rank}"), model)
            planned = _planned(model, rank, world, held)
        wrong += [
            (family, name)
            for name, param in held.items()
            if not torch.equal(param.contiguous().view(torch.uint8), planned[name].contiguous().view(torch.uint8))
        ]
        assert any(name.endswith("_scale_inv") for name in held), family
    assert not wrong, wrong[:10]


def test_fp8_slices_of_every_family_are_where_vllms_loaders_put_them(tmp_path):
    assert {config_of(family).model_type for family in CASES} == FP8_FAMILIES
    families = [family for family in CASES if config_of(family).model_type in known_families()]
    run_ranks(_compare, 2, str(tmp_path), families, timeout=600)
