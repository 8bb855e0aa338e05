"""Makes docs/architecture.md of the sources: the rooms in the order of their imports."""

import ast

from tests.support.imports import PACKAGES, ROOMS, sources

__all__ = ["architecture"]

_HEAD = """# Architecture

Generated from the sources by `python docs/generate.py`.

The folders `engine/`, `rollout/`, `conf/` and `recipes/` are the packages `epfsdp2.engine` and so on. They are divided
into rooms: a folder, or a file that stands alone, whose parts change for the same reason. **A room imports only from
rooms below it in the table.** `tests/test_walls.py` checks this, and these rules:

* verl is imported by `engine/config/roles.py`, `engine/integration/`, `engine/cpu/`, and in `rollout/` on verl's side
  of a sync. vLLM is imported by `rollout/vllm/` and `engine/cpu/` alone, SGLang by `rollout/sglang/`.
* `rollout/` imports from the engine `topology`, `model`, `lora`, `quantise`, `cpu`, `compat` and `errors.py` alone. In
  the engine, `integration/` and `preflight/` alone import the rollout.
* `parallelize.py` is imported by `build.py` alone, `planner/` by `integration/`, `preflight/` and the recipes.
* A file has at most 400 lines, a room at most 10 files.

[tour.md](tour.md) follows an update and a weight sync through these rooms.

| room | content |
|---|---|
"""


def architecture() -> str:
    """Return the page."""
    files, rows = sources(), []
    for room in ROOMS:
        about = _about(files[room if room.endswith(".py") else f"{room}/__init__.py"])
        rows.append(f"| `{_shown(room)}` | {about} |")
    return _HEAD + "\n".join(rows) + "\n"


def _shown(room: str) -> str:
    """Return a room as a pattern; a package's own folder has the files that stand in none of its rooms."""
    return f"{room}/*.py" if room in PACKAGES and room != "conf" else room if room.endswith(".py") else f"{room}/"


def _about(text: str) -> str:
    """Return the first line of a docstring."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return docstring.partition("\n")[0].replace("``", "`").replace("|", "\\|")
