"""What a person sees of what takes long."""

from __future__ import annotations

import io
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_plugins.core import progress
from tensorhub_plugins.core.progress import Progress

LOGGER = "vllm.tensorhub_plugins.progress"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_nobody_watches_there_are_lines_more_and_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    shown = Progress("a/0 reads", 40e9)
    began = time.monotonic()
    for second in range(200):
        shown.note(0.2e9 * second, began + second)
    shown.close()
    assert len(caplog.records) == 6  # after 5, 15, 35, 75, 135 and 195 s
    assert caplog.messages[1].startswith("a/0 reads: 3.00 of 40.00 GB, 200 MB/s, about 18")
    Progress("b/0 reads", 40e9).note(4e6, time.monotonic() + 10.0)
    assert caplog.messages[-1].startswith("b/0 reads: 0.00 of 40.00 GB, 0.4 MB/s")  # it does not stand still


def test_what_is_over_soon_and_what_has_no_name_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    quick, unnamed = Progress("quick", 10), Progress("", 10)
    for second in range(200):
        quick.note(second, time.monotonic() + min(second, 4))
        unnamed.note(second, time.monotonic() + second)
    assert not caplog.records
    quick.note(5, time.monotonic() + 10)  # the control
    assert len(caplog.records) == 1


def test_where_one_watches_there_is_a_bar(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason="no tqdm here, which vLLM brings")
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown, began = Progress("a/0 reads", 40e9), time.monotonic()
    for second in range(20):
        shown.note(2e9 * second, began + second)
    assert "a/0 reads:  25%" in terminal.getvalue() and "10.0G/40.0G" in terminal.getvalue()
    shown.close()
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "tqdm", None)  # the control: without tqdm there are lines
    shown = Progress("b/0 reads", 40e9)
    shown.note(1e9, time.monotonic() + 6)
    assert len(caplog.records) == 1


def test_items_are_counted_as_they_are_taken(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = iter(range(1000))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    assert list(progress.of("abcdefgh", "the checkpoint is converted", 8, "tensors")) == list("abcdefgh")
    (line,) = caplog.messages
    assert line == "the checkpoint is converted: 4 of 8 tensors, about 5 s left"
    taken: Any = progress.of("ab", "x", 2, "tensors")
    next(taken)
    taken.close()  # a loader that fails half way leaves nothing behind
