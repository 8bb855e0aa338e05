"""Shims for SGLang on a CPU, its recorded routes and its sessions; ``test_sglang.py`` fails once they can go."""

import abc
import sys
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["add_sessions", "install", "send_from_cpu"]

_MOVED = "sglang.srt.layers.moe.routed_experts_capturer"


def install() -> None:
    """Make the experts' routes that SGLang records (``enable_return_routed_experts``) readable for verl.

    verl 0.9.1 imports their decoder from a module that SGLang has since moved. SGLang keeps them in pinned memory,
    which torch can't allocate without a device. SGLang calls this in each of its processes, as a plug-in
    (``sglang.srt.plugins`` in ``pyproject.toml``).
    """
    try:
        from sglang.srt.state_capturer import base, routed_experts
    except ImportError:
        return
    if find_spec(_MOVED) is None:
        sys.modules[_MOVED] = routed_experts
    if torch.accelerator.is_available():
        return

    # SGLang 0.5.20 passes the device too.
    def init(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str = "cpu") -> None:
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    base.BaseHostCache.__init__ = init


def send_from_cpu() -> None:
    """Let verl's adapter send CPU tensors; no-op on a machine with a GPU.

    SGLang adds the UUID of a tensor's GPU to its pickled form, which raises IndexError on a CPU. Memory is shared by
    name, because file descriptors can't be passed to a process that this one did not start.
    """
    from verl.utils.device import get_device_name

    if get_device_name() != "cpu":
        return
    from sglang.srt.utils import patch_torch

    # Restore torch's own function. SGLang stores it under this name only when it patches torch, so look it up late.
    patch_torch._reduce_tensor_modified = lambda tensor: patch_torch.reductions._reduce_tensor_original(tensor)
    torch.multiprocessing.set_sharing_strategy("file_system")


def add_sessions() -> bool:
    """Add the calls of a session to verl's client of SGLang's server, if it lacks them; return whether they are ours.

    Since SGLang 0.5.21 an update stands between ``begin_weight_update`` and ``end_weight_update``. They are abstract in
    the client's base, so verl 0.9.1, which lacks them, can't make a client.
    """
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    calls = {"begin_weight_update": _begin, "end_weight_update": _end}
    for name in AsyncHttpServerAdapter.__abstractmethods__ & calls.keys():
        setattr(AsyncHttpServerAdapter, name, calls[name])
    abc.update_abstractmethods(AsyncHttpServerAdapter)
    return getattr(AsyncHttpServerAdapter, "begin_weight_update", None) is _begin


async def _begin(self: Any, selector: str = "all") -> dict[str, Any]:
    return await self._make_async_request("begin_weight_update", {"selector": selector})


async def _end(self: Any) -> dict[str, Any]:
    return await self._make_async_request("end_weight_update")
