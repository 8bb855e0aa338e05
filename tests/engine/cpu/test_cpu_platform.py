"""The plug-in on a machine without an accelerator: platform, process groups, and an error that is seen."""

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
from verl.plugin.platform import get_platform

from epfsdp2.engine import cpu
from epfsdp2.engine.cpu import platform as cpu_platform


@pytest.fixture
def platform():
    return cpu_platform.PlatformCPU()


def test_cpu_device_module_has_every_name_that_verl_calls(platform):
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(verl.__file__).parent.rglob("*.py"))
    used = set(re.findall(r"get_torch_device\(\)\.(\w+)", sources))
    assert {"empty_cache", "mem_get_info", "Stream", "get_rng_state"} <= used
    assert {name for name in used if not hasattr(platform.device_module, name)} == set()


def test_cpu_device_module_answers_for_a_cpu(platform):
    device = platform.device_module
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert 0 < device.memory_allocated() < total and device.max_memory_allocated() >= device.memory_allocated() // 2
    with device.stream(device.Stream()), platform.nvtx_range("x"):
        device.current_stream().wait_stream(device.Stream())
        device.current_stream().synchronize()
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"


@pytest.mark.parametrize(
    "cuda, hip, chosen, installs",
    [
        (None, None, "", True),
        (None, None, "nvidia", False),
        ("13.0", None, "", False),  # a node of a GPU cluster, whether or not this process sees a GPU
        ("13.0", None, "cpu", True),
        (None, "7.0", "", False),
    ],
)
def test_cpu_install_acts_on_a_cpu_build_of_torch_or_when_chosen(monkeypatch, cuda, hip, chosen, installs):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setenv("VERL_PLATFORM", chosen)
    called = []
    monkeypatch.setattr(cpu_platform, "install", lambda: called.append(1))
    cpu.install()
    assert bool(called) is installs


def test_rollout_env_vars_of_the_cpu_platform_keep_what_the_user_set(platform, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = platform.rollout_env_vars()
    assert (environment["VLLM_CPU_OMP_THREADS_BIND"], environment["OMP_NUM_THREADS"]) == ("nobind", "7")


@pytest.mark.skipif(get_platform().device_name != "cpu", reason="the shim acts on the CPU platform only")
@pytest.mark.parametrize(
    "name, query",
    [("initialize_global_process_group", "?rank=0&world_size=1"), ("initialize_global_process_group_ray", "")],
)
def test_cpu_process_groups_start_that_verl_alone_can_not(monkeypatch, name, query):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # verl passes DIST_INIT_METHOD to torch, which must not use the other address.
    monkeypatch.setenv("DIST_INIT_METHOD", f"tcp://127.0.0.1:{port}{query}")
    for variable, value in {"MASTER_PORT": "nonsense", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    cpu_platform.install()  # a second time, which must not wrap the wrapper
    shimmed = getattr(verl_distributed, name)
    with pytest.raises(ValueError, match="(?i)duplicate device type cpu"):
        shimmed.__wrapped__()
    assert shimmed() == (None if name.endswith("ray") else (0, 0, 1))
    try:
        total = torch.ones(2)
        torch.distributed.all_reduce(total)
        assert total.tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()


def _in_process(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_plugin_that_can_not_load_prints_why():
    # A None in sys.modules makes the import of exactly this module fail.
    done = _in_process("import sys; sys.modules['epfsdp2.conf.search_path'] = None; import verl; print('verl', verl)")
    assert "verl" in done.stdout, done.stderr
    assert "the verl plug-in could not be loaded, engine=epfsdp2 will not be found" in done.stderr
    assert "epfsdp2.conf.search_path" in done.stderr and "Traceback" in done.stderr


def test_plugin_at_import_verl_imports_nothing_heavy_and_no_cpu_platform_where_another_is_chosen():
    code = (
        "import sys, verl; heavy = {'vllm', 'ray.serve', 'verl.workers.engine', 'epfsdp2.engine.integration.engine'};"
        "print('epfsdp2.conf.search_path' in sys.modules, 'epfsdp2.engine.cpu.platform' in sys.modules,"
        " heavy & set(sys.modules))"
    )
    done = _in_process(code, VERL_PLATFORM="nvidia")
    assert done.stdout.split() == ["True", "False", "set()"], done.stderr
