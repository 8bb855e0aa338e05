"""The plug-in on a machine without an accelerator: platform, process groups, vLLM's name, and loudness."""

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl
import verl.utils.distributed as verl_distributed
from verl.plugin.platform.platform_manager import PlatformRegistry

from epfsdp2.engine.integration.cpu_platform import PlatformCPU, torch_is_cpu_only
from epfsdp2.engine.integration.shims import cpu_backend_shim, vllm_distribution

VERL = Path(verl.__file__).parent


@pytest.fixture
def platform():
    return PlatformCPU()


def test_cpu_platform_is_registered_and_complete(platform):
    assert PlatformRegistry.get("cpu") is PlatformCPU
    assert (platform.device_name, platform.communication_backend_name()) == ("cpu", "gloo")
    assert platform.ray_resource_name() == "GPU"
    assert not platform.is_ipc_supported()


def test_cpu_device_module_has_every_name_that_verl_calls(platform):
    used = set()
    for path in VERL.rglob("*.py"):
        used |= set(re.findall(r"get_torch_device\(\)\.(\w+)", path.read_text(encoding="utf-8")))
    assert {"empty_cache", "mem_get_info", "Stream", "get_rng_state"} <= used
    assert {name for name in used if not hasattr(platform.device_module, name)} == set()


def test_cpu_device_module_when_asked_answers_for_a_cpu(platform):
    device = platform.device_module
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert 0 < device.memory_allocated() < total and device.max_memory_allocated() >= device.memory_allocated() // 2
    with device.stream(device.Stream()):
        device.current_stream().wait_stream(device.Stream())
        device.synchronize()
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    with platform.nvtx_range("x"):
        platform.empty_cache()


@pytest.mark.parametrize(
    "cuda, asked, available",
    [(None, "", True), ("13.0", "", False), ("13.0", "cpu", True), ("13.0", "nvidia", False)],
)
def test_cpu_platform_takes_effect_on_a_cpu_build_of_torch_or_when_asked_for(
    platform, monkeypatch, cuda, asked, available
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setenv("VERL_PLATFORM", asked)
    # A GPU node's torch is a CUDA build, whether or not a GPU is visible to this process.
    assert platform.is_platform_available(use_smi_check=True) is available


def test_cpu_platform_on_a_rocm_build_takes_no_effect(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    assert not torch_is_cpu_only()


def test_rollout_env_vars_of_the_cpu_platform_keep_what_the_user_set(platform, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = platform.rollout_env_vars()
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "7"


def single_rank(monkeypatch, query):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # verl hands DIST_INIT_METHOD to torch; the other address is one that would not work.
    monkeypatch.setenv("DIST_INIT_METHOD", f"tcp://127.0.0.1:{port}{query}")
    monkeypatch.setenv("MASTER_PORT", "nonsense")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.skipif(not torch_is_cpu_only(), reason="the shim acts on the CPU platform only")
@pytest.mark.parametrize(
    "name, query",
    [("initialize_global_process_group", "?rank=0&world_size=1"), ("initialize_global_process_group_ray", "")],
)
def test_cpu_backend_shim_starts_process_groups_that_verl_alone_can_not(monkeypatch, name, query):
    shimmed = getattr(verl_distributed, name)
    single_rank(monkeypatch, query)
    with pytest.raises(ValueError, match="(?i)duplicate device type cpu"):
        shimmed.__wrapped__()
    shimmed()
    try:
        total = torch.ones(2)
        torch.distributed.all_reduce(total)
        assert total.tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_cpu_backend_shim_installed_twice_wraps_once():
    before = verl_distributed.initialize_global_process_group_ray
    cpu_backend_shim.install()
    assert verl_distributed.initialize_global_process_group_ray is before


def fake_distribution(folder, name, version):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_vllm_distribution_of_a_cpu_build_answers_for_vllm_and_a_real_one_wins(monkeypatch, tmp_path):
    vllm_distribution.install()
    count = sum(type(finder).__name__ == "_VllmCpuFinder" for finder in sys.meta_path)
    assert count == 1
    folders = [tmp_path / "cpu", tmp_path / "real"]
    for folder in folders:
        folder.mkdir()
    fake_distribution(folders[0], "vllm-cpu", "8.8.8")
    monkeypatch.syspath_prepend(str(folders[0]))
    if not any(Path(p).glob("vllm-[0-9]*.dist-info") for p in sys.path if Path(p).is_dir()):
        assert importlib.metadata.version("vllm") == "8.8.8+cpu"
    fake_distribution(folders[1], "vllm", "9.9.9")
    monkeypatch.syspath_prepend(str(folders[1]))
    assert importlib.metadata.version("vllm") == "9.9.9"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-distribution")


def in_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_plugin_that_can_not_load_says_why():
    # A None in sys.modules makes the import of exactly this module fail.
    done = in_process("import sys; sys.modules['epfsdp2.conf.search_path'] = None; import verl; print('verl', verl)")
    assert "verl" in done.stdout, done.stderr
    assert "the verl plug-in could not be loaded, engine=epfsdp2 will not be found" in done.stderr
    assert "epfsdp2.conf.search_path" in done.stderr and "Traceback" in done.stderr


def test_plugin_at_import_verl_is_loaded_and_imports_nothing_heavy():
    code = (
        "import sys, verl; from verl.plugin.platform import get_platform;"
        "heavy = {'vllm', 'ray.serve', 'epfsdp2.engine.integration.engine', 'verl.workers.engine'} & set(sys.modules);"
        "print(get_platform().device_name, 'epfsdp2.conf.search_path' in sys.modules, heavy)"
    )
    done = in_process(code, VERL_PLATFORM="cpu")
    assert done.stdout.split() == ["cpu", "True", "set()"], done.stderr
