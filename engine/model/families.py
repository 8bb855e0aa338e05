"""What is known of single families of models, by ``model_type`` or by class; all else here depends on no family.

How vLLM cuts a family's weights is in ``rollout/layout/vllm_layout.py``.
"""

__all__ = [
    "ADAPTED_AS_STACKS_IN_VLLM",
    "CLASS_IN_VLLM",
    "CLASS_OF_SLICES",
    "FUSED_IN_VLLM",
    "IMAGES_UNSUPPORTED",
    "KNOWN_AS",
    "NOT_CAUSAL",
    "NOT_IN_VLLM",
    "PLACES_AS_POSITIONS",
    "READ_WITHOUT_A_CALL",
    "RENAMED_WHEN_PUBLISHED",
    "SCALED_BY_LENGTH",
    "SHORT_CONVOLUTIONS",
    "SPREAD_OVER_HEADS",
    "TRANSPOSED_WHEN_PUBLISHED",
    "UNPACKED_WITH_FLASH",
    "WHOLE_IN_VLLM",
]

IMAGES_UNSUPPORTED = {
    "ernie4_5_vl_moe": "moe_mm_token_type_ids choose its experts for vision, and verl's batches don't have these",
    "qwen3_omni_moe_thinker": "verl 0.9.1 has no processor for it, so its positions are not known",
}
"""Families whose images would be computed otherwise than in transformers, and why."""

_BAILING = "a module of your own (docs/new_family.md): of Ling's families transformers has bailing_hybrid alone"
KNOWN_AS = {
    "kimi_k2": 'a copy of the folder whose config.json says "model_type": "deepseek_v3", the same architecture',
    **dict.fromkeys(("bailing_moe", "bailing_moe_linear", "bailing_moe_v2"), _BAILING),
}
"""``model_type`` of checkpoints that bring code of their own, for which transformers has no class -> what works."""

CLASS_IN_VLLM = {"phimoe": "PhiMoEForCausalLM"}
"""Families that vLLM knows by the class that their published checkpoints name. For the one that transformers writes it
starts transformers' code, which it can't run: 0.24 finds no bias of the head, later ones end at the first token."""

CLASS_OF_SLICES = {"exaone_moe": ("<0.27", "ExaoneMoeForCausalLM")}
"""Families that these vLLM releases implement twice, and the class name of the one whose layout is known."""

NOT_IN_VLLM = {
    "ernie4_5_vl_moe": (
        "==0.27.*",
        "vLLM's class reads the flat config of the published code, which transformers' class does not have.",
        "moe_num_experts",
    ),
    "minimax": (
        ">=0.23",
        "vLLM has dropped its class and runs transformers' instead, without the state of its attention: rollouts would "
        "be of another model.",
        "",
    ),
}
"""Families that vLLM can't start with or computes otherwise than transformers -> in which releases, why, and what
an override of the config that vLLM reads has to name."""

NOT_CAUSAL = {
    "diffusion_gemma": "its logits are of a canvas of tokens that is denoised, not of the next token.",
}
"""Families that give a response no log-probs, and why."""

PLACES_AS_POSITIONS = {"Llama4TextAttention": {"attn_temperature_tuning": True, "use_rope": 0}}
"""Class of an attention that scales queries by their place in its input, whatever their position -> its
attributes where it does. Its queries are scaled where its attention gets the whole row (``packing/attention.py``)."""

READ_WITHOUT_A_CALL = {("DeepseekV2Moe", "gate")}
"""Class and child whose weight the class reads without calling it; FSDP gathers it only when it is called."""

RENAMED_WHEN_PUBLISHED = {"nemotron_h": (".embedding.", ".embeddings.")}
"""Family -> a part of names that transformers 5.9 writes and vLLM does not know, and what both of them read."""

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

_OWN = {"gate_up_proj": "gate_up_proj", "down_proj": "down_proj"}
_LETTERED = {"gate_up_proj": "w13", "down_proj": "w2"}
# Bit-exactly in the CPU builds of vLLM 0.27 and 0.30 (tested). vLLM silently drops unknown fused names, so nothing is
# assumed: a family that is not here gets its checkpoint's names (which are fused ones for gpt_oss and gemma4), and so
# does every family before 0.27: vLLM 0.24 drops the stacks of Qwen3-MoE and fails on Mixtral's.
FUSED_IN_VLLM: dict[str, dict[str, str]] = {
    **dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "dots1", "ernie4_5_moe"), _OWN),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), _OWN),
    **dict.fromkeys(("mixtral", "minimax_m2"), _LETTERED),
}
"""Families whose stacks of experts vLLM loads, and the names that it loads them under."""

ADAPTED_AS_STACKS_IN_VLLM = frozenset({"gpt_oss", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Families whose experts vLLM adapts by peft's stacks (``is_3d_moe_weight`` of its classes), and not one by one."""

TRANSPOSED_WHEN_PUBLISHED = frozenset({"qwen3_vl_moe"})
"""Families whose published checkpoints have stacks of experts ``[E, in, out]``. transformers has them ``[E, out, in]``,
reads both, told apart by their shapes, and writes its own; vLLM 0.24 and 0.29 read the published ones alone, and the
reload of 0.24 loses a part of them. Single experts, which no checkpoint has, every vLLM loads."""

UNPACKED_WITH_FLASH = dict.fromkeys(
    ("glm4v_moe_text", "ernie4_5_vl_moe_text"),
    "it passes three rows of positions to flash attention, which needs the one that separates packed sequences",
)
"""Families whose packed sequences would see each other in flash attention, and why."""

WHOLE_IN_VLLM = {
    "mistral4": ("<0.28", "vLLM runs transformers' class, whose plan for tensor parallelism has no attention."),
}
"""Families that vLLM can't shard, in which of its releases, and why."""
