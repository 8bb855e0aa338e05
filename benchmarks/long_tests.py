"""Runs the tests that ``make test`` leaves out for their time, and writes what came of each.

    python benchmarks/long_tests.py [pytest's arguments]

writes ``benchmarks/results/test_long.json`` and ``test_long.md``.
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


def as_markdown(result: dict) -> str:
    where = result["machine"]
    rows = [f"| `{r['test']}` | {r['outcome']} | {r['seconds']:.0f} |" for r in result["tests"]]
    return "\n".join(
        [
            "# The long tests",
            "",
            "Written by `make test-long`.",
            "",
            f"{where['cpu']}, {where['cores']} cores; {where['date']}; commit {where['commit'][:12]}.",
            "",
            "| test | outcome | seconds |",
            "|---|---|---|",
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
        result = {"machine": machine(), "tests": outcomes(report)}
    (RESULTS / "test_long.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "test_long.md").write_text(as_markdown(result))
    return status


if __name__ == "__main__":
    sys.exit(main())
