"""verl's SGLang server adapter: send slices for known layouts, full tensors otherwise."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name

from ..transport.buckets import tensors_of
from ..transport.checksums import with_checksums
from ..transport.report import TransferStats
from ..transport.watched_sockets import WeightSyncError, await_result, taking_part, wait_for_work
from .bucket import ANSWER_BYTES, Header, answer_of, fill, synchronize
from .server import SGLANG_LOADER

__all__ = ["Updates", "shared_memory"]

# Most bytes of a bucket on a CPU, where mapped memory costs a worker more than additional messages.
_SHM_BYTES = 32 << 20
# The longest wait for the end of a session whose update has failed.
_END_SECONDS = 10.0


def __getattr__(name: str) -> Any:
    # Create the class on first use: verl's adapter imports SGLang, which may be absent with another rollout.
    if name != "Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    from . import shims

    shims.send_from_cpu()
    Updates._verl_has_sessions = not shims.add_sessions()
    return globals().setdefault(name, type(name, (Updates, ServerAdapter), {"__module__": __name__}))


class Updates:
    """Mix-in for verl's ``ServerAdapter``: each rank sends its own tensor-parallel worker the slices it keeps."""

    timeout_seconds = 300.0  # see ``Server.install``
    _verl_has_sessions = False  # whether verl's own update opens SGLang's session
    _checked_mode = ""  # mode of the last sync; workers have compared their layout with its plan
    _taken, _taken_at = 0, 0.0  # tensors that verl's own update consumed in this sync, and the time of the last

    async def update_weights(
        self: Any, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send ``weights`` to SGLang's workers, as verl's method does.

        If a worker or rank fails or is late, all ranks of the replica raise ``WeightSyncError`` with rank and cause.
        """
        selected = weights.for_rollout(self.config, self.rollout_rank) if hasattr(weights, "for_rollout") else None
        stock = super().update_weights  # type: ignore[misc]
        if selected is None or wire_format != "named_tensors":
            async with self._stock_session(**kwargs) as begun:
                if refused := await self._failure_of(begun):
                    raise WeightSyncError(refused)
                return await stock(weights, global_steps, wire_format=wire_format, **kwargs)
        if selected.is_on_trial:
            selected.check_plans(await self._other_layout(selected))  # which may choose full tensors
            self._checked_mode = selected.mode
        if selected.mode == "full":
            async with self._stock_session(**kwargs) as begun:
                with contextlib.closing(self._agreed(weights, await self._failure_of(begun))) as tensors:
                    return await self._within_time(stock(tensors, global_steps, wire_format=wire_format, **kwargs))
        if selected.mode != self._checked_mode:
            failure: Exception | None = None
            try:
                await self._answered(self._init_server_adapter(), "SGLang's server did not say where it is")
            except Exception as error:  # check_plans raises it on all ranks; raising here would hang the others
                failure = error
            selected.check_plans(failure)
        async with self._session() as begun:
            transfer = await self._send(selected, begun)
        self._checked_mode = selected.mode
        report = selected.report(transfer)
        if dist.get_rank() == 0:
            print(f"[epfsdp2] {report}", flush=True)
        if self._engine is not None:
            failed = "SGLang's server did not answer after the update"
            await self._answered(self._engine.flush_cache(), failed)
            if global_steps is not None:
                await self._answered(self.server_actor.set_global_steps.remote(global_steps), failed)

    async def _other_layout(self: Any, selected: Any) -> Exception | None:
        """Return how the layout of the replica's workers differs from the plan, from a bucket without tensors."""
        failure: Exception | None = None
        try:
            await self._answered(self._init_server_adapter(), "SGLang's server did not say where it is")
            header, memory = Header(layouts=selected.planned_layouts()), shared_memory(ANSWER_BYTES)
            bucket = self._packed(header, memory)
        except Exception as error:
            failure = error
        try:
            self._agree("", failure)
            async with self._session() as begun:
                await self._finish(begun, None, None)
                await self._finish(self._post(self._of_replica(bucket)), memory, None)
        except WeightSyncError as error:
            failure = error
        return failure

    async def _answered(self, call: Any, failed: str, seconds: float | None = None) -> None:
        await await_result(call, self.timeout_seconds if seconds is None else seconds, failed)

    @contextlib.asynccontextmanager
    async def _session(self) -> "AsyncIterator[asyncio.Future[Any] | None]":
        """Begin SGLang's session of an update and yield the future of its answer; end the session after the block.

        After a failure it ends too, so that the next update can begin one. None on ranks without the server, and with
        an SGLang without sessions.
        """
        yielded = self._request("begin_weight_update")
        try:
            yield yielded
        except BaseException:
            await self._failure_of(self._request("end_weight_update", seconds=min(_END_SECONDS, self.timeout_seconds)))
            raise
        if failed := await self._failure_of(self._request("end_weight_update")):
            raise WeightSyncError(failed)

    @contextlib.asynccontextmanager
    async def _stock_session(
        self: Any, peft_config: Any = None, base_sync_done: bool = False, **kwargs: Any
    ) -> "AsyncIterator[asyncio.Future[Any] | None]":
        """Return a session for an update by verl, unless verl opens one itself or sends adapters alone."""
        await self._init_server_adapter()
        if self._verl_has_sessions or (peft_config and base_sync_done):
            yield None
            return
        async with self._session() as begun:
            yield begun

    async def _send(self, selected: Any, begun: "asyncio.Future[Any] | None") -> TransferStats:
        """Send a worker's slices, once the session's request ``begun`` has been answered."""
        started = time.monotonic()
        waited, sent, nbytes = 0.0, 0, 0
        tensors = with_checksums(selected.tensors()) if selected.has_checksums else selected.tensors()
        stream = self._buckets(selected, tensors)
        is_done = are_all_done = False
        request, memory = begun, None
        with taking_part(tensors):
            while True:
                failure: Exception | None = None
                try:
                    header, following, packed = next(stream)  # the worker loads the previous bucket meanwhile
                except Exception as error:  # _finish raises it on all ranks; raising here would hang the others
                    failure = error
                before = time.monotonic()
                await self._finish(request, memory, failure)
                waited += time.monotonic() - before
                if are_all_done:
                    return TransferStats(sent, nbytes, time.monotonic() - started - waited, 0.0, waited)
                memory, is_done = following, is_done or header.is_last
                found = [tensor for _, tensor in tensors_of(header.entries, memory)]
                sent, nbytes = sent + len(found), nbytes + sum(tensor.nbytes for tensor in found)
                everyone = self._of_replica((packed, is_done))
                are_all_done = all(is_done for _, is_done in everyone)
                request = self._post([packed for packed, _ in everyone])

    def _buckets(
        self: Any, selected: Any, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[Header, torch.Tensor, Any]]:
        """Yield the header, memory and serialized form of each bucket; then empty buckets without end."""
        size = (int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20) // 2
        size = min(size, _SHM_BYTES) if get_device_name() == "cpu" else size
        buffers = [shared_memory(ANSWER_BYTES + size) for _ in range(2)]
        idle = (Header(), shared_memory(ANSWER_BYTES))
        for header, memory in itertools.chain(fill(tensors, buffers, shared_memory), itertools.repeat(idle)):
            if header.is_first:
                header.verify = selected.has_checksums
                if selected.mode != self._checked_mode:
                    header.layouts = selected.planned_layouts()
            yield header, memory, self._packed(header, memory)

    def _packed(self, header: Header, memory: torch.Tensor) -> Any:
        """Return a bucket as SGLang's server takes it."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        synchronize(memory)
        return MultiprocessingSerializer.serialize([(header.as_text(), memory)])

    def _post(self, packed: list[Any]) -> "asyncio.Future[Any] | None":
        """Send each worker its bucket; return ``_request``'s future of SGLang's answer."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=packed, load_format=SGLANG_LOADER, flush_cache=False
        )
        return self._request("update_weights_from_tensor", update)

    def _request(self: Any, call: str, *arguments: Any, seconds: float | None = None) -> "asyncio.Future[Any] | None":
        """Return a future of a call of SGLang's server; None on ranks without it, and where it has no such call."""
        if self._engine is None or not hasattr(self._engine, call):
            return None
        # Run the request in a thread while this one fills the next bucket; verl opens a connection per request.
        answer = self._answered(getattr(self._engine, call)(*arguments), "it did not answer", seconds)
        return asyncio.get_running_loop().run_in_executor(None, asyncio.run, answer)

    async def _failure_of(self, request: "asyncio.Future[Any] | None") -> str:
        """Wait for a request's answer; return the text of its failure, empty on success."""
        try:
            if request is not None:
                await request
        except Exception as error:
            return f"SGLang did not take the update: {type(error).__name__}: {error}"
        return ""

    async def _finish(
        self, request: "asyncio.Future[Any] | None", memory: torch.Tensor | None, failure: Exception | None
    ) -> None:
        """Wait until the workers have loaded their buckets; raise on all ranks if a worker or a rank has failed.

        ``memory`` is this worker's bucket. ``failure`` is this rank's error while filling the next one.
        """
        # A barrier too: answers are complete only after the request.
        self._agree(await self._failure_of(request), failure)
        if memory is not None:
            self._agree(answer_of(memory))

    def _agreed(
        self: Any, weights: Iterable[tuple[str, torch.Tensor]], refused: str
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield full tensors in batches that all ranks of the replica have produced.

        If this rank's server ``refused`` the session, all ranks raise its text.
        verl's own update gathers a bucket from every rank, so a rank that failed alone would hang the others.
        """
        size = (int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20) // 4
        with contextlib.closing(iter(weights)) as tensors:  # type: ignore[type-var]
            while True:
                failure: Exception | None = None
                some, nbytes = list[tuple[str, torch.Tensor]](), 0
                try:
                    while nbytes < size and (each := next(tensors, None)):
                        some.append(each)
                        nbytes += each[1].nbytes
                except Exception as error:
                    failure = error
                self._agree(refused, failure)
                if not some:
                    return
                for each in some:
                    self._taken, self._taken_at = self._taken + 1, time.monotonic()
                    yield each

    async def _within_time(self, call: Any) -> None:
        """Await verl's own update; cancel it and raise if it consumes no tensor within the time-out."""
        update = asyncio.ensure_future(call)
        self._taken, self._taken_at = 0, time.monotonic()
        while not update.done():
            left = self._taken_at + self.timeout_seconds - time.monotonic()
            if left <= 0:
                update.cancel()
                raise WeightSyncError(
                    f"SGLang did not take the update within {self.timeout_seconds:g} s, after {self._taken} tensors"
                )
            await asyncio.wait({update}, timeout=left)
        await update

    def _agree(self, text: str, failure: Exception | None = None) -> None:
        """Raise on all ranks of the replica if any worker (``text``) or rank (``failure``) has failed."""
        if failure is not None:
            text = f"its trainer rank failed: {type(failure).__name__}: {failure}"
        if failed := [f"worker {i}: {text}" for i, text in enumerate(self._of_replica(text)) if text]:
            rank = int(os.environ.get("RANK", "0"))
            raise WeightSyncError(f"weight sync failed on trainer rank {rank}: {failed[0]}") from failure

    def _of_replica(self: Any, mine: Any) -> list[Any]:
        """Gather a value from each rank of the replica; raise if a rank does not join within twice the time-out."""
        mesh = self.device_mesh["infer_tp"]
        everyone: list[Any] = [None] * mesh.size()
        ready = dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=mesh.get_group(), async_op=True)
        assert ready is not None
        wait_for_work(ready, 2 * self.timeout_seconds)
        dist.all_gather_object(everyone, mine, mesh.get_group())
        return everyone


def shared_memory(nbytes: int) -> torch.Tensor:
    """Allocate ``nbytes`` that a worker on the same machine can map."""
    if get_device_name() == "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8).share_memory_()
    return torch.zeros(nbytes, dtype=torch.uint8, device=get_device_id())
