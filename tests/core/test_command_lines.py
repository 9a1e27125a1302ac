"""Every program reads of its command line only what its parser knows: else a renamed option is found by a user."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path
    for folder in ("recipes", "tensorhub_plugins", "tests/sim")
    for path in (ROOT / folder).rglob("*.py")
    if "add_argument(" in path.read_text()
)


def unknown_options(source: str) -> set[str]:
    """Names that are read of `arguments` or `options` in a module and that no `add_argument` there defines."""
    known: set[str] = set()
    read: set[str] = set()
    parsed: set[str] = set()  # the names of what `parse_args` returns, and of parameters annotated as such
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=names, keywords=keywords):
                given = [k.value.value for k in keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)]
                texts = [n.value for n in names if isinstance(n, ast.Constant)]
                long = [t for t in texts if t.startswith("--")] or texts
                known.update(given or [text.lstrip("-").replace("-", "_") for text in long])
            case ast.Call(func=ast.Attribute(attr="add_subparsers" | "set_defaults"), keywords=keywords):
                known.update(k.arg for k in keywords if k.arg)
                known.update(k.value.value for k in keywords if k.arg == "dest" and isinstance(k.value, ast.Constant))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="parse_args"))):
                parsed.add(name)
            case ast.arg(arg=name, annotation=ast.Attribute(attr="Namespace")):
                parsed.add(name)
            case _:
                pass
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in parsed:
                read.add(attribute)
            case _:
                pass
    return {name for name in read if not name.startswith("_")} - known


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_reads_of_its_command_line_is_there(program: Path) -> None:
    assert unknown_options(program.read_text()) == set()


def test_a_renamed_option_is_found() -> None:
    """The control."""
    source = (
        "parser.add_argument('--deadline-s', type=float)\narguments = parser.parse_args()\nprint(arguments.timeout_s)\n"
    )
    assert unknown_options(source) == {"timeout_s"}
    assert unknown_options(source.replace("deadline", "timeout")) == set()
