"""Change one thing in core at a time, as kept.toml lists them, and see its test fail: `make mutants`.

A rule that no test holds is a rule only until somebody edits the line. Each mutant names the test that notices it, so a
run is a minute or two, and a mutant that survives says which test has stopped testing. Works on copies of the tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import tomllib

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("kept.toml")
SIDE_BY_SIDE = 2
TEST_S_MAX = 300.0
FAILED = 1  # pytest's exit status when a test has failed; others mean that it was not run


@dataclass(frozen=True)
class Mutant:
    """What is wrong with it, in which file of core, the text that stands there and what replaces it, and the test
    that fails then."""

    what: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> str:
        """Return the file, relative to the root of the tree."""
        return f"tensorhub_plugins/core/{self.file}"


def kept() -> list[Mutant]:
    """Return the mutants of kept.toml."""
    return [Mutant(**fields) for fields in tomllib.loads(KEPT.read_text())["mutant"]]


def fits(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Return why this mutant cannot be made, or its test not be found, in the tree; None: both can."""
    count = (root / mutant.path).read_text().count(mutant.old)
    if count != 1:
        return f"{mutant.path} has the text {count} times, not once: {mutant.old!r}"
    file, _, name = mutant.test.partition("::")
    if not (root / file).exists():
        return f"{file} does not exist"
    function = re.escape(name.rpartition("::")[2].partition("[")[0])
    return None if re.search(rf"^ *def {function}\(", (root / file).read_text(), re.M) else f"{file} has no {name}"


def survivors(mutants: Iterable[Mutant]) -> list[str]:
    """Return a line for each mutant that its test does not fail for; a test that fails without it is one, too."""
    mutants = list(mutants)
    if not mutants:  # without a name pytest would run all tests
        return []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(SIDE_BY_SIDE):
            trees.put(_copy(Path(folder) / str(number)))
        sound = _status(ROOT, sorted({mutant.test for mutant in mutants}))
        if sound != 0:
            return [f"tests fail without any mutant: pytest's status is {sound}"]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as trying:
            found = trying.map(lambda mutant: _survives(mutant, trees), mutants)
            return [line for line in found if line]


def _survives(mutant: Mutant, trees: SimpleQueue[Path]) -> str | None:
    tree = trees.get()
    path = tree / mutant.path
    text = path.read_text()
    try:
        if problem := fits(mutant, tree):
            return f"{mutant.what}: {problem}"
        path.write_text(text.replace(mutant.old, mutant.new))
        status = _status(tree, [mutant.test])
    finally:
        path.write_text(text)
        trees.put(tree)
    print(f"{'dies' if status == FAILED else 'SURVIVES'}  {mutant.file}: {mutant.what}", flush=True)
    return None if status == FAILED else f"{mutant.what}: pytest's status is {status} for {mutant.test}"


def _copy(tree: Path) -> Path:
    wanted = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
    for folder in ("tensorhub_plugins", "tests", "recipes"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=wanted)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tree)
    return tree


def _status(tree: Path, tests: list[str]) -> int:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TEST_S_MAX)
    except subprocess.TimeoutExpired:
        return FAILED  # it hangs: noticed, too
    return ended.returncode


if __name__ == "__main__":
    chosen = [mutant for mutant in kept() if all(word in mutant.what + mutant.file for word in sys.argv[1:])]
    left = survivors(chosen)
    print("\n".join([f"{len(chosen)} mutants, {len(left)} survive", *left]))
    sys.exit(bool(left) or not chosen)
