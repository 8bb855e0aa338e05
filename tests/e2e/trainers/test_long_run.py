"""A long GRPO run holds on to no more descriptors, threads or shared memory than at step 50.

Shared memory is the pages of files in ``/dev/shm`` that the run's processes have mapped, Ray's object store among them.
Resident memory is printed by kind of process: Ray's head and the trainer grow by a few MB (benchmarks/results/runs.md).
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FIRST, MOST_MORE, LEAST_BYTES = 50, 0.03, 1 << 20
SMALL = ["--batch-size", "4", "--group-size", "2"]
ONE_OF_EACH = ["trainer.n_gpus_per_node=1", "engine.ep_size=1"]
# Ray's head keeps events of the last 100,000 tasks. A run reaches 1,000 before step 50.
ENVIRONMENT = {"RAY_task_events_max_num_task_in_gcs": "1000"}
# The eight answers of a step, which the quickstart's micro-batches of 32 do not divide.
MICRO_BATCHES = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu=8" for name in ("actor.ppo", "rollout.log_prob")]


@dataclass(frozen=True)
class Sample:
    """Resources of all processes after a step.

    Args:
        resident: bytes by kind of process.
        store: bytes of Ray's object store, which are among ``shared``.
    """

    step: int
    descriptors: int
    threads: int
    shared: int
    store: int
    resident: dict[str, int] = field(default_factory=dict)


def sample(root: psutil.Process, step: int) -> Sample:
    """Sum over a process and its descendants, without those that end meanwhile."""
    resident: Counter[str] = Counter()
    descriptors = threads = 0
    files: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
            words = process.cmdline()
            fds, own, memory = process.num_fds(), process.num_threads(), process.memory_info()
            descriptors, threads = descriptors + fds, threads + own
            resident[kind_of(words)] += memory.rss - memory.shared
            for name in set(re.findall(r"(/dev/shm/\S+)", Path(f"/proc/{process.pid}/maps").read_text())):
                with contextlib.suppress(OSError):
                    files[name] = 512 * Path(name).stat().st_blocks
    store = sum(size for name, size in files.items() if "plasma" in name)
    return Sample(step, descriptors, threads, sum(files.values()), store, dict(resident))


def kind_of(words: Sequence[str]) -> str:
    """Return a process's kind, e.g. ``ray::WorkerDict`` or ``raylet``."""
    first = re.split(r"[. (]", Path(words[0]).name if words and "::" not in words[0] else " ".join(words))[0]
    if not first.startswith("python"):
        return first
    return next((word.rpartition("/")[2] for word in words[1:] if word.endswith(".py") or "." in word), first)


def measure(steps: int, every: int) -> list[Sample]:
    """Run the quickstart; sample it after step 50, after every hundredth, and after the last but one.

    Raises:
        RuntimeError: the run failed, or ended before the last sample.
    """
    first = min(FIRST, steps // 2)
    wanted = [first, *(step for step in range(every, steps - 1, every) if step > first), steps - 1]
    found: list[Sample] = []
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "run"
        settings = [f"--override={setting}" for setting in [*ONE_OF_EACH, *MICRO_BATCHES]]
        command = [sys.executable, "-m", "epfsdp2.recipes.quickstart", "--output", str(output), "--steps", str(steps)]
        log = Path(name) / "log"
        with log.open("wb") as out:
            words, environment = [*command, *SMALL, *settings], os.environ | ENVIRONMENT
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        root, metrics = psutil.Process(process.pid), output / "metrics.jsonl"
        try:
            while process.poll() is None:
                done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                if len(found) < len(wanted) and done >= wanted[len(found)]:
                    found.append(sample(root, done))
                time.sleep(0.05)
        finally:
            process.terminate()
            process.wait()
        if len(found) < len(wanted):
            raise RuntimeError(f"the run ended after {len(found)} of {len(wanted)} samples:\n{log.read_text()[-3000:]}")
    return found


@pytest.mark.timeout(7200)
def test_run_of_500_steps_holds_on_to_no_more_than_after_50():
    first, *_, last = measure(500, 100)
    for kind, now in sorted(last.resident.items(), key=lambda item: -item[1]):
        print(f"{kind}: {first.resident.get(kind, 0) / 1e6:.1f} MB after step {first.step}, {now / 1e6:.1f} at the end")
    pairs = {
        "file descriptors": (first.descriptors, last.descriptors, 0),
        "threads": (first.threads, last.threads, 0),
        "shared memory": (first.shared, last.shared, LEAST_BYTES),
        "Ray's store": (first.store, last.store, LEAST_BYTES),
    }
    assert [name for name, (then, now, least) in pairs.items() if now - then > max(MOST_MORE * then, least)] == []
