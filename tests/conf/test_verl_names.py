"""Each name that verl registers or reads as a setting is shown by a test, refused, or explained in verl_names.txt.

A newer verl's names are found by reading its files:
``python -c "from tests.conf.test_verl_names import *; print(unlisted(Path('FOLDER/verl')))"``.
"""

import ast
import re
from pathlib import Path

import pytest
import verl
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = "trainer/config"
# Lists of ours that have each of verl's keys: the engine's and the roles' in test_role_settings.py, ``model.lora`` in
# test_lora_settings.py.
WAYS = ("shown", "logged", "refused", "apart", "unrun")


def _trees(root, pattern):
    return [ast.parse(path.read_text()) for path in sorted(root.glob(pattern))]


def _texts(node):
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def registered(root, pattern, *decorators, of=None):
    """Names in decorators of classes and functions: texts, members of verl's enumeration, or one keyword's texts."""
    names = set()
    for tree in _trees(root, pattern):
        for call in (call for node in ast.walk(tree) for call in getattr(node, "decorator_list", ())):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in decorators:
                continue
            for value in call.args if of is None else [key.value for key in call.keywords if key.arg == of]:
                names |= _texts(value)
                if isinstance(value, ast.Attribute):
                    names.add(value.attr.lower())
    return names


def compared(root, path, variable):
    """Texts that a variable or attribute is compared with."""
    tests = [node for tree in _trees(root, path) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    return {text for test in tests if ast.unparse(test.left).split(".")[-1] == variable for text in _texts(test)}


def fields(root, path, *classes):
    kinds = [node for tree in _trees(root, path) for node in ast.walk(tree) if getattr(node, "name", "") in classes]
    return {ast.unparse(entry.target) for kind in kinds for entry in kind.body if isinstance(entry, ast.AnnAssign)}


def keys(root, file, node=None):
    found = yaml.safe_load((root / CONFIG / f"{file}.yaml").read_text())
    return set(found if node is None else found[node]) - {"_target_", "defaults", "hydra"}


def files(root, *patterns):
    return {str(path.relative_to(root).with_suffix("")) for pattern in patterns for path in root.glob(pattern)}


def names_of(root):
    """Return verl's names by their kind, given the folder of its package."""
    rewards = [("experimental/reward_loop/reward_manager/*.py", "register", "register_manager")]
    rewards += [("workers/reward_manager/*.py", "register")]
    groups = files(root / CONFIG, "*.yaml", "*/*.yaml")
    actor = fields(root, "workers/config/actor.py", "ActorConfig", "FSDPActorConfig")
    distillation = ("DistillationConfig", "DistillationLossConfig", "DistillationTeacherModelConfig")
    return {
        "config file": {name for name in groups if not name.startswith("_generated")}
        | files(root, "experimental/*/config/*.yaml"),
        "program": files(root, "trainer/*.py", "experimental/*/main_*.py", "experimental/*/*_main.py")
        - {"trainer/__init__", "trainer/constants_ppo"},
        "trainer": registered(root, "trainer/ppo/v1/*.py", "register_trainer"),
        "policy loss": registered(root, "trainer/ppo/*.py", "register_policy_loss"),
        "advantage": registered(root, "trainer/ppo/*.py", "register_adv_est"),
        "KL": compared(root, "trainer/ppo/core_algos.py", "kl_penalty"),
        "loss aggregation": compared(root, "trainer/ppo/core_algos.py", "loss_agg_mode"),
        "distillation loss": registered(root, "trainer/distillation/*.py", "register_distillation_loss"),
        "reward manager": set().union(*(registered(root, *where) for where in rewards)),
        "agent loop": registered(root, "experimental/agent_loop/*.py", "register"),
        "tool parser": registered(root, "experimental/agent_loop/*.py", "ToolParser.register"),
        "checkpoint engine": registered(root, "checkpoint_engine/*.py", "CheckpointEngineRegistry.register"),
        "rollout": set(re.findall(r'Registry\.register\("(\w+)"', (root / "workers/rollout/replica.py").read_text())),
        "engine": registered(root, "workers/engine/**/*.py", "EngineRegistry.register", of="backend"),
        "profiler": compared(root, "utils/profiler/profile.py", "_tool"),
        "skip": registered(root, "utils/skip/*.py", "register_skip"),
        "schedule of requests": registered(root, "experimental/**/*.py", "register_policy"),
        "platform": registered(root, "plugin/platform/*.py", "PlatformRegistry.register", of="platform"),
        "learning rate": compared(root, "workers/engine/fsdp/transformer_impl.py", "lr_scheduler_type"),
        "model setting": fields(root, "workers/config/model.py", "HFModelConfig"),
        "MTP setting": fields(root, "workers/config/model.py", "MtpConfig"),
        "checkpoint setting": fields(root, f"{CONFIG}/config.py", "CheckpointConfig"),
        "optimizer setting": fields(root, "workers/config/optimizer.py", "OptimizerConfig", "FSDPOptimizerConfig"),
        "rollout correction": fields(root, f"{CONFIG}/algorithm.py", "RolloutCorrectionConfig"),
        "algorithm setting": fields(root, f"{CONFIG}/algorithm.py", "AlgoConfig"),
        "distillation setting": fields(root, "workers/config/distillation.py", *distillation),
        "rollout setting": fields(root, "workers/config/rollout.py", "RolloutConfig"),
        "actor setting": actor,
        "critic setting": fields(root, "workers/config/critic.py", "CriticConfig", "FSDPCriticConfig") - actor,
        "trainer setting": keys(root, "ppo_trainer", "trainer") | keys(root, "sft_trainer_engine", "trainer"),
        "data setting": keys(root, "data/legacy_data") | keys(root, "sft_trainer_engine", "data"),
        "node": keys(root, "ppo_trainer") | keys(root, "sft_trainer_engine"),
    }


def listed():
    """Return the rows of verl_names.txt: kind, way, tests or reason, and the names with the text that shows each."""
    text = (ROOT / "tests/conf/verl_names.txt").read_text()
    rows = [row.split(" | ") for row in re.sub(r"\n +", " ", text).splitlines() if row and not row.startswith("#")]
    return [
        (kind, *way.partition(": ")[::2], {name.partition("=")[0]: name.partition("=")[2] for name in names.split()})
        for kind, way, names in rows
    ]


def unlisted(root):
    """Return ``(missing, superfluous)`` names of verl_names.txt, each as ``kind: name``."""
    ours = [f"{kind}: {name}" for kind, _, _, names in listed() for name in names]
    theirs = {f"{kind}: {name}" for kind, names in names_of(root).items() for name in names}
    return sorted(theirs - set(ours)), sorted(set(ours) - theirs) + sorted(
        {name for name in ours if ours.count(name) > 1}
    )


def test_verls_names_are_listed_each_once():
    assert unlisted(Path(verl.__file__).parent) == ([], [])
    assert all(names_of(Path(verl.__file__).parent).values()), "verl keeps some of them elsewhere now"


@pytest.mark.parametrize(
    ("kind", "way", "why", "names"), listed(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_verls_names_that_are_listed_are_in_the_tests_that_show_them(kind, way, why, names):
    assert way in WAYS and why, (kind, way)
    if way in ("apart", "unrun"):
        return
    paths = {file: list((ROOT / "tests").rglob(f"test_{file}.py")) for file in why.split(", ")}
    page, text = (ROOT / "docs/compatibility.md").read_text(), "".join(p.read_text() for p in sum(paths.values(), []))
    words = {name: rf"(?<!\w){re.escape(shown or name)}(?!\w)" for name, shown in names.items()}
    assert [name for name, word in words.items() if not re.search(word, text)] == []
    assert [file for file in paths if not paths[file] or (way == "shown" and not re.search(rf"\b{file}\b", page))] == []


def test_walk_over_verl_finds_a_new_name(tmp_path):
    for folder, text in {"trainer/ppo": "@register_policy_loss('mine')\ndef f(): ...", "utils/skip": "x = 1"}.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "new.py").write_text(text)
    assert registered(tmp_path, "trainer/ppo/*.py", "register_policy_loss") == {"mine"}
    assert registered(tmp_path, "utils/skip/*.py", "register_skip") == set()
