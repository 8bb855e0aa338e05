"""The engine's settings and a model folder, as the checks before a run take them."""

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from epfsdp2.engine.declared.engine_settings import EngineSettings

__all__ = ["TINY", "checkpoint", "engine"]

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def engine(replay="disabled", **settings):
    """Return settings of the engine: the defaults, but for those given."""
    found = EngineSettings(**{"dtype": "bf16", **settings})
    found.router_replay.mode = replay
    return found


def checkpoint(folder, kind="qwen3_moe", **settings):
    """A folder with a config and a safetensors file: all that is looked at."""
    config = AutoConfig.for_model(kind, **(TINY if kind == "qwen3_moe" else {}), **settings)
    config.save_pretrained(folder)
    save_file({"x": torch.zeros(1)}, str(folder / "model.safetensors"))
    return {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}}
