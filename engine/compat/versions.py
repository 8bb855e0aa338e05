"""The installed versions of the libraries: those that are known to break, and those that are tested."""

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ["KNOWN_FAULTS", "OLDEST", "TESTED", "Fault", "doubts", "faults", "installed", "tested", "untested"]
__all__ += ["fault_of_family", "is_older", "vllm_in"]

# Stack -> versions with which its tests passed: rows of benchmarks/results/runs.md.
TESTED: dict[str, dict[str, str]] = {
    "users": {"torch": "2.11.0", "transformers": "5.9.0", "vllm": "0.24.0", "verl": "0.9.1", "ray": "2.60.0"},
    "default": {"torch": "2.13.0", "transformers": "5.9.0", "vllm": "0.27.1", "verl": "0.9.1", "ray": "2.60.0"},
    "next": {"torch": "2.13.0", "transformers": "5.12.1", "vllm": "0.29.0", "verl": "0.9.1", "ray": "2.60.0"},
    "latest": {"torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0", "verl": "0.9.1", "ray": "2.60.0"},
    "sglang": {"torch": "2.11.0", "transformers": "5.9.0", "sglang": "0.5.12", "verl": "0.9.1", "ray": "2.60.0"},
    "sglang-next": {"torch": "2.13.0", "transformers": "5.12.1", "sglang": "0.5.20", "verl": "0.9.1", "ray": "2.60.0"},
}

# The oldest releases, as in pyproject.toml; Ray's is verl's. A newer release is refused only by a row below.
OLDEST = {"ray": "2.41", "torch": "2.11", "transformers": "5.5.3", "verl": "0.9.1"}
OLDEST |= {"sglang": "0.5.12", "vllm": "0.24"}


class Fault(NamedTuple):
    """Releases that are known to break; ``releases``, ``works`` and ``beside`` are requirements as pip has them."""

    releases: str
    reason: str
    works: str
    beside: str = ""  # releases of another distribution that they break with; empty: with all
    program: str = ""  # verl's module that breaks; empty: every one


KNOWN_FAULTS = (
    Fault(
        "transformers==5.6.0",
        "its flash attention fails in every model without attention sinks (s_aux is None).",
        "transformers>=5.5.3,!=5.6.0",
    ),
    Fault(
        "transformers>=5.23",
        "verl's data set for SFT imports names of Qwen2-VL that transformers has dropped. main_ppo works with it.",
        "transformers>=5.5.3,!=5.6.0,<5.23",
        beside="verl<=0.10.0.dev0",
        program="verl.trainer.sft_trainer",
    ),
)

_VERLS_IMAGES = Fault(
    "transformers>=5.23",
    "verl's patches of Qwen3-VL and Qwen3.5 import names that transformers has dropped.",
    "transformers>=5.5.3,!=5.6.0,<5.23",
    beside="verl<=0.10.0.dev0",
)
_FAULTS_OF_FAMILIES = {
    "llama4": Fault(
        "transformers==5.24.0",
        "its forward of Llama 4 fails (image_outputs).",
        "transformers>=5.5.3,!=5.6.0,!=5.24.0",
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _VERLS_IMAGES),
}


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    # The CPU build of vLLM is a distribution of its own.
    for distribution in (name, f"{name}-cpu") if name == "vllm" else (name,):
        try:
            return importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    found = _distribution(name)
    return None if found is None else found.version


def _is_of(found: Mapping[str, str | None], releases: str) -> bool:
    requirement = Requirement(releases)
    version = found.get(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def faults(found: Mapping[str, str | None], program: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the name, the reason and the requirement that works of each distribution that is known to break.

    Args:
        found: distribution -> installed version.
        program: verl's module that runs.
    """
    for name, oldest in OLDEST.items():
        if _is_of(found, f"{name}<{oldest}"):
            yield name, f"epfsdp2 works with {name} {oldest} and newer.", f"{name}>={oldest}"
    for fault in KNOWN_FAULTS:
        if _is_met(fault, found) and program.startswith(fault.program):
            yield Requirement(fault.releases).name, fault.reason, fault.works
    torch = found.get("torch") or ""
    for name, requirement in _conflicts(found):
        pin = next((each.version for each in requirement.specifier if each.operator == "=="), "")
        # A release's kernels link to symbols of one torch; a vLLM that users build may be of theirs.
        is_release = name == "vllm" and not Version(found[name] or "").is_devrelease
        if is_release and requirement.name == "torch" and pin and _series(pin) != _series(torch):
            same = [row[name] for row in TESTED.values() if name in row and _series(row["torch"]) == _series(torch)]
            works = "', or '".join([f"torch=={pin}", *(f"{name}=={version}" for version in same)])
            yield name, f"its kernels are compiled for torch {pin} and do not load beside torch {torch}.", works


def _is_met(fault: Fault, found: Mapping[str, str | None]) -> bool:
    return _is_of(found, fault.releases) and (not fault.beside or _is_of(found, fault.beside))


def fault_of_family(model_type: str) -> Fault | None:
    """Return why the installed versions can't train a family; None if they can."""
    fault = _FAULTS_OF_FAMILIES.get(model_type)
    return fault if fault is not None and _is_met(fault, {n: installed(n) for n in ("transformers", "verl")}) else None


def _series(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without those of its patch release."""
    return Version(version).release[:2]


def _conflicts(found: Mapping[str, str | None]) -> Iterator[tuple[str, Requirement]]:
    """Yield each requirement of a distribution that another one's version does not meet, without local versions."""
    for name in found:
        distribution = _distribution(name)
        for line in (distribution and distribution.requires) or ():
            requirement = Requirement(re.sub(r"\+[\w.]+", "", line))
            version = found.get(requirement.name)
            if version is None or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            if not requirement.specifier.contains(Version(version).public, prereleases=True):
                requirement.marker = None
                yield name, requirement


def tested(name: str) -> list[str]:
    """Return a distribution's versions with which the whole suite passed, oldest first."""
    return sorted({versions[name] for versions in TESTED.values() if name in versions}, key=Version)


def untested(name: str) -> str:
    """Return a warning if the suite never passed with the installed version, else an empty string."""
    version = installed(name)
    if version is None or Version(version).public in tested(name):
        return ""
    return f"{name} {version} was not tested with (tested: {', '.join(tested(name)) or 'none'})"


def doubts(found: Mapping[str, str | None]) -> list[str]:
    """Return what is not known to work: untested versions, and requirements that are not met in a stack of its own."""
    public = {name: Version(version).public for name, version in found.items() if version}
    if any(public.items() <= stack.items() for stack in TESTED.values()):
        return []
    unmet = [f"{name} {found[name]} asks for {other} and has {found[other.name]}" for name, other in _conflicts(found)]
    return [*filter(None, map(untested, found)), *unmet]


def is_older(name: str, release: str) -> bool:
    """Whether the installed version of a distribution is before ``release``; False if none is installed."""
    return _is_of({name: installed(name)}, f"{name}<{release}")


def vllm_in(releases: str) -> bool:
    """Whether the installed vLLM is one of ``releases``, e.g. ``>=0.27``; True if none is installed."""
    version = installed("vllm")
    return version is None or SpecifierSet(releases).contains(Version(version).base_version)
