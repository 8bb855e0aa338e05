"""Imports between rooms, parsed from the sources, for the walls and docs/architecture.md."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "ROOMS", "ROOT", "Import", "imports", "room_of", "sources"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "rollout", "conf", "recipes")
# From top to bottom: a room imports only from rooms below it. A room is a folder, or a file on its own.
ROOMS = (
    "recipes/mismatch",
    "recipes",
    "recipes/gpu",
    "recipes/doctor",
    "recipes/resilient",
    "recipes/quickstart",
    "recipes/launch",
    "recipes/plan",
    "engine/plugin.py",
    "conf",
    "engine/config",
    "engine/integration",
    "engine/preflight",
    "engine/build.py",
    "engine/invariance.py",
    "engine/planner",
    "engine/survivors.py",
    "engine/checkpoint",
    "engine/optim",
    "rollout",
    "rollout/remote",
    "rollout/sync.py",
    "rollout/sent_tensors.py",
    "rollout/servers.py",
    "rollout/sglang",
    "rollout/vllm",
    "rollout/vllm/compat.py",
    "rollout/bitwise",
    "rollout/transport",
    "rollout/plan",
    "rollout/layout",
    "engine/config/automatic.py",
    "engine/config/settings.py",
    "engine/lora",
    "engine/quantise",
    "engine/parallelize.py",
    "engine/mtp",
    "engine/fsdp",
    "engine/dense",
    "engine/head",
    "engine/packing",
    "engine/model",
    "engine/moe/outside",
    "engine/moe/router",
    "engine/moe",
    "engine/moe/collectives",
    "engine/moe/gemm",
    "engine/topology",
    "engine/config/values.py",
    "engine/cpu",
    "engine/compat",
    "engine/wrap_forward.py",
    "engine/model_files.py",
    "engine/cleanup.py",
    "engine/errors.py",
    "engine",
)


@dataclass(frozen=True)
class Import:
    """One name that a file imports.

    Args:
        path: path of the file from the repository's root.
        module: absolute dotted name; for this package, the path of the imported file (``engine/errors.py``).
        name: the imported name in the module; None for the module itself.
    """

    path: str
    module: str
    name: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.module.endswith(".py")


def sources() -> dict[str, str]:
    """Return the text of every file of the packages, by its path from the repository's root."""
    found = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found if "__pycache__" not in path.parts}


def room_of(path: str) -> str:
    """Return the room of a file of the packages."""
    return path if path in ROOMS else path.rpartition("/")[0]


def imports(files: Mapping[str, str]) -> Iterator[Import]:
    """Yield all imports of files, also inside functions; relative imports are resolved."""
    for path, text in files.items():
        parts = path.removesuffix(".py").split("/")
        package = ["epfsdp2", *parts[:-1]] if parts[0] in PACKAGES else parts[:-1]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (_import(path, alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                yield from (_import(path, module, alias.name) for alias in node.names)


def _import(path: str, module: str, name: str | None) -> Import:
    if module.split(".")[0] != "epfsdp2":
        return Import(path, module, name)
    folder = "/".join(module.split(".")[1:])
    if name is not None and (found := _file(f"{folder}/{name}")):
        return Import(path, found)
    return Import(path, _file(folder) or f"{folder}.py", name)


def _file(module: str) -> str | None:
    for path in (f"{module}.py", f"{module}/__init__.py"):
        if (ROOT / path).is_file():
            return path
    return None
