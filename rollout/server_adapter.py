"""The trainer's side of the weight road: verl's vLLM server adapter, with an end to every wait.

Stock verl blocks in ``BucketedWeightSender`` until the vLLM worker answers; a worker that was killed never does, and
the run hangs (seen with verl 0.9.1). The adapter here sends the same way and stops as soon as the remote call that
receives has failed, or after a time-out, with the cause.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import cache
from multiprocessing import shared_memory
from typing import Any

import torch
import zmq

from .layout.stream_choice import has_our_extension
from .sync import WorkerStream
from .transport.checksums import with_checksums
from .transport.exchange import Landing
from .transport.report import Handover
from .transport.sender import is_stock, new_sender
from .transport.watched_sockets import WatchedContext, WeightSyncError

__all__ = ["WeightSyncError", "install"]

_ADAPTER = "WatchedServerAdapter"

Weights = Iterable[tuple[str, torch.Tensor]]
# Or what makes them, which is told where they may arrive, so that they need not be copied.
Source = Weights | Callable[[Landing | None], Weights]

_timeout_seconds = 300.0


def install(timeout_seconds: float) -> None:
    """Make verl build the watched adapter in this process. Call it before verl builds the rollout.

    Args:
        timeout_seconds: longest wait for one answer during a weight sync, on both sides.
    """
    from verl.workers.rollout import base

    global _timeout_seconds
    _timeout_seconds = timeout_seconds
    base._ROLLOUT_REGISTRY[("vllm", "async")] = f"{__name__}.{_ADAPTER}"


def __getattr__(name: str) -> Any:
    # verl's adapter pulls in Ray and looks for vLLM; a process that trains without a rollout needs neither.
    if name != _ADAPTER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _adapter_class()


@cache
def _adapter_class() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    return type(_ADAPTER, (WatchedUpdates, ServerAdapter), {"__module__": __name__})


class WatchedUpdates:
    """Mix-in over verl's ``ServerAdapter``: replaces how full tensors are sent, and nothing else."""

    # What verl's class brings.
    config: Any
    rollout_rank: int
    server_handle: Any
    use_shm: bool
    zmq_handle: str
    _execute_method: Callable[..., Any]
    _has_server: bool
    _agreed_on = ""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs,
    ) -> None:
        """Send every tensor of ``weights`` to this rank's vLLM worker. Arguments as in verl's method.

        Raises:
            WeightSyncError: the worker raised, died or went silent. Names this rank, how far it came, and the cause.
        """
        if wire_format != "named_tensors":
            stock = super().update_weights  # type: ignore[misc]
            return await stock(weights, global_steps, wire_format=wire_format, **kwargs)

        kwargs["use_shm"] = self.use_shm
        rank = int(os.environ.get("RANK", str(self.rollout_rank)))
        # Weights of another engine are full tensors.
        stream = weights.for_rollout(self.config, self.rollout_rank) if hasattr(weights, "for_rollout") else None
        source: Source = weights
        if stream is not None:
            await self._agree(stream)
            source = stream.tensors
            if has_our_extension(self.config) and stream.is_verified:
                kwargs["verify"] = True
                source = _verified(stream)
        if has_our_extension(self.config):  # verl's own does not know it
            kwargs["sync_timeout_seconds"] = _timeout_seconds
        future = await self._execute_method("update_weights_from_ipc", non_block=True, kwargs=kwargs)
        handover = await send_weights(
            source,
            zmq_handle=self.zmq_handle,
            bucket_megabytes=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            timeout_seconds=_timeout_seconds,
            rank=rank,
            future=future,
        )
        if stream is not None:
            report = stream.report(handover)
            if rank == 0:
                print(f"[epfsdp2] {report}", flush=True)
        if self._has_server:
            # What was computed with the old weights must not be reused.
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)

    async def _agree(self, stream: WorkerStream) -> None:
        """Compare what the trainer plans with what vLLM's workers have, before the first sync sends them anything.

        verl builds the rollout before its server, so nothing can be asked of the workers any earlier.

        Raises:
            WeightSyncError: on all ranks, with the first difference.
        """
        if stream.kind in ("full", self._agreed_on):
            return
        failure: Exception | None = None
        try:
            future = await self._execute_method(
                "epfsdp2_check_layout", non_block=True, kwargs={"layouts": stream.layouts()}
            )
            if future is not None:
                await _finished(future, _timeout_seconds, "vLLM did not compare its layout with the trainer's")
        except Exception as error:
            failure = WeightSyncError(_in_words(error))
        stream.agree(failure)
        self._agreed_on = stream.kind


def _verified(stream: WorkerStream) -> Source:
    return lambda landing: with_checksums(stream.tensors(landing))


async def send_weights(
    source: Source,
    *,
    zmq_handle: str,
    bucket_megabytes: int,
    use_shm: bool,
    timeout_seconds: float,
    rank: int,
    future: Any = None,
    failure_of: Callable[[Any], BaseException | None] | None = None,
) -> Handover:
    """Send weights through verl's bucketed transport, and wait for the receiving call to end.

    Whatever happens, they are closed, and the socket file and the shared-memory segment are gone afterwards.

    Args:
        source: of the weights.
        future: the remote call that receives, an awaitable; None on ranks that did not make it.
        failure_of: tells, without waiting, the exception that ``future`` ended with; Ray's by default.

    Returns:
        How much went, and where the time did.

    Raises:
        WeightSyncError: see ``WatchedUpdates.update_weights``.
    """
    failure_of = failure_of or _failure_of_ray_call
    started = time.monotonic()

    def check() -> None:
        if future is not None and (cause := failure_of(future)) is not None:
            raise cause

    sender = new_sender(zmq_handle, bucket_size_mb=bucket_megabytes, use_shm=use_shm)
    sender.zmq_context = context = WatchedContext(
        zmq.Context.instance(), timeout_seconds, waits_for=f"the vLLM worker behind {zmq_handle}", check=check
    )
    progress = _Progress(source, lambda: context.waited_seconds)
    try:
        await sender.async_send_weights(progress.follow)
        sent = time.monotonic()
        if future is not None:
            await _finished(future, timeout_seconds, "vLLM took every tensor and did not finish the update")
        finishing = time.monotonic() - sent
        wire = sent - started - progress.gather_seconds - context.waited_seconds
        load = context.waited_seconds + finishing
        return Handover(progress.sent, progress.nbytes, progress.gather_seconds, wire, load, is_stock(sender))
    except Exception as error:
        if progress.failed_in_source:
            raise  # the trainer's own error, not the road's
        cause = (failure_of(future) if future is not None else None) or error
        raise WeightSyncError(
            f"weight sync failed on trainer rank {rank} after {progress.sent} tensors "
            f"(last: {progress.last or 'none'}): {_in_words(cause)}"
        ) from cause
    finally:
        await _close(progress.weights)
        _release(zmq_handle, context.shared_memory_name)


class _Progress:
    """What a sender has taken out of the stream, how long that took, and whether the stream itself failed.

    Args:
        source: of the weights.
        waited: tells the seconds that were spent waiting for the worker, which a stream may do, too.
    """

    def __init__(self, source: Source, waited: Callable[[], float]):
        self.weights, self._waited = source, waited
        self.sent, self.last, self.failed_in_source = 0, "", False
        self.nbytes, self.gather_seconds = 0, 0.0

    async def follow(self, landing: Landing | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        from verl.workers.rollout.utils import ensure_async_iterator

        stream = None
        while True:
            started = time.monotonic() - self._waited()
            try:
                if stream is None:
                    self.weights = self.weights(landing) if callable(self.weights) else self.weights
                    stream = ensure_async_iterator(self.weights)
                name, tensor = await anext(stream)
            except StopAsyncIteration:
                return
            except BaseException:
                self.failed_in_source = True
                raise
            finally:
                self.gather_seconds += time.monotonic() - self._waited() - started
            self.last = name
            yield name, tensor
            self.sent += 1
            self.nbytes += tensor.nbytes


async def _finished(future: Any, timeout_seconds: float, otherwise: str) -> None:
    async def result() -> Any:
        return await future

    try:
        await asyncio.wait_for(result(), timeout_seconds)
    except asyncio.TimeoutError:
        raise WeightSyncError(f"{otherwise} within {timeout_seconds:g} s") from None


def _failure_of_ray_call(reference: Any) -> Exception | None:
    import ray

    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        ray.get(reference, timeout=0)
    except Exception as error:  # whatever the remote side raised is what is asked for
        return error
    return None


def _in_words(cause: BaseException) -> str:
    """The cause without Ray's wrapping and its remote traceback, which the chained exception still shows."""
    cause = getattr(cause, "cause", None) or cause
    if isinstance(cause, WeightSyncError):
        return str(cause)
    # vLLM cancels the calls of an engine whose worker is gone, and says no more than that.
    gone = " (the vLLM worker process died or was killed)" if "cancelled" in str(cause) else ""
    return f"{type(cause).__name__}: {cause}{gone}"


async def _close(weights: Any) -> None:
    # A generator that gathers holds collectives' buffers, and verl drops it without closing it.
    if hasattr(weights, "aclose"):
        await weights.aclose()
    elif hasattr(weights, "close"):
        weights.close()


def _release(zmq_handle: str, shared_memory_name: str | None) -> None:
    """Remove the socket file, and the segment that verl's sender forgets when its first message stays unanswered."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(zmq_handle.removeprefix("ipc://"))
    if shared_memory_name is not None:
        with contextlib.suppress(FileNotFoundError):
            segment = shared_memory.SharedMemory(name=shared_memory_name)
            segment.close()
            segment.unlink()
