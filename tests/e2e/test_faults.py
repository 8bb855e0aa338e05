"""A weight sync that fails in a real run ends the run within a minute, with its cause, and leaves nothing behind."""

import time

import pytest

from tests.e2e.conftest import EXTENSION, leavings, running, unused

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        pytest.param("raise", ["WeightSyncError", "a fault that the test injected"], marks=pytest.mark.long),
        ("kill_worker", ["WeightSyncError", "the vLLM worker process died or was killed"]),
        ("kill_trainer", ["died"]),
    ],
)
def test_a_failed_sync_ends_the_run_with_its_cause(folder, warmed_up, monkeypatch, fault, causes):
    happened = folder / f"{fault}.time"
    monkeypatch.setenv("EPFSDP2_TEST_FAULT", fault)
    monkeypatch.setenv("EPFSDP2_TEST_FAULT_TIME", str(happened))
    before = leavings()
    options = ["--model", warmed_up, "--steps", "200", "--override", f"{EXTENSION}=faults.FailsInTheSecondSync"]
    with running(folder / fault, *options) as run:
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
