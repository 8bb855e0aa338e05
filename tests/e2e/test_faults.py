"""A weight sync that fails in a real run ends the run within a minute, with its cause, and leaves nothing behind."""

import time

import pytest

from tests.e2e.runs import EXTENSION, leavings, overrides, running, unused

pytestmark = pytest.mark.e2e


INJECTED = "a fault that the test injected"
GONE = "the vLLM worker process died or was killed"
# Rollouts with one worker per replica, and one replica of two workers that are sent their slices.
WHOLE = ["engine.rollout_sync=full"]
SLICED = ["engine.rollout_sync=sliced", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


# In `make test` there is one of each: a worker that dies, one that raises, a trainer that raises.
def _case(fault: str, rollout: list[str], *causes: str, long: bool = True):
    return pytest.param(fault, rollout, causes, marks=[pytest.mark.long] if long else [], id=fault)


@pytest.mark.parametrize(
    ("fault", "rollout", "causes"),
    [
        _case("worker:kill:bucket2", WHOLE, "WeightSyncError", GONE, long=False),
        _case("trainer:kill:bucket1", SLICED, "died"),
        _case("worker:raise:start", WHOLE, "WeightSyncError", INJECTED),
        _case("worker:raise:bucket1", SLICED, "WeightSyncError", INJECTED, long=False),
        _case("worker:raise:finish", SLICED, "WeightSyncError", INJECTED),
        _case("worker:kill:start", SLICED, "WeightSyncError", GONE),
        _case("worker:kill:finish", WHOLE, "WeightSyncError", GONE),
        _case("trainer:kill:bucket2", WHOLE, "died"),
        _case("trainer:raise:first", SLICED, INJECTED),
        _case("trainer:raise:middle", WHOLE, INJECTED, long=False),
        _case("trainer:raise:last", SLICED, INJECTED),
    ],
)
def test_run_whose_sync_fails_ends_with_the_cause(folder, warmed_up, monkeypatch, fault, rollout, causes):
    """The first sync of each of these runs is the next start after the failure before it."""
    run_folder = folder / fault.replace(":", "-")
    happened = run_folder.with_suffix(".time")
    monkeypatch.setenv("EPFSDP2_TEST_FAULT", fault)
    monkeypatch.setenv("EPFSDP2_TEST_FAULT_TIME", str(happened))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "faults")
    before = leavings()
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
    assert unused(leavings() - before) == set()
