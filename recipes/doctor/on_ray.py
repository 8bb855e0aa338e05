"""Start the ranks in a Ray cluster: an actor on each GPU runs the command of one rank."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from ...engine.errors import SettingError

__all__ = ["run_on_ray"]

_PLACE_SECONDS = 120.0  # for Ray to start the actors
_TAIL = 2000  # characters of a failed rank's stderr


class _Place:
    """Actor that runs one rank."""

    def node(self) -> tuple[str, str, int]:
        """Return the id, the address and a free port of the actor's node."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), get_free_port()

    def run(self, words: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int, str, str, str]:
        """Run one rank in a process; return its status, stdout, stderr, and the text of its ``--out`` file."""
        with TemporaryDirectory() as folder:
            out = Path(folder) / "machine.json"
            command = [sys.executable, "-m", "epfsdp2.recipes.doctor", *words, "--out", str(out)]
            try:
                done = subprocess.run(
                    command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds
                )
            except subprocess.TimeoutExpired:
                return 1, "", f"did not end within {seconds:g} s", ""
            return done.returncode, done.stdout, done.stderr, out.read_text() if out.exists() else ""


def run_on_ray(words: Sequence[str], cpu_ranks: int, seconds: float, out: Path | None) -> int:
    """Run ranks with these options, print the output of rank 0, and return the highest status.

    Args:
        cpu_ranks: number of ranks on CPUs; 0 for one on each GPU.
        seconds: time limit of a rank.

    Raises:
        SettingError: the cluster has no free GPU, does not start the actors, or its nodes differ in free GPUs.
    """
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    world = cpu_ranks or int(ray.available_resources().get("GPU", 0))
    if not world:
        raise SettingError("--ray", True, "the cluster has no free GPU.", "--ranks N, for N ranks on CPUs")
    actor = ray.remote(_Place).options(**({"num_cpus": 1} if cpu_ranks else {"num_gpus": 1}))
    places: list[Any] = [actor.remote() for _ in range(world)]
    try:
        nodes = ray.get([place.node.remote() for place in places], timeout=_PLACE_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        rule = f"the cluster did not start {world} actors within {_PLACE_SECONDS:g} s."
        raise SettingError("--ray", True, rule, "a cluster on which nothing else runs") from error
    sizes = Counter(node for node, _, _ in nodes)
    if len(set(sizes.values())) > 1:
        rule = f"its nodes have {sorted(sizes.values())} free GPUs, and all need as many."
        raise SettingError("--ray", True, rule, "a cluster on which nothing else runs")
    order = sorted(range(world), key=lambda i: nodes[i][0])  # so ranks of a node are neighbours
    per_node, (_, address, port) = world // len(sizes), nodes[order[0]]
    running = []
    for rank, i in enumerate(order):
        facts = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
        facts |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        environment = {name: str(value) for name, value in facts.items()}
        running.append(places[i].run.remote(list(words), environment, seconds))
    try:
        ended = ray.get(running)
    except ray.exceptions.RayError as error:
        print(f"an actor of the ranks has ended: {error}")
        return 1
    _, said, _, machine = ended[0]
    print(said, end="")
    for rank, (status, _, errors, _) in enumerate(ended):
        if status and not said:
            print(f"rank {rank} ended with status {status}:\n{errors[-_TAIL:]}")
            break
    if out is not None and machine:
        out.write_text(machine)
    return max(status for status, *_ in ended)
