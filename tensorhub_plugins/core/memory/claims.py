"""A register of all memory that this process reads into, or that others read meanwhile; all clients share it.

Two reads into the same memory would each find every digest right when it is taken, and leave a mix of both. So memory
that is read into is claimed exclusively, under whatever names, views or clients it comes; memory that is copied or
offered is claimed too, by any number at once. A conflicting claim is refused with the names of both. A claim is weak:
it ends with the object that has made it, at the latest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import numpy as np
import torch

from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.runs import Extents
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import span_of

Memory = Slab | Mapping[str, torch.Tensor]

_changed = threading.Condition()
_claims: WeakSet[Claim] = WeakSet()


class Claim:
    """A use of some memory, until `end`. what: for messages, before the name of a tensor. version: the version that is
    offered. is_pooled: the memory is a pool's, which offers none of it when it hands it out, and hands it out once."""

    def __init__(
        self, memory: Memory, what: str, *, is_written: bool, version: int | None = None, is_pooled: bool = False
    ) -> None:
        self.memory, self.what, self.version = memory, what, version
        self.is_written, self.is_pooled = is_written, is_pooled
        self.leaves: Callable[[], bool] = lambda: False  # whether it is about to end

    def begin(self) -> Claim:
        """Register the claim: conflicting ones are refused from now on. This does not look for conflicts itself."""
        if isinstance(self.memory, Slab) and self.version is not None:
            self.memory.begin_offer(self)
        with _changed:
            _claims.add(self)
        return self

    def end(self) -> None:
        """End the claim: the memory may be used for anything else. Idempotent."""
        with _changed:
            _claims.discard(self)
            _changed.notify_all()
        if isinstance(self.memory, Slab) and self.version is not None:
            self.memory.end_offer(self)


def claim(memory: Memory, what: str, *, is_written: bool, is_pooled: bool = False, deadline: float = NEVER) -> Claim:
    """Claim memory, or raise UsageError that names its user. deadline: for waiting for a claim that is about to end,
    and for checking so many tensors (DeadlineExceeded)."""
    mine = Claim(memory, what, is_written=is_written, is_pooled=is_pooled)
    extents = _sorted(memory, deadline)
    with _changed:
        while (found := _conflict(mine, extents, deadline)) is not None:
            other, names = found
            left = deadline - time.monotonic()
            if not other.leaves() or left <= 0:
                raise _refusal(mine, other, names)
            _changed.wait(min(left, threading.TIMEOUT_MAX))
        return mine.begin()


@contextmanager
def claimed(memory: Memory, what: str, deadline: float = NEVER) -> Iterator[None]:
    """Claim the memory for reading by this process, within the `with` block."""
    mine = claim(memory, what, is_written=False, deadline=deadline)
    try:
        yield
    finally:
        mine.end()


def is_used(slab: Slab) -> bool:
    """Return whether tensors made of this slab are still used, although no pool has handed the slab out."""
    extents = _sorted(slab, NEVER)
    with _changed:
        return any(_overlap(extents, _sorted(each.memory, NEVER)) for each in _claims if not each.is_pooled)


def _conflict(mine: Claim, extents: Extents, deadline: float) -> tuple[Claim, tuple[str, str]] | None:
    """Return a conflicting claim, and the name of a tensor of each that lie in the same memory."""
    if mine.is_pooled:
        others = [each for each in _claims if each.is_written and not each.is_pooled]
    else:
        others = [each for each in _claims if mine.is_written or each.is_written]
    for other in sorted(others, key=lambda each: not each.is_written):  # a read that is served is claimed twice
        if _overlap(extents, _sorted(other.memory, deadline)):
            names = _names(mine.memory, other.memory, deadline)
            if names is not None:
                return other, names
    return None


def _refusal(mine: Claim, other: Claim, names: tuple[str, str]) -> UsageError:
    if other.version is not None:
        return UsageError(
            f"these tensors are published: unpublish that version before they change. {mine.what} {names[0]!r}, which "
            f"lies in the memory of {names[1]!r} that {other.what}",
            version=other.version,
        )
    return UsageError(
        f"{mine.what} {names[0]!r}, and {other.what} {names[1]!r}, which is the same memory: do one after the other, "
        "or give each memory of its own"
    )


def _sorted(memory: Memory, deadline: float) -> Extents:
    """Return the addresses [first, end), sorted by the first; the ends never decrease."""
    if isinstance(memory, Slab):
        extents = memory.extents(deadline)
    else:
        tensors = until(deadline, memory.values())
        found = [(tensor.data_ptr(), span_of(tensor)) for tensor in tensors if tensor.device.type != "meta"]
        extents = np.array(found, np.uint64).reshape(-1, 2)
    extents = extents[extents[:, 1] > 0]
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    return np.stack([extents[:, 0], np.maximum.accumulate(extents.sum(axis=1, dtype=np.uint64))], axis=1)


def _overlap(some: Extents, others: Extents) -> bool:
    if not len(some) or not len(others) or some[0, 0] >= others[-1, 1] or others[0, 0] >= some[-1, 1]:
        return False
    fewer, more = sorted((some, others), key=len)
    before = np.searchsorted(more[:, 0], fewer[:, 1])  # those that begin before each of the fewer ends
    return bool(((before > 0) & (more[before - 1, 1] > fewer[:, 0])).any())


def _names(mine: Memory, others: Memory, deadline: float) -> tuple[str, str] | None:
    """Return the names of two tensors that overlap; None if the memory was taken away from one of them."""
    ours, theirs = (sorted(_named(memory, deadline)) for memory in (mine, others))
    at = 0
    for start, stop, name in ours:
        while at < len(theirs) and theirs[at][1] <= start:
            at += 1
        if at < len(theirs) and theirs[at][0] < stop:
            return name, theirs[at][2]
    return None


def _named(memory: Memory, deadline: float) -> Iterator[tuple[int, int, str]]:
    tensors = memory.named if isinstance(memory, Slab) else memory
    for name, tensor in until(deadline, tensors.items()):
        if tensor.device.type != "meta" and (size_bytes := span_of(tensor)):
            yield tensor.data_ptr(), tensor.data_ptr() + size_bytes, name
