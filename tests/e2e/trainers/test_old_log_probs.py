"""GRPO whose updates give the old log-probs, beside a run that has verl's pass for them, by both of verl's trainers."""

import math

import pytest
import torch

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import HOOKS, differences, finished, overrides
from tests.e2e.trainers.trainers import CHANGES

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 3
AGENT = "actor_rollout_ref.rollout.agent"
# A step's answers do not depend on timing, and neither do these up to the order of a batch.
SETTINGS = [
    *CHANGES,
    f"{AGENT}.default_agent_loop=seeded_agent",
    f"{AGENT}.agent_loop_config_path={HOOKS / 'seeded_agent.yaml'}",
    "actor_rollout_ref.model.external_lib=batches",
    "engine.batch_invariant=True",
]
SAME = ["actor/entropy", "actor/entropy_loss", "actor/grad_norm", "critic/score/mean", "rollout_corr/training_log_ppl"]


def _steps(folder, name, *settings):
    """Return the logged steps of a run, and whether the trainer had old log-probs for each of their updates."""
    if not (folder / "model").exists():
        write_model(folder / "model", 1)
    environment = {"EPFSDP2_TEST_BATCHES": str(folder / f"{name} batches")}
    options = ["--model", str(folder / "model"), "--batch-size", "8", *overrides(*SETTINGS, *settings)]
    steps = finished(folder / name, STEPS, *options, environment=environment).steps()
    batches = [torch.load(file) for file in sorted((folder / f"{name} batches").iterdir())]
    return steps, {not any(old.isnan().any() for old in batch["old_log_probs"]) for batch in batches}


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"])
def test_run_without_the_pass_for_old_log_probs_logs_the_same_steps(tmp_path, trainer):
    (wanted, had), (found, had_not) = (
        _steps(tmp_path, "with", trainer),
        _steps(tmp_path, "without", trainer, "engine.old_log_probs_from_update=True"),
    )
    assert had == {True} and had_not == {False}
    for theirs, ours in zip(wanted, found, strict=True):
        assert theirs.keys() == ours.keys()
        assert not any(math.isnan(value) for value in ours.values() if isinstance(value, float)), ours
        assert {name: ours[name] for name in SAME} == pytest.approx({name: theirs[name] for name in SAME}, rel=1e-4)
        assert ours.get("perf/mfu/actor_infer", 0.0) == 0.0
    assert max(differences(found)) < 1e-5 and found[2]["actor/entropy"] > found[0]["actor/entropy"] + 0.05
