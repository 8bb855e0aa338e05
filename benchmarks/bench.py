"""Every benchmark, one after the other, and one table of what came of each.

    python -m benchmarks.bench [NAME ...]

What of an earlier run was not run again stays in the table, with the commit that it ran at.
"""

import argparse
import subprocess
import sys
import time

from benchmarks.machine import machine
from benchmarks.tables import ROOT, newest, write_table

# In this order: what is short comes first. The module below this folder, and what it has to reach, which its exit
# status tells.
BENCHMARKS = {
    "memory": ("update.memory", "peak memory of a step as the arithmetic says"),
    "checkpoint": ("weights.checkpoint", "loading and exporting within a shard and a layer of memory"),
    "features": ("update.features", "router replay R3 at most 3 % of a step"),
    "packing": (
        "update.packing",
        "1.7 and 3 x with 4 and 16 sequences in a row of 4,096 tokens, or 0.9 of no attention; 1.6 x padded",
    ),
    "experts": ("experts.compare", "no slower than transformers' grouped_mm, with 0.4 of what it keeps"),
    "step": (
        "update.step",
        "2 x verl's fsdp2 engine with ep over all ranks, nowhere below 0.95 x; bytes on the wire equal the plan's",
    ),
    "growth": ("update.growth", "figures alone"),
    "weight_sync": (
        "weights.weight_sync",
        "2 x verl's export at TP 1, 3 x at TP 2; the trainer's part 1.3 x its passes; memory",
    ),
}
COLUMNS = ["benchmark", "what it has to reach", "reached", "minutes", "date", "commit"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    names = parser.parse_args().names or [*BENCHMARKS]
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    rows = []
    for name in names:
        module, bound = BENCHMARKS[name]
        print(f"== {name}: {bound}", flush=True)
        began = time.monotonic()
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], cwd=ROOT).returncode
        rows.append({"name": name, "status": status, "minutes": (time.monotonic() - began) / 60})
    for row in rows:
        print(f"{row['name']}: {'reached' if row['status'] == 0 else 'NOT reached'}, {row['minutes']:.1f} min")
    _write(rows)
    return int(any(row["status"] != 0 for row in rows))


def _write(now: list[dict]) -> None:
    where = machine()
    found = newest("bench", "rows", "name", [row | {key: where[key] for key in ("date", "commit")} for row in now])
    rows = [found[name] for name in BENCHMARKS if name in found]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    on = f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB; Python {where['python']}, {versions}"
    lines = [
        [
            f"[{row['name']}]({row['name']}.md)",
            BENCHMARKS[row["name"]][1],
            "yes" if row["status"] == 0 else "no",
            f"{row['minutes']:.1f}",
            row["date"],
            row["commit"][:12],
        ]
        for row in rows
    ]
    text = ["The last run of each, which has a table of its own."]
    write_table("bench", {"machine": where, "rows": rows}, "All benchmarks", "make bench", on, text, COLUMNS, lines)


if __name__ == "__main__":
    sys.exit(main())
