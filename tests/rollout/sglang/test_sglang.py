"""SGLang's update of weights without a GPU: stock, with the shim, and by slices."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from epfsdp2.recipes.quickstart.commands import sglang_environment
from tests.rollout.families import save
from tests.rollout.sglang.sglang_families import SIZES

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make setup STACK=sglang)")

_SENDS = """
import multiprocessing, sys
import torch
from sglang.srt.utils import MultiprocessingSerializer, patch_torch
from epfsdp2.rollout.sglang import shims

def receive(packed, answers):
    answers.put(MultiprocessingSerializer.deserialize(packed).sum().item())

if __name__ == "__main__":
    if sys.argv[1] == "shim":
        shims.send_from_cpu()
        shims.send_from_cpu()  # once
    patch_torch.monkey_patch_torch_reductions()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    tensors = [torch.full((3, 5), float(i)) for i in range(3000)]  # more than a process has file descriptors
    packed = [MultiprocessingSerializer.serialize(tensor) for tensor in tensors]
    other = context.Process(target=receive, args=(packed[2], answers))
    other.start()
    assert answers.get(timeout=60) == 30.0
    other.join()
"""


def _runs_with_shim_alone(folder, script, how, *more):
    """Run a script with the shim or without; return its errors."""
    path = folder / "script.py"
    path.write_text(script)
    environment = os.environ | sglang_environment() | {"VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, path, how, *more], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode == 0) == (how == "shim"), done.stderr[-2000:]
    return done.stderr


def _since(release, reason):
    older = find_spec("sglang") is not None and Version(version("sglang")) < Version(release)
    return pytest.mark.skipif(older, reason=reason)


@pytest.mark.parametrize("how", ["stock", "shim"])
def test_sglang_cpu_shim_is_needed_to_send_tensors_on_the_cpu(tmp_path, how):
    said = _runs_with_shim_alone(tmp_path, _SENDS, how)
    assert how == "shim" or "IndexError: tuple index out of range" in said


_KEEPS = """
import sys
import sglang.srt.server_args
from sglang.srt.state_capturer.base import BaseHostCache
from epfsdp2.rollout.sglang import shims

if sys.argv[1] == "shim":
    shims.install()
    shims.install()  # once
if sys.argv[2] == "name":
    from sglang.srt.layers.moe.routed_experts_capturer import extract_routed_experts_from_meta_info
    routes = extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": "AQAAAAIAAAA="}})
    assert routes.tolist() == [1, 2]
    sys.exit()
assert BaseHostCache(4, 2, 3, "routes").buffer.shape == (4, 2, 3)
"""


@pytest.mark.parametrize("what", ["memory", "name"])
@pytest.mark.parametrize("how", ["stock", "shim"])
def test_sglang_routes_shim_is_needed_to_keep_routes_on_the_cpu_and_for_verl_to_read_them(tmp_path, how, what):
    _runs_with_shim_alone(tmp_path, _KEEPS, how, what)


_FIELDS = """
import dataclasses, os, sys

if sys.argv[1] == "stock":
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "epfsdp2"
from verl.workers.rollout.sglang_rollout import async_sglang_server as server
assert "enable_weights_cpu_backup" in [field.name for field in server.dataclasses.fields(server.ServerArgs)]
assert server.dataclasses.fields(server.RolloutConfig) == dataclasses.fields(server.RolloutConfig)
"""


@_since("0.5.20", "ServerArgs of this SGLang is a dataclass")
@pytest.mark.parametrize("how", ["stock", "shim"])
def test_sglang_plugin_is_needed_for_verl_to_list_the_arguments_of_the_server(tmp_path, how):
    said = _runs_with_shim_alone(tmp_path, _FIELDS, how)
    assert how == "shim" or "must be called with a dataclass type or instance" in said


_CLIENT = """
import sys
from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter
from epfsdp2.rollout.sglang import shims

if sys.argv[1] == "shim":
    assert shims.add_sessions() and shims.add_sessions()
AsyncHttpServerAdapter(model_path="none", host="127.0.0.1", port=1, launch_server=False)
"""


@_since("0.5.21", "this SGLang has no sessions of updates")
@pytest.mark.parametrize("how", ["stock", "shim"])
def test_sglang_sessions_shim_is_needed_for_verl_to_make_a_client_of_the_server(tmp_path, how):
    said = _runs_with_shim_alone(tmp_path, _CLIENT, how)
    assert how == "shim" or "abstract" in said and "begin_weight_update" in said


def _run(folders, tp, *options):
    """Return the output of ``tests.support.rollout.sglang_engine``."""
    words = [sys.executable, "-m", "tests.support.rollout.sglang_engine", "--tp", str(tp), *options, *map(str, folders)]
    environment = os.environ | sglang_environment() | {"VERL_PLATFORM": "cpu"}
    environment["PYTHONPATH"] = str(ROOT)
    if tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("01"[:tp])
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [done.stderr[-3000:]]
    assert done.returncode == 0, line
    return json.loads(line.removeprefix("RESULT"))


# The family, the workers, and whether experts are whole, with which SGLang can't compute on a CPU.
CASES = [
    *((family, 2, False) for family in SIZES),
    *((family, 1, False) for family in ("qwen3_moe", "deepseek_v3")),
    ("qwen3_moe", 2, True),
    *(pytest.param(f, 1, False, marks=pytest.mark.long) for f in SIZES if f not in ("qwen3_moe", "deepseek_v3")),
    pytest.param("deepseek_v3", 2, True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "tp", "whole_experts"), CASES)
def test_sglang_after_three_syncs_of_slices_equals_a_fresh_one(tmp_path, family, tp, whole_experts):
    options = ["--ep"] if whole_experts else []
    folders = [save(family, tmp_path / str(seed), seed, **SIZES[family]) for seed in range(4)]
    held, (incomplete, too_large, twice) = _run(folders, tp, *options)
    ((fresh,), _) = _run(folders[-1:], tp, *options)
    assert held[2] == fresh and held[3] == fresh
    assert held[0] != held[1] != held[2]
    assert "did not receive every element" in incomplete
    assert too_large
    assert "was sent twice" in twice
