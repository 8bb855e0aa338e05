"""``docs/flow.md`` and the pictures at the top of the packages name what is there, hop by hop."""

import importlib
import re
from functools import reduce

import pytest

from tests.support.imports import ROOT

PAGE = (ROOT / "docs" / "flow.md").read_text()
# A file, and the function or class in it that the page means; a cell of a table, a space or a new line between them.
NAMED = re.compile(r"`([\w/]+)\.py`[ |\n]+`([\w.]+)`")
HOPS = {
    title: re.findall(r"^\| \d \| `([\w/]+)\.py` \| `([\w.]+)` \|", part, flags=re.M)
    for title, part in ((part.partition("\n")[0], part) for part in PAGE.split("\n## ")[1:])
}


def found(file: str, name: str):
    """What a name of the page means.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    if "/vllm/" in file:
        pytest.importorskip("vllm")
    module = importlib.import_module(f"epfsdp2.{file.replace('/', '.')}")
    named = reduce(getattr, name.split("."), module)
    if named.__module__ != module.__name__:  # inherited, or imported from where it is
        raise AttributeError(f"{name} is in {named.__module__}")
    return named


@pytest.mark.parametrize(("file", "name"), NAMED.findall(PAGE))
def test_name_of_the_page_is_there(file, name):
    assert callable(found(file, name))


def test_a_name_that_has_moved_is_seen():
    with pytest.raises(AttributeError):
        found("engine/build", "parallelize_and_load")
    with pytest.raises(AttributeError, match="is in epfsdp2.engine.parallelize"):
        found("engine/build", "parallelize")
    with pytest.raises(ImportError):
        found("engine/actor", "EPFSDP2Engine")


@pytest.mark.parametrize(("flow", "package"), [("An update", "engine"), ("A sync", "rollout")])
def test_picture_of_a_package_has_the_hops_of_the_page_in_order(flow, package):
    assert list(HOPS) == ["An update", "A sync"] and len(HOPS[flow]) == 3
    picture = (ROOT / package / "__init__.py").read_text()
    files = [f"{file}.py".removeprefix(f"{package}/") for file, _ in HOPS[flow]]
    line = next(line for line in picture.splitlines() if files[-1] in line)
    assert re.findall(r"[\w/]+\.py", line) == files
    for _, name in HOPS[flow]:
        assert set(name.split(".")) <= set(re.findall(r"\w+", picture)), name


def test_hops_of_an_update_lead_from_one_to_the_next():
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
