"""verl's platform plug-in for machines without an accelerator.

verl asks a platform object for the device, the collective backend, Ray's resource name and the way weights are sent.
Stock verl knows NVIDIA, Ascend and ROCm, and falls back to NVIDIA. This one answers ``cpu``: gloo, Ray's ``GPU``
resource as a plain counter (``ray_kwargs.ray_init.num_gpus=N`` hands out N slots, nothing is used), and shared
memory instead of CUDA IPC.

It takes effect where the user asks for it (``VERL_PLATFORM=cpu``), or where torch itself is a CPU-only build. A node
without GPUs in a GPU cluster (a head node, a CPU-only Ray actor) has a CUDA build of torch and is left alone.
"""

import os
import resource
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

__all__ = ["PlatformCPU"]


class _Stream:
    """Stands in for a device stream: work on a CPU is done when the call returns."""

    def wait_stream(self, other) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def _stream(_stream):
    yield


def _resident_bytes(*_args, **_kwargs) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(*_args, **_kwargs) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_info(*_args) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_args, **_kwargs) -> None:
    return None


# What verl calls on `torch.cuda`, answered for a CPU. Memory figures are the process's resident bytes.
_cpu_module = SimpleNamespace(
    __name__="epfsdp2.cpu",
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: "cpu",
    set_device=_nothing,
    get_device_name=lambda *_: "cpu",
    synchronize=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    current_stream=lambda *_: _Stream(),
    stream=_stream,
    Stream=_Stream,
    Event=torch.cpu.Event if hasattr(torch.cpu, "Event") else _Stream,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
    set_per_process_memory_fraction=_nothing,
    memory_allocated=_resident_bytes,
    memory_reserved=_resident_bytes,
    max_memory_allocated=_peak_resident_bytes,
    max_memory_reserved=_peak_resident_bytes,
    reset_peak_memory_stats=_nothing,
    reset_max_memory_allocated=_nothing,
    mem_get_info=_memory_info,
)

# Processes that verl starts for vLLM inherit these unless the user set them. Without the first, all vLLM workers bind
# to the same core; the last spares the compile of a model that runs eagerly.
_ROLLOUT_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def torch_is_cpu_only() -> bool:
    """Tell whether the installed torch can't drive any accelerator, whatever is plugged in."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    return not any(hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "xpu", "mps"))


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """``PlatformBase`` for a machine without an accelerator (verl 0.9.1, ``plugin/platform/platform_base.py``)."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return _cpu_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu" or torch_is_cpu_only()

    def current_device(self) -> Any:
        # verl passes this to Tensor.to(); an index would mean an accelerator there.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        with torch.profiler.record_function(msg):
            yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {name: os.environ.get(name, value) for name, value in _ROLLOUT_ENV.items()}

    def cudart(self) -> Any:
        return None
