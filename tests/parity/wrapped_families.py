"""Models with towers that are published around the text models of other families."""

from tests.parity.family import DEEPSEEK, MLA, QWEN, SMALL_TOWER, Family, of, sizes

__all__ = ["WRAPPED"]

WRAPPED: dict[str, Family] = {
    "internvl": of(
        "InternVL",
        "ForConditionalGeneration",
        text_config=sizes(model_type="qwen3_moe", **QWEN),
        vision_config={**SMALL_TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        note="of Qwen3-MoE; text alone",
    ),
    "mistral3": of(
        "Mistral3",
        "ForConditionalGeneration",
        text_config=sizes(model_type="mistral4", **{**DEEPSEEK, **MLA, "head_dim": 20}),
        vision_config={**SMALL_TOWER, "head_dim": 8},
        note="of Mistral 4; text alone",
    ),
}
