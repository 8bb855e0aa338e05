"""A long GRPO run holds no more descriptors, threads or shared memory at its end than at step 50.

Shared memory is the pages of files in ``/dev/shm`` that the run's processes have mapped, Ray's object store among them.
Resident memory is printed by kind of process: Ray's head and the trainer grow by a few MB (benchmarks/results/runs.md).
"""

import contextlib
import re
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FIRST, LAST = 50, 490
ALLOWED = {"descriptors": 0, "threads": 0, "shared memory": 1 << 20, "Ray's store": 1 << 20}  # or 3 % more
SETTINGS = [
    "trainer.n_gpus_per_node=1",
    "engine.ep_size=1",
    # The eight answers of a step, which the quickstart's micro-batches of 32 do not divide.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
]
# Ray's head keeps events of the last 100,000 tasks. A run reaches 1,000 before step 50.
ENVIRONMENT = {"RAY_task_events_max_num_task_in_gcs": "1000"}


def _resources(root: psutil.Process) -> tuple[Counter, Counter]:
    """Sum over a process and its descendants, without those that end meanwhile; and resident bytes by kind."""
    found, resident, files = Counter(), Counter(), {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
            words, memory = process.cmdline(), process.memory_info()
            found.update({"descriptors": process.num_fds(), "threads": process.num_threads()})
            resident[_kind(words)] += memory.rss - memory.shared
            for name in set(re.findall(r"(/dev/shm/\S+)", Path(f"/proc/{process.pid}/maps").read_text())):
                with contextlib.suppress(OSError):
                    files[name] = 512 * Path(name).stat().st_blocks
    found["shared memory"] = sum(files.values())
    found["Ray's store"] = sum(size for name, size in files.items() if "plasma" in name)
    return found, resident


def _kind(words: list[str]) -> str:
    """Return a process's kind, e.g. ``ray::WorkerDict`` or ``raylet``."""
    first = re.split(r"[. (]", Path(words[0]).name if words and "::" not in words[0] else " ".join(words))[0]
    if not first.startswith("python"):
        return first
    return next((word.rpartition("/")[2] for word in words[1:] if word.endswith(".py") or "." in word), first)


@pytest.mark.timeout(7200)
def test_run_of_500_steps_holds_on_to_no_more_than_after_50(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.e2e.runs.SECONDS", 7200)
    options = ["--steps", "500", "--batch-size", "4", "--group-size", "2", *overrides(*SETTINGS)]
    samples = []
    with running(tmp_path / "run", *options, environment=ENVIRONMENT) as run:
        for step in (FIRST, LAST):
            run.wait(until=lambda step=step: len(run.steps()) >= step)
            assert run.process.poll() is None, run.text()[-3000:]
            samples.append(_resources(psutil.Process(run.process.pid)))
    (first, then), (last, now) = samples
    for kind in now:
        print(f"{kind}: {then[kind] / 1e6:.1f} MB after step {FIRST}, {now[kind] / 1e6:.1f} at the end")
    assert not {name for name, most in ALLOWED.items() if last[name] - first[name] > max(0.03 * first[name], most)}
