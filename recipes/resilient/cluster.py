"""The living nodes of a Ray cluster, and nodes that a run loses."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .command import Command

__all__ = ["LostNodes", "Node", "NodesLostError", "address_of", "living_nodes"]

_QUERY_SECONDS, _CONNECT_SECONDS, _POLL_SECONDS = 120.0, 5.0, 5.0
_MARK = "living nodes: "
# Runs in a process of its own, because a driver hangs or dies with its cluster.
_QUERY = f"""
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", include_dashboard=False)
place = ("NodeManagerAddress", "NodeManagerPort")
alive = [[*map(node.get, place), int(node["Resources"].get(sys.argv[2], 0))] for node in ray.nodes() if node["Alive"]]
print({_MARK!r} + json.dumps(alive))
"""


class NodesLostError(RuntimeError):
    """Nodes that a run needs do not answer."""


class Node(NamedTuple):
    """Address of a node's raylet, and the node's GPUs as Ray counts them."""

    host: str
    port: int
    gpus: int

    def answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), _CONNECT_SECONDS).close()
        except OSError:
            return False
        return True


def address_of(command: Command) -> str | None:
    """Return the address of the cluster that a command joins; None if it starts a Ray of its own."""
    address = command.setting("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    if address is None:  # then Ray joins the cluster that ``ray start`` has noted (docstring of ray.init)
        default = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")
        noted = Path(str(command.setting("ray_kwargs.ray_init._temp_dir", default)), "ray_current_cluster")
        address = noted.read_text().strip() if noted.is_file() else None
    return None if address in (None, "", "local") else str(address)


def living_nodes(address: str, resource: str = "GPU") -> list[Node]:
    """Return the nodes that accept a connection; none if the cluster does not answer.

    Ray notices a lost node up to half a minute late, after a run has failed. Nodes behind ``ray://`` can't be reached.
    """
    words = [sys.executable, "-c", _QUERY, address, resource]
    try:
        output = subprocess.run(words, capture_output=True, text=True, timeout=_QUERY_SECONDS).stdout
    except subprocess.TimeoutExpired:
        return []
    found = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    nodes = [Node(*facts) for facts in json.loads(found[-1])] if found else []
    return nodes if address.startswith("ray://") else _answering(nodes)


def _answering(nodes: Sequence[Node]) -> list[Node]:
    with ThreadPoolExecutor(32) as pool:
        return [node for node, there in zip(nodes, pool.map(Node.answers, nodes), strict=True) if there]


class LostNodes:
    """Notices nodes that have not answered for some seconds; 0 seconds: never.

    Most runs fail by themselves then, but verl 0.9.1 can wait forever for generations of a lost node.
    """

    def __init__(self, nodes: Sequence[Node], seconds: float):
        self._seconds, self._next = seconds, 0.0
        self._seen = dict.fromkeys(nodes if seconds else (), time.monotonic())

    def hosts(self) -> list[str]:
        """Connect to the nodes now and then; return the lost hosts."""
        if not self._seen or time.monotonic() < self._next:
            return []
        there, now = _answering(list(self._seen)), time.monotonic()
        self._seen |= dict.fromkeys(there, now)
        self._next = now + min(_POLL_SECONDS, self._seconds / 4)
        return [node.host for node, seen in self._seen.items() if now - seen > self._seconds]
