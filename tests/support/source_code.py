"""Analyses of source code, for the rules about it: what a file imports, which environment variables it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

OURS = "tensorhub_plugins"
BY_NAME = re.compile(rf"{OURS}(\.\w+)+")

Import = tuple[str, str]  # a module below our package, as "core.hub.hub"; what it imports, by its full name


def module_of(file: Path, package: Path) -> str:
    """Return its name below the package, for example "core.hub.hub" or "verl.__init__"."""
    return ".".join(file.relative_to(package).with_suffix("").parts)


def imports(package: Path, *, lazy: bool = True) -> list[Import]:
    """Return what is imported when the code of this package runs. lazy: also inside of functions, and by name."""
    found = []
    for file in sorted(package.rglob("*.py")):
        module = module_of(file, package)
        found += [(module, name) for name in _imported_by(file.read_text(), f"{OURS}.{module}", lazy=lazy)]
    return found


@cache
def _imported_by(source: str, module: str, *, lazy: bool) -> tuple[str, ...]:
    return tuple(_imported(ast.parse(source), module, lazy=lazy))


def _imported(tree: ast.Module, module: str, *, lazy: bool) -> Iterator[str]:
    known: dict[str, str] = {}  # what the file calls what it has imported
    nodes = list(_runtime_nodes(tree, lazy=lazy))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: so many steps up from this module
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            known |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
            yield base
            if base.split(".")[0] == OURS:  # `from package import module` names a module, too
                yield from (f"{base}.{alias.name}" for alias in node.names)
    for node in nodes if lazy else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and BY_NAME.fullmatch(node.value):
            yield node.value  # for import_module, Ray or vLLM
        elif isinstance(node, ast.Attribute):  # `core.hub.server.Server`, where only `core` was imported
            root, *rest = _dotted(node)
            if known.get(root, "").split(".")[0] == OURS:
                yield ".".join([known[root], *rest])


def _dotted(node: ast.expr) -> list[str]:
    """Return ["a", "b", "c"] of `a.b.c`; [""] of an attribute of anything but a name."""
    if isinstance(node, ast.Attribute):
        above = _dotted(node.value)
        return [*above, node.attr] if above[0] else above
    return [node.id] if isinstance(node, ast.Name) else [""]


def _runtime_nodes(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """Yield all nodes below this one except those only for type checkers, docstrings and, unless lazy, functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _dotted(child.test)[-1] == "TYPE_CHECKING":
            for each in child.orelse:
                yield each
                yield from _runtime_nodes(each, lazy=lazy)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _runtime_nodes(child, lazy=lazy)


def below(imported: str) -> str:
    """Return the name below our package; "" for what is not ours."""
    return imported.removeprefix(f"{OURS}.") if imported.startswith(f"{OURS}.") else ""


def offered_by(file: Path) -> dict[str, str]:
    """Return what a package's __init__ offers under a name of its own, and its origin below our package."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    return {
        alias.asname or alias.name: below(f"{node.module}.{alias.name}")
        for node in nodes
        for alias in node.names
        if below(str(node.module))
    }


def loops(found: Iterable[Import], modules: Iterable[str]) -> list[str]:
    """Return the modules that import each other in a circle, and those in between. A package above a module does not
    count: Python has begun to import it already."""
    names = set(modules)
    needs: dict[str, set[str]] = {name: set() for name in names}
    for module, imported in found:
        parts = below(imported).split(".")
        target = next((t for n in range(len(parts), 0, -1) for t in _as_module(parts[:n]) if t in names), None)
        if target is not None and target != module and not f"{module}.".startswith(target.removesuffix("__init__")):
            needs[module].add(target)
    while True:  # a module that needs no other, or that no other needs, is in no circle
        needed = set().union(*needs.values())
        apart = {name for name in needs if not needs[name] & needs.keys() or name not in needed}
        if not apart:
            return sorted(needs)
        needs = {name: needs[name] - apart for name in needs.keys() - apart}


def _as_module(parts: list[str]) -> tuple[str, str]:
    return ".".join(parts), ".".join([*parts, "__init__"])


def constants(source: str) -> dict[str, str]:
    """Return the string constants of a file by name."""
    return {
        each.id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for each in node.targets
        if isinstance(each, ast.Name)
    }


def environment_of(source: str, elsewhere: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """Return the environment variables that this source reads or sets, and the places where they are unknown.

    elsewhere: the constants of other files.
    """
    if not re.search(r"\b(environ|getenv)\b", source):
        return set(), []
    tree, named = ast.parse(source), {**elsewhere, **constants(source)}
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    used, unclear = set(), []
    for node in ast.walk(tree):
        text = ".".join(_dotted(node)) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        if text not in ("os.environ", "os.getenv", "environ", "getenv") or isinstance(node.ctx, ast.Store):  # type: ignore
            continue
        names = _names_asked(node, text, parents)
        for name in names or [None]:
            known = name.value if isinstance(name, ast.Constant) else named.get(ast.unparse(name)) if name else None
            if isinstance(known, str):
                used.add(known)
            else:
                unclear.append(ast.unparse(parents[node]))
    return used, unclear


def _names_asked(node: ast.AST, text: str, parents: Mapping[ast.AST, ast.AST]) -> list[ast.expr]:
    """Return what is looked up here: the key, the first argument, what `in` looks for, or all that a loop visits."""
    above = parents[node]
    if isinstance(above, ast.Attribute):  # .get, .setdefault, .pop
        above = parents[above]
    found: list[ast.expr] = []
    if isinstance(above, ast.Subscript):
        found = [above.slice]
    elif isinstance(above, ast.Call) and above.args and node is not above.args[0]:
        found = [above.args[0]]
    elif isinstance(above, ast.Compare):
        found = [above.left]
    if len(found) == 1 and isinstance(found[0], ast.Name):
        looped = above
        while looped in parents:
            looped = parents[looped]
            if isinstance(looped, ast.For) and ast.unparse(looped.target) == found[0].id and looped.iter:
                return list(looped.iter.elts) if isinstance(looped.iter, (ast.Tuple, ast.List)) else []
    return found
