"""``make gpu-check`` runs whole on a machine without a GPU, in the interpreter and over gloo."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import psutil
import pytest
import torch
import verl.trainer.config
from hydra import compose, initialize_config_dir
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import gpu_attention, gpu_check, gpu_rows, gpu_run, gpu_sections
from epfsdp2.engine.packing import varlen
from tests.support.engine.varlen_kernels import varlen_on_a_cpu

pytestmark = pytest.mark.skipif(gpu_rows.HAS_GPU, reason="there is a GPU: `make gpu-check` does more")


ROOT = Path(__file__).parents[3]
ON_THE_MACHINE = ("torch", "triton", "transformers", "psutil", "rich")  # as the list of wheels says


def _with_what_they_need(packages: Iterable[str]) -> set[str]:
    found, left = set(), list(packages)
    while left:
        name = canonicalize_name(left.pop())
        with contextlib.suppress(PackageNotFoundError):
            needs = [] if name in found else map(Requirement, requires(name) or [])
            left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        found.add(name)
    return found


def _other_modules() -> list[str]:
    """Name what can be imported here and is neither on such a machine nor carried there, vLLM and Ray among them."""
    wheels = (ROOT / ".ci/gpu_wheels.txt").read_text().splitlines()
    carried = {Requirement(line).name for line in wheels if not line.startswith("#")}
    there = _with_what_they_need(ON_THE_MACHINE) | carried | {"epfsdp2"}
    modules = packages_distributions().items()
    return [name for name, packages in modules if not there & {canonicalize_name(package) for package in packages}]


@pytest.mark.long
def test_gpu_check_of_every_section_holds_on_a_cpu(tmp_path, monkeypatch, capsys):
    others = _other_modules()
    assert {"vllm", "ray", "tensordict", "hydra"} <= set(others) and not {"torch", "zmq", "verl", "numpy"} & set(others)
    # Sections run in processes of their own, which import this first: what is None can't be imported.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({others}))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--results", str(tmp_path)])
    assert gpu_check.main() == 0, capsys.readouterr().out
    lines = [line.split(" | ") for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("| ")]
    rows = [(name.strip("| "), what, holds.strip("| ")) for name, what, *_, holds in lines[2:]]
    assert {name for name, *_ in rows} == gpu_sections.SECTIONS.keys() and "NO" not in {holds for *_, holds in rows}
    judged = {name: [what for section, what, holds in rows if section == name and holds] for name, *_ in rows}
    assert judged["kernels"] == ["float32"]
    assert len(judged["processes"]) == 2 and len(judged["weights"]) == 2 and judged["step"] and judged["nccl"]


def test_gpu_check_section_that_fails_has_its_error_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_sections.SECTIONS, "broken", (gpu_sections.kernels, 120.0))  # only this process knows it
    (row,) = gpu_check.run("broken", tmp_path)
    assert row.holds is False and "KeyError: 'broken'" in row.value


def test_gpu_check_section_without_an_end_is_ended_with_the_processes_that_it_started(tmp_path, monkeypatch):
    section, started = tmp_path / "section", tmp_path / "started"
    section.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}\nwait\n")
    section.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(section))
    monkeypatch.setitem(gpu_sections.SECTIONS, "kernels", (gpu_sections.kernels, 1.0))
    (row,) = gpu_check.run("kernels", tmp_path)
    assert row == gpu_rows.Row("all of it", "did not end within 1 s", "no error", False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.read_text())).wait(10)


def test_gpu_check_without_an_environment_runs_the_code_as_it_is_now(tmp_path):
    for folder in (".ci", "benchmarks/gpu", "engine"):
        (tmp_path / folder).mkdir(parents=True)
    for script in ("gpu_check", "link"):
        shutil.copy(ROOT / ".ci" / script, tmp_path / ".ci")
    (tmp_path / "benchmarks/gpu/gpu_check.py").write_text(
        "import sys\nfrom epfsdp2.engine import code\nprint(code.VALUE, *sys.argv[1:])\n"
    )
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    for value in (1, 2):
        (tmp_path / "engine/code.py").write_text(f"VALUE = {value}\n")
        command = ["bash", tmp_path / ".ci/gpu_check", "kernels"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{value} kernels\n"


@pytest.mark.parametrize("name", gpu_run.RUNS)
def test_command_of_a_gpu_run_composes_to_what_the_run_is(tmp_path, name):
    command = gpu_run.command_of(name, tmp_path, 6, "wide", False, [])
    words = command[command.index("verl.trainer.main_ppo") + 1 :]
    with initialize_config_dir(os.path.dirname(verl.trainer.config.__file__), version_base=None):
        config = compose("ppo_trainer", words)
    rollout, engine = config.actor_rollout_ref.rollout, config.engine
    assert config.trainer.device == "cuda" and config.trainer.n_gpus_per_node == 1 and engine.ep_size == 1
    assert rollout.free_cache_engine and rollout.enable_sleep_mode and rollout.dtype == "bfloat16"
    assert "kv_cache_memory_bytes" not in rollout.engine_kwargs.vllm
    assert (engine.param_offload, engine.optimizer_offload, rollout.enforce_eager) == (
        (name == "B",) * 2 + (name == "A",)
    )
    assert ("compilation_config" in rollout.engine_kwargs.vllm) == (name == "B")


def test_reward_of_a_gpu_run_is_the_share_of_sevens():
    assert [gpu_run.compute_score("", text, "") for text in ("7a77", "", "abc")] == [0.75, 0.0, 0.0]


@pytest.mark.e2e
@pytest.mark.long
def test_gpu_run_without_a_gpu_makes_its_steps():
    # In a process of its own, because it ends all descendants of its process.
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_run", "A", "--cpu", "--size", "tiny", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("A | ")]
    assert [row[1] for row in rows] == ["1", "2"] and all(float(row[3]) < 1e-5 for row in rows)


@pytest.mark.parametrize("torchs, holds", [(1.0, True), (9.0, False)])
def test_gpu_check_of_attention_fails_where_the_kernel_that_is_taken_is_not_the_fastest(monkeypatch, torchs, holds):
    monkeypatch.setattr(gpu_attention, "HAS_GPU", True)
    monkeypatch.setattr(gpu_attention, "TOKENS", 64)
    monkeypatch.setattr(gpu_attention, "LENGTHS", (2, 4, 8, 16, 32, 64))
    monkeypatch.setattr(gpu_attention, "QWEN3_30B", (32, 4, 16, 16))
    monkeypatch.setattr(gpu_attention, "DEEPSEEK", (16, 16, 24, 16))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    seconds = {"sdpa": 3.0, "torch": torchs}
    monkeypatch.setattr(gpu_attention, "seconds_of", lambda call, device: seconds[call.args[0]])
    with varlen_on_a_cpu() as calls:
        rows = list(gpu_attention.attention())
    assert [row.holds for row in rows] == [True] * 3 + [None] * 9 + [holds]
    assert calls[1] == ([7, 1, 12, 3], gpu_attention.WINDOW - 1, 1)
    least = min(seconds.values())
    order = ", ".join(f"{name} {seconds[name] / least:.2f}" for name in sorted(seconds, key=seconds.get))
    entry = ("torch",) if holds else ()
    assert (rows[-1].value, rows[-1].wanted) == (f"{order}; FASTEST (9, 0): {entry}", "torch first")


def test_gpu_check_of_attention_sees_a_kernel_that_computes_otherwise(monkeypatch):
    monkeypatch.setattr(gpu_attention, "HAS_GPU", True)
    real = varlen.attend_row
    monkeypatch.setattr("epfsdp2.engine.packing.attention.attend_row", lambda *args: 1.1 * real(*args))
    with varlen_on_a_cpu():
        assert next(gpu_attention.attention()).holds is False
