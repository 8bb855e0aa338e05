"""verl's plug-in for SGLang, which every process imports at ``import verl`` (entry point group ``verl.plugins``).

verl 0.9.1 reads the names of ``ServerArgs`` by ``dataclasses.fields``; since SGLang 0.5.20 that class is a struct of
msgspec's. ``test_sglang.py`` fails once this can go. The change waits for verl's module, which imports SGLang.
"""

import dataclasses
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["install"]

_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"


def install() -> None:
    """Give verl's module of SGLang's server a ``dataclasses`` of its own, whose ``fields`` knows structs too."""
    if not any(isinstance(finder, _ServerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ServerFinder())


class _ServerFinder:
    """Finds verl's module as Python does, and replaces one of its names once it has run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _SERVER else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            module.dataclasses = SimpleNamespace(**vars(dataclasses) | {"fields": _fields})

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _fields(record: Any) -> Any:
    names = getattr(record, "__struct_fields__", None)
    return dataclasses.fields(record) if names is None else [SimpleNamespace(name=name) for name in names]


install()
