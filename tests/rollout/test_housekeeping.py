"""Cleanup removes only what no process uses; with real processes that are killed."""

import atexit
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from epfsdp2.engine import config as engine_config_module
from epfsdp2.rollout import cleanup

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
def test_remove_leftovers_removes_a_segment_once_its_process_is_killed(spawn, prefix, how):
    path = f"/dev/shm/{prefix}{uuid.uuid4().hex}"
    try:
        holder = spawn(_HOLD, path, how)
        assert path not in cleanup.unused_segments(minimum_age=0)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert path in cleanup.unused_segments(minimum_age=0)
        assert path not in cleanup.unused_segments(minimum_age=60)
    finally:
        Path(path).unlink(missing_ok=True)


def test_remove_leftovers_keeps_a_segment_of_another_user(spawn, monkeypatch):
    path = f"/dev/shm/psm_{uuid.uuid4().hex}"
    Path(path).touch()
    try:
        assert path in cleanup.unused_segments(minimum_age=0)
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        assert path not in cleanup.unused_segments(minimum_age=0)
    finally:
        Path(path).unlink()


def test_remove_leftovers_removes_a_socket_once_its_process_is_killed(spawn):
    path = f"/tmp/rl-colocate-zmq-{uuid.uuid4().hex}-replica-0-rank-0.sock"
    try:
        holder = spawn(_BIND, path)
        assert path not in cleanup.unused_sockets()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert path in cleanup.unused_sockets()
    finally:
        Path(path).unlink(missing_ok=True)


def test_remove_leftovers_returns_what_it_removed():
    path = Path(f"/dev/shm/verl_weights_{uuid.uuid4().hex}")
    path.touch()
    assert cleanup.remove_leftovers([str(path)], []) == []  # too young
    time.sleep(2.1)
    assert cleanup.remove_leftovers([str(path)], []) == [str(path)]
    assert not path.exists()


def test_held_by_returns_the_segments_of_a_runs_processes(spawn):
    own, others = (f"/dev/shm/psm_{uuid.uuid4().hex}" for _ in range(2))
    try:
        holders = [spawn(_HOLD, path, how) for path, how in ((own, "mapped"), (others, "open"))]
        assert cleanup.held_by([holders[0].pid]) == {own}
        assert cleanup.held_by([holders[1].pid, 2**22 + 1]) == {others}  # the second is no process
        noted = cleanup.held_by([holders[0].pid])
        for holder in holders:
            holder.kill()
            holder.wait()
        assert cleanup.remove_leftovers(noted, [], minimum_age=0) == [own]
        assert Path(others).exists()  # as if its user were in another container
    finally:
        Path(own).unlink(missing_ok=True), Path(others).unlink(missing_ok=True)


def test_report_leftovers_logs_unused_segments_and_removes_nothing(monkeypatch, caplog):
    """The driver only reports: segments of another container look unused, since its ``/proc`` is not visible."""
    path = Path(f"/dev/shm/verl_weights_{uuid.uuid4().hex}")
    path.write_bytes(bytes(3 << 20))
    actor = engine_config_module.EPFSDP2ActorConfig.__new__(engine_config_module.EPFSDP2ActorConfig)
    nothing = {"engine": None, "rollout": {}, "checkpoint": {}, "optim": None}
    nothing |= {"names": {}, "notes": (), "reference": None}
    actor.__dict__.update(nothing)
    monkeypatch.setattr(engine_config_module.ActorConfig, "validate", lambda *_: None)
    monkeypatch.setattr(engine_config_module, "check_run", lambda *_, **__: None)
    removed = []
    monkeypatch.setattr(os, "unlink", removed.append)
    registered = []
    monkeypatch.setattr(atexit, "register", lambda *arguments, **__: registered.append(arguments))
    try:
        monkeypatch.setattr(cleanup, "SEGMENTS", (str(path),))
        monkeypatch.setattr(cleanup.unused_segments, "__defaults__", ((str(path),), 0.0))
        with caplog.at_level("WARNING", "epfsdp2"):
            actor.validate(2, 8)
        assert path.exists() and removed == [] and registered == []
        assert f"1 shared-memory segments (3 MB) such as {path} are used by no process that is visible" in caplog.text
    finally:
        monkeypatch.undo()
        path.unlink()
