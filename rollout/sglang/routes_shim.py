"""Shim that brings the routes of experts that SGLang records (``enable_return_routed_experts``) to verl.

SGLang 0.5.12 has moved the function that decodes them, which verl 0.9.1 imports by its old name. It keeps them in
pinned memory, which torch allocates only where there is a device. SGLang calls ``install`` in each of its processes, as
a plug-in (``sglang.srt.plugins`` in ``pyproject.toml``).
"""

import functools
import sys
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["install"]

_MOVED = "sglang.srt.layers.moe.routed_experts_capturer"


def install() -> None:
    """Give the module its old name and wrap the allocation, once per process; no-op where neither is needed."""
    try:
        from sglang.srt.state_capturer import base, routed_experts
    except ImportError:
        return
    if find_spec(_MOVED) is None:
        sys.modules[_MOVED] = routed_experts
    own: Any = base.BaseHostCache.__init__
    if torch.accelerator.is_available() or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def init(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    base.BaseHostCache.__init__ = init
