"""Shims for SGLang 0.5.12 without a GPU, and for its routes of experts; ``test_sglang.py`` tells when they can go."""

import sys
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["install", "send_from_cpu"]

_MOVED = "sglang.srt.layers.moe.routed_experts_capturer"


def install() -> None:
    """Bring the routes of experts that SGLang records (``enable_return_routed_experts``) to verl.

    The function that decodes them was moved, and verl 0.9.1 imports it by its old name. They are kept in pinned memory,
    which torch allocates only where there is a device. SGLang calls this in each of its processes, as a plug-in
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

    def init(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    base.BaseHostCache.__init__ = init


def send_from_cpu() -> None:
    """Let verl's adapter send tensors that are on the CPU; no-op on a machine with a GPU.

    SGLang puts the UUID of a tensor's GPU into what torch pickles of it (IndexError). A tensor's file descriptors can't
    be passed to a process that was not started by this one, so its memory is shared by name.
    """
    from verl.utils.device import get_device_name

    if get_device_name() != "cpu":
        return
    from sglang.srt.utils import patch_torch

    # torch's own, which SGLang keeps there later, when it patches torch.
    patch_torch._reduce_tensor_modified = lambda tensor: patch_torch.reductions._reduce_tensor_original(tensor)
    torch.multiprocessing.set_sharing_strategy("file_system")
