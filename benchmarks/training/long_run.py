"""What a long GRPO run holds on to: memory, file descriptors, threads and shared memory, at every hundredth step.

    python -m benchmarks.training.long_run [--steps 500] [--model FOLDER]

The quickstart's run with small batches, one trainer rank and one vLLM worker. What its processes hold after step 50 is
what a run needs; at the end it may be 3 % more. Resident memory is each process's own. Shared memory are the pages of
the files in ``/dev/shm`` that these processes have mapped, Ray's object store among them, each file once.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.machine import machine
from benchmarks.tables import rows_of, write_table

FIRST, MOST_MORE, LEAST_BYTES = 50, 0.03, 1 << 20
SMALL = ["--batch-size", "4", "--group-size", "2"]
ONE_OF_EACH = ["trainer.n_gpus_per_node=1", "engine.ep_size=1"]
# Ray's head keeps what it knows of the last 100,000 tasks; 1,000 are reached before step 50.
ENVIRONMENT = {"RAY_task_events_max_num_task_in_gcs": "1000"}
# The eight answers of a step, which the quickstart's micro-batches of 32 do not divide.
MICRO_BATCHES = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu=8" for name in ("actor.ppo", "rollout.log_prob")]
COLUMNS = ["step", "seconds a step", "processes", "resident MB", "file descriptors", "threads", "shared MB"]


@dataclass(frozen=True)
class Sample:
    """What all processes hold after a step.

    Args:
        resident: bytes by kind of process.
        store: bytes of Ray's object store, which are among ``shared``.
    """

    step: int
    seconds: float  # since the run began
    processes: int
    descriptors: int
    threads: int
    shared: int
    store: int
    resident: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.resident.values())


def sample(root: psutil.Process, step: int, began: float) -> Sample:
    """Look at a process and its descendants; those that end meanwhile are left out."""
    resident: Counter[str] = Counter()
    descriptors = threads = processes = 0
    files: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
            words = process.cmdline()
            fds, own, memory = process.num_fds(), process.num_threads(), process.memory_info()
            processes, descriptors, threads = processes + 1, descriptors + fds, threads + own
            resident[kind_of(words)] += memory.rss - memory.shared
            for name in set(re.findall(r"(/dev/shm/\S+)", Path(f"/proc/{process.pid}/maps").read_text())):
                with contextlib.suppress(OSError):
                    files[name] = 512 * Path(name).stat().st_blocks
    store = sum(size for name, size in files.items() if "plasma" in name)
    seconds = time.monotonic() - began
    return Sample(step, seconds, processes, descriptors, threads, sum(files.values()), store, dict(resident))


def kind_of(words: Sequence[str]) -> str:
    """What a process is called in the table, e.g. ``ray::WorkerDict`` or ``raylet``."""
    first = re.split(r"[. (]", Path(words[0]).name if words and "::" not in words[0] else " ".join(words))[0]
    if not first.startswith("python"):
        return first
    return next((word.rpartition("/")[2] for word in words[1:] if word.endswith(".py") or "." in word), first)


def measure(steps: int, every: int, options: Sequence[str]) -> list[Sample]:
    """Run the quickstart and look at it after step 50, after every hundredth, and after the last but one.

    Raises:
        RuntimeError: the run failed, or ended before it could be looked at.
    """
    first = min(FIRST, steps // 2)
    wanted = [first, *(step for step in range(every, steps - 1, every) if step > first), steps - 1]
    found: list[Sample] = []
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "run"
        settings = [f"--override={setting}" for setting in [*ONE_OF_EACH, *MICRO_BATCHES]]
        command = [sys.executable, "-m", "epfsdp2.recipes.quickstart", "--output", str(output), "--steps", str(steps)]
        began, log = time.monotonic(), Path(name) / "log"
        with log.open("wb") as out:
            words, environment = [*command, *SMALL, *settings, *options], os.environ | ENVIRONMENT
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        root, metrics = psutil.Process(process.pid), output / "metrics.jsonl"
        try:
            while process.poll() is None:
                done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                if len(found) < len(wanted) and done >= wanted[len(found)]:
                    found.append(sample(root, done, began))
                time.sleep(0.05)
        finally:
            process.terminate()
            process.wait()
        if len(found) < len(wanted):
            raise RuntimeError(f"the run ended after {len(found)} of {len(wanted)} looks:\n{log.read_text()[-3000:]}")
    return found


def grown(first: Sample, last: Sample) -> list[str]:
    """What is more than 3 % above what it was; less than a MB is no growth of memory."""
    pairs = {
        "file descriptors": (first.descriptors, last.descriptors, 0),
        "threads": (first.threads, last.threads, 0),
        "shared memory": (first.shared, last.shared, LEAST_BYTES),
        "Ray's store": (first.store, last.store, LEAST_BYTES),
        **{kind: (first.resident.get(kind, 0), now, LEAST_BYTES) for kind, now in last.resident.items()},
    }
    return [name for name, (then, now, least) in pairs.items() if now - then > max(MOST_MORE * then, least)]


def cells(found: Sequence[Sample]) -> list[list[str]]:
    lines, before = [], None
    for each in found:
        pace = "" if before is None else f"{(each.seconds - before.seconds) / (each.step - before.step):.2f}"
        numbers = [
            each.processes,
            f"{each.total / 1e6:.0f}",
            each.descriptors,
            each.threads,
            f"{each.shared / 1e6:.1f}",
        ]
        lines.append([str(each.step), pace, *map(str, numbers)])
        before = each
    return lines


def by_kind(first: Sample, last: Sample) -> list[list[str]]:
    found = sorted(last.resident, key=lambda kind: -last.resident[kind])
    pairs = [(kind, first.resident.get(kind, 0), last.resident[kind]) for kind in found]
    pairs.append(("Ray's store", first.store, last.store))
    return [[kind, f"{a / 1e6:.1f}", f"{b / 1e6:.1f}", f"{b / a - 1:+.1%}" if a else ""] for kind, a, b in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="fewer write no result file")
    parser.add_argument("--model", type=Path, help="a model of an earlier quickstart, which saves the warm-up")
    asked = parser.parse_args()
    options = [] if asked.model is None else ["--model", str(asked.model)]
    found = measure(asked.steps, 100, options)
    more = grown(found[0], found[-1])
    kinds = rows_of(["processes", f"MB after step {found[0].step}", "MB at the end", ""], by_kind(found[0], found[-1]))
    print("\n".join([*rows_of(COLUMNS, cells(found)), "", *kinds]))
    print(f"grown by more than {MOST_MORE:.0%}: {', '.join(more) or 'nothing'}")
    if asked.steps >= 500:
        where = machine()
        text = [
            "GRPO with one trainer rank and one vLLM worker, batches of 4 questions with 2 answers each. All processes",
            "of the run: resident memory without what they share, file descriptors, threads, files in `/dev/shm`.",
            "Ray's head is told to keep what it knows of 1,000 tasks, not of 100,000, so that it has them at step 50.",
            f"Bound: none of them {MOST_MORE:.0%} above what it was after step {found[0].step}. Grown by more:",
            f"{', '.join(more) or 'nothing'}.",
        ]
        result = {"machine": where, "samples": [asdict(each) for each in found], "grown": more}
        on = f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB"
        made_by = "python -m benchmarks.training.long_run"
        write_table("long_run", result, "A long run", made_by, on, text, COLUMNS, cells(found), ["", *kinds])
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
