"""The table of ``make parity``: a row per family, with the worst error per mesh and the run that it is of."""

import subprocess
from datetime import date
from pathlib import Path

import torch
import transformers

from tests.parity import families
from tests.parity.compare import BOUND, WORLD, Row

__all__ = ["BOUNDS", "read", "rows_by_family", "write"]

BOUNDS = f"bound {BOUND['float32']:.0e}, in float64 {BOUND['float64']:.0e}"
_LAST = ("bf16 runs", "note", "run")


def rows_by_family(rows: list[Row]) -> dict[str, dict[str, str]]:
    """Return family -> column -> cell: the worst error per mesh, then bfloat16 and a note."""
    table = {}
    for name in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == name]
        low, full = ([r for r in mine if (r.case.dtype == "bfloat16") == is_low] for is_low in (True, False))
        meshes = dict.fromkeys(r.case.mesh for r in full)
        cells = {mesh: _cell([r for r in full if r.case.mesh == mesh]) for mesh in meshes}
        refused = sum(bool(row.refused) for row in mine)
        notes = ["in float64" * any(r.case.dtype == "float64" for r in mine), families.ALL[name].note]
        notes.append(f"{refused} refused: the dim does not divide" * bool(refused))
        cells["bf16 runs"] = "" if not low else "no" if low[0].failed else "yes"
        table[name] = cells | {"note": "; ".join(filter(None, notes))}
    return table


def _cell(rows: list[Row]) -> str:
    if any(row.failed for row in rows):
        return "FAILED"
    ran = [row for row in rows if not row.refused]
    return f"{max(row.worst for row in ran):.0e}" if ran else "refused"


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return family -> column -> cell of a written page; empty if there is none."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")] if path.exists() else []
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] or [[], []]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def write(rows: list[Row], path: Path, about: str, summary: str) -> None:
    """Write the page. Cells of families and meshes that this run left out stay as they were."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    run = f"transformers {transformers.__version__}, torch {torch.__version__}, {date.today()}, {commit.stdout.strip()}"
    table = read(path)
    for name, cells in rows_by_family(rows).items():
        table[name] = table.get(name, {}) | {key: cell for key, cell in cells.items() if cell} | {"run": run + about}
    meshes = dict.fromkeys(key for cells in table.values() for key in cells if key not in _LAST)
    head = ["family", *meshes, *_LAST]
    names = [name for name in families.ALL if name in table]
    lines = [[name, *(table[name].get(key, "") for key in head[1:])] for name in names]
    packed, settings = "", "over expert shard dims 0 and 1, checkpointing none, full and (once) selective"
    if all(row.case.packed for row in rows):
        packed = f" ARGS='--packed --results {path.stem}'"
        settings = "with the sequences of a rank packed into one row"
    text = [
        "# Every family against the plain Hugging Face model",
        "",
        f"`make parity{packed}` writes this file. The last run: {summary}.",
        "",
        "Cells are the worst relative error of any logits, gradient, gradient norm, parameter and AdamW moment over",
        f"two steps, {settings}. {WORLD} ranks",
        "(`dp_replicate x ep_fsdp x ep`, and `x etp` where it is not 1) are compared with one process on the",
        f"concatenated batch, one sequence in each row, in float32 where float64 is not noted; {BOUNDS}.",
        "",
        *(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)),
    ]
    path.write_text("\n".join(text) + "\n")
