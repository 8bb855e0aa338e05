"""What the quickstart costs on this machine: seconds per phase and step, and the peak memory of all its processes.

    python -m benchmarks.training.quickstart [--output FOLDER] [-- <options of the quickstart>]

writes ``benchmarks/results/quickstart.json`` and ``quickstart.md``. Memory is the proportional set size (PSS: shared
pages counted once, split among those that map them) summed over the process tree; it is sampled, so a peak shorter
than the interval can be missed. CPU seconds are those of all processes, which other work on the machine changes less
than it does seconds; the load tells whether there was any. Set-up of the environment is not part of the figures.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import TreeMemory, machine
from benchmarks.tables import RESULTS

_GIB = 1 << 30


def measure(output: Path, options: list[str], interval_seconds: float) -> dict:
    """Run the quickstart once.

    Raises:
        RuntimeError: the quickstart failed; a failed run's figures are nobody's.
    """
    command = [sys.executable, "-m", "epfsdp2.recipes.quickstart", "--output", str(output), *options]
    started, load = time.monotonic(), os.getloadavg()[0]
    process = subprocess.Popen(command)
    memory = TreeMemory(process.pid, interval_seconds)
    memory.start()
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        memory.end()
    if status != 0:
        raise RuntimeError(f"the quickstart ended with status {status}")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "options": options,
        "wall_seconds": time.monotonic() - started,
        "cpu_seconds": spent.ru_utime + spent.ru_stime,
        "load_before": load,
        "peak_pss_gib": memory.peak_bytes / _GIB,
        "processes_at_peak": memory.peak_processes,
        **json.loads((output / "summary.json").read_text()),
    }


def as_markdown(result: dict) -> str:
    """One table a person reads."""
    per_step, run, where = result["run"]["seconds_per_step"], result["run"], result["machine"]
    rows = [
        ("whole quickstart, s", f"{run['wall_seconds']:.0f}"),
        ("CPU seconds of all processes", f"{run['cpu_seconds']:.0f}"),
        ("processes that wanted a core when it started", f"{run['load_before']:.1f}"),
        *((f"phase {name}, s", f"{seconds:.0f}") for name, seconds in run["seconds"].items() if name != "total"),
        ("GRPO steps", f"{run['steps']}"),
        *((f"{name}, s per step", f"{seconds:.2f}") for name, seconds in per_step.items()),
        ("tokens per second", f"{run['tokens_per_second']:.0f}"),
        ("peak memory of all processes (PSS), GiB", f"{run['peak_pss_gib']:.1f}"),
        ("reward, first and last tenth of the steps", f"{run['first_reward']:.3f}, {run['last_reward']:.3f}"),
        ("largest rollout_probs_diff_mean", f"{run['worst_probs_diff']:.1e}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return (
        "# quickstart\n\nWritten by `python -m benchmarks.training.quickstart`.\n\n"
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB; Python {where['python']}, {versions}; "
        f"commit {where['commit'][:12]}, {where['date']}.\n\n| | |\n|---|---|\n{table}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="the quickstart's folder, which must not be there yet; one in /tmp if not given"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two samples of memory")
    parser.add_argument("options", nargs="*", help="options of the quickstart, after --")
    arguments = parser.parse_args()
    if arguments.output is not None and arguments.output.exists():
        parser.error(f"--output {arguments.output} is there already; the quickstart would take another")
    with tempfile.TemporaryDirectory() as folder:
        run = measure(arguments.output or Path(folder) / "quickstart", arguments.options, arguments.interval)
    result = {"machine": machine(), "run": run}
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "quickstart.json").write_text(json.dumps(result, indent=2) + "\n")
    (arguments.results / "quickstart.md").write_text(as_markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
