"""Shim: verl 0.9.1 composes the backend string ``cpu:gloo,<device>:<backend>``.

On a CPU that is ``cpu:gloo,cpu:gloo``, which torch refuses ("Duplicate device type cpu in backend string"). verl has
no setting for it (``utils/distributed.py:63`` and ``:89``), so the two functions that build it get a wrapper that is
active on the CPU platform only. ``test_cpu_platform.py`` fails when upstream no longer needs it.
"""

import os
from datetime import timedelta
from functools import wraps

import torch
import verl.utils.distributed as verl_distributed
from verl.utils.device import get_device_name

__all__ = ["install"]


def install() -> None:
    """Wrap verl's two process-group initialisers, once per process."""
    if hasattr(verl_distributed.initialize_global_process_group_ray, "__wrapped__"):
        return
    with_ray = verl_distributed.initialize_global_process_group_ray
    with_torchrun = verl_distributed.initialize_global_process_group

    @wraps(with_ray)
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        return with_ray(timeout_second=timeout_second, backend=backend)

    @wraps(with_torchrun)
    def initialize_global_process_group(timeout_second=36000):
        if get_device_name() != "cpu":
            return with_torchrun(timeout_second)
        torch.distributed.init_process_group(
            "cpu:gloo", timeout=timedelta(seconds=timeout_second), init_method=os.environ.get("DIST_INIT_METHOD")
        )
        return tuple(int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))

    verl_distributed.initialize_global_process_group_ray = initialize_global_process_group_ray
    verl_distributed.initialize_global_process_group = initialize_global_process_group
