"""Makes docs/architecture.md of the sources: rooms in the order of their imports, their sizes, and who imports whom.

python docs/import_graph.py            # write it
python docs/import_graph.py --check    # status 1 where it is not what would be written
"""

import argparse
import ast
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.support.imports import PACKAGES, ROOMS, imports, room_of, sources  # noqa: E402

__all__ = ["architecture"]

_PAGE = ROOT / "docs" / "architecture.md"
_HEAD = """# Architecture

Generated from the sources by `python docs/generate.py`, or by `python docs/import_graph.py` alone.

The folders `engine/`, `rollout/`, `conf/` and `recipes/` are the packages `epfsdp2.engine` and so on. They are divided
into rooms: a folder, or a file that stands alone, of what changes for the same reason. The table has them from the top
to the bottom. **A room imports from those below it, and from no other**; `tests/test_walls.py` holds that, and with it:

* verl is imported by `engine/config.py`, by `engine/integration/`, and on verl's side of a sync in `rollout/`; vLLM by
  `rollout/vllm/` alone. The rest imports without either.
* `rollout/` imports of the engine `topology`, `model`, `lora`, `compat` and `errors.py`; the engine imports the rollout
  in `integration/`, where a run is put together, and in `preflight/`, where it is checked.
* `parallelize.py` is imported by `build.py` alone, and `planner/` by `integration/`, `preflight/` and the recipes.
* No file is longer than 400 lines, and no room has more than 10 files.

How an update and a weight sync run through these rooms is in [flow.md](flow.md).

"""
_COLUMNS = """| room | what it is | files | lines | imports |
|---|---|---|---|---|
"""


def architecture(files: Mapping[str, str] | None = None) -> str:
    """The page. Lines are rounded to hundreds, so that it is the same after most changes."""
    files = sources() if files is None else files
    below: dict[str, set[str]] = {room: set() for room in ROOMS}
    for one in imports(files):
        if one.is_ours and (room := room_of(one.module)) != room_of(one.path):
            below[room_of(one.path)].add(room)
    rows = []
    for room in ROOMS:
        inside = [path for path in files if room_of(path) == room]
        lines = sum(len(files[path].splitlines()) for path in inside)
        hundreds = "under 100" if lines < 100 else f"{round(lines, -2):,}"
        read = ", ".join(f"`{other}`" for other in ROOMS if other in below[room]) or "nothing"
        about = _about(files[room if room.endswith(".py") else f"{room}/__init__.py"])
        rows.append(f"| `{_shown(room)}` | {about} | {len(inside)} | {hundreds} | {read} |")
    total = sum(len(text.splitlines()) for text in files.values())
    upward = [
        f"`{one.path}`"
        for one in imports(files)
        if one.is_ours and ROOMS.index(room_of(one.path)) > ROOMS.index(room_of(one.module))
    ]
    end = (
        f"\n{len(files)} files in {len(ROOMS)} rooms, {round(total, -2):,} lines. Imports upward: "
        f"{', '.join(upward) or 'none'}.\n"
    )
    return _HEAD + _COLUMNS + "\n".join(rows) + "\n" + end


def _shown(room: str) -> str:
    """A package's own folder has the files that stand in none of its rooms."""
    return f"{room}/*.py" if room in PACKAGES and room != "conf" else room if room.endswith(".py") else f"{room}/"


def _about(text: str) -> str:
    """The first line of a docstring."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return docstring.partition("\n")[0].replace("``", "`").replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is up to date")
    if not parser.parse_args().check:
        _PAGE.write_text(architecture())
    elif not _PAGE.exists() or _PAGE.read_text() != architecture():
        print("not up to date: architecture.md; run python docs/import_graph.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
