"""The installed, accepted and tested versions of the libraries."""

import importlib.metadata
from functools import cache

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ["TESTED", "accepted", "installed", "is_accepted", "tested", "untested", "vllm_in"]

# Stack -> versions with which its tests passed: rows of benchmarks/results/runs.md.
TESTED: dict[str, dict[str, str]] = {
    "users": {"torch": "2.11.0", "transformers": "5.9.0", "vllm": "0.24.0", "verl": "0.9.1", "ray": "2.60.0"},
    "default": {"torch": "2.13.0", "transformers": "5.9.0", "vllm": "0.27.1", "verl": "0.9.1", "ray": "2.60.0"},
    "next": {"torch": "2.13.0", "transformers": "5.12.1", "vllm": "0.29.0", "verl": "0.9.1", "ray": "2.60.0"},
    "latest": {"torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0", "verl": "0.9.1", "ray": "2.60.0"},
    "sglang": {"sglang": "0.5.12"},
}

# verl's bounds. Our distribution declares the other ranges.
_RAY = ">=2.41,<3"


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    # The CPU build of vLLM is a distribution of its own.
    for distribution in (name, f"{name}-cpu") if name == "vllm" else (name,):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@cache
def accepted() -> dict[str, SpecifierSet]:
    """Return the range of versions that our distribution declares, by distribution."""
    ranges = {"ray": SpecifierSet(_RAY)}
    for line in importlib.metadata.requires("epfsdp2") or []:
        requirement = Requirement(line)
        ranges.setdefault(requirement.name, requirement.specifier)
    return ranges


def is_accepted(name: str, version: str) -> bool:
    """Whether a version is in the accepted range; a vendor's pre-release counts as its release."""
    return accepted()[name].contains(Version(version).base_version)


def tested(name: str) -> list[str]:
    """Return a distribution's versions with which the whole suite passed, oldest first."""
    return sorted({versions[name] for versions in TESTED.values() if name in versions}, key=Version)


def untested(name: str) -> str:
    """Return a warning if the suite never passed with the installed version, else an empty string."""
    version = installed(name)
    if version is None or Version(version).public in tested(name):
        return ""
    return f"{name} {version} was not tested with; tested: {name} {', '.join(tested(name)) or '(none)'}"


def vllm_in(releases: str) -> bool:
    """Whether the installed vLLM is one of ``releases``, e.g. ``>=0.27``; True if none is installed."""
    version = installed("vllm")
    return version is None or SpecifierSet(releases).contains(Version(version).base_version)
