"""A thread's start ends, whatever becomes of the thread."""

from __future__ import annotations

import threading

import pytest

from tensorhub_plugins.core import resources, threads


class _Dead(threads.Thread):
    """It dies before its first line, as in a process without memory."""

    def _bootstrap(self) -> None:
        pass


class _Late(threads.Thread):
    """It comes to its first line when it is let."""

    let = threading.Event()
    ended = threading.Event()

    def _bootstrap(self) -> None:
        self.let.wait()
        super()._bootstrap()  # type: ignore[misc]
        self.ended.set()


def test_a_thread_that_dies_before_its_first_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    with pytest.raises(RuntimeError, match="can't start new thread") as refused:
        _Dead(target=pytest.fail).start()
    lack = resources.refusal(refused.value)
    assert lack is not None
    assert "memory" in lack.message


def test_what_start_has_given_up_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WAIT_S", 0.01)
    ran: list[int] = []
    thread = _Late(target=ran.append, args=(1,))
    with pytest.raises(RuntimeError):
        thread.start()
    _Late.let.set()
    assert _Late.ended.wait(60)
    thread.join()
    assert ran == []

    kept = _Late(target=ran.append, args=(2,))  # in time: it runs, as a daemon
    kept.start()
    kept.join()
    assert ran == [2]
    assert kept.daemon
