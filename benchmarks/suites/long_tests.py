"""Runs the tests that ``make test`` leaves out for their time, and writes what came of each.

    python -m benchmarks.suites.long_tests [pytest's arguments]

writes ``benchmarks/results/test_long.json`` and ``test_long.md``. What of an earlier run was not run again stays, with
the commit that it ran at, while there is such a test.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.machine import machine
from benchmarks.tables import ROOT, newest, write_table

COLUMNS = ["test", "outcome", "seconds", "commit"]


def outcomes(report: Path) -> list[dict]:
    """Name, outcome and seconds of every test in a JUnit report."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found.append({"test": name, "outcome": bad or "passed", "seconds": float(case.get("time", 0))})
    return found


def existing() -> set[str]:
    """Names of all long tests."""
    command = [sys.executable, "-m", "pytest", "-m", "long", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-m", "long", f"--junitxml={report}", *sys.argv[1:]]
        status = subprocess.run(pytest, cwd=ROOT, check=False).returncode
        if not report.exists():
            return status
        where, names = machine(), existing()
        # Read last, for another run of these may have written its own meanwhile.
        found = newest("test_long", "tests", "test", [{**row, "commit": where["commit"]} for row in outcomes(report)])
    tests = [found[name] for name in sorted(found.keys() & names)]
    cells = [[f"`{r['test']}`", r["outcome"], f"{r['seconds']:.0f}", r["commit"][:9]] for r in tests]
    result, on = {"machine": where, "tests": tests}, f"{where['cpu']}, {where['cores']} cores"
    text = ["The last run of each."]
    write_table("test_long", result, "The long tests", "make test-long", on, text, COLUMNS, cells)
    return status


if __name__ == "__main__":
    sys.exit(main())
