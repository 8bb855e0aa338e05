"""verl's bucketed sender with a bucket in which rounds of an exchange may arrive: what has is not copied once more.

It speaks verl's protocol (``BucketedWeightSender``, verl 0.9.1), so any receiver takes it. Of verl's class it replaces
how the bucket is filled, and keeps the rest; where verl has been changed since, verl's own class sends instead.
"""

import hashlib
import inspect
import logging
from collections.abc import AsyncIterable, Callable, Sequence
from functools import cache
from typing import Any

import torch

from .cast import CastOnCopy

__all__ = ["Bucket", "fingerprint", "is_stock", "new_sender"]

logger = logging.getLogger("epfsdp2")

# Of verl's sender: what is replaced here, and what is kept and called.
_METHODS = ("__init__", "async_send_weights", "_init_socket", "_init_buffer", "_cleanup", "_direct_send_large_weight")
_KNOWN = {"9b12b0e8532bf171"}
# Of a bucket, what is kept to copy to; rounds may arrive in the rest.
_LEAST_TO_COPY_TO = 1 / 8

# Of shared memory, bytes to copy to before they are shipped: pages that are new to both sides cost more than messages.
_AT_ONCE = 16 << 20

# What lies where: verl's metadata, by the tensors' names.
Contents = dict[str, dict[str, Any]]


class Bucket:
    """Memory that the worker sees too, filled tensor by tensor and shipped when it is full.

    Args:
        memory: bytes.
        ship: is handed what lies in it, and whether that is the last; returns when the worker has taken it.
        send_alone: is handed a tensor that is larger than the bucket; None if there is no such way.
        at_once: most bytes that are copied before they are shipped, a larger tensor alone; the whole bucket by default.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        ship: Callable[[Contents, bool], None],
        send_alone: Callable[[str, torch.Tensor], None] | None = None,
        at_once: int | None = None,
    ):
        self._memory, self._ship, self._send_alone = memory, ship, send_alone
        self._at_once = at_once or memory.numel()
        self._base, self._size = memory.data_ptr(), memory.numel()
        self._storage = memory.untyped_storage().data_ptr()
        self._at = 0
        self._contents: Contents = {}
        self._failure: Exception | None = None
        self._is_closed = False

    def room(self, sizes: Sequence[int], largest: int) -> list[torch.Tensor]:
        """Memory in which a stream may receive; see ``exchange.Landing``."""
        least, buffers = max(largest, self._memory.numel() * _LEAST_TO_COPY_TO), []
        for size in sizes:
            begin = (self._size - size) // 64 * 64
            if begin < least:
                break
            buffers.append(self._memory[begin : begin + size])
            self._size = begin
        return buffers

    def vacate(self) -> None:
        """Ship what lies in it; a failure is raised by what comes next."""
        if self._contents and not self._is_closed:
            try:
                self._send(is_last=False)
            except Exception as error:
                self._failure, self._is_closed = error, True

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor: where it is if that is in the bucket, a copy otherwise.

        Raises:
            ValueError: it is larger than the bucket, and can't be sent alone.
        """
        if self._failure is not None:
            raise self._failure
        if self._has(tensor):
            self._add(name, tensor, tensor.data_ptr() - self._base)
            return
        nbytes, itemsize = tensor.nbytes, tensor.element_size()
        at = -(-self._at // itemsize) * itemsize
        if at + nbytes > min(self._size, self._at_once):
            if self._contents:
                self._send(is_last=False)
            at = 0
        if nbytes > self._size:
            if self._send_alone is None:
                raise ValueError(
                    f"{name} has {nbytes} bytes, the bucket {self._size}: raise "
                    "rollout.checkpoint_engine.update_weights_bucket_megabytes."
                )
            self._send_alone(name, tensor)
            return
        into = self._memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
        into.copy_(tensor.stored if isinstance(tensor, CastOnCopy) else tensor.detach(), non_blocking=True)
        self._add(name, tensor, at)
        self._at = at + nbytes

    def finish(self) -> None:
        """Ship what is left, as the last."""
        if self._failure is not None:
            raise self._failure
        self._send(is_last=True)

    def close(self) -> None:
        """Ship no more: what is still under way is received and dropped."""
        self._is_closed = True

    def _has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the bucket as the worker is to read it."""
        if isinstance(tensor, CastOnCopy):
            return False
        return tensor.untyped_storage().data_ptr() == self._storage and tensor.is_contiguous()

    def _add(self, name: str, tensor: torch.Tensor, at: int) -> None:
        self._contents[name] = {
            "name": name,
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "offset": at,
            "handle": None,
        }

    def _send(self, is_last: bool) -> None:
        contents, self._contents, self._at = self._contents, {}, 0
        self._ship(contents, is_last)


def new_sender(*args: Any, **kwargs: Any) -> Any:
    """A sender, made as verl's, whose ``async_send_weights`` takes what makes the weights.

    That is told where they may arrive: in the bucket, or None if it is verl's own sender that sends.
    """
    return _class()(*args, **kwargs)


def is_stock(sender: Any) -> bool:
    """Whether verl's own sender fills the buckets of one that ``new_sender`` made."""
    return not getattr(sender, "lands", False)


@cache
def _class() -> type:
    from verl.utils.device import get_torch_device
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    class StockSender(BucketedWeightSender):
        async def async_send_weights(self, weights: Callable[[None], AsyncIterable]) -> None:
            await super().async_send_weights(weights(None))

    class LandingSender(BucketedWeightSender):
        lands = True

        async def async_send_weights(self, weights: Callable[[Bucket], AsyncIterable]) -> None:
            bucket = None
            try:
                self._init_socket()
                self._init_buffer()
                options = {"at_once": _AT_ONCE} if self.use_shm else {"send_alone": self._send_alone}
                bucket = Bucket(self.buffer, self._ship, **options)
                async for name, weight in weights(bucket):
                    bucket.put(name, weight)
                bucket.finish()
            finally:
                if bucket is not None:
                    bucket.close()
                self._cleanup()

        def _init_buffer(self) -> None:
            super()._init_buffer()
            if self.use_shm:
                # A mapping that lasts as long as its tensors: verl's can't be closed while there is one, as in the
                # frames of an exception.
                path, size = f"/dev/shm/{self.shm.name}", self.bucket_size
                self.buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

        def _ship(self, contents: Contents, is_last: bool) -> None:
            get_torch_device().synchronize()
            self.socket.send_pyobj({"bucket_meta": contents, "is_last": is_last})
            self.socket.recv()

        def _send_alone(self, name: str, tensor: torch.Tensor) -> None:
            get_torch_device().synchronize()
            self._direct_send_large_weight(name, tensor)

    if fingerprint() in _KNOWN:
        return LandingSender
    logger.warning("epfsdp2: verl's BucketedWeightSender is not that of verl 0.9.1; it fills its buckets itself")
    return StockSender


def fingerprint() -> str:
    """Of the source of verl's sender; empty if it lacks a method or its source is not installed."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    try:
        source = "".join(inspect.getsource(getattr(BucketedWeightSender, name)) for name in _METHODS)
    except (AttributeError, OSError):
        return ""
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
