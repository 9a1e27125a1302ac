"""A promise that names its test is worth that test: each that docs/guarantees.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "guarantees.md"


def those_there(folder: Path) -> set[str]:
    """The files below this folder, as the document names them, and the functions that pytest would run."""
    files = list(folder.rglob("test_*.py"))
    functions = {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)}
    return functions | {str(file.relative_to(folder.parent)) for file in files}


def named(text: str) -> set[str]:
    """What stands between backquotes and is a test, a file of tests or a folder of them."""
    quoted = set(re.findall(r"`([^`]+)`", text))
    return {name for name in quoted if re.match(r"(tests/|test_)", name)}


def missing(text: str, tests: Path) -> list[str]:
    return sorted(name for name in named(text) - those_there(tests) if not (tests.parent / name).is_dir())


def without_a_test(text: str) -> list[str]:
    """Rows of the tables that name none; "the same" is that of the row before."""
    rows = [row.strip("|").split("|") for row in text.splitlines() if row.startswith("| ")]
    promises = [row for row in rows if row[0].strip() not in ("promise", "---")]
    return [row[0] for row in promises if len(row) != 3 or not (named(row[2]) or row[2].strip() == "the same")]


def test_every_promise_names_a_test_that_is_there() -> None:
    text = DOCUMENT.read_text()
    assert len(named(text)) > 60
    assert missing(text, ROOT / "tests") == [] and without_a_test(text) == []


def test_the_control_a_test_that_is_gone_is_told() -> None:
    row = "| It holds | a lock | `test_that_nobody_wrote`, `tests/core/test_gone.py`, `tests/sim`, `Client.begin` |"
    assert missing(row, ROOT / "tests") == ["test_that_nobody_wrote", "tests/core/test_gone.py"]
    assert without_a_test(f"{row}\n| It holds | hope | nothing |") == [" It holds "]
