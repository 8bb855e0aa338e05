"""``python -m tests.parity``: every family on every mesh against the plain model, as a table."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.parity import families, page
from tests.parity.compare import WORLD, Case, Row, cases, compare, fast_case, packed_cases
from tests.support.ranks import run_ranks

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--families", default="", help="names, separated by commas; results of other families are kept")
    parser.add_argument("--fast", action="store_true", help="one case per family; writes no result file")
    parser.add_argument("--packed", action="store_true", help="packed rows, each mesh once; needs --results")
    parser.add_argument("--results", default="parity", help="name of the result files; use another for other versions")
    parser.add_argument("--meshes", default="", help="meshes to run, as in the table's head: '1 x 2 x 2,1 x 1 x 4'")
    parser.add_argument("--once", action="store_true", help="one setting of each mesh, in turn, instead of all")
    asked = parser.parse_args()
    names = asked.families.split(",") if asked.families else list(families.ALL)
    if asked.packed and "packed" not in asked.results:
        parser.error("packed rows have result files of their own: --packed --results parity_packed")
    unknown = sorted(set(names) - set(families.ALL))
    if unknown:
        parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(families.ALL)}")

    console, rows, start = Console(width=150), [], time.monotonic()
    with Progress(console=console) as progress:
        for i, name in enumerate(progress.track(names, description="Families")):
            todo = [fast_case(i, name)] if asked.fast else packed_cases(name) if asked.packed else cases(name)
            wanted = asked.meshes.split(",") if asked.meshes else {case.mesh for case in todo}
            chosen = [[case for case in todo if case.mesh == mesh] for mesh in _in_order(todo) if mesh in wanted]
            chosen = [[some[i % len(some)]] for some in chosen] if asked.once else chosen
            rows += run_family(name, [case for some in chosen for case in some])
            console.print(_cells(name, [row for row in rows if row.family == name]), highlight=False)
    console.print(_table(rows))
    good = all(row.good for row in rows)
    summary = _summary(rows, (time.monotonic() - start) / 60)
    console.print(summary)
    if not asked.fast:
        page.write(rows, RESULTS / f"{asked.results}.md", ", one setting of each mesh" * asked.once, summary)
    return 0 if good else 1


def _in_order(todo: list[Case]) -> list[str]:
    """Return the meshes of some cases, each once."""
    return list(dict.fromkeys(case.mesh for case in todo))


def run_family(name: str, todo: list[Case]) -> list[Row]:
    """Run all cases; a case that kills its ranks is a failed row, and the rest run on new ranks."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = families.save(name, Path(folder) / name)
        while todo:
            results = Path(folder) / "results.jsonl"
            results.write_text("")
            crash = ""
            try:
                run_ranks(compare, WORLD, [(name, checkpoint, todo)], results, timeout=1800)
            except Exception as error:  # reported as a failed row
                crash = " ".join(str(error).split())[-300:]
            lines = [json.loads(line) for line in results.read_text().splitlines()]
            done = [Row.of_json(line["row"]) for line in lines if "row" in line]
            rows += done
            if crash and len(done) < len(todo):
                rows.append(Row(name, todo[len(done)], failed=crash))
                todo = todo[len(done) + 1 :]
            else:
                todo = []
    return rows


def _cells(name: str, rows: list[Row]) -> str:
    bad = [row for row in rows if not row.good]
    note = families.ALL[name].note
    worst = max((row.worst for row in rows), default=0.0)
    failures = "".join(f"\n    {row.case}: {row.failed}" for row in bad)
    return f"{name}: {len(rows) - len(bad)} of {len(rows)} good, worst {worst:.1e} {note}{failures}"


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"Worst relative error, dp_replicate x ep_fsdp x ep (x etp) on {WORLD} ranks ({page.BOUNDS})")
    found = page.rows_by_family(rows)
    head = list(dict.fromkeys(key for cells in found.values() for key in cells))
    for heading in ["family", *head]:
        table.add_column(heading)
    for name, cells in found.items():
        table.add_row(name, *(cells.get(key, "") for key in head))
    return table


def _summary(rows: list[Row], minutes: float) -> str:
    refused, failed = sum(bool(r.refused) for r in rows), sum(not r.good for r in rows)
    worst = max((r.worst for r in rows), default=0.0)
    return f"{len(rows)} cases, {failed} failed, {refused} refused, worst {worst:.1e}, {minutes:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
