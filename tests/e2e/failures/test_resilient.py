"""A real GRPO run under ``recipes/resilient``: a trainer rank is killed in an update, and SIGTERM saves first."""

import json
import re
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from epfsdp2.engine.checkpoint.atomic_folder import verify_files
from epfsdp2.engine.cleanup import present, remove_unused
from epfsdp2.recipes.resilient.command import complete_steps
from tests.e2e.failures.resilient_runs import check_equal_from, command, environment
from tests.e2e.runs import leftovers, running, unused

pytestmark = [pytest.mark.e2e, pytest.mark.long]

_PROGRAM = ("epfsdp2.recipes.resilient", "--backoff-seconds", "1", "--")


@contextmanager
def _running(folder: Path, model: str, *extra: str, program: tuple[str, ...]):
    """The recipe on a run of four steps; a run without the recipe for an empty ``program``."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = environment(folder, EPFSDP2_TEST_KILLED=str(folder / "killed"))
    with tempfile.TemporaryDirectory(prefix="epr-", dir="/tmp") as ray_dir:
        if not program:
            variables["VLLM_RPC_BASE_PATH"] = ray_dir  # which the recipe sets itself
        words = command(folder, model, ray_dir, *extra, steps=4, hook="killed_in_update")
        module = [*program, *words] if program else words[words.index("-m") + 1 :]
        with running(folder, program=module, environment=variables) as run:
            yield run


def _check_goes_on(
    folder: Path, model: str, *extra: str, program: tuple[str, ...], saved_steps: tuple[int, ...]
) -> None:
    """A run whose rank is killed in the update of step 3 goes on from step 2 as a run that begins there."""
    before, broken, whole = leftovers(), folder / "broken", folder / "whole"
    with _running(broken, model, *extra, program=program) as run:
        run.wait()
    assert run.process.returncode == 0, run.text()[-3000:]
    assert (broken / "killed").exists() and "starts again from step 2" in run.text()
    assert run.living() == [] and unused(leftovers() - before) == set()
    saved = broken / "saved"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert sorted(path.name for path in saved.glob("global_step_*")) == [f"global_step_{step}" for step in saved_steps]
    for step in saved_steps:
        verify_files(saved / f"global_step_{step}" / "actor")
    assert sorted(path.name for path in (saved / "resilient").iterdir()) == ["attempt-1.log", "attempt-2.log"]

    (whole / "saved").mkdir(parents=True)
    shutil.copytree(saved / "global_step_2", whole / "saved" / "global_step_2")
    (whole / "killed").touch()
    segments = present()
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'saved' / 'global_step_2'}"]
    with _running(whole, model, *extra, *resumed, program=()) as unbroken:
        unbroken.wait()
    assert unbroken.process.returncode == 0, unbroken.text()[-3000:]
    check_equal_from(3, run, unbroken)
    remove_unused(present() - segments)  # verl without the recipe leaves vLLM's message queues


def test_resilient_run_whose_rank_is_killed_in_an_update_equals_an_uninterrupted_run(folder, warmed_up):
    _check_goes_on(folder, warmed_up, program=_PROGRAM, saved_steps=(1, 2, 3, 4))


def test_replica_that_is_left_saves_the_step_before_that_in_which_the_other_one_is_killed(folder, warmed_up):
    program = (*_PROGRAM[:-1], "--save-on-failure", "--")
    replicas = ["engine.ep_size=1", "engine.fsdp_size=1", "trainer.save_freq=1000"]
    _check_goes_on(folder / "replicas", warmed_up, *replicas, program=program, saved_steps=(2, 4))


def test_resilient_run_at_sigterm_saves_the_step_before_it_ends(folder, warmed_up):
    before, cut = leftovers(), folder / "cut"
    cut.mkdir()
    (cut / "killed").touch()
    changed = ["trainer.save_freq=1000", "trainer.total_training_steps=500", "trainer.total_epochs=500"]
    program = ("epfsdp2.recipes.resilient", "--grace-seconds", "300", "--")
    with _running(cut, warmed_up, *changed, program=program) as run:
        run.wait(until=lambda: len(run.steps()) >= 2)
        assert run.process.poll() is None, run.text()[-3000:]
        run.process.send_signal(signal.SIGTERM)
        status = run.process.wait(timeout=360)
    assert status == 128 + signal.SIGTERM, run.text()[-3000:]
    (step,) = map(int, re.findall(r"step (\d+) is saved in", run.text()))
    assert step >= 2
    actor = cut / "saved" / f"global_step_{step}" / "actor"
    assert json.loads((actor / "trainer_state.json").read_text())["step"] == step
    verify_files(actor)
    # The run goes on while it is ended, and may save another step.
    assert max(complete_steps(cut / "saved")) >= step
    assert run.living() == [] and unused(leftovers() - before) == set()
