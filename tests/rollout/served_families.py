"""A tiny random model of every family that vLLM's CPU build runs and of dense ones, with vLLM's settings."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.engine.topology.dtensor import persistent_buffers
from epfsdp2.rollout.sync import narrower
from tests.parity.families import Family
from tests.rollout.served.served_family import (
    DEEPSEEK,
    DENSE,
    GEMMA,
    HALF_MROPE,
    LINEAR,
    LOCAL,
    MLA,
    MROPE,
    PLAIN_ROTARY,
    QUARTER_MROPE,
    QWEN,
    STATE,
    TEXT_ALONE,
    THREE_HEADS,
    TORCHVISION,
    TWO_HEADS,
    Served,
    of,
    seeing,
    text_sizes,
)
from tests.rollout.served.served_since import SINCE

__all__ = ["SERVED", "build", "export", "publish_config", "randomise", "sent"]

SERVED: dict[str, Served] = {
    "qwen3_moe": Served(of("Qwen3Moe", **QWEN, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe_tied": Served(of("Qwen3Moe", **QWEN, norm_topk_prob=True, tie_word_embeddings=True)),
    "qwen2_moe": Served(of("Qwen2Moe", **QWEN, shared_expert_intermediate_size=160, **THREE_HEADS)),
    "olmoe": Served(of("Olmoe", intermediate_size=64, num_experts=8, num_experts_per_tok=2, **THREE_HEADS)),
    "glm4_moe": Served(of("Glm4Moe", **DEEPSEEK)),
    # Its routing biases and its gates are in float32 in a bfloat16 model.
    "glm4_moe_bf16": Served(of("Glm4Moe", **DEEPSEEK), dtype="bfloat16"),
    "dots1": Served(of("Dots1", **DEEPSEEK, layer_types=["full_attention"] * 2)),
    "mixtral": Served(of("Mixtral", **LOCAL)),
    "minimax_m2": Served(
        of("MiniMaxM2", **LOCAL, use_routing_bias=True, scoring_func="sigmoid", rotary_dim=32),
        settings={"hf_overrides": {"scoring_func": "softmax"}},
    ),
    "ernie4_5_moe": Served(
        of(
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
        of(
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
    "qwen3": Served(of("Qwen3", **DENSE)),
    "qwen2": Served(of("Qwen2", **DENSE, **THREE_HEADS)),
    "llama": Served(of("Llama", **DENSE)),
    "gemma4": Served(of("Gemma4", config="Gemma4TextConfig", **GEMMA)),
    "gemma4_vl": Served(
        Family(
            "Gemma4ForConditionalGeneration",
            "Gemma4Config",
            {
                "text_config": text_sizes(**GEMMA),
                "vision_config": {
                    "hidden_size": 64,
                    "intermediate_size": 96,
                    "num_hidden_layers": 1,
                    "position_embedding_size": 16,
                    **TWO_HEADS,
                },
                "audio_config": None,
                "image_token_id": 94,
                "video_token_id": 95,
                "tie_word_embeddings": True,
            },
        ),
        settings=TEXT_ALONE,
        environment=TORCHVISION,
    ),
    "deepseek_v3": Served(
        of(
            "DeepseekV3",
            **{**DEEPSEEK, **MLA},
            topk_method="noaux_tc",
            scoring_func="sigmoid",  # without it, as transformers writes it, vLLM computes another model
        ),
        settings=PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
    "glm4v_moe": Served(
        seeing("Glm4vMoe", {**DEEPSEEK, "use_qk_norm": False, "rope_parameters": HALF_MROPE}),
        settings=TEXT_ALONE,
        environment=TORCHVISION,
    ),
    "internvl": Served(
        Family(
            "InternVLForConditionalGeneration",
            "InternVLConfig",
            {
                "text_config": text_sizes(model_type="qwen3_moe", **QWEN, norm_topk_prob=True),
                "vision_config": {
                    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2},
                    **{"image_size": [28, 28], "patch_size": [14, 14]},
                },
                "image_token_id": 94,
                "tie_word_embeddings": False,
            },
        ),
        settings=TEXT_ALONE,
        environment=TORCHVISION,
    ),
    **SINCE,
    "gpt_oss": Served(
        of("GptOss", **LOCAL, layer_types=["sliding_attention", "full_attention"]),
        dtype="bfloat16",
        broken={
            "0.24": "its loader finds no experts of a gpt-oss in bfloat16 (KeyError: layers.0.mlp.experts.w2_weight)"
        },
    ),
    "qwen3_next": Served(
        of("Qwen3Next", **QWEN, **LINEAR, norm_topk_prob=True),
        dtype="bfloat16",
        settings=STATE,
        mute={"0.24": "without AMX its linear attention ends with 'tensor must be contiguous at last dimension'"},
    ),
    "qwen3_5_moe": Served(
        of("Qwen3_5Moe", config="Qwen3_5MoeTextConfig", **QWEN, **LINEAR),
        dtype="bfloat16",
        settings=STATE,
        environment=TORCHVISION,
        broken={"0.24": "it has no class of its text model alone"},
    ),
    **{
        name: Served(
            # vLLM 0.29's CPU platform asks the text model's config for its architecture.
            seeing(
                f"Qwen3VL{moe}",
                {**text, "rope_parameters": MROPE, "architectures": [f"Qwen3{moe}ForCausalLM"]},
                deepstack_visual_indexes=[0],
            ),
            settings=TEXT_ALONE,
            environment=TORCHVISION,
        )
        for name, moe, text in (("qwen3_vl", "", DENSE), ("qwen3_vl_moe", "Moe", {**QWEN, "norm_topk_prob": True}))
    },
    **{
        name: Served(
            seeing(kind, {**text, **LINEAR, "rope_parameters": QUARTER_MROPE}),
            dtype="bfloat16",
            settings={**TEXT_ALONE, **STATE},
            environment=TORCHVISION,
            broken={"0.24": "its CPU build can't run it (tensor must be contiguous)"},
        )
        for name, kind, text in (("qwen3_5_vl", "Qwen3_5", DENSE), ("qwen3_5_moe_vl", "Qwen3_5Moe", QWEN))
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
            if not tensor.is_floating_point():  # experts by token id
                tensor.random_(0, 8, generator=generator)


def export(model: Any, dtype: torch.dtype, folder: Path, published: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Write the model in the dtype that a trainer computes in, as vLLM can load it; return ``folder`` as a string."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    publish_config(folder, published)
    weights = {n: t.contiguous() for n, t in hf_names.as_published(model, sent(model, dtype))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def publish_config(folder: Path, published: Mapping[str, Any]) -> None:
    """Give a saved config the entries of the published one; those that are None are removed, dicts merged."""
    if published:
        config = json.loads((folder / "config.json").read_text())
        for name, value in published.items():
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
        present = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(present))


def sent(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers under the model's own names, as a sync does."""
    dtypes = compute_dtypes(model, ShardingOptions(param_dtype=dtype))
    for name, param in model.named_parameters():
        yield name, param.detach().to(narrower(param.dtype, dtypes[name]))
    for name, buffer in persistent_buffers(model).items():
        yield name, buffer.detach().clone()
