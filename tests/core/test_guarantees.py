"""A promise that names its test is worth that test: each that docs/guarantees.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "guarantees.md"


def those_there(folder: Path) -> set[str]:
    """Return the files below this folder, as the document names them, and the functions that pytest would run."""
    files = list(folder.rglob("test_*.py"))
    functions = {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)}
    return functions | {str(file.relative_to(folder.parent)) for file in files}


def named(text: str) -> set[str]:
    """Return what stands between backquotes and is a test, a file of tests or a folder of them."""
    quoted = set(re.findall(r"`([^`]+)`", text))
    return {name for name in quoted if re.match(r"(tests/|test_)", name)}


def missing(text: str, tests: Path) -> list[str]:
    return sorted(name for name in named(text) - those_there(tests) if not (tests.parent / name).is_dir())


def promises(text: str) -> dict[str, str]:
    """Return the promises, each a heading of the third level with the text below it, by heading."""
    sections = re.split(
        r"^### ", re.sub(r"^## .*$", "", text.partition("\n## Not promised\n")[0], flags=re.M), flags=re.M
    )
    found = [section.partition("\n") for section in sections[1:]]
    assert len({heading for heading, _, _ in found}) == len(found), "two promises have one heading"
    return {heading: body for heading, _, body in found}


def without_a_test(text: str) -> list[str]:
    """Return the promises that do not say in this order what is promised, what it rests on and which test holds it."""
    said = re.compile(r"\n\S.*\n- Rests on: .*\n- Held by: (?P<tests>.*)", re.S)
    found = {heading: said.match(body) for heading, body in promises(text).items()}
    return [heading for heading, match in found.items() if match is None or not named(match["tests"])]


def test_every_promise_names_a_test_that_is_there() -> None:
    text = DOCUMENT.read_text()
    assert len(named(text)) > 60 and len(promises(text)) > 90
    assert "\n| " not in text, "a promise in a table is not looked at"
    assert missing(text, ROOT / "tests") == [] and without_a_test(text) == []


def test_the_control_a_test_that_is_gone_is_told() -> None:
    promise = "### It holds\n\nIt does.\n\n- Rests on: a lock.\n- Held by: "
    text = f"## One\n\n{promise}`test_that_nobody_wrote`, `tests/core/test_gone.py`, `tests/sim`, `Client.begin`.\n"
    assert missing(text, ROOT / "tests") == ["test_that_nobody_wrote", "tests/core/test_gone.py"]
    assert without_a_test(text) == []
    assert without_a_test(f"{promise}hope.\n\n## Two\n\n### Bare\n\n`test_that_nobody_wrote`\n") == ["It holds", "Bare"]
