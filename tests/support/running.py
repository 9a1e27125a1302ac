"""How long a run of tests takes: what it begins in the time it has, and which tests take too much of it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

QUICK_S = 3.0


class Budget:
    """A time limit: no file of tests begins after so many seconds; it reports those left out. Started ones complete."""

    def __init__(self, within_s: float, turn: int) -> None:
        self.within_s, self.turn = within_s, turn
        self.began_at = time.monotonic()
        self.begun: set[Path] = set()
        self.left_out: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let another file come first each turn."""
        if self.turn and items:
            files = list(dict.fromkeys(item.path for item in items))
            place = {file: (k - self.turn) % len(files) for k, file in enumerate(files)}
            items.sort(key=lambda item: place[item.path])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if item.path not in self.begun and time.monotonic() - self.began_at > self.within_s:
            self.left_out[item.nodeid.partition("::")[0]] += 1
            return True  # nothing is left to do for it
        self.begun.add(item.path)
        return None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.section(f"not run: {self.within_s:.0f} s were over")
            for file, count in self.left_out.items():
                terminalreporter.write_line(f"{file}: {count} tests")


class SlowTests:
    """A report of the quick tests that take long and are not marked `slow`, at the end of every run.

    Long is by the wall clock, by which a busy machine makes any test long, so that nothing fails by it.
    """

    def __init__(self) -> None:
        self.took_s: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not {"heavy", "long", "slow"} & set(report.keywords):
            self.took_s[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        slow = sorted((-took_s, test) for test, took_s in self.took_s.items() if took_s > QUICK_S)
        if slow:
            terminalreporter.section(f"above {QUICK_S:g} s, not marked `slow`")
            for took_s, test in slow:
                terminalreporter.write_line(f"{-took_s:6.1f} s  {test}")
