"""Save the shards of living ranks after a failure, without a collective (``recipes/resilient --save-on-failure``).

The main thread of a rank may wait in a collective that never ends. So a thread of each rank reads the messages of the
trainer's process, JSON files in a folder that all nodes see:

    task.json               from the trainer: an id, and either nothing else or the ranks of each role that write
    <id>-<role>-<rank>.json  from a rank: the number of updates that its state has had, or the files that it has written
"""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from .checkpoint.atomic_folder import file_facts, file_names
from .checkpoint.state import HF, RNG, SHARDS, STATE, Snapshot, random_state
from .checkpoint.stored_shards import write_shards
from .optim.loss_scale import LossScale
from .optim.multi_optimizer import MultiOptimizer
from .topology.dtensor import is_first_holder
from .topology.mesh import Topology

__all__ = ["TASK", "Watch", "write_message"]

TASK = "task.json"
_POLL_SECONDS = 1.0

logger = logging.getLogger("epfsdp2")


def write_message(folder: Path, name: str, message: Mapping[str, Any]) -> None:
    """Write a message atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.{os.getpid()}.new"
    written.write_text(json.dumps(message))
    written.replace(folder / name)


class Watch:
    """Answers the trainer's messages. The state of an update can be written until an optimizer steps again.

    Args:
        role: ``actor`` or ``critic``.
        contents: ``checkpoint.save_contents``; weights in Hugging Face's layout are left out: they need all shards.
        describe: writes config and tokenizer into a folder.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        model: nn.Module,
        optimizer: MultiOptimizer,
        lr_scheduler: Any,
        loss_scale: LossScale | None,
        contents: Iterable[str],
        topology: Topology,
        describe: Callable[[Path], None],
    ):
        self._folder, self._role, self._describe = folder, role, describe
        self._state = (model, optimizer, lr_scheduler, frozenset(contents) - {"hf_model"})
        self._loss_scale, self._replica = loss_scale, topology.world // topology.dp_replicate
        # During a forward a module has gathered parameters in place of its shards.
        self._parameters = dict(model.named_parameters())
        self._updates: int | None = None  # that the state has had; None from the optimizer's step to the update's end
        self._made = 0
        self._random: dict[str, torch.Tensor] = {}
        self._answered: str | None = None
        # The main thread's stream may wait forever.
        self._stream: Any = torch.Stream() if torch.accelerator.is_available() else contextlib.nullcontext()
        optimizer.register_step_pre_hook(self._on_step)
        self.restart()
        threading.Thread(target=self._watch, name="survivors", daemon=True).start()

    def restart(self) -> None:
        """Count updates from here: a checkpoint was loaded."""
        self._made = -1
        self.updated()

    def updated(self) -> None:
        """Note the end of an update."""
        self._made += 1
        self._random = random_state()
        self._updates = self._made

    def _on_step(self, *_: Any) -> None:
        self._updates = None

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(FileNotFoundError):
                self._answer(json.loads((self._folder / TASK).read_text()))

    def _answer(self, task: dict[str, Any]) -> None:
        rank = dist.get_rank()
        writers = task.get("writers")
        if task["id"] == self._answered or writers is not None and rank not in writers.get(self._role, ()):
            return
        self._answered = task["id"]
        answer: dict[str, Any]
        try:
            if writers is None:
                answer = {"updates": self._updates, "ranks": dist.get_world_size(), "replica": self._replica}
            else:
                answer = {"files": self._write(Path(task["folders"][self._role]), task["step"], task["updates"])}
        except Exception as error:
            logger.exception("epfsdp2: rank %d could not write its shards", rank)
            answer = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        write_message(self._folder, f"{task['id']}-{self._role}-{rank}.json", answer)

    def _write(self, folder: Path, step: int, updates: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Write this rank's shards, and on the first rank of a replica the files that a checkpoint has once.

        Returns size and checksum of each file by its name in ``folder``, into which other ranks write meanwhile.

        Raises:
            RuntimeError: the state is no longer the one of these updates.
        """
        model, optimizer, schedule, contents = self._state
        state = (model, optimizer, schedule, contents, step, self._loss_scale)
        now = Snapshot.of(*state, parameters=self._parameters)
        with self._stream:
            snapshot = replace(now, random=self._random if now.random else {}).on_host()
        if self._updates != updates[self._role]:
            raise RuntimeError("a further update has begun")
        rank = dist.get_rank()
        position = rank % self._replica  # ranks at one position hold the same shards
        own = folder / f"rank-{rank}"
        for name in (SHARDS, RNG, HF):
            (own / name).mkdir(parents=True)
        tensors = {name: tensor for name, tensor in snapshot.tensors.items() if is_first_holder(tensor, position)}
        write_shards(own / SHARDS, tensors, rank + 1, dist.get_world_size())
        if snapshot.random:
            save_file(snapshot.random, own / RNG / f"{rank:05d}.safetensors")
        if position == 0:
            (own / STATE).write_text(json.dumps(snapshot.facts))
            self._describe(own / HF)
        files = {name: file_facts(own / name, sync=True) for name in file_names(own)}
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).replace(folder / name)
        shutil.rmtree(own)
        return files
