"""Configs of models, without weights: from a folder, from the cards below, or from the hub."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers
from transformers import AutoConfig, PretrainedConfig

from ...engine.errors import SettingError, close_matches
from ...engine.model.meta import check_no_kernels

__all__ = ["CARDS", "MODEL_HELP", "config_of"]

_SECONDS = 5.0  # time-out of the request to the hub
# Differences from the defaults of transformers' config class, which are the family's first published model.
CARDS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128, "num_experts": 128},
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "head_dim": 128,
        "num_experts": 128,
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
    "Kimi-K2": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "head_dim": 128,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
MODEL_HELP = f"folder with config.json, one of {', '.join(CARDS)}, or a name on the hub; only the config is read"


def config_of(model: str) -> PretrainedConfig:
    """Return the config of a folder, of a card, or of a model on the hub, tried in this order.

    Raises:
        SettingError: no config is found, or it needs kernels from the hub.
    """
    wanted = model.lower().rpartition("/")[2]
    card = next((card for name, card in CARDS.items() if name.lower() == wanted), None)
    works = f"a folder with config.json, or {', '.join(close_matches(wanted, CARDS) or CARDS)}."
    if (Path(model) / "config.json").is_file():
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    elif card is not None:
        config = _from_json({**card, "tie_word_embeddings": False})
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists():
        config = _of_the_hub(model, works)
    else:
        raise SettingError("--model", model, "is neither a folder with config.json nor a model known here.", works)
    check_no_kernels(config, model)
    return config


def _of_the_hub(model: str, works: str) -> PretrainedConfig:
    """Return the config on the hub, by one request: the hub's own client retries a failed one for half a minute."""
    cached = try_to_load_from_cache(model, "config.json")
    if isinstance(cached, str):
        return AutoConfig.from_pretrained(Path(cached).parent, trust_remote_code=False)
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            request = Request(hf_hub_url(model, "config.json"), headers=build_hf_headers())
            with urlopen(request, timeout=_SECONDS) as found:
                return _from_json(json.load(found))
        except OSError as error:
            why = str(error)
    rule = f"is not known here and not in the hub's cache, and the hub could not be asked ({why})."
    raise SettingError("--model", model, rule, works)


def _from_json(sizes: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(sizes["model_type"], **{k: v for k, v in sizes.items() if k != "model_type"})
