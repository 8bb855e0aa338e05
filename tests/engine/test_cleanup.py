"""Cleanup removes only files that no process uses; with real processes that are killed."""

import atexit
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from epfsdp2.engine import cleanup
from epfsdp2.engine.config import roles as engine_config_module

_HOLD = """
import mmap, os, socket, sys, time
path, how = sys.argv[1:]
if how == "bound":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
else:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
if how == "mapped":
    kept = mmap.mmap(fd, 4096)
    os.close(fd)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def spawn():
    processes = []

    def start(*arguments: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-S", "-c", _HOLD, *arguments], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ("mapped", "/dev/shm/verl_weights_{}"),
        ("open", "/dev/shm/psm_{}"),
        ("bound", "/tmp/rl-colocate-zmq-{}-replica-0-rank-0.sock"),
    ],
)
def test_remove_unused_removes_what_a_process_held_once_it_is_killed(spawn, monkeypatch, how, path):
    own, others = (path.format(uuid.uuid4().hex) for _ in range(2))
    try:
        holders = [spawn(path, how) for path in (own, others)]
        held = cleanup.held_by([holders[0].pid])
        assert held == {own}
        assert cleanup.held_by([holders[1].pid, 2**22 + 1]) == {others}  # the second is no process
        other = os.getuid() + 1
        with monkeypatch.context() as other_user:
            other_user.setattr(os, "getuid", lambda: other)
            assert cleanup.held_by([holders[0].pid]) == set()
        cleanup.remove_unused(held)
        assert Path(own).exists()
        for holder in holders:
            holder.kill()
            holder.wait()
        cleanup.remove_unused(held)
        assert not Path(own).exists()
        assert Path(others).exists()  # as if its user were in another container
    finally:
        Path(own).unlink(missing_ok=True), Path(others).unlink(missing_ok=True)


def test_report_leftovers_logs_unused_segments_and_removes_nothing(monkeypatch, caplog):
    """The driver only reports: segments of another container look unused, since its ``/proc`` is not visible."""
    path = Path(f"/dev/shm/verl_weights_{uuid.uuid4().hex}")
    path.write_bytes(bytes(3 << 20))
    actor = engine_config_module.EPFSDP2ActorConfig.__new__(engine_config_module.EPFSDP2ActorConfig)
    nothing = {"engine": None, "rollout": {}, "checkpoint": {}, "optim": None, "names": {}, "notes": ()}
    actor.__dict__.update(nothing, reference=None)
    monkeypatch.setattr(engine_config_module.ActorConfig, "validate", lambda *_: None)
    monkeypatch.setattr(engine_config_module, "check_run", lambda *_, **__: None)
    later = []
    monkeypatch.setattr(atexit, "register", lambda *arguments, **__: later.append(arguments))
    try:
        monkeypatch.setattr(cleanup, "SEGMENTS", (str(path),))
        with caplog.at_level("WARNING", "epfsdp2"):
            monkeypatch.setattr(cleanup, "_MINIMUM_AGE_SECONDS", 60.0)
            actor.validate(2, 8)
            assert "shared-memory" not in caplog.text  # too young
            monkeypatch.setattr(cleanup, "_MINIMUM_AGE_SECONDS", 0.0)
            actor.validate(2, 8)
        assert path.exists() and later == []
        assert f"1 shared-memory segments (3 MB) such as {path} are used by no process that is visible" in caplog.text
    finally:
        path.unlink()
