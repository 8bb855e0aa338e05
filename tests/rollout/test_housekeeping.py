"""Only what nobody uses is removed; real processes, killed for real."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from epfsdp2.rollout import housekeeping

_HOLD = """
import mmap, os, sys, time
path, how = sys.argv[1:]
fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 4096)
if how == "mapped":
    kept = mmap.mmap(fd, 4096)
    os.close(fd)
print("ready", flush=True)
time.sleep(600)
"""

_BIND = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def spawn():
    processes = []

    def start(code: str, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["mapped", "open"])
@pytest.mark.parametrize("prefix", ["verl_weights_", "psm_"])
def test_a_segment_goes_once_its_process_is_killed(spawn, prefix, how):
    path = f"/dev/shm/{prefix}{uuid.uuid4().hex}"
    try:
        holder = spawn(_HOLD, path, how)
        assert path not in housekeeping.unused_segments(minimum_age=0)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert path in housekeeping.unused_segments(minimum_age=0)
        assert path not in housekeeping.unused_segments(minimum_age=60)
    finally:
        Path(path).unlink(missing_ok=True)


def test_a_segment_of_another_user_stays(spawn, monkeypatch):
    path = f"/dev/shm/psm_{uuid.uuid4().hex}"
    Path(path).touch()
    try:
        assert path in housekeeping.unused_segments(minimum_age=0)
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        assert path not in housekeeping.unused_segments(minimum_age=0)
    finally:
        Path(path).unlink()


def test_a_socket_goes_once_its_process_is_killed(spawn):
    path = f"/tmp/rl-colocate-zmq-{uuid.uuid4().hex}-replica-0-rank-0.sock"
    try:
        holder = spawn(_BIND, path)
        assert path not in housekeeping.unused_sockets()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert path in housekeeping.unused_sockets()
    finally:
        Path(path).unlink(missing_ok=True)


def test_remove_leftovers_reports_what_it_removed():
    path = Path(f"/dev/shm/verl_weights_{uuid.uuid4().hex}")
    path.touch()
    assert str(path) not in housekeeping.remove_leftovers()  # too young
    time.sleep(2.1)
    assert str(path) in housekeeping.remove_leftovers()
    assert not path.exists()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"], ids=["normal", "exit", "error"])
def test_at_exit_ray_is_shut_down_and_its_segments_are_waited_for(ending):
    """A stand-in for Ray whose shutdown ends, a second later, the process that holds a segment."""
    path = f"/dev/shm/psm_{uuid.uuid4().hex}"
    driver = textwrap.dedent(
        f"""
        import subprocess, sys, types
        from epfsdp2.rollout import housekeeping
        assert "ray" not in sys.modules
        housekeeping.install_at_exit()
        housekeeping.install_at_exit()
        holder = subprocess.Popen([sys.executable, "-c", {_HOLD!r}, {path!r}, "mapped"], stdout=subprocess.PIPE)
        holder.stdout.readline()

        def shutdown():
            print("ray is shut down", flush=True)
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {{holder.pid}}"])

        sys.modules["ray"] = types.SimpleNamespace(is_initialized=lambda: True, shutdown=shutdown)
        {ending}
        """
    )
    done = subprocess.run([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[ending]
    assert done.stdout == "ray is shut down\n"
    assert not Path(path).exists()
