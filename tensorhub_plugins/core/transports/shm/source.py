"""The source's end of shm: sends its slab's file, the addresses of adopted memory, or makes a shared copy."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from contextlib import ExitStack

from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.transports.limits import TransportLimits
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.source import SourceBackend
from tensorhub_plugins.core.transports.stream.unix_socket import check_owner
from tensorhub_plugins.core.types import CHECKPOINT

ADOPTED = "its tensors lie in memory that was adopted, or cannot be shared"
READY_MAX = 4096  # segments in one message: one message each would take time from those that copy
COPY_AHEAD = 8  # while its reader copies these the source puts the next ones into the shared copy
SHARED_COPY_READERS = 3  # at a time: copying from a mapping is so much cheaper for each that it pays for the extra copy


class ShmSource(SourceBackend):
    """A backend that serves memory to this host by its file, by its addresses, or by a shared copy."""

    name = "shm"

    def accept_peer(self, sock: socket.socket) -> str:
        return f"pid {check_owner(sock)}"

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._guard = threading.Lock()
        self._refused_at: weakref.WeakKeyDictionary[Offer, float] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[Offer, SharedCopy] = weakref.WeakKeyDictionary()
        self._reading: dict[Channel, Offer] = {}  # through a shared copy
        self._idle: SharedCopy | None = None  # not read now, but several readers used it
        self._idle_over = threading.Event()  # set: it is idle no more

    def refusal(self, offer: Offer) -> str | None:
        if offer.slab.shared_fd is not None:
            return None
        with self._guard:
            now = time.monotonic()
            refused_at = self._refused_at.get(offer)
            together = offer.slab.device is not None or (  # each reader would copy from the device: one copy serves all
                refused_at is not None and (bool(offer.active_readers) or now - refused_at < self._limits.together_s)
            )
            if self._copy_of(offer, several=together):
                return None
            self._refused_at[offer] = now
        return ADOPTED

    def addresses(self, offer: Offer) -> bytes | None:
        extents = None if offer.slab.shared_fd is not None else offer.slab.addresses()
        if extents is None:
            return None
        with self._guard:
            if self._copy_of(offer, several=offer.active_readers >= SHARED_COPY_READERS - 1):
                return None
        return _process.pack(extents)

    def lends(self, offer: Offer) -> bool:
        if offer.slab.shared_fd is not None:
            return True
        if offer.key.layout == CHECKPOINT:  # its readers want parts of it, or assemble parts
            return False
        with self._guard:
            shared = self._copy_of(offer, several=True)
            if shared is not None:
                shared.together = SHARED_COPY_READERS  # worth keeping for the next borrower
        return shared is not None

    def send_memory(self, channel: Channel, offer: Offer, deadline: float, *, lends: bool = False) -> None:
        slab = offer.slab
        if slab.shared_fd is None:
            with self._guard:
                shared = self._copy_of(offer, several=True)
                if shared is not None:
                    shared.readers += 1
                    shared.together = max(shared.together, offer.active_readers)
                    self._reading[channel] = offer
                    slab = shared.slab
        fd, liveness_fd = slab.shared_fd, slab.owner_liveness_fd
        if fd is None or liveness_fd is None:
            raise SourceLost("the slab was closed", version=offer.version)
        with ExitStack() as ours:  # also if the system has no descriptor left for the loan
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # readers must not be able to write
            ours.callback(os.close, readable)
            sent = [readable, liveness_fd]
            if lends:
                loan = slab.lend()
                ours.callback(loan.close)
                sent.append(loan.fileno())
            channel.send_descriptors(sent, deadline)

    def segment_payload(
        self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float
    ) -> list[memoryview]:
        shared = self._copies.get(offer) if channel in self._reading else None
        if shared is not None:
            shared.copy(offer, start, stop)
        return []

    def ready_batch_max(self, channel: Channel) -> int:
        return COPY_AHEAD if channel in self._reading else READY_MAX

    def on_reader_done(self, channel: Channel, *, ended: bool) -> None:
        if ended:
            channel.cut()  # before its memory is reused: a reader that still copies from it detects that
        with self._guard:
            offer = self._reading.pop(channel, None)
            shared = self._copies.get(offer) if offer is not None else None
            if offer is None or shared is None:
                return
            shared.readers -= 1
            if shared.readers:
                return
            del self._copies[offer]
            if shared.together < SHARED_COPY_READERS and offer.slab.device is None:
                shared.slab.close()
                return
            self._take_idle(close=True)
            self._idle, self._idle_over = shared, threading.Event()
            try:
                Thread(target=self._end_idle, args=[shared, self._idle_over], name="tensorhub-shm-idle").start()
            except RuntimeError:  # no thread is left: it is made anew for the next readers
                self._take_idle(close=True)

    def close(self) -> None:
        with self._guard:
            self._take_idle(close=True)

    def _end_idle(self, shared: SharedCopy, over: threading.Event) -> None:
        if over.wait(self._limits.shared_copy_kept_s):
            return
        with self._guard:
            if self._idle is shared and not over.is_set():  # else it was taken meanwhile, and given back
                self._take_idle(close=True)

    def _take_idle(self, *, close: bool = False) -> SharedCopy | None:
        """Take the idle copy, if there is one. The caller holds `_guard`."""
        shared, self._idle = self._idle, None
        self._idle_over.set()
        if shared is not None and close:
            shared.slab.close()
        return shared

    def _copy_of(self, offer: Offer, *, several: bool) -> SharedCopy | None:
        """Return the shared copy of this offer to read from: an existing one, one in idle memory, or a new one if
        `several` want to read at the same time. The caller holds `_guard`."""
        shared = self._copies.get(offer)
        if shared is None and offer.slab.kind != "allocated":
            if self._idle is not None and self._idle.may_be_of(offer):
                shared = self._take_idle()
            elif several:
                shared = SharedCopy(offer)
            if shared is not None:
                shared.begin(offer)
                self._copies[offer] = shared
        return shared


class SharedCopy:
    """A shareable copy of a shard that has no file of its own, filled as it is read."""

    def __init__(self, offer: Offer) -> None:
        device = offer.slab.device
        self.slab = Slab.allocate(offer.manifest.tensors, pin=False if device is None else None, device=device)
        self.readers = 0
        self._of: weakref.ref[Offer] | None = None

    def may_be_of(self, offer: Offer) -> bool:
        """Return whether its memory can hold a copy of this offer: it does already, or the memory is not in use."""
        is_same = self._of is not None and self._of() is offer
        return self.slab.specs == offer.manifest.tensors and (is_same or not self.slab.is_lent)

    def begin(self, offer: Offer) -> None:
        """Become a copy of this offer; what it already holds of it is not copied again."""
        self.together = 0  # the most simultaneous readers, including those of the offer's own memory
        if self._of is None or self._of() is not offer:
            self._of = weakref.ref(offer)
            self._locks = [threading.Lock() for _ in range(offer.manifest.segment_count)]
            self._copied = bytearray(offer.manifest.segment_count)

    def copy(self, offer: Offer, start: int, stop: int) -> None:
        """Copy a segment once for all readers; the others wait for it."""
        segment = start // offer.manifest.segment_size_bytes
        with self._locks[segment]:
            if not self._copied[segment]:
                with self.slab.writable(start, stop) as views:
                    offer.slab.read_into(start, stop, views)
                self._copied[segment] = 1
