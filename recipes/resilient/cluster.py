"""Which nodes of a Ray cluster live, how many of them a run's trainer can have, and which of them are lost."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .command import Command

__all__ = [
    "LostNodes",
    "Node",
    "NodesLostError",
    "address_of",
    "living_nodes",
    "needed_nodes",
    "usable_nodes",
    "wait_for_nodes",
]

_SECONDS = 120.0
_POLL_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_MARK = "living nodes: "
# In a process of its own: a driver of a cluster that dies hangs or ends with it.
_QUERY = f"""
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", include_dashboard=False)
place = ("NodeManagerAddress", "NodeManagerPort")
alive = [[*map(node.get, place), int(node["Resources"].get(sys.argv[2], 0))] for node in ray.nodes() if node["Alive"]]
print({_MARK!r} + json.dumps(alive))
"""


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster.

    Args:
        host: address of its raylet.
        gpus: as Ray counts them.
    """

    host: str
    port: int
    gpus: int

    def answers(self) -> bool:
        """Whether a connection to the raylet can be opened."""
        try:
            socket.create_connection((self.host, self.port), _ANSWER_SECONDS).close()
        except OSError:
            return False
        return True


class NodesLostError(RuntimeError):
    """Nodes that a run needs do not answer any more."""


class LostNodes:
    """Notices that a run has lost nodes while it goes on.

    Most runs fail by themselves then. But verl 0.9.1 can wait without end for generations of a node that is gone.

    Args:
        nodes: those that the run needs.
        seconds: how long one has not answered when it is lost. A question that still waits does not count: on a
            busy machine its thread may have had no turn.
    """

    def __init__(self, nodes: Sequence[Node], seconds: float):
        self._seconds, self._next_ask = seconds, time.monotonic()
        self._answered = dict.fromkeys(nodes, self._next_ask)
        self._silent: set[Node] = set()
        self._asked: dict[Node, Future[bool]] = {}
        self._asking = ThreadPoolExecutor(32)

    def look(self) -> None:
        """Ask the nodes now and then; does not wait for an answer.

        Raises:
            NodesLostError: with the hosts.
        """
        now = time.monotonic()
        for node, asked in list(self._asked.items()):
            if asked.done():
                if asked.result():
                    self._answered[node] = now
                    self._silent.discard(node)
                else:
                    self._silent.add(node)
                del self._asked[node]
        if now >= self._next_ask:
            self._next_ask = now + min(_POLL_SECONDS, self._seconds / 4)
            for node in self._answered.keys() - self._asked.keys():
                self._asked[node] = self._asking.submit(node.answers)
        if lost := [node.host for node in self._silent if now - self._answered[node] > self._seconds]:
            raise NodesLostError(f"no answer from {', '.join(lost)} for {self._seconds:g} s")


def address_of(command: Command) -> str | None:
    """Return the address of the cluster that a command joins; None if it starts a Ray of its own on this machine.

    Without an address Ray joins what ``ray start`` has left in a file (``ray.init``'s docstring).
    """
    address = command.setting("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    if address is None:
        default = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")
        started = Path(str(command.setting("ray_kwargs.ray_init._temp_dir", default)), "ray_current_cluster")
        address = started.read_text().strip() if started.is_file() else None
    return None if address in (None, "", "local") else str(address)


def living_nodes(address: str, resource: str = "GPU") -> list[Node]:
    """Return the nodes that answer; empty if the cluster does not.

    Ray takes up to half a minute to find out that a node is gone, which is longer than a run takes to fail, so each is
    asked; behind ``ray://`` none can be reached.
    """
    try:
        said = subprocess.run(
            [sys.executable, "-c", _QUERY, address, resource], capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return []
    found = [line.removeprefix(_MARK) for line in said.stdout.splitlines() if line.startswith(_MARK)]
    nodes = [Node(*facts) for facts in json.loads(found[-1])] if found else []
    if address.startswith("ray://"):
        return nodes
    with ThreadPoolExecutor(32) as asking:
        return [node for node, there in zip(nodes, asking.map(Node.answers, nodes), strict=True) if there]


def usable_nodes(command: Command, nodes: Sequence[Node]) -> int:
    """Return how many nodes the trainer can have: those with the run's GPUs, without those of its rollout."""
    wanted = int(command.setting("trainer.nnodes", 1))
    return max(0, min(wanted, len(_large_enough(command, nodes)) - _of_rollout(command)))


def needed_nodes(command: Command, nodes: Sequence[Node], trainers: int) -> list[Node]:
    """Return the nodes that a run of so many trainer nodes can't do without; none where there are spare ones."""
    there = _large_enough(command, nodes)
    return there if len(there) == trainers + _of_rollout(command) else []


def _large_enough(command: Command, nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.gpus >= int(command.setting("trainer.n_gpus_per_node", 8))]


def _of_rollout(command: Command) -> int:
    return int(command.setting("actor_rollout_ref.rollout.nnodes", 0))


def wait_for_nodes(
    usable: Callable[[], int], wanted: int, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Ask until the wanted nodes are there or the time is over; return how many are there then."""
    deadline = time.monotonic() + seconds
    found = usable()
    while found < wanted and time.monotonic() < deadline:
        sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        found = usable()
    return found
