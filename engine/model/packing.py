"""Know the models whose packed sequences silently see each other; found by running each of them."""

from typing import Any

__all__ = ["why_not_packed"]

_STATE = "some of its layers carry a state from one packed sequence into the next"
_COMPRESSED = "some of its layers compress windows of a row into one key, across sequences"
_NO_POSITIONS = "its mask is not made from the positions that separate packed sequences"
_MANY_ROWS = "it passes three rows of positions to flash attention, which needs the one that separates packed sequences"

_WITH_ANY_ATTENTION = {
    **dict.fromkeys(("jamba", "lfm2_moe", "minimax", "nemotron_h", "qwen3_next", "qwen3_5_moe_text"), _STATE),
    "deepseek_v4": _COMPRESSED,
    "glm_moe_dsa": _NO_POSITIONS,
}
_WITH_MASKS = dict.fromkeys(("afmoe", "gpt_oss", "openai_privacy_filter"), _NO_POSITIONS)
_WITH_FLASH = {"glm4v_moe_text": _MANY_ROWS, "ernie4_5_vl_moe_text": _MANY_ROWS}


def why_not_packed(config: Any, flash: bool, own_masks: bool = False) -> str | None:
    """Return why sequences that are packed into one row would see each other; None if they don't.

    Args:
        config: a model config of transformers.
        flash: whether attention is a flash attention, which takes positions in place of masks.
        own_masks: whether masks are made outside the model's code, from all positions (``fsdp/ulysses.py``).
    """
    kind = config.get_text_config().model_type
    masks = {} if own_masks else _WITH_MASKS
    return (_WITH_ANY_ATTENTION | (_WITH_FLASH if flash else masks)).get(kind)
