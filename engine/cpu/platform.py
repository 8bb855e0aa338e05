"""verl's platform plug-in for machines without an accelerator, and its process groups there.

A platform names the device, the collective backend, Ray's resource and the transport of weights. Stock verl 0.9.1 has
platforms for NVIDIA, Ascend and ROCm. This one answers ``cpu``, gloo and shared memory instead of CUDA IPC. Ray's
``GPU`` resource is a counter of processes here: ``ray_kwargs.ray_init.num_gpus=N`` admits N.
"""

import os
import resource
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from ..compat.wrap_function import wrap

__all__ = ["PlatformCPU", "install"]

# Inherited by the processes that verl starts for vLLM, unless the user sets them. "nobind" keeps all workers from
# binding to one core. Without compilation a model that runs eagerly starts faster.
_ROLLOUT_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def install() -> None:
    """Let verl's process groups start on a CPU; importing this file registers the platform.

    verl 0.9.1 composes the backend ``cpu:gloo,cpu:gloo``, which torch refuses as a duplicate, and has no setting for it
    (``utils/distributed.py``, lines 63 and 89).
    """
    from verl.utils import distributed

    def with_ray(stock):
        return lambda timeout_second=None, backend=None: stock(timeout_second, backend or "cpu:gloo")

    def with_torchrun(_stock):
        def initialize_global_process_group(timeout_second=36000):
            where = os.environ.get("DIST_INIT_METHOD")
            torch.distributed.init_process_group("cpu:gloo", where, timedelta(seconds=timeout_second))
            return tuple(int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))

        return initialize_global_process_group

    wrap(distributed, "initialize_global_process_group_ray", with_ray)
    wrap(distributed, "initialize_global_process_group", with_torchrun)


class _Stream(torch.cpu.Stream):
    """A stream of torch's with the method that verl calls besides: work on a CPU is done when the call returns."""

    def synchronize(self) -> None: ...


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _peak_resident_bytes(*_args) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_info(*_args) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


_nothing = _returning(None)
# The functions of `torch.cuda` that verl calls. Memory is the process's resident memory.
_cpu_module = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__}
    | {"Stream": _Stream, "current_stream": lambda *_: _Stream()},
    get_device_name=_returning("cpu"),
    **dict.fromkeys(("empty_cache", "ipc_collect", "set_per_process_memory_fraction"), _nothing),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _nothing),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: psutil.Process().memory_info().rss),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_resident_bytes),
    mem_get_info=_memory_info,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """``PlatformBase`` for a machine without an accelerator (verl 0.9.1, ``plugin/platform/platform_base.py``)."""

    device_name = vendor_name = "cpu"
    device_module = _cpu_module
    nvtx_range = torch.profiler.record_function
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    is_available = _returning(True)
    current_device = _returning("cpu")  # verl passes it to Tensor.to(), where an index means an accelerator
    device_count = _returning(1)
    get_device_capability = _returning((None, None))
    communication_backend_name = _returning("gloo")
    visible_devices_envvar = _returning("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _returning("GPU")
    ray_noset_envvars = _returning([])
    is_ipc_supported = _returning(False)

    def rollout_env_vars(self) -> dict[str, str]:
        return {name: os.environ.get(name, value) for name, value in _ROLLOUT_ENV.items()}
