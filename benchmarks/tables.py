"""The table of a benchmark: printed, and written to ``benchmarks/results`` with machine, versions and commit."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

__all__ = ["BOUND", "RESULTS", "ROOT", "judged", "markdown", "report"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BOUND = "holds"
"""The column that ``judged`` fills."""


def judged(holds: bool | None) -> dict[str, str]:
    """Return the last cell of a row: whether its bound holds; empty for a row without a bound (None)."""
    return {BOUND: "" if holds is None else "yes" if holds else "NO"}


def report(
    name: str,
    heading: str,
    command: str,
    packages: Sequence[str],
    text: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    below: Sequence[str] = (),
    folder: Path | None = RESULTS,
) -> int:
    """Print a table and write it to ``folder/<name>.md``.

    Args:
        command: the command that writes the file.
        packages: distributions whose versions matter to the figures.
        text: lines between the machine and the table.
        rows: cells by column; the first row has all columns in their order.
        below: lines below the table.
        folder: None to print only.

    Returns:
        The exit status: 1 if a row's bound does not hold.
    """
    lines = [f"# {heading}", "", f"Written by `{command}`.", "", _machine(packages), "", *text, ""]
    lines += [*markdown(rows), *below]
    print("\n".join(lines))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    return int(any(row.get(BOUND) == "NO" for row in rows))


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table in Markdown; cells that a row lacks are empty."""
    columns = [*rows[0]]
    lines = (columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows))
    return [f"| {' | '.join(line)} |" for line in lines]


def _machine(packages: Sequence[str]) -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), platform.machine())
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    date, commit = f"{datetime.now(timezone.utc):%Y-%m-%d}", git.stdout.strip()[:12] or "unknown"
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores; {versions}; {date}; commit {commit}."
