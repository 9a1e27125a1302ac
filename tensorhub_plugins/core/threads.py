"""Threads whose start ends, also in a process that has no memory left."""

from __future__ import annotations

import threading
from typing import Any


class Thread(threading.Thread):
    """A daemon thread. `start` raises RuntimeError where the new thread dies before its first line, as one may without
    memory: Python's own would wait for it without end. What `start` has refused never runs."""

    # For the first line. Several waits, as the interpreter may be held, or the process stopped, for longer.
    waits, wait_s = 10, 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, daemon=True)
        self._started = _Started(self.waits, self.wait_s)  # in place of Python's

    def run(self) -> None:
        """Call the target, unless `start` has raised."""
        if not self._started.is_refused:
            super().run()


class _Started(threading.Event):
    is_refused = False

    def __init__(self, waits: int, wait_s: float) -> None:
        super().__init__()
        self._waits, self._wait_s = waits, wait_s

    def wait(self, timeout: float | None = None) -> bool:
        if not any(super(_Started, self).wait(self._wait_s) for _ in range(self._waits)):
            with self._cond:  # type: ignore[attr-defined]
                self.is_refused = not self._flag  # type: ignore[attr-defined]
        if self.is_refused:
            raise RuntimeError("can't start new thread: can't allocate memory")
        return True
