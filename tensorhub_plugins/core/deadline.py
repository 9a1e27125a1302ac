"""An instant by which something must have ended. A duration is a `timeout_s`; this is what it becomes, once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from tensorhub_plugins.core.errors import DeadlineExceeded, UsageError

T = TypeVar("T")

TIMEOUT_S_MAX = 31_536_000.0  # a year: nothing is meant to wait longer, and every clock and message can hold it


class Deadline(float):
    """An instant on time.monotonic(). It is a float: it is compared with others, and passed wherever one is expected.

    Pure code has no clock: it asks `remaining_s(deadline, now)`.
    """

    __slots__ = ()

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """So many seconds from now: 0 at least, a year at most. UsageError for what is no number."""
        return cls(time.monotonic() + bounded(timeout_s))

    def remaining(self) -> float:
        """Seconds that are left, never below 0."""
        return remaining_s(self, time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self


NEVER = Deadline("inf")
STEPS = 1024  # between two looks at the clock: a few milliseconds of the slowest loop


def until(deadline: float, items: Iterable[T]) -> Iterator[T]:
    """These items. DeadlineExceeded at the deadline: for loops over as many as a peer says."""
    rest = iter(items)
    while some := list(islice(rest, STEPS)):
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed", phase="prepare")
        yield from some


def remaining_s(deadline: float, now: float) -> float:
    """Seconds from `now` to `deadline`, on one clock; never below 0."""
    return max(0.0, deadline - now)


def bounded(timeout_s: float) -> float:
    """Seconds that every clock and message can hold: at most a year. UsageError for what is no number."""
    if not isinstance(timeout_s, (int, float)) or timeout_s != timeout_s:  # the latter: not a number
        raise UsageError(f"timeout_s={timeout_s!r}: pass a number of seconds, float('inf') to wait as long as it takes")
    return min(max(0.0, timeout_s), TIMEOUT_S_MAX)
