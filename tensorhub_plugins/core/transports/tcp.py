"""Over TCP: works everywhere. Sent straight from the source's slab, received straight into the target's.

One stream moves what one core can copy (4 to 5 GB/s on loopback); several (`streams`) share the segments of a read
between them, for links that are faster than that or lose packets.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.manifest import (
    SHARD_SIZE_BYTES_MAX,
    Manifest,
)
from tensorhub_plugins.core.transports.interface import More, Shelf
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.read_plan import ReadPlan
from tensorhub_plugins.core.transports.stream.link import (
    BACKLOG,
    SEGMENT,
    STALL_S,
    Channel,
    Dialect,
    Server,
    SocketLink,
    greet,
)

SCHEME = "tcp://"
STREAMS_MAX = 16
FAR_STREAMS = 4  # across data centres: a lost packet halves the window of one of them only
BESIDE_SIZE_BYTES = 1 << 20  # to hand less to another thread takes longer than to digest it
BESIDE_CORES = 4  # with fewer, a source on this host needs the core: beside it takes longer than within the stream
BESIDE_SEGMENTS = 2  # that wait for it
STREAM_SEGMENTS = 4  # that one of several streams takes at a time: few, so that they end together
# A host that vanished without a word is noticed after about this long; longer than a frozen reader is given, since the
# kernel counts a closed window as silence too.
USER_TIMEOUT_MS = 90_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
LOOPBACK = "127.0.0.1"
# Within a host nothing is lost and nobody shares the way: BBR, the default of some systems, would only hold bytes back
# (it takes 1.5 times as long). Reno is in every kernel and needs no privilege.
SAME_HOST_CONGESTION = b"reno"


class TcpTransport:
    """advertise_host: the address of this host that peers connect to, and the only one listened on if it is local (if
    it is not, behind address translation, all are). None: loopback, for readers on this host.

    streams: connections a reader opens to one source. beside_size_bytes: segments of at least so much are digested, and
    copied to a device, in another thread while the next one arrives; None picks by the number of cores. stall_s: a
    source that sends nothing for so long, not even a sign of life, is lost.
    """

    name = "tcp"

    def __init__(
        self,
        advertise_host: str | None = None,
        *,
        port: int = 0,
        streams: int = 1,
        beside_size_bytes: int | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        if not 1 <= streams <= STREAMS_MAX:
            raise UsageError(f"streams must be between 1 and {STREAMS_MAX}, not {streams}")
        if advertise_host is not None and _is_wildcard(advertise_host):
            raise UsageError(
                f"advertise_host={advertise_host!r} cannot be connected to: name an address peers can reach"
            )
        self._host = LOOPBACK if advertise_host is None else advertise_host
        self._port = port
        self._streams = streams
        if beside_size_bytes is None:
            beside_size_bytes = BESIDE_SIZE_BYTES if (os.cpu_count() or 1) >= BESIDE_CORES else SHARD_SIZE_BYTES_MAX
        self._beside_size_bytes = beside_size_bytes
        self._stall_s = stall_s
        self._server: Server | None = None
        self._links: weakref.WeakSet[TcpLink] = weakref.WeakSet()
        self._closed = False

    @staticmethod
    def available() -> str | None:
        return None

    def serve(self, shelf: Shelf) -> str:
        if self._closed or self._server is not None:
            raise UsageError("this transport is closed or serves already: one transport, one shelf")
        listener = _listen(self._host, self._port)
        port = listener.getsockname()[1]
        self._server = Server(listener, shelf, _TcpDialect())
        return _endpoint(self._host, port)

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> TcpLink:
        if self._closed:
            raise UsageError("the transport is closed")
        host, port = _parse(endpoint)
        count = FAR_STREAMS if far else self._streams
        if count == 1:
            channels = [self._channel(endpoint, host, port, deadline)]
        else:  # at once: over a long way each takes two round trips
            with ThreadPoolExecutor(count) as pool:
                futures = [pool.submit(self._channel, endpoint, host, port, deadline) for _ in range(count)]
            channels = [future.result() for future in futures if future.exception() is None]
            if len(channels) < count:
                for channel in channels:
                    channel.close()
                raise next(error for error in (future.exception() for future in futures) if error is not None)
        link = TcpLink(channels, self._beside_size_bytes)
        self._links.add(link)
        return link

    def _channel(self, endpoint: str, host: str, port: int, deadline: float) -> Channel:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SourceLost("the deadline passed", peer=endpoint, phase="connect")
        try:
            sock = socket.create_connection((host, port), timeout=min(left, self._stall_s))
        except OSError as error:
            raise SourceLost(f"cannot connect: {error}", peer=endpoint, phase="connect") from error
        try:
            _tune(sock)
        except OSError as error:
            sock.close()
            raise SourceLost(f"cannot connect: {error}", peer=endpoint, phase="connect") from error
        return greet(sock, endpoint, stall_s=self._stall_s, deadline=deadline)

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.cut()


class TcpLink(SocketLink):
    """Segments follow each other on each stream without a request between them."""

    def __init__(self, channels: Sequence[Channel], beside_size_bytes: int) -> None:
        super().__init__(channels)
        self._beside_size_bytes = beside_size_bytes

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        if len(self._channels) == 1:
            yield from self._stream(self._channels[0], manifest, plan, segments, deadline)
            return
        # The streams take from one queue, so that they finish together. Entries of `arrived`: a segment that has
        # arrived, or the exception or None that ended a stream.
        arrived: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        running = min(len(self._channels), len(segments))
        work = _Work(segments, self._more, running)

        def run(channel: Channel) -> None:
            try:
                for segment in self._stream(channel, manifest, plan, [], deadline, work):
                    arrived.put(segment)
                arrived.put(None)
            except BaseException as error:
                arrived.put(error)

        threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in self._channels[:running]]
        for thread in threads:
            thread.start()
        try:
            while running:
                item = arrived.get()  # a stream ends by its deadline, and always says so
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            if running:
                self.cut()
            work.end()
            for thread in threads:  # none may write into the target once this read has ended
                thread.join()

    def _stream(
        self,
        channel: Channel,
        manifest: Manifest,
        plan: ReadPlan,
        segments: list[int],
        deadline: float,
        work: _Work | None = None,
    ) -> Iterator[int]:
        due = deque(segments)
        if segments:
            self._request(channel, segments, deadline)
        beside = manifest.segment_size_bytes >= self._beside_size_bytes
        finishing: deque[tuple[int, Future[None]]] = deque()  # what has arrived: it is digested, a device gets its copy
        with ThreadPoolExecutor(1, thread_name_prefix="tensorhub-tcp-finish") as pool:  # ends when all of it has ended
            while True:
                while finishing and (
                    not due or len(finishing) >= BESIDE_SEGMENTS or finishing[0][1].done() or not channel.has_input()
                ):
                    segment, finished = finishing.popleft()
                    finished.result()
                    yield segment
                if work is None:
                    due.extend(self._further(channel, deadline))
                else:
                    batch = work.take(len(due))
                    if batch:
                        self._request(channel, batch, deadline)
                        due.extend(batch)
                if not due:
                    return
                segment = due.popleft()
                start, stop = manifest.segment_range(segment)
                length = self._expect(channel, SEGMENT, segment, deadline)
                if length != stop - start:
                    raise ProtocolError(f"segment {segment} has {stop - start} bytes, the source sends {length}")
                with ExitStack() as stack:
                    channel.fill(stack.enter_context(plan.receiving(segment)), deadline)
                    if beside:
                        finishing.append((segment, pool.submit(stack.pop_all().close)))
                if not beside:
                    yield segment


class _Work:
    """What several streams still have to read, and when they are done: when none of them has anything left, and there
    is no more. One that runs out before waits for what the others are told of."""

    def __init__(self, segments: list[int], more: More | None, streams: int) -> None:
        self._todo = deque(segments)
        self._more = more
        self._streams = streams
        self._idle = 0
        self._ended = False
        self._changed = threading.Condition()

    def take(self, due: int) -> list[int]:
        """The next ones for a stream that still waits for so many, perhaps none; for one that waits for none: until
        there are some, empty when all is done."""
        with self._changed:
            while not self._ended:
                if not self._todo and self._more is not None:
                    self._todo.extend(self._more())
                share = -(-len(self._todo) // self._streams)  # the last ones are for all, so that they end together
                batch = [self._todo.popleft() for _ in range(max(0, min(STREAM_SEGMENTS - due, share)))]
                if self._todo:
                    self._changed.notify()
                if batch or due:
                    return batch
                self._idle += 1
                if self._idle == self._streams:
                    self._end()
                else:
                    self._changed.wait()
                self._idle -= 1
            return []

    def end(self) -> None:
        """Whatever is left is not read."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._changed.notify_all()


class _TcpDialect(Dialect):
    name = "tcp"

    def welcome(self, sock: socket.socket) -> str:
        _tune(sock)
        return _endpoint(*sock.getpeername()[:2])

    def refusal(self, offer: Offer) -> str | None:
        return None

    def hand_over(self, channel: Channel, offer: Offer, deadline: float) -> None:
        pass

    def payload(self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float) -> list[memoryview]:
        return offer.slab.readable(start, stop)


def local_host_towards(host: str) -> str:
    """This host's address on the way to `host`, for `advertise_host`; nothing is sent. UsageError without a route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"there is no route to {host!r}: {error}") from error


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        if hasattr(socket, option):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_CONGESTION") and sock.getsockname()[0] == sock.getpeername()[0]:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SAME_HOST_CONGESTION)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"advertise_host={host!r} is not an address: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host!r}, port {port}: {error}") from error
    return listener


def _endpoint(host: str, port: int) -> str:
    return f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"


def _parse(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.removeprefix(SCHEME).rpartition(":")
    if not endpoint.startswith(SCHEME) or not colon or not port.isdecimal() or not host:
        raise UsageError(f"{endpoint!r} is no endpoint of tcp, which look like tcp://10.0.0.1:5000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_wildcard(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return not host
