"""Over RDMA: the reader's network card reads the source's registered memory, and the source's CPU does nothing.

The conversation is that of tcp (stream/), on a TCP connection of its own, with segment headers that mean "ready" and no
bytes behind them. After Opened the two ends agree on their queue pairs and on memory:

    reader                              source
                                <-      Rails(its ports, its memory with keys)
    Dial(queue pairs)           ->                                      none when the connection has some already
                                <-      Dialed(queue pairs)

Then the reader reads, one-sided, straight into the target slab's memory. Many reads are in flight, on all rails.

Cut off for real
    A withdrawn offer shuts the TCP connection down. The source's serving thread destroys its queue pairs *before* it
    detaches from the offer, and `Offer.withdraw` returns after that: no read that succeeds can have seen memory its
    owner has touched since. A reader notices the closed connection at once, without waiting for retries to run out.

Kept and used again
    A slab is registered once and stays so while it lives. A link that ended well leaves its connection, queue pairs and
    all, to the next link to that source; the source closes the oldest of those that lie idle when there are many.

Where it is not possible
    What cannot be registered at the source (a device's memory without peer memory and dma-buf, more than may be locked)
    passes through a ring of registered host memory there: the header of a segment says in which place of the ring it
    lies, and the reader says Taken. What cannot be registered at the reader is read into such memory and copied from
    there; so is device memory, on its way through the slab's own pinned buffers. Where not even a ring can be
    registered `open` raises NotServable. A source that no rail reaches is remembered for a minute. The log says so.

Configuration: TENSORHUB_RDMA_DEVICES ("mlx5_0,mlx5_1:1", in order; default: the fastest, nearest to the current CUDA
device), TENSORHUB_RDMA_GID_INDEX (default: RoCEv2 with an IPv4 address). Arguments override them.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.interface import More, NotServable, Shelf
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.rdma.rails import (
    RAILS_MAX,
    Extent,
    Region,
    RemoteMemory,
    choose_ports,
    chunks,
    cut_reads,
    find_ports,
    pair,
    regions,
)
from tensorhub_plugins.core.transports.rdma.verbs import (
    Endpoint,
    Memory,
    Nic,
    QueuePair,
    Reader,
    VerbsError,
    open_nics,
    why_not,
)
from tensorhub_plugins.core.transports.read_plan import Placement, ReadPlan
from tensorhub_plugins.core.transports.stream.link import (
    ALIVE,
    CONTROL,
    HEADER,
    REPLY_SIZE_BYTES_MAX,
    SEGMENT,
    STALL_S,
    Channel,
    Dialect,
    Disconnected,
    Opened,
    Server,
    Silent,
    SocketLink,
    greet,
)
from tensorhub_plugins.core.transports.tcp import _listen as listen
from tensorhub_plugins.core.transports.tcp import _tune as tune

SCHEME = "rdma://"
RING_PLACES = 4  # one is filled while others are on the wire
RINGS_KEPT_MAX = 4  # for the next readers
WINDOW = 16  # segments in flight: 64 MiB is more than any path holds
ADOPTED_MAX = 4  # sets of live tensors that stay registered between versions
IDLE_AT_READER_MAX = 8  # connections kept for the next version
IDLE_AT_SOURCE_MAX = 128  # half of what a source accepts
UNREACHABLE_S = 60.0  # how long a source that no rail reached is not tried again
DIAL_S_MAX = 10.0  # a reader that has opened makes its queue pairs at once
PROBE_SIZE_BYTES = 8
PROBE_S_MAX = 8.0  # longer than the retries of a queue pair
SAID_MAX = 100
DEVICES_VARIABLE = "TENSORHUB_RDMA_DEVICES"
GID_INDEX_VARIABLE = "TENSORHUB_RDMA_GID_INDEX"

_log = logging.getLogger(__name__)


class Rails(msgspec.Struct, frozen=True, array_like=True, tag=True):
    link_layers: Annotated[list[str], msgspec.Meta(max_length=64)]  # of the source's ports
    memory: Annotated[list[Region], msgspec.Meta(max_length=1 << 21)]
    is_ring: bool = False  # memory is RING_PLACES segments that the stream passes through, not the stream itself


class Dial(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rails: Annotated[list[tuple[int, Endpoint]], msgspec.Meta(max_length=RAILS_MAX)]  # (the source's port, our end)


class Dialed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rails: Annotated[list[Endpoint], msgspec.Meta(max_length=RAILS_MAX)]
    problem: str = ""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    place: Annotated[int, msgspec.Meta(ge=0, lt=RING_PLACES)]  # of the ring; may be filled again


Message = TypeVar("Message", Rails, Dial, Dialed, Taken)
_encoder = msgspec.msgpack.Encoder()
# Made here and not by decode(type=...): two threads that do so for the first time at once crash msgspec 0.21.
_decoders: dict[type, Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in (Rails, Dial, Dialed, Taken)}
DIAL_SIZE_BYTES_MAX = 1 << 16
PLACE = struct.Struct("<B")


class RdmaTransport:
    """advertise_host: as for tcp, for the control connection. devices, gid_index: None is what the environment says,
    else chosen here. stall_s: as for tcp; also for a read that does not complete."""

    name = "rdma"

    def __init__(
        self,
        advertise_host: str | None = None,
        *,
        port: int = 0,
        devices: Sequence[str] | None = None,
        gid_index: int | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """UsageError when the devices named are not usable; VerbsError stays inside."""
        self._host = "127.0.0.1" if advertise_host is None else advertise_host
        self._port = port
        self._stall_s = stall_s
        ports, reasons = find_ports(gid_index=_configured_gid_index() if gid_index is None else gid_index)
        wanted = _configured_devices() if devices is None else devices
        chosen = choose_ports(ports, wanted, _current_cuda_device())
        try:
            self._nics = open_nics(chosen)
        except VerbsError as error:
            raise UsageError(f"no RDMA device can be used: {'; '.join([str(error), *reasons])}") from error
        _log.info("rdma: using %s", ", ".join(str(nic.port) for nic in self._nics))
        self._memory = _Registry(self._nics)
        self._server: Server | None = None
        self._guard = threading.Lock()
        self._links: weakref.WeakSet[RdmaLink] = weakref.WeakSet()
        self._idle: deque[_Connection] = deque()
        self._unreachable: dict[str, tuple[float, str]] = {}
        self._closed = False

    @staticmethod
    def available() -> str | None:
        reason = why_not()
        if reason is not None:
            return reason
        ports, reasons = find_ports(gid_index=_configured_gid_index())
        return None if ports else "; ".join(reasons) or "no device has a port"

    def serve(self, shelf: Shelf) -> str:
        if self._closed or self._server is not None:
            raise UsageError("this transport is closed or serves already: one transport, one shelf")
        listener = listen(self._host, self._port)
        number = listener.getsockname()[1]
        self._server = Server(listener, shelf, _RdmaDialect(self._nics, self._memory))
        return f"{SCHEME}[{self._host}]:{number}" if ":" in self._host else f"{SCHEME}{self._host}:{number}"

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> RdmaLink:
        host, port = _parse(endpoint)
        with self._guard:
            if self._closed:
                raise UsageError("the transport is closed")
            until, reason = self._unreachable.get(endpoint, (0.0, ""))
        if time.monotonic() < until:
            raise SourceLost(f"not reached over rdma a moment ago: {reason}", peer=endpoint, phase="connect")
        connection = self._take(endpoint)
        if connection is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SourceLost("the deadline passed", peer=endpoint, phase="connect")
            sock: socket.socket | None = None
            try:
                sock = socket.create_connection((host, port), timeout=min(left, self._stall_s))
                tune(sock)
            except OSError as error:
                if sock is not None:
                    sock.close()
                raise SourceLost(f"cannot connect: {error}", peer=endpoint, phase="connect") from error
            connection = _Connection(greet(sock, endpoint, stall_s=self._stall_s, deadline=deadline))
        link = RdmaLink(self, connection, self._stall_s)
        self._links.add(link)
        return link

    def close(self) -> None:
        with self._guard:
            self._closed = True
            idle, self._idle = list(self._idle), deque()
        if self._server is not None:
            self._server.close()
        for connection in idle:
            connection.close()
        for link in list(self._links):
            link.cut()
        self._memory.clear()
        for nic in self._nics:
            nic.close()  # once the links that were cut have let go of it

    # --- for links ---

    @property
    def nics(self) -> list[Nic]:
        return self._nics

    @property
    def memory(self) -> _Registry:
        return self._memory

    def unreachable(self, endpoint: str, reason: str) -> None:
        _log.warning("rdma: %s is not reached for %g s, other transports go on: %s", endpoint, UNREACHABLE_S, reason)
        with self._guard:
            self._unreachable[endpoint] = (time.monotonic() + UNREACHABLE_S, reason)

    def keep(self, connection: _Connection) -> None:
        """For the next link to the same source."""
        surplus: _Connection | None = connection
        with self._guard:
            if not self._closed:
                self._idle.append(connection)
                surplus = self._idle.popleft() if len(self._idle) > IDLE_AT_READER_MAX else None
        if surplus is not None:
            surplus.close()

    def _take(self, endpoint: str) -> _Connection | None:
        with self._guard:
            found = [connection for connection in self._idle if connection.channel.peer == endpoint]
            for connection in found:
                self._idle.remove(connection)
        fresh: _Connection | None = None
        for connection in found:
            if fresh is None and not connection.channel.is_cut() and not connection.channel.has_input():
                fresh = connection
            elif fresh is not None and not connection.channel.is_cut():
                self.keep(connection)
            else:
                connection.close()
        return fresh


# --- memory ---


class _Registration:
    """A slab's memory in verbs' terms: registered piece by piece, all of it for a source, as needed for a target."""

    def __init__(self, nics: Sequence[Nic], extents: Sequence[Extent], keepalive: object, device: str) -> None:
        self.extents = extents
        self._nics = nics
        self._device = device
        self._keepalive = keepalive  # the storages, whose memory verbs knows by address only
        self._chunks = chunks(extents)
        self._starts = [address for address, _ in self._chunks]
        self._regions: list[list[Memory] | None] = [None] * len(self._chunks)
        self._guard = threading.Lock()

    def offer(self) -> list[Region]:
        """All of it, as peers may read it. VerbsError."""
        registered = []
        for index, (address, size_bytes) in enumerate(self._chunks):
            known = self._registered(index)
            if len({region.address for region in known}) > 1:
                raise VerbsError("its cards register device memory in different ways: name one of them")
            registered.append((address, size_bytes, known[0].address, tuple(region.rkey for region in known)))
        return regions(self.extents, registered)

    def find(self, address: int, size_bytes: int, nic: int) -> list[tuple[int, int, int]] | None:
        """(address, size, local key) of a range on the host; None when some of it is not of this slab. VerbsError."""
        found = []
        while size_bytes:
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            first, length = self._chunks[index]
            count = min(size_bytes, first + length - address)
            if count <= 0:
                return None
            found.append((address, count, self._registered(index)[nic].lkey))
            address, size_bytes = address + count, size_bytes - count
        return found

    def _registered(self, index: int) -> list[Memory]:
        known = self._regions[index]
        if known is None:
            with self._guard:
                known = self._regions[index]
                if known is None:
                    address, size_bytes = self._chunks[index]
                    known = [nic.register(address, size_bytes, self._device) for nic in self._nics]
                    self._regions[index] = known
                    if self._device != "cpu":
                        _once(logging.INFO, "rdma: device memory is served %s", known[0].how)
        return known

    def close(self) -> None:
        with self._guard:
            for known in self._regions:
                for region in known or ():
                    with suppress(Exception):
                        region.close()
            self._regions = [None] * len(self._chunks)


class _Registry:
    """Every slab is registered once, and until it is forgotten by everybody else.

    So are live tensors that are adopted again for every version, while they and their storage stay the same.
    """

    def __init__(self, nics: Sequence[Nic]) -> None:
        self._nics = nics
        self._guard = threading.Lock()
        self._known: weakref.WeakKeyDictionary[Slab, _Registration] = weakref.WeakKeyDictionary()
        self._adopted: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], _Registration]] = {}  # oldest first

    def of(self, slab: Slab) -> _Registration:
        with self._guard:
            found = self._known.get(slab)
            if found is None:
                found = self._known[slab] = self._find_or_make(slab)
            return found

    def _find_or_make(self, slab: Slab) -> _Registration:
        by_name = slab.tensors()
        extents, tensors, at = [], [], 0
        for spec in slab.specs:
            if spec.size_bytes:
                tensors.append(by_name[spec.name])
                extents.append((at, spec.size_bytes, tensors[-1].data_ptr()))
            at += spec.size_bytes
        key = tuple(map(id, tensors))
        refs, found = self._adopted.pop(key, ([], None))
        same = len(refs) == len(tensors) and all(ref() is tensor for ref, tensor in zip(refs, tensors, strict=True))
        if found is None or not same or found.extents != extents:
            # The storages, not the tensors: the memory must stay, the tensors are free to go and take this with them.
            storages = [tensor.untyped_storage() for tensor in tensors]
            found = _Registration(self._nics, extents, storages, tensors[0].device.type if tensors else "cpu")
        if slab.kind == "adopted" and tensors:
            adopted = self._adopted

            def forget(_: object) -> None:
                adopted.pop(key, None)

            self._adopted[key] = [weakref.ref(tensor, forget) for tensor in tensors], found
            if len(self._adopted) > ADOPTED_MAX:
                self._adopted.pop(next(iter(self._adopted)))
        return found

    def clear(self) -> None:
        with self._guard:
            self._known = weakref.WeakKeyDictionary()
            self._adopted = {}  # links in the middle of a read hold what they use


class _Staging:
    """Registered host memory that no slab owns, for what cannot be read in place."""

    def __init__(self, nics: Sequence[Nic], size_bytes: int) -> None:
        self._block = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE))
        self.view = memoryview(self._block)
        self._address = _address_of(self.view)
        self._regions = [nic.register(self._address, len(self.view)) for nic in nics]

    def region(self, size_bytes: int) -> Region:
        """Its first bytes as peers may read them."""
        return Region(0, size_bytes, self._address, tuple(region.rkey for region in self._regions))

    def piece(self, start: int, size_bytes: int, nic: int) -> tuple[int, int, int]:
        return self._address + start, size_bytes, self._regions[nic].lkey

    def close(self) -> None:
        for region in self._regions:
            with suppress(Exception):
                region.close()


# --- the reader ---


class _Rail:
    """One queue pair of a reader, and which ports it joins."""

    def __init__(self, reader: Reader[int], nic: int, port: int) -> None:
        self.reader = reader
        self.nic = nic  # index of ours
        self.port = port  # index of the source's


class _Connection:
    """What is kept from link to link: the conversation and its rails."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rails: list[_Rail] = []
        self.proved = False  # something was read over them

    def hang_up(self) -> None:
        """No read arrives any more when this returns."""
        for rail in self.rails:
            rail.reader.close()
        self.rails = []

    def close(self) -> None:
        self.hang_up()
        self.channel.close()


class _Arriving:
    """A segment whose reads are in flight."""

    def __init__(self) -> None:
        self.stack = ExitStack()  # of ReadPlan.receiving
        self.staging: _Staging | None = None
        self.staged: list[tuple[int, memoryview]] = []  # place in the staging memory, and where it goes from there

    def give_up(self) -> None:
        with suppress(_GivenUp):
            self.stack.__exit__(_GivenUp, _GivenUp(), None)


class _GivenUp(Exception):
    """Thrown into ReadPlan.receiving: nothing of that segment counts."""


class RdmaLink(SocketLink):
    def __init__(self, transport: RdmaTransport, connection: _Connection, stall_s: float) -> None:
        super().__init__([connection.channel])
        self._transport = transport
        self._connection = connection
        self._stall_s = stall_s
        self._remote: RemoteMemory | None = None
        self._ring: Region | None = None  # of the source, where its memory is not registered
        self._target: _Registration | None = None
        self._free: list[_Staging] = []
        self._rested = False  # the last offer was ended properly: somebody else may use the connection
        self._given = False  # and does

    def check(self, *, deadline: float) -> bool:
        self._rested = super().check(deadline=deadline)
        return self._rested

    def cut(self) -> None:
        if not self._given:
            super().cut()

    def close(self) -> None:
        with self._guard:
            if self._given:
                return
            self._given = self._rested and not self._closed and not self._in_use
            if self._given:
                self._closed = True
        if self._given:
            self._drop_staging()
            self._transport.keep(self._connection)
        else:
            super().close()

    def _dispose(self) -> None:
        self._connection.hang_up()
        self._drop_staging()
        super()._dispose()

    def _drop_staging(self) -> None:
        free, self._free = self._free, []
        for staging in free:
            staging.close()

    # opening

    def _receive_hand_over(
        self, channel: Channel, manifest: Manifest, addresses: bytes | None, deadline: float
    ) -> None:
        self._rested = False
        self._drop_staging()  # of the size of another offer's segments
        told = _hear(channel, Rails, REPLY_SIZE_BYTES_MAX, deadline)
        size_bytes = RING_PLACES * manifest.segment_size_bytes if told.is_ring else manifest.size_bytes
        self._remote = RemoteMemory(told.memory, size_bytes, len(told.link_layers))
        self._ring = told.memory[0] if told.is_ring else None
        connection = self._connection
        try:
            self._dial(channel, told, deadline)
            if not connection.proved and told.memory:
                self._probe(channel, told.memory[0], deadline)
        except VerbsError as error:
            connection.hang_up()
            self._transport.unreachable(channel.peer, str(error))
            raise NotServable(f"it cannot be reached over rdma: {error}") from error

    def _dial(self, channel: Channel, told: Rails, deadline: float) -> None:
        connection = self._connection
        if connection.rails:
            _tell(channel, Dial([]), deadline)
            _hear(channel, Dialed, DIAL_SIZE_BYTES_MAX, deadline)
            return
        nics = self._transport.nics
        try:
            for mine, theirs in pair([nic.port.link_layer for nic in nics], told.link_layers):
                connection.rails.append(_Rail(Reader(nics[mine]), mine, theirs))
            problem = "" if connection.rails else f"none of its ports {told.link_layers} faces one of ours"
        except VerbsError as error:
            connection.hang_up()
            problem = str(error)
        # Said also when there is none, since the source waits for it.
        _tell(channel, Dial([(rail.port, rail.reader.endpoint) for rail in connection.rails]), deadline)
        answer = _hear(channel, Dialed, DIAL_SIZE_BYTES_MAX, deadline)
        if problem or answer.problem:
            raise VerbsError(problem or answer.problem)
        if len(answer.rails) != len(connection.rails):
            raise ProtocolError(f"{len(connection.rails)} queue pairs were offered, {len(answer.rails)} came back")
        for rail, endpoint in zip(connection.rails, answer.rails, strict=True):
            rail.reader.connect(endpoint)

    def _probe(self, channel: Channel, region: Region, deadline: float) -> None:
        """Read a few bytes over every rail, and keep those that carry. VerbsError when none does."""
        connection = self._connection
        size_bytes = min(PROBE_SIZE_BYTES, region.size_bytes)
        until = min(deadline, time.monotonic() + PROBE_S_MAX)
        awaited, problems = list(connection.rails), []
        connection.rails = []
        staging = _Staging(self._transport.nics, size_bytes)
        try:
            for rail in awaited:
                remote = (region.address, size_bytes, region.keys[rail.port])
                rail.reader.submit(cut_reads([remote], [staging.piece(0, size_bytes, rail.nic)], size_bytes), 0)
            while awaited:
                for rail in list(awaited):
                    try:
                        if rail.reader.poll():
                            awaited.remove(rail)
                            connection.rails.append(rail)
                    except VerbsError as error:
                        if channel.is_cut():
                            raise Disconnected("cut the connection") from error
                        awaited.remove(rail)
                        rail.reader.close()
                        problems.append(f"{rail.reader.nic.port.name}: {error}")
                if channel.is_cut():
                    raise Disconnected("cut the connection")
                if awaited:
                    _wait(channel, awaited, until, until, listens=False)
        finally:
            for rail in awaited:
                rail.reader.close()
            staging.close()
        if not connection.rails:
            raise VerbsError("; ".join(problems))
        if problems:
            _log.warning("rdma: %s: some rails do not carry: %s", channel.peer, "; ".join(problems))
        connection.proved = True

    # reading

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        connection, channel = self._connection, self._connection.channel
        self._request(channel, segments, deadline)
        expected = deque(segments)
        ready: deque[tuple[int, int]] = deque()  # at the source, but not begun; (segment, place in its ring)
        places: dict[int, int] = {}
        arriving: dict[int, _Arriving] = {}
        moved_at = time.monotonic()
        try:
            while expected or ready or arriving:
                done = [segment for rail in connection.rails for segment in rail.reader.poll()]
                if channel.is_cut():
                    raise Disconnected("cut the connection")
                for segment in done:
                    self._finish(arriving[segment])
                    del arriving[segment]
                    if self._ring is not None:
                        _tell(channel, Taken(places.pop(segment)), deadline)
                    yield segment
                    moved_at = time.monotonic()
                while expected and len(arriving) + len(ready) < WINDOW and channel.has_input():
                    moved_at = time.monotonic()
                    place = self._next_is_ready(channel, expected[0], deadline)
                    if place is not None:
                        ready.append((expected.popleft(), place))
                while ready:
                    segment, place = ready[0]
                    begun = self._begin(segment, place, manifest, plan, may_wait=bool(arriving))
                    if begun is None:
                        break
                    arriving[segment], places[segment] = begun, place
                    ready.popleft()
                if not done and (expected or arriving):
                    listens = bool(expected) and len(arriving) + len(ready) < WINDOW
                    _wait(channel, connection.rails, deadline, moved_at + self._stall_s, listens=listens)
        except VerbsError as error:
            raise Disconnected(str(error)) from error
        finally:
            if arriving:
                connection.hang_up()  # before the target's memory is let go of
                for begun in arriving.values():
                    begun.give_up()

    def _next_is_ready(self, channel: Channel, segment: int, deadline: float) -> int | None:
        """Take one frame: the header of this segment, or a sign of life. The segment's place in the source's ring."""
        kind, got, length = channel.receive_header(deadline)
        self.progress.heard()
        if kind == ALIVE:
            self.progress.waiting()
            return None
        if kind == CONTROL:
            self._reply_body(channel, length, Opened, deadline)  # a refusal, which it raises
        expected_length = 0 if self._ring is None else PLACE.size
        if (kind, got, length) != (SEGMENT, segment, expected_length):
            raise ProtocolError(f"segment {segment} was due, there came kind {kind}, {got}, {length} bytes")
        if channel.waited:
            self.progress.delayed(segment)
        if not length:
            return 0
        place = int(PLACE.unpack(channel.receive_body(length, PLACE.size, deadline))[0])
        if place >= RING_PLACES:
            raise ProtocolError(f"segment {segment} is said to lie in place {place} of a ring of {RING_PLACES}")
        return place

    def _begin(
        self, segment: int, place: int, manifest: Manifest, plan: ReadPlan, *, may_wait: bool
    ) -> _Arriving | None:
        """Post the reads of a segment. None when the staging memory it needs comes back with others (may_wait)."""
        assert self._remote is not None
        rail = self._connection.rails[segment % len(self._connection.rails)]
        start, stop = manifest.segment_range(segment)
        if self._ring is not None:
            start, stop = (at - start + place * manifest.segment_size_bytes for at in (start, stop))
        begun = _Arriving()
        try:
            views = begun.stack.enter_context(plan.receiving(segment))
            local = self._local(views, rail.nic, begun, manifest.segment_size_bytes)
        except VerbsError as error:
            begun.give_up()
            if may_wait:
                return None
            # Not even one segment of staging memory: this reader cannot use rdma now.
            self._transport.unreachable(self._connection.channel.peer, str(error))
            raise
        remote = self._remote.pieces(start, stop, rail.port)
        rail.reader.submit(cut_reads(remote, local, rail.reader.nic.read_size_bytes_max), segment)
        return begun

    def _local(
        self, views: Sequence[memoryview], nic: int, begun: _Arriving, segment_size_bytes: int
    ) -> list[tuple[int, int, int]]:
        """Registered memory for these views: their own, or staging memory that is copied to them at the end."""
        pieces: list[tuple[int, int, int]] = []
        used = 0
        for view in views:
            if not len(view):
                continue
            found = self._in_place(view, nic)
            if found is not None:
                pieces += found
                continue
            if begun.staging is None:
                begun.staging = self._free.pop() if self._free else _Staging(self._transport.nics, segment_size_bytes)
            pieces.append(begun.staging.piece(used, len(view), nic))
            begun.staged.append((used, view))
            used += len(view)
        return pieces

    def _in_place(self, view: memoryview, nic: int) -> list[tuple[int, int, int]] | None:
        """The view itself, None where it is not registered."""
        if self._target is None:
            return None
        try:
            return self._target.find(_address_of(view), len(view), nic)
        except VerbsError as error:
            _log.warning("rdma: reading by way of host memory that is copied from: %s", error)
            self._target = None
            return None

    def _finish(self, done: _Arriving) -> None:
        if done.staging is not None:
            for start, view in done.staged:
                copy_views([done.staging.view[start : start + len(view)]], [view])
            self._free.append(done.staging)
        done.stack.close()  # digests, and commits to a device

    def read(
        self,
        segments: Sequence[int],
        target: Slab,
        placement: Placement,
        *,
        deadline: float,
        more: More | None = None,
    ) -> Iterator[int]:
        reading = super().read(segments, target, placement, deadline=deadline)  # what else is wanted: the next read
        self._target = self._register(target)
        return reading

    def _register(self, target: Slab) -> _Registration | None:
        """None: this memory has to be read by way of staging memory."""
        tensors = target.tensors()
        device = next((tensor.device.type for tensor in tensors.values()), "cpu")
        if device != "cpu":
            _once(logging.INFO, "rdma: %s memory is read by way of pinned host memory", device)
            return None
        return self._transport.memory.of(target)


def _wait(channel: Channel, rails: Sequence[_Rail], deadline: float, stalls_at: float, *, listens: bool) -> None:
    """Until something may have been read, or (listens) said, or the connection was cut. Silent when it is too late.

    Returns at once when it has asked for events that had not been asked for: what completed before makes none.
    """
    readers = [rail.reader for rail in rails if rail.reader.busy]
    if any([reader.arm() for reader in readers]):
        return
    poll = select.poll()
    cut = getattr(select, "POLLRDHUP", 0)
    poll.register(channel.sock, select.POLLIN | cut if listens else cut)
    for reader in readers:
        poll.register(reader.fd, select.POLLIN)
    now = time.monotonic()
    if now >= deadline:
        raise Silent("the deadline passed")
    if now >= stalls_at:
        raise Silent("sent nothing")
    ready = dict(poll.poll(max(1, int((min(deadline, stalls_at) - now) * 1000))))
    for reader in readers:
        if reader.fd in ready:
            reader.take_event()


def _once(level: int, message: str, argument: str) -> None:
    """A line in the log that would otherwise come with every version."""
    if (message, argument) not in _said and len(_said) < SAID_MAX:
        _said.add((message, argument))
        _log.log(level, message, argument)


_said: set[tuple[str, str]] = set()


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


# --- the source ---


class _RdmaDialect(Dialect):
    name = "rdma"

    def __init__(self, nics: Sequence[Nic], memory: _Registry) -> None:
        self._nics = nics
        self._memory = memory
        self._guard = threading.Lock()
        self._pairs: dict[Channel, list[QueuePair]] = {}
        self._idle: dict[Channel, None] = {}  # oldest first
        self._rings: dict[Channel, _Ring] = {}
        self._spare_rings: list[_Ring] = []

    def welcome(self, sock: socket.socket) -> str:
        tune(sock)
        host, port = sock.getpeername()[:2]
        return f"{SCHEME}{host}:{port}"

    def refusal(self, offer: Offer) -> str | None:
        try:
            _, ring = self._readable(offer)
        except VerbsError as error:
            _once(logging.WARNING, "rdma: what is in such memory cannot be served: %s", str(error))
            return str(error)
        self._put_back(ring)
        return None

    def hand_over(self, channel: Channel, offer: Offer, deadline: float) -> None:
        try:
            memory, ring = self._readable(offer)
        except VerbsError as error:
            raise SourceLost(str(error), version=offer.version) from error
        if ring is not None:
            with self._guard:
                self._rings[channel] = ring
        with self._guard:
            self._idle.pop(channel, None)
        _tell(channel, Rails([nic.port.link_layer for nic in self._nics], memory, ring is not None), deadline)
        dial = _hear(channel, Dial, DIAL_SIZE_BYTES_MAX, min(deadline, time.monotonic() + DIAL_S_MAX))
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
        _tell(channel, Dialed([made.endpoint for made in pairs], problem), deadline)

    def _readable(self, offer: Offer) -> tuple[list[Region], _Ring | None]:
        """The offer's own memory as peers may read it, or else a ring that it can pass through. VerbsError."""
        try:
            return self._memory.of(offer.slab).offer(), None
        except (VerbsError, UsageError) as error:
            why = str(error)
        place_size_bytes = offer.manifest.segment_size_bytes
        with self._guard:
            fitting = [ring for ring in self._spare_rings if ring.place_size_bytes == place_size_bytes]
            if fitting:
                self._spare_rings.remove(fitting[0])
        try:
            ring = fitting[0] if fitting else _Ring(self._nics, place_size_bytes)
        except VerbsError as error:
            raise VerbsError(f"{why}; nor can a ring of host memory that it would pass through: {error}") from error
        _once(logging.INFO, "rdma: served by way of a ring of host memory, as it is itself not registered: %s", why)
        return [ring.region], ring

    def _put_back(self, ring: _Ring | None) -> None:
        """For the next reader."""
        if ring is None:
            return
        ring.reset()
        with self._guard:
            keep = len(self._spare_rings) < RINGS_KEPT_MAX
            if keep:
                self._spare_rings.append(ring)
        if not keep:
            ring.close()

    def payload(self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float) -> list[memoryview]:
        ring = self._rings.get(channel)
        if ring is None:
            return []
        if ring.is_full:
            ring.taken(_hear(channel, Taken, DIAL_SIZE_BYTES_MAX, deadline).place)
        return [memoryview(PLACE.pack(ring.fill(offer.slab.readable(start, stop))))]

    def sent(self, channel: Channel, deadline: float) -> None:
        ring = self._rings.get(channel)
        while ring is not None and not ring.is_empty:
            ring.taken(_hear(channel, Taken, DIAL_SIZE_BYTES_MAX, deadline).place)

    def let_go(self, channel: Channel, *, ended: bool) -> None:
        """Idle connections are kept, but not too many; of an ended one nothing is left that could read."""
        with self._guard:
            if ended:
                self._idle.pop(channel, None)
                pairs = self._pairs.pop(channel, [])
            else:
                self._idle[channel] = None
                pairs = []
            ring = self._rings.pop(channel, None)
            surplus = list(self._idle)[: max(0, len(self._idle) - IDLE_AT_SOURCE_MAX)]
            for oldest in surplus:
                del self._idle[oldest]
        for oldest in surplus:
            oldest.cut()
        for made in pairs:
            made.close()
        self._put_back(ring)


class _Ring:
    """Registered host memory in as many places as segments may be on their way from it. VerbsError."""

    def __init__(self, nics: Sequence[Nic], place_size_bytes: int) -> None:
        self.place_size_bytes = place_size_bytes
        self._memory = _Staging(nics, RING_PLACES * place_size_bytes)
        self.region = self._memory.region(RING_PLACES * place_size_bytes)
        self._free = deque(range(RING_PLACES))

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_empty(self) -> bool:
        return len(self._free) == RING_PLACES

    def fill(self, views: Sequence[memoryview]) -> int:
        """Copy a segment into a free place; says which."""
        place = self._free.popleft()
        at = place * self.place_size_bytes
        copy_views(views, [self._memory.view[at : at + sum(map(len, views))]])
        return place

    def taken(self, place: int) -> None:
        if place in self._free:
            raise ProtocolError(f"place {place} of the ring was taken twice")
        self._free.append(place)

    def reset(self) -> None:
        """Its reader has gone, whatever it had not taken."""
        self._free = deque(range(RING_PLACES))

    def close(self) -> None:
        self._memory.close()


def _tell(channel: Channel, message: Rails | Dial | Dialed | Taken, deadline: float) -> None:
    body = _encoder.encode(message)
    channel.send([HEADER.pack(CONTROL, 0, 0, len(body)), body], deadline)


def _hear(channel: Channel, kind: type[Message], limit: int, deadline: float) -> Message:
    frame, _, length = channel.receive_header(deadline)
    if frame != CONTROL:
        raise ProtocolError(f"a frame of kind {frame} where {kind.__name__} should be")
    try:
        message: Message = _decoders[kind].decode(channel.receive_body(length, limit, deadline))
        return message
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a {kind.__name__} that does not decode: {error}") from error


# --- configuration ---


def _parse(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.removeprefix(SCHEME).rpartition(":")
    if not endpoint.startswith(SCHEME) or not colon or not port.isdecimal() or not host:
        raise UsageError(f"{endpoint!r} is no endpoint of rdma, which look like rdma://10.0.0.1:5000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _configured_devices() -> list[str] | None:
    names = [name.strip() for name in os.environ.get(DEVICES_VARIABLE, "").split(",")]
    return [name for name in names if name] or None


def _configured_gid_index() -> int | None:
    text = os.environ.get(GID_INDEX_VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"{GID_INDEX_VARIABLE}={text!r} is no index of a GID table")
    return int(text)


def _current_cuda_device() -> str:
    """Where the current CUDA device is in sysfs; "" when CUDA is not in use: nothing is initialized for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    domain, bus, number = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    if -1 in (domain, bus, number):
        return ""
    return os.path.realpath(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{number:02x}.0")
