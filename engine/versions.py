"""Which versions of what this package works with are installed, and which ones its tests ran with."""

import importlib.metadata
from functools import cache

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

__all__ = ["installed", "tested", "untested"]

# verl's lower bound; our tests run with 2.60. The other ranges are those that our distribution declares.
_RAY = ">=2.41,<3"


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not there."""
    # The CPU build of vLLM is a distribution of its own.
    for distribution in (name, f"{name}-cpu") if name == "vllm" else (name,):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@cache
def tested() -> dict[str, SpecifierSet]:
    """Distribution -> range of versions that were tried."""
    ranges = {"ray": SpecifierSet(_RAY)}
    for line in importlib.metadata.requires("epfsdp2") or []:
        requirement = Requirement(line)
        ranges.setdefault(requirement.name, requirement.specifier)
    return ranges


def untested(name: str) -> str:
    """What to say of an installed version that nobody tried, with the range that was; empty if it was tried."""
    version = installed(name)
    if version is None or tested()[name].contains(version, prereleases=True):
        return ""
    return f"{name} {version} is untested; tested: {tested()[name]}"
