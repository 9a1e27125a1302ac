"""The transport between processes of one host: the reader copies once, from the source's memory into its own.

"The same host" means that the source's UNIX socket can be reached (unix_socket.py). The messages are those of tcp, but
the source announces ready segments and sends no bytes. How a reader gets the bytes:

* An allocated slab is a memfd, which the source passes over the socket, opened read-only (memory_file.py).
* A reader that asks for a loan maps that file and uses it in place, for as long as it needs (memory/loans.py): it
  copies nothing, and the segments are only digested.
* Adopted memory is read by its addresses, where the system lets one process read another's (process_memory.py).
  Where it does not, the first reader is sent away, to tcp.
* For several readers at a time, from the third on (the second, where addresses are forbidden), the source copies the
  shard into a slab of its own while they read, segment by segment as the first of them gets there. Once three have
  read it, that memory is kept for the next version, which all of them then read from a mapping: one copy for all and
  the cheapest one for each.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.device.devices import Device, here
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.loans import Borrowed, Loan
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports.interface import NotServable
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS, TransportLimits
from tensorhub_plugins.core.transports.pump import pump
from tensorhub_plugins.core.transports.read_plan import ReadPlan, runs_of
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.memory_file import MappingCache, MemoryFile
from tensorhub_plugins.core.transports.shm.source import ADOPTED, ShmSource
from tensorhub_plugins.core.transports.stream import unix_socket
from tensorhub_plugins.core.transports.stream.announced_read import AnnouncedStream
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import Connection, SocketLink
from tensorhub_plugins.core.transports.stream.messages import StreamOpened
from tensorhub_plugins.core.transports.stream.sockets import SocketTransport
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

SCHEME = "shm://"
COPY_THREADS_MAX = 4  # one core copies at 5.6 GB/s here and two at 9.2
COPY_SIZE_BYTES = 8 << 20  # per thread: handing a copy over and back costs as much as copying 1 MB
CALL_SIZE_BYTES = 2 << 20  # of small segments in one call; its bytes are then digested from the cache

FORBIDDEN = (
    "the memory of other processes cannot be read here: allow that (ptrace scope, seccomp, the same user), or publish "
    "with copy=True"
)
OTHER_PROCESSES = (
    "its process is in another PID namespace: let both containers share one (hostPID, --pid=host), or publish with "
    "copy=True"
)

_log = logging.getLogger(__name__)


class ShmTransport(SocketTransport):
    """A transport within one host. copy_threads: None picks by the number of cores. map_from: at which access shared
    memory is mapped, for as long as its owner keeps it. limits: as for tcp; also how long a shared copy is kept."""

    name = "shm"

    def __init__(
        self,
        *,
        copy_threads: int | None = None,
        map_from: int = 2,
        limits: TransportLimits = DEFAULT_LIMITS,
        gate: Gate | None = None,
    ) -> None:
        super().__init__(limits, gate)
        self._copy_threads = copy_threads or min(COPY_THREADS_MAX, cores())
        self._by_address = _process.available()  # until it proves to be forbidden
        self._source = ShmSource(limits)
        self._mappings = MappingCache(map_from)
        self._device = here()  # borrowed memory is pinned for it: the threads that read have none of their own
        self._pool: ThreadPoolExecutor | None = None

    @staticmethod
    def available() -> str | None:
        if not hasattr(os, "memfd_create") or not hasattr(os, "preadv") or not os.path.isdir("/proc/self/fd"):
            return "this system has no anonymous memory files (memfd), or no /proc"
        return unix_socket.forbidden()

    def _listen(self) -> tuple[list[socket.socket], str]:
        listening = unix_socket.listen(SCHEME)
        _process.let_others_read()
        return listening

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> ShmLink:
        self._check_open()
        if self._pool is None:
            self._pool = resources.pool_of(self._copy_threads, "tensorhub-shm-copy")
        channel = unix_socket.connect(endpoint, SCHEME, stall_s=self._limits.stall_s, deadline=deadline)
        link = ShmLink(
            channel, self._pool, self._mappings, self._device, by_address=self._by_address, forbidden=self._is_forbidden
        )
        self._add(link)
        return link

    def _is_forbidden(self, error: OSError) -> None:
        if self._by_address:
            _log.info(
                "shm: the memory of other processes cannot be read here (%s): it is staged, or goes by tcp", error
            )
        self._by_address = False

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.shutdown()
        self._mappings.close()


class ShmLink(SocketLink):
    """A link that copies several segments at a time, in the transport's threads."""

    def __init__(
        self,
        channel: Channel,
        pool: ThreadPoolExecutor,
        mappings: MappingCache,
        device: Device | None,
        *,
        by_address: bool,
        forbidden: Callable[[OSError], None],
    ) -> None:
        super().__init__(Connection([channel]))
        self._pool, self._mappings, self._device = pool, mappings, device
        self._pid = unix_socket.peer_of(channel.sock)[0]
        self._by_address = by_address and self._pid > 0  # 0: it is in another PID namespace
        self._why_not = FORBIDDEN if self._pid > 0 else OTHER_PROCESSES
        self._forbidden = forbidden
        self._block: MemoryFile | _process.ProcessMemory | None = None
        self._loan: Borrowed | None = None

    def _dispose(self) -> None:
        super()._dispose()
        self._loan = None  # returned, unless it was taken
        if self._block is not None:
            self._block.close()

    def _open(self, key: ShardKey, as_of: int, deadline: float) -> Manifest:
        self._layout = key.layout
        try:
            manifest = super()._open(key, as_of, deadline)
        except NotServable as error:
            why = f", and {self._why_not}" if ADOPTED in str(error) and not self._by_address else ""
            raise NotServable(f"{error}{why}") from error
        if isinstance(self._block, _process.ProcessMemory):
            try:
                self._block.probe()
            except OSError as error:
                self._forbidden(error)
                self._by_address, self._why_not = False, FORBIDDEN
                return self._open(key, as_of, deadline)
        return manifest

    def _receive_memory(self, channel: Channel, manifest: Manifest, opened: StreamOpened, deadline: float) -> None:
        if self._block is not None:
            self._block.close()
        self._loan = None
        if opened.addresses is not None:
            self._block = _process.ProcessMemory(self._pid, opened.addresses, manifest.size_bytes)
            return
        fd, liveness_fd, *lent = channel.receive_descriptors(3 if opened.is_lent else 2, deadline)
        with ExitStack() as ours:
            ours.callback(os.close, fd)
            with ExitStack() as until_mapped:
                until_mapped.callback(os.close, liveness_fd)
                if lent:
                    table, loan, is_shared = manifest.tensors, Loan(lent[0]), self._layout != CHECKPOINT
                    self._loan = self._mappings.borrow(table, fd, liveness_fd, loan, self._device, is_shared=is_shared)
                until_mapped.pop_all()  # taken over
            mapped = self._mappings.get_or_map(fd, liveness_fd)
            ours.pop_all()
        self._block = MemoryFile(manifest, fd, mapped)

    def take_loan(self) -> Borrowed | None:
        return self._loan

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        block, loan = self._block, self._loan
        assert block is not None
        at_once = max(1, CALL_SIZE_BYTES // manifest.segment_size_bytes)

        def copy(segments: list[int]) -> list[int]:
            if plan.target.borrowed is not None and plan.target.borrowed is loan:  # they are in place already
                for segment in segments:
                    plan.digest_in_place(segment)
                return segments
            for run, end in runs_of(segments):
                for first in range(run, end, at_once):  # neighbours, however small they and their tensors are
                    _copy(block, manifest, plan, range(first, min(end, first + at_once)))
            return segments

        batch = max(1, COPY_SIZE_BYTES // manifest.segment_size_bytes)
        stream = AnnouncedStream(self, self._pool, copy, batch=batch, deadline=deadline)
        return pump(stream, segments, self._additional)


def _copy(block: MemoryFile | _process.ProcessMemory, manifest: Manifest, plan: ReadPlan, segments: range) -> None:
    """Copy these segments by one call, where the system supports that."""
    start, stop = manifest.segment_range(segments[0])[0], manifest.segment_range(segments[-1])[1]
    with ExitStack() as stack:
        views = [view for segment in segments for view in stack.enter_context(plan.receiving(segment))]
        if isinstance(block, MemoryFile):
            block.read(start, stop, views)
        else:
            into = plan.addresses(start, stop)  # asking thousands of views for it would take milliseconds
            block.read(start, stop, _process.extents_of(views) if into is None else into)
