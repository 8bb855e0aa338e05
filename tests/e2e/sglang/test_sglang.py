"""The quickstart with SGLang for the rollout, where it is installed: one replica for each rank, and one for both."""

import re
from importlib.util import find_spec

import pytest

from tests.e2e.runs import finished, overrides, running

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make setup STACK=sglang)"),
]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def first_run(folder):
    with running(folder / "sglang", "--rollout", "sglang") as run:
        run.wait()
    return run


def test_sglang_run_raises_the_reward_and_agrees_with_the_trainer(first_run):
    assert first_run.process.returncode == 0, first_run.text()[-3000:]
    steps = first_run.steps()
    assert len(steps) == 12
    assert all(step["training/rollout_probs_diff_mean"] < 1e-6 for step in steps)
    assert _modes(first_run) == ["sliced"] * 13


def _modes(run):
    """Return the mode of each weight sync."""
    log = (run.output / "logs" / "grpo.log").read_text(errors="replace")
    assert "SGLang http server" in log
    return re.findall(r"\[epfsdp2\] weight sync \d+, (\w+): ", log)


@pytest.mark.parametrize("mode", ["sliced", "full"])
def test_sglang_run_on_two_tensor_parallel_workers_agrees_with_the_trainer(folder, first_run, mode):
    (model,) = (first_run.output / "warmup").glob("global_step_*/huggingface")
    options = ["--rollout", "sglang", "--model", str(model)]
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    options += overrides(f"{ROLLOUT}.tensor_model_parallel_size=2", f"engine.rollout_sync={mode}")
    run = finished(folder / f"sglang_{mode}", 3, *options, environment=environment)
    assert all(step["training/rollout_probs_diff_mean"] < 1e-6 for step in run.steps())
    assert _modes(run) == (["sliced"] * 4 if mode == "sliced" else [])  # verl's adapter sends the others
