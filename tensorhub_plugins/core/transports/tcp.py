"""TCP, which works everywhere: sent straight from the source's slab, received straight into the target's.

One stream moves what one core can copy (4 to 5 GB/s on loopback); several (`streams`) share the segments of a read
between them, for links that are faster than that or lose packets.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from tensorhub_plugins.core.errors import ProtocolError, UsageError
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import SHARD_SIZE_BYTES_MAX, Manifest
from tensorhub_plugins.core.protocol.advertised import hosts_of
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS, TransportLimits
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.pump import OrderedWork, pump
from tensorhub_plugins.core.transports.read_plan import ReadPlan
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import Connection, SocketLink
from tensorhub_plugins.core.transports.stream.messages import DELTA, SEGMENT
from tensorhub_plugins.core.transports.stream.parallel_read import connect_all, pump_all
from tensorhub_plugins.core.transports.stream.patches import Patches
from tensorhub_plugins.core.transports.stream.sockets import SocketTransport
from tensorhub_plugins.core.transports.stream.source import SourceBackend
from tensorhub_plugins.core.transports.stream.tcp_socket import LOOPBACK, connect, listen, tune

STREAMS_MAX = 16
FAR_STREAMS = 4  # across data centres: a lost packet halves the window of one of them only
OFFLOAD_SIZE_BYTES = 1 << 20  # handing less to another thread takes longer than digesting it
OFFLOAD_CORES = 4  # with fewer, a source on this host needs the core: offloading is slower than digesting in the stream
OFFLOAD_SEGMENTS = 2  # waiting for the other thread


class TcpTransport(SocketTransport):
    """A transport over TCP. advertise_host: the address of this host that peers connect to, or several with commas
    between them, and the only ones listened on if they are local (otherwise, behind address translation, all are).
    None: loopback, for readers on this host. ports: as for `listen`.

    streams: connections that a reader opens to one source. offload_size_bytes: segments of at least this size are
    digested, and copied to a device, in another thread while the next one arrives; None picks by the number of cores.
    limits: when a peer counts as lost, and how many are served."""

    name = "tcp"

    def __init__(
        self,
        advertise_host: str | None = None,
        *,
        ports: range | None = None,
        streams: int = 1,
        offload_size_bytes: int | None = None,
        limits: TransportLimits = DEFAULT_LIMITS,
        gate: Gate | None = None,
    ) -> None:
        super().__init__(limits, gate)
        if not 1 <= streams <= STREAMS_MAX:
            raise UsageError(f"streams must be between 1 and {STREAMS_MAX}, not {streams}")
        self._hosts = hosts_of(LOOPBACK if advertise_host is None else advertise_host)
        self._ports, self._streams = ports, streams
        if offload_size_bytes is None:
            offload_size_bytes = OFFLOAD_SIZE_BYTES if cores() >= OFFLOAD_CORES else SHARD_SIZE_BYTES_MAX
        self._offload_size_bytes = offload_size_bytes
        self._channel: Callable[..., Channel] = Channel
        self._source: SourceBackend = TcpSource()

    @staticmethod
    def available() -> str | None:
        return None

    def _listen(self) -> tuple[list[socket.socket], str]:
        listeners = listen(self._hosts, self._ports)
        return listeners, format_address(self.name, self._hosts[0], listeners[0].getsockname()[1])

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> TcpLink:
        self._check_open()
        reach = partial(connect, scheme=self.name, stall_s=self._limits.stall_s, deadline=deadline, make=self._channel)
        count = FAR_STREAMS if far else self._streams
        connection = self._take(endpoint.split(","), count) or Connection(connect_all(reach, endpoint, count))
        link = TcpLink(connection, self._offload_size_bytes, self._keep)
        self._add(link)
        return link


class TcpLink(SocketLink):
    """A link whose segments follow each other on each stream without a request between them."""

    def __init__(self, connection: Connection, offload_size_bytes: int, keep: Callable[[Connection], None]) -> None:
        super().__init__(connection, keep)
        self._offload_size_bytes = offload_size_bytes

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        streams = [_TcpStream(self, each, manifest, plan, deadline) for each in self._channels[: len(segments)]]
        if len(streams) == 1:
            return pump(streams[0], segments, lambda due: streams[0].again() or self._additional(due))
        return pump_all(streams, segments, self._more, self.cut)


class _TcpStream:
    """The segments of one connection: received by the thread that reads, finished by it or by another one.

    Finishing means digesting, and on a device copying there."""

    window = OFFLOAD_SEGMENTS
    batch = 1

    def __init__(self, link: TcpLink, channel: Channel, manifest: Manifest, plan: ReadPlan, deadline: float) -> None:
        self._link, self._channel, self._manifest = link, channel, manifest
        self._plan, self._deadline = plan, deadline
        self._landed: list[int] = []
        self._patches: Patches | None = None  # None: no deltas may come
        if link.bases is not None and plan.computes:
            self._patches = Patches(link.bases, channel, manifest, plan, link.progress, deadline)
        self._finishing = OrderedWork()
        offloads = manifest.segment_size_bytes >= link._offload_size_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tensorhub-tcp-finish") if offloads else None

    @property
    def in_flight(self) -> int:
        return len(self._landed) + len(self._finishing)

    def request(self, segments: Sequence[int]) -> None:
        if self._patches is None:
            self._link._request(self._channel, segments, self._deadline)
        else:
            self._patches.request(segments)

    def again(self) -> list[int]:
        return [] if self._patches is None else self._patches.again()

    def has_input(self) -> bool:
        return self._channel.has_input()

    def announced(self, due: deque[int]) -> list[int]:
        start, stop = self._manifest.segment_range(due[0])
        or_else = None if self._patches is None else DELTA
        length = self._link._announced(self._channel, SEGMENT, due[0], self._deadline, or_else)
        if length is None:
            return []
        if self._patches is not None and self._channel.kind == DELTA:
            self._patches.receive(due[0], length)
        elif length != stop - start:
            raise ProtocolError(f"segment {due[0]} has {stop - start} bytes, the source sends {length}")
        return [due.popleft()]

    def start(self, ready: deque[int]) -> bool:
        segment = ready.popleft()
        if self._patches is not None and (made := self._patches.make(segment)) is not None:
            self._landed += made
            return True
        with ExitStack() as stack:
            views = stack.enter_context(self._plan.receiving(segment))
            self._channel.fill(views, self._deadline)
            if self._patches is not None:
                self._patches.came_whole(views)
            if self._pool is not None:
                self._finishing.add(self._pool.submit(_finish, stack.pop_all(), segment))
        if self._pool is None:
            self._landed.append(segment)
        return True

    def finished(self, *, wait: bool) -> list[int]:
        landed, self._landed = self._landed, []
        return landed or self._finishing.take(wait=wait)

    def close(self) -> None:
        if self._patches is not None:
            self._patches.close()
        if self._pool is not None:
            self._pool.shutdown()


def _finish(receiving: ExitStack, segment: int) -> list[int]:
    receiving.close()
    return [segment]


class TcpSource(SourceBackend):
    """A backend that serves any memory through the socket."""

    name = "tcp"
    keeps_connections = True
    sends_deltas = True

    def accept_peer(self, sock: socket.socket) -> str:
        tune(sock)
        return format_address(self.name, *sock.getpeername()[:2])

    def segment_payload(
        self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float
    ) -> list[memoryview]:
        return offer.slab.readable(start, stop)
