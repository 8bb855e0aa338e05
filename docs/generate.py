"""Writes the pages of docs/ that are made from other files: settings.md, compatibility.md, architecture.md, loop.svg.

python docs/generate.py            # write them
python docs/generate.py --check    # status 1 where one is not what would be written
"""

import argparse
import ast
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from draw_loop import loop  # noqa: E402
from import_graph import architecture  # noqa: E402

from tests.features import FEATURES, Feature  # noqa: E402

_YAML = "conf/engine/epfsdp2.yaml"
_NOT_SET = ("_target_", "strategy", "forward_only")  # which no user sets
_SETTINGS = f"""# Settings

Generated from the comments of [{_YAML}](../{_YAML}) by `python docs/generate.py`.

All stand under `engine.` on the command line: `engine.ep_size=8`. Those that verl's FSDP engine has, have its names
and meaning. A value of the wrong kind, a key that does not exist and a combination that can't work end the run on the
driver, before Ray starts, with one paragraph: the setting, its value, the rule, and a value that works.

"""
_ROLES = """
## Settings of one role

Actor, reference policy and critic follow the one top-level `engine` node, and each may have settings of its own. For
a role they count in this order:

| order | where it stands | example |
|---|---|---|
| 1 | the role's own node, in the words of this page | `actor_rollout_ref.ref.engine.param_offload=True` |
| 1 | verl's names for the role | `actor_rollout_ref.ref.fsdp_config.param_offload=True` |
| 2 | `engine`, for every role | `engine.param_offload=True` |
| 3 | the default in the table above | |

The two spellings of a role say the same thing: where they contradict each other the run is refused. verl's names are
`actor_rollout_ref.actor.fsdp_config.*`, `actor_rollout_ref.ref.fsdp_config.*`, `critic.fsdp.*` and
`critic.model.fsdp_config.*`, and beside them `ulysses_sequence_parallel_size`, `pad_to_length`,
`entropy_checkpointing`, `entropy_from_logits_with_chunking` and `entropy_from_logits_chunk_size` of the actor and the
reference, with and without `+`. So verl's own example scripts run with two words added, e.g.

    bash examples/grpo_trainer/run_qwen3_30b_a3b_fsdp.sh engine=epfsdp2 engine.ep_size=8

`strategy=fsdp2` in such a script does not count beside `engine=epfsdp2`. A key of verl's FSDP engine that has no use
here (`wrap_policy`, `forward_prefetch`, `use_orig_params`) is taken with one line that says what happens instead; one
whose meaning can't be kept is refused.

`ep_size` and whatever else concerns experts counts for roles whose model has experts. A dense model, by itself or
beside a Mixture-of-Experts (a dense critic, say), runs by the same recipe as plain FSDP2 and says so in one line; where
no role's model has experts, such a setting is refused.

## Optimizers

They are verl's settings: any of `torch.optim` by `actor_rollout_ref.actor.optim.optimizer=...`, AdamW by default.
`optimizer=Muon` orthogonalises matrices, each expert and its gate and up projections apart, and steps the rest by
AdamW:

    actor_rollout_ref.actor.optim.optimizer=Muon actor_rollout_ref.actor.optim.lr=2e-5 \\
        '+actor_rollout_ref.actor.optim.override_optimizer_config={momentum: 0.95, adamw: {eps: 1e-8}}'
"""
_FEATURES = """# What of verl works

Generated from [tests/features.py](../tests/features.py) by `python docs/generate.py`. Each feature is named with the
tests that show it, under [tests](../tests); those in italics are in `make test-long`, the others in `make test`. All
of them ran on a CPU; which versions they ran with is in [stacks.md](../benchmarks/results/stacks.md). What is refused
ends on the driver, before Ray starts, with one paragraph.

| feature | works | refused | shown by |
|---|---|---|---|
"""


def settings_page() -> str:
    """A table of the YAML: each key, its default, and the comment above it."""
    rows = [f"| `{name}` | {default} | {text} |" for name, default, text in settings((ROOT / _YAML).read_text())]
    return _SETTINGS + "\n".join(["| setting | default | what it does |", "|---|---|---|", *rows]) + "\n" + _ROLES


def settings(text: str) -> list[tuple[str, str, str]]:
    """Dotted name, default and description of every setting.

    Raises:
        ValueError: for a setting without a comment.
    """
    found, comment, parents = [], [], []
    for line in text.splitlines():
        words, indent = line.strip(), len(line) - len(line.lstrip())
        if words.startswith("#"):
            comment.append(words.removeprefix("#").strip())
            continue
        if not words:
            # A comment that a blank line follows is about the file.
            comment = []
            continue
        key, _, value = words.partition(":")
        parents = [*parents[: indent // 2], key]
        if not comment:
            raise ValueError(f"{'.'.join(parents)} has no comment above it")
        if value.strip() and parents[0] not in _NOT_SET:
            default = "null" if (parsed := yaml.safe_load(value)) is None else _plain(parsed)
            found.append((".".join(parents), f"`{default}`", " ".join(comment).replace("|", "\\|").replace("*", "\\*")))
        comment = []
    return found


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def features_page() -> str:
    rows = [f"| {f.name} | {f.works} | {f.refused} | {', '.join(map(_shown, f.tests))} |" for f in FEATURES]
    return _FEATURES + "\n".join(rows) + "\n"


def missing_tests(features: tuple[Feature, ...] = FEATURES) -> list[str]:
    """Of the tests that are named, those that are not there."""
    return [test for feature in features for test in feature.tests if is_long(test) is None]


def is_long(test: str) -> bool | None:
    """Whether it is left out of ``make test``; None where there is no such test."""
    path, _, name = test.partition("::")
    file = ROOT / "tests" / path
    tree = ast.parse(file.read_text() if file.is_file() else "")
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if function is None:
        return None
    of_module = [
        n for n in tree.body if isinstance(n, ast.Assign) and any(ast.unparse(t) == "pytestmark" for t in n.targets)
    ]
    return any("mark.long" in ast.unparse(n) for n in [*of_module, *function.decorator_list])


def _shown(test: str) -> str:
    path, _, name = test.partition("::")
    link = f"[`{name}`](../tests/{path})"
    return f"*{link}*" if is_long(test) else link


PAGES = {
    "settings.md": settings_page,
    "compatibility.md": features_page,
    "architecture.md": architecture,
    "loop.svg": loop,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are not up to date")
    arguments = parser.parse_args()
    if gone := missing_tests():
        print("tests/features.py names tests that are not there:", *gone, sep="\n  ")
        return 1
    stale = []
    for name, page in PAGES.items():
        path = ROOT / "docs" / name
        if arguments.check:
            stale += [name] if not path.exists() or path.read_text() != page() else []
        else:
            path.write_text(page())
    if stale:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
