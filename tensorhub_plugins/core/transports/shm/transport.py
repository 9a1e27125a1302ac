"""Between processes of one host: the reader copies once, from the source's memory into its own.

Being able to connect to the source's UNIX socket in the abstract namespace is what "the same host" means here:
containers that share no network namespace use tcp. The messages are those of tcp, but the source says which segments
are ready and sends no bytes. Where the reader copies from:

* An allocated slab is a memfd, which the source passes over the socket, opened read-only (memory_file.py).
* Adopted memory is read by its addresses, where the system lets one process read another's (process_memory.py).
  Where it does not, the first reader is sent away, to tcp.
* For several readers at a time, from the third on (the second, where addresses are forbidden), the source copies the
  shard into a slab of its own while they read, segment by segment as the first of them gets there. Where three did read
  it, that memory is kept for the next version, which all of them then read from a mapping: one copy for all and the
  cheapest one for each.

A cut-off source cannot take its memory back. It closes the connection before its owner touches the memory, so a reader
that finds its connection open after copying a segment has copied the published bytes.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports.interface import Shelf
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS, TransportLimits
from tensorhub_plugins.core.transports.pump import OrderedWork, pump
from tensorhub_plugins.core.transports.read_plan import ReadPlan, runs_of
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.memory_file import MappingCache, MemoryFile
from tensorhub_plugins.core.transports.shm.source import ShmSource, check_owner, peer_of
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected
from tensorhub_plugins.core.transports.stream.link import SocketLink, greet
from tensorhub_plugins.core.transports.stream.messages import READY
from tensorhub_plugins.core.transports.stream.source import BACKLOG, StreamServer
from tensorhub_plugins.core.types import ShardKey

SCHEME = "shm://"
COPY_THREADS_MAX = 4  # one core copies at 5.6 GB/s here and two at 9.2
COPY_SIZE_BYTES = 8 << 20  # for a thread at a time: to hand it a copy and to take it back costs as much as 1 MB of it
CALL_SIZE_BYTES = 2 << 20  # of small segments by one call; what it has copied is digested from the cache
WINDOW = 8  # copies under way or waiting to be yielded; what a given-up read still has to wait for

_log = logging.getLogger(__name__)


class ShmTransport:
    """copy_threads: None picks by the number of cores. map_from: which time it reads the same shared memory it maps it,
    and keeps it mapped as long as its owner has it. limits: as for tcp; also how long a shared copy is kept."""

    name = "shm"

    def __init__(
        self,
        *,
        copy_threads: int | None = None,
        map_from: int = 2,
        limits: TransportLimits = DEFAULT_LIMITS,
        gate: Gate | None = None,
    ) -> None:
        self._copy_threads = copy_threads or min(COPY_THREADS_MAX, os.cpu_count() or 1)
        self._by_address = _process.available()  # until it turns out to be forbidden
        self._limits = limits
        self._gate = gate
        self._mappings = MappingCache(map_from)
        self._pool: ThreadPoolExecutor | None = None
        self._server: StreamServer | None = None
        self._links: weakref.WeakSet[ShmLink] = weakref.WeakSet()
        self._closed = False

    @staticmethod
    def available() -> str | None:
        if not hasattr(os, "memfd_create") or not hasattr(os, "preadv") or not os.path.isdir("/proc/self/fd"):
            return "this system has no anonymous memory files (memfd), or no /proc"
        return None

    def serve(self, shelf: Shelf) -> str:
        if self._closed or self._server is not None:
            raise UsageError("this transport is closed or serves already: one transport, one shelf")
        name = f"tensorhub-{uuid.uuid4().hex}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + name)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise UsageError(f"cannot listen on an abstract UNIX socket: {error}") from error
        _process.let_others_read()
        self._server = StreamServer(listener, shelf, ShmSource(self._limits), self._limits, self._gate)
        return SCHEME + name

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> ShmLink:
        if self._closed:
            raise UsageError("the transport is closed")
        name = endpoint.removeprefix(SCHEME)
        if not endpoint.startswith(SCHEME) or not name:
            raise UsageError(f"{endpoint!r} is no endpoint of shm, which look like shm://tensorhub-...")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, min(deadline - time.monotonic(), self._limits.stall_s)))
            sock.connect("\0" + name)
            check_owner(sock)
        except (OSError, ProtocolError) as error:
            sock.close()
            raise SourceLost(f"not on this host, or gone: {error}", peer=endpoint, phase="connect") from error
        channel = greet(sock, endpoint, stall_s=self._limits.stall_s, deadline=deadline)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._copy_threads, thread_name_prefix="tensorhub-shm-copy")
        link = ShmLink(channel, self._pool, self._mappings, by_address=self._by_address, forbidden=self._is_forbidden)
        self._links.add(link)
        return link

    def _is_forbidden(self, error: OSError) -> None:
        if self._by_address:
            _log.info(
                "shm: the memory of other processes cannot be read here (%s): it is staged, or goes by tcp", error
            )
        self._by_address = False

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.cut()
        if self._pool is not None:
            self._pool.shutdown()
        self._mappings.close()


class ShmLink(SocketLink):
    """Copies several segments at a time, in the transport's threads."""

    def __init__(
        self,
        channel: Channel,
        pool: ThreadPoolExecutor,
        mappings: MappingCache,
        *,
        by_address: bool,
        forbidden: Callable[[OSError], None],
    ) -> None:
        super().__init__([channel])
        self._pool = pool
        self._mappings = mappings
        self._pid = peer_of(channel.sock)[0]
        self._by_address = by_address and self._pid > 0  # 0: it lives in another namespace of processes
        self._forbidden = forbidden
        self._block: MemoryFile | _process.ProcessMemory | None = None

    def _dispose(self) -> None:
        super()._dispose()
        if self._block is not None:
            self._block.close()

    def _open(self, key: ShardKey, as_of: int, deadline: float) -> Manifest:
        manifest = super()._open(key, as_of, deadline)
        if isinstance(self._block, _process.ProcessMemory):
            try:
                self._block.probe()
            except OSError as error:
                self._forbidden(error)
                self._by_address = False
                return super()._open(key, as_of, deadline)
        return manifest

    def _receive_memory(self, channel: Channel, manifest: Manifest, addresses: bytes | None, deadline: float) -> None:
        if self._block is not None:
            self._block.close()
        if addresses is not None:
            self._block = _process.ProcessMemory(self._pid, addresses, manifest.size_bytes)
        else:
            fd, liveness_fd = channel.receive_descriptors(2, deadline)
            self._block = MemoryFile(manifest, fd, self._mappings.get_or_map(fd, liveness_fd))

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        block = self._block
        assert block is not None
        return pump(_ShmStream(self, block, manifest, plan, deadline), segments, self._additional)


class _ShmStream:
    """Segments that the source announces and the transport's threads copy, small ones together."""

    window = WINDOW

    def __init__(
        self,
        link: ShmLink,
        block: MemoryFile | _process.ProcessMemory,
        manifest: Manifest,
        plan: ReadPlan,
        deadline: float,
    ) -> None:
        self._link = link
        self._channel = link._channels[0]
        self._block = block
        self._manifest = manifest
        self._plan = plan
        self._deadline = deadline
        self._copying = OrderedWork()
        self.batch = max(1, COPY_SIZE_BYTES // manifest.segment_size_bytes)
        self._by_one_call = max(1, CALL_SIZE_BYTES // manifest.segment_size_bytes)

    @property
    def in_flight(self) -> int:
        return len(self._copying)

    def request(self, segments: Sequence[int]) -> None:
        self._link._request(self._channel, segments, self._deadline)

    def has_input(self) -> bool:
        return self._channel.has_input()

    def announced(self, due: deque[int]) -> list[int]:
        first = due[0]
        count = self._link._announced(self._channel, READY, first, self._deadline)
        if count is None:
            return []
        segments = [due.popleft() for _ in range(min(count, len(due)))]
        if len(segments) != count or segments != list(range(first, first + len(segments))) or not segments:
            raise ProtocolError(f"{count} segments from {first} on are said to be ready, due are {segments}")
        return segments

    def start(self, ready: deque[int]) -> bool:
        segments = [ready.popleft() for _ in range(min(self.batch, len(ready)))]
        try:
            self._copying.add(self._link._pool.submit(self._copy, segments))
        except RuntimeError as error:
            raise Disconnected("cannot be read any more: this side's transport was closed") from error
        return True

    def finished(self, *, wait: bool) -> list[int]:
        try:
            segments = self._copying.take(wait=wait)  # a copy takes milliseconds; it waits for no peer
        except OSError as error:
            raise Disconnected(f"its memory cannot be read any more: {error}") from error
        if segments and self._channel.is_cut():
            raise Disconnected("cut the connection while its memory was copied")
        return segments

    def close(self) -> None:
        self._copying.close()

    def _copy(self, segments: list[int]) -> list[int]:
        for run, end in runs_of(segments):
            for first in range(run, end, self._by_one_call):  # neighbours, however small they and their tensors are
                _copy(self._block, self._manifest, self._plan, range(first, min(end, first + self._by_one_call)))
        return segments


def _copy(block: MemoryFile | _process.ProcessMemory, manifest: Manifest, plan: ReadPlan, segments: range) -> None:
    """By one call, where the system has it."""
    start, stop = manifest.segment_range(segments[0])[0], manifest.segment_range(segments[-1])[1]
    with ExitStack() as stack:
        views = [view for segment in segments for view in stack.enter_context(plan.receiving(segment))]
        if isinstance(block, MemoryFile):
            block.read(start, stop, views)
        else:
            into = plan.addresses(start, stop)  # to ask thousands of views for it would take milliseconds
            block.read(start, stop, _process.extents_of(views) if into is None else into)
