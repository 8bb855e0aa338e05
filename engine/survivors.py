"""Save the shards of living ranks after a failure, without a collective (``recipes/resilient --save-on-failure``).

The main thread of a rank may wait in a collective that never ends. So a thread of each rank reads the messages of the
trainer's process, JSON files in a folder that all nodes see:

    task.json  from the trainer: an id, the step, the number of updates of each role, the folder
    <id>-<role>-<position>-<ranks>.claim  from the first rank at this position of a replica that has the state
    <id>-<role>-<position>-<ranks>.json  from the same rank, later: the files that it has written, or its error
"""

import contextlib
import json
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

from .checkpoint.atomic_folder import file_facts, file_names, partial_dir
from .checkpoint.state import RNG, Snapshot, random_state
from .checkpoint.stored_shards import HF, SHARDS, STATE, write_shards
from .optim.loss_scale import LossScale
from .optim.multi_optimizer import MultiOptimizer
from .topology.dtensor import is_first_holder
from .topology.mesh import Topology

__all__ = ["TASK", "Watch", "write_message"]

TASK = "task.json"
_POLL_SECONDS = 1.0


def write_message(folder: Path, name: str, message: Mapping[str, Any]) -> None:
    """Write a message atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.{os.getpid()}.new"
    written.write_text(json.dumps(message))
    written.replace(folder / name)


class Watch:
    """Answers the messages in ``folder``. The state of an update can be written until an optimizer steps again.

    ``hf_model`` in ``contents`` is skipped, because it needs all shards. ``describe`` writes config and tokenizer.
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
        # The main thread's stream may wait forever.
        self._stream: Any = torch.Stream() if torch.accelerator.is_available() else contextlib.nullcontext()
        optimizer.register_step_pre_hook(self._begin_update)
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

    def _begin_update(self, *_: Any) -> None:
        self._updates = None

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(FileNotFoundError):
                self._answer(json.loads((self._folder / TASK).read_text()))

    def _answer(self, task: dict[str, Any]) -> None:
        rank, updates = dist.get_rank(), task["updates"].get(self._role, -1)
        name = f"{task['id']}-{self._role}-{rank % self._replica}-{self._replica}"
        if self._updates != updates:
            return
        try:
            (self._folder / f"{name}.claim").touch(exist_ok=False)
        except FileExistsError:
            return
        folder, answer = partial_dir(Path(task["folder"]) / self._role), dict[str, Any]()
        try:
            answer["files"] = self._write(folder, rank, task["step"], updates)
        except Exception as error:
            answer["error"] = f"rank {rank}: {type(error).__name__}: {error}"
        write_message(self._folder, f"{name}.json", answer)

    def _write(self, folder: Path, rank: int, step: int, updates: int) -> dict[str, dict[str, int]]:
        """Write this rank's shards, at the first position also what a checkpoint has once; return the files' facts."""
        now = Snapshot.of(*self._state, step, self._loss_scale, parameters=self._parameters)
        with self._stream:
            snapshot = replace(now, random=self._random if now.random else {}).on_host()
        if self._updates != updates:
            raise RuntimeError("a further update has begun")
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
