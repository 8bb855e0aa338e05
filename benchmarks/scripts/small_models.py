"""Small models of the architectures that verl's scripts name, for checks that read a config alone."""

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

__all__ = ["small_model"]

# Sizes of a small model. Experts and heads stay, because they decide whether weights can be divided.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "head_dim": 16,
    "max_position_embeddings": 65536,
}
_QWEN3_MOE = {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN2_7B = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 448}
# A pattern of model names: the type in transformers, and the sizes that stay.
ARCHITECTURES: list[tuple[str, str, dict]] = [
    (r"Qwen3-VL-30B", "qwen3_vl_moe", {"text_config": {"model_type": "qwen3_vl_moe_text", **_QWEN3_MOE}}),
    (r"Qwen3-30B-A3B", "qwen3_moe", _QWEN3_MOE),
    (r"Qwen3-Next", "qwen3_next", {"num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 512}),
    (r"Qwen3\.5-35B", "qwen3_5_moe", {"text_config": {"model_type": "qwen3_5_moe_text", "num_experts": 256}}),
    (r"gpt-oss", "gpt_oss", {"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32}),
    (r"Qwen3-VL", "qwen3_vl", {"text_config": {"model_type": "qwen3_vl_text", "num_attention_heads": 32}}),
    (r"Qwen2\.5-VL", "qwen2_5_vl", {"text_config": {"model_type": "qwen2_5_vl_text", **_QWEN2_7B}}),
    (r"Qwen3\.5", "qwen3_5", {"text_config": {"model_type": "qwen3_5_text", "num_attention_heads": 8}}),
    (r"Qwen3-", "qwen3", {"num_attention_heads": 32, "num_key_value_heads": 8}),
    (r"Qwen2\.5-32B", "qwen2", {"num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 640}),
    (r"Qwen2\.5-72B", "qwen2", {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 512}),
    (r"(?i)Qwen-?2", "qwen2", _QWEN2_7B),
    (r"(?i)seed-oss", "seed_oss", {"num_attention_heads": 80, "num_key_value_heads": 8}),
    (r"gemma", "gemma", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    (r"deepseek-coder", "llama", {"num_attention_heads": 32, "num_key_value_heads": 32}),
    (r"Mistral", "mistral", {"num_attention_heads": 32, "num_key_value_heads": 8}),
    (r"GLM-4\.1V", "glm4v", {"text_config": {"model_type": "glm4v_text"}}),
]


def small_model(name: str, models: Path) -> Path:
    """Return a folder with the config of a small model of the same architecture, and one tensor for checks of files.

    Raises:
        KeyError: for an architecture that is not in the table.
    """
    kind, kept = next((each[1:] for each in ARCHITECTURES if re.search(each[0], name)), (None, {}))
    if kind is None:
        raise KeyError(name)
    folder = models / f"{kind}_{kept.get('num_attention_heads', '')}"
    if not folder.exists():
        config = _small_config(kind, kept)
        # verl looks a critic's class up by it.
        auto = AutoModelForImageTextToText if "text_config" in kept else AutoModelForCausalLM
        config.architectures = [auto._model_mapping[type(config)].__name__]
        folder.mkdir(parents=True)
        config.save_pretrained(folder)
        save_file({"x": torch.zeros(1)}, str(folder / "model.safetensors"))
    return folder


def _small_config(kind: str, kept: dict) -> PretrainedConfig:
    if text := kept.get("text_config"):
        sizes = _sizes(text["model_type"], text)
        return AutoConfig.for_model(kind, text_config=sizes, vision_config={"depth": 1})
    return AutoConfig.for_model(kind, **_sizes(kind, kept))


def _sizes(kind: str, kept: dict) -> dict:
    stock = AutoConfig.for_model(kind)
    return {key: value for key, value in SMALL.items() if hasattr(stock, key)} | kept
