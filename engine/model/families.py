"""Facts of single families of models, by ``model_type`` or by class; all else here depends on no family.

A server's layout of a family is in the server's ``layout.py`` (``rollout/``).
"""

__all__ = [
    "IMAGES_IN_FUSED_KERNELS",
    "IMAGES_UNSUPPORTED",
    "KEYS_BY_CACHE",
    "KNOWN_AS",
    "LOOPING_INDEXERS",
    "NOT_CAUSAL",
    "ONE_TOKEN_FOR_BOTH",
    "PADDED_BY_EAGER_ALONE",
    "PLACES_AS_POSITIONS",
    "READ_WITHOUT_A_CALL",
    "RENAMED_WHEN_PUBLISHED",
    "SAME_AS",
    "SCALED_BY_LENGTH",
    "SHORT_CONVOLUTIONS",
    "SPREAD_OVER_HEADS",
    "TIMES_OF_FRAMES",
    "TRANSPOSED_WHEN_PUBLISHED",
    "UNPACKED_WITH_FLASH",
]

IMAGES_IN_FUSED_KERNELS = frozenset({"glm4v", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"})
"""Families whose images reach verl's fused linear cross-entropy; those of others are dropped there in silence."""

IMAGES_UNSUPPORTED = {
    "ernie4_5_vl_moe": "moe_mm_token_type_ids choose its experts for vision, and verl's batches don't have these",
    "qwen3_omni_moe_thinker": "verl 0.9.1 has no processor for it, so its positions are not known",
}
"""Families whose images would be computed otherwise than in transformers, and why."""

KEYS_BY_CACHE = frozenset(
    f"{family}Attention"
    for family in (
        *("AXK2", "DeepseekV32", "DeepseekV4", "Dots3NoteText", "Glm5NextText", "GlmMoeDsa", "HYV4", "HYV4VL"),
        *("MiniMaxM3VL", "MistralLarge4Text"),
    )
)
"""Classes of sparse attention whose keys, and those of their indexers, all pass through transformers' cache, and whose
indexers choose by a mask, or by the positions of queries."""

LOOPING_INDEXERS = frozenset({"Qwen4ExpTextQSAIndexer"})
"""Indexers of sparse attention that choose keys for one query after the other."""

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""``model_type`` of checkpoints that bring code of their own -> transformers' class of the same architecture."""

_BAILING = "a module of your own (docs/new_family.md): of Ling's families transformers has bailing_hybrid alone"
KNOWN_AS = {
    "kimi_k2": "what epfsdp2.recipes.dequantise writes, or another copy of the folder whose config.json says "
    '"model_type": "deepseek_v3", the same architecture, and has no auto_map',
    **dict.fromkeys(("bailing_moe", "bailing_moe_linear", "bailing_moe_v2"), _BAILING),
}
"""``model_type`` of checkpoints that bring code of their own, for which transformers has no class -> what works."""

NOT_CAUSAL = {"diffusion_gemma": "its logits are of a canvas of tokens that is denoised, not of the next token."}
"""Families that give a response no log-probs, and why."""

ONE_TOKEN_FOR_BOTH = frozenset({"glm4v", "glm4v_moe"})
"""Families whose videos have the token of images, so that transformers can't tell them apart in a packed row."""

TIMES_OF_FRAMES = frozenset({"glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"})
"""Families whose processors write into a prompt when the frames of a video are shown."""

PLACES_AS_POSITIONS = {"Llama4TextAttention": {"attn_temperature_tuning": True, "use_rope": 0}}
"""Class of an attention that scales queries by their place in its input, whatever their position -> its
attributes where it does. Its queries are scaled where its attention gets the whole row (``packing/attention.py``)."""

PADDED_BY_EAGER_ALONE = {"glm_moe_dsa": "5.12"}
"""Family that sees later tokens where its attention gets no mask and is not eager -> the first transformers that is
right. A batch without padding gets no mask; packed rows always do."""

READ_WITHOUT_A_CALL = {("DeepseekV2Moe", "gate")}
"""Class and child whose weight the class reads without calling it; FSDP gathers it only when it is called."""

_W = {"gate": "w1", "down": "w2", "up": "w3"}
_DEEPSEEK_V4 = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^mtp\.layers\.", "mtp."),
    (r"\bhc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    *((rf"\.shared_experts\.{own}_proj\.", f".shared_experts.{w}.") for own, w in _W.items()),
    (r"\.sinks$", ".attn_sink"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),  # 5.24 writes it, and reads it as either
    (r"\.compressor\.indexer\.(?:scorer\.)?(weights_proj|q_b_proj|wq_b)\.", r".indexer.\1."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.(q_a|q_b|kv|gate|o_a|o_b)_proj\.", r".w\1."),
)
RENAMED_WHEN_PUBLISHED = {
    "deepseek_v4": _DEEPSEEK_V4,
    # transformers renames whole models, and published checkpoints have these names in some modules alone: of sparse
    # layers, of the tower, of attention.
    **dict.fromkeys(("kimi_linear", "minimax_m3_vl"), ((r"\.block_sparse_moe\.(\w+_proj|fc\d)\.", r".mlp.\1."),)),
    "kimi_k25": (
        (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
        (r"^model\.mm_projector\.", "mm_projector."),
    ),
    **dict.fromkeys(
        ("hy_v4", "hy_v4_vl"),
        (
            (r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre."),
            (r"(?:\.hc_pre)?\.hc_head(?:\.hc_pre)?\.", ".hc_head."),
            (r"\.(mlp|shared_experts)\.linear_gate\.", r".\1.gate_proj."),
        ),
    ),
    "nemotron_h": ((r"\.embedding\.", ".embeddings."),),
}
"""Family -> patterns of what transformers writes and vLLM does not know, and what both of them read, in order."""

SCALED_BY_LENGTH = frozenset({"PhimoeRotaryEmbedding"})
"""Rotary embeddings that are scaled by the length of what they get, whatever the kind of their frequencies."""

SHORT_CONVOLUTIONS = {"Lfm2MoeShortConv": "conv"}
"""Class of a mixer that is one causal convolution -> its child that has the weight."""

SPREAD_OVER_HEADS = {
    **dict.fromkeys(("BailingHybridDeltaAttention", "KimiLinearDeltaAttention"), "delta attention"),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5GatedDeltaNet"), "gated delta rule"),
    **dict.fromkeys(("GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), "mamba2"),
    "JambaMambaMixer": "mamba",
    "MiniMaxLightningAttention": "lightning",
}
"""Class of a mixer whose heads ranks can share -> of which kind it is (``packing/head_parts.py``)."""

TRANSPOSED_WHEN_PUBLISHED = frozenset({"qwen3_vl_moe"})
"""Families whose published checkpoints have stacks of experts ``[E, in, out]``. transformers has them ``[E, out, in]``,
reads both, told apart by their shapes, and writes its own; vLLM 0.24 and 0.29 read the published ones alone, and the
reload of 0.24 loses a part of them. Single experts, which no checkpoint has, every vLLM loads."""

UNPACKED_WITH_FLASH = dict.fromkeys(
    ("glm4v_moe_text", "ernie4_5_vl_moe_text"),
    "it passes three rows of positions to flash attention, which needs the one that separates packed sequences",
)
"""Families whose packed sequences would see each other in flash attention, and why."""
