"""A quickstart process, its descendants, and its leftovers on the machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

__all__ = ["EXTENSION", "SERVER", "Run", "differences", "finished", "leftovers", "overrides", "running", "unused"]

HOOKS, ROOT = Path(__file__).parent / "hooks", Path(__file__).parents[2]
ANOTHER = ("epfsdp2.recipes.resilient", "verl.trainer.main_ppo")
SECONDS = 900  # of a slow machine; a run takes two to three minutes on two cores
EXTENSION = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"


class Run:
    """One process and everything that ever descended from it.

    Args:
        program: the module and its first arguments: the quickstart, one of ``hooks`` that changes it, or another.
        environment: variables beside the test's own.
        before: words of a command that runs the program, for example on another host.
    """

    def __init__(
        self,
        output: Path,
        *options: str,
        program: Sequence[str] = ("epfsdp2.recipes.quickstart",),
        environment: Mapping[str, str] = MappingProxyType({}),
        before: Sequence[str] = (),
    ):
        self.output = output
        self.log = output.with_suffix(".out")
        given = [] if program[0] in ANOTHER else ["--output", str(output)]
        words = [*before, sys.executable, "-m", *program, *given, *options]
        paths = filter(None, [str(HOOKS), str(ROOT), environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
        env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        self.family = {psutil.Process(self.process.pid)}

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, until=lambda: False) -> None:
        """Wait until the process has ended, or until ``until()``."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and not until():
            if time.monotonic() > deadline:
                pytest.fail(f"not done after {SECONDS} s:\n{self.text()[-3000:]}")
            try:
                self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.5)

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

    def listening_beyond_loopback(self) -> set[str]:
        """Return the names, up to a dot or blank, of the processes that other machines can connect to."""
        found = set()
        for process in self.family:
            try:
                places = [each.laddr.ip for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
                if not all(ip.removeprefix("::ffff:").startswith("127.") or ip == "::1" for ip in places):
                    found.add(re.split(r"[. ]", process.name())[0])
            except psutil.NoSuchProcess:
                continue
        return found

    def steps(self) -> list[dict]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []


def overrides(*settings: str) -> list[str]:
    """Return the quickstart's options that pass settings to Hydra."""
    return [f"--override={setting}" for setting in settings]


# The rollout: SGLang on its stack, where routes and images need its tokenizer to reach verl; vLLM on the others.
SERVER = (
    ["--rollout", "sglang", *overrides("actor_rollout_ref.rollout.skip_tokenizer_init=False")]
    if find_spec("sglang")
    else []
)


@contextmanager
def running(*arguments, **keywords):
    run = Run(*arguments, **keywords)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.interrupt(signal.SIGTERM)


def finished(output: Path, steps: int, *options: str, **keywords) -> Run:
    """Return a run of so many steps; fail if it does not log all of them."""
    with running(output, "--steps", str(steps), *options, **keywords) as run:
        run.wait()
    assert len(run.steps()) == steps, run.text()[-3000:]
    return run


def differences(steps: list[dict]) -> list[float]:
    """Return each step's mean difference of a token's probability between trainer and rollout."""
    return [step["training/rollout_probs_diff_mean"] for step in steps]


def leftovers() -> set[str]:
    """Return segments in shared memory of weight syncs, vLLM and Python, and sockets in /tmp.

    Sockets with names of Python's ``tempfile`` are left out, because SGLang leaves them.
    """
    segments = {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("verl_weights_", "psm_"))}
    sockets = (p for p in Path("/tmp").iterdir() if not re.fullmatch(r"tmp[a-z0-9_]{8}", p.name))
    return segments | {str(p) for p in sockets if p.is_socket()}


def unused(names: set[str]) -> set[str]:
    """Return the names that no process uses, so that those of another run are left out."""
    mapped = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
        except OSError:
            continue
    return names - mapped
