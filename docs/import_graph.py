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
  `rollout/vllm/` alone, SGLang by `rollout/sglang/`. The rest imports without either.
* `rollout/` imports of the engine `topology`, `model`, `lora`, `quantise`, `compat` and `errors.py`; the engine
  imports the rollout in `integration/`, where a run is put together, and in `preflight/`, where it is checked.
* `parallelize.py` is imported by `build.py` alone, and `planner/` by `integration/`, `preflight/` and the recipes.
* No file is longer than 400 lines, and no room has more than 10 files.

How an update and a weight sync run through these rooms is in [flow.md](flow.md).

"""
_COLUMNS = """| room | what it is | files | lines | imports |
|---|---|---|---|---|
"""
_QUESTIONS = """
## Two questions of a newcomer

### Where is the gradient of an expert divided, and why by that?

By the number of all ranks, `world`, in FSDP's reduction of the experts' unit. The way there:

1. `engine/parallelize.py` `parallelize`, step 6, gives every unit of the wrap plan one factor, and invariant 1 at the
   top of that file says why it is the same for experts and the rest.
2. `engine/fsdp/unit.py` `Unit.divide_factor` is that factor.
3. `engine/parallelize.py` `divide_gradient` passes it to FSDP, with a sum as the reduction where a division inside of
   it is not exact; `engine/fsdp/single_rank.py` `keep_gradients` divides where `ep == world`, since FSDP has
   nothing to reduce there.

The loss is a mean over `world` ranks. An expert's gradient is a sum over the tokens of all ranks, and takes two
steps: the backward of the dispatch (`engine/moe/dispatch.py` `dispatch`) sends the tokens' gradients of the `ep`
ranks of an EP group to the rank that has the expert, which adds them up; FSDP's reduce-scatter adds the `world / ep`
such ranks, and would divide by their number, so that they came out `ep` times too large. Divided by `world`, experts
and the rest are means over the same ranks. `tests/engine/test_exactness.py` compares every gradient with that of the
plain model in one process, and shows that FSDP's own factor fails by orders of magnitude.

### How does a slice of `gate_up_proj` reach tensor-parallel rank 3?

Qwen3-30B-A3B on 16 trainer ranks with `ep_size=8`, into vLLM with tensor parallelism 4. `gate_up_proj` of a layer is
`[128, 1536, 2048]`, gate above up.

1. What a trainer rank holds: `engine/fsdp/unit.py` `Unit.cuts` says that dim 0 is cut over `ep` and then over
   `ep_fsdp`, so that each rank has 8 experts, `[8, 1536, 2048]`. `rollout/plan/senders.py` `senders_of` has it for all
   ranks at once.
2. What worker 3 keeps: `rollout/servers.py` `target_slices` says rows 576 to 768 of every expert's gate
   and 1344 to 1536 of its up, which are rows 0 to 192 and 192 to 384 of vLLM's `w13_weight`, `[128, 384, 2048]`.
3. What is sent together: `rollout/plan/parameters.py` `bundles_of` finds that `gate_up_proj` alone fills `w13_weight`.
   `rollout/plan/transfer_plan.py` `make_transfer_plan` puts it into a round, whole or in parts of every n-th row.
4. Where the rows go: `rollout/plan/routes.py` `route_of` gives a rank, once for each round, the positions of what it
   sends and of what its worker gets.
5. The bytes move in `rollout/transport/exchange.py` `Exchange.run`: one gather of rows fills the messages, one
   all-to-all sends them, one gather of rows puts `w13_weight` together, all 128 experts of it.
6. `rollout/vllm/adapter.py` `send_weights` copies it into a bucket that both processes map, under a name of
   `rollout/layout/slice_names.py` `slice_name`.
7. `rollout/vllm/reload.py` `Reload.load` copies it to the memory of `w13_weight`, and `rollout/vllm/reload.py`
   counts its elements: a sync ends with an error unless every element has arrived.
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
    return _HEAD + _COLUMNS + "\n".join(rows) + "\n" + end + _QUESTIONS


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
