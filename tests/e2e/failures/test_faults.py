"""A weight sync that fails in a real run ends the run within a minute, with its cause, and leaves nothing behind.

``tests/rollout/vllm_workers/test_vllm_sync.py`` kills workers of a real vLLM in every run of the suite.
"""

import time

import pytest

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import EXTENSION, leftovers, overrides, running, unused

pytestmark = [pytest.mark.e2e, pytest.mark.long]

INJECTED = "a fault that the test injected"
GONE = "the vLLM worker process died or was killed"
# One rank with a worker; two ranks with a worker each, or with a replica of two workers that are sent their slices.
ALONE = [
    *("engine.ep_size=1", "trainer.n_gpus_per_node=1", "data.train_batch_size=8"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
]
WHOLE = ["engine.rollout_sync=full"]
SLICED = ["engine.rollout_sync=sliced", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("fault", "settings", "causes"),
    [
        ("worker killed", [*WHOLE, *ALONE], ("WeightSyncError", GONE)),
        ("worker killed", WHOLE, ("WeightSyncError", GONE)),
        ("worker raises", SLICED, ("WeightSyncError", INJECTED)),
        ("trainer raises", WHOLE, (INJECTED,)),
    ],
    ids=["worker killed", "worker of two killed", "worker raises", "trainer raises"],
)
def test_run_whose_sync_fails_ends_with_the_cause(tmp_path, monkeypatch, fault, settings, causes):
    write_model(tmp_path / "model", seed=1)
    happened = tmp_path / "time"
    monkeypatch.setenv("EPFSDP2_TEST_FAULT", fault)
    monkeypatch.setenv("EPFSDP2_TEST_FAULT_TIME", str(happened))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "faults")
    before = leftovers()
    words = overrides(f"{EXTENSION}=faults.FailsInTheSecondSync", "engine.sync_timeout_seconds=40", *settings)
    with running(tmp_path / "run", "--model", str(tmp_path / "model"), "--steps", "200", *words) as run:
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


def test_run_whose_rollout_does_not_start_ends_with_its_workers_exception(tmp_path):
    write_model(tmp_path / "model", seed=1)
    words = overrides(f"{EXTENSION}=no_such_module.Extension", "engine.rollout_sync=full", *ALONE)
    with running(tmp_path / "run", "--model", str(tmp_path / "model"), *words) as run:
        run.wait()
    said = run.text().partition("The cause, from ")[2]
    assert "The cause: ModuleNotFoundError: No module named 'no_such_module'" in said, run.text()[-3000:]
    assert run.living() == []
