"""Runs under ``recipes/resilient`` whose attempts save and fail on demand, and folders of steps."""

import copy
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.recipes.resilient import cli
from epfsdp2.recipes.resilient.command import NOTICE, Command

__all__ = ["CONFIG", "TRAINER", "Tree", "command_of", "run_of", "save_step"]

TRAINER = [sys.executable, "-m", "verl.trainer.main_ppo", "engine=epfsdp2"]
CONFIG = {
    "engine": {"_target_": "epfsdp2.engine.config.engine_config", "ep_size": 4, "model_dtype": "fp32"},
    "trainer": {
        **{"nnodes": 1, "n_gpus_per_node": 2, "save_freq": 2, "total_training_steps": 8, "resume_mode": "auto"},
        **{"resume_from_path": None, "device": "cuda", "checkpoint_callback_class": None},
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


def command_of(root: Path, **changes) -> Command:
    """A command whose settings are ``CONFIG`` with changes such as ``trainer__nnodes=2``."""
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
    """Write a complete checkpoint; return the actor's folder."""
    actor = root / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "weights").write_bytes(b"weights")
    facts = {"bytes": 7, "crc32": zlib.crc32(b"weights")}
    (actor / MANIFEST).write_text(json.dumps({"format": 2, "files": {"weights": facts}}))
    (actor.parent / "data.pt").write_bytes(b"PK\x05\x06" + bytes(18))  # an empty zip
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return actor


class Tree:
    """In place of ``ProcessTree``: attempts of eight steps that save every second one, and end as their fates say.

    Args:
        fates: ``step`` and ``cause`` of a failure, or a function ``at_step`` that is called at each step; then an
            attempt has no end.
    """

    def __init__(self, root: Path, *fates: dict):
        self.root, self.folder, self.fates, self.attempts = root, root / "tree", list(fates), []

    def run(self, words: list[str], env: dict[str, str], log: Path, tick: Callable[[], None]) -> int:
        self.attempts.append(words[len(TRAINER) :])
        fate = self.fates.pop(0) if self.fates else {}
        begun = int(self.resumed()[-1].rpartition("_")[2]) if "global_step" in self.resumed()[-1] else 0
        with log.open("w") as output:
            for step in range(begun + 1, 1000 if "at_step" in fate else 9):
                if step == fate.get("step"):
                    print(f"Traceback\nRuntimeError: {fate['cause']} at 0x{len(self.attempts)}f", file=output)
                    return 1
                notice = (self.root / NOTICE).exists() and not fate.get("is_deaf")
                if notice or step % 2 == 0 and "at_step" not in fate:
                    save_step(self.root, step)
                print(f"(TaskRunner pid=1) step:{step} - reward:1.0", file=output, flush=True)
                fate.get("at_step", lambda step: None)(step)
                tick()
        return 0

    def resumed(self) -> list[str]:
        """The start of each attempt: a folder's name, or the mode."""
        settings = [dict(word.split("=", 1) for word in words if "=" in word) for words in self.attempts]
        paths = [Path(given.get("trainer.resume_from_path", "").strip('"')).name for given in settings]
        modes = [given.get("trainer.resume_mode", "as it says") for given in settings]
        return [path or mode for path, mode in zip(paths, modes, strict=True)]


def run_of(root: Path, *fates: dict, options: tuple[str, ...] = (), **changes) -> tuple[cli.Run, Tree]:
    tree = Tree(root, *fates)
    given = cli.parse(["--backoff-seconds", "0.01", *options, "--", *TRAINER])
    return cli.Run(given, command_of(root, **changes), tree), tree
