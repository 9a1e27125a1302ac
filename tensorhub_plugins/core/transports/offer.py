"""One published shard, and its readers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tensorhub_plugins.core.deltas.frame import Step
from tensorhub_plugins.core.device.graph_capture import gate
from tensorhub_plugins.core.errors import SourceLost, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from tensorhub_plugins.core.memory.claims import Claim
    from tensorhub_plugins.core.memory.slab import Slab

CUT_S_MAX = 10.0  # a thread that was cut off only has to leave one system call; beyond this something is broken


class Sender(Protocol):
    """What makes deltas of one offer for its readers. Called from serving threads."""

    def wanted(self) -> None:
        """Note that a reader could take deltas, if not of this version then of the next one."""

    def find(self, segment: int, bases: Sequence[bytes], rate: float) -> list[Step] | None:
        """Return what turns one of these bases, digests, into this segment; None: it is to be sent whole. rate: bytes a
        second at which that would come; 0: unknown."""

    def refuse(self, links: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget these deltas, named by what they turn into what: the reader asked for the segment whole after all."""


class Offer:
    """One published shard, and its readers. Shared by the publisher and all serving threads.

    Segments are served once they are marked ready: all at once by a publisher, one by one by a reader that serves what
    it has verified."""

    def __init__(
        self,
        key: ShardKey,
        manifest: Manifest,
        slab: Slab,
        epoch: int = 0,
        *,
        created_after: int = 0,
        lends: bool = False,
    ) -> None:
        """Make an offer. created_after: a `request_id` of the session with the hub from before the hub learned of this
        offer. lends: readers of this host may use its memory in place, even after the offer is withdrawn."""
        self.key, self.created_after, self.manifest = key, created_after, manifest
        self.slab, self.lends = slab, lends
        self.deltas: Sender | None = None  # None: segments are sent whole
        self.doubt: Callable[[int], None] = lambda segment: None  # have this segment looked at, without waiting for it
        self.epoch = epoch  # sent to readers, which compare it after reading
        self._ready = bytearray(manifest.segment_count)
        self._changed = threading.Condition()
        self._withdrawn = False
        self._readers: dict[int, Callable[[], None]] = {}
        self._next_reader = 0
        self._before: tuple[Slab, set[int]] | None = None  # the former slab, and the readers that may still use it
        self._claim = self._claimed(slab)

    @property
    def version(self) -> int:
        """Return the version that is offered."""
        return self.key.version

    # --- readiness ---

    def mark_ready(self, segment: int) -> None:
        """Mark this segment as ready: its bytes are in the slab, and verified."""
        with self._changed:
            self._ready[segment] = 1
            self._changed.notify_all()

    def mark_all_ready(self) -> None:
        """Mark every segment as ready: all bytes are in the slab, and verified."""
        with self._changed:
            self._ready = bytearray(b"\x01") * len(self._ready)
            self._changed.notify_all()

    def poll_ready(self, segment: int, deadline: float) -> bool:
        """Wait until the segment may be read; return False at the deadline, also of a device that captures graphs until
        then: its memory cannot be read. Raise SourceLost when the offer is withdrawn."""
        with self._changed:
            while not self._ready[segment]:
                if self._withdrawn:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            if self._withdrawn:
                raise SourceLost("the source withdrew its offer", version=self.version, phase="wait")
        return self.slab.device is None or gate.wait(deadline)

    def check_memory(self, segment: int) -> None:
        """Raise VersionGone where the memory of this segment cannot be read any more, before this process touches it
        and is ended: it may be the rest of a mapped file that was cut off."""
        if not self.slab.is_there(*self.manifest.segment_range(segment)):
            self.doubt(segment)
            raise VersionGone("its memory is gone at the source", version=self.version, phase="read")

    # --- readers ---

    def move(self, slab: Slab) -> None:
        """Serve the same bytes from this slab from now on. The old one is kept for its current readers, which may have
        received its addresses."""
        before, self._claim = self._claim, self._claimed(slab)
        before.end()
        with self._changed:
            self._before = (self.slab, set(self._readers)) if self._readers else None
            self.slab = slab

    def attach(self, cut: Callable[[], None]) -> int:
        """Register a reader. `cut` must make its thread stop at once and not block. VersionGone when withdrawn."""
        with self._changed:
            if self._withdrawn:
                raise VersionGone("the source has withdrawn its offer", version=self.version, phase="open")
            reader = self._next_reader
            self._next_reader += 1
            self._readers[reader] = cut
            return reader

    def detach(self, reader: int) -> None:
        """Unregister a reader, however it has ended. Idempotent."""
        with self._changed:
            self._readers.pop(reader, None)
            if self._before is not None and self._before[1].isdisjoint(self._readers):
                self._before = None
            self._changed.notify_all()

    @property
    def active_readers(self) -> int:
        """Return the number of connections that have this offer open; a link may have several."""
        with self._changed:
            return len(self._readers)

    def wait_no_readers(self, deadline: float) -> bool:
        """Wait until there is no reader; return False at the deadline."""
        with self._changed:
            while self._readers:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    @property
    def withdrawn(self) -> bool:
        """Return whether it may not be read any more."""
        with self._changed:
            return self._withdrawn

    def withdraw(self, *, timeout_s: float = CUT_S_MAX) -> None:
        """Raise the epoch, refuse new readers, cut off the present ones, and return when they have left. Idempotent.

        To let readers finish first, end their leases and call `wait_no_readers` before. RuntimeError if a serving
        thread does not release the memory in timeout_s, which would be a bug: the bytes must not be touched then."""
        with self._changed:
            if not self._withdrawn:
                self._withdrawn = True
                self.epoch += 1
            # Under the lock: a reader that detaches meanwhile may already use its connection for another offer.
            for cut in list(self._readers.values()):
                cut()
            self._changed.notify_all()
        if not self.wait_no_readers(time.monotonic() + timeout_s):
            raise RuntimeError(f"{self.active_readers} readers of version {self.version} did not end when cut off")
        self._claim.end()

    def _claimed(self, slab: Slab) -> Claim:
        """Claim the slab: it must not be read into until the offer is withdrawn."""
        from tensorhub_plugins.core.memory.claims import Claim  # imports torch, which not every user of offers needs

        claim = Claim(slab, f"{self.key} has", is_written=False, version=self.version)
        offer = weakref.ref(self)  # no reference cycle: the claim of a dropped offer ends with it
        claim.leaves = lambda: (mine := offer()) is None or mine._withdrawn
        return claim.begin()
