"""A tiny random model of every family that vLLM's CPU build runs and of dense ones, with vLLM's settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epfsdp2.engine.compat import versions
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.engine.topology.dtensor import persistent_buffers
from epfsdp2.rollout.transport.full_gather import narrower
from tests.parity.families import Family
from tests.support.models.vlm import IMAGE_TOKENS

__all__ = ["SERVED", "Served", "build", "export", "randomise", "sent"]


@dataclass(frozen=True)
class Served:
    """How a family's model is made and served.

    Args:
        family: the model. Its matrices aren't square (hidden is neither the experts' size nor twice it), its vocabulary
            is one that vLLM pads, and the sizes of its experts are multiples of 32 (the CPU kernel's rows).
        dtype: what vLLM runs it in.
        settings: of vLLM's engine, that its CPU build needs for this family.
        environment: the same.
        broken: release of vLLM -> why it can't run this family by itself, without any sync.
        mute: release of vLLM whose CPU build loads the family, but can't compute with it -> why: parameters alone are
            compared.
    """

    family: Family
    dtype: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    mute: dict[str, str] = field(default_factory=dict)

    def skip_where_broken(self) -> None:
        """Skip the running test, with the reason, where the installed vLLM can't run the family."""
        if _release() in self.broken:
            pytest.skip(f"vLLM {_release()}: {self.broken[_release()]}")

    @property
    def is_mute(self) -> bool:
        return _release() in self.mute


def _release() -> str:
    return ".".join(str(versions.installed("vllm")).split(".")[:2])


VOCAB = 200


def _sizes(**own: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **own,
    }


def _of(name: str, config: str = "", **sizes: Any) -> Family:
    return Family(f"{name}ForCausalLM", config or f"{name}Config", _sizes(**sizes))


def _seeing(name: str, text: dict[str, Any], **tower: Any) -> Family:
    """A model of text and images; ``tower`` are further sizes of its vision tower."""
    sizes = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 96}
    vision = {"vision_config": {**sizes, "num_position_embeddings": 16, **tower}, "tie_word_embeddings": False}
    return Family(
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {"text_config": _sizes(**text), **vision, **IMAGE_TOKENS},
    )


_QWEN = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
}
_LOCAL = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
_DENSE = {"intermediate_size": 160}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 64,
}
# Without AMX vLLM's CPU kernel takes a state in float32 alone; by default it has the model's dtype.
_STATE = {} if torch.cpu._is_amx_tile_supported() else {"mamba_ssm_cache_dtype": "float32"}
_GEMMA = {
    **_QWEN,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}
_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
# The head size of these configs is hidden / heads, and vLLM's CPU attention takes 32.
_THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
# vLLM's operator for rotary embeddings works in place, which the CPU build gets wrong on strided views.
_PLAIN_ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# vLLM's classes of these families import torchvision, whose builds on PyPI do not load beside a CPU build of torch.
_TORCHVISION = {} if find_spec("torchvision") else {"PYTHONPATH": str(Path(__file__).parent / "stubs")}

# transformers interleaves whatever this says; vLLM does if it does.
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
_HALF_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
_TEXT_ALONE = {"limit_mm_per_prompt": {"image": 0, "video": 0}}

SERVED: dict[str, Served] = {
    "qwen3_moe": Served(_of("Qwen3Moe", **_QWEN, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe_tied": Served(_of("Qwen3Moe", **_QWEN, norm_topk_prob=True, tie_word_embeddings=True)),
    "qwen2_moe": Served(_of("Qwen2Moe", **_QWEN, shared_expert_intermediate_size=160, **_THREE_HEADS)),
    "olmoe": Served(_of("Olmoe", intermediate_size=64, num_experts=8, num_experts_per_tok=2, **_THREE_HEADS)),
    "glm4_moe": Served(_of("Glm4Moe", **_DEEPSEEK)),
    # Its routing biases and its gates are in float32 in a bfloat16 model.
    "glm4_moe_bf16": Served(_of("Glm4Moe", **_DEEPSEEK), dtype="bfloat16"),
    "dots1": Served(_of("Dots1", **_DEEPSEEK, layer_types=["full_attention"] * 2)),
    "mixtral": Served(_of("Mixtral", **_LOCAL)),
    "minimax_m2": Served(
        _of("MiniMaxM2", **_LOCAL, use_routing_bias=True, scoring_func="sigmoid", rotary_dim=32),
        settings={"hf_overrides": {"scoring_func": "softmax"}},
    ),
    "ernie4_5_moe": Served(
        _of(
            "Ernie4_5_Moe",
            intermediate_size=128,
            moe_intermediate_size=64,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
        )
    ),
    "hunyuan_v1_moe": Served(
        _of(
            "HunYuanMoEV1",
            intermediate_size=64,
            moe_intermediate_size=64,
            num_experts=8,
            moe_topk=2,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            num_shared_expert=1,
        )
    ),
    "qwen3": Served(_of("Qwen3", **_DENSE)),
    "qwen2": Served(_of("Qwen2", **_DENSE, **_THREE_HEADS)),
    "llama": Served(_of("Llama", **_DENSE)),
    "gemma4": Served(_of("Gemma4", config="Gemma4TextConfig", **_GEMMA)),
    "gemma4_vl": Served(
        Family(
            "Gemma4ForConditionalGeneration",
            "Gemma4Config",
            {
                "text_config": _sizes(**_GEMMA),
                "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, **_TWO_HEADS},
                "audio_config": None,
                "image_token_id": 94,
                "video_token_id": 95,
                "tie_word_embeddings": True,
            },
        ),
        settings=_TEXT_ALONE,
        environment=_TORCHVISION,
    ),
    "deepseek_v3": Served(
        _of(
            "DeepseekV3",
            **{**_DEEPSEEK, **_MLA},
            topk_method="noaux_tc",
            scoring_func="sigmoid",  # without it, as transformers writes it, vLLM computes another model
        ),
        settings=_PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
    "glm4v_moe": Served(
        _seeing("Glm4vMoe", {**_DEEPSEEK, "use_qk_norm": False, "rope_parameters": _HALF_MROPE}),
        settings=_TEXT_ALONE,
        environment=_TORCHVISION,
    ),
    "deepseek_v2": Served(
        _of("DeepseekV2", **{**_DEEPSEEK, **_MLA}, topk_method="greedy"),
        settings=_PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
    "glm4_moe_lite": Served(
        _of("Glm4MoeLite", **{**_DEEPSEEK, **_MLA}, mlp_layer_types=["dense", "sparse"]),
        settings=_PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
    "flex_olmo": Served(_of("FlexOlmo", intermediate_size=64, num_experts=8, num_experts_per_tok=2, **_THREE_HEADS)),
    "afmoe": Served(
        _of("Afmoe", **_QWEN, num_dense_layers=1, num_shared_experts=1, layer_types=["full_attention"] * 2)
    ),
    "granitemoe": Served(_of("GraniteMoe", **_LOCAL, **_THREE_HEADS)),
    "granitemoeshared": Served(_of("GraniteMoeShared", **_LOCAL, **_THREE_HEADS, shared_intermediate_size=96)),
    "gpt_oss": Served(
        _of("GptOss", **_LOCAL, layer_types=["sliding_attention", "full_attention"]),
        dtype="bfloat16",
        broken={
            "0.24": "its loader finds no experts of a gpt-oss in bfloat16 (KeyError: layers.0.mlp.experts.w2_weight)"
        },
    ),
    "qwen3_next": Served(
        _of("Qwen3Next", **_QWEN, **_LINEAR, norm_topk_prob=True),
        dtype="bfloat16",
        settings=_STATE,
        mute={"0.24": "without AMX its linear attention ends with 'tensor must be contiguous at last dimension'"},
    ),
    "qwen3_5_moe": Served(
        _of("Qwen3_5Moe", config="Qwen3_5MoeTextConfig", **_QWEN, **_LINEAR),
        dtype="bfloat16",
        settings=_STATE,
        environment=_TORCHVISION,
        broken={"0.24": "it has no class of its text model alone"},
    ),
    **{
        name: Served(
            # vLLM 0.29's CPU platform asks the text model's config for its architecture.
            _seeing(
                f"Qwen3VL{moe}",
                {**text, "rope_parameters": _MROPE, "architectures": [f"Qwen3{moe}ForCausalLM"]},
                deepstack_visual_indexes=[0],
            ),
            settings=_TEXT_ALONE,
            environment=_TORCHVISION,
        )
        for name, moe, text in (
            ("qwen3_vl", "", _DENSE),
            ("qwen3_vl_moe", "Moe", {**_QWEN, "norm_topk_prob": True}),
        )
    },
    **{
        name: Served(
            _seeing(kind, {**text, **_LINEAR}),
            dtype="bfloat16",
            settings={**_TEXT_ALONE, **_STATE},
            environment=_TORCHVISION,
            broken={"0.24": "its CPU build can't run it (tensor must be contiguous)"},
        )
        for name, kind, text in (("qwen3_5_vl", "Qwen3_5", _DENSE), ("qwen3_5_moe_vl", "Qwen3_5Moe", _QWEN))
    },
}
# With the attention that GPUs have; vLLM's CPU build has it since 0.29.
_NO_LATENT = "its CPU build has no latent attention"
SERVED["deepseek_v3_latent"] = replace(
    SERVED["deepseek_v3"], environment={}, broken={"0.24": _NO_LATENT, "0.27": _NO_LATENT}
)


def build(name: str) -> Any:
    """Build the family's model in float32 on the CPU, like a trainer's parameters."""
    model = SERVED[name].family.build().float()
    prepare(model)
    return model


def randomise(model: Any, seed: int) -> None:
    """Give every parameter and every persistent buffer new random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            is_matrix = tensor.dim() > 1
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0 if is_matrix else 1.0, 0.2, generator=generator))


def export(model: Any, dtype: torch.dtype, folder: Path) -> str:
    """Write the model in the dtype that a trainer computes in, as vLLM can load it; return ``folder`` as a string."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {n: t.contiguous() for n, t in hf_names.as_published(model, sent(model, dtype))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def sent(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers under the model's own names, as ``transport/full_gather.py`` does."""
    dtypes = compute_dtypes(model, ShardingOptions(param_dtype=dtype))
    for name, param in model.named_parameters():
        yield name, param.detach().to(narrower(param.dtype, dtypes[name]))
    for name, buffer in persistent_buffers(model).items():
        yield name, buffer.detach().clone()
