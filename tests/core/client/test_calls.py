"""Signals that come together: what the caller of a public call no longer waits for is abandoned nevertheless."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from client_stage import SOON_S, until

from tensorhub_plugins.core.client import calls

TWO_SIGNALS = (signal.SIGINT, signal.SIGUSR1)


@pytest.mark.parametrize("at_once", [True, False], ids=["", "control"])
def test_of_two_signals_at_once_neither_lets_a_call_go_on(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """When the first one's handler has raised, the second one's does as soon as any function is entered. The control:
    only a function of Python abandons the call."""
    put, left, seen = calls._threads.put, threading.Event(), list[bool]()
    if not at_once:
        nothing = SimpleNamespace(put=lambda action: None)
        monkeypatch.setattr(calls, "_threads_here", lambda: SimpleNamespace(put=put, actions=nothing))

    def raises(*_: Any) -> None:
        raise KeyboardInterrupt

    def body() -> None:
        for number in TWO_SIGNALS:
            signal.raise_signal(number)  # to this thread: the one that waits for it sees both together
        assert left.wait(SOON_S)
        put((over := threading.Event()).set)  # after all that was put before
        assert over.wait(SOON_S)
        if at_once:
            until(calls._mine.call.interrupted.done)
        seen.append(calls._mine.call.interrupted.done())

    before = [signal.signal(number, raises) for number in TWO_SIGNALS]
    try:
        with pytest.raises(KeyboardInterrupt):
            calls.run(body)
    finally:
        for number, handler in zip(TWO_SIGNALS, before, strict=True):
            signal.signal(number, handler)
    left.set()
    assert until(lambda: seen) == [at_once]
