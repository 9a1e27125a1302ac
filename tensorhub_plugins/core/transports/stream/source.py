"""The source's end of the socket transports: accepts readers and serves a shelf to each in a thread of its own."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import msgspec

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deltas.frame import frame_of, links_of
from tensorhub_plugins.core.errors import ProtocolError, SourceLost, TensorHubError, VersionGone
from tensorhub_plugins.core.process_lifetime import close_in_children
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.transports.interface import NotServable, Shelf, find_offer
from tensorhub_plugins.core.transports.limits import SEND_STALL_S, TransportLimits
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.stream import messages as m
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected, Silent, Stranger

BACKLOG = 128
CLOSE_S_MAX = 5.0  # threads that were cut off only have to leave one system call
# Of warnings about peers, in so long: a stranger that reconnects again and again fills no disk.
WARNINGS_MAX, WARNINGS_S = 100, 10.0

_log = logging.getLogger(__name__)


class SourceBackend:
    """The transport-specific part of a source."""

    name: ClassVar[str]
    keeps_connections: ClassVar[bool] = False  # for the next version: readers may be silent until then
    sends_deltas: ClassVar[bool] = False

    def accept_peer(self, sock: socket.socket) -> str:
        """Prepare an accepted socket and return the peer's name; ProtocolError if it is not allowed."""
        raise NotImplementedError

    def channel(self, sock: socket.socket, peer: str, stall_s: float) -> Channel:
        """Return the channel of an accepted connection, without waiting."""
        return Channel(sock, peer, stall_s=stall_s)

    def refusal(self, offer: Offer) -> str | None:
        """Return why this transport cannot serve this offer; None: it can."""
        return None

    def addresses(self, offer: Offer) -> bytes | None:
        """Return the addresses for a reader that reads this process's memory itself, and gets nothing else, or None."""
        return None

    def lends(self, offer: Offer) -> bool:
        """Return whether a reader may use the memory in place (`send_memory` with `lends`)."""
        return False

    def send_memory(self, channel: Channel, offer: Offer, deadline: float, *, lends: bool = False) -> None:
        """Send what follows a StreamOpened message."""

    def segment_payload(
        self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float
    ) -> list[memoryview]:
        """Return the bytes that follow a segment's header; without any, do what else makes the segment ready."""
        return []

    def ready_batch_max(self, channel: Channel) -> int:
        """Return how many segments one READY announces to this reader; 0: their bytes are sent instead."""
        return 0

    def flush(self, channel: Channel, deadline: float) -> None:
        """Finish a read request: every segment has been sent."""

    def on_reader_done(self, channel: Channel, *, ended: bool) -> None:
        """Clean up: the reader is done with its memory (ended: and its connection). It may change after this."""

    def close(self) -> None:
        """Free everything: no reader is left, and none will come."""


class StreamServer:
    """A server that accepts connections and serves a shelf, one thread for each: a slow reader delays no other."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        shelf: Shelf,
        backend: SourceBackend,
        limits: TransportLimits,
        gate: Gate | None = None,
    ) -> None:
        self._limits, self._gate = limits, gate
        self._listeners = list(listeners)
        self._shelf, self._backend = shelf, backend
        self._guard = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._closing = threading.Event()
        self._warned_at = deque([float("-inf")] * WARNINGS_MAX, WARNINGS_MAX)
        self._wake_out, self._wake_in = socket.socketpair()
        close_in_children(*listeners, self._wake_out, self._wake_in)  # a child would never accept
        for listener in listeners:
            listener.setblocking(False)
        self._acceptor = Thread(target=self._accept, name=f"tensorhub-{backend.name}-accept")
        self._acceptor.start()

    def close(self) -> None:
        with self._guard:
            if self._closing.is_set():
                return
            self._closing.set()
        self._wake_in.send(b"x")
        self._acceptor.join()
        with self._guard:
            connections = dict(self._connections)
        for channel in connections:
            channel.cut()
        deadline = time.monotonic() + CLOSE_S_MAX
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.error("%s: thread %s does not end", self._backend.name, thread.name)
        for sock in (*self._listeners, self._wake_in, self._wake_out):
            sock.close()
        self._backend.close()

    def _accept(self) -> None:
        poll = select.poll()
        listeners = {listener.fileno(): listener for listener in self._listeners}
        for descriptor in (*listeners, self._wake_out.fileno()):
            poll.register(descriptor, select.POLLIN)
        is_full = False
        while not self._closing.is_set():
            for descriptor, _ in poll.poll():
                if self._closing.is_set():
                    return
                try:
                    sock, _ = listeners[descriptor].accept()
                except (BlockingIOError, ConnectionError):
                    continue
                except OSError as error:  # out of descriptors, for example: it may be temporary
                    if not is_full:  # logged once
                        lacking = resources.refusal(error, forbidden=True) or error
                        _log.error("%s: cannot accept a reader: %s", self._backend.name, lacking)
                    is_full = True
                    self._closing.wait(self._limits.vanished_s)
                    continue
                is_full = False
                self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            peer = self._backend.accept_peer(sock)
            channel = self._backend.channel(sock, peer, SEND_STALL_S)
        except (OSError, ProtocolError) as error:
            self._warn("refused a connection: %s", error)
            sock.close()
            return
        thread = Thread(target=self._serve, args=(channel,), name=f"tensorhub-{self._backend.name}-{peer}")
        with self._guard:
            full = self._make_room(peer)
            if not full:
                self._connections[channel] = thread
        if full:
            self._warn("refused %s: %s", peer, full)
            channel.refuse()
            return
        self._start(channel, thread)

    def _start(self, channel: Channel, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left: it may be temporary, and the reader retries
            self._warn("cannot serve %s: %s", channel.peer, resources.refusal(error) or error)
            channel.close()
            with self._guard:
                del self._connections[channel]

    def _make_room(self, peer: str) -> str:
        """Return why there is no slot for one more reader; empty: there is one. Connections without an open offer are
        evicted, the oldest first: an idle stranger keeps no reader out."""
        limits, alike = self._limits, [c for c in self._connections if _host_of(c.peer) == _host_of(peer)]
        for crowd, most, where in (
            (alike, limits.readers_per_peer_max, " from there"),
            (list(self._connections), limits.readers_max, ""),
        ):
            if sum(not channel.is_given_up for channel in crowd) < most:
                continue
            idle = next((channel for channel in crowd if not (channel.has_offer or channel.is_given_up)), None)
            if idle is None:
                return f"{most} readers are connected{where}"
            idle.is_given_up = True
            idle.cut()
        return ""

    def _serve(self, channel: Channel) -> None:
        try:
            ReaderConnection(channel, self._shelf, self._backend, self._limits, self._gate, self._warn).run()
        except Exception as error:
            self._log_end(channel.peer, error)
        finally:
            channel.close()
            with self._guard:
                del self._connections[channel]

    def _log_end(self, peer: str, error: Exception) -> None:
        name = self._backend.name
        match error:
            case Stranger():
                self._warn("refused %s: %s", peer, error)
            case Disconnected():
                _log.debug("%s: %s has gone: %s", name, peer, error)
            case SourceLost():  # withdrawn, or late
                _log.info("%s: closed the connection of %s: %s", name, peer, error)
            case Silent():
                self._warn("closed the connection of %s, which did not go on in time: %s", peer, error)
            case TensorHubError():
                self._warn("closed the connection of %s: %s", peer, error)
            case _:
                _log.error("%s: serving %s failed", name, peer, exc_info=resources.refusal(error) or error)

    def _warn(self, text: str, *arguments: object) -> None:
        """Log a warning about a peer; at most WARNINGS_MAX in WARNINGS_S."""
        now = time.monotonic()
        with self._guard:
            if now - self._warned_at[0] < WARNINGS_S:
                return
            self._warned_at.append(now)
        _log.warning(f"%s: {text}", self._backend.name, *arguments)


class ReaderConnection:
    """One reader's connection at the source: at most one offer open at a time."""

    def __init__(
        self,
        channel: Channel,
        shelf: Shelf,
        backend: SourceBackend,
        limits: TransportLimits,
        gate: Gate | None,
        warn: Callable[..., None],
    ) -> None:
        self._channel, self._warn, self._gate = channel, warn, gate
        self._shelf, self._backend, self._limits = shelf, backend, limits
        self._offer: Offer | None = None
        self._reader = -1
        self._lease = ""  # of the current read
        self._bases: dict[int, tuple[bytes, ...]] = {}  # what the reader holds of what it asks for
        self._rate = 0.0
        self._sent: dict[int, list[tuple[bytes, bytes]]] = {}  # segments of this offer that were sent as deltas

    def run(self) -> None:
        """Answer requests until the reader leaves. Raises what ended it."""
        channel = self._channel
        deadline = time.monotonic() + self._limits.hello_s
        greeting = bytearray(m.HELLO.size)
        channel.fill([memoryview(greeting)[: len(m.MAGIC)]], deadline)
        if greeting[: len(m.MAGIC)] != m.MAGIC:  # checked before more is awaited: a stranger may send no more
            raise ProtocolError(f"its first bytes are {bytes(greeting[: len(m.MAGIC)])!r}: no reader of ours")
        channel.fill([memoryview(greeting)[len(m.MAGIC) :]], deadline)
        channel.nonce = os.urandom(m.NONCE_SIZE_BYTES)
        channel.send([m.HELLO.pack(m.MAGIC, m.PROTOCOL, 0, channel.nonce)], deadline)
        m.check_hello(greeting)
        try:
            while True:
                self._answer(self._receive())
        finally:
            self._release(ended=True)

    def _receive(self) -> m.StreamRequest:
        # Between reads a reader may be silent, keep-alive finds dead ones; but not before it has asked for an offer.
        waits = self._offer is not None or (self._backend.keeps_connections and self._reader >= 0)
        begins_by = None if waits else time.monotonic() + self._limits.hello_s
        kind, _, length = self._channel.receive_request(begins_by, self._limits.hello_s)
        if kind != m.CONTROL:
            raise ProtocolError(f"a frame of kind {kind} where a request should be")
        deadline = time.monotonic() + self._limits.hello_s
        most = m.request_size_bytes_max(None if self._offer is None else self._offer.manifest.segment_count)
        request: m.StreamRequest = self._channel.receive_rest(m.request_decoder, length, most, deadline)
        return request

    def _answer(self, request: m.StreamRequest) -> None:
        deadline = time.monotonic() + SEND_STALL_S
        match request:
            case m.StreamOpen():
                self._open(request, deadline)
            case m.StreamRead():
                self._read(request)
            case m.StreamFinish():
                current = self._offer is not None and not self._offer.withdrawn
                self._release()
                self._channel.send_message(m.StreamFinished(current), deadline)

    def _open(self, request: m.StreamOpen, deadline: float) -> None:
        self._release()
        try:
            offer, addresses, lends = self._begin(request)
        except (VersionGone, NotServable) as error:
            reason: Literal["gone", "not servable"] = "gone" if isinstance(error, VersionGone) else "not servable"
            self._channel.send_message(m.StreamRefused(reason, error.message), deadline)
            return
        _log.debug("%s: %s opens %s, as of %d", self._backend.name, self._channel.peer, offer.key, request.as_of)
        manifest = m.NO_MANIFEST if request.brief else offer.manifest.encoded
        keeps = self._backend.keeps_connections
        opened = m.StreamOpened(offer.epoch, msgspec.Raw(manifest), addresses, lends, keeps)
        self._channel.send_message(opened, deadline)
        if not request.brief and addresses is None:
            self._backend.send_memory(self._channel, offer, deadline, lends=lends)

    def _begin(self, request: m.StreamOpen) -> tuple[Offer, bytes | None, bool]:
        """Attach to the offer; return it, its addresses if read by them, and whether it is lent."""
        offer = self._find(request)
        slab = offer.slab
        lends = request.borrows and offer.lends and self._backend.lends(offer)
        addresses = self._backend.addresses(offer) if request.by_address and not lends else None
        reason = self._backend.refusal(offer) if addresses is None else None
        if reason is not None:
            raise NotServable(reason)
        if request.deltas and not self._rate and offer.deltas is not None and self._backend.sends_deltas:
            offer.deltas.wanted()  # it does not know yet what is faster
        self._reader = offer.attach(self._channel.cut)
        self._offer, self._channel.has_offer = offer, True
        if addresses is not None and offer.slab is not slab:  # it moved before this reader was registered
            addresses = self._backend.addresses(offer)
        return offer, addresses, lends

    def _find(self, request: m.StreamOpen) -> Offer:
        """Return the offer that was granted, if this is the reader it was granted to."""
        claim, proof = request.lease or (None, b"")
        refusal = None
        if self._gate is not None:
            refusal = self._gate.refusal(request.key, claim, proof, self._channel.nonce, time.monotonic())
        if refusal is not None:
            self._warn("%s may not read %s: %s", self._channel.peer, request.key, refusal)
            raise NotServable(f"the source admits no reader without a lease of its hub: {refusal}")
        self._lease = claim.reader if claim is not None else ""
        return find_offer(self._shelf, request.key, request.as_of, self._check_reader)

    def _check_reader(self) -> None:
        if self._channel.is_cut():
            raise Disconnected("went away while it waited")

    def _read(self, request: m.StreamRead) -> None:
        offer = self._offer
        if offer is None:
            raise ProtocolError("a read before anything was opened")
        count = offer.manifest.segment_count
        if any(not start < stop <= count for start, stop in request.runs):
            raise ProtocolError(f"a read of segments {request.runs[:4]}..., the shard has {count}")
        deadline = time.monotonic() + min(request.seconds, m.READ_S_MAX)
        self._bases, self._rate = m.bases_of(request), request.rate
        serve = self._announce if self._backend.ready_batch_max(self._channel) else self._send
        for segment, stop in request.runs:
            while segment < stop:
                segment = serve(offer, segment, stop, deadline)
        self._backend.flush(self._channel, deadline)

    def _send(self, offer: Offer, segment: int, stop: int, deadline: float) -> int:
        """Send a segment once it is ready; return the next one."""
        waited = not offer.poll_ready(segment, 0.0) and self._await(offer, segment, deadline)
        frame = self._delta(offer, segment) if self._bases or self._sent else []
        payload: Sequence[bytes | memoryview] = frame or self._payload(offer, segment, deadline)
        kind = m.DELTA if frame else m.SEGMENT
        self._channel.send([m.HEADER.pack(kind, waited, segment, sum(map(len, payload))), *payload], deadline)
        return segment + 1

    def _delta(self, offer: Offer, segment: int) -> list[bytes]:
        """Return the segment as deltas from what the reader holds; none: it is to be sent whole."""
        links, bases = self._sent.pop(segment, None), self._bases.get(segment)
        if offer.deltas is None or not self._backend.sends_deltas:
            return []
        if links and not bases:  # asked for again: they did not make it
            offer.deltas.refuse(links)
        steps = offer.deltas.find(segment, bases, self._rate) if bases else None
        if steps is None:
            return []
        self._note_use()
        self._sent[segment] = links_of(steps, offer.manifest.digest(segment))
        return frame_of(steps)

    def _announce(self, offer: Offer, first: int, stop: int, deadline: float) -> int:
        """Announce a segment once it is ready, and those after it that are ready by now, to a reader that copies the
        bytes itself; return the next one."""
        waited = not offer.poll_ready(first, 0.0) and self._await(offer, first, deadline)
        self._payload(offer, first, deadline)
        segment = first + 1
        stop = min(stop, first + self._backend.ready_batch_max(self._channel))
        while segment < stop and offer.poll_ready(segment, 0.0):
            self._payload(offer, segment, deadline)
            segment += 1
        self._channel.send([m.HEADER.pack(m.READY, waited, first, segment - first)], deadline)
        return segment

    def _note_use(self) -> None:
        """Report to the hub, through the gate, which leases are used: a reader's own report could be false."""
        if self._gate is not None:
            self._gate.serve(self._lease)

    def _payload(self, offer: Offer, segment: int, deadline: float) -> list[memoryview]:
        self._note_use()
        offer.check_memory(segment)
        return self._backend.segment_payload(self._channel, offer, *offer.manifest.segment_range(segment), deadline)

    def _await(self, offer: Offer, segment: int, deadline: float) -> bool:
        """Wait until the segment, which is not here yet, has reached this source; return True. Send signs of life
        meanwhile. Raise SourceLost when the offer is withdrawn."""
        alive_at = time.monotonic() + self._limits.alive_s
        while not offer.poll_ready(segment, min(deadline, time.monotonic() + self._limits.vanished_s)):
            now = time.monotonic()
            self._check_reader()
            if now >= deadline:
                message = f"segment {segment} has not reached its source itself"
                self._channel.send_message(m.StreamRefused("late", message), now + self._limits.vanished_s)
                raise SourceLost(message, version=offer.version, peer=self._channel.peer, phase="wait")
            if now >= alive_at:
                self._channel.send([m.HEADER.pack(m.ALIVE, 0, 0, 0)], deadline)
                self._note_use()
                alive_at = now + self._limits.alive_s
        return True

    def _release(self, *, ended: bool = False) -> None:
        offer, self._offer, self._channel.has_offer = self._offer, None, False
        self._bases, self._sent = {}, {}
        try:
            self._backend.on_reader_done(self._channel, ended=ended)
        finally:
            if offer is not None:
                offer.detach(self._reader)


def _host_of(peer: str) -> str:
    """Return the host of "tcp://host:port"; the whole name of other peers."""
    return peer.rpartition(":")[0] or peer
