"""Threads whose start ends, also in a process that has no memory left."""

from __future__ import annotations

import threading
from typing import Any

# For a new thread's first line. Several waits, as the interpreter may be held, or the process stopped, for longer.
WAITS, WAIT_S = 10, 1.0


class Thread(threading.Thread):
    """A daemon thread. `start` raises RuntimeError where the new thread dies before its first line, as one may without
    memory: Python's own would wait for it for ever. What `start` has given up never runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, daemon=True)
        self._started = _Started()  # in place of Python's

    def run(self) -> None:
        """Call the target, unless `start` has raised."""
        if not self._started.is_given_up:
            super().run()


class _Started(threading.Event):
    is_given_up = False

    def wait(self, timeout: float | None = None) -> bool:
        if not any(super(_Started, self).wait(WAIT_S) for _ in range(WAITS)):
            with self._cond:  # type: ignore[attr-defined]
                self.is_given_up = not self._flag  # type: ignore[attr-defined]
        if self.is_given_up:
            raise RuntimeError("can't start new thread: can't allocate memory")
        return True
