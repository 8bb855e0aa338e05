"""Writes what is made from other files: conf/engine/epfsdp2.yaml, and of docs/ settings.md, families.md,
architecture.md and the pictures.

python docs/generate.py            # write them
python docs/generate.py --check    # status 1 where one is not what would be written
"""

import argparse
import ast
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from family_table import families_page  # noqa: E402
from pictures import loop, sync, update  # noqa: E402
from room_table import architecture  # noqa: E402

from epfsdp2.engine.config.settings import EngineSettings, as_yaml  # noqa: E402

_YAML = "conf/engine/epfsdp2.yaml"
_NOT_SET = ("strategy", "forward_only")  # which no user sets
_UNBROKEN: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
_YAML_HEAD = """\
# Generated from engine/config/settings.py by docs/generate.py. Format, as in verl's configs: comments
# above each field, a blank line between fields, no inline comments. Names are those of verl's engine/fsdp.yaml
# wherever the meaning is the same.

# Target class for this configuration: checks the keys, then builds EPFSDP2EngineConfig
_target_: epfsdp2.engine.config.engine_config
"""
_SETTINGS = f"""# Settings

Generated from [engine/config/settings.py](../engine/config/settings.py), as [{_YAML}](../{_YAML}) is,
by `python docs/generate.py`.

All are given under `engine.`: `engine.ep_size=8`. Settings that verl's FSDP engine has as well keep name and meaning.
Wrong values, unknown keys and combinations that can't work end the run on the driver, before Ray starts. The message
names the setting, its value, the rule, and a value that works.

"""
_ROLES = """
## Settings of one role

Actor, reference policy and critic share the top-level `engine` node. Each may have its own settings; the first one
given counts:

| order | where it stands | example |
|---|---|---|
| 1 | the role's own node, in the words of this page | `actor_rollout_ref.ref.engine.param_offload=True` |
| 1 | verl's names for the role | `actor_rollout_ref.ref.fsdp_config.param_offload=True` |
| 2 | `engine`, for every role | `engine.param_offload=True` |
| 3 | the default in the table above | |

Contradictions between the two spellings of a role are refused. verl's names are
`actor_rollout_ref.actor.fsdp_config.*`, `actor_rollout_ref.ref.fsdp_config.*`, `critic.fsdp.*` and
`critic.model.fsdp_config.*`. Actor and reference also have `ulysses_sequence_parallel_size`, `pad_to_length`,
`entropy_checkpointing`, `entropy_from_logits_with_chunking` and `entropy_from_logits_chunk_size`, with and without `+`.
So verl's own example scripts run with two more words:

    bash examples/grpo_trainer/run_qwen3_30b_a3b_fsdp.sh engine=epfsdp2 engine.ep_size=8

`strategy`, `wrap_policy`, `forward_prefetch` and `use_orig_params` of verl's FSDP engine have no effect, nor have the
actor's `use_prefix_grouper` and `use_rollout_log_probs`. One line says what happens instead. A key whose meaning can't
be kept is refused.

Settings of experts, such as `ep_size`, count for roles whose model has experts. A dense model, e.g. a dense critic,
runs as plain FSDP2. If no role's model has experts, such a setting is refused.

## Optimizers

verl's settings choose them: `actor_rollout_ref.actor.optim.optimizer=...` is any elementwise optimizer of
`torch.optim`, AdamW by default. `optimizer=Muon` [orthogonalises](features.md#optimizers-and-schedules) matrices and
steps the rest by AdamW:

    actor_rollout_ref.actor.optim.optimizer=Muon actor_rollout_ref.actor.optim.lr=2e-5 \\
        '+actor_rollout_ref.actor.optim.override_optimizer_config={momentum: 0.95, adamw: {eps: 1e-8}}'
"""


def settings_page() -> str:
    rows = [f"| `{name}` | `{default}` | {_cell(text)} |" for name, default, text in listed() if name not in _NOT_SET]
    return _SETTINGS + "\n".join(["| setting | default | what it does |", "|---|---|---|", *rows]) + "\n" + _ROLES


def listed() -> Iterator[tuple[str, str, str]]:
    """Yield dotted name, default and help of every setting. The help is the string below it in the source."""
    source = ast.parse((ROOT / "engine/config/settings.py").read_text())
    body = next(n.body for n in source.body if isinstance(n, ast.ClassDef) and n.name == "EngineSettings")
    for declared, text in itertools.pairwise(body):
        if isinstance(declared, ast.AnnAssign):
            name, help_ = ast.unparse(declared.target), " ".join(ast.literal_eval(text.value).split())
            value = getattr(EngineSettings(), name)
            replays = name == "router_replay"
            yield name + ".mode" * replays, value.mode if replays else as_yaml(value), help_


def settings_yaml() -> str:
    """Hydra's file of the settings, in the format of verl's configs."""
    parts = [_YAML_HEAD]
    for dotted, default, text in listed():
        name, _, inner = dotted.partition(".")
        comment = textwrap.fill(text, 120, initial_indent="# ", subsequent_indent="# ", **_UNBROKEN)
        parts.append(f"{comment}\n{name}: {f'{{{inner}: {default}}}' if inner else default}\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


PAGES = {
    _YAML: settings_yaml,
    "docs/settings.md": settings_page,
    "docs/families.md": families_page,
    "docs/architecture.md": architecture,
    "docs/loop.svg": loop,
    "docs/sync.svg": sync,
    "docs/update.svg": update,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are not up to date")
    arguments = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path = ROOT / name
        if arguments.check:
            stale += [name] if not path.exists() or path.read_text() != page() else []
        else:
            path.write_text(page())
    if stale:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
