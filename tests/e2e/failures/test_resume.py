"""verl's own resume: a run that saves in the background goes on from its last step, on another mesh."""

import json

import pytest

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from tests.e2e.runs import overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_run_resumed_from_a_background_save_continues(folder, warmed_up):
    kept = folder / "kept"
    settings = overrides(
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={kept}",
        "trainer.max_actor_ckpt_to_keep=1",
        "actor_rollout_ref.actor.checkpoint.async_save=True",
    )
    options = ["--model", warmed_up, *settings]
    with running(folder / "before", *options, "--steps", "2") as run:
        run.wait()
    assert [step["training/global_step"] for step in run.steps()] == [1, 2], run.text()[-3000:]
    assert (kept / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (kept / "global_step_2/actor" / MANIFEST).is_file()
    assert not (kept / "global_step_1/actor").exists()

    with running(folder / "after", *options, "--steps", "3", *overrides("engine.ep_size=1")) as run:
        run.wait()
    assert [step["training/global_step"] for step in run.steps()] == [3], run.text()[-3000:]
    assert run.steps()[0]["training/rollout_probs_diff_mean"] < 5e-3
    assert json.loads((kept / "global_step_3/actor/trainer_state.json").read_text())["step"] == 3
