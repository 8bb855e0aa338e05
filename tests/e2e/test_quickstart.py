"""The quickstart as a user runs it: verl's trainer, Ray, vLLM, a reward that rises, and nothing left behind.

The tests share one warm-up and run in their order here. Each has an outer time-out, after which the run is ended as
an interrupted one is.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

HOOKS = Path(__file__).parent / "hooks"
SECONDS = 420
EXTENSION = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"


class Run:
    """One quickstart process and everything that ever descended from it."""

    def __init__(self, output: Path, *options: str):
        self.output = output
        self.log = output.with_suffix(".out")
        words = [sys.executable, "-m", "epfsdp2.recipes.quickstart", "--output", str(output), *options]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HOOKS), os.environ.get("PYTHONPATH", "")]).rstrip(":")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        self.family = {psutil.Process(self.process.pid)}

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, until=lambda: False) -> None:
        """Until the process has ended or ``until`` says so."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and not until():
            if time.monotonic() > deadline:
                pytest.fail(f"not done after {SECONDS} s:\n{self.text()[-3000:]}")
            try:
                self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.2)

    def interrupt(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=40)

    def living(self) -> list[str]:
        alive = []
        for process in self.family:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{process.pid} {process.name()}")
            except psutil.NoSuchProcess:
                continue
        return alive

    def steps(self) -> list[dict]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def running(*arguments):
    run = Run(*arguments)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.interrupt(signal.SIGTERM)


def shared_memory() -> set[str]:
    """Segments that a weight sync, or vLLM and Python beside it, make."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("verl_weights_", "psm_"))}


def unmapped(names: set[str]) -> set[str]:
    """Those that no process uses; another run's on the same machine are not our leavings."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
        except OSError:
            continue
    return names - mapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def first_run(folder):
    """A short quickstart from nothing. What it leaves is checked by the test that asks for it."""
    before = shared_memory()
    with running(folder / "first", "--steps", "12") as run:
        run.wait()
    run.left = unmapped(shared_memory() - before)
    return run


@pytest.fixture(scope="module")
def warmed_up(first_run):
    (model,) = (first_run.output / "warmup").glob("global_step_*/huggingface")
    return str(model)


def test_reward_rises_and_vllm_has_the_trainers_weights(first_run):
    assert first_run.process.returncode == 0, first_run.text()[-3000:]
    steps = first_run.steps()
    assert len(steps) == 12
    assert all(step["training/rollout_probs_diff_mean"] < 5e-3 for step in steps)
    summary = json.loads((first_run.output / "summary.json").read_text())
    assert summary["passed"]
    assert summary["last_reward"] > summary["first_reward"] + 0.1
    assert (first_run.output / "quickstart.png").stat().st_size > 10_000
    assert "-m verl.trainer.main_ppo engine=epfsdp2 engine.ep_size=2" in first_run.text()


def test_a_run_that_ends_leaves_nothing(first_run):
    assert first_run.living() == []
    assert first_run.left == set()


def test_an_interrupted_run_leaves_nothing(folder, warmed_up):
    before = shared_memory()
    with running(folder / "second", "--model", warmed_up, "--steps", "200") as run:
        run.wait(until=lambda: len(run.steps()) >= 2)
        assert run.process.poll() is None, run.text()[-3000:]
        assert len(run.family) > 10
        assert run.interrupt(signal.SIGINT) == 130
    assert "interrupted by SIGINT" in run.text()
    assert run.living() == []
    assert unmapped(shared_memory() - before) == set()


def test_without_the_weight_sync_the_reward_check_fails(folder, warmed_up):
    """vLLM starts from the same checkpoint as the trainer and then never learns: the reward stays where it was.

    It runs in the interrupted run's folder: an interrupted quickstart starts again cleanly.
    """
    options = ["--model", warmed_up, "--steps", "8"]
    options += ["--override", f"{EXTENSION}=dropped_weights.DroppedWeights"]
    options += ["--override", "actor_rollout_ref.rollout.load_format=auto"]
    with running(folder / "second", *options) as run:
        run.wait()
    assert len(run.steps()) == 8, run.text()[-3000:]
    assert run.process.returncode == 1
    summary = json.loads((run.output / "summary.json").read_text())
    assert any("the reward did not clearly rise" in failure for failure in summary["failures"])
    assert "FAILED: the reward did not clearly rise" in run.text()
    # At the first step vLLM still has the trainer's weights, so it is the sync that is missing and nothing else.
    assert run.steps()[0]["training/rollout_probs_diff_mean"] < 5e-3
    assert run.steps()[-1]["training/rollout_probs_diff_mean"] > 5e-3


def test_an_interrupted_warm_up_leaves_nothing(folder):
    with running(folder / "warming_up", "--warmup-steps", "1000") as run:
        run.wait(until=lambda: (run.output / "warmup.jsonl").exists() and (run.output / "warmup.jsonl").stat().st_size)
        assert len(run.family) >= 4
        assert run.interrupt(signal.SIGTERM) == 143
    assert run.living() == []
