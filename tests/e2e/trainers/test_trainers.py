"""verl's trainers that generate beside training: the rollout has the weights that it should have.

The rollout is SGLang on its stack, and vLLM on the others. ``test_quickstart.py`` has the synchronous trainer and SFT.
"""

import re
from importlib.util import find_spec

import pytest

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import SERVER, differences, leftovers, overrides, running, unused
from tests.e2e.trainers.trainers import (
    CHANGES,
    FULLY_ASYNC,
    LENT,
    ONE_AT_A_TIME,
    ONE_STEP_OFF,
    SEPARATE,
    STANDALONE,
    ZERO_IN_THE_THIRD,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# Adapters that vLLM computes with itself, every sync with checksums.
ADAPTERS = [
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "engine.rollout_sync_verify=-1",
]
SAME, OTHER, FEW = 1e-5, 1e-3, 1e-4  # the last one for adapters
# Whether the rollout of each step has the trainer's weights (S), those before the last update (O), or either (.).
# A trainer that generates a batch ahead lacks the update before steps 2 and 3; the one before step 4 changed nothing.
CASES = {
    "colocate_async": ("S..S", ["trainer.v1.trainer_mode=colocate_async", *ZERO_IN_THE_THIRD], {}),
    "separate_async": ("SOOS", [*STANDALONE, *ZERO_IN_THE_THIRD], {}),
    "separate_async, full": ("SOOS", [*STANDALONE, *ZERO_IN_THE_THIRD, "engine.rollout_sync=full"], {}),
    # verl's default: trainer ranks have replicas too, which generate while the trainer waits for answers.
    "separate_async, lent ranks": ("S..S", [*LENT, *ZERO_IN_THE_THIRD, "engine.rollout_sync_verify=-1"], {}),
    "one step off": ("SOOS", [*SEPARATE, *ZERO_IN_THE_THIRD], {"program": ONE_STEP_OFF}),
    "fully async": ("SSS", [*SEPARATE, *ONE_AT_A_TIME], {"program": FULLY_ASYNC}),
}
# Megabytes of a sync: half of the model from each of the trainer's ranks, or full tensors from one.
SENT = {"separate_async": 4.71, "separate_async, full": 9.42}


def _steps_of(tmp_path, steps, *settings, **program):
    """Return the logged steps of a run, which has to end well and leave nothing."""
    write_model(tmp_path / "model", 1)
    options = [*SERVER, "--model", str(tmp_path / "model"), "--steps", str(steps), "--batch-size", "8"]
    before = leftovers()
    with running(tmp_path / "run", *options, *overrides(*CHANGES, *settings), **program) as run:
        run.wait()
    logged = [step for step in run.steps() if "actor/grad_norm" in step]
    assert len(logged) == steps, run.text()[-3000:]
    assert all(step["actor/grad_norm"] > 0 for step in logged)
    assert run.living() == [] and unused(leftovers() - before) == set()
    return logged


@pytest.mark.parametrize("name", CASES)
def test_trainer_that_generates_beside_training_sends_its_weights(tmp_path, monkeypatch, name):
    # verl 0.9.1 logs with an argument that logging does not have, at info level, where there are no hybrid replicas.
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARNING")
    expected, settings, program = CASES[name]
    steps = _steps_of(tmp_path, len(expected), *settings, **program)
    found = differences(steps)
    bounds = {"S": (-1, SAME), "O": (OTHER, 1), ".": (-1, 1)}
    assert all(bounds[kind][0] < each < bounds[kind][1] for kind, each in zip(expected, found, strict=True)), found
    assert all(step.get("training/off_policy/trajectory_staleness/max", 0) <= 1 for step in steps)
    if name in SENT:
        assert all(step["weight_sync/sent_megabytes"] == pytest.approx(SENT[name], rel=0.02) for step in steps)
    if "lent" in name:
        assert any("timing_s/switch_to_trainer" in step for step in steps)
    elif "O" not in expected:  # the entropy rises, which is all that these runs learn
        assert steps[2]["actor/entropy"] > steps[0]["actor/entropy"] + 0.05


@pytest.mark.skipif(find_spec("sglang") is not None, reason="adapters are sent to vLLM alone")
def test_one_step_off_trainer_sends_the_base_once_and_then_adapters(tmp_path):
    steps = _steps_of(tmp_path, 4, *SEPARATE, *ZERO_IN_THE_THIRD, *ADAPTERS, program=ONE_STEP_OFF)
    first, second, third, fourth = differences(steps)
    assert first < SAME and second > FEW and third > FEW and fourth < SAME, (first, second, third, fourth)
    log = (tmp_path / "run" / "logs" / "grpo.log").read_text(errors="replace")
    base, *others = re.findall(r"weight sync \d+, (\w+)", log)
    assert base == "sliced" and len(others) >= len(steps) and set(others) == {"adapters"}, (base, others)
