"""verl's vLLM server adapter, which sends a trainer rank's weights to its vLLM worker, with bounded waits.

In verl 0.9.1 a killed worker hangs the run. This one raises the cause as soon as the receiving call has failed, or
after a time-out.
"""

import contextlib
import inspect
import os
import time
from collections.abc import AsyncIterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
import zmq

from ..transport.checksums import with_checksums
from ..transport.report import TransferStats
from ..transport.sender import sender_class
from ..transport.watched_sockets import WatchedContext, WeightSyncError, await_result
from .server import has_our_extension

__all__ = ["Updates", "WeightSyncError", "send_weights"]


def __getattr__(name: str) -> Any:
    # Made on first use: verl's adapter imports Ray and vLLM, which a process that trains without a rollout may lack.
    if name != "Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    return globals().setdefault(name, type(name, (Updates, ServerAdapter), {"__module__": __name__}))


class Updates:
    """Mix-in for verl's ``ServerAdapter`` (``self``) that replaces how named tensors are sent."""

    timeout_seconds = 300.0  # see ``Server.install``
    _checked_mode = ""  # of the last sync, whose layout the workers have compared

    async def update_weights(
        self: Any, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs
    ) -> None:
        """Send ``weights`` to this rank's vLLM worker, as verl's method does; raises as ``send_weights``."""
        if wire_format != "named_tensors":
            return await super().update_weights(weights, global_steps, wire_format=wire_format, **kwargs)  # type: ignore[misc]

        # Stages load one after the other (model, then adapters). Weights of verl's other engines have none.
        ours = hasattr(weights, "stages")
        for stage, arguments in weights.stages(self.config, self.rollout_rank) if ours else [(None, {})]:
            await self._update(stage, weights, {**kwargs, **arguments})
        if self._has_server:
            # Cached keys and values are of the old weights.
            failed = "vLLM's server did not answer after the update"
            server, limit = self.server_handle, self.timeout_seconds
            await await_result(server.clear_kv_cache.remote(), limit, failed)
            if global_steps is not None:
                await await_result(server.set_global_steps.remote(global_steps), limit, failed)

    async def _update(self: Any, selected: Any, weights: Any, kwargs: dict[str, Any]) -> None:
        """Send one stage, while the worker receives and loads it."""
        kwargs["use_shm"] = self.use_shm
        rank = int(os.environ.get("RANK", str(self.rollout_rank)))
        is_ours = has_our_extension(self.config)  # verl's extension has neither of these arguments
        if is_ours:
            kwargs["sync_timeout_seconds"] = self.timeout_seconds
        if selected is not None:
            await self._check_layout(selected)
            weights = selected.tensors()
            if is_ours and selected.has_checksums:
                kwargs["verify"] = True
                weights = with_checksums(weights)
            if selected.is_quantised_here:
                kwargs["is_quantised"] = True
        future = await self._execute_method("update_weights_from_ipc", non_block=True, kwargs=kwargs)
        transfer = await send_weights(
            weights,
            zmq_handle=self.zmq_handle,
            bucket_megabytes=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            timeout_seconds=self.timeout_seconds,
            rank=rank,
            future=future,
        )
        report = None if selected is None else selected.report(transfer)
        if report is not None and rank == 0:
            print(f"[epfsdp2] {report}", flush=True)

    async def _check_layout(self: Any, weights: Any) -> None:
        """Compare the planned layout with that of vLLM's workers before the first sync; collective.

        verl builds the rollout before its server, so no earlier call can reach the workers. A difference raises
        ``WeightSyncError`` on all ranks, or changes the mode of weights that are on trial.
        """
        if weights.mode in ("adapters", "full") or (weights.mode == self._checked_mode and not weights.is_on_trial):
            return
        failure: Exception | None = None
        try:
            layouts = {"layouts": weights.planned_layouts()}
            future = await self._execute_method("epfsdp2_check_layout", non_block=True, kwargs=layouts)
            if future is not None:
                failed = "vLLM did not compare its layout with the trainer's plan"
                await await_result(future, self.timeout_seconds, failed)
        except Exception as error:
            failure = WeightSyncError(_describe(error))
        weights.check_plans(failure)
        self._checked_mode = weights.mode


async def send_weights(
    weights: Any,
    *,
    zmq_handle: str,
    bucket_megabytes: int,
    use_shm: bool,
    timeout_seconds: float,
    rank: int,
    future: Any = None,
) -> TransferStats:
    """Send weights through verl's bucketed transport and wait until the receiving call has ended.

    In any case the weights are closed and the socket file and the shared-memory segment are removed. Raises
    ``WeightSyncError`` with the rank, its progress and the cause if the worker raised, died or stopped answering.

    Args:
        weights: named tensors, of a synchronous or asynchronous iterator.
        use_shm: whether the bucket is shared memory; otherwise CUDA IPC.
        future: Ray's reference of the receiving remote call; None on ranks that did not make the call.
    """
    started, progress = time.monotonic(), _Progress()

    def check() -> None:
        if (cause := _failure_of_call(future)) is not None:
            raise cause

    waits_for = f"the vLLM worker behind {zmq_handle}"
    context = WatchedContext(zmq.Context.instance(), timeout_seconds, waits_for, check)
    sender = sender_class()(zmq_handle, bucket_size_mb=bucket_megabytes, use_shm=use_shm)
    sender.zmq_context = context
    try:
        await sender.async_send_weights(progress.of(weights))
        sent = time.monotonic()
        if future is not None:
            await await_result(future, timeout_seconds, "vLLM received every tensor but did not finish the update")
        gather, waited = progress.gather_seconds, context.waited_seconds
        wire, load = sent - started - gather - waited, waited + time.monotonic() - sent
        return TransferStats(progress.sent, progress.nbytes, gather, wire, load)
    except Exception as error:
        if progress.failed_in_source:
            raise  # an error of the trainer, not of the transfer
        cause = _failure_of_call(future) or error
        raise WeightSyncError(
            f"weight sync failed on trainer rank {rank} after {progress.sent} tensors "
            f"(last: {progress.last or 'none'}): {_describe(cause)}"
        ) from cause
    finally:
        await _close(weights)
        _release(zmq_handle, context.shared_memory_name)


class _Progress:
    """Counts the sent weights, times the gathers and records whether the source raised."""

    sent = nbytes = 0
    gather_seconds, last, failed_in_source = 0.0, "", False

    async def of(self, weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
        from verl.workers.rollout.utils import ensure_async_iterator

        started = time.monotonic()
        try:
            async for self.last, tensor in ensure_async_iterator(weights):
                self.gather_seconds += time.monotonic() - started
                yield self.last, tensor
                self.sent, self.nbytes = self.sent + 1, self.nbytes + tensor.nbytes
                started = time.monotonic()
            self.gather_seconds += time.monotonic() - started
        except Exception:
            self.failed_in_source = True
            raise


def _failure_of_call(reference: Any) -> BaseException | None:
    """Return the exception with which a remote call has ended; None if it has not, without waiting."""
    if reference is None:
        return None
    import ray

    try:
        if ray.wait([reference], timeout=0)[0]:
            ray.get(reference, timeout=0)
    except Exception as error:  # any exception of the remote call is the answer
        return error
    return None


def _describe(cause: BaseException) -> str:
    """Format a cause without Ray's wrapper and remote traceback, which the chained exception still shows."""
    cause = getattr(cause, "cause", None) or cause
    if isinstance(cause, WeightSyncError):
        return str(cause)
    # vLLM cancels the calls of an engine whose worker has died, without naming a cause.
    gone = " (the vLLM worker process died or was killed)" if "cancelled" in str(cause) else ""
    return f"{type(cause).__name__}: {cause}{gone}"


async def _close(weights: Any) -> None:
    # verl drops the generator without closing it, which would leave the remaining collectives unstarted.
    if inspect.isgenerator(weights) and inspect.getgeneratorstate(weights) == inspect.GEN_CREATED:
        next(weights, None)  # one that has not begun does nothing when it is closed
    if hasattr(weights, "aclose"):
        await weights.aclose()
    elif hasattr(weights, "close"):
        weights.close()


def _release(zmq_handle: str, shared_memory_name: str | None) -> None:
    """Remove the socket file, and the segment that verl's sender leaks if its first message is never answered."""
    Path(zmq_handle.removeprefix("ipc://")).unlink(missing_ok=True)
    if shared_memory_name is not None:
        with contextlib.suppress(FileNotFoundError):
            segment = shared_memory.SharedMemory(name=shared_memory_name)
            segment.close()
            segment.unlink()
