"""Tiny random models of every family on transformers' experts interface, and of four dense families.

As a command, run each in one process.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from epfsdp2.engine.compat.versions import fault_of_family
from epfsdp2.engine.model.vision import VisionTowerSync
from epfsdp2.engine.packing.compressors import use_every_compressor
from tests.parity.family import (
    DBRX,
    DEEPSEEK,
    GRANITE,
    LINEAR,
    LOCAL,
    MLA,
    QWEN,
    SPARSE_LAYERS,
    VISION,
    AsAuto,
    Family,
    model_class,
    of,
    sizes,
)
from tests.parity.newer_families import NEWER
from tests.parity.plain_names import own_values, plain_name, plain_values
from tests.parity.wrapped_families import WRAPPED
from tests.support.models.published import save_published
from tests.support.models.tiny import VOCAB

__all__ = ["ALL", "BY_SEQUENCES", "CHOOSING", "DENSE", "EVERY", "FAMILIES", "NEWER", "OUTSIDE", "STATEFUL", "STATES"]
__all__ += ["AsAuto", "Family", "load", "logits", "loss", "own_values", "packed_logits", "plain_name", "plain_values"]
__all__ += ["save"]

_CLASSIFIER = {"num_labels": VOCAB, "dtype": "float64"}  # it magnifies float32's rounding
_DENSE = {"intermediate_size": 40, "note": "dense"}
# Granite 4's name of Mamba layers; every other name means attention.
_MAMBA = transformers.GraniteMoeHybridConfig(num_hidden_layers=1).layer_types[0]
# Dense and sparse layers; chunks of attention; a layer without rotary embeddings, whose queries are scaled by position.
_LLAMA4 = sizes(
    **{**LOCAL, "num_experts_per_tok": 1},
    intermediate_size_mlp=40,
    moe_layers=[0, 2],
    no_rope_layers=[1, 1, 0],
    attention_chunk_size=8,
    floor_scale=4,
)
_LLAMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}

FAMILIES: dict[str, Family] = {
    "afmoe": of("Afmoe", **QWEN, num_dense_layers=1, num_shared_experts=1, layer_types=["full_attention"] * 3),
    "cohere2_moe": of("Cohere2Moe", **{**QWEN, "intermediate_size": 20}, layer_types=["full_attention"] * 3),
    # group_limited_greedy reads an attribute that transformers 5.9 does not set.
    "deepseek_v2": of("DeepseekV2", **{**DEEPSEEK, **MLA}, topk_method="greedy"),
    "deepseek_v3": of("DeepseekV3", **{**DEEPSEEK, **MLA}),
    "deepseek_v4": of(
        "DeepseekV4",
        # Two layers, because hyper-connections magnify rounding errors with every layer.
        **{**DEEPSEEK, "q_lora_rank": 20, "o_lora_rank": 12, "o_groups": 2, "num_key_value_heads": 1, "head_dim": 16},
        partial_rotary_factor=0.5,
        hc_mult=3,
        hc_sinkhorn_iters=3,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        num_nextn_predict_layers=0,
        sliding_window=8,
        num_hidden_layers=2,
        mlp_layer_types=["hash_moe", "moe"],
    ),
    "dots1": of("Dots1", **DEEPSEEK, layer_types=["full_attention"] * 3),
    "ernie4_5_moe": of(
        "Ernie4_5_Moe",
        intermediate_size=40,
        moe_intermediate_size=18,
        moe_num_experts=8,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "ernie4_5_vl_moe": of(
        "Ernie4_5_VLMoe",
        "ForConditionalGeneration",
        config="Ernie4_5_VLMoeConfig",
        text_config=sizes(
            intermediate_size=40,
            moe_intermediate_size=[20, 12],
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=1,
            mlp_layer_types=SPARSE_LAYERS,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        ),
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
        note="two experts modules in a layer; text alone",
    ),
    "exaone_moe": of("ExaoneMoe", **QWEN, mlp_layer_types=SPARSE_LAYERS, layer_types=["full_attention"] * 3),
    "flex_olmo": of("FlexOlmo", **{**QWEN, "intermediate_size": 20, "num_experts": 12}),
    "gemma4": of(
        "Gemma4",
        config="Gemma4TextConfig",
        **{**QWEN, "num_hidden_layers": 2},
        enable_moe_block=True,
        top_k_experts=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        global_head_dim=12,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
    ),
    "glm4_moe": of("Glm4Moe", **DEEPSEEK),
    "glm4_moe_lite": of("Glm4MoeLite", **{**DEEPSEEK, **MLA}, mlp_layer_types=SPARSE_LAYERS),
    "glm4v_moe": of(
        "Glm4vMoe",
        "ForConditionalGeneration",
        text_config=sizes(
            **DEEPSEEK,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        ),
        vision_config={**VISION, "image_size": 28, "patch_size": 14},
        note="text alone",
    ),
    "glm_moe_dsa": of(
        "GlmMoeDsa",
        **{**DEEPSEEK, **MLA},
        mlp_layer_types=SPARSE_LAYERS,
        index_topk=8,
        index_head_dim=16,
        index_n_heads=2,
    ),
    "gpt_oss": of("GptOss", **LOCAL, layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "granitemoe": of("GraniteMoe", **GRANITE),
    "granitemoehybrid": of(
        "GraniteMoeHybrid",
        **GRANITE,
        shared_intermediate_size=20,
        layer_types=[_MAMBA, "full_attention", _MAMBA],
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "granitemoeshared": of("GraniteMoeShared", **GRANITE, shared_intermediate_size=20, tie_word_embeddings=True),
    "hunyuan_v1_moe": of("HunYuanMoEV1", intermediate_size=20, num_experts=8, moe_topk=2),
    "hy_v3": of("HYV3", **QWEN, num_shared_experts=1, mlp_layer_types=SPARSE_LAYERS),
    "jamba": of(
        "Jamba",
        intermediate_size=20,
        num_experts=8,
        num_experts_per_tok=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
        use_mamba_kernels=False,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "laguna": of(
        "Laguna",
        **QWEN,
        shared_expert_intermediate_size=20,
        mlp_layer_types=SPARSE_LAYERS,
        layer_types=["full_attention"] * 3,
        num_attention_heads_per_layer=[4, 4, 4],
    ),
    "lfm2_moe": of("Lfm2Moe", **QWEN, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"]),
    "llama4": of(
        "Llama4", "ForConditionalGeneration", text_config=_LLAMA4, vision_config=_LLAMA4_VISION, note="text alone"
    ),
    "minimax": of(
        "MiniMax", **LOCAL, layer_types=["linear_attention", "full_attention", "full_attention"], block_size=8
    ),
    "minimax_m2": of("MiniMaxM2", **LOCAL),
    "mistral4": of("Mistral4", **{**DEEPSEEK, **MLA, "head_dim": 20}),
    "mixtral": of("Mixtral", **LOCAL),
    "nemotron_h": of(
        "NemotronH",
        **{**DEEPSEEK, "n_groups": 2},
        layers_block_type=["mamba", "moe", "attention", "moe"],
        moe_shared_expert_intermediate_size=20,
        use_mamba_kernels=False,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=12,
        chunk_size=8,
    ),
    "nemotron_h_latent": of(
        "NemotronH",
        **{**DEEPSEEK, "n_groups": 2},
        layers_block_type=["mamba", "moe", "moe"],
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=20,
        use_mamba_kernels=False,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=12,
        chunk_size=8,
    ),
    "olmoe": of("Olmoe", intermediate_size=20, num_experts=8, num_experts_per_tok=2),
    "openai_privacy_filter": of("OpenAIPrivacyFilter", "ForTokenClassification", **LOCAL, **_CLASSIFIER),
    "phimoe": of(
        "Phimoe",
        **LOCAL,
        router_jitter_noise=0.0,
        train=False,
        note="in eval mode: in training sparsemixer draws at random",
    ),
    "qwen2_moe": of("Qwen2Moe", **QWEN, shared_expert_intermediate_size=20),
    "qwen3_moe": of("Qwen3Moe", **QWEN, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_12": of("Qwen3Moe", **{**QWEN, "num_experts": 12, "num_experts_per_tok": 3}, tie_word_embeddings=True),
    "qwen3_next": of("Qwen3Next", **QWEN, **LINEAR, norm_topk_prob=True, std=0.05, vectors=(0.1, 0.5)),
    "qwen3_5_moe": of("Qwen3_5Moe", config="Qwen3_5MoeTextConfig", **QWEN, **LINEAR, std=0.05, vectors=(0.1, 0.5)),
    "qwen3_omni_moe": of(
        "Qwen3OmniMoeThinker",
        "ForConditionalGeneration",
        text_config=sizes(
            **QWEN, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
        ),
        vision_config={**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        vision_start_token_id=90,
        audio_start_token_id=91,
        audio_config={
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "output_dim": 48,
            "downsample_hidden_size": 8,
        },
        note="the thinker; text alone",
    ),
    "qwen3_vl_moe": of(
        "Qwen3VLMoe",
        "ForConditionalGeneration",
        text_config=sizes(
            **QWEN, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
        ),
        vision_config={**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        note="text alone",
    ),
    "solar_open": of("SolarOpen", **DEEPSEEK),
    # The index determines a family's fast case, so append new families.
    "dbrx": of("Dbrx", **DBRX),
}

# Families without experts.
DENSE: dict[str, Family] = {
    "qwen3": of("Qwen3", **_DENSE),
    "llama": of("Llama", **_DENSE, tie_word_embeddings=True),
    "gemma3": of(
        "Gemma3",
        config="Gemma3TextConfig",
        **_DENSE,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=8,
        query_pre_attn_scalar=12,
    ),
    "mistral": of("Mistral", **_DENSE, sliding_window=8),
}
FAMILIES |= WRAPPED
EVERY = {**FAMILIES, **DENSE}
ALL = {name: f for name, f in {**EVERY, **NEWER}.items() if name != "llama4" or fault_of_family(name) is None}
# Families with experts outside transformers' interface in 5.9 or, DBRX and Step3p7, in 5.24.
OUTSIDE = ("dbrx", "granitemoe", "granitemoehybrid", "granitemoeshared", "llama4", *{"step3p7"} & ALL.keys())
# Families with a state along the row: ranks share their rows by sequences. Some need newer transformers.
STATEFUL = (
    *("bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h"),
    *("nemotron_h_latent", "qwen3_5_moe", "qwen3_next"),
)
# Families whose attention chooses or compresses the keys of a whole sequence: their rows are shared in the same way.
CHOOSING = ("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl")
CHOOSING += ("inkling", "minimax_m3_vl", "mistral_large4", "qwen4_exp", "zaya")
STATES = tuple(name for name in STATEFUL if name in ALL)
BY_SEQUENCES = (*STATES, *(name for name in CHOOSING if name in ALL))


def save(name: str, folder: Path) -> Path:
    """Save the family's model as published, with random weights and correction biases from a seed."""
    family = ALL[name]
    torch.manual_seed(12)
    model = family.build()
    with torch.no_grad():
        for param in model.parameters():
            if not param.requires_grad:
                param.uniform_(-0.1, 0.1)
            elif param.dim() > 1:
                param.normal_(std=family.std)
            else:
                param.uniform_(*family.vectors)
        for buffer_name, buffer in model.named_buffers():
            if "bias" in buffer_name:
                buffer.uniform_(-0.1, 0.1)
                if "balancing_biases" in buffer_name:
                    buffer[-1] = -1.0  # transformers 5.23 overwrites the loaded value with this (Zaya)
            elif "tid2eid" in buffer_name:  # a router with experts by token id
                buffer.random_(0, 8)
    save_published(model, folder, seed=list(ALL).index(name))
    for file in folder.glob("*.safetensors") if family.dtype == "float64" else ():
        wide = {key: v.double() if v.dtype == torch.float32 else v for key, v in load_file(file).items()}
        save_file(wide, file, metadata={"format": "pt"})  # within float64() float32 can't be read
    return folder


def load(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the plain Hugging Face model, with its own loop over experts."""
    kind = model_class(ALL[name].model)
    model = kind.from_pretrained(folder, dtype=dtype, experts_implementation="eager", attn_implementation="eager")
    use_every_compressor(model)  # without it, weights of a compressor that makes no key would not decay
    return model


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return logits ``(B, S, VOCAB)`` of ids ``(B, S)``."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()


def packed_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the same logits from one packed row of all ``B`` sequences."""
    positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
    inputs = {"input_ids": ids.reshape(1, -1), "position_ids": positions, "attention_mask": None}
    if hasattr(model.config, "vision_config"):
        VisionTowerSync(model).prepare_inputs(inputs)
    return model(**inputs, use_cache=False).logits.float().view(*ids.shape, -1)


def loss(name: str, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss."""
    return nn.functional.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), ids[:, 1:].reshape(-1))


def _check(name: str, folder: Path) -> str:
    """Describe a family's gradients in one process: not finite, or their error when the batch is split."""
    model = load(name, save(name, folder)).train(ALL[name].train)
    ids = torch.randint(0, VOCAB, (8, 13), generator=torch.Generator().manual_seed(1))
    loss(name, logits(model, ids), ids).backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    bad = [n for n, g in whole.items() if not torch.isfinite(g).all()]
    if bad:
        return f"gradients that are not finite: {bad[:3]}"
    model.zero_grad()
    for part in ids.split(2):
        (loss(name, logits(model, part), part) / 4).backward()
    apart = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    worst = max((((apart[n] - g).norm() / g.norm().clamp_min(1e-12)).item(), n) for n, g in whole.items())
    frozen = sum(not p.requires_grad for p in model.parameters())
    return f"{len(whole)} gradients, {frozen} frozen, in parts {worst[0]:.0e} {worst[1] if worst[0] > 1e-5 else ''}"


if __name__ == "__main__":
    import sys
    import tempfile

    for family_name in sys.argv[1:] or ALL:
        with tempfile.TemporaryDirectory() as parent:
            try:
                print(family_name, _check(family_name, Path(parent)), flush=True)
            except Exception as error:
                print(family_name, "FAILED", repr(error)[:300], flush=True)
