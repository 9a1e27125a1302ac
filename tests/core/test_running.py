"""A run of tests keeps to its time and names what takes long. Each has a run of pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CONFTEST = "import running\ndef pytest_configure(config): config.pluginmanager.register(running.{})\n"


def run(
    folder: Path, plugin: str, *files: str, cache: bool = False, more: str = ""
) -> subprocess.CompletedProcess[str]:
    """pytest over files test_0.py, test_1.py, ... of this text, with this plugin."""
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\nmarkers = slow\n")
    (folder / "conftest.py").write_text(CONFTEST.format(plugin) + more)
    for k, text in enumerate(files):
        (folder / f"test_{k}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", *([] if cache else ["-p", "no:cacheprovider"]), str(folder)]
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


LONG = "import pytest, running\nrunning.QUICK_S = 1e-9\n@pytest.mark.slow\ndef test_marked(): pass\n"
ONCE = """
import pytest
run_before = set()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.duration = 9.0 if call.when == "call" and item.nodeid not in run_before else 0.0
    if call.when == "teardown":
        run_before.add(item.nodeid)
    return report
"""


def test_what_takes_long_is_named_and_what_is_so_alone_fails(tmp_path: Path) -> None:
    """The run that has others beside it does not fail. The control: what is quick alone passes."""
    beside = run(tmp_path, "SlowTests(config)", LONG + TWO, cache=True)
    named = beside.stdout.partition("not marked `slow`")[2]
    assert beside.returncode == 0 and "beside others" in beside.stdout, "a busy machine makes any test long"
    assert "test_0.py::test_a" in named and "test_0.py::test_b" in named and "test_marked" not in named, beside.stdout
    (tmp_path / "test_0.py").unlink()
    run(tmp_path, "SlowTests(config)", cache=True)  # a run of other tests
    alone = run(tmp_path, "SlowTests(config, alone=True)", LONG + TWO, "def test_c(): pass\n", cache=True)
    assert alone.returncode == 1 and passed(alone) == ["test_0.py"] * 4, alone.stdout
    assert "test_0.py::test_a" in alone.stdout.partition("s alone, not marked `slow`")[2]
    for held in (["test_0.py"] * 2, []):  # the first time two are left, then none
        quick = run(tmp_path, "SlowTests(config, alone=True)", TWO, cache=True)
        assert quick.returncode == 0 and passed(quick) == held and "not marked" not in quick.stdout, quick.stdout


def test_what_is_long_the_first_time_only_is_quick(tmp_path: Path) -> None:
    """A package is imported once in a run, and whichever test does it first takes so much longer."""
    beside = run(tmp_path, "SlowTests(config)", TWO, cache=True, more=ONCE)
    assert "   9.0 s  test_0.py::test_a" in beside.stdout, beside.stdout
    alone = run(tmp_path, "SlowTests(config, alone=True)", TWO, cache=True, more=ONCE)
    assert alone.returncode == 0 and passed(alone) == ["test_0.py"] * 4 and "not marked" not in alone.stdout


def test_what_is_long_by_a_little_fails_nothing(tmp_path: Path) -> None:
    """Machines differ by more than that. It is named, and the next run has it among its long ones."""
    always = ONCE.replace("item.nodeid not in run_before", "True")
    for took, returncode in (("4.0", 0), ("9.0", 1)):
        run(tmp_path, "SlowTests(config)", TWO, cache=True, more=always)
        alone = run(tmp_path, "SlowTests(config, alone=True)", TWO, cache=True, more=always.replace("9.0", took))
        assert alone.returncode == returncode and f"{took} s  test_0.py::test_a" in alone.stdout, alone.stdout


def test_what_took_long_is_torn_down_before_it_is_run_again(tmp_path: Path) -> None:
    """Of two files, and of one test alone. Others between them are not run again, as they were quick."""
    text = """import pytest, time
@pytest.fixture(scope="module")
def whole():
    yield
    print("TORN DOWN", __name__)
@pytest.fixture
def each():
    yield
    print("AND EACH")
def test_a(whole, each): pass
def test_b(whole): pass
"""
    ever = ONCE.replace("item.nodeid not in run_before", "'test_a' in item.nodeid")
    run(tmp_path, "SlowTests(config)", text, text, text, cache=True, more=ONCE)
    alone = run(tmp_path, "SlowTests(config, alone=True)", text, text, text, cache=True, more=ever)
    assert passed(alone) == [*(f"test_{k}.py" for k in (0, 0, 1, 1, 2, 2)), *(f"test_{k}.py" for k in range(3))]
    assert alone.returncode == 1 and "error" not in alone.stdout.lower(), alone.stdout
    assert [alone.stdout.partition("s alone")[2].count(f"test_{k}.py::test_a") for k in range(3)] == [1] * 3
    assert alone.stdout.partition("s alone")[2].count("test_b") == 0


def test_a_test_that_fails_alone_fails_the_run(tmp_path: Path) -> None:
    run(tmp_path, "SlowTests(config)", LONG + TWO, cache=True)
    failed = run(tmp_path, "SlowTests(config, alone=True)", TWO.replace("b(): pass", "b(): assert False"), cache=True)
    assert failed.returncode == 1 and "1 failed, 1 passed" in failed.stdout, failed.stdout
