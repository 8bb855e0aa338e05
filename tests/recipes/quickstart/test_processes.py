"""The quickstart's process trees: nothing that they started is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A command whose daemon leaves its session and its parent, as Ray's do.
_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
open(sys.argv[1], "w").write("ready")
time.sleep(float(sys.argv[2]))
"""


_RUNNER = """
import pathlib, sys
from epfsdp2.recipes.launch.processes import Interrupted, ProcessTree
try:
    with ProcessTree() as tree:
        print(tree.folder, flush=True)
        command = [sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]]
        sys.exit(tree.run(command, {}, pathlib.Path(sys.argv[2] + ".log"), lambda: None))
except Interrupted as interrupted:
    sys.exit(100 + interrupted.number)
"""


@pytest.mark.parametrize(
    "numbers",
    [(), (signal.SIGTERM,), (signal.SIGTERM, *(signal.SIGINT,) * 20)],
    ids=["none", "SIGTERM", "impatient"],
)
def test_process_tree_that_is_ended_leaves_no_process(numbers, tmp_path):
    seconds = "600" if numbers else "0"
    words = [sys.executable, "-c", _RUNNER, _DAEMON, str(tmp_path / "ready"), seconds]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as runner:
        family = [psutil.Process(runner.pid)]
        while runner.poll() is None and not (tmp_path / "ready").exists():
            time.sleep(0.05)
        family += family[0].children(recursive=True) if runner.poll() is None else []
        assert len(family) >= 3 or not numbers
        for number in numbers:
            os.kill(runner.pid, number)
        folder = Path(runner.stdout.readline().strip())
        # Signals that arrive together are handled in any order.
        assert runner.wait(timeout=30) in ({100 + n for n in numbers} or {0})
    assert not folder.exists()
    assert not [p for p in family if p.is_running()]


# Maps a segment and ends without removing it, as a killed worker does; or so does its child, when it is terminated.
_LEAVES = """
import os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory

def leave(*_):
    segment = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")
    time.sleep(1.5)
    os._exit(0)

if sys.argv[2] == "by itself":
    leave()
signal.signal(signal.SIGTERM, leave)
if os.fork() == 0:
    time.sleep(60)
"""


_TREE = """
import os, pathlib, sys
from epfsdp2.recipes.launch import processes
first, second, others = (pathlib.Path("/dev/shm") / name for name in sys.argv[2:5])
with processes.ProcessTree() as tree:
    others.write_bytes(b"")
    for mine, when in ((first, "by itself"), (second, "terminated")):
        command = [sys.executable, "-c", sys.argv[1], mine.name, when]
        assert tree.run(command, dict(os.environ), pathlib.Path(sys.argv[5]), lambda: None) == 0
        assert mine.exists()
assert others.exists() and not first.exists() and not second.exists(), os.listdir("/dev/shm")
"""


def test_process_tree_that_ends_removes_its_own_segments_and_no_others(tmp_path):
    """Another container that shares this machine's memory may have made one that no process here has mapped."""
    names = [f"psm_{os.getpid()}_{whose}" for whose in ("first", "second", "others")]
    try:
        words = [sys.executable, "-c", _TREE, _LEAVES, *names, str(tmp_path / "log")]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
    finally:
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)
