"""Makes docs/architecture.md of the sources: the rooms in the order of their imports, and their sizes."""

import ast

from tests.support.imports import PACKAGES, ROOMS, room_of, sources

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

| room | content | lines |
|---|---|---|
"""
_EXAMPLE = """
## How a slice of `gate_up_proj` reaches tensor-parallel rank 3

The example is Qwen3-30B-A3B on 16 trainer ranks with `ep_size=8`, and a vLLM with tensor parallelism 4. A layer's
`gate_up_proj` is `[128, 1536, 2048]`, gate above up.

1. `engine/fsdp/unit.py::Unit.cuts` says that dim 0 is cut over `ep` and then over `ep_fsdp`. Each rank holds 8 experts,
   `[8, 1536, 2048]`. `rollout/plan/senders.py::senders_of` computes this for all ranks at once.
2. `rollout/servers.py::target_slices` says what worker 3 keeps: rows 576 to 768 of every gate, and 1344 to 1536 of
   every up. They are rows 0 to 192 and 192 to 384 of vLLM's `w13_weight`, `[128, 384, 2048]`.
3. `rollout/plan/parameters.py::bundles_of` finds that `gate_up_proj` alone fills `w13_weight`.
   `rollout/plan/transfer_plan.py::make_transfer_plan` puts it into a round, whole or in parts of every n-th row.
4. `rollout/plan/routes.py::route_of` computes, once for each round, the rows that a rank sends and that its worker
   gets.
5. `rollout/transport/exchange.py::Exchange.run` gathers rows into messages, sends them in one all-to-all, and gathers
   the received rows into `w13_weight`, all 128 experts of it.
6. `rollout/vllm/adapter.py::send_weights` copies it into a bucket that both processes map. Its name is made by
   `rollout/layout/slice_names.py::slice_name`.
7. `rollout/vllm/reload.py::Reload.load` copies it to the memory of `w13_weight` and counts its elements. A sync ends
   with an error unless every element has arrived.
"""


def architecture() -> str:
    """Return the page. Lines are rounded to hundreds, so that most changes leave it as it is."""
    files, rows = sources(), []
    for room in ROOMS:
        inside = [path for path in files if room_of(path) == room]
        about = _about(files[room if room.endswith(".py") else f"{room}/__init__.py"])
        lines = sum(len(files[path].splitlines()) for path in inside)
        rows.append(f"| `{_shown(room)}` | {about} | {_hundreds(lines)} |")
    total = sum(len(text.splitlines()) for text in files.values())
    end = f"\n{len(files)} files in {len(ROOMS)} rooms, {_hundreds(total)} lines.\n"
    return _HEAD + "\n".join(rows) + "\n" + end + _EXAMPLE


def _hundreds(lines: int) -> str:
    return "under 100" if lines < 100 else f"{round(lines, -2):,}"


def _shown(room: str) -> str:
    """Return a room as a pattern; a package's own folder has the files that stand in none of its rooms."""
    return f"{room}/*.py" if room in PACKAGES and room != "conf" else room if room.endswith(".py") else f"{room}/"


def _about(text: str) -> str:
    """Return the first line of a docstring."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return docstring.partition("\n")[0].replace("``", "`").replace("|", "\\|")
