"""verl's bucketed sender (verl 0.9.1) with waits for its own stream instead of the device.

A wait for the device would also wait for the next round of the exchange, which runs on other streams. If the source of
verl's class is unknown, it is used unchanged.
"""

import hashlib
import inspect
import logging
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

__all__ = ["sender_class"]

logger = logging.getLogger("epfsdp2")

_KNOWN = {"3248c2d221eb5828"}  # fingerprints of sources of verl's sender


@cache
def sender_class() -> Any:
    """Return the class of senders, a subclass of verl's ``BucketedWeightSender`` where its source is known."""
    from verl.utils.device import get_torch_device
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    if fingerprint() not in _KNOWN:
        logger.warning("epfsdp2: verl's BucketedWeightSender is not that of verl 0.9.1; it sends without overlap")
        return BucketedWeightSender

    def wait() -> None:
        get_torch_device().current_stream().synchronize()

    # verl's own method uses the device for its waits alone, so another device replaces them.
    stock, device = BucketedWeightSender.async_send_weights, SimpleNamespace(synchronize=wait)

    class StreamSender(BucketedWeightSender):
        async_send_weights = FunctionType(stock.__code__, {**stock.__globals__, "get_torch_device": lambda: device})

        def _direct_send_large_weight(self, name: str, weight: torch.Tensor) -> None:
            wait()
            super()._direct_send_large_weight(name, weight)

    return StreamSender


def fingerprint() -> str:
    """Return a hash of the source of verl's sender; empty if the source is not installed."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    try:
        source = inspect.getsource(BucketedWeightSender)
    except OSError:
        return ""
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
