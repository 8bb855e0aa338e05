"""docs/tour.md, the example of docs/architecture.md, the pictures and the packages' docstrings name what is there."""

import ast
import importlib
import inspect
import re
import textwrap
from functools import reduce

import pytest

from epfsdp2.engine.moe import forward
from epfsdp2.engine.topology.index_ranges import ShardStep, shard_ranges
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.engine.wrap_forward import ORDER
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import target_slices
from tests.support.imports import ROOT

PAGE = (ROOT / "docs" / "tour.md").read_text()
EXAMPLE = (ROOT / "docs" / "architecture.md").read_text().partition("## How a slice")[2]
NAMED = re.compile(r"`([\w/]+)\.py::([\w.]+)`")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
HOPS = {
    title: re.findall(r"^\| \d \| `([\w/]+)\.py::([\w.]+)` \|", SECTIONS[title], flags=re.M)
    for title in ("An update", "A sync")
}


def found(file: str, name: str):
    """Return what ``file::name`` of the page means.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    if "/vllm/" in file:
        pytest.importorskip("vllm")
    package = "" if file.startswith("tests/") else "epfsdp2."
    module = importlib.import_module(package + file.replace("/", "."))
    named = reduce(getattr, name.split("."), module)
    home = getattr(named, "__module__", module.__name__)  # a table has none
    if home != module.__name__:  # inherited, or imported from where it is
        raise AttributeError(f"{name} is in {home}")
    return named


@pytest.mark.parametrize(("file", "name"), dict.fromkeys(NAMED.findall(PAGE) + NAMED.findall(EXAMPLE)))
def test_tour_names_are_where_it_says(file, name):
    assert found(file, name) is not None


def test_tour_names_every_file_with_what_is_meant_in_it():
    for page in (PAGE, EXAMPLE):
        assert not re.findall(r"`(?:engine|rollout|conf)/[\w/]+\.py`", page)


def test_tour_name_that_has_moved_raises():
    with pytest.raises(AttributeError):
        found("engine/build", "parallelize_and_load")
    with pytest.raises(AttributeError, match="is in epfsdp2.engine.parallelize"):
        found("engine/build", "parallelize")
    with pytest.raises(ImportError):
        found("engine/actor", "EPFSDP2Engine")


def test_tour_answers_ten_questions_in_few_files():
    answers = SECTIONS["Ten questions"].split("\n### ")[1:]
    files = [len({file for file, _ in NAMED.findall(answer)}) for answer in answers]
    assert len(files) == 10 and min(files) >= 1 and max(files) == 6
    assert sum(files) / 10 <= 3.5 and f"needs {sum(files) / 10} files on average and six at most" in PAGE


def test_tour_has_the_order_of_wrapped_forwards():
    assert re.findall(r"^\| `(\w+)` \|", SECTIONS["Order of work in a forward"], flags=re.M) == list(ORDER[::-1])


def test_tour_and_the_experts_forward_name_the_same_four_ways():
    rows = re.findall(r"^\| `engine/moe/(\w+)\.py::(\w+)`", SECTIONS["Order of work in a forward"], flags=re.M)
    ways = [(file, name) for file, name in rows if file in ("deepep", "overlap", "fused", "dispatch")]
    assert len(ways) == 4
    assert re.findall(r"^    (\w+)\.(\w+) ", forward.__doc__, flags=re.M) == ways


@pytest.mark.parametrize("picture", ["update", "sync"])
def test_picture_names_files_that_exist(picture):
    files = re.findall(r">((?:engine|rollout)/[\w/]+\.py)<", (ROOT / f"docs/{picture}.svg").read_text())
    assert len(files) > 4 and all((ROOT / file).is_file() for file in files)
    hops = [f"{file}.py" for file, _ in HOPS["An update" if picture == "update" else "A sync"]]
    assert set(files) >= set(hops) - {"engine/integration/engine.py"}


@pytest.mark.parametrize(("flow", "package"), [("An update", "engine"), ("A sync", "rollout")])
def test_docstring_of_a_package_has_the_hops_of_the_tour_in_order(flow, package):
    assert len(HOPS[flow]) == 3
    picture = (ROOT / package / "__init__.py").read_text()
    files = [f"{file}.py".removeprefix(f"{package}/") for file, _ in HOPS[flow]]
    line = next(line for line in picture.splitlines() if files[-1] in line)
    assert re.findall(r"[\w/]+\.py", line) == files
    for _, name in HOPS[flow]:
        assert set(name.split(".")) <= set(re.findall(r"\w+", picture)), name


def test_tour_hops_of_an_update_lead_from_one_to_the_next():
    config, engine, recipe = (found(*hop).__module__ for hop in HOPS["An update"])
    from verl.workers.engine.base import EngineRegistry

    importlib.import_module(config).engine_config()
    registered = EngineRegistry.get_engine_cls("language_model", "epfsdp2")
    assert registered.__mro__[1].__module__ == engine
    build = importlib.import_module("epfsdp2.engine.build")
    assert (
        build.parallelize.__module__ == recipe
        and build.shard_and_load in vars(importlib.import_module(engine)).values()
    )


def _engine_of_verl():
    """The class in engine/integration/engine.py, its definition parsed, and verl's classes that it overrides."""
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp import transformer_impl

    engine = found("engine/integration/engine", "EPFSDP2Engine")
    tree = ast.parse((ROOT / "engine/integration/engine.py").read_text())
    parsed = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == engine.__name__)
    return engine, parsed, (BaseEngine, transformer_impl.FSDPEngine, transformer_impl.FSDPEngineWithLMHead)


def _code(function: ast.FunctionDef) -> list[str]:
    """The lines of a function's body, without its docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return ast.unparse(ast.Module(body, [])).splitlines()


def test_engine_overrides_stand_in_the_order_of_its_docstring_and_are_short():
    engine, parsed, bases = _engine_of_verl()
    methods = [node for node in parsed.body if isinstance(node, ast.FunctionDef)]
    lines = [line for line in engine.__doc__.splitlines() if not re.search(r"\((building|checkpoints)\.py\)", line)]
    order = dict.fromkeys(name for line in lines for name in re.findall(r"(\w+) \*", line))
    assert [method.name for method in methods] == list(order)
    assert all(any(hasattr(base, name) for base in bases) for name in order), "each is a method of verl's"
    # In the source a statement may take more lines than ast.unparse gives it, and a comment takes one.
    assert {method.name: len(_code(method)) for method in methods if len(_code(method)) > 10} == {}
    for method in methods:
        asked = [line for line in _code(method) if "feature" in line and "None" in line and "filter" not in line]
        assert asked == [], f"{method.name} asks whether a feature is there"


def test_engine_docstrings_call_order_is_verls():
    _, _, (base, fsdp, language_model) = _engine_of_verl()
    for function, calls in {
        fsdp.__init__: ["_init_device_mesh"],
        fsdp.initialize: ["_build_model_optimizer", "self.to"],
        base.train_batch: ["optimizer_zero_grad", "forward_backward_batch", "optimizer_step"],
        base.infer_batch: ["no_grad", "forward_backward_batch"],
        fsdp.forward_backward_batch: ["prepare_micro_batches", "forward_step", "backward"],
        language_model.forward_step: ["prepare_model_inputs", "self.module", "prepare_model_outputs", "loss_function("],
    }.items():
        code = "\n".join(_code(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]))
        at = [code.find(name) for name in calls]
        assert -1 not in at and at == sorted(at), (function.__qualname__, dict(zip(calls, at, strict=True)))


def test_parallelize_page_is_short_and_has_seven_steps():
    page = (ROOT / "engine/parallelize.py").read_text()
    assert len(page.splitlines()) < 200
    body = page[page.index("def parallelize") : page.index("def shard_experts")]
    assert re.findall(r"^    # (\d)\. ", body, flags=re.M) == list("1234567")
    assert re.findall(r"^(\d)\. ", page, flags=re.M) == list("123"), "three invariants"


def test_architecture_example_of_a_slice_has_the_rows_that_the_page_says():
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (128, 1536, 2048)
    tensor = TensorSpec(name, shape, 2, (ShardStep(0, "ep", 8), ShardStep(0, "ep_fsdp", 2)))
    topology = Topology.arrange(16, 8)
    held = [shard_ranges(shape, tensor.cuts, topology.coordinate(rank)) for rank in range(topology.fsdp)]
    assert {block.shape for blocks in held for block in blocks} == {(8, 1536, 2048)}
    gate, up = target_slices(tensor, Rollout(tp=4), 3, Heads(32, 4, 128, "qwen3_moe"))
    assert [(part.block.low[1], part.block.high[1], part.at[1]) for part in (gate, up)] == [
        (576, 768, 0),
        (1344, 1536, 192),
    ]
    for rows in ("rows 576 to 768", "1344 to 1536", "rows 0 to 192 and 192 to 384"):
        assert rows in EXAMPLE
