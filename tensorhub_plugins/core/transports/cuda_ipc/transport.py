"""Between processes of one host whose tensors lie on GPUs: the reader opens the source's memory and copies from it.

"The same host" means that the source's UNIX socket can be reached (unix_socket.py). The source sends the location of
its slab, in allocations that have CUDA handles (driver.py), and announces ready segments; it copies nothing. The reader
opens each allocation once, keeps it open for the next version (mapping_cache.py), and copies many segments by one batch
on a stream of its own: into its live tensors, or down into host memory. Another GPU of the host is read over its peer
path.

With digests, segments are first copied to a staging buffer, and to their places if the connection is still open: what a
withdrawn source has overwritten never reaches a live tensor. The digest is computed there, on the device.

Not run on a GPU yet: name it in `transports` to use it. Host memory, and memory without a handle, is refused with the
reason: the next transport serves it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeAlias

import torch

from tensorhub_plugins.core.device import devices, drivers
from tensorhub_plugins.core.device.devices import SMALL_SIZE_BYTES, Device
from tensorhub_plugins.core.device.drivers import Driver, Stream
from tensorhub_plugins.core.device.kernels.moving import move
from tensorhub_plugins.core.digests import DIGEST_SIZE_BYTES, XXH3, digest_of
from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.device_digests import digests_there
from tensorhub_plugins.core.memory.loans import is_over
from tensorhub_plugins.core.memory.runs import memory_at, memory_of
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports.cuda_ipc.driver import CudaIpc, Ipc, NotShareable
from tensorhub_plugins.core.transports.cuda_ipc.memory import (
    Exports,
    OpenMemory,
    SourceMemory,
    check_memory,
    memory_decoder,
)
from tensorhub_plugins.core.transports.interface import NotServable
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS, TransportLimits
from tensorhub_plugins.core.transports.mapping_cache import Kept
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.pump import pump
from tensorhub_plugins.core.transports.read_plan import ReadPlan, runs_of
from tensorhub_plugins.core.transports.stream import unix_socket
from tensorhub_plugins.core.transports.stream.announced_read import AnnouncedStream
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected
from tensorhub_plugins.core.transports.stream.link import Connection, SocketLink
from tensorhub_plugins.core.transports.stream.messages import REPLY_SIZE_BYTES_MAX, StreamOpened
from tensorhub_plugins.core.transports.stream.sockets import SocketTransport
from tensorhub_plugins.core.transports.stream.source import SourceBackend
from tensorhub_plugins.core.transports.stream.unix_socket import check_owner

SCHEME = "cuda_ipc://"
THREADS = 2  # one waits for its copy, or finishes digests, while the other queues the next
# At once: 0.1 ms of a GPU's memory bandwidth, ten times the cost of queueing it. Where digests are computed, it is each
# thread's staging buffer, and a program digests four segments one block after the other: several are needed at a time.
COPY_SIZE_BYTES = 128 << 20
OPEN_MAX = 64  # sources whose memory stays open


class CudaIpcTransport(SocketTransport):
    """A transport between GPUs of one host. ipc: None: CUDA's own. limits: as for tcp."""

    name = "cuda_ipc"

    def __init__(
        self, *, ipc: Ipc | None = None, limits: TransportLimits = DEFAULT_LIMITS, gate: Gate | None = None
    ) -> None:
        super().__init__(limits, gate)
        self._ipc: Ipc = CudaIpc() if ipc is None else ipc
        self._source = CudaIpcSource(self._ipc)
        self._lock = threading.Lock()
        self._streams: dict[Device, Stream] = {}
        self._open: Kept[tuple[bytes, str], OpenMemory] = Kept("tensorhub-cuda-ipc-open", OPEN_MAX)
        self._refused: dict[str, str] = {}  # by a source's device: why its memory cannot be opened here
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tensorhub-cuda-ipc")

    @staticmethod
    def available() -> str | None:
        return CudaIpc.unavailable() or (None if drivers.is_there() else "torch finds no CUDA device")

    def _listen(self) -> tuple[list[socket.socket], str]:
        return unix_socket.listen(SCHEME)

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> CudaIpcLink:
        self._check_open()
        channel = unix_socket.connect(endpoint, SCHEME, stall_s=self._limits.stall_s, deadline=deadline)
        link = CudaIpcLink(channel, self)
        self._add(link)
        return link

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
        self._open.close()

    def refusal(self, memory: SourceMemory) -> str | None:
        """Return why such memory could not be opened before, or None."""
        return None if memory.process == self._ipc.process else self._refused.get(memory.device_id)

    def open(self, memory: SourceMemory, device: Device, owner_liveness_fd: int) -> OpenMemory:
        """Return this memory, on this device, opened now or before. Raise SourceLost if it cannot be opened."""
        try:
            if memory.process == self._ipc.process:
                return OpenMemory(self._ipc, device, memory)
            opened = self._open.get(
                (memory.runs, device.name), os.dup(owner_liveness_fd), lambda: OpenMemory(self._ipc, device, memory)
            )
        except NotShareable as error:
            reason = f"{device.name} cannot open its memory: {error}"
            if not is_over(owner_liveness_fd):  # else it has been freed since, which says nothing about the next one
                self._refused[memory.device_id] = reason
            raise SourceLost(reason) from error
        if opened is None:
            raise SourceLost("this side's transport was closed")
        return opened

    def stream_of(self, device: Device) -> Stream:
        """Return the stream on which this transport copies."""
        with self._lock:
            if device not in self._streams:
                with device.calling() as driver:
                    self._streams[device] = driver.make_stream()
            return self._streams[device]


class CudaIpcLink(SocketLink):
    """A link that copies many segments at a time, in the transport's threads."""

    def __init__(self, channel: Channel, transport: CudaIpcTransport) -> None:
        super().__init__(Connection([channel]))
        self._transport = transport
        self._memory: SourceMemory | None = None
        self._owner_liveness_fd = -1

    def _dispose(self) -> None:
        super()._dispose()
        self._close_liveness()

    def _close_liveness(self) -> None:
        fd, self._owner_liveness_fd = self._owner_liveness_fd, -1
        if fd >= 0:
            os.close(fd)

    def _receive_memory(self, channel: Channel, manifest: Manifest, opened: StreamOpened, deadline: float) -> None:
        self._close_liveness()
        memory = channel.receive_message(memory_decoder, REPLY_SIZE_BYTES_MAX, deadline)
        (self._owner_liveness_fd,) = channel.receive_descriptors(1, deadline)
        check_memory(memory, manifest.size_bytes)
        reason = self._transport.refusal(memory)
        if reason is not None:
            raise NotServable(reason)
        self._memory = memory

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        memory, transport = self._memory, self._transport
        assert memory is not None
        device = plan.target.copying_device or devices.here(begins=True)
        if device is None:
            raise SourceLost("no CUDA device is in use here")
        source = transport.open(memory, device, self._owner_liveness_fd)
        batch = _Batch(self._channels[0], source, device, transport.stream_of(device), manifest, plan)
        at_once = max(1, COPY_SIZE_BYTES // manifest.segment_size_bytes)
        stream = AnnouncedStream(self, transport._pool, batch.copy, batch=at_once, deadline=deadline)
        return pump(stream, segments, self._additional)


@dataclass
class _Batch:
    """The way in which the segments of one read are copied."""

    channel: Channel
    source: OpenMemory
    device: Device
    stream: Stream
    manifest: Manifest
    plan: ReadPlan

    def copy(self, segments: list[int]) -> list[int]:
        """Copy the segments, and return when they are in place and digested."""
        for first, end in runs_of(segments):
            start, stop = self.manifest.segment_range(first)[0], self.manifest.segment_range(end - 1)[1]
            if self.plan.target.device is None:
                self._to_host(range(first, end), start, stop)
            elif self.plan.computes:
                self._by_the_stage(range(first, end), start, stop)
            else:
                pairs: list[Pair] = []
                for at, flat in self.plan.flats(start, stop):
                    pairs += _cut(self.source.flats(start + at, start + at + flat.numel()), flat)
                copy_pairs(self.device, self.stream, pairs)
        return segments

    def _to_host(self, segments: range, start: int, stop: int) -> None:
        sources, places = self.source.flats(start, stop), self.plan.addresses(start, stop)
        with ExitStack() as stack:
            views = [view for segment in segments for view in stack.enter_context(self.plan.receiving(segment))]
            if places is not None and len(places) == 1:
                address, size_bytes = map(int, places[0])
                self.device.down(sources, torch.frombuffer(memory_at(address, size_bytes), dtype=torch.uint8))
            else:
                host = self.device.buffer(stop - start)
                self.device.down(sources, host)
                copy_views([memory_of(host)], views)

    def _by_the_stage(self, segments: range, start: int, stop: int) -> None:
        device, plan = self.device, self.plan
        with device.calling() as driver:
            stage = driver.scratch(stop - start, self.stream)
        copy_pairs(device, self.stream, _cut(self.source.flats(start, stop), stage))
        if self.channel.is_cut():
            raise Disconnected("cut the connection while its memory was copied")
        copy_pairs(device, self.stream, [(stage[at : at + flat.numel()], flat) for at, flat in plan.flats(start, stop)])
        for segment, digest in zip(segments, self._digests(stage), strict=True):
            plan.digested(segment, digest)

    def _digests(self, stage: torch.Tensor) -> Iterator[bytes]:
        """Return the digests of all staged segments, computed on the device where possible."""
        size_bytes, algorithm = self.manifest.segment_size_bytes, self.manifest.digest_algorithm
        if algorithm == XXH3:
            joined = digests_there(self.device, lambda at, end: [stage[at:end]][: end - at], stage.numel(), size_bytes)
            if joined is not None:
                return (joined[at : at + DIGEST_SIZE_BYTES] for at in range(0, len(joined), DIGEST_SIZE_BYTES))
        host = self.device.buffer(stage.numel())
        self.device.down([stage], host)
        return (digest_of([memory_of(part)], algorithm) for part in torch.split(host, size_bytes))


def _cut(sources: list[torch.Tensor], target: torch.Tensor) -> list[Pair]:
    """Return pairs that fill the target with the sources, one after the other."""
    pairs, at = [], 0
    for source in sources:
        pairs.append((source, target[at : at + source.numel()]))
        at += source.numel()
    return pairs


# --- the source's end: it sends readers the location of its slab, and announces segments ------------------------------

READY_MAX = 4096  # segments in one message of the source


class CudaIpcSource(SourceBackend):
    """A backend that serves slabs on a device."""

    name = "cuda_ipc"

    def __init__(self, ipc: Ipc) -> None:
        self._exports = Exports(ipc)

    def accept_peer(self, sock: socket.socket) -> str:
        return f"pid {check_owner(sock)}"

    def refusal(self, offer: Offer) -> str | None:
        try:
            self._exports.of(offer.slab)
        except NotShareable as error:
            return str(error)
        return None

    def send_memory(self, channel: Channel, offer: Offer, deadline: float, *, lends: bool = False) -> None:
        try:
            exported = self._exports.of(offer.slab)
        except NotShareable as error:  # it has been moved or closed since
            raise SourceLost(str(error), version=offer.version) from error
        channel.send_message(exported.memory, deadline)
        channel.send_descriptors([exported.owner_liveness_fd], deadline)

    def ready_batch_max(self, channel: Channel) -> int:
        return READY_MAX

    def on_reader_done(self, channel: Channel, *, ended: bool) -> None:
        if ended:
            channel.cut()  # before its memory is reused: a reader that still copies from it detects that


# --- copies of device memory to device memory, many at once -----------------------------------------------------------

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # source, target: uint8 of one size, on devices


def copy_pairs(device: Device, stream: Stream, pairs: Iterable[Pair]) -> None:
    """Copy each source to its target, and return when all have arrived. Small ones that follow each other are copied
    together."""
    with device.calling() as driver:
        try:
            for is_small, group in groupby(pairs, lambda pair: pair[0].numel() < SMALL_SIZE_BYTES):
                some = list(group)
                if is_small and len(some) > 1:
                    _copy_together(driver, stream, [source for source, _ in some], [target for _, target in some])
                else:
                    for source, target in some:
                        driver.copy(source, target, stream)
        finally:  # after an error too: memory that is released must not be written any more
            driver.wait(driver.record(stream))


def _copy_together(
    driver: Driver, stream: Stream, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    if _are_neighbours(targets):
        driver.launch(move, sources, [_joined(targets)], stream)
    elif _are_neighbours(sources):
        driver.launch(move, [_joined(sources)], targets, stream)
    else:
        beside = driver.scratch(sum(source.numel() for source in sources), stream)
        driver.launch(move, sources, [beside], stream)
        driver.launch(move, [beside], targets, stream)


def _are_neighbours(flats: Sequence[torch.Tensor]) -> bool:
    storage = flats[0].untyped_storage().data_ptr()
    return all(
        one.data_ptr() + one.numel() == other.data_ptr() and other.untyped_storage().data_ptr() == storage
        for one, other in pairwise(flats)
    )


def _joined(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor over all of these neighbours in one storage."""
    return torch.as_strided(flats[0], (sum(flat.numel() for flat in flats),), (1,))
