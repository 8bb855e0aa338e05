"""The thread by which a rank can be asked for its state whatever its main thread waits for."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.state import Snapshot, random_state
from ..optim.loss_scale import LossScale
from ..optim.multi_optimizer import MultiOptimizer
from ..topology.mesh import Topology
from .messages import ASK, POLL_SECONDS, WRITE, answer_name, read, tell
from .rank_shards import write_rank

__all__ = ["Watch"]

logger = logging.getLogger("epfsdp2")


class Watch:
    """Answers what the trainer asks after a failure, and writes this rank's state if it is told to (``messages.py``).

    The state is that of the end of an update of all mini-batches, and can be written until an optimizer steps again.

    Args:
        folder: of the messages.
        role: ``actor`` or ``critic``.
        contents: what a checkpoint is to have.
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
        self._loss_scale, self._topology = loss_scale, topology
        # A module in a forward has gathered parameters in the place of its own.
        self._parameters = dict(model.named_parameters())
        self._updates: int | None = None  # that the state has; None while an optimizer steps, and until the next ends
        self._made = 0
        self._random: dict[str, torch.Tensor] = {}
        self._asked: str | None = None
        self._written: str | None = None
        # The main thread's may wait without end.
        self._stream: Any = torch.Stream() if torch.accelerator.is_available() else contextlib.nullcontext()
        optimizer.register_step_pre_hook(self._steps)
        self.restart()
        threading.Thread(target=self._look, name="survivors", daemon=True).start()

    def restart(self) -> None:
        """Count updates from here: a checkpoint was loaded."""
        self._made = -1
        self.updated()

    def updated(self) -> None:
        """Note that an update has ended."""
        self._made += 1
        self._random = random_state()
        self._updates = self._made

    def _steps(self, *_: Any) -> None:
        self._updates = None

    def _look(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            try:
                self._answer()
            except Exception:
                logger.exception("epfsdp2: rank %d could not answer what it was asked after a failure", dist.get_rank())

    def _answer(self) -> None:
        ask, rank = read(self._folder, ASK), dist.get_rank()
        if ask is None:
            return
        if self._asked != ask["id"]:
            self._asked = ask["id"]
            replica = self._topology.world // self._topology.dp_replicate
            said = {"updates": self._updates, "ranks": dist.get_world_size(), "replica": replica}
            tell(self._folder, answer_name(ask["id"], self._role, rank), said)
        task = read(self._folder, WRITE)
        if task is None or task["id"] != ask["id"] or self._written == ask["id"]:
            return
        if rank in task["writers"].get(self._role, ()):
            self._written = ask["id"]
            tell(self._folder, answer_name(ask["id"], self._role, rank, has_written=True), self._write(task))

    def _write(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return the files that were written, or the error."""
        rank, updates = dist.get_rank(), task["updates"][self._role]
        position = rank % (self._topology.world // self._topology.dp_replicate)
        try:
            model, optimizer, schedule, contents = self._state
            now = Snapshot.of(
                model, optimizer, schedule, contents, task["step"], self._loss_scale, parameters=self._parameters
            )
            taken = replace(now, random=self._random if now.random else {})
            with self._stream:
                copied = taken.on_host()
            if self._updates != updates:
                return {"error": f"rank {rank} has begun a further update"}
            return {"files": write_rank(copied, Path(task["folders"][self._role]), rank, position, self._describe)}
        except Exception as error:
            logger.exception("epfsdp2: rank %d could not write its shards", rank)
            return {"error": f"rank {rank}: {type(error).__name__}: {error}"}
