"""The engine's settings and a model folder, as the checks before a run take them."""

import json

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from epfsdp2.engine.checkpoint.atomic_folder import atomic_dir
from epfsdp2.engine.config.settings import EngineSettings

__all__ = ["TINY", "checkpoint", "engine", "saved_checkpoint"]

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


def saved_checkpoint(root, step, contents, role="actor"):
    """Write a checkpoint of a role with next to nothing in its files, named the latest; return the step's folder."""
    facts = {"step": step, "lr_scheduler": None, "param_groups": [] if "optimizer" in contents else None}
    (root / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    with atomic_dir(root / f"global_step_{step}" / role, manifest=True) as folder:
        (folder / "trainer_state.json").write_text(json.dumps(facts))
        for name in ("dist_ckpt", "huggingface"):
            (folder / name).mkdir()
        prefixes = {"model": "model.", "optimizer": "optimizer."}
        tensors = {f"{prefixes[content]}x": torch.zeros(1) for content in contents if content in prefixes}
        if tensors:
            save_file(tensors, folder / "dist_ckpt" / "shard.safetensors")
        if "hf_model" in contents:
            save_file({"x": torch.zeros(1)}, folder / "huggingface" / "model.safetensors")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return root / f"global_step_{step}"
