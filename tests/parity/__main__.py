"""``python -m tests.parity``: every family on every mesh against the plain model, as a table."""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.parity import families
from tests.parity.compare import BOUND, WORLD, Case, Row, cases, compare, fast_case, packed_cases
from tests.parity.newer_families import REFUSED
from tests.support.ranks import run_ranks

_BOUNDS = f"Bound {BOUND['float32']:.0e}, in float64 {BOUND['float64']:.0e}"
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
    minutes = (time.monotonic() - start) / 60
    console.print(_table(names, rows))
    good = all(row.good for row in rows)
    console.print(_summary(rows, minutes))
    if not asked.fast:
        _write(rows, minutes, RESULTS / asked.results, {"settings": "one of each mesh"} if asked.once else {})
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


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.case.mesh for row in rows if row.case.dtype != "bfloat16"))


def _lines(names: list[str], rows: list[Row]) -> list[list[str]]:
    """Return a line per family: the worst error per mesh over dims and checkpointing, bfloat16, a note."""
    lines = []
    for name in names:
        mine = [row for row in rows if row.family == name]
        line = [name]
        for mesh in _columns(rows):
            line.append(_cell([r for r in mine if r.case.mesh == mesh and r.case.dtype != "bfloat16"]))
        low = [r for r in mine if r.case.dtype == "bfloat16"]
        line.append("" if not low else "no" if low[0].failed else "yes")
        refused = sum(bool(r.refused) for r in mine)
        notes = ["in float64"] if any(r.case.dtype == "float64" for r in mine) else []
        notes.append(families.ALL[name].note)
        notes += [f"{refused} refused: the dim does not divide"] if refused else []
        lines.append([*line, "; ".join(note for note in notes if note)])
    return lines


def _cell(rows: list[Row]) -> str:
    if any(row.failed for row in rows):
        return "FAILED"
    ran = [row for row in rows if not row.refused]
    return f"{max(row.worst for row in ran):.0e}" if ran else "refused" if rows else ""


def _table(names: list[str], rows: list[Row]) -> Table:
    table = Table(title=f"Worst relative error, dp_replicate x ep_fsdp x ep (x etp) on {WORLD} ranks ({_BOUNDS})")
    for heading in ["family", *_columns(rows), "bf16 runs", "note"]:
        table.add_column(heading)
    for line in _lines(names, rows):
        table.add_row(*line)
    return table


def _summary(rows: list[Row], minutes: float) -> str:
    refused, failed = sum(bool(r.refused) for r in rows), sum(not r.good for r in rows)
    worst = max((r.worst for r in rows), default=0.0)
    return f"{len(rows)} cases, {failed} failed, {refused} refused, worst {worst:.1e}, {minutes:.0f} min"


def _write(rows: list[Row], minutes: float, results: Path, more: dict[str, str]) -> None:
    """Write the results, with ``more`` facts of this run; rows of earlier runs stay unless they ran again."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    about = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "minutes": round(minutes),
        **more,
    }
    mine = {(row.family, row.case.mesh) for row in rows}
    path, runs = results.with_suffix(".json"), []
    for run in json.loads(path.read_text())["runs"] if path.exists() else ():
        known = [row for row in run["rows"] if row["family"] in families.ALL]
        kept = [row for row in known if (row["family"], row["mesh"]) not in mine]
        if kept:
            runs.append({**run, "families": sorted({row["family"] for row in kept}), "rows": kept})
    runs.append({**about, "families": sorted({name for name, _ in mine}), "rows": [row.as_json() for row in rows]})
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    every = [Row.of_json(row) for run in runs for row in run["rows"]]
    names = [name for name in families.ALL if any(row.family == name for row in every)]
    head = ["family", *_columns(every), "bf16 runs", "note"]
    table = [head, ["---"] * len(head), *_lines(names, every)]
    settings, packed = "over expert shard dims 0 and 1, checkpointing none and full, and once selective", ""
    if all(row.case.packed for row in every):
        packed = f" ARGS='--packed --results {results.name}'"
        settings = "the sequences of a rank packed into one row, those of the plain model in one row each"
    text = [
        "# Every family against the plain Hugging Face model",
        "",
        f"Float32 where float64 is not noted, {WORLD} ranks (`dp_replicate x ep_fsdp x ep`, and `x etp` where it is",
        "not 1), against one process on the concatenated batch: the worst relative error of any logits, gradient,",
        f"gradient norm, parameter and AdamW moment over two steps, {settings}. "
        f"{_BOUNDS}. {_summary(every, sum(run['minutes'] for run in runs))}. Dense models have no `ep`.",
        "",
        *(_run_in_words(run, len(runs) > 1) for run in runs),
        "",
        f"`make parity{packed}` writes this file.",
        "",
        *("| " + " | ".join(line) + " |" for line in table),
    ]
    if set(names) & set(families.NEWER):
        text += ["", *(f"* {name} is refused: {why}" for name, why in REFUSED.items())]
    results.with_suffix(".md").write_text("\n".join(text) + "\n")


def _run_in_words(run: dict, one_of_several: bool) -> str:
    about = ", ".join(f"{key} {value}" for key, value in run.items() if key not in ("rows", "families"))
    some = f"{', '.join(run['families'][:4])}{' ...' if len(run['families']) > 4 else ''}: " if one_of_several else ""
    return f"* {some}{about}"


if __name__ == "__main__":
    sys.exit(main())
