"""Router replay with real vLLM: what it recorded while it generated is what the trainer takes."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.runs import overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# In bfloat16 trainer and vLLM round differently.
BFLOAT16 = ["engine.mixed_precision=null", "engine.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
REPLAY = ["engine.router_replay.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]
STEPS = 2


def _with_near_ties(model: Path, out: Path) -> str:
    """The same model but for what rounding does: its routers' scores are close together, and far from zero."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        columns = tensors[name].shape[1]
        tensors[name] += 4 * torch.randn(columns, generator=torch.Generator().manual_seed(1))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def _steps(folder: Path, model: str, *settings: str) -> list[dict]:
    with running(folder, "--model", model, "--steps", str(STEPS), *overrides(*settings)) as run:
        run.wait()
    assert len(run.steps()) == STEPS, run.text()[-3000:]
    return run.steps()


def test_router_replay_of_rollout_routes_brings_log_probs_together(folder, warmed_up):
    """R3 against the same seed without it."""
    model = _with_near_ties(Path(warmed_up), folder / "near_ties")
    native = _steps(folder / "native", model, *BFLOAT16)
    replayed = _steps(folder / "replayed", model, *BFLOAT16, *REPLAY)
    assert "actor/router_replay_differing" not in native[0]
    assert all(step["actor/router_replay_differing"] > 0.02 for step in replayed)
    # The first step: both have the same weights, prompts and seeds. What is left is rounding.
    for metric in ("training/rollout_probs_diff_mean", "rollout_corr/k3_kl"):
        assert replayed[0][metric] < native[0][metric], (metric, native[0][metric], replayed[0][metric])
