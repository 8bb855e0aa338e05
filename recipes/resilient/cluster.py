"""Which nodes of a Ray cluster live, and how many of them a run's trainer can have."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .command import Command

__all__ = ["address_of", "living_gpus", "usable_nodes", "wait_for_nodes"]

_SECONDS = 120.0
_POLL_SECONDS = 5.0
_MARK = "living nodes: "
# Ray takes up to half a minute to find out that a node is gone, which is longer than a run takes to fail: each node is
# asked. In a process of its own: a driver of a cluster that dies hangs or ends with it.
_QUERY = f"""
import json, socket, sys, ray
from concurrent.futures import ThreadPoolExecutor

def answers(node):
    if sys.argv[1].startswith("ray://"):  # nodes can't be reached from here
        return True
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 5).close()
    except OSError:
        return False
    return True

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", include_dashboard=False)
alive = [node for node in ray.nodes() if node["Alive"]]
with ThreadPoolExecutor(32) as asking:
    alive = [node for node, there in zip(alive, asking.map(answers, alive)) if there]
print({_MARK!r} + json.dumps([node["Resources"].get(sys.argv[2], 0) for node in alive]))
"""


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


def living_gpus(address: str, resource: str = "GPU") -> list[int]:
    """Return the number of GPUs of each node that answers, as Ray counts them; empty if the cluster does not."""
    try:
        said = subprocess.run(
            [sys.executable, "-c", _QUERY, address, resource], capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return []
    found = [line.removeprefix(_MARK) for line in said.stdout.splitlines() if line.startswith(_MARK)]
    return [int(gpus) for gpus in json.loads(found[-1])] if found else []


def usable_nodes(command: Command, gpus: Sequence[int]) -> int:
    """Return how many nodes the trainer can have: those with the run's GPUs, without those of its rollout."""
    wanted, of_node = int(command.setting("trainer.nnodes", 1)), int(command.setting("trainer.n_gpus_per_node", 8))
    of_rollout = int(command.setting("actor_rollout_ref.rollout.nnodes", 0))
    there = sum(count >= of_node for count in gpus)
    return max(0, min(wanted, there - of_rollout))


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
