"""How long a run of tests takes: what it begins in the time it has, and which tests take too much of it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

QUICK_S = 3.0
SPREAD = 2.0  # a test that takes as long as that is found by one machine quick and by the next one slow
SLOW_TESTS = "tensorhub/slow"  # in pytest's cache: names, of each test's last run


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

    Long is by the wall clock, by which a busy machine makes any test long, so that nothing fails by it. Their names
    are kept between runs, and one with alone=True runs only those, one after the other: it fails by those that take
    twice as long, two times, as the first to import a package takes longer. It is for a machine without other work.
    """

    def __init__(self, config: pytest.Config, *, alone: bool = False) -> None:
        self.config, self.alone = config, alone
        self.cache: pytest.Cache | None = getattr(config, "cache", None)  # a run may be without it
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)  # of each time

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.alone:
            named = self.named()
            self.config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in named])
            items[:] = [item for item in items if item.nodeid in named]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all once, and leave pytest those that took long. True: nothing is left to do."""
        if not self.alone:
            return None
        for item, following in zip(session.items, [*session.items[1:], None], strict=False):
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        slow = set(self.slow())
        session.items[:] = [item for item in session.items if item.nodeid in slow]
        return True if session.testsfailed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not {"heavy", "long", "slow"} & set(report.keywords):
            times_s = self.took_s[report.nodeid]
            if report.when == "setup":
                times_s.append(0.0)
            times_s[-1] += report.duration

    def named(self) -> set[str]:
        """Return the tests that took long when they were run last."""
        return set() if self.cache is None else set(self.cache.get(SLOW_TESTS, []))

    def slow(self, spread: float = 1.0) -> list[str]:
        """Return the tests that took so many times the limit, the longest first."""
        least_s = {test: min(times_s) for test, times_s in self.took_s.items()}
        return sorted((test for test, s in least_s.items() if s > spread * QUICK_S), key=lambda test: -least_s[test])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput"):  # one of xdist's processes: the run itself hears of all tests
            return
        if self.cache is not None:
            others = set() if self.alone else self.named() - self.took_s.keys()
            self.cache.set(SLOW_TESTS, sorted({*others, *self.slow()}))
        if self.alone and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.slow(SPREAD) else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if slow := self.slow():
            beside = "alone" if self.alone else "beside others"
            terminalreporter.section(f"above {QUICK_S:g} s {beside}, not marked `slow`")
            for test in slow:
                terminalreporter.write_line(f"{min(self.took_s[test]):6.1f} s  {test}")
