"""verl's bucketed sender, with a bucket that an exchange can receive into directly, which saves a copy.

It speaks the protocol of verl's ``BucketedWeightSender`` (verl 0.9.1), so verl's receiver works with it. It replaces
how that class fills its bucket and keeps the rest; if the class has another source, verl's own sender is used
unchanged.
"""

import hashlib
import inspect
import logging
from collections.abc import AsyncIterable, Callable, Sequence
from functools import cache
from typing import Any

import torch

from .cast import CastOnCopy

__all__ = ["Bucket", "fingerprint", "is_verl_sender", "new_sender"]

logger = logging.getLogger("epfsdp2")

# The methods of verl's sender that are replaced or called here, and the fingerprints of their known sources.
_METHODS = ("__init__", "async_send_weights", "_init_socket", "_init_buffer", "_cleanup", "_direct_send_large_weight")
_KNOWN = {"9b12b0e8532bf171"}
# The smallest fraction of a bucket that stays free for copies; an exchange may receive into the rest.
_MIN_COPY_FRACTION = 1 / 8

# Bytes copied into shared memory per message: page faults in fresh pages cost both sides more than messages do.
_SHM_MESSAGE_BYTES = 16 << 20

# verl's metadata of the tensors in a bucket, by name.
BucketMetadata = dict[str, dict[str, Any]]


class Bucket:
    """Memory shared with the worker, filled tensor by tensor and sent when it is full (``exchange.ReceiveBuffers``).

    Args:
        memory: uint8 tensor.
        send: called with the bucket's metadata and whether it is the last; returns when the worker has read it.
        send_alone: sends a tensor that is larger than the bucket; None refuses such tensors.
        message_bytes: the most bytes that are copied per message, but for a single larger tensor; defaults to the size
            of the bucket.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        send: Callable[[BucketMetadata, bool], None],
        send_alone: Callable[[str, torch.Tensor], None] | None = None,
        message_bytes: int | None = None,
    ):
        self._memory, self._send_bucket, self._send_alone = memory, send, send_alone
        self._message_bytes = message_bytes or memory.numel()
        self._base, self._size = memory.data_ptr(), memory.numel()
        self._storage = memory.untyped_storage().data_ptr()
        self._at = 0
        self._metadata: BucketMetadata = {}
        self._failure: Exception | None = None
        self._is_closed = False

    def allocate(self, sizes: Sequence[int], max_block_bytes: int) -> list[torch.Tensor]:
        """Allocate receive buffers from the end of the bucket; see ``exchange.ReceiveBuffers``."""
        least, buffers = max(max_block_bytes, self._memory.numel() * _MIN_COPY_FRACTION), []
        for size in sizes:
            begin = (self._size - size) // 64 * 64
            if begin < least:
                break
            buffers.append(self._memory[begin : begin + size])
            self._size = begin
        return buffers

    def flush(self) -> None:
        """Send the bucket; the next call of ``put`` or ``finish`` raises if that fails."""
        if self._metadata and not self._is_closed:
            try:
                self._send(is_last=False)
            except Exception as error:
                self._failure, self._is_closed = error, True

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor: in place if its memory is in the bucket, as a copy otherwise.

        Raises:
            ValueError: the tensor is larger than the bucket and can't be sent alone.
        """
        if self._failure is not None:
            raise self._failure
        if self._contains(tensor):
            self._add(name, tensor, tensor.data_ptr() - self._base)
            return
        nbytes, itemsize = tensor.nbytes, tensor.element_size()
        at = -(-self._at // itemsize) * itemsize
        if at + nbytes > min(self._size, self._message_bytes):
            if self._metadata:
                self._send(is_last=False)
            at = 0
        if nbytes > self._size:
            if self._send_alone is None:
                raise ValueError(
                    f"{name} has {nbytes} bytes and the bucket {self._size}; raise "
                    "rollout.checkpoint_engine.update_weights_bucket_megabytes."
                )
            self._send_alone(name, tensor)
            return
        into = self._memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
        into.copy_(tensor.stored if isinstance(tensor, CastOnCopy) else tensor.detach(), non_blocking=True)
        self._add(name, tensor, at)
        self._at = at + nbytes

    def finish(self) -> None:
        """Send the rest as the last message."""
        if self._failure is not None:
            raise self._failure
        self._send(is_last=True)

    def close(self) -> None:
        """Make ``flush`` a no-op, since what the exchange still receives is dropped, and let the memory go."""
        self._is_closed, self._memory = True, torch.empty(0, dtype=torch.uint8)

    def _contains(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in the bucket in the dtype and layout that the worker reads."""
        if isinstance(tensor, CastOnCopy):
            return False
        return tensor.untyped_storage().data_ptr() == self._storage and tensor.is_contiguous()

    def _add(self, name: str, tensor: torch.Tensor, at: int) -> None:
        self._metadata[name] = {
            "name": name,
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "offset": at,
            "handle": None,
        }

    def _send(self, is_last: bool) -> None:
        metadata, self._metadata, self._at = self._metadata, {}, 0
        self._send_bucket(metadata, is_last)


def new_sender(*args: Any, **kwargs: Any) -> Any:
    """Make a sender; arguments as of verl's ``BucketedWeightSender``.

    Its ``async_send_weights`` takes a function that returns the weights, and calls it with the bucket to receive into,
    or with None if verl's own sender is used.
    """
    return _class()(*args, **kwargs)


def is_verl_sender(sender: Any) -> bool:
    """Tell whether ``new_sender`` made one in which verl's own class fills the buckets."""
    return not getattr(sender, "fills_in_place", False)


@cache
def _class() -> type:
    from verl.utils.device import get_torch_device
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    class VerlSender(BucketedWeightSender):
        async def async_send_weights(self, weights: Callable[[None], AsyncIterable]) -> None:
            await super().async_send_weights(weights(None))

    class InPlaceSender(BucketedWeightSender):
        fills_in_place = True

        async def async_send_weights(self, weights: Callable[[Bucket], AsyncIterable]) -> None:
            bucket = weight = None
            try:
                self._init_socket()
                self._init_buffer()
                options = {"message_bytes": _SHM_MESSAGE_BYTES} if self.use_shm else {"send_alone": self._send_alone}
                bucket = Bucket(self.buffer, self._send_bucket, **options)
                async for name, weight in weights(bucket):
                    bucket.put(name, weight)
                bucket.finish()
            finally:
                if bucket is not None:
                    bucket.close()
                # Its memory goes back to the device in the clean-up, if nothing views it any more: vLLM may need it.
                bucket = weight = None
                self._cleanup()

        def _init_buffer(self) -> None:
            super()._init_buffer()
            if self.use_shm:
                # This mapping lives as long as tensors that view it. verl's fails to close while one exists, as in the
                # frames of an exception.
                path, size = f"/dev/shm/{self.shm.name}", self.bucket_size
                self.buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

        def _send_bucket(self, metadata: BucketMetadata, is_last: bool) -> None:
            self._await_writes()
            self.socket.send_pyobj({"bucket_meta": metadata, "is_last": is_last})
            self.socket.recv()

        def _send_alone(self, name: str, tensor: torch.Tensor) -> None:
            self._await_writes()
            self._direct_send_large_weight(name, tensor)

        def _await_writes(self) -> None:
            # Not the whole device: the next round is on its way, and waiting for it would undo the overlap. What was
            # received was waited for on this stream.
            get_torch_device().current_stream().synchronize()

    if fingerprint() in _KNOWN:
        return InPlaceSender
    logger.warning(
        "epfsdp2: verl's BucketedWeightSender is not that of verl 0.9.1; weights are sent by it, with one more copy"
    )
    return VerlSender


def fingerprint() -> str:
    """Return a hash of the source of verl's sender; empty if it lacks a method or its source is not installed."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    try:
        source = "".join(inspect.getsource(getattr(BucketedWeightSender, name)) for name in _METHODS)
    except (AttributeError, OSError):
        return ""
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
