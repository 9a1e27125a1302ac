"""Everything public in core says what it is. What implements an interface is described there, once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "tensorhub_plugins" / "core"


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Classes, functions and methods of which no name on the way begins with an underscore."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            name = f"{prefix}{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{name}.")


def is_described(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return ast.get_docstring(node) is not None or any("overload" in ast.unparse(d) for d in node.decorator_list)


def interfaces(sources: list[str]) -> set[str]:
    """The methods of all protocols, and of classes from which others inherit."""
    kinds = [node for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for kind in kinds for base in kind.bases}
    return {
        name
        for kind in kinds
        if kind.name in bases or any("Protocol" in ast.unparse(base) for base in kind.bases)
        for name, node in public(kind)
        if is_described(node)
    }


def undocumented(source: str, described: set[str]) -> list[str]:
    tree = ast.parse(source)
    missing = [] if ast.get_docstring(tree) else ["the file"]
    for name, node in public(tree):
        is_method_of_an_interface = "." in name and node.name in described
        if not is_described(node) and not is_method_of_an_interface:
            missing.append(name)
    return missing


def test_everything_public_in_core_is_described() -> None:
    sources = {str(file.relative_to(CORE)): file.read_text() for file in CORE.rglob("*.py")}
    described = interfaces(list(sources.values()))
    assert {"read", "serve"} <= described
    assert {file: names for file, source in sources.items() if (names := undocumented(source, described))} == {}


def test_what_is_not_described_is_found() -> None:
    source = "class A:\n    def read(self): ...\n    def other(self): ...\ndef read(): ...\ndef _f(): ..."
    assert undocumented(source, {"read"}) == ["the file", "A", "A.other", "read"]
    assert undocumented('"""A file."""\ndef f():\n    """Does."""', set()) == []
