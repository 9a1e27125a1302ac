"""Deadlines: instants by which something must have ended. A duration is a `timeout_s`, converted to one once."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain, islice
from typing import TypeVar

from tensorhub_plugins.core.errors import DeadlineExceeded, UsageError
from tensorhub_plugins.core.threads import Thread

T = TypeVar("T")

TIMEOUT_S = 60.0  # of calls that move weights, for what does not depend on their size
SIZE_BYTES_PER_S = 500_000_000  # what any host copies and digests, and 5 Gbit/s transfer, with a margin
TIMEOUT_S_MAX = 31_536_000.0  # a year: no call needs more, and every clock and message can hold it
POLL_S_MAX = 3600.0  # at a time: poll(2) takes no more than 24 days


class Deadline(float):
    """An instant on time.monotonic(). It is a float: it is compared with others, and passed wherever one is expected.

    Pure code has no clock: it asks `remaining_s(deadline, now)`."""

    __slots__ = ()

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the instant so many seconds from now, from 0 to a year. Raise UsageError for what is no number."""
        return cls(time.monotonic() + bounded(timeout_s))

    def remaining(self) -> float:
        """Return the seconds that are left, never below 0."""
        return remaining_s(self, time.monotonic())

    @property
    def expired(self) -> bool:
        """Return whether it has passed."""
        return time.monotonic() >= self


NEVER = Deadline("inf")
STEPS = 128  # between two readings of the clock: a few milliseconds of the slowest loop


def until(deadline: float, items: Iterable[T], steps: int | None = None) -> Iterator[T]:
    """Yield these items. Raise DeadlineExceeded at the deadline: for loops as long as a peer or a caller determines.
    steps: how many of them take milliseconds."""

    def groups() -> Iterator[list[T]]:
        rest = iter(items)
        while some := list(islice(rest, steps or STEPS)):
            check_time(deadline)
            yield some

    return chain.from_iterable(groups())  # no line of Python runs for each item


def check_time(deadline: float) -> None:
    """Raise DeadlineExceeded at the deadline."""
    if time.monotonic() >= deadline:
        raise DeadlineExceeded("the deadline passed", phase="prepare")


def timeout_for(timeout_s: float | None, size_bytes: int, *, base_s: float = TIMEOUT_S) -> float:
    """Return the seconds of a call that moves so many bytes: the given ones, which are strict; None: `base_s`, and what
    the size adds."""
    return base_s + size_s(size_bytes) if timeout_s is None else bounded(timeout_s)


def size_s(size_bytes: int) -> float:
    """Return the seconds that so many bytes add to a timeout that the caller has not given."""
    return size_bytes / SIZE_BYTES_PER_S


def remaining_s(deadline: float, now: float) -> float:
    """Return the seconds from `now` to `deadline`, on one clock; never below 0."""
    return max(0.0, deadline - now)


def bounded(timeout_s: float, name: str = "timeout_s") -> float:
    """Return seconds that every clock and message can hold: at most a year. Raise UsageError for what is no number."""
    if not isinstance(timeout_s, (int, float)) or timeout_s != timeout_s:  # the latter: not a number
        raise UsageError(f"{name}={timeout_s!r}: pass a number of seconds, float('inf') to wait as long as it takes")
    return min(max(0.0, timeout_s), TIMEOUT_S_MAX)


def aside(work: Callable[[], T]) -> Future[T]:
    """Run work that may block for longer than any caller should wait in a thread of its own, which is then abandoned.
    The future has an OSError where no thread can be started."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        Thread(target=run, name="tensorhub-aside").start()
    except RuntimeError as error:
        future.set_exception(OSError(errno.EAGAIN, f"{error} (ulimit -u, pids.max)"))
    return future
