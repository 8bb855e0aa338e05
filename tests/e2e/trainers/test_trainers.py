"""Every trainer of verl with ``engine=epfsdp2``: vLLM has the weights that it should have, and nothing is left behind.

The v1 trainers ``sync`` and ``separate_async`` are in ``test_quickstart.py`` and ``test_standalone.py``.
"""

import json

import pytest

from tests.e2e.trainers.trainers import (
    ADAPTERS,
    FEW,
    FULLY_ASYNC,
    ONE_AT_A_TIME,
    ONE_STEP_OFF,
    OTHER,
    SAME,
    SEPARATE,
    ZERO_IN_THE_THIRD,
    differences,
    is_learning,
    steps_of,
    syncs,
)

pytestmark = pytest.mark.e2e


def test_sft_trainer_lowers_the_loss(first_run):
    """The quickstart's warm-up."""
    lines = (first_run.output / "warmup.jsonl").read_text().splitlines()
    losses = [data["train/loss"] for data in (json.loads(line)["data"] for line in lines) if "train/loss" in data]
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]), losses


@pytest.mark.long
def test_colocate_async_trainer_trains(tmp_path):
    steps = steps_of(tmp_path, 4, "trainer.v1.trainer_mode=colocate_async", *ZERO_IN_THE_THIRD)
    # Generation runs ahead, by a part of a batch: a sample is at most one update older than what it is compared with.
    assert all(step["training/off_policy/trajectory_staleness/max"] <= 1 for step in steps)
    found = differences(steps)
    assert found[0] < SAME and found[3] < SAME, found
    assert is_learning(steps[:3])


@pytest.mark.long
def test_one_step_off_trainer_trains(tmp_path):
    """It generates a batch while it trains on the one before, so samples are always one update older."""
    steps = steps_of(tmp_path, 4, *SEPARATE, *ZERO_IN_THE_THIRD, program=ONE_STEP_OFF)
    first, second, third, fourth = differences(steps)
    assert first < SAME and second > OTHER and third > OTHER and fourth < SAME, (first, second, third, fourth)


@pytest.mark.long
def test_fully_async_trainer_trains(tmp_path):
    """Without staleness it generates for one update at a time, always with the weights of the one before."""
    steps = steps_of(tmp_path, 3, *SEPARATE, *ONE_AT_A_TIME, program=FULLY_ASYNC)
    assert all(difference < SAME for difference in differences(steps)), differences(steps)
    assert is_learning(steps)


@pytest.mark.long
def test_one_step_off_trainer_sends_the_base_once_and_then_adapters(tmp_path):
    steps = steps_of(tmp_path, 4, *SEPARATE, *ZERO_IN_THE_THIRD, *ADAPTERS, program=ONE_STEP_OFF)
    first, second, third, fourth = differences(steps)
    assert first < SAME and second > FEW and third > FEW and fourth < SAME, (first, second, third, fourth)
    base, *others = syncs(tmp_path / "run")
    assert base == "sliced" and len(others) >= len(steps) and set(others) == {"adapters"}, (base, others)


@pytest.mark.long
def test_fully_async_trainer_sends_the_base_once_and_then_adapters(tmp_path):
    steps = steps_of(tmp_path, 3, *SEPARATE, *ONE_AT_A_TIME, *ADAPTERS, program=FULLY_ASYNC)
    assert all(difference < SAME for difference in differences(steps)), differences(steps)
    base, *others = syncs(tmp_path / "run")
    assert base == "sliced" and len(others) >= len(steps) and set(others) == {"adapters"}, (base, others)
