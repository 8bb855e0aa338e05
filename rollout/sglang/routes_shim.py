"""Shim that lets SGLang record the routes of experts (``enable_return_routed_experts``) on a machine without a GPU.

SGLang keeps them in pinned memory, which torch allocates only where there is a device. SGLang calls ``install`` in each
of its processes, as a plug-in (``sglang.srt.plugins`` in ``pyproject.toml``).
"""

import functools
from typing import Any

import torch

__all__ = ["install"]


def install() -> None:
    """Wrap the function, once per process; no-op on a machine with a GPU, and where SGLang has no such memory."""
    if torch.accelerator.is_available():
        return
    try:
        from sglang.srt.state_capturer import base
    except ImportError:
        return
    own: Any = base.BaseHostCache.__init__
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def init(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    base.BaseHostCache.__init__ = init
