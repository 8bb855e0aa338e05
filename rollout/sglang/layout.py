"""How SGLang's layout of a family differs from the common rules of ``rollout/layout/``.

Tests compare it with the layout that they trace from SGLang's own loaders (``test_sglang_layout.py``), and a running
engine after syncs of slices with a fresh one (``test_sglang.py``).
"""

from ..layout.rules import LATENT_ATTENTION, Family

__all__ = ["FAMILIES", "RECORDS_NO_ROUTES"]

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), Family()),
    **dict.fromkeys(("llama", "qwen2", "qwen3"), Family()),  # dense
    "deepseek_v3": Family(((".fused_qkv_a_proj.", ".fused_qkv_a_proj_with_mqa."),), LATENT_ATTENTION),
    "mixtral": Family(((".mlp.", ".block_sparse_moe."),)),
}

# SGLang 0.5.12 makes the routers of these without the layer's number, so that it can't say whose routes it recorded.
RECORDS_NO_ROUTES = ("mixtral", "olmoe")
