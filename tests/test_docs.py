"""Pages name files, tests, sections, commands and options that exist; docs/tour.md names code where it is."""

import contextlib
import importlib
import importlib.util
import re
import runpy
import shlex
from functools import reduce
from pathlib import Path

import pytest

from epfsdp2.engine.moe import forward
from epfsdp2.engine.wrap_forward import ORDER
from tests.parity.newer_families import NEWER

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
]
GENERATED = runpy.run_path(str(ROOT / "docs/generate.py"))["PAGES"]
TOUR = (ROOT / "docs/tour.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in TOUR.split("\n## ")[1:]}
NAMED = re.compile(r"`([\w/]+)\.py::([\w.]+)`")
TESTS = {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_docs_have_at_most_120_kilobytes():
    assert sum(page.stat().st_size for page in PAGES if page.parent.name == "docs") <= 120_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_tests_files_and_sections_that_exist(page):
    text = page.read_text()
    assert set(re.findall(r"\btest_\w+\.py\b", text)) <= TESTS
    for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
        other = page.parent / target if target else page
        assert other.exists(), target
        if section:
            titles = re.findall(r"^#+ (.+)$", other.read_text(), flags=re.M)
            assert section in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, section


def _commands(page: Path, start: str) -> list[str]:
    """Commands of a page that begin with ``start``, with their continued lines."""
    return re.findall(rf"{start}[^`#\n]*", page.read_text().replace("\\\n", " "))


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
            importlib.import_module(f"epfsdp2.recipes.{recipe}").parse(words)


@pytest.mark.parametrize("name", GENERATED)
def test_page_that_is_generated_is_what_the_generator_writes(name):
    if name == "docs/families.md" and NEWER:
        pytest.skip("the installed transformers is not the one that the page is made with")
    assert (ROOT / name).read_text() == GENERATED[name](), "run python docs/generate.py"


def test_compatibility_names_a_test_file_for_every_feature():
    rows = re.findall(r"^\| (?!feature)(?!-)(.+) \|$", (ROOT / "docs/compatibility.md").read_text(), flags=re.M)
    for row in rows:
        files = row.rpartition(" | ")[2].replace("*", "").split(", ")
        assert files and {f"test_{file}.py" for file in files} <= TESTS, row


@pytest.mark.parametrize("page", ["README.md", "docs/compatibility.md", "docs/tour.md"])
def test_page_has_cells_of_at_most_forty_words(page):
    lines = (ROOT / page).read_text().splitlines()
    cells = [cell for line in lines if line.startswith("| ") for cell in re.sub(r"\]\([^)]*\)", "]", line).split("|")]
    assert cells and [cell for cell in cells if len(cell.split()) > 40] == []


@pytest.mark.parametrize(("file", "name"), dict.fromkeys(NAMED.findall(TOUR)))
def test_tour_names_are_where_it_says(file, name):
    if "/vllm/" in file:
        pytest.importorskip("vllm")
    module = importlib.import_module(("" if file.startswith("tests/") else "epfsdp2.") + file.replace("/", "."))
    named = reduce(getattr, name.split("."), module)
    assert getattr(named, "__module__", module.__name__) == module.__name__  # a table has no module of its own


def test_tour_answers_ten_questions_in_few_files():
    answers = SECTIONS["Ten questions"].split("\n### ")[1:]
    files = [len({file for file, _ in NAMED.findall(answer)}) for answer in answers]
    assert len(files) == 10 and min(files) >= 1 and max(files) <= 6 and sum(files) / 10 <= 3.5
    assert f"needs {sum(files) / 10} files on average and six at most" in TOUR


def test_tour_has_the_order_of_wrapped_forwards_and_the_four_ways_of_experts():
    section = SECTIONS["Order of work in a forward"]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.M) == list(ORDER[::-1])
    rows = re.findall(r"^\| `engine/moe/(\w+)\.py::(\w+)`", section, flags=re.M)
    ways = [(file, name) for file, name in rows if file in ("deepep", "overlap", "fused", "dispatch")]
    assert re.findall(r"^    (\w+)\.(\w+) ", forward.__doc__, flags=re.M) == ways and len(ways) == 4


def test_parallelize_page_is_short_and_has_seven_steps():
    page = (ROOT / "engine/parallelize.py").read_text()
    assert len(page.splitlines()) < 200
    body = page[page.index("def parallelize") : page.index("def shard_experts")]
    assert re.findall(r"^    # (\d)\. ", body, flags=re.M) == list("1234567")
