"""A run of tests keeps to its time and names what takes long. Each has a run of pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CONFTEST = "import running\ndef pytest_configure(config): config.pluginmanager.register(running.{})\n"


def run(folder: Path, plugin: str, *files: str) -> subprocess.CompletedProcess[str]:
    """pytest over files test_0.py, test_1.py, ... of this text, with this plugin."""
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\nmarkers = slow\n")
    (folder / "conftest.py").write_text(CONFTEST.format(plugin))
    for k, text in enumerate(files):
        (folder / f"test_{k}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def passed(ran: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.partition("::")[0][-len("test_0.py") :] for line in ran.stdout.splitlines() if " PASSED" in line]


TWO = "def test_a(): pass\ndef test_b(): pass\n"


def test_after_its_time_no_file_is_begun_and_those_are_named(tmp_path: Path) -> None:
    """The second test of the first file, which lets the time pass, is run as well."""
    first = "import running\ndef test_a(): running.time.monotonic = lambda: float('inf')\ndef test_b(): pass\n"
    ran = run(tmp_path, "Budget(600, 0)", first, TWO)
    assert ran.returncode == 0 and passed(ran) == ["test_0.py"] * 2, ran.stdout
    assert "not run: 600 s were over" in ran.stdout and "test_1.py: 2 tests" in ran.stdout


@pytest.mark.parametrize(("turn", "order"), [(0, "012"), (1, "120"), (5, "201")])
def test_another_file_comes_first_each_turn(turn: int, order: str, tmp_path: Path) -> None:
    ran = run(tmp_path, f"Budget(600, {turn})", *["def test_a(): pass\n"] * 3)
    assert passed(ran) == [f"test_{k}.py" for k in order] and "not run" not in ran.stdout


def test_what_takes_long_is_named(tmp_path: Path) -> None:
    text = "import pytest, running\nrunning.QUICK_S = 1e-9\n" + TWO.replace(
        "def test_b", "@pytest.mark.slow\ndef test_b"
    )
    ran = run(tmp_path, "SlowTests()", text)
    said = ran.stdout.partition("not marked `slow`")[2]
    assert ran.returncode == 0, "long is by the wall clock, which a busy machine has as well"
    assert "test_0.py::test_a" in said and "test_b" not in said, ran.stdout
