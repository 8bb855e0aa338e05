"""The quickstart's verdict on rewards, its report, and the cause of a failure."""

import json
import math

import pandas as pd
import pytest

from epfsdp2.recipes.launch import failure
from epfsdp2.recipes.quickstart import metrics


def _steps(rewards, probs_diff=1e-8):
    figures = {metrics.REWARD: rewards, metrics.PROBS_DIFF: probs_diff, metrics.SECONDS: 2.5}
    return pd.DataFrame({"step": range(1, len(rewards) + 1), **figures})


def _ramp(first, last, count=40):
    return [first + (last - first) * i / (count - 1) for i in range(count)]


def test_verdict_of_a_rising_reward_passes():
    facts = metrics.conclude(_steps(_ramp(0.4, 0.97)), 40, 128)
    assert facts["passed"] and facts["failures"] == []
    assert facts["first_reward"] < 0.45 < 0.9 < facts["last_reward"]


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param([0.45] * 40, id="flat"),
        pytest.param(_ramp(0.4, 0.48), id="less than a tenth up"),
        pytest.param([0.3, 0.6] * 18 + [0.3, 0.6, 0.6, 0.6], id="noise"),
        pytest.param([math.nan] * 40, id="not a number"),
    ],
)
def test_verdict_of_a_reward_that_does_not_clearly_rise_fails(rewards):
    facts = metrics.conclude(_steps(rewards), 40, 128)
    assert not facts["passed"]
    assert "did not clearly rise" in facts["failures"][0]


def test_verdict_of_few_samples_needs_a_larger_rise():
    """Two equal neighbours are no proof of precision: 4 samples a step scatter by 0.25 whatever the window shows."""
    rewards = [0.5, 0.5] + [0.6] * 16 + [0.75, 0.75]
    assert metrics.conclude(_steps(rewards), 20, 1024)["passed"]
    assert not metrics.conclude(_steps(rewards), 20, 4)["passed"]


@pytest.mark.parametrize("diff", [6e-3, math.nan])
def test_verdict_of_one_step_of_disagreement_fails(diff):
    steps = _steps(_ramp(0.4, 0.97))
    steps.loc[17, metrics.PROBS_DIFF] = diff
    (failed,) = metrics.conclude(steps, 40, 128)["failures"]
    assert f"was {diff:.2g}" in failed


def test_verdict_of_missing_steps_fails():
    for few in (0, 30):
        facts = metrics.conclude(_steps(_ramp(0.4, 0.97)[:few]), 40, 128)
        assert facts == {"passed": False, "failures": [f"only {few} of 40 steps ran"]}


def test_metrics_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert len(metrics.read_steps(path)) == 0
    line = json.dumps({"step": 1, "data": {metrics.REWARD: 0.5, metrics.PROBS_DIFF: None, "name": "x"}}) + "\n"
    path.write_text(json.dumps({"step": 0, "data": {"val/acc": 1}}) + "\n" + line + line[:20])
    ((step, reward, *missing),) = metrics.read_steps(path).to_numpy()
    assert (step, reward) == (1, 0.5) and all(map(math.isnan, missing))
    with path.open("a") as file:
        file.write(line[20:].replace('"step": 1', '"step": 2'))
    assert len(metrics.read_steps(path)) == 2


@pytest.mark.parametrize(
    "log, says",
    [
        (
            "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m Traceback (most recent call last):\n"
            "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m   File x\n"
            "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m ValueError: the real reason\n"
            "ray.exceptions.RayTaskError(RuntimeError): wrapper\n",
            ["ValueError: the real reason", "ray.exceptions.RayTaskError(RuntimeError): wrapper"],
        ),
        (
            "Could not override 'engine.mixed'.\nKey 'mixed' is not in struct\n",
            ["Could not override 'engine.mixed'.", "Key 'mixed' is not in struct"],
        ),
        (
            "\x1b[36m(Worker pid=7)\x1b[0m KeyError: what came before\n"
            "ray.exceptions.RayTaskError(WeightSyncError): wrapper\n"
            "pkg.WeightSyncError: rank 0: the cause\n\n"
            "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
            "\x1b[36m(Worker pid=7)\x1b[0m WARNING what came after\n",
            ["pkg.WeightSyncError: rank 0: the cause"],
        ),
        ("all is well\nKilled\n", ["all is well", "Killed"]),
    ],
)
def test_cause_of_a_failure_is_found_in_its_log(log, says, tmp_path):
    (tmp_path / "log").write_text(log)
    assert failure.cause(tmp_path / "log") == says
