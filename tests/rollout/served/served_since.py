"""Families whose layouts were first traced in vLLM 0.27, in tiny random models."""

import transformers

from tests.parity.families import Family
from tests.rollout.served.served_family import (
    DEEPSEEK,
    DENSE,
    EXPERTS,
    LOCAL,
    MAMBA2,
    MAMBA2_LAYER,
    MLA,
    PLAIN_ROTARY,
    QWEN,
    TEXT_ALONE,
    THREE_HEADS,
    TORCHVISION,
    Served,
    of,
    text_sizes,
)

__all__ = ["LATEST", "SINCE"]

# A dense layer with rotary embeddings, and one with experts and without them.
_LLAMA4 = text_sizes(
    **{**LOCAL, "num_experts_per_tok": 1},
    intermediate_size_mlp=128,
    interleave_moe_layer_step=2,
    no_rope_layers=[1, 0],
    attention_chunk_size=128,  # a multiple of vLLM's blocks
)
_LLAMA4_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 96,
    "projector_input_dim": 96,
    "projector_output_dim": 96,
}

SINCE: dict[str, Served] = {
    "flex_olmo": Served(of("FlexOlmo", intermediate_size=64, num_experts=8, num_experts_per_tok=2, **THREE_HEADS)),
    "afmoe": Served(
        of(
            "Afmoe",
            **QWEN,
            num_dense_layers=1,
            num_shared_experts=1,
            layer_types=["full_attention"] * 2,
            # As published: transformers has no such settings, and vLLM reads them.
            score_func="sigmoid",
            route_norm=True,
            n_group=1,
            topk_group=1,
        )
    ),
    "dbrx": Served(
        of(
            "Dbrx",
            **THREE_HEADS,
            d_model=96,
            attn_config={"kv_n_heads": 3, "clip_qkv": 1.0, "rope_theta": 1e4},
            ffn_config={"hidden_size": 96, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
        )
    ),
    "granitemoe": Served(of("GraniteMoe", **LOCAL, **THREE_HEADS)),
    "granitemoeshared": Served(of("GraniteMoeShared", **LOCAL, **THREE_HEADS, shared_intermediate_size=96)),
    "granitemoehybrid": Served(
        of(
            "GraniteMoeHybrid",
            **LOCAL,
            **THREE_HEADS,
            **MAMBA2,
            shared_intermediate_size=96,
            layer_types=[MAMBA2_LAYER, "attention"],
        ),
        dtype="bfloat16",  # with AMX the CPU kernel supports no other
        mute={"0.24": "its CPU build computes the state with Triton"},
    ),
    "phimoe": Served(
        of("Phimoe", **LOCAL, attention_bias=True, lm_head_bias=True),
        settings={
            "hf_overrides": {"architectures": ["PhiMoEForCausalLM"]},  # as its checkpoints call the class
            "extension": "tests.rollout.served.int_routes_extension.IntRoutes",
        },
    ),
    "exaone_moe": Served(
        of(
            "ExaoneMoe",
            **QWEN,
            num_shared_experts=1,
            mlp_layer_types=["dense", "sparse"],
            layer_types=["sliding_attention", "full_attention"],  # only the first has rotary embeddings
            n_group=1,
            topk_group=1,
            sliding_window=8,
            sliding_windows=[8, None],  # which vLLM reads
        )
    ),
    "lfm2_moe": Served(
        of(
            "Lfm2Moe",
            **QWEN,
            **THREE_HEADS,
            num_dense_layers=1,
            layer_types=["conv", "full_attention"],
            conv_L_cache=4,  # vLLM's CPU kernel supports no other width
            tie_word_embeddings=True,
        ),
        dtype="bfloat16",  # the CPU kernel supports no other
        settings={"extension": "idle_extension.NeverComputes"},
        mute={"0.27": "its CPU build packs the weights of a convolution that it then reads unpacked"},
    ),
    "hy_v3": Served(
        of(
            "HYV3",
            **QWEN,
            num_shared_experts=1,
            mlp_layer_types=["dense", "sparse"],
            # vLLM's names of the settings above.
            first_k_dense_replace=1,
            expert_hidden_dim=64,
            route_norm=True,
            qk_norm=True,
        )
    ),
    "cohere2_moe": Served(
        of(
            "Cohere2Moe",
            **{**QWEN, "intermediate_size": 64},
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=True,
        )
    ),
    "solar_open": Served(of("SolarOpen", **DEEPSEEK)),
    "gemma3": Served(
        of(
            "Gemma3",
            config="Gemma3TextConfig",
            **DENSE,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
            query_pre_attn_scalar=32,
        )
    ),
    "mistral": Served(of("Mistral", **DENSE, sliding_window=None)),
    "jamba": Served(
        of(
            "Jamba",
            **THREE_HEADS,
            intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=16,
            mamba_dt_rank=8,
        ),
        dtype="bfloat16",  # the CPU kernel supports no other
        settings={"extension": "idle_extension.NeverComputes"},
        mute={"0.27": "its CPU build has no selective scan of Mamba's first kind"},
    ),
    "deepseek_v2": Served(
        # As published: vLLM follows these whatever the method of routing is, and transformers does not.
        of(
            "DeepseekV2",
            **{**DEEPSEEK, **MLA, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
            topk_method="greedy",
        ),
        settings=PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
    "glm4_moe_lite": Served(
        of("Glm4MoeLite", **{**DEEPSEEK, **MLA}, mlp_layer_types=["dense", "sparse"]),
        settings=PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
    # By vLLM's transformers backend, whose attention has keys and values of one size.
    "mistral4": Served(
        of("Mistral4", **{**DEEPSEEK, **MLA, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}),
        broken={"0.29": "it asks for transformers 5.15 to compute latent attention by transformers' code"},
    ),
    "glm_moe_dsa": Served(
        of(
            "GlmMoeDsa",
            **{**DEEPSEEK, **MLA},
            mlp_layer_types=["dense", "sparse"],
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            index_topk=64,
            index_head_dim=128,
            index_n_heads=2,
        ),
        settings={"extension": "idle_extension.NeverComputes"},
        mute={"0.27": "its CPU build has neither latent attention nor an indexer"},
    ),
    "laguna": Served(
        of(
            "Laguna",
            **QWEN,
            shared_expert_intermediate_size=64,
            mlp_layer_types=["dense", "sparse"],
            layer_types=["full_attention"] * 2,
            num_attention_heads_per_layer=[4, 4],
        ),
        settings={"extension": "idle_extension.NeverComputes"},
        mute={"0.27": "its CPU routing refuses sigmoid scores without groups of experts"},
    ),
    "nemotron_h": Served(
        of(
            "NemotronH",
            **{**DEEPSEEK, "n_groups": 2},
            layers_block_type=["mamba", "moe", "attention", "mlp"],
            moe_shared_expert_intermediate_size=64,
            use_mamba_kernels=False,
            ssm_state_size=16,
            mamba_num_heads=4,
            mamba_head_dim=48,
            chunk_size=8,
        ),
        dtype="bfloat16",
        settings={"extension": "idle_extension.NeverComputes"},
        mute={"0.27": "its CPU build has no kernel for experts without a gate"},
    ),
    **{
        name: Served(
            Family(f"Llama4For{kind}", config, sizes),
            settings={**TEXT_ALONE, **PLAIN_ROTARY} if "text_config" in sizes else PLAIN_ROTARY,
            environment=TORCHVISION,
        )
        for name, kind, config, sizes in (
            (
                "llama4",
                "ConditionalGeneration",
                "Llama4Config",
                {"text_config": _LLAMA4, "vision_config": _LLAMA4_TOWER, "tie_word_embeddings": False},
            ),
            ("llama4_text", "CausalLM", "Llama4TextConfig", _LLAMA4),
        )
    },
}

LATEST = {
    "deepseek_v4": Served(
        of(
            "DeepseekV4",
            **{**EXPERTS, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 64, "o_lora_rank": 64},
            o_groups=2,
            index_n_heads=2,
            index_head_dim=128,
            index_topk=64,
            hc_mult=4,
            layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
            mlp_layer_types=["hash_moe", "moe"],
        ),
        dtype="bfloat16",
        settings={"extension": "idle_extension.NeverComputes"},
        published={
            **dict.fromkeys(("compress_rates", "layer_types", "mlp_layer_types", "partial_rotary_factor")),
            "compress_ratios": [4, 128],
            "num_hash_layers": 1,
            "qk_rope_head_dim": 64,
            "topk_method": "noaux_tc",
        },
        broken=dict.fromkeys(("0.24", "0.27", "0.29"), "its CPU build has no DeepSeek-V4"),
        mute={"0.32": "its CPU build computes compressed keys with Triton, which has no backend for CPUs"},
    ),
    "deepseek_v32": Served(
        of(
            "DeepseekV32",
            **{**DEEPSEEK, **MLA},
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            index_topk=64,
            index_head_dim=128,
            index_n_heads=2,
        ),
        settings={"extension": "idle_extension.NeverComputes"},
    ),
    "granitemoe_swa": Served(
        of(
            "GraniteMoeSWA",
            **LOCAL,
            **THREE_HEADS,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
        )
    ),
    "mellum": Served(of("Mellum", **QWEN, norm_topk_prob=True)),
    "mimo_v2_flash": Served(
        of(
            "MiMoV2Flash",
            **{**DEEPSEEK, "n_group": 1},
            v_head_dim=32,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=8,
            mlp_layer_types=["dense", "sparse"],
        ),
        published={
            **dict.fromkeys(("layer_types", "mlp_layer_types")),
            "add_swa_attention_sink_bias": True,
            "hybrid_layer_pattern": [0, 1],
            "layernorm_epsilon": 1e-5,
            "moe_layer_freq": [0, 1],
            "partial_rotary_factor": 0.334,
            "rope_theta": 5e6,
            "scoring_func": "sigmoid",
            "sliding_window_size": 8,
            "swa_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_rope_theta": 1e4,
            "topk_method": "noaux_tc",
        },
    ),
    "axk1": Served(
        # vLLM starts only with a norm in dense layers that it never calls, and transformers has none.
        of("AXK1", **{**DEEPSEEK, **MLA, "first_k_dense_replace": 0}, topk_method="noaux_tc", scoring_func="sigmoid"),
        settings=PLAIN_ROTARY,
        environment={"VLLM_MLA_DISABLE": "1"},
    ),
}
"""Families that only the stack ``latest`` serves."""

SINCE |= {name: served for name, served in LATEST.items() if hasattr(transformers, served.family.model)}
