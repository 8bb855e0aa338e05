"""Settings of router replay, and a model whose routes change by rounding."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["BFLOAT16", "REPLAY", "with_near_ties"]

# In bfloat16 trainer and vLLM round differently.
BFLOAT16 = ["engine.mixed_precision=null", "engine.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
REPLAY = ["engine.router_replay.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]


def with_near_ties(model: Path, out: Path) -> str:
    """The same model but for what rounding does: its routers' scores are close together, and far from zero."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        columns = tensors[name].shape[1]
        tensors[name] += 4 * torch.randn(columns, generator=torch.Generator().manual_seed(1))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)
