"""Families that transformers has had since 5.9, as far as the installed version has them."""

import importlib

from tests.parity.family import (
    DEEPSEEK,
    GRANITE,
    LINEAR,
    LOCAL,
    MLA,
    QWEN,
    SMALL_TOWER,
    SPARSE_LAYERS,
    VISION,
    Family,
    of,
    sizes,
)
from tests.support.models.tiny import VOCAB

__all__ = ["KNOWN", "NEWER"]

_WINDOW = ["sliding_attention", "full_attention", "sliding_attention"]
_HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_OCR_VISION = {
    "sam_config": {
        "hidden_size": 16,
        "output_channels": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
        "global_attn_indexes": [0],
        "mlp_dim": 16,
        "downsample_channels": [8, 16],
    },
    "encoder_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}
_HY_V4 = {
    **{**DEEPSEEK, **MLA},
    **_INDEX,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "hc_mult": 3,
}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 8,
}
_INKLING2 = {
    **_INKLING,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": VOCAB,
}
_INKLING2_VISION = {**SMALL_TOWER, "posemb_grid_size": 4, "projection_hidden_dim": 16, "text_hidden_size": 48}
# In float64: on 13 tokens, linear attention, hyper-connections, a router of three layers and layers that run several
# times (Inkling2-Loop: 1.9e-5 in float32) magnify float32's rounding beyond 1e-5.
_MAGNIFIES = {"dtype": "float64"}

KNOWN: dict[str, Family] = {
    "granitemoe_swa": of(
        "GraniteMoeSWA", **GRANITE, shared_intermediate_size=20, layer_types=_WINDOW, sliding_window=8
    ),
    "deepseek_v32": of("DeepseekV32", **{**DEEPSEEK, **MLA}, **_INDEX),
    "kimi_linear": of(
        "KimiLinear",
        **{**DEEPSEEK, **MLA, "q_lora_rank": None},
        num_local_experts=8,
        linear_attn_config={
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
    ),
    "bailing_hybrid": of(
        "BailingHybrid",
        **{**DEEPSEEK, **MLA, "head_dim": 16},
        num_local_experts=8,
        layer_types=_HYBRID,
        num_mtp_layers=0,
    ),
    "mimo_v2_flash": of(
        "MiMoV2Flash",
        **DEEPSEEK,
        v_head_dim=10,
        layer_types=_WINDOW,
        sliding_window=8,
        mlp_layer_types=SPARSE_LAYERS,
    ),
    "minimax_m3_vl": of(
        "MiniMaxM3Sparse",
        "ForConditionalGeneration",
        **_MAGNIFIES,
        config="MiniMaxM3VLConfig",
        text_config=sizes(
            **LOCAL,
            dense_intermediate_size=40,
            shared_intermediate_size=20,
            rotary_dim=8,
            mlp_layer_types=SPARSE_LAYERS,
            layer_types=["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            index_n_heads=2,
            index_head_dim=12,
            index_block_size=4,
            index_topk_blocks=2,
        ),
        vision_config=SMALL_TOWER,
        projector_hidden_size=16,
        note="text alone",
    ),
    "glm5_next": of(
        "Glm5Next",
        "ForConditionalGeneration",
        text_config=sizes(
            **{**DEEPSEEK, **MLA, "qk_rope_head_dim": 0, "head_dim": 0},
            # Two layers: as in DeepSeek-V4, hyper-connections magnify rounding errors with every layer.
            num_hidden_layers=2,
            mlp_layer_types=["sparse", "sparse"],
            layer_types=["linear_attention", "indexed_attention"],
            index_topk=8,
            index_head_dim=16,
            index_n_heads=2,
            index_kpool=2,
            linear_head_dim=16,
            linear_num_heads=4,
            hc_mult=3,
            hc_sinkhorn_iters=3,
        ),
        **_MAGNIFIES,
        vision_config={**VISION, "image_size": 28, "patch_size": 14, "projection_intermediate_size": 16},
        note="text alone",
    ),
    "mistral_large4": of(
        "MistralLarge4",
        "ForConditionalGeneration",
        # The second layer has the first one's keys and chooses for the third, which has no rotary embedding.
        text_config=sizes(
            **{**DEEPSEEK, **MLA},
            **_INDEX,
            kv_source_layers=[0, 0, 2],
            indexer_types=["full", "full", "shared"],
            no_rope_layers=[1, 1, 0],
        ),
        vision_config={**SMALL_TOWER, "model_type": "pixtral", "head_dim": 8},
        note="text alone",
    ),
    "qwen4_exp": of(
        "Qwen4Exp",
        "ForConditionalGeneration",
        **_MAGNIFIES,
        text_config=sizes(
            **QWEN,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            shared_expert_intermediate_size=20,
            layer_types=["linear_attention", "indexed_attention", "linear_attention"],
            hc_count=2,
            hc_lowrank=12,
            ple_layer_ids=[1],
            ple_embed_dim=24,
            heads_per_ngram=2,
            ngram_vocab_size_base=50,
            make_ngram_vocab_size_divisible_by=4,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=8,
            indexer_compress_ratio=2,
        ),
        vision_config={
            **SMALL_TOWER,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 48,
            "num_position_embeddings": 16,
        },
        note="text alone",
    ),
    "aria": of(
        "Aria",
        "ForConditionalGeneration",
        text_config=sizes(
            model_type="aria_text",  # as published; transformers 5.19 reads no other
            intermediate_size=20,
            moe_num_experts=8,
            moe_topk=2,
            moe_num_shared_experts=1,
        ),
        vision_config={**SMALL_TOWER, "model_type": "idefics3_vision"},
        projector_patch_to_query_dict={4: 2},
        note="text alone",
    ),
    "axk1": of("AXK1", **{**DEEPSEEK, **MLA}),
    "axk2": of("AXK2", **{**DEEPSEEK, **MLA}, **_INDEX, gated_norm_rank=4),
    "beam": of(
        "Beam",
        **QWEN,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        mlp_layer_types=SPARSE_LAYERS,
        n_group=2,
        topk_group=1,
    ),
    "deepseek_ocr2": of(
        "DeepseekOcr2",
        "ForConditionalGeneration",
        text_config=sizes(**DEEPSEEK, mlp_layer_types=SPARSE_LAYERS),
        vision_config=_OCR_VISION,
        note="text alone",
    ),
    "dots3_note": of(
        "Dots3Note",
        "ForConditionalGeneration",
        text_config=sizes(
            **{**DEEPSEEK, **MLA},
            **_INDEX,
            layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
            sliding_window=8,
            shared_experts_intermediate_size=20,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=20,
            swa_kv_lora_rank=16,
            swa_head_dim=20,
            swa_qk_nope_head_dim=12,
            swa_v_head_dim=10,
        ),
        vision_config={  # with experts too
            **SMALL_TOWER,
            **{"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 16},
            **{"moe_intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "adapter_out_dim": 48},
        },
        audio_config={
            **SMALL_TOWER,
            **{"feature_size": 8, "downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 48},
        },
        note="text alone",
    ),
    "flint": of(
        "Flint",
        **QWEN,
        layer_types=_WINDOW,
        sliding_window=8,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[0],
    ),
    "hy_v4": of(
        "HYV4",
        **_HY_V4,
        **_MAGNIFIES,
    ),
    "inkling": of(
        "Inkling",
        "ForConditionalGeneration",
        **_MAGNIFIES,
        text_config={
            **sizes(**DEEPSEEK, **_INKLING, mlp_layer_types=SPARSE_LAYERS, logits_mup_width_multiplier=3.0),
            "vocab_size": VOCAB + 6,
            "unpadded_vocab_size": VOCAB,
        },
        vision_config={"patch_size": 4, "num_hidden_layers": 4},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 6},
        note="text alone",
    ),
    "inkling2": of(
        "Inkling2",
        "ForConditionalGeneration",
        **_MAGNIFIES,
        text_config=sizes(**_INKLING2, n_layers_per_attn_res_block=2),
        vision_config=_INKLING2_VISION,
        note="text alone",
    ),
    "kolibri1": of("Kolibri1", **QWEN, shared_expert_intermediate_size=20, layer_types=_WINDOW, sliding_window=8),
    "mellum": of("Mellum", **QWEN, mlp_layer_types=SPARSE_LAYERS, layer_types=_WINDOW, sliding_window=8),
    "unlimited_ocr": of(
        "UnlimitedOcr",
        "ForConditionalGeneration",
        text_config=sizes(**DEEPSEEK, num_key_value_heads=4, sliding_window=8),
        vision_config=_OCR_VISION,
        note="text alone",
    ),
    "zaya": of(
        "Zaya",
        **_MAGNIFIES,
        moe_intermediate_size=20,
        num_experts=8,
        num_experts_per_tok=1,
        router_hidden_size=12,
        num_hidden_layers=2,
    ),
    "hy_v4_vl": of(
        "HYV4VL",
        "ForConditionalGeneration",
        text_config=sizes(
            **_HY_V4, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        ),
        **_MAGNIFIES,
        vision_config={**SMALL_TOWER, "out_hidden_size": 48, "max_image_size": 28},
        note="text alone",
    ),
    "inkling2_loop": of(
        "Inkling2Loop",
        "ForConditionalGeneration",
        **_MAGNIFIES,
        text_config=sizes(
            **_INKLING2,
            n_layers_per_attn_res_block=1,
            loop_layer_index_start=1,
            loop_layer_index_end=3,
            loop_num_passes=3,
            loop_gate_rank=4,
        ),
        vision_config=_INKLING2_VISION,
        note="text alone",
    ),
    "lara_mini": of(
        "LaraMini",
        **QWEN,
        **{**LINEAR, "layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
        sliding_window=8,
    ),
    "step3p7": of(
        "Step3p7",
        "ForConditionalGeneration",
        **_MAGNIFIES,
        text_config=sizes(
            intermediate_size=40,
            moe_intermediate_size=20,
            n_routed_experts=8,
            num_experts_per_tok=2,
            share_expert_dim=20,
            moe_router_scaling_factor=2.0,
            mlp_layer_types=SPARSE_LAYERS,
            layer_types=_WINDOW,
            sliding_window=8,
            num_sliding_attention_heads=6,
            swiglu_limits=[None, None, 0.1],
            swiglu_limits_shared=[None, 0.2, 0.1],
        ),
        vision_config=SMALL_TOWER,
        note="text alone",
    ),
    "kimi_k25": of(
        "Kimi_K25",
        "ForConditionalGeneration",
        text_config=sizes(model_type="deepseek_v3", **{**DEEPSEEK, **MLA}),
        vision_config={**SMALL_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=16,
        tie_word_embeddings=False,
        note="text alone",
    ),
}

_OUTSIDE_ONCE = ("aria",)
"""Families that older versions have outside the interface."""


def _is_there(name: str) -> bool:
    """Whether the installed transformers has the family, with experts that the engine knows."""
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:
        return False
    return name not in _OUTSIDE_ONCE or hasattr(module, "use_experts_implementation")


NEWER = {name: family for name, family in KNOWN.items() if _is_there(name)}
