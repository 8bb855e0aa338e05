"""Two hosts on one machine: Linux namespaces with a network, a ``/dev/shm``, processes and a Ray folder of their own.

A pair of virtual interfaces joins them. A host that is killed takes every process with it that was started on it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["INTERFACE", "Host", "two_hosts", "why_no_hosts"]

_NETWORK, INTERFACE = "10.231.77", "ep0"
_OWN = ("--mount", "--uts", "--pid")


class Host:
    """A host, which is not there before ``boot``.

    Args:
        name: of its network namespace, and its host name.
        ray_dir: a folder whose content is its own, where Ray keeps its sockets.
    """

    def __init__(self, name: str, address: str, ray_dir: Path):
        self.name, self.address, self._ray_dir = name, address, ray_dir
        self._first: subprocess.Popen | None = None

    def boot(self) -> None:
        """Start the process whose end is that of all others on the host."""
        mounts = f"mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {self._ray_dir}"
        names = f"(cat /etc/hosts; echo {self.address} {self.name}) > {self._ray_dir}/hosts"
        mounts += f" && {names} && mount --bind {self._ray_dir}/hosts /etc/hosts"
        words = ["ip", "netns", "exec", self.name, "unshare", *_OWN, "--fork", "--kill-child", "--mount-proc"]
        words += ["bash", "-c", f"{mounts} && hostname {self.name} && echo up && exec sleep infinity"]
        self._first = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._first.stdout is not None and self._first.stdout.readline() == "up\n", "a host did not start"

    def words(self) -> list[str]:
        """Words before a command, which run it on this host."""
        assert self._first is not None
        pid = self._first.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return ["nsenter", "-t", first, "--net", *_OWN, "--"]

    def kill(self) -> None:
        """End every process of the host, as a loss of power does."""
        if self._first is not None:
            self._first.send_signal(signal.SIGKILL)
            self._first.wait()
            self._first = None

    def start_ray(self, *options: str, environment: Mapping[str, str]) -> None:
        """Start Ray's processes of a node, which count one GPU that need not be there."""
        counts = ["--num-cpus=16", "--num-gpus=1", "--object-store-memory=300000000", "--disable-usage-stats"]
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.address}", *counts]
        done = subprocess.run(
            [*self.words(), *words, *options],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-3000:]


def why_no_hosts() -> str:
    """Why hosts can't be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for words in (["ip", "netns", "list"], ["unshare", "--net", *_OWN, "--fork", "true"], ["nsenter", "--version"]):
        try:
            tried = subprocess.run(words, capture_output=True, text=True)
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
        if tried.returncode != 0:
            return f"{' '.join(words)}: {tried.stderr.strip()}"
    return ""


@contextlib.contextmanager
def two_hosts(ray_dir: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else; their names end in ``a`` and ``b``."""
    names = [f"ep{os.getpid()}{letter}" for letter in "ab"]
    hosts = [Host(name, f"{_NETWORK}.{place}", ray_dir) for place, name in enumerate(names, start=1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        peer = ("peer", "name", INTERFACE, "netns", names[1])
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", *peer)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", host.name, "link", "set", interface, "up")
            # Programs ask for the route to somewhere when they look for their own address.
            _ip("-n", host.name, "route", "add", "default", "dev", INTERFACE)
            host.boot()
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
