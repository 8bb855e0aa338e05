"""What the README and the docs name is there, and what is generated of them is up to date."""

import contextlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path

import pytest

from epfsdp2.engine.config import engine_settings
from epfsdp2.engine.model.families import IMAGES_UNSUPPORTED, NOT_CAUSAL, UNPACKED_WITH_FLASH
from epfsdp2.engine.preflight import features, run
from epfsdp2.engine.settings.roles import ENGINE_REFUSED, ROLE_REFUSED
from epfsdp2.rollout.vllm import layout
from tests.features import FEATURES, Feature

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
]
GENERATE = runpy.run_path(str(ROOT / "docs/generate.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_tests_and_links_that_exist(page):
    text = page.read_text()
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py\b", text)) <= tests
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_to_sections_that_exist(page):
    for target, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        other = page.parent / target if target else page
        titles = re.findall(r"^#+ (.+)$", other.read_text(), flags=re.M)
        assert section in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, section


def _commands(page, start):
    """Lines of the page, with those that they go on in, from ``start`` on."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(rf"{start}[^`#\n]*", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_commands_of_make_and_modules_that_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for command in _commands(page, r"(?:^ {4}|`)make "):
        assert shlex.split(command.strip(" `"))[1] in targets, command
    for module in re.findall(r"-m (epfsdp2(?:\.\w+)+)", page.read_text()):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("recipe", ["plan.cli", "plan_sync", "quickstart.cli"])
def test_page_names_options_of_recipes_that_exist(recipe):
    module = f"epfsdp2.recipes.{recipe.removesuffix('.cli')}"
    commands = [command for page in PAGES for command in _commands(page, rf"python -m {re.escape(module)} --")]
    assert commands
    for command in commands:
        words = shlex.split(command)[3:]
        # An example may leave a value open, and its end.
        words = ["Qwen3-30B-A3B" if word == "..." else word for word in words[: -1 if words[-1] == "..." else None]]
        ended = pytest.raises(SystemExit, match="0") if "--help" in words else contextlib.nullcontext()
        with ended:
            import_module(f"epfsdp2.recipes.{recipe}").parse(words)


@pytest.mark.parametrize("name", GENERATE["PAGES"])
def test_page_that_is_generated_is_what_the_generator_writes(name):
    assert (ROOT / name).read_text() == GENERATE["PAGES"][name](), "run python docs/generate.py"


def test_features_table_names_tests_that_exist():
    assert GENERATE["missing_tests"]() == []
    gone = Feature("it", "works", "", ("test_tour.py::test_that_never_was", "engine/no_such_file.py::test_it"))
    assert GENERATE["missing_tests"]((gone,)) == list(gone.tests)
    assert all(feature.tests for feature in FEATURES) and len({f.name for f in FEATURES}) == len(FEATURES)


def test_generator_marks_long_tests_by_function_and_by_module():
    long = {name: GENERATE["is_long"](name) for f in FEATURES for name in f.tests if name.startswith("e2e/")}
    assert long["e2e/trainers/test_trainers.py::test_fully_async_trainer_trains"]
    assert not long["e2e/trainers/test_trainers.py::test_sft_trainer_lowers_the_loss"]
    assert long["e2e/trainers/test_dapo.py::test_dapo_run_filters_groups_and_punishes_long_answers"]
    page = (ROOT / "docs/compatibility.md").read_text()
    assert ", *dapo*, " in page, "all long"
    assert "| quickstart, trainers, " in page, "one of them is not"


def test_settings_page_has_a_row_for_every_setting():
    page = (ROOT / "docs" / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)[.\w]*` \| `(.*?)` \|", page, re.MULTILINE))
    assert set(rows) == engine_settings() - {"strategy", "forward_only"}
    assert [rows[name] for name in ("ep_size", "rollout_sync", "router_replay")] == ["1", "auto", "disabled"]


def test_decisions_say_of_all_that_the_code_refuses_by_name_what_to_use_instead():
    tables = [*run._UNSUPPORTED, *ENGINE_REFUSED, *ROLE_REFUSED, *IMAGES_UNSUPPORTED, *NOT_CAUSAL]
    tables += [*UNPACKED_WITH_FLASH, *features._AFTER_THE_HEAD, *features._TOP_K_DISTILLATION, "enable_eplb"]
    tables += [*layout.CLASSES, *layout.CLASS_OF_SLICES, *layout.NOT_SERVED, *layout.WHOLE]
    refused = {name.partition(".")[0] for name in tables} | {"pad_to_length"}
    section = (ROOT / "docs/decisions.md").read_text().partition("## What is refused")[2]
    titles = " ".join(re.findall(r"^\*\*(.+?)\*\*", section, flags=re.MULTILINE | re.DOTALL))
    assert set(re.findall(r"`(\w+)`", titles)) == refused


@pytest.mark.parametrize("page", ["README.md", "docs/compatibility.md", "docs/tour.md"])
def test_page_has_cells_of_at_most_forty_words(page):
    lines = (ROOT / page).read_text().splitlines()
    cells = [cell for line in lines if line.startswith("| ") for cell in re.sub(r"\]\([^)]*\)", "]", line).split("|")]
    assert cells and [cell for cell in cells if len(cell.split()) > 40] == []


def test_readme_says_of_the_experts_layer_what_a_gpu_measured():
    text = (ROOT / "README.md").read_text()
    page = (ROOT / "benchmarks/results/gpu.md").read_text()
    of_theirs = float(re.findall(r"\| triton: forward \+ backward \| .* ([\d.]+) x grouped_mm's", page)[0])
    assert f"[{1 / of_theirs:.1f} and " in text


@pytest.mark.parametrize(
    ("picture", "wanted"),
    [
        ("loop", {"rollout", "reward", "update", "reshard", "epfsdp2"}),
        ("update", {"shard", "load", "dispatch", "combine", "reduce", "clip and step"}),
        ("sync", {"plan", "exchange", "send", "receive", "place"}),
    ],
)
def test_picture_is_well_formed_and_has_its_parts(picture, wanted):
    drawn = ElementTree.fromstring((ROOT / f"docs/{picture}.svg").read_text())
    assert wanted <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}


def test_licence_is_whole_and_goes_into_the_package(tmp_path):
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    for name in ("pyproject.toml", "LICENSE", "README.md", "engine", "rollout", "conf", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "out").mkdir()
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('out'))"
    words = [sys.executable, "-c", code]
    made = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    (carried,) = (tmp_path / "out").glob("*.dist-info/licenses/LICENSE")
    assert carried.read_text() == text
