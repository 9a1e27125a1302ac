"""A thread's start ends, whatever becomes of the thread."""

from __future__ import annotations

import threading

import pytest

from tensorhub_plugins.core import resources, threads


class _Dead(threads.Thread):
    """It dies before its first line, as in a process without memory."""

    wait_s = 0.01

    def _bootstrap(self) -> None:
        pass


class _Late(threads.Thread):
    """It comes to its first line when it is let."""

    wait_s = 0.01
    let = threading.Event()
    ended = threading.Event()

    def _bootstrap(self) -> None:
        self.let.wait()
        super()._bootstrap()  # type: ignore[misc]
        self.ended.set()


def test_a_thread_that_dies_before_its_first_line_is_refused() -> None:
    with pytest.raises(RuntimeError, match="can't start new thread") as refused:
        _Dead(target=pytest.fail).start()
    lack = resources.refusal(refused.value)
    assert lack is not None
    assert "memory" in lack.message


def test_what_start_has_refused_never_runs() -> None:
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
