"""verl's transport of weights without Ray and vLLM, which verl's packages import: a sender and a receiver."""

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["find_verls_transport", "receive", "send"]

_TRANSPORT = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"


def find_verls_transport() -> Any:
    """Import verl's module, with empty modules in place of its packages if they can't be imported."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(_TRANSPORT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations is not None, "verl is not installed"
    root = spec.submodule_search_locations[0]
    packages = ["verl", *itertools.accumulate(_TRANSPORT.split(".")[:-1], "{}.{}".format)][1:]
    for name in [*packages, "verl.utils"]:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = module
    # The sender's iterator is asynchronous already; verl's file with this function imports Ray.
    utils: Any = types.ModuleType("verl.workers.rollout.utils")
    utils.ensure_async_iterator = lambda weights: weights
    sys.modules[utils.__name__] = utils
    importlib.import_module("epfsdp2.engine.cpu.platform")  # verl's plug-in loads it if verl is whole
    return importlib.import_module(_TRANSPORT)


def send(tensors: Any, handles: Sequence[str], megabytes: int = 1) -> None:
    """Send tensors to the worker beside this rank, in buckets of so many megabytes.

    vLLM is not imported, which takes every rank ten seconds of a core.
    """
    from epfsdp2.rollout.vllm.adapter import send_weights

    package = _TRANSPORT.rpartition(".")[0]
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        sys.modules[package] = importlib.util.module_from_spec(spec)
    settings: dict[str, Any] = {"bucket_megabytes": megabytes, "use_shm": True, "timeout_seconds": 120}
    asyncio.run(send_weights(tensors, zmq_handle=handles[dist.get_rank()], rank=dist.get_rank(), **settings))


def receive(handle: str, on_gpu: bool, results: Any) -> None:
    """Receive like a worker: put the sum of each tensor, by name, into the queue ``results``.

    Args:
        handle: address of the sender's socket.
        on_gpu: by CUDA IPC, and not through shared memory.
    """
    sums = {}

    def on_bucket(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        sums.update({name: tensor.double().sum().item() for name, tensor in weights})

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    receiver = find_verls_transport().BucketedWeightReceiver(handle, device, use_shm=not on_gpu)
    receiver.receive_weights(on_bucket)
    results.put(sums)
