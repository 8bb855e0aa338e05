"""All checks for one visit to a machine with a GPU, in under ten minutes.

    python -m benchmarks.gpu.gpu_check [SECTION ...] [--results FOLDER]

Needs torch, Triton, transformers, and one file of verl; no network, no vLLM, no Ray. ``make gpu-wheels`` collects the
packages that such a machine may lack. Each section runs in a process of its own with a time limit, and one that fails
has its error in the table. With a GPU the table is written to ``benchmarks/results/gpu.md``. Without one the sections
run in Triton's interpreter and over gloo.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu.gpu_rows import Row
from benchmarks.gpu.gpu_sections import SECTIONS
from benchmarks.tables import RESULTS, judged, report

_TAIL = 1500  # characters of a failed section's output


def run(name: str, folder: Path) -> list[Row]:
    """Run a section in a process of its own; what it printed last becomes a row if it fails."""
    limit, out = SECTIONS[name][1], folder / f"{name}.json"
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment |= {"TRITON_INTERPRET": "1", "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_check", "--one", name, "--out", str(out)]
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
            failure = "" if process.returncode == 0 else said[-_TAIL:]
        except subprocess.TimeoutExpired:
            failure = f"did not end within {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
    rows = [Row(**row) for row in json.loads(out.read_text())] if out.exists() else []
    return rows + ([Row("all of it", failure, "no error", False)] if failure else [])


def cells(name: str, row: Row) -> dict[str, str]:
    measured = " ".join(row.value.split()).replace("|", "/")
    return {"section": name, "what": row.what, "measured": measured, "wanted": row.wanted, **judged(row.holds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--results", type=Path, help="write the table there, with or without a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        rows = []
        for row in SECTIONS[asked.one][0]():
            rows.append(asdict(row))
            asked.out.write_text(json.dumps(rows))  # as they come: the section may fail
        return 0
    if unknown := set(asked.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    console, began, lines = Console(width=160), time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.sections or SECTIONS:
            console.print(f"{time.monotonic() - began:4.0f} s: {name}: {SECTIONS[name][0].__doc__}")
            lines += [cells(name, row) for row in run(name, Path(folder))]
    took, gpu = time.monotonic() - began, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    folder = asked.results or (RESULTS if torch.cuda.is_available() and not asked.sections else None)
    text = [f"{gpu}. All of it took {took / 60:.1f} minutes."]
    return report("gpu", "On a GPU", "make gpu-check", ("torch",), text, lines, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
