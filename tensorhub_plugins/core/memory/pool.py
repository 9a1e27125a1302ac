"""Allocated slabs that are kept for the next version: touching fresh memory takes as long as reading into it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

from tensorhub_plugins.core.deadline import NEVER
from tensorhub_plugins.core.device.devices import here
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
from tensorhub_plugins.core.memory.claims import is_used
from tensorhub_plugins.core.memory.inherited import pass_on
from tensorhub_plugins.core.memory.slab import Slab

POOLED_SLABS_MAX = 2  # per set of tensors: one being filled while one is still read
IDLE_ROUNDS_MAX = 4  # a slab left unused while all others were taken so often is obsolete


class SlabPool:
    """A pool that hands out allocated slabs, and takes back those that it has handed out. Any thread may call.

    A slab's hand-out number identifies one use of it: returning a slab again, after it was returned and handed out for
    another use, has no effect. All are pinned for the device of the thread that makes the pool: the thread that takes
    slabs may not have a device of its own yet."""

    def __init__(self) -> None:
        self._device = here()
        self._lock = threading.Lock()
        self._free: dict[Slab, int] = {}  # and the number of the take in which it was last used
        self._handed_out: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()  # ours, with their hand-out numbers
        self._single: WeakSet[Slab] = WeakSet()  # ours too, but not to be reused
        self._held: WeakSet[Slab] = WeakSet()  # by the callers that fetched their contents
        self._takes = 0
        self._closed = False
        pass_on(self)

    def take(
        self, specs: Iterable[TensorSpec], deadline: float = NEVER, room: Room | None = None, *, ahead: bool = False
    ) -> Slab:
        """Return host memory for these tensors, none of them marked written; that of a past version, where possible.
        room: the budget for new memory; None: what is free now. Raise ResourceRefused when it is exceeded. ahead: it
        is written later, see `Slab.allocate`."""
        wanted = TensorTable.of(specs)
        with self._lock:
            self._takes += 1
            # Most recently returned first: a slab that was needed only once then stays idle, and is closed.
            alike = [slab for slab in reversed(self._free) if slab.specs == wanted]
            # What is used stays with its users.
            idle = [slab for slab in alike if slab.is_closed or slab.is_lent or is_used(slab)]
            for slab in idle:
                self._forget(slab)
            found = next((slab for slab in alike if slab not in idle), None)
            if found is not None:
                del self._free[found]
                self._handed_out[found] += 1
            idle += self._idle()
        for old in idle:
            old.close()
        if found is not None:
            found.expect_writes()
            return found
        (room or Room()).take(wanted.block_size_bytes)
        slab = Slab.allocate(wanted, device=self._device, ahead=ahead, deadline=deadline)
        with self._lock:
            self._handed_out[slab] = 1
        return slab

    def reserve(self, specs: Iterable[TensorSpec], count: int) -> None:
        """Allocate memory for so many later calls of `take`, as far as it would be kept, and have its pages made in the
        background. Errors as there: what was allocated before is kept."""
        table, taken = TensorTable.of(specs), list[Slab]()
        try:
            for _ in range(min(count, POOLED_SLABS_MAX)):
                taken.append(self.take(table, ahead=True))
        finally:
            for slab in reversed(taken):  # so that the one whose pages are made first is taken first
                self.give_back(slab)

    def take_once(self, specs: Iterable[TensorSpec], deadline: float = NEVER) -> Slab:
        """Return host memory that is closed when it is returned. Raise ResourceRefused if there is not enough."""
        wanted = TensorTable.of(specs)
        Room().take(wanted.block_size_bytes)
        return self.keep(Slab.allocate(wanted, device=self._device, deadline=deadline))

    def keep(self, slab: Slab) -> Slab:
        """Close this slab, too, when it is returned."""
        with self._lock:
            self._single.add(slab)
        return slab

    def hold(self, slab: Slab) -> None:
        """Mark the slab as fetched by a caller, which may use it until `release`, or a `give_back` of this use."""
        with self._lock:
            self._held.add(slab)

    def release(self, slab: Slab) -> None:
        """End the use by the caller that fetched the slab; other uses continue."""
        with self._lock:
            self._held.discard(slab)

    def held(self) -> list[Slab]:
        """Return what was fetched and not released."""
        with self._lock:
            return list(self._held)

    def hand_out(self, slab: Slab) -> int:
        """Return the number of the slab's current use; 0 if it is not from this pool."""
        with self._lock:
            return self._handed_out.get(slab, 0)

    def reclaim(self, slab: Slab) -> None:
        """Take a returned slab out of the pool: its owner, which still has it, uses it again."""
        with self._lock:
            self._free.pop(slab, None)

    def give_back(self, slab: Slab, hand_out: int | None = None) -> None:
        """Return a slab that is not used any more. hand_out: only if this is still its current use."""
        with self._lock:
            ours = slab in self._handed_out
            if not (ours or slab in self._single) or slab in self._free:
                return
            if hand_out is None and slab in self._held:
                return  # it is not offered any more, but the caller that fetched it may still use it
            if ours and hand_out not in (None, self._handed_out.get(slab)):
                return
            self._held.discard(slab)
            alike = sum(free.specs == slab.specs for free in self._free)
            if ours and alike < POOLED_SLABS_MAX and not self._closed:
                self._free[slab] = self._takes
                return
            self._forget(slab)
        slab.close()

    def discard(self, slab: Slab) -> None:
        """Close the slab, if it is from this pool: it will not be used again."""
        with self._lock:
            ours = slab.borrowed is None and (slab in self._handed_out or slab in self._single)
            self._forget(slab)
        if ours:
            slab.close()

    def close(self) -> None:
        """Close the slabs in the pool; those in use are closed when they are returned."""
        with self._lock:
            self._closed = True
            free, self._free = list(self._free), {}
        for slab in free:
            slab.close()

    def _forget(self, slab: Slab) -> None:
        self._free.pop(slab, None)
        self._handed_out.pop(slab, None)
        self._single.discard(slab)

    def _idle(self) -> list[Slab]:
        """Remove and return the slabs that were idle for too long: the tensors have changed since."""
        # Slabs that are used again and again are taken in turn, once each; one that was used once may never be again.
        round_ = max(1, sum(slab not in self._free or uses > 1 for slab, uses in self._handed_out.items()))
        idle = [slab for slab, last in self._free.items() if self._takes - last > IDLE_ROUNDS_MAX * round_]
        for slab in idle:
            self._forget(slab)
        return idle
