"""Runs the tests that ``make test`` leaves out for their time, and writes what came of each.

    python benchmarks/long_tests.py [pytest's arguments]

writes ``benchmarks/results/test_long.json`` and ``test_long.md``. What of an earlier run was not run again stays, with
the commit that it ran at.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from quickstart import HERE, machine

RESULTS = HERE / "results"


def outcomes(report: Path) -> list[dict]:
    """Name, outcome and seconds of every test in a JUnit report."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found.append({"test": name, "outcome": bad or "passed", "seconds": float(case.get("time", 0))})
    return found


def merged(before: list[dict], now: list[dict]) -> list[dict]:
    """The newest outcome of every test, in the order of their names."""
    newest = {row["test"]: row for row in (*before, *now)}
    return [newest[name] for name in sorted(newest)]


def as_markdown(result: dict) -> str:
    where = result["machine"]
    rows = [f"| `{r['test']}` | {r['outcome']} | {r['seconds']:.0f} | {r['commit'][:9]} |" for r in result["tests"]]
    return "\n".join(
        [
            "# The long tests",
            "",
            "Written by `make test-long`.",
            "",
            f"{where['cpu']}, {where['cores']} cores; {where['date']}.",
            "",
            "| test | outcome | seconds | commit |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-m", "long", f"--junitxml={report}", *sys.argv[1:]]
        status = subprocess.run(pytest, cwd=HERE.parent, check=False).returncode
        if not report.exists():
            return status
        where = machine()
        now = [{**row, "commit": where["commit"]} for row in outcomes(report)]
    path = RESULTS / "test_long.json"
    before = json.loads(path.read_text())["tests"] if path.exists() else []
    result = {"machine": where, "tests": merged(before, now)}
    path.write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "test_long.md").write_text(as_markdown(result))
    return status


if __name__ == "__main__":
    sys.exit(main())
