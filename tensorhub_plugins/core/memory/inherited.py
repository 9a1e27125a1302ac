"""What a forked child has of its parent's fetched tensors: the bytes that they have then, for as long as it lives.

They lie in a file that parent and child would share, into which the parent reads a later version once they have been
released. So the child keeps a loan (loans.py) of what is held when it is forked: while it lives the parent takes other
memory. And its mapping becomes its own: what the child writes no other process sees.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.loans import map_at
from tensorhub_plugins.core.memory.slab import Slab

if TYPE_CHECKING:
    from tensorhub_plugins.core.memory.pool import SlabPool


class _Inherited(NamedTuple):
    """A slab's memory, for a child that is about to be forked. loan_fd: -1: it could not be had."""

    address: int
    size_bytes: int
    fd: int
    loan_fd: int


_holders: WeakSet[SlabPool] = WeakSet()
_now = threading.local()  # what this thread, which forks, passes on


def pass_on(holder: SlabPool) -> None:
    """Have forked children keep what this pool holds, from now on."""
    _watch()
    _holders.add(holder)


@cache
def _watch() -> None:
    """Watch forks: once, and not before there is a pool, as importing has no effects."""
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    held = (slab for holder in list(_holders) for slab in holder.held() if slab.kind == "allocated")
    _now.passed_on = list(filter(None, map(_inherited, held)))


def _inherited(slab: Slab) -> _Inherited | None:
    """Return what a child needs; None where the memory is empty, private, or closed, and so not written again."""
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
    """Map the memory anew. Without a loan there is none: better SIGSEGV than to read other bytes than before."""
    _holders.clear()  # a child of this one has its pages, and the loans, by being forked
    for each in _now.__dict__.pop("passed_on", ()):
        map_at(each.address, each.size_bytes, each.fd if each.loan_fd >= 0 else None)
