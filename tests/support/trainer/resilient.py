"""What tests of ``recipes/resilient`` run: a trainer's command that saves and fails on demand, and folders of steps."""

import copy
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.recipes.resilient.command import Command

__all__ = ["CONFIG", "FAKE", "TRAINER", "Run", "command_of", "save_step"]

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests" / "recipes" / "fake_verl"
TRAINER = [sys.executable, "-m", "verl.trainer.main_ppo", "engine=epfsdp2"]
CONFIG = {
    "engine": {"_target_": "epfsdp2.engine.config.engine_config", "ep_size": 4, "model_dtype": "fp32"},
    "trainer": {
        **{"nnodes": 1, "n_gpus_per_node": 2, "save_freq": 2, "total_training_steps": 8, "resume_mode": "auto"},
        **{"resume_from_path": None, "device": "cuda"},
    },
    "data": {"train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 16},
    "actor_rollout_ref": {
        "model": {"path": "nowhere"},
        "actor": {
            **{"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 1},
            "checkpoint": {"save_contents": ["model", "optimizer", "extra"]},
        },
        "rollout": {"n": 1, "nnodes": 0, "tensor_model_parallel_size": 1},
    },
    "ray_kwargs": {"ray_init": {"address": "local"}},
}


class Run:
    """One call of the recipe in a folder, and what became of it."""

    def __init__(self, folder: Path, *fates: dict, config: dict = CONFIG, **trainer):
        self.folder, self.root = folder, folder / "checkpoints"
        config = copy.deepcopy(config)
        config["trainer"] |= {"default_local_dir": str(self.root), **trainer}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "plan.json").write_text(json.dumps(fates))
        # What living nodes answer by: connections that nobody accepts, four a second.
        self.node = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            **{"PYTHONPATH": os.pathsep.join([str(FAKE), str(ROOT)]), "FAKE_RUN": str(folder), "NO_COLOR": "1"},
            "FAKE_NODE_PORT": str(self.node.getsockname()[1]),
        }

    def start(self, *options: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "epfsdp2.recipes.resilient", "--backoff-seconds", "0.1", *options]
        return subprocess.Popen(
            [*words, "--", *TRAINER], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def to_the_end(self, *options: str) -> int:
        process = self.start(*options)
        self.output, self.said = process.communicate(timeout=120)
        return process.returncode

    @property
    def attempts(self) -> list[list[str]]:
        path = self.folder / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def resumed(self) -> list[str]:
        """Where each attempt went on from: a folder's name, or how else it began."""
        found = []
        for words in self.attempts:
            given = dict(word.split("=", 1) for word in words if "=" in word)
            path = given.get("trainer.resume_from_path", "").strip('"')
            found.append(Path(path).name or given.get("trainer.resume_mode", "as it says"))
        return found


def command_of(root: Path, **changes) -> Command:
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= {"default_local_dir": str(root)}
    for name, value in changes.items():
        *path, last = name.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return Command(tuple(TRAINER), config)


def save_step(root: Path, step: int) -> Path:
    actor = root / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "weights").write_bytes(b"weights")
    (actor / MANIFEST).write_text(json.dumps({"format": 2, "files": {"weights": {"bytes": 7, "crc32": 0}}}))
    (actor.parent / "data.pt").write_bytes(b"PK\x05\x06" + bytes(18))
    return actor
