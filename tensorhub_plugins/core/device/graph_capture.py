"""While an engine captures CUDA graphs, any other thread's call to the device invalidates the capture: they wait."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

CLOSED_S_MAX = 1800.0  # as long as an engine may take to compile and capture; then calls go on, with an error logged

_acting = threading.local()


def acting() -> int:
    """Return the thread that the calling one works for, which is itself unless it `acts_for` another."""
    return getattr(_acting, "thread", None) or threading.get_ident()


@contextmanager
def acts_for(thread: int) -> Iterator[None]:
    """Make the calling thread act for another one, which waits for it, with that thread's rights at the gate."""
    before, _acting.thread = getattr(_acting, "thread", None), thread
    try:
        yield
    finally:
        _acting.thread = before


class Gate:
    """A gate that a thread closes while it captures: all others' calls have ended before, and wait until it opens."""

    def __init__(self, closed_s_max: float = CLOSED_S_MAX) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._inside = 0
        self.waiting = 0  # threads that wait until it is open
        self._mine = threading.local()
        self._closed_s_max = closed_s_max
        self._opens_at_exit = False

    @property
    def closed(self) -> bool:
        """Return whether a thread has closed it."""
        return self._owner is not None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Hold it open: for one call to the device, never for a wait for anything else."""
        depth, me = getattr(self._mine, "depth", 0), acting()
        if depth or self._owner == me:
            yield
            return
        with self._changed:
            self.waiting += 1
            try:
                opened = self._changed.wait_for(lambda: self._owner is None, self._closed_s_max)
            finally:
                self.waiting -= 1
            if not opened:
                logger.error("graphs are captured for more than %g s: calls to the device go on", self._closed_s_max)
                self._owner = None
                self._changed.notify_all()
            self._inside += 1
        self._mine.depth = 1
        try:
            yield
        finally:
            self._mine.depth = 0
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def wait(self, deadline: float) -> bool:
        """Return whether the calling thread may pass, at once or by the deadline."""
        if self._owner in (None, acting()):
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._owner is None, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Admit only this thread's calls to the device. Closing twice is fine. It opens at the interpreter's exit."""
        with self._changed:
            if not self._opens_at_exit:
                # An engine may end between its load and its warm-up. The interpreter then joins the threads that wait
                # here, before it runs what is registered with atexit.
                getattr(threading, "_register_atexit", atexit.register)(self.open)
                self._opens_at_exit = True
            self._owner = acting()
            try:
                if not self._changed.wait_for(lambda: not self._inside, self._closed_s_max):
                    logger.error("a call to the device does not end: graphs are captured beside it")
            except BaseException:
                self._owner = None
                self._changed.notify_all()
                raise

    def open(self) -> None:
        """Let the waiting threads go on."""
        with self._changed:
            self._owner = None
            self._changed.notify_all()


gate = Gate()
