"""Router replay in real runs, of routes that the rollout or the pass for old log-probs recorded.

The rollout is SGLang on its stack, and vLLM on the others.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import SERVER, finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# In bfloat16 trainer and rollout round differently.
BFLOAT16 = ["engine.mixed_precision=null", "engine.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
REPLAY = ["engine.router_replay.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]


def test_router_replay_of_rollout_routes_brings_log_probs_together(tmp_path):
    """In the first step both runs have the same weights, prompts and seeds, so only rounding differs."""
    model = tmp_path / "model"
    write_model(model, 1)
    # Routers' scores that are close together and far from zero change their order by rounding.
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        columns = tensors[name].shape[1]
        tensors[name] += 4 * torch.randn(columns, generator=torch.Generator().manual_seed(1))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    options = [*SERVER, "--model", str(model), *overrides(*BFLOAT16)]
    native = finished(tmp_path / "native", 2, *options).steps()[0]
    replayed = finished(tmp_path / "replayed", 2, *options, *overrides(*REPLAY)).steps()[0]
    assert "actor/router_replay_differing" not in native
    assert replayed["actor/router_replay_differing"] > 0.02
    for metric in ("training/rollout_probs_diff_mean", "rollout_corr/k3_kl"):
        assert replayed[metric] < native[metric], (metric, native[metric], replayed[metric])


@pytest.mark.parametrize("use_v1", [True, False])
def test_routes_of_old_log_probs_reach_the_updates_of_a_batch(tmp_path, use_v1):
    options = ["engine.router_replay.mode=R2", "actor_rollout_ref.actor.ppo_epochs=2", f"trainer.use_v1={use_v1}"]
    steps = finished(tmp_path, 2, *SERVER, *overrides(*options)).steps()
    assert all(step["actor/router_replay_differing"] > 0 for step in steps), steps
