"""Rules for imports between rooms, and for the contents of the repository.

Each wall is a function from imports to violations, and is tested with an import that violates it.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import pytest

from tests.support import fast
from tests.support.imports import ROOMS, ROOT, Import, imports, room_of, sources

MOST_LINES, MOST_FILES = 400, 10
TORCH = frozenset({"torch"})
MODEL = frozenset({"torch", "transformers"})
# Packages that a room may import besides the standard library and this package. Entries of files replace their room's.
THIRD_PARTIES: dict[str, frozenset[str]] = {
    "recipes": MODEL | {"numpy", "rich", "safetensors", "tqdm"},
    "recipes/doctor": MODEL | {"psutil", "rich", "safetensors"},
    "recipes/doctor/on_ray.py": frozenset({"ray", "torch"}),
    "recipes/doctor/rates.py": MODEL | {"flash_attn_interface"},
    "recipes/gpu": frozenset({"yaml"}),
    "recipes/mismatch": MODEL | {"matplotlib", "omegaconf", "rich", "safetensors"},
    "recipes/resilient": frozenset({"yaml"}),
    "recipes/resilient/callback.py": frozenset({"torch", "verl"}),
    "recipes/quickstart": MODEL | {"pandas", "rich", "tokenizers", "yaml"},
    "recipes/launch": TORCH | {"psutil"},
    "recipes/quickstart/sampler.py": frozenset({"verl"}),
    "recipes/plan": MODEL | {"huggingface_hub", "matplotlib", "numpy", "omegaconf", "rich"},
    "conf": frozenset({"hydra", "omegaconf"}),
    "engine/config/roles.py": frozenset({"hydra", "verl"}),
    "engine/integration": MODEL | {"tensordict", "verl"},
    "engine/preflight": MODEL | {"huggingface_hub", "pyarrow"},
    "engine/build.py": TORCH,
    "engine/invariance.py": TORCH,
    "engine/planner": MODEL,
    "engine/planner/flops.py": frozenset({"verl"}),
    "engine/checkpoint": MODEL | {"huggingface_hub", "safetensors", "tqdm"},
    "engine/survivors.py": TORCH | {"safetensors"},
    "engine/mtp": TORCH,
    "engine/mtp/responses.py": TORCH | {"tensordict"},
    "engine/optim": TORCH,
    "engine/config/settings.py": TORCH,
    # verl's side of a sync: its server adapter, its bucketed sender, its checkpoint engines, its worker extension.
    "rollout/remote": TORCH,
    "rollout/remote/checkpoint_engine.py": TORCH | {"ray", "verl"},
    "engine/quantise/triton_blocks.py": TORCH | {"triton"},
    "rollout/sync.py": TORCH,
    "rollout/sent_tensors.py": TORCH,
    "rollout/plan": frozenset({"numpy"}),
    "rollout/sglang": TORCH | {"sglang", "verl"},
    "rollout/vllm": TORCH | {"verl", "vllm"},
    "rollout/vllm/adapter.py": TORCH | {"ray", "verl", "zmq"},
    "rollout/bitwise": TORCH | {"vllm"},
    "rollout/transport": TORCH | {"zmq"},
    "rollout/transport/exchange.py": TORCH | {"numpy"},
    "rollout/transport/sender.py": TORCH | {"verl", "zmq"},
    "rollout/layout": TORCH,
    "rollout/layout/server.py": TORCH | {"verl"},
    "engine/lora": TORCH | {"safetensors"},
    "engine/quantise": TORCH,
    "engine/parallelize.py": TORCH,
    "engine/fsdp": MODEL,
    "engine/dense": TORCH,
    "engine/dense/triton_norms.py": TORCH | {"triton"},
    "engine/dense/triton_rotary.py": TORCH | {"triton"},
    "engine/head": TORCH,
    "engine/head/triton_tiles.py": TORCH | {"triton"},
    "engine/packing": MODEL,
    "engine/packing/varlen.py": TORCH | {"flash_attn_interface"},
    "engine/model": MODEL,
    "engine/model/safetensors_files.py": TORCH | {"safetensors"},
    "engine/moe/outside": TORCH,
    "engine/moe/router": TORCH,
    "engine/moe": TORCH,
    "engine/moe/deepep.py": TORCH | {"deep_ep"},
    "engine/moe/collectives": TORCH,
    "engine/moe/gemm": TORCH,
    "engine/moe/gemm/persistent_launch.py": TORCH | {"triton"},
    "engine/moe/gemm/triton_backend.py": TORCH | {"triton"},
    "engine/moe/gemm/triton_gemms.py": frozenset({"triton"}),
    "engine/moe/gemm/triton_persistent.py": frozenset({"triton"}),
    "engine/moe/gemm/triton_rows.py": frozenset({"triton"}),
    "engine/moe/gemm/triton_tiles.py": TORCH | {"triton"},
    "engine/topology": TORCH,
    "engine/config/values.py": TORCH,
    "engine/cpu": TORCH | {"psutil", "verl", "vllm"},
    "engine/compat": MODEL | {"packaging"},
    "engine/compat/triton_cache.py": frozenset({"triton"}),
    "engine/wrap_forward.py": TORCH,
    "engine/model_files.py": frozenset({"huggingface_hub", "transformers"}),
}
# compat has versions and vLLM's private names. The others describe a weight: shards, names in a checkpoint, adapters.
OF_THE_ENGINE_FOR_THE_ROLLOUT = tuple(
    f"engine/{room}" for room in ("topology", "model", "lora", "quantise", "cpu", "compat", "errors.py")
)
# The operators that trainer and rollout share.
SHARED_OPERATORS = tuple(f"engine/{room}" for room in ("head", "moe", "moe/gemm", "packing", "wrap_forward.py"))
OF_THE_ENGINE_WITH_A_ROLLOUT = ("engine/integration", "engine/preflight")
WITH_A_PLANNER = ("engine/integration", "engine/preflight", "engine/planner")

SOURCES = sources()
OUTSIDE = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("recipes", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
}
# Parsed before any test runs: on Python 3.11 a finalizer in the middle of ast.parse breaks it (python/cpython#106905).
IMPORTS = list(imports(SOURCES))
OF_RECIPES_AND_BENCHMARKS = list(imports(OUTSIDE))
TESTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
OF_TESTS = list(imports(TESTS))

Wall = Callable[[Iterable[Import]], list[str]]


def _said(found: Import) -> str:
    return f"{found.path}: {found.module}{f':{found.name}' if found.name else ''}"


def third_parties(found: Iterable[Import]) -> list[str]:
    """A room imports only the third-party packages listed for it."""
    broken = []
    for one in found:
        package = one.module.partition(".")[0]
        allowed = THIRD_PARTIES.get(one.path, THIRD_PARTIES.get(room_of(one.path), frozenset()))
        if not one.is_ours and package not in sys.stdlib_module_names and package not in allowed:
            broken.append(_said(one))
    return broken


def downward(found: Iterable[Import]) -> list[str]:
    """A room imports only from rooms below it."""
    return [
        _said(one) for one in found if one.is_ours and ROOMS.index(room_of(one.path)) > ROOMS.index(room_of(one.module))
    ]


def rollout_of_engine(found: Iterable[Import]) -> list[str]:
    """The rollout imports only the listed rooms of the engine."""
    return [
        _said(one)
        for one in found
        if one.path.startswith("rollout/")
        and one.module.startswith("engine/")
        and room_of(one.module) not in OF_THE_ENGINE_FOR_THE_ROLLOUT
        and not (one.path.startswith("rollout/bitwise/") and room_of(one.module) in SHARED_OPERATORS)
    ]


def engine_of_rollout(found: Iterable[Import]) -> list[str]:
    """Only the listed rooms of the engine import the rollout."""
    return [
        _said(one)
        for one in found
        if one.path.startswith("engine/")
        and one.module.startswith("rollout/")
        and room_of(one.path) not in OF_THE_ENGINE_WITH_A_ROLLOUT
    ]


def parallelize(found: Iterable[Import]) -> list[str]:
    """``parallelize`` is imported only where a model is built."""
    return [_said(one) for one in found if one.module == "engine/parallelize.py" and one.path != "engine/build.py"]


def planner(found: Iterable[Import]) -> list[str]:
    """The planner is imported only where a run is planned."""
    return [
        _said(one)
        for one in found
        if room_of(one.module) == "engine/planner"
        and room_of(one.path) not in WITH_A_PLANNER
        and not one.path.startswith("recipes/")
    ]


def public(found: Iterable[Import]) -> list[str]:
    """Private names are not imported."""
    return [
        _said(one)
        for one in found
        if one.is_ours and one.name is not None and one.name.startswith("_") and not one.name.startswith("__")
    ]


def alone(found: Iterable[Import]) -> list[str]:
    """Tests don't import tests: shared code is in ``tests/support``, or beside them in files without tests."""
    broken = []
    for one in found:
        names = f"{one.module}.{one.name or ''}".split(".")
        of_a_test = names[0] == "tests" and any(name.startswith("test_") or name == "conftest" for name in names)
        of_benchmarks = names[0] == "benchmarks" and not one.path.startswith("tests/benchmarks/")
        if of_a_test or of_benchmarks:
            broken.append(_said(one))
    return broken


WALLS = (third_parties, downward, rollout_of_engine, engine_of_rollout, parallelize, planner)


def too_long(files: Mapping[str, str]) -> list[str]:
    return [path for path, text in files.items() if len(text.splitlines()) > MOST_LINES]


def too_full(files: Iterable[str]) -> list[str]:
    """Return folders with too many files, not counting ``__init__.py``."""
    count = Counter(path.rpartition("/")[0] for path in files if not path.endswith("/__init__.py"))
    return [folder for folder, number in count.items() if number > MOST_FILES]


def underscores_read(files: Mapping[str, str]) -> list[str]:
    """Return private names read from modules of this package."""
    broken = []
    for path, text in files.items():
        modules = {one.module for one in imports({path: text}) if one.is_ours and one.name is None}
        tree = ast.parse(text)
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if any(module.endswith((f"/{alias.name}.py", f"/{alias.name}/__init__.py")) for module in modules)
        }
        broken += [
            f"{path}: {node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
            if node.attr.startswith("_") and not node.attr.startswith("__")
        ]
    return broken


def test_walls_list_every_file_in_a_room():
    assert {room_of(path) for path in SOURCES} == set(ROOMS)
    assert {room_of(one.module) for one in IMPORTS if one.is_ours} <= set(ROOMS)
    assert {path for path in THIRD_PARTIES if path.endswith(".py")} <= set(SOURCES)


@pytest.mark.parametrize("wall", WALLS, ids=lambda wall: wall.__name__)
def test_wall_between_packages_lets_imports_go_downward_only(wall):
    assert wall(IMPORTS) == []


def test_wall_of_recipes_and_benchmarks_has_no_import_of_an_underscore():
    assert public(OF_RECIPES_AND_BENCHMARKS) == [] and underscores_read(OUTSIDE) == []


def test_wall_of_tests_has_no_import_of_a_test_or_benchmarks():
    assert alone(OF_TESTS) == []


def test_wall_of_sizes_holds_for_every_file_and_room():
    measured = SOURCES | OUTSIDE | TESTS
    assert too_long(measured) == [] and too_full(measured) == []


@pytest.mark.parametrize(
    ("wall", "path", "text"),
    [
        (third_parties, "engine/fsdp/ulysses.py", "import vllm"),
        (third_parties, "rollout/transport/exchange.py", "def f():\n    from verl.protocol import DataProto"),
        (downward, "engine/topology/mesh.py", "from ..fsdp.options import ShardingOptions"),
        (downward, "rollout/layout/slice_names.py", "if True:\n    from ..transport import exchange"),
        (downward, "engine/errors.py", "from epfsdp2.engine import config"),
        (rollout_of_engine, "rollout/sent_tensors.py", "from ..engine.fsdp import wrap_plan"),
        (engine_of_rollout, "engine/config/roles.py", "from ...rollout import servers"),
        (engine_of_rollout, "engine/planner/memory.py", "import epfsdp2.rollout.sync"),
        (parallelize, "engine/integration/engine.py", "from ..parallelize import parallelize"),
        (planner, "engine/checkpoint/load.py", "from ..planner.memory import peak"),
        (public, "benchmarks/update/step.py", "from epfsdp2.engine.planner.memory import _states"),
        (public, "recipes/plan/cli.py", "from .tables import _mesh"),
        (alone, "tests/engine/test_order.py", "from tests.engine.moe.test_dispatch import EXPERTS"),
        (alone, "tests/engine/test_order.py", "from .test_dispatch import EXPERTS"),
        (alone, "tests/engine/test_order.py", "from benchmarks import step"),
    ],
)
def test_wall_sees_an_import_that_breaks_it(wall: Wall, path, text):
    assert len(wall(list(imports({path: text})))) == 1


@pytest.mark.parametrize("wall", WALLS, ids=lambda wall: wall.__name__)
def test_wall_lets_through_what_is_allowed(wall: Wall):
    allowed = {
        "engine/build.py": "import os\nimport torch\nfrom .parallelize import parallelize\n",
        "engine/preflight/run.py": "from ..planner.memory import peak\nfrom ...rollout import servers\n",
        "rollout/sync.py": "from ..engine.topology.mesh import Meshes\nfrom .layout import transfer_plan\n",
        "recipes/plan/cli.py": "from ...engine.planner.memory import peak\n",
    }
    assert wall(list(imports(allowed))) == []


def test_fast_tests_name_tests_that_exist():
    missing = []
    for listed in (*fast.FAST, *fast.LEFT_OUT):
        path, _, name = listed.partition("::")
        if f"def {name.partition('[')[0]}" not in TESTS.get(path, ""):
            missing.append(listed)
    assert missing == []


def test_wall_sees_a_long_file_a_full_room_and_an_underscore_that_is_read():
    assert too_long({"engine/a.py": "x = 1\n" * MOST_LINES, "engine/b.py": "x = 1\n" * (MOST_LINES + 1)}) == [
        "engine/b.py"
    ]
    full = [f"engine/{name}/{i}.py" for name, files in (("a", MOST_FILES), ("b", MOST_FILES + 1)) for i in range(files)]
    assert too_full([*full, "engine/a/__init__.py"]) == ["engine/b"]
    text = "from epfsdp2.engine.planner import memory as m\nm._states, m.peak, m.__file__"
    assert underscores_read({"benchmarks/x.py": text}) == ["benchmarks/x.py: m._states"]


def test_distribution_installs_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"([\w.]+)"', text[text.index("packages = [") : text.index("[tool.setuptools.package-dir]")])
    folders = {path.rpartition("/")[0] for path in SOURCES if path.endswith("/__init__.py")}
    assert sorted(listed) == sorted(f"epfsdp2.{folder.replace('/', '.')}" for folder in folders)


def test_core_imports_without_verl_and_vllm():
    core = [
        "engine.build",
        "engine.checkpoint.load",
        "engine.checkpoint.state",
        "engine.model.hf_names",
        "engine.optim.clip",
        "engine.optim.multi_optimizer",
        "engine.parallelize",
        "engine.preflight.run",
        "engine.cleanup",
        "rollout.plan.transfer_plan",
        "rollout.servers",
        "rollout.transport.exchange",
    ]
    code = (
        "import sys\n"
        + "".join(f"import epfsdp2.{name}\n" for name in core)
        + "assert not {'verl', 'vllm', 'ray', 'hydra'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_old_name_of_the_worker_extension_leads_to_the_code():
    pytest.importorskip("vllm")
    old, new = (importlib.import_module(f"epfsdp2.rollout.{name}") for name in ("vllm_worker", "vllm.worker"))
    assert old.WeightSyncExtension is new.WeightSyncExtension


def _forwards_replaced(files: Mapping[str, str]) -> list[str]:
    """Return files that assign the forward of a module or a class."""
    return [
        path
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "forward"
    ]


def test_wall_of_forwards_replaces_them_in_one_place():
    # vision.py restores a class's own forward after verl's patch; blocks.py gives a block a forward of its own.
    # causal_head.py traces a model's use of logits on meta, and restores both forwards.
    head = ["engine/head/causal_head.py"] * 2
    others = [*head, "engine/model/vision.py", "engine/moe/outside/blocks.py"]
    assert _forwards_replaced(SOURCES) == [*others, "engine/wrap_forward.py"]


def test_wall_of_todos_finds_none():
    marks = ("TODO", "FIXME", "XXX", "NotImplementedError")
    assert not [f"{path}: {mark}" for path, text in SOURCES.items() for mark in marks if mark in text]
