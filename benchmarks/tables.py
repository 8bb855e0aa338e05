"""How a benchmark's result is kept: figures as JSON, and a table with the machine that they hold for as Markdown."""

import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "ROOT", "last_section", "newest", "rows_of", "section_of", "write_table"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def write_table(
    name: str,
    result: dict,
    heading: str,
    made_by: str,
    machine: str,
    text: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    more: Sequence[str] = (),
) -> None:
    """Write ``results/<name>.json`` and ``<name>.md``.

    Args:
        result: what the JSON holds; its entry ``machine`` says at which date and commit.
        machine: what of the machine matters to these figures.
        text: lines between it and the table.
        more: lines below the table.
    """
    lines = [*section_of(f"# {heading}", result, made_by, machine, text, columns, cells), *more]
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


def section_of(
    heading: str,
    result: dict,
    made_by: str,
    machine: str,
    text: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
) -> list[str]:
    """The lines of a table with its heading; arguments are as in ``write_table``."""
    where = result["machine"]
    return [
        heading,
        "",
        f"Written by `{made_by}`.",
        "",
        f"{machine}; {where['date']}; commit {where['commit'][:12]}.",
        "",
        *text,
        "",
        *rows_of(columns, cells),
    ]


def last_section(
    name: str,
    heading: str,
    made_by: str,
    text_of: Callable[[dict], Sequence[str]],
    columns: Sequence[str],
    cells_of: Callable[[dict], Sequence[str]],
    more: str = "",
) -> list[str]:
    """The section of the last run, from ``results/<name>.json``; no line where there was none.

    Args:
        text_of: returns the lines between the machine and the table, of the result.
        cells_of: returns the cells of a row.
        more: a package, such as ``SGLang``, whose version the result has under its name in lower case.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    where = result["machine"]
    on = f"{where['cpu']}, {where['cores']} cores; torch {where['versions']['torch']}"
    on += f", {more} {result[more.lower()]}" if more else ""
    return ["", *section_of(heading, result, made_by, on, text_of(result), columns, [*map(cells_of, result["rows"])])]


def rows_of(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def newest(name: str, entry: str, key: str | Sequence[str], now: Sequence[dict]) -> dict[Any, dict]:
    """Of what ``results/<name>.json`` holds under ``entry``, and of ``now``, the newest row of each ``key`` or keys."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text())[entry] if path.exists() else []
    of = operator.itemgetter(key) if isinstance(key, str) else operator.itemgetter(*key)
    return {of(row): row for row in (*before, *now)}
