"""A weight sync that fails in a real run ends the run within a minute, with its cause, and leaves nothing behind."""

import time

import pytest

from tests.e2e.runs import EXTENSION, leftovers, overrides, running, unused

pytestmark = pytest.mark.e2e

INJECTED = "a fault that the test injected"
GONE = "the vLLM worker process died or was killed"
# Rollouts with one worker per replica, and one replica of two workers that are sent their slices.
WHOLE = ["engine.rollout_sync=full"]
SLICED = ["engine.rollout_sync=sliced", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("fault", "rollout", "causes"),
    [
        ("worker killed", WHOLE, ("WeightSyncError", GONE)),
        pytest.param("worker raises", SLICED, ("WeightSyncError", INJECTED), marks=pytest.mark.long),
        pytest.param("trainer raises", WHOLE, (INJECTED,), marks=pytest.mark.long),
    ],
    ids=["worker killed", "worker raises", "trainer raises"],
)
def test_run_whose_sync_fails_ends_with_the_cause(folder, warmed_up, monkeypatch, fault, rollout, causes):
    """The first sync of each of these runs is the next start after the failure before it."""
    run_folder = folder / fault.replace(" ", "-")
    happened = run_folder.with_suffix(".time")
    monkeypatch.setenv("EPFSDP2_TEST_FAULT", fault)
    monkeypatch.setenv("EPFSDP2_TEST_FAULT_TIME", str(happened))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "faults")
    before = leftovers()
    settings = overrides(f"{EXTENSION}=faults.FailsInTheSecondSync", "engine.sync_timeout_seconds=40", *rollout)
    with running(run_folder, "--model", warmed_up, "--steps", "200", *settings) as run:
        run.wait()
        ended = time.time()
    assert happened.exists(), run.text()[-3000:]
    assert ended - float(happened.read_text()) < 60
    assert run.process.returncode not in (0, None)
    assert len(run.steps()) < 3
    for cause in causes:
        assert cause in run.text(), run.text()[-3000:]
    assert run.living() == []
    assert unused(leftovers() - before) == set()
