"""Shim that lets verl's SGLang adapter send tensors that are on the CPU.

SGLang puts the UUID of a tensor's GPU into what torch pickles of it, and a tensor on the CPU has none (IndexError). Its
file descriptors can't be passed to a process that was not started by this one, so its memory is shared by name.
``test_sglang.py`` fails once SGLang no longer needs the shim.
"""

import functools
from typing import Any

import torch
from verl.utils.device import get_device_name

__all__ = ["install"]


def install() -> None:
    """Wrap the function, once per process; no-op on a machine with a GPU."""
    if get_device_name() != "cpu":
        return
    from sglang.srt.utils import patch_torch

    reduce_modified: Any = patch_torch._reduce_tensor_modified
    if hasattr(reduce_modified, "__wrapped__"):
        return

    @functools.wraps(reduce_modified)
    def reduce_tensor(tensor: torch.Tensor):
        if tensor.device.type != "cpu":
            return reduce_modified(tensor)
        return patch_torch.reductions._reduce_tensor_original(tensor)

    patch_torch._reduce_tensor_modified = reduce_tensor
    torch.multiprocessing.set_sharing_strategy("file_system")
