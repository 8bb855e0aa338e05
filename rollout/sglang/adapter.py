"""verl's SGLang server adapter, which sends slices where they are known to be right, and full tensors elsewhere."""

import contextlib
import os
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..layout.sync_mode import SGLANG_LOADER
from ..transport.checksums import with_checksums
from ..transport.report import TransferStats
from ..transport.watched_sockets import WeightSyncError
from .bucket import ANSWER_BYTES, Header, answer_of, fill, synchronize

__all__ = ["ADAPTER", "shared_memory"]

# As in ``transport/sender.py``: fresh pages of shared memory cost more than messages.
_SHM_BYTES = 16 << 20
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
        selected.check_plans(None)
        transfer = await self._send(selected)
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
        if get_device_name() == "cpu":
            size = min(size, _SHM_BYTES)
        tensors = with_checksums(selected.tensors()) if selected.has_checksums else selected.tensors()
        stream = fill(tensors, [shared_memory(ANSWER_BYTES + size) for _ in range(2)], shared_memory)
        idle = shared_memory(ANSWER_BYTES)
        is_done = False
        with contextlib.closing(tensors):  # which takes part in what is left of the exchange, if a worker has failed
            header, memory = next(stream)
            header.layouts, header.verify = selected.planned_layouts(), selected.has_checksums
            while True:
                is_done = is_done or header.is_last
                sent, nbytes = sent + len(header.entries), nbytes + sum(t.nbytes for _, t in header.tensors(memory))
                before = time.monotonic()
                are_all_done = await self._post(header, memory, is_done)
                waited += time.monotonic() - before
                if are_all_done:
                    break
                header, memory = (Header(), idle) if is_done else next(stream)
        gathered = time.monotonic() - started - waited
        return TransferStats(sent, nbytes, gathered, 0.0, waited)

    async def _post(self, header: Header, memory: torch.Tensor, is_done: bool) -> bool:
        """Pass a bucket of each rank of a replica to its worker; return whether all of them are done."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        synchronize(memory)
        group, workers = self.device_mesh["infer_tp"].get_group(), self.device_mesh["infer_tp"].size()
        mine = (MultiprocessingSerializer.serialize([(header.as_text(), memory)]), is_done)
        failure = ""
        everyone: list[Any] = [None] * workers
        dist.all_gather_object(everyone, mine, group)
        if self._engine is not None:
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[packed for packed, _ in everyone],
                load_format=SGLANG_LOADER,
                flush_cache=False,
            )
            try:
                await self._engine.update_weights_from_tensor(request)
            except Exception as error:  # the other ranks wait for it
                failure = f"SGLang did not take the update: {type(error).__name__}: {error}"
        failures: list[Any] = [None] * workers
        dist.all_gather_object(failures, failure, group)  # before that the workers have not answered
        answers: list[Any] = [None] * workers
        dist.all_gather_object(answers, "".join(failures) or answer_of(memory), group)
        if failed := [f"worker {i}: {text}" for i, text in enumerate(answers) if text]:
            rank = int(os.environ.get("RANK", "0"))
            raise WeightSyncError(f"weight sync failed on trainer rank {rank}: {failed[0]}")
        return all(is_done for _, is_done in everyone)


def shared_memory(nbytes: int) -> torch.Tensor:
    """Allocate memory that a worker on the same machine can read and write."""
    from verl.utils.device import get_device_id, get_device_name

    if get_device_name() == "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8).share_memory_()
    return torch.zeros(nbytes, dtype=torch.uint8, device=get_device_id())
