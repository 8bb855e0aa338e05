"""verl's ``separate_async``: the rollout is in processes of its own, and gets its slices through our backend."""

import pytest

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import finished, overrides
from tests.e2e.trainers.trainers import ADAPTERS, FEW, SAME, STANDALONE, differences

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_standalone_rollout_follows_the_trainer(tmp_path, monkeypatch):
    # verl 0.9.1 logs with an argument that logging does not have, at info level, where there are no hybrid replicas.
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARNING")
    write_model(tmp_path / "model", 1)
    run = finished(tmp_path / "run", 4, "--model", str(tmp_path / "model"), *overrides(*STANDALONE))
    steps = run.steps()
    # A sample is at most one update older than the weights that it is compared with.
    assert all(step["training/off_policy/trajectory_staleness/max"] <= 1 for step in steps)
    difference = [step["training/rollout_probs_diff_mean"] for step in steps]
    # vLLM starts with random weights, so the first sync sent all. Steps 2 and 3 lack the update before them. The update
    # before step 4 changed nothing, so vLLM has the weights of both earlier updates.
    assert difference[0] < 1e-5 and difference[1] > 1e-3 and difference[2] > 1e-3 and difference[3] < 1e-5
    # Each of the trainer's two ranks sends what it owns, half of the model; full tensors would be 9.4 from one.
    assert all(step["weight_sync/sent_megabytes"] == pytest.approx(4.71, rel=0.02) for step in steps)
    assert run.living() == []


def test_standalone_rollout_gets_the_base_once_and_then_adapters(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARNING")
    write_model(tmp_path / "model", 1)
    run = finished(tmp_path / "run", 4, "--model", str(tmp_path / "model"), *overrides(*STANDALONE, *ADAPTERS))
    steps = run.steps()
    first, second, _, fourth = differences(steps)
    # As above: vLLM, which starts with random weights, has the base before the first step, and the adapters of two
    # updates before the last.
    assert first < SAME and second > FEW and fourth < SAME, (first, second, fourth)
    # The base would be 4.7; those of one rank go to all.
    assert all(step["weight_sync/sent_megabytes"] < 0.5 for step in steps)
    assert run.living() == []
