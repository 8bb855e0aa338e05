"""What a long run holds on to is looked at, and what grows is named."""

import subprocess
import sys
from dataclasses import replace
from multiprocessing import shared_memory

import psutil

from benchmarks.training import long_run

SAMPLE = long_run.Sample(50, 10.0, 2, 100, 50, 10 << 20, 8 << 20, {"ray::WorkerDict": 100 << 20, "raylet": 1 << 20})


def test_growth_above_3_percent_is_named():
    assert long_run.grown(SAMPLE, replace(SAMPLE, descriptors=103, threads=51)) == []
    assert long_run.grown(SAMPLE, replace(SAMPLE, descriptors=104, threads=52)) == ["file descriptors", "threads"]
    more = {"ray::WorkerDict": 104 << 20, "raylet": 2 << 20}  # a MB is no growth
    assert long_run.grown(SAMPLE, replace(SAMPLE, resident=more)) == ["ray::WorkerDict"]
    assert long_run.grown(SAMPLE, replace(SAMPLE, shared=12 << 20, store=10 << 20)) == ["shared memory", "Ray's store"]
    assert long_run.cells([SAMPLE, replace(SAMPLE, step=100, seconds=20.0)])[1][:2] == ["100", "0.20"]


def test_a_process_and_its_descendants_are_looked_at():
    held = shared_memory.SharedMemory(create=True, size=3 << 20)
    held.buf[:] = b"x" * len(held.buf)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = long_run.sample(psutil.Process(), 7, 0.0)
    finally:
        child.communicate(b"\n")
        held.close()
        held.unlink()
    assert found.step == 7 and found.processes >= 2 and found.descriptors > 3 and found.threads >= 2
    assert found.shared >= 3 << 20 and found.store == 0 and found.total > 10 << 20


def test_processes_are_called_by_what_they_are():
    assert long_run.kind_of(["ray::WorkerDict.update_actor"]) == "ray::WorkerDict"
    assert long_run.kind_of(["/somewhere/raylet/raylet", "--store"]) == "raylet"
    assert long_run.kind_of(["/bin/python3.11", "-u", "/x/ray/dashboard/agent.py"]) == "agent.py"
    assert long_run.kind_of(["python", "-m", "verl.trainer.main_ppo"]) == "verl.trainer.main_ppo"
