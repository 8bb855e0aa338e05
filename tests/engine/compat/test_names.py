"""Names of vLLM, verl and SGLang that this package uses, and methods that it overrides, exist in listed versions."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LISTS = json.loads((Path(__file__).parent / "names.json").read_text())
# Absent in some versions, where the reason is in place of the feature: recipes.resilient refuses, and bitwise rollouts
# name the vLLM that they are for.
REFUSED = {
    "verl.trainer.ppo.checkpoint_callback:CheckpointCallback",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor._apply_head",
}


def _load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _load("names", ROOT / ".ci" / "names.py")
OURS = TOOL.Ours()


def test_lists_are_of_the_versions_and_names_that_are_used():
    for library, known in LISTS.items():
        wanted = [requirement.partition("==")[2] for requirement in TOOL.WHEELS[library]]
        assert [version for version in known["versions"] if not version.startswith("git ")] == wanted
        used = {place for names in OURS.names(library).values() for group in names for place in group}
        assert used and used == set(known["names"]), f"python .ci/names.py {library} has to write its list anew"


@pytest.mark.parametrize("library", LISTS)
def test_names_that_are_used_exist_in_every_listed_version(library):
    lacking = LISTS[library]["lacking"]
    missing = [
        f"{file}: {library} {version} has no {' or '.join(places)}"
        for file, needs in OURS.names(library).items()
        for places in needs
        for version in LISTS[library]["versions"]
        if all(version in lacking.get(place, ()) for place in places) and not REFUSED.intersection(places)
    ]
    assert not missing


@pytest.mark.parametrize("library", ["verl", "vllm"])
def test_overriding_methods_take_what_every_listed_version_passes(library):
    versions, parameters = LISTS[library]["versions"], LISTS[library]["parameters"]
    wrong, seen = [], set()
    for own, place, arguments in OURS.overrides(library):
        if place not in parameters:
            continue
        seen.add(place)
        found = parameters[place]
        found = {found: versions} if isinstance(found, str) else found
        if place not in REFUSED and (absent := set(versions) - {each for some in found.values() for each in some}):
            wrong.append(f"{own}: {place} is not there in {', '.join(sorted(absent))}")
        reasons = {theirs: TOOL.refused_call(arguments, theirs) for theirs in found}
        wrong += [f"{own} {reason}, as {place} is called in {found[of]}" for of, reason in reasons.items() if reason]
    assert not wrong and seen == set(parameters)


def test_a_method_that_can_not_be_called_as_the_librarys_is_found():
    def reason(ours: str, theirs: str) -> str:
        return TOOL.refused_call(TOOL.ast.parse(f"lambda {ours}: 0", mode="eval").body.args, theirs)

    assert reason("self, a, b=1, *, c=2", "self, a, b=..., *, c=...") == ""
    assert reason("self, *args, **more", "self, a, *, new=...") == reason("self, a", "self, *args") == ""
    assert reason("self, a", "self, a, new=...") == "does not take new"
    assert reason("self, *args", "self, a, *, new") == "does not take new"
    assert reason("self, a, b, *, c", "self, a") == "needs b, c"
