"""What a person waits for on a fresh machine: seconds and peak memory of the make targets in a clean clone.

    python -m benchmarks.suites.fresh_clone [--targets setup quickstart test]

clones this repository's HEAD into an empty folder, runs the targets there one after the other with a virtual
environment of its own, and writes their rows of ``benchmarks/results/fresh_clone.json`` and ``fresh_clone.md``.
Packages come through pip as on any machine, so set-up depends on the network.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import TreeMemory, machine
from benchmarks.tables import RESULTS, ROOT

LIMITS = {"setup": 6, "quickstart": 3, "test": 25}  # minutes, of the project's own promise
_GIB = 1 << 30


def measure(clone: Path, target: str) -> dict:
    """Run one make target to its end.

    Raises:
        RuntimeError: it failed; its output has been shown.
    """
    started = time.monotonic()
    process = subprocess.Popen(["make", target], cwd=clone)
    memory = TreeMemory(process.pid, interval_seconds=2.0)
    memory.start()
    status = process.wait()
    memory.end()
    if status != 0:
        raise RuntimeError(f"make {target} ended with status {status}")
    return {"minutes": (time.monotonic() - started) / 60, "peak_pss_gib": memory.peak_bytes / _GIB}


def as_markdown(result: dict) -> str:
    """One table a person reads."""
    where = result["machine"]
    rows = "\n".join(
        f"| `make {target}` | {run['minutes']:.1f} | {LIMITS[target]} | {run['peak_pss_gib']:.1f} "
        f"| {run['commit'][:12]} |"
        for target, run in result["targets"].items()
    )
    return (
        "# A fresh clone\n\nWritten by `python -m benchmarks.suites.fresh_clone`.\n\n"
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB; Python {where['python']}; "
        f"{where['date']}.\n\n"
        f"| | minutes | promised | peak memory (PSS), GiB | commit |\n|---|---|---|---|---|\n{rows}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=LIMITS, default=list(LIMITS), help="make targets, in order")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        clone = Path(folder) / "epfsdp2"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        where = machine()  # now: there may be commits while the targets run
        results = RESULTS / "fresh_clone.json"
        targets = json.loads(results.read_text())["targets"] if results.exists() else {}
        for target in arguments.targets:
            # Written after each: one that fails does not take the others' figures with it.
            targets[target] = measure(clone, target) | {"commit": where["commit"]}
            result = {"machine": where, "targets": targets}
            results.write_text(json.dumps(result, indent=2) + "\n")
            results.with_suffix(".md").write_text(as_markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
