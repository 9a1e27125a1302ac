"""Between processes of one host: the reader copies once, from the source's memory into its own.

Being able to connect to the source's UNIX socket in the abstract namespace is what "the same host" means here:
containers that share no network namespace use tcp. The conversation is that of tcp, but it says which segments are
ready and sends no bytes. Where the reader copies from:

* An allocated slab is a memfd, which the source passes over the socket, opened read-only (memory_file.py).
* Adopted memory is read by its addresses, where the system lets one process read another's (_process). Where it does
  not, the first reader is sent away, to tcp.
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
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.interface import Shelf
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.read_plan import ReadPlan, runs_of
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.memory_file import Mappings, MemoryFile
from tensorhub_plugins.core.transports.stream.link import (
    BACKLOG,
    READY,
    STALL_S,
    Channel,
    Dialect,
    Disconnected,
    Server,
    SocketLink,
    greet,
)
from tensorhub_plugins.core.types import (
    ShardKey,
)

SCHEME = "shm://"
COPY_THREADS_MAX = 4  # one core copies at 5.6 GB/s here and two at 9.2
READY_MAX = 4096  # segments in one word of the source: to say it for each takes time from those that copy
STAGED_AT_ONCE = 8  # while its reader copies these the source stages the next ones
STAGE_READERS = 3  # at a time: to copy from a mapping is so much cheaper for each that it pays for a copy before
STAGE_KEPT_S = 600.0  # for the next version; a worker whose tensors stay as they are gets its memory back then
TOGETHER_S = 1.0  # readers that come so soon after another want to read at the same time
COPY_SIZE_BYTES = 8 << 20  # for a thread at a time: to hand it a copy and to take it back costs as much as 1 MB of it
CALL_SIZE_BYTES = 2 << 20  # of small segments by one call; what it has copied is digested from the cache
WINDOW = 8  # copies under way or waiting to be yielded; what a given-up read still has to wait for
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid

_log = logging.getLogger(__name__)


class ShmTransport:
    """copy_threads: None picks by the number of cores. map_from: which time it reads the same shared memory it maps it,
    and keeps it mapped as long as its owner has it. stall_s: as for tcp."""

    name = "shm"

    def __init__(self, *, copy_threads: int | None = None, map_from: int = 2, stall_s: float = STALL_S) -> None:
        self._copy_threads = copy_threads or min(COPY_THREADS_MAX, os.cpu_count() or 1)
        self._by_address = _process.available()  # until it turns out to be forbidden
        self._stall_s = stall_s
        self._mappings = Mappings(map_from)
        self._pool: ThreadPoolExecutor | None = None
        self._server: Server | None = None
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
        self._server = Server(listener, shelf, _ShmDialect())
        return SCHEME + name

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> ShmLink:
        if self._closed:
            raise UsageError("the transport is closed")
        name = endpoint.removeprefix(SCHEME)
        if not endpoint.startswith(SCHEME) or not name:
            raise UsageError(f"{endpoint!r} is no endpoint of shm, which look like shm://tensorhub-...")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, min(deadline - time.monotonic(), self._stall_s)))
            sock.connect("\0" + name)
        except OSError as error:
            sock.close()
            raise SourceLost(f"not on this host, or gone: {error}", peer=endpoint, phase="connect") from error
        channel = greet(sock, endpoint, stall_s=self._stall_s, deadline=deadline)
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
        mappings: Mappings,
        *,
        by_address: bool,
        forbidden: Callable[[OSError], None],
    ) -> None:
        super().__init__([channel])
        self._pool = pool
        self._mappings = mappings
        self._pid = _peer_of(channel.sock)[0]
        self._by_address = by_address and self._pid > 0  # 0: it lives in another namespace of processes
        self._forbidden = forbidden
        self._block: MemoryFile | _process.ProcessMemory | None = None

    def _dispose(self) -> None:
        super()._dispose()
        if self._block is not None:
            self._block.close()

    def _open(self, key: ShardKey, lease: int, deadline: float) -> Manifest:
        manifest = super()._open(key, lease, deadline)
        if isinstance(self._block, _process.ProcessMemory):
            try:
                self._block.probe()
            except OSError as error:
                self._forbidden(error)
                self._by_address = False
                return super()._open(key, lease, deadline)
        return manifest

    def _receive_hand_over(
        self, channel: Channel, manifest: Manifest, addresses: bytes | None, deadline: float
    ) -> None:
        if self._block is not None:
            self._block.close()
        if addresses is not None:
            self._block = _process.ProcessMemory(self._pid, addresses, manifest.size_bytes)
        else:
            fd, lifeline = channel.receive_descriptors(2, deadline)
            self._block = MemoryFile(manifest, fd, self._mappings.meet(fd, lifeline))

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        block = self._block
        assert block is not None
        channel = self._channels[0]

        def copy(segments: list[int]) -> list[int]:
            for run, end in runs_of(segments):
                for first in range(run, end, by_one_call):  # neighbours, however small they and their tensors are
                    _copy(block, manifest, plan, range(first, min(end, first + by_one_call)))
            return segments

        self._request(channel, segments, deadline)
        due = deque(segments)
        ready: deque[int] = deque()  # and not copied yet: small segments are copied together
        together = max(1, COPY_SIZE_BYTES // manifest.segment_size_bytes)
        by_one_call = max(1, CALL_SIZE_BYTES // manifest.segment_size_bytes)
        copying: deque[Future[list[int]]] = deque()
        try:
            while True:
                due.extend(self._further(channel, deadline))
                if not (due or ready):
                    if not copying:
                        break
                    yield from self._copied(channel, copying.popleft())
                    continue
                # What is copied is handed on before the source is waited for: somebody may wait for it in turn.
                while copying and (len(copying) >= WINDOW or copying[0].done() or not (ready or channel.has_input())):
                    yield from self._copied(channel, copying.popleft())
                while due and (not ready or (len(ready) < together and channel.has_input())):
                    ready.extend(self._said_ready(channel, due, deadline))
                try:
                    copying.append(self._pool.submit(copy, [ready.popleft() for _ in range(min(together, len(ready)))]))
                except RuntimeError as error:
                    raise Disconnected("cannot be read any more: this side's transport was closed") from error
        finally:
            for future in copying:
                future.cancel()
            wait(copying)  # none may write into the target once this read has ended

    def _said_ready(self, channel: Channel, due: deque[int], deadline: float) -> list[int]:
        """The next segments of those that are due, once the source says that they may be copied."""
        first = due[0]
        count = self._expect(channel, READY, first, deadline)
        segments = [due.popleft() for _ in range(min(count, len(due)))]
        if len(segments) != count or segments != list(range(first, first + len(segments))) or not segments:
            raise ProtocolError(f"{count} segments from {first} on are said to be ready, due are {segments}")
        return segments

    def _copied(self, channel: Channel, future: Future[list[int]]) -> list[int]:
        try:
            segments = future.result()  # a copy takes milliseconds; it waits for nobody
        except OSError as error:
            raise Disconnected(f"its memory cannot be read any more: {error}") from error
        if channel.is_cut():
            raise Disconnected("cut the connection while its memory was copied")
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


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end; process 0: not to be seen from here."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class _ShmDialect(Dialect):
    name = "shm"

    def welcome(self, sock: socket.socket) -> str:
        pid, uid = _peer_of(sock)
        if uid not in (os.geteuid(), 0):  # the abstract namespace has no permissions of its own
            raise ProtocolError(f"process {pid} belongs to user {uid}, not to {os.geteuid()}")
        return f"pid {pid}"

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._refused_at: weakref.WeakKeyDictionary[Offer, float] = weakref.WeakKeyDictionary()
        self._stages: weakref.WeakKeyDictionary[Offer, _Stage] = weakref.WeakKeyDictionary()
        self._reading: dict[Channel, Offer] = {}  # through a stage
        self._idle: _Stage | None = None  # nobody reads from it now, and several did
        self._idle_ends: threading.Timer | None = None

    def refusal(self, offer: Offer) -> str | None:
        if offer.slab.shared_fd is not None:
            return None
        with self._guard:
            now = time.monotonic()
            refused_at = self._refused_at.get(offer)
            together = refused_at is not None and (bool(offer.active_readers) or now - refused_at < TOGETHER_S)
            if self._staged(offer, several=together):
                return None
            self._refused_at[offer] = now
        return "its tensors lie in memory that was adopted, or cannot be shared"

    def addresses(self, offer: Offer) -> bytes | None:
        extents = None if offer.slab.shared_fd is not None else offer.slab.addresses()
        if extents is None:
            return None
        with self._guard:
            if self._staged(offer, several=offer.active_readers >= STAGE_READERS - 1):
                return None
        return _process.pack(extents)

    def hand_over(self, channel: Channel, offer: Offer, deadline: float) -> None:
        slab = offer.slab
        if slab.shared_fd is None:
            with self._guard:
                stage = self._staged(offer, several=True)
                if stage is not None:
                    stage.readers += 1
                    stage.together = max(stage.together, offer.active_readers)
                    self._reading[channel] = offer
                    slab = stage.slab
        fd, lifeline = slab.shared_fd, slab.lifeline_fd
        if fd is None or lifeline is None:
            raise SourceLost("the slab was closed", version=offer.version)
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # a reader shall not be able to write
        try:
            channel.send_descriptors([readable, lifeline], deadline)
        finally:
            os.close(readable)

    def payload(self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float) -> list[memoryview]:
        stage = self._stages.get(offer) if channel in self._reading else None
        if stage is not None:
            stage.copy(offer, start, stop)
        return []

    def at_once(self, channel: Channel) -> int:
        return STAGED_AT_ONCE if channel in self._reading else READY_MAX

    def let_go(self, channel: Channel, *, ended: bool) -> None:
        if ended:
            channel.cut()  # before its memory is used again: whoever still copies from it finds out
        with self._guard:
            offer = self._reading.pop(channel, None)
            stage = self._stages.get(offer) if offer is not None else None
            if offer is None or stage is None:
                return
            stage.readers -= 1
            if stage.readers:
                return
            del self._stages[offer]
            if stage.together < STAGE_READERS:
                stage.slab.close()
                return
            self._take_idle(close=True)
            self._idle, self._idle_ends = stage, threading.Timer(STAGE_KEPT_S, self._end_idle, [stage])
            self._idle_ends.daemon = True
            self._idle_ends.start()

    def close(self) -> None:
        with self._guard:
            self._take_idle(close=True)

    def _end_idle(self, stage: _Stage) -> None:
        with self._guard:
            if self._idle is stage:
                self._take_idle(close=True)

    def _take_idle(self, *, close: bool = False) -> _Stage | None:
        """With the guard."""
        stage, self._idle = self._idle, None
        if self._idle_ends is not None:
            self._idle_ends.cancel()
        if stage is not None and close:
            stage.slab.close()
        return stage

    def _staged(self, offer: Offer, *, several: bool) -> _Stage | None:
        """With the guard. The copy of this offer to read from: where there is one, or memory for one, or if `several`
        want to read at the same time."""
        stage = self._stages.get(offer)
        if stage is None and offer.slab.kind == "adopted":
            if self._idle is not None and self._idle.slab.specs == offer.manifest.tensors:
                stage = self._take_idle()
            elif several:
                stage = _Stage(offer.manifest)
            if stage is not None:
                stage.begin(offer)
                self._stages[offer] = stage
        return stage


class _Stage:
    """A shareable copy of an adopted shard, made as it is read."""

    def __init__(self, manifest: Manifest) -> None:
        self.slab = Slab.allocate(manifest.tensors, pin=False)
        self.readers = 0
        self._of: weakref.ref[Offer] | None = None

    def begin(self, offer: Offer) -> None:
        """Be a copy of this one from now on; what was copied of it before is not copied again."""
        self.together = 0  # readers at a time, those of the offer's own memory too
        if self._of is None or self._of() is not offer:
            self._of = weakref.ref(offer)
            self._locks = [threading.Lock() for _ in range(offer.manifest.segment_count)]
            self._copied = bytearray(offer.manifest.segment_count)

    def copy(self, offer: Offer, start: int, stop: int) -> None:
        """Once for all readers; the others wait for it."""
        segment = start // offer.manifest.segment_size_bytes
        with self._locks[segment]:
            if not self._copied[segment]:
                with self.slab.writable(start, stop) as views:
                    copy_views(offer.slab.readable(start, stop), views)
                self._copied[segment] = 1
