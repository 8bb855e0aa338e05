"""verl's command: its settings, its complete checkpoints, and the nodes of its Ray cluster."""

import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...engine.checkpoint.atomic_folder import CheckpointError, verify_files
from ...engine.config.values import get_setting
from ...engine.errors import SettingError

__all__ = ["FOLDER", "NOTICE", "Command", "Node", "answering", "complete_steps", "living_nodes"]

# Beside the checkpoints: the folder of messages to ranks, and a file that asks for a save at the end of the step. With
# ``FOLDER`` as text it asks for the last step, by the living ranks; the trainer removes it when it has tried.
FOLDER, NOTICE = "survivors", "save_now"

_WORKS = "python -m epfsdp2.recipes.resilient -- python -m verl.trainer.main_ppo engine=epfsdp2 ..."
# Runs in a process of its own, because a driver hangs or dies with its cluster.
_QUERY = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", include_dashboard=False)
place = ("NodeManagerAddress", "NodeManagerPort")
alive = [[*map(node.get, place), int(node["Resources"].get(sys.argv[2], 0))] for node in ray.nodes() if node["Alive"]]
print(json.dumps(alive))
"""


@dataclass(frozen=True)
class Command:
    """The words after ``--``, and the resolved settings."""

    words: tuple[str, ...]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Command":
        """Compose the settings. Raises ``SettingError`` if it is not one of verl's RL trainers with this engine."""
        shown = " ".join(words)[:600] or "''"
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if not module.startswith("verl.") or Path(words[0]).name == "torchrun":
            rule = "is not python -m with one of verl's trainers on Ray. (torchrun has --max-restarts itself.)"
            raise SettingError("resilient", shown, rule, _WORKS)
        done = subprocess.run([*words, "--cfg", "job", "--resolve"], capture_output=True, text=True)
        begin = re.search(r"^\w+:$", done.stdout, re.MULTILINE)  # after lines of libraries
        if not begin:
            rule = f"its settings can't be composed: {' '.join((done.stderr or done.stdout).split())[-600:]}."
            raise SettingError("resilient", shown, rule, "a command that runs without resilient")
        config = yaml.safe_load(done.stdout[begin.start() :])
        if "epfsdp2" not in str(get_setting(config, "engine._target_")):
            raise SettingError("resilient", shown, "has no engine=epfsdp2, whose checkpoints fit another mesh.", _WORKS)
        return cls(tuple(words), config)

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by its dotted name; the default in place of None."""
        value = get_setting(self.config, name)
        return default if value is None else value

    @property
    def root(self) -> Path:
        """The folder of the run's ``global_step_<n>``."""
        return Path(str(self.setting("trainer.default_local_dir"))).absolute()

    @property
    def address(self) -> str:
        """Address of the cluster that the command joins; empty if it starts a Ray of its own."""
        address = self.setting("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
        if address is None:  # then Ray joins the cluster that ``ray start`` has noted (docstring of ray.init)
            default = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")
            noted = Path(str(self.setting("ray_kwargs.ray_init._temp_dir", default)), "ray_current_cluster")
            address = noted.read_text().strip() if noted.is_file() else "local"
        return "" if address == "local" else str(address)

    def complete_steps(self) -> dict[int, Path]:
        return complete_steps(self.root, self.setting("trainer.v1.trainer_mode", "sync") != "sync")


def complete_steps(root: Path, with_queue: bool = False) -> dict[int, Path]:
    """Return the folders from which a run can resume, by step. The engine verifies checksums when it loads."""
    found = {}
    for folder in root.glob("global_step_*"):
        roles = {path.name.partition(".")[0] for path in folder.iterdir()} & {"actor", "critic"}
        try:
            for role in {"actor", *roles}:
                verify_files(folder / role, checksums=False)
        except CheckpointError:
            continue
        # A killed save leaves a part of data.pt. Without verl's queue, saved last, prompts in flight would be lost.
        if zipfile.is_zipfile(folder / "data.pt") and (not with_queue or (folder / "transfer_queue").is_dir()):
            found[int(folder.name.removeprefix("global_step_"))] = folder
    return found


class Node(NamedTuple):
    """Address of a node's raylet, and the node's GPUs as Ray counts them."""

    host: str
    port: int
    gpus: int


def living_nodes(address: str, resource: str) -> list[Node]:
    """Return the nodes of a cluster that accept a connection: Ray notices a lost one up to half a minute late."""
    words = [sys.executable, "-c", _QUERY, address, resource]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120.0)
    except subprocess.TimeoutExpired:
        return []
    nodes = [] if done.returncode else [Node(*facts) for facts in json.loads(done.stdout.splitlines()[-1])]
    return nodes if address.startswith("ray://") else answering(nodes)


def answering(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that accept a connection."""

    def answers(node: Node) -> bool:
        with suppress(OSError), socket.create_connection((node.host, node.port), timeout=5.0):
            return True
        return False

    with ThreadPoolExecutor(32) as pool:
        return [node for node, there in zip(nodes, pool.map(answers, nodes), strict=True) if there]
