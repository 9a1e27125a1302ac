"""What a forked child has of its parent's fetched tensors: the bytes that they have then, for as long as it lives.

They lie in a file that parent and child would share, into which the parent reads a later version once they have been
released. So the child keeps a loan (loans.py) of what is held when it is forked: while it lives the parent takes other
memory. And its mapping becomes its own: what the child writes nobody else sees.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import NamedTuple, Protocol
from weakref import WeakSet

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.loans import map_at
from tensorhub_plugins.core.memory.slab import Slab


class Holds(Protocol):
    """Hands out slabs that it will use again."""

    def held(self) -> Iterable[Slab]:
        """Those whose bytes somebody uses."""


class _Inherited(NamedTuple):
    """A slab's memory, for a child that is about to be forked. loan_fd: -1: it could not be had."""

    address: int
    size_bytes: int
    fd: int
    loan_fd: int


_holders: WeakSet[Holds] = WeakSet()
_now = threading.local()  # what this thread, which forks, passes on


def pass_on(holder: Holds) -> None:
    """From now on forked children keep what this one holds."""
    _watch()
    _holders.add(holder)


@cache
def _watch() -> None:
    """Once, and not before there is something: importing has no effects."""
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    held = (slab for holder in list(_holders) for slab in holder.held() if slab.kind == "allocated")
    _now.passed_on = list(filter(None, map(_inherited, held)))


def _inherited(slab: Slab) -> _Inherited | None:
    """None: it holds nothing, is each process' own anyhow, or was closed, so that nobody writes there any more."""
    with suppress(UsageError):
        tensors, fd = slab.tensors(), slab.shared_fd
        if tensors and fd is not None:
            storage, loan_fd = next(iter(tensors.values())).untyped_storage(), -1
            with suppress(OSError):  # there are no descriptors left
                loan = slab.lend()
                loan_fd = os.dup(loan.fileno())  # which a child does not close
                loan.close()
            return _Inherited(storage.data_ptr(), storage.nbytes(), fd, loan_fd)
    return None


def _in_parent() -> None:
    for each in _now.__dict__.pop("passed_on", ()):
        if each.loan_fd >= 0:
            os.close(each.loan_fd)


def _in_child() -> None:
    """Without a loan it has nothing there: it dies of SIGSEGV, rather than read what is not what it was."""
    for each in _now.__dict__.pop("passed_on", ()):
        map_at(each.address, each.size_bytes, each.fd if each.loan_fd >= 0 else None)
