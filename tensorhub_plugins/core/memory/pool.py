"""Allocated slabs that are kept for the next version: to touch fresh memory takes as long as to read into it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

from tensorhub_plugins.core.deadline import NEVER
from tensorhub_plugins.core.device import here
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
from tensorhub_plugins.core.memory.claims import is_used
from tensorhub_plugins.core.memory.slab import Slab

POOLED_SLABS_MAX = 2  # per set of tensors: one being filled while one is still read
IDLE_ROUNDS_MAX = 4  # a slab that was not taken while all others were so often is of tensors that come no more


class SlabPool:
    """Hands out allocated slabs, and takes back those that it has handed out. Any thread may call.

    A slab's hand-out number says which use of it is meant: who returns one that was returned before, and is used by
    others again, changes nothing. All are pinned for the device of the thread that makes the pool: who takes slabs
    from it may be a thread that has no device of its own yet.
    """

    def __init__(self) -> None:
        self._device = here()
        self._lock = threading.Lock()
        self._free: dict[Slab, int] = {}  # and the take with which it was last in use
        self._handed_out: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()  # ours, and how often
        self._single: WeakSet[Slab] = WeakSet()  # ours too, but not to be used again
        self._held: WeakSet[Slab] = WeakSet()  # by who has fetched what is in them
        self._takes = 0
        self._closed = False

    def take(self, specs: Iterable[TensorSpec], deadline: float = NEVER, room: Room | None = None) -> Slab:
        """Host memory for these tensors, none of them written; that of a version that is over, where there is some.
        room: for new memory; None: what is free now. ResourceRefused where it is too much."""
        wanted = TensorTable.of(specs)
        with self._lock:
            self._takes += 1
            # Those that came last first: one that was needed once, and no more, then lies idle, and is let go.
            alike = [slab for slab in reversed(self._free) if slab.specs == wanted]
            idle = [slab for slab in alike if slab.is_lent or is_used(slab)]  # for whoever uses it, and for nobody else
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
        slab = Slab.allocate(wanted, device=self._device, deadline=deadline)
        with self._lock:
            self._handed_out[slab] = 1
        return slab

    def take_once(self, specs: Iterable[TensorSpec], deadline: float = NEVER) -> Slab:
        """Host memory that is closed when it is given back. ResourceRefused where there is not so much."""
        wanted = TensorTable.of(specs)
        Room().take(wanted.block_size_bytes)
        return self.keep(Slab.allocate(wanted, device=self._device, deadline=deadline))

    def keep(self, slab: Slab) -> Slab:
        """Close this slab, too, when it is given back."""
        with self._lock:
            self._single.add(slab)
        return slab

    def hold(self, slab: Slab) -> None:
        """Somebody has fetched what is in it, and may use it until `release`, or a `give_back` of this very use."""
        with self._lock:
            self._held.add(slab)

    def release(self, slab: Slab) -> None:
        """Who has fetched it uses it no more; others may still."""
        with self._lock:
            self._held.discard(slab)

    def hand_out(self, slab: Slab) -> int:
        """Which use of the slab this is; 0: it is not from here."""
        with self._lock:
            return self._handed_out.get(slab, 0)

    def reclaim(self, slab: Slab) -> None:
        """It was given back, and its owner, who has it still, uses it again."""
        with self._lock:
            self._free.pop(slab, None)

    def give_back(self, slab: Slab, hand_out: int | None = None) -> None:
        """Nobody uses it any more. hand_out: only if this is still the use that is meant."""
        with self._lock:
            ours = slab in self._handed_out
            if not (ours or slab in self._single) or slab in self._free:
                return
            if hand_out is None and slab in self._held:
                return  # it is offered no more, but whoever has fetched it may use it still
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
        """Close it, if it is from here: it will not be used again."""
        with self._lock:
            ours = slab.borrowed is None and (slab in self._handed_out or slab in self._single)
            self._forget(slab)
        if ours:
            slab.close()

    def close(self) -> None:
        """Let go of the slabs that lie here; those that are in use are closed when they come back."""
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
        """Takes out what has lain here for too long: the tensors have changed since."""
        round_ = max(1, len(self._handed_out))
        idle = [slab for slab, last in self._free.items() if self._takes - last > IDLE_ROUNDS_MAX * round_]
        for slab in idle:
            self._forget(slab)
        return idle
