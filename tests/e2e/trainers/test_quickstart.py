"""The quickstart as a user runs it: verl's trainer, Ray, vLLM, a reward that rises, and no leftovers.

The tests share one warm-up and run in their order here.
"""

import json
import re
import signal
import sys

import pytest
from transformers import AutoConfig

from epfsdp2.recipes.launch.processes import ProcessTree
from epfsdp2.recipes.quickstart.cli import parse
from epfsdp2.recipes.quickstart.commands import warmup_command
from tests.e2e.runs import EXTENSION, differences, leftovers, overrides, running, unused
from tests.support.models.tiny import reference_model
from tests.support.rollout import verify

pytestmark = pytest.mark.e2e

# Ray believes that there are as many GPUs as ranks.
UNDER_RAY = """
import functools, ray
from verl.trainer import sft_trainer_ray
ray.init = functools.partial(ray.init, num_cpus=64, num_gpus=2, include_dashboard=False)
sft_trainer_ray.main()
"""


def test_quickstart_raises_the_reward_with_the_trainers_weights_in_vllm(first_run):
    assert first_run.process.returncode == 0, first_run.text()[-3000:]
    steps = first_run.steps()
    assert len(steps) == 12
    assert max(differences(steps)) < 5e-3
    assert all(step["actor/sync_received_gb"] >= step["actor/sync_least_gb"] > 0 for step in steps)
    assert all(step["actor/sync_load_seconds"] > 0 for step in steps)
    log = (first_run.output / "logs" / "grpo.log").read_text(errors="replace")
    said = re.findall(r"\[epfsdp2\] weight sync (\d+), sliced: \d+ tensors, .* held \S+ at most", log)
    assert said == [str(i + 1) for i in range(13)]
    summary = json.loads((first_run.output / "summary.json").read_text())
    assert summary["passed"]
    assert summary["last_reward"] > summary["first_reward"] + 0.1
    assert "-m verl.trainer.main_ppo engine=epfsdp2 engine.ep_size=2" in first_run.text()
    assert first_run.living() == [] and first_run.left == set()


def _losses(file):
    logged = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    assert all(isinstance(value, int | float) for data in logged for value in data.values()), logged[0]
    return [data["train/loss"] for data in logged if "train/loss" in data]


def test_sft_trainer_lowers_the_loss(first_run):
    """The quickstart's warm-up."""
    losses = _losses(first_run.output / "warmup.jsonl")
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]), losses


@pytest.mark.long
def test_sft_trainer_under_ray_has_the_losses_of_the_one_under_torchrun(first_run, tmp_path):
    inputs = {"model": first_run.output / "model", "warmup_data": first_run.output / "data/warmup.parquet"}
    command = warmup_command(vars(parse(["--warmup-steps", "3"])) | inputs | {"output": tmp_path})
    command = [sys.executable, "-c", UNDER_RAY, *command[command.index("engine=epfsdp2") :]]
    with ProcessTree() as tree:
        own = {"VERL_FILE_LOGGER_PATH": str(tmp_path / "sft.jsonl"), "RAY_TMPDIR": str(tree.folder)}
        status = tree.run(command, tree.environment() | own, tmp_path / "sft.log", lambda: None)
    assert status == 0, (tmp_path / "sft.log").read_text(errors="replace")[-3000:]
    losses = _losses(tmp_path / "sft.jsonl")
    assert losses == pytest.approx(_losses(first_run.output / "warmup.jsonl")[:3], rel=1e-6) and len(losses) == 3


@pytest.fixture(scope="module")
def interrupted_run(folder, warmed_up):
    """Saves the weights of every step, writes digests of vLLM's weights after every sync, and is interrupted."""
    settings = [f"{EXTENSION}=digests.WritesDigests", "trainer.save_freq=1"]
    settings.append("actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]")
    options = ["--model", warmed_up, "--steps", "200", *overrides(*settings)]
    before = leftovers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPFSDP2_TEST_DIGESTS", str(folder / "digests"))
        with running(folder / "second", *options) as run:
            run.wait(until=lambda: len(run.steps()) >= 2)
            assert run.process.poll() is None, run.text()[-3000:]
            run.open_to_others = run.listening_beyond_loopback()
            run.status = run.interrupt(signal.SIGINT)
    run.left = unused(leftovers() - before)
    return run


@pytest.mark.long
def test_sync_of_every_step_leaves_the_trainers_weights_in_every_worker(folder, interrupted_run):
    """The syncs after steps 1 and 2 are compared with the saved weights; one more comes before step 1."""
    config = AutoConfig.from_pretrained(folder / "second/checkpoints/global_step_1/actor/huggingface")
    held = {}
    for step in (1, 2):
        saved = reference_model(folder / f"second/checkpoints/global_step_{step}/actor/huggingface")
        wanted = verify.expected_digests(dict(saved.named_parameters()), config)
        for replica in (0, 1):
            answer = json.loads((folder / f"digests.sync-{step + 1}.replica-{replica}.rank-0.json").read_text())
            assert verify.compare(wanted, answer["digests"]) == "", (step, replica)
            held[step, replica] = answer["digests"]
    assert held[1, 0] != held[2, 0]


@pytest.mark.long
def test_quickstart_interrupted_in_a_step_leaves_nothing_and_listened_on_loopback(interrupted_run):
    """torch's ``TCPStore`` listens on every interface: one of the trainer's rank 0, one of each vLLM worker."""
    run = interrupted_run
    assert run.open_to_others <= {"ray::WorkerDict", "VLLM::Worker"}
    assert len(run.family) > 10 and run.status == 130
    assert "interrupted by SIGINT" in run.text()
    assert run.living() == [] and run.left == set()


@pytest.mark.long
def test_quickstart_without_weight_syncs_fails_its_reward_check(folder, warmed_up):
    """vLLM starts from the same checkpoint as the trainer and then never learns: the reward stays where it was."""
    settings = [f"{EXTENSION}=dropped_weights.DroppedWeights", "actor_rollout_ref.rollout.load_format=auto"]
    options = ["--model", warmed_up, "--steps", "8", *overrides(*settings)]
    with running(folder / "third", *options) as run:
        run.wait()
    assert len(run.steps()) == 8, run.text()[-3000:]
    assert run.process.returncode == 1
    assert "FAILED: the reward did not clearly rise" in run.text()
    # At the first step vLLM still has the trainer's weights, so only the sync is missing.
    first, *_, last = differences(run.steps())
    assert first < 5e-3 < last


@pytest.mark.long
def test_quickstart_interrupted_in_the_warm_up_leaves_nothing(folder):
    with running(folder / "warming_up", "--warmup-steps", "1000") as run:
        run.wait(until=lambda: (run.output / "warmup.jsonl").exists() and (run.output / "warmup.jsonl").stat().st_size)
        assert len(run.family) >= 4
        assert run.interrupt(signal.SIGTERM) == 143
    assert run.living() == []
