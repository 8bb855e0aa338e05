"""Differences between SGLang's layout of a family and the common rules of ``rollout/layout/``.

``test_sglang_layout.py`` compares it with the layout traced from SGLang's own loaders. ``test_sglang.py`` compares an
engine after syncs of slices with a fresh one.
"""

from ..layout.rules import LATENT_ATTENTION, Family

__all__ = ["FAMILIES", "RECORDS_NO_ROUTES"]

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), Family()),
    **dict.fromkeys(("llama", "qwen2", "qwen3"), Family()),  # dense
    "deepseek_v3": Family(((".fused_qkv_a_proj.", ".fused_qkv_a_proj_with_mqa."),), LATENT_ATTENTION),
    "mixtral": Family(((".mlp.", ".block_sparse_moe."),)),
}

# SGLang 0.5.12 builds these families' routers without a layer index, so recorded routes can't be assigned to layers.
RECORDS_NO_ROUTES = ("mixtral", "olmoe")
