"""The table of a benchmark: printed, and written to ``benchmarks/results`` with machine, versions and commit."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

__all__ = ["RESULTS", "ROOT", "markdown", "report"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def report(
    name: str,
    heading: str,
    command: str,
    packages: Sequence[str],
    text: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    below: Sequence[str] = (),
    folder: Path | None = RESULTS,
) -> None:
    """Print a table and write it to ``folder/<name>.md``.

    Args:
        command: the command that writes the file.
        packages: distributions whose versions matter to the figures.
        text: lines between the machine and the table.
        below: lines below the table.
        folder: None to print only.
    """
    lines = [f"# {heading}", "", f"Written by `{command}`.", "", _machine(packages), "", *text, ""]
    lines += [*markdown(columns, rows), *below]
    print("\n".join(lines))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def _machine(packages: Sequence[str]) -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), platform.machine())
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    date, commit = f"{datetime.now(timezone.utc):%Y-%m-%d}", git.stdout.strip()[:12] or "unknown"
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores; {versions}; {date}; commit {commit}."
