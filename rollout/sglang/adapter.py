"""verl's SGLang server adapter, which sends slices where they are known to be right, and full tensors elsewhere."""

import asyncio
import contextlib
import os
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..layout.rollout_config import SGLANG_LOADER
from ..transport.checksums import with_checksums
from ..transport.report import TransferStats
from ..transport.watched_sockets import WeightSyncError
from .bucket import ANSWER_BYTES, Header, answer_of, fill, synchronize

__all__ = ["ADAPTER", "shared_memory"]

# On a CPU, where memory that a worker maps costs more than messages.
_SHM_BYTES = 32 << 20
ADAPTER = f"{__name__}.SlicingServerAdapter"  # as verl's registry names it


def __getattr__(name: str) -> Any:
    # Made on first use: verl's adapter imports SGLang, which a process of another rollout may lack.
    if name != "SlicingServerAdapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _adapter_class()


@cache
def _adapter_class() -> type:
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    from . import cpu_shim

    cpu_shim.install()
    return type("SlicingServerAdapter", (SlicedUpdates, ServerAdapter), {"__module__": __name__})


class SlicedUpdates:
    """Mix-in for verl's ``ServerAdapter``: each tensor-parallel worker is sent what it keeps, by the rank beside it."""

    # Provided by verl's class.
    config: Any
    device_mesh: Any
    rollout_rank: int
    server_actor: Any
    _engine: Any
    _init_server_adapter: Any

    _checked_mode = ""  # of the last sync, whose layout the workers have compared
    _buffers: "list[torch.Tensor] | None" = None

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send ``weights`` to SGLang's workers. Arguments as in verl's method.

        Raises:
            WeightSyncError: a worker could not load them; on all ranks of the replica, with its rank and the cause.
        """
        selected = weights.for_rollout(self.config, self.rollout_rank) if hasattr(weights, "for_rollout") else None
        if selected is None or selected.mode == "full" or wire_format != "named_tensors":
            stock = super().update_weights  # type: ignore[misc]
            return await stock(weights, global_steps, wire_format=wire_format, **kwargs)
        await self._init_server_adapter()
        if selected.mode != self._checked_mode:
            selected.check_plans(None)
        transfer = await self._send(selected)
        self._checked_mode = selected.mode
        report = selected.report(transfer)
        if dist.get_rank() == 0:
            print(f"[epfsdp2] {report}", flush=True)
        if self._engine is not None:
            await self._engine.flush_cache()
            if global_steps is not None:
                await self.server_actor.set_global_steps.remote(global_steps)

    async def _send(self, selected: Any) -> TransferStats:
        from verl.utils.device import get_device_name

        started = time.monotonic()
        waited, sent, nbytes = 0.0, 0, 0
        size = (int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20) // 2
        is_on_cpu = get_device_name() == "cpu"
        if is_on_cpu:
            size = min(size, _SHM_BYTES)
        tensors = with_checksums(selected.tensors()) if selected.has_checksums else selected.tensors()
        buffers = self._buffers or [shared_memory(ANSWER_BYTES + size) for _ in range(2)]
        self._buffers = buffers if is_on_cpu else None
        stream = fill(tensors, buffers, shared_memory)
        idle = shared_memory(ANSWER_BYTES)
        is_done = False
        with contextlib.closing(tensors):  # which takes part in what is left of the exchange, if a worker has failed
            header, memory = next(stream)
            header.verify = selected.has_checksums
            if selected.mode != self._checked_mode:
                header.layouts = selected.planned_layouts()
            while True:
                is_done = is_done or header.is_last
                sent, nbytes = sent + len(header.entries), nbytes + sum(t.nbytes for _, t in header.tensors(memory))
                request, are_all_done = self._post(header, memory, is_done)
                following = (Header(), idle) if is_done else next(stream)  # while the worker loads this one
                before = time.monotonic()
                await self._finish(request, memory)
                waited += time.monotonic() - before
                if are_all_done:
                    break
                header, memory = following
        gathered = time.monotonic() - started - waited
        return TransferStats(sent, nbytes, gathered, 0.0, waited)

    def _post(self, header: Header, memory: torch.Tensor, is_done: bool) -> tuple["asyncio.Future[Any] | None", bool]:
        """Pass a bucket of each rank of a replica to its worker.

        Returns:
            SGLang's answer, on the rank that asks it, and whether all workers have everything after it.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        synchronize(memory)
        mine = (MultiprocessingSerializer.serialize([(header.as_text(), memory)]), is_done)
        everyone = self._of_replica(mine)
        request = None
        if self._engine is not None:
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[packed for packed, _ in everyone],
                load_format=SGLANG_LOADER,
                flush_cache=False,
            )
            # In a thread, since this one goes on with the next bucket; verl opens a session for each request.
            answer = self._engine.update_weights_from_tensor(update)
            request = asyncio.get_running_loop().run_in_executor(None, asyncio.run, answer)
        return request, all(is_done for _, is_done in everyone)

    async def _finish(self, request: "asyncio.Future[Any] | None", memory: torch.Tensor) -> None:
        """Wait until the workers have loaded their buckets.

        Raises:
            WeightSyncError: on all ranks of the replica.
        """
        failure = ""
        if request is not None:
            try:
                await request
            except Exception as error:  # the other ranks wait for it
                failure = f"SGLang did not take the update: {type(error).__name__}: {error}"
        failures = self._of_replica(failure)  # before that the workers have not answered
        answers = self._of_replica("".join(failures) or answer_of(memory))
        if failed := [f"worker {i}: {text}" for i, text in enumerate(answers) if text]:
            rank = int(os.environ.get("RANK", "0"))
            raise WeightSyncError(f"weight sync failed on trainer rank {rank}: {failed[0]}")

    def _of_replica(self, mine: Any) -> list[Any]:
        """Gather a value from each rank of a replica."""
        everyone: list[Any] = [None] * self.device_mesh["infer_tp"].size()
        dist.all_gather_object(everyone, mine, self.device_mesh["infer_tp"].get_group())
        return everyone


def shared_memory(nbytes: int) -> torch.Tensor:
    """Allocate memory that a worker on the same machine can read and write."""
    from verl.utils.device import get_device_id, get_device_name

    if get_device_name() == "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8).share_memory_()
    return torch.zeros(nbytes, dtype=torch.uint8, device=get_device_id())
