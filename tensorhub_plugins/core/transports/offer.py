"""One published shard, and who reads it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub_plugins.core.errors import SourceLost, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from tensorhub_plugins.core.memory.claims import Claim
    from tensorhub_plugins.core.memory.slab import Slab

CUT_S_MAX = 10.0  # a cut reader's thread only has to leave one system call; beyond this something is broken


class Offer:
    """One published shard, and who reads it. Shared by the publisher and all serving threads.

    Segments are served once they are marked ready: all at once by a publisher, one by one by a reader that passes on
    what it has verified.
    """

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
        """created_after: a `request_id` of the session with the hub from before the hub was told of this offer. lends:
        readers of this host may use its memory where it lies, and have it after the offer is withdrawn."""
        self.key = key
        self.created_after = created_after
        self.manifest = manifest
        self.slab = slab
        self.lends = lends
        self.epoch = epoch  # told to readers, who compare it after reading
        self._ready = bytearray(manifest.segment_count)
        self._changed = threading.Condition()
        self._withdrawn = False
        self._readers: dict[int, Callable[[], None]] = {}
        self._next_reader = 0
        self._before: tuple[Slab, set[int]] | None = None  # where the bytes lay, and who may still read them there
        self._claim = self._claimed(slab)

    @property
    def version(self) -> int:
        """The version that is offered."""
        return self.key.version

    # --- readiness ---

    def mark_ready(self, segment: int) -> None:
        """This segment's bytes are in the slab, and verified."""
        with self._changed:
            self._ready[segment] = 1
            self._changed.notify_all()

    def mark_all_ready(self) -> None:
        """Every segment's bytes are in the slab, and verified."""
        with self._changed:
            self._ready = bytearray(b"\x01") * len(self._ready)
            self._changed.notify_all()

    def wait_ready(self, segment: int, deadline: float) -> None:
        """Return when the segment may be read. SourceLost when the offer is withdrawn, or at the deadline."""
        if not self.poll_ready(segment, deadline):
            raise SourceLost(
                f"segment {segment} did not arrive at its source in time", version=self.version, phase="wait"
            )

    def poll_ready(self, segment: int, deadline: float) -> bool:
        """`wait_ready` that answers False at the deadline."""
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
            return True

    # --- readers ---

    def move(self, slab: Slab) -> None:
        """The same bytes lie in this slab from now on. The one before is kept for those that read from it, who may have
        been told its addresses."""
        before, self._claim = self._claim, self._claimed(slab)
        before.end()
        with self._changed:
            self._before = (self.slab, set(self._readers)) if self._readers else None
            self.slab = slab

    def attach(self, cut: Callable[[], None]) -> int:
        """A reader begins. `cut` must make its thread stop at once and not block. VersionGone when withdrawn."""
        with self._changed:
            if self._withdrawn:
                raise VersionGone("the source has withdrawn its offer", version=self.version, phase="open")
            reader = self._next_reader
            self._next_reader += 1
            self._readers[reader] = cut
            return reader

    def detach(self, reader: int) -> None:
        """A reader has ended, whatever the reason. Idempotent."""
        with self._changed:
            self._readers.pop(reader, None)
            if self._before is not None and self._before[1].isdisjoint(self._readers):
                self._before = None
            self._changed.notify_all()

    @property
    def active_readers(self) -> int:
        """Connections that have opened this offer and neither checked nor closed since; a link may have several."""
        with self._changed:
            return len(self._readers)

    def wait_no_readers(self, deadline: float) -> bool:
        """Wait until nobody reads; False at the deadline."""
        with self._changed:
            while self._readers:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    @property
    def withdrawn(self) -> bool:
        """Whether nobody may read it any more."""
        with self._changed:
            return self._withdrawn

    def withdraw(self, *, timeout_s: float = CUT_S_MAX) -> None:
        """Raise the epoch, refuse new readers, cut off those there are, and return when they have left. Idempotent.

        To let readers finish first, end their leases and call `wait_no_readers` before. RuntimeError if a serving
        thread does not let go of the memory in timeout_s, which would be a bug: then the bytes must not be touched.
        """
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
        """Nobody may read into it until the offer is withdrawn."""
        from tensorhub_plugins.core.memory.claims import Claim  # with torch, which not everybody needs who knows offers

        claim = Claim(slab, f"{self.key} has", is_written=False, version=self.version)
        offer = weakref.ref(self)  # no circle: the claim of an offer that was dropped ends with it
        claim.leaves = lambda: (mine := offer()) is None or mine._withdrawn
        return claim.begin()
