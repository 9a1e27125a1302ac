"""The sources of released versions of vLLM, as syntax trees: nothing of them is installed or run.

A file is fetched out of its wheel when it is first asked for, and kept in .envs/vllm-sources/VERSION.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import remotezip
import requests

from tensorhub_plugins.vllm import names

KEPT = Path(__file__).resolve().parents[2] / ".envs" / "vllm-sources"
INDEX = "https://pypi.org/simple/vllm/"
WHEEL = "-cp38-abi3-manylinux_2_28_x86_64.whl"
TIMEOUT_S = 30.0
FETCHES = 4  # at once
ATTEMPTS = 5
Function = ast.FunctionDef | ast.AsyncFunctionDef
_mine = threading.local()  # this thread's wheels, by version


class Unreachable(Exception):
    """The package index does not answer."""


class Sources:
    def __init__(self, version: str, root: Path | None = None) -> None:
        """Open the sources. version: in full, as 0.29.0. root: the folder of its package; None: as described above."""
        self.version = version
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}
        self._members: dict[ast.ClassDef, list[tuple[str, ast.AST]]] = {}

    def prefetch(self, modules: Iterable[str]) -> None:
        """Fetch these side by side. Unreachable."""
        with ThreadPoolExecutor(FETCHES) as threads:
            list(threads.map(self._text_of, modules))

    def module(self, name: str) -> ast.Module | None:
        """Return its tree; None where this version has no such module. Unreachable."""
        if name not in self._trees:
            text = self._text_of(name)
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return where this name of a module is defined, and its definition, through whatever it is imported from."""
        tree = self.module(module)
        for node in _statements(tree.body if tree else ()):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in map(_named, _targets(node)):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        found = self.find(self._origin(module, node), name if alias.name == "*" else alias.name)
                        if found or alias.name != "*":
                            return found
        return self._as_module(module, name)

    def members(self, module: str, owner: ast.ClassDef) -> list[tuple[str, ast.AST]]:
        """Return names that a class and its bases define, and their definitions; those of the class itself first."""
        if owner not in self._members:
            self._members[owner] = list(self._members_of(module, owner))
        return self._members[owner]

    def _members_of(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
        for node in _statements(owner.body):
            if isinstance(node, Function | ast.ClassDef):
                yield node.name, node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                yield from ((_named(target), node) for target in _targets(node))
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _named(node.value) == "self":
                yield node.attr, node
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(module, _named(base))
            if found and isinstance(found[1], ast.ClassDef):
                yield from self.members(found[0], found[1])

    def member(self, module: str, path: str) -> ast.AST | None:
        """Return the definition of "name" or "Class.name" in a module; None where there is none."""
        first, *rest = path.split(".")
        found = self.find(module, first)
        for name in rest:
            if found is None or not isinstance(found[1], ast.ClassDef):
                return None
            node = next((node for own, node in self.members(*found) if own == name), None)  # type: ignore[arg-type]
            found = None if node is None else (found[0], node)
        return found[1] if found else None

    def _as_module(self, package: str, name: str) -> tuple[str, ast.AST] | None:
        tree = self.module(f"{package}.{name}")
        return None if tree is None else (f"{package}.{name}", tree)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._text(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _text_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        texts = (self._text(f"{path}{end}") for end in (".py", "/__init__.py"))
        return next((text for text in texts if text is not None), None)

    def _text(self, path: str) -> str | None:
        if not path.startswith("vllm/"):
            return None
        if self._root is not None:
            here = self._root / path
            return here.read_text() if here.exists() else None
        kept = KEPT / self.version / path
        if not kept.exists():
            if path not in _listing(self.version):
                return None
            keep(kept, _fetched(self.version, path))
        return kept.read_text()


def installed() -> Sources:
    """Return those of the vLLM that is installed, without importing it."""
    folder = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
    return Sources(str(names.installed_version()), folder.parent)


@functools.cache
def _listing(version: str) -> frozenset[str]:
    """Return the paths of all files of this version."""
    kept = KEPT / version / "listing"
    if not kept.exists():
        keep(kept, "\n".join(_asked(version, remotezip.RemoteZip.namelist)).encode())
    return frozenset(kept.read_text().splitlines())


def _fetched(version: str, path: str) -> bytes:
    return bytes(_asked(version, lambda wheel: wheel.read(path)))


def _asked(version: str, ask: Callable[[remotezip.RemoteZip], Any]) -> Any:
    """Ask the wheel, of which each thread has its own, and again where a proxy has answered without the range."""
    wheels: dict[str, remotezip.RemoteZip] = _mine.__dict__
    for attempt in range(ATTEMPTS):
        try:
            if version not in wheels:
                wheels[version] = remotezip.RemoteZip(_url(version), timeout=TIMEOUT_S)
            return ask(wheels[version])
        except (OSError, zipfile.BadZipFile, remotezip.RemoteZipError) as error:  # requests' errors are of OSError
            wheels.pop(version, None)
            if attempt == ATTEMPTS - 1:
                raise Unreachable(f"vLLM {version}: {error}") from error
    raise AssertionError("unreachable")


@functools.cache
def _url(version: str) -> str:
    answer = requests.get(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"}, timeout=TIMEOUT_S)
    answer.raise_for_status()
    return str(next(f["url"] for f in answer.json()["files"] if f["filename"] == f"vllm-{version}{WHEEL}"))


def keep(path: Path, content: bytes) -> None:
    """Write a file that is there whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _statements(body) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those under `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, inner, ()))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _named(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
