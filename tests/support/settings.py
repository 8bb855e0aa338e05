"""The engine's settings and a model folder, as the checks before a run take them."""

from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

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


def engine(**settings):
    """Return settings of the engine: verl's and ours by default, but for those given."""
    defaults = {"ep_size": 1, "fsdp_size": -1, "model_dtype": "fp32", "expert_shard_dim": "auto"}
    defaults |= {"dtype": "bf16", "mixed_precision": None, "rollout_sync": "auto", "sync_megabytes": 2048}
    defaults |= {"ulysses_sequence_parallel_size": 1, "experts_backend": "auto"}
    replay = SimpleNamespace(mode=settings.pop("replay", "disabled"))
    others = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0, "router_metrics": False}
    others |= {"activation_checkpointing": "auto", "dispatch_chunks": 1, "overlap_shared_experts": False}
    others |= {"dispatcher": "all_to_all", "expert_plan": {}, "fp32_modules": ()}
    given = others | defaults | settings
    return SimpleNamespace(router_replay=replay, **given)


def checkpoint(folder, kind="qwen3_moe", **settings):
    """A folder with a config and a safetensors file: all that is looked at."""
    config = AutoConfig.for_model(kind, **(TINY if kind == "qwen3_moe" else {}), **settings)
    config.save_pretrained(folder)
    save_file({"x": torch.zeros(1)}, str(folder / "model.safetensors"))
    return {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}}
