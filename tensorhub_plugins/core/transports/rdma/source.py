"""The source's end of rdma: registers its offers, or passes them through a ring, and makes queue pairs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.transports.limits import DIAL_S, TransportLimits
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.rdma import messages as m
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import Region
from tensorhub_plugins.core.transports.rdma.registration import BounceBuffer, Registry, log_once
from tensorhub_plugins.core.transports.rdma.verbs import Nic, QueuePair
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.source import SourceBackend
from tensorhub_plugins.core.transports.stream.tcp_socket import tune

RINGS_KEPT_MAX = 4  # for the next readers


class RdmaSource(SourceBackend):
    """A backend that serves registered memory, or passes memory that cannot be registered through a ring."""

    name = "rdma"
    keeps_connections = True

    def __init__(self, nics: Sequence[Nic], memory: Registry, limits: TransportLimits) -> None:
        self._limits, self._nics, self._memory = limits, nics, memory
        self._guard = threading.Lock()
        self._pairs: dict[Channel, list[QueuePair]] = {}
        self._idle: dict[Channel, None] = {}  # oldest first
        self._rings: dict[Channel, _SlotRing] = {}
        self._spare_rings: list[_SlotRing] = []

    def accept_peer(self, sock: socket.socket) -> str:
        tune(sock)
        return format_address(self.name, *sock.getpeername()[:2])

    def refusal(self, offer: Offer) -> str | None:
        try:
            _, ring = self._readable(offer)
        except VerbsError as error:
            log_once(logging.WARNING, "rdma: what is in such memory cannot be served: %s", str(error))
            return str(error)
        self._put_back(ring)
        return None

    def send_memory(self, channel: Channel, offer: Offer, deadline: float, *, lends: bool = False) -> None:
        try:
            memory, ring = self._readable(offer)
        except VerbsError as error:
            raise SourceLost(str(error), version=offer.version) from error
        if ring is not None:
            with self._guard:
                self._rings[channel] = ring
        with self._guard:
            self._idle.pop(channel, None)
        channel.send_message(m.Rails([nic.port.link_layer for nic in self._nics], memory, ring is not None), deadline)
        dial_by = min(deadline, time.monotonic() + DIAL_S)
        dial = channel.receive_message(m.dial_decoder, m.DIAL_SIZE_BYTES_MAX, dial_by)
        if dial.rails:
            with self._guard:
                old = self._pairs.pop(channel, [])
            for made in old:
                made.close()
        pairs: list[QueuePair] = []
        problem = ""
        try:
            for number, endpoint in dial.rails:
                if not 0 <= number < len(self._nics):
                    raise ProtocolError(f"there is no port {number}")
                pairs.append(QueuePair(self._nics[number]))
                pairs[-1].connect(endpoint)
        except BaseException as error:
            for made in pairs:
                made.close()
            if not isinstance(error, VerbsError):
                raise
            pairs, problem = [], str(error)
        with self._guard:
            self._pairs.setdefault(channel, pairs)
        channel.send_message(m.Dialed([made.endpoint for made in pairs], problem), deadline)

    def _readable(self, offer: Offer) -> tuple[list[Region], _SlotRing | None]:
        """Return the offer's own memory as peers may read it, or else a ring to pass it through. Raise VerbsError."""
        try:
            return self._memory.of(offer.slab).offer(), None
        except (VerbsError, UsageError) as error:
            why = str(error)
        kind = offer.manifest.segment_size_bytes, offer.slab.device
        with self._guard:
            fitting = [ring for ring in self._spare_rings if ring.kind == kind]
            if fitting:
                self._spare_rings.remove(fitting[0])
        try:
            ring = fitting[0] if fitting else _SlotRing(self._nics, *kind)
        except VerbsError as error:
            raise VerbsError(f"{why}; nor can a ring of host memory that it would pass through: {error}") from error
        log_once(logging.INFO, "rdma: served by way of a ring of host memory, as it is itself not registered: %s", why)
        return [ring.region], ring

    def _put_back(self, ring: _SlotRing | None) -> None:
        if ring is None:
            return
        ring.reset()
        with self._guard:
            keep = len(self._spare_rings) < RINGS_KEPT_MAX
            if keep:
                self._spare_rings.append(ring)
        if not keep:
            ring.close()

    def segment_payload(
        self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float
    ) -> list[memoryview]:
        ring = self._rings.get(channel)
        if ring is None:
            return []
        if ring.is_full:
            ring.taken(channel.receive_message(m.taken_decoder, m.DIAL_SIZE_BYTES_MAX, deadline).slot)
        return [memoryview(m.SLOT.pack(ring.fill(offer.slab, start, stop)))]

    def flush(self, channel: Channel, deadline: float) -> None:
        ring = self._rings.get(channel)
        while ring is not None and not ring.is_empty:
            ring.taken(channel.receive_message(m.taken_decoder, m.DIAL_SIZE_BYTES_MAX, deadline).slot)

    def on_reader_done(self, channel: Channel, *, ended: bool) -> None:
        """Keep idle connections, but not too many; destroy everything through which an ended one could read."""
        with self._guard:
            if ended:
                self._idle.pop(channel, None)
                pairs = self._pairs.pop(channel, [])
            else:
                self._idle[channel] = None
                pairs = []
            ring = self._rings.pop(channel, None)
            surplus = list(self._idle)[: max(0, len(self._idle) - self._limits.idle_at_source_max)]
            for oldest in surplus:
                del self._idle[oldest]
        for oldest in surplus:
            oldest.cut()
        for made in pairs:
            made.close()
        self._put_back(ring)


class _SlotRing:
    """A ring of registered host memory with as many slots as segments may be in flight from it. VerbsError.

    Device memory is copied straight into it: the ring is pinned for that device too."""

    def __init__(self, nics: Sequence[Nic], slot_size_bytes: int, device: Device | None) -> None:
        self.kind = slot_size_bytes, device
        self._slot_size_bytes = slot_size_bytes
        self._memory = BounceBuffer(nics, m.RING_SLOTS * slot_size_bytes, device)
        self.region = self._memory.region(m.RING_SLOTS * slot_size_bytes)
        self._free = deque(range(m.RING_SLOTS))

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_empty(self) -> bool:
        return len(self._free) == m.RING_SLOTS

    def fill(self, slab: Slab, start: int, stop: int) -> int:
        slot = self._free.popleft()
        at = slot * self._slot_size_bytes
        slab.read_into(start, stop, [self._memory.view[at : at + stop - start]])
        return slot

    def taken(self, slot: int) -> None:
        if slot in self._free:
            raise ProtocolError(f"slot {slot} of the ring was taken twice")
        self._free.append(slot)

    def reset(self) -> None:
        """Free all slots: their reader has left."""
        self._free = deque(range(m.RING_SLOTS))

    def close(self) -> None:
        self._memory.close()
