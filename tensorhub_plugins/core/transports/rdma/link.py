"""The reader's end of rdma: agrees on queue pairs with the source, probes them, and reads one-sided over all."""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from tensorhub_plugins.core.deadline import POLL_S_MAX
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.interface import More, NotServable
from tensorhub_plugins.core.transports.pump import OrderedWork, pump
from tensorhub_plugins.core.transports.rdma import messages as m
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import Region, RemoteMemory, cut_reads, pair
from tensorhub_plugins.core.transports.rdma.registration import BounceBuffer, Registration, address_of, log_once
from tensorhub_plugins.core.transports.rdma.verbs import ReadQueuePair
from tensorhub_plugins.core.transports.read_plan import ReadPlan
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected, Silent
from tensorhub_plugins.core.transports.stream.link import Connection, SocketLink
from tensorhub_plugins.core.transports.stream.messages import REPLY_SIZE_BYTES_MAX, SEGMENT, StreamOpened

if TYPE_CHECKING:
    from tensorhub_plugins.core.transports.rdma.transport import RdmaTransport

WINDOW = 16  # segments in flight: 64 MiB is more than any path has in flight
FINISH_THREADS_MAX = 4  # at 9 GB/s each they digest what the fastest card delivers
CORES_PER_FINISH_THREAD = 2
PROBE_SIZE_BYTES = 8
PROBE_S_MAX = 8.0  # longer than the retries of a queue pair

_log = logging.getLogger(__name__)


class _Rail:
    """One queue pair of a reader, and the ports that it joins."""

    def __init__(self, pair: ReadQueuePair[int], nic: int, port: int) -> None:
        self.pair = pair
        self.nic = nic  # index of our port
        self.port = port  # index of the source's port


class RailConnection(Connection):
    """A channel and its rails, which are kept from link to link."""

    def __init__(self, channel: Channel) -> None:
        super().__init__([channel])
        self.channel = channel
        self.rails: list[_Rail] = []
        self.proved = False  # something has been read over them

    def hang_up(self) -> None:
        """Close the rails: when this returns no read arrives any more."""
        for rail in self.rails:
            rail.pair.close()
        self.rails = []

    def close(self) -> None:
        self.hang_up()
        super().close()


class _Arriving:
    """A segment whose reads are in flight, or which is being finished."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.stack = ExitStack()  # of ReadPlan.receiving
        self.bounce: BounceBuffer | None = None
        self.buffered: list[tuple[int, memoryview]] = []  # offset in the bounce buffer, and the target of the copy

    def finish(self) -> list[int]:
        """Copy and digest the bytes, and commit them to a device. May run in any thread."""
        if self.bounce is not None:
            for start, view in self.buffered:
                copy_views([self.bounce.view[start : start + len(view)]], [view])
        self.stack.close()
        return [self.segment]

    def abandon(self) -> None:
        with suppress(_GivenUp):
            self.stack.__exit__(_GivenUp, _GivenUp(), None)


class _GivenUp(Exception):
    """Thrown into ReadPlan.receiving: nothing of that segment counts."""


class RdmaLink(SocketLink):
    """One reader's connection to one source: control messages over TCP, bytes by RDMA reads."""

    _connection: RailConnection

    def __init__(
        self, transport: RdmaTransport, connection: RailConnection, stall_s: float, keep: Callable[[Connection], None]
    ) -> None:
        super().__init__(connection, keep)
        self._transport, self._stall_s = transport, stall_s
        self._remote: RemoteMemory | None = None
        self._ring: Region | None = None  # the source's, where its memory is not registered
        self._target: Registration | None = None
        self._device: Device | None = None  # the target's: read by way of bounce buffers that are pinned for it
        self._free: list[BounceBuffer] = []

    def _dispose(self) -> None:
        if self._channels:  # they are still this link's
            self._connection.hang_up()
        self._drop_bounce_buffers()
        super()._dispose()

    def _drop_bounce_buffers(self) -> None:
        free, self._free = self._free, []
        for buffer in free:
            buffer.close()

    # opening

    def _receive_memory(self, channel: Channel, manifest: Manifest, opened: StreamOpened, deadline: float) -> None:
        self._drop_bounce_buffers()  # they have the size of another offer's segments
        told = channel.receive_message(m.rails_decoder, REPLY_SIZE_BYTES_MAX, deadline)
        size_bytes = m.RING_SLOTS * manifest.segment_size_bytes if told.is_ring else manifest.size_bytes
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

    def _dial(self, channel: Channel, told: m.Rails, deadline: float) -> None:
        connection = self._connection
        if connection.rails:
            channel.send_message(m.Dial([]), deadline)
            channel.receive_message(m.dialed_decoder, m.DIAL_SIZE_BYTES_MAX, deadline)
            return
        nics = self._transport.nics
        try:
            for mine, theirs in pair([nic.port.link_layer for nic in nics], told.link_layers):
                connection.rails.append(_Rail(ReadQueuePair(nics[mine]), mine, theirs))
            problem = "" if connection.rails else f"none of its ports {told.link_layers} faces one of ours"
        except VerbsError as error:
            connection.hang_up()
            problem = str(error)
        # Sent also when there is none, since the source waits for it.
        channel.send_message(m.Dial([(rail.port, rail.pair.endpoint) for rail in connection.rails]), deadline)
        answer = channel.receive_message(m.dialed_decoder, m.DIAL_SIZE_BYTES_MAX, deadline)
        if problem or answer.problem:
            raise VerbsError(problem or answer.problem)
        if len(answer.rails) != len(connection.rails):
            raise ProtocolError(f"{len(connection.rails)} queue pairs were offered, {len(answer.rails)} came back")
        for rail, endpoint in zip(connection.rails, answer.rails, strict=True):
            rail.pair.connect(endpoint)

    def _probe(self, channel: Channel, region: Region, deadline: float) -> None:
        """Read a few bytes over every rail, and keep those that work. Raise VerbsError when none does."""
        connection = self._connection
        size_bytes = min(PROBE_SIZE_BYTES, region.size_bytes)
        until = min(deadline, time.monotonic() + PROBE_S_MAX)
        awaited, problems = list(connection.rails), []
        connection.rails = []
        buffer = BounceBuffer(self._transport.nics, size_bytes)
        try:
            for rail in awaited:
                remote = (region.address, size_bytes, region.keys[rail.port])
                rail.pair.submit(cut_reads([remote], [buffer.piece(0, size_bytes, rail.nic)], size_bytes), 0)
            while awaited:
                for rail in list(awaited):
                    try:
                        if rail.pair.poll():
                            awaited.remove(rail)
                            connection.rails.append(rail)
                    except VerbsError as error:
                        if channel.is_cut():
                            raise Disconnected("cut the connection") from error
                        awaited.remove(rail)
                        rail.pair.close()
                        problems.append(f"{rail.pair.nic.port.name}: {error}")
                if channel.is_cut():
                    raise Disconnected("cut the connection")
                if awaited:
                    _wait(channel, awaited, until, until, listens=False)
        finally:
            for rail in awaited:
                rail.pair.close()
            buffer.close()
        if not connection.rails:
            raise VerbsError("; ".join(problems))
        if problems:
            _log.warning("rdma: %s: some rails do not carry: %s", channel.peer, "; ".join(problems))
        connection.proved = True

    # reading

    def read(
        self, segments: Sequence[int], target: Slab, moves: Sequence[Move], *, deadline: float, more: More | None = None
    ) -> Iterator[int]:
        reading = super().read(segments, target, moves, deadline=deadline, more=more)
        if target.device is not self._device:
            self._drop_bounce_buffers()
        self._device = target.device
        self._target = self._register(target)
        return reading

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        stream = _RdmaStream(self, manifest, plan, deadline)
        try:
            yield from pump(stream, segments, stream.additional)
        except VerbsError as error:
            raise Disconnected(str(error)) from error

    def _register(self, target: Slab) -> Registration | None:
        """Register the target, or return None: its memory has to be read by way of a bounce buffer."""
        if target.device is not None:
            log_once(logging.INFO, "rdma: %s is read into by way of pinned host memory", target.device.name)
            return None
        if target.runs.scattered:
            return None
        return self._transport.memory.of(target)

    def _in_place(self, view: memoryview, nic: int) -> list[tuple[int, int, int]] | None:
        """Return the view's own registered memory, or None if it is not registered."""
        if self._target is None:
            return None
        try:
            return self._target.find(address_of(view), len(view), nic)
        except VerbsError as error:
            _log.warning("rdma: reading by way of host memory that is copied from: %s", error)
            self._target = None
            return None


class _RdmaStream:
    """Segments that the source announces and queue pairs read, in any order. Other threads finish them."""

    window = WINDOW
    batch = 1

    def __init__(self, link: RdmaLink, manifest: Manifest, plan: ReadPlan, deadline: float) -> None:
        assert link._remote is not None
        self._link = link
        self._connection = link._connection
        self._channel = link._connection.channel
        self._remote = link._remote
        self._ring = link._ring
        self._manifest, self._plan, self._deadline = manifest, plan, deadline
        self._awaited = 0  # segments not announced yet
        self._slots: dict[int, int] = {}  # slots of the source's ring, by segment, from its announcement to its end
        self._arriving: dict[int, _Arriving] = {}
        self._landed: dict[int, _Arriving] = {}  # read completely, being finished
        self._finishing = OrderedWork()
        threads = min(FINISH_THREADS_MAX, max(1, cores() // CORES_PER_FINISH_THREAD))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tensorhub-rdma-finish")
        self._finished = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when one of them is finished
        self._blocked = False  # no bounce buffer is free for the next segment
        self._lost: Exception | None = None  # why the source is lost
        self._moved_at = time.monotonic()
        self._yielded = False  # the caller was busy with the last segments: its time does not count against the source

    @property
    def in_flight(self) -> int:
        return len(self._arriving) + len(self._landed)

    def additional(self, due: int) -> Sequence[int]:
        """Return more segments; over a ring only once all have ended: until then the source accepts only `Taken`."""
        return [] if self._ring is not None and (due or self._slots) else self._link._additional(due)

    def request(self, segments: Sequence[int]) -> None:
        self._link._request(self._channel, segments, self._deadline)
        self._awaited += len(segments)

    def has_input(self) -> bool:
        return self._channel.has_input()

    def announced(self, due: deque[int]) -> list[int]:
        segment = due[0]
        length = self._link._announced(self._channel, SEGMENT, segment, self._deadline)
        self._moved_at = time.monotonic()
        if length is None:
            return []
        if length != (0 if self._ring is None else m.SLOT.size):
            raise ProtocolError(f"segment {segment} is announced with {length} bytes")
        slot = 0
        if length:
            slot = int(m.SLOT.unpack(self._channel.receive_body(length, m.SLOT.size, self._deadline))[0])
        if slot >= m.RING_SLOTS:
            raise ProtocolError(f"segment {segment} is said to lie in slot {slot} of a ring of {m.RING_SLOTS}")
        self._slots[segment] = slot
        self._awaited -= 1
        return [due.popleft()]

    def start(self, ready: deque[int]) -> bool:
        """Post the reads of a segment. Return False if the bounce buffer it needs is still used by others."""
        segment = ready[0]
        rail = self._connection.rails[segment % len(self._connection.rails)]
        start, stop = self._manifest.segment_range(segment)
        if self._ring is not None:
            first = self._slots[segment] * self._manifest.segment_size_bytes
            start, stop = first, first + stop - start
        begun = _Arriving(segment)
        try:
            if self._link._device is not None:
                begun.bounce = self._bounce_buffer()
            host = None if begun.bounce is None else begun.bounce.host
            views = begun.stack.enter_context(self._plan.receiving(segment, host))
            local = self._local(views, rail.nic, begun)
        except VerbsError as error:
            begun.abandon()
            self._blocked = self.in_flight > 0
            if self._blocked:
                return False
            # Not even one bounce buffer: this reader cannot use rdma now.
            self._link._transport.unreachable(self._channel.peer, str(error))
            raise
        remote = self._remote.pieces(start, stop, rail.port)
        rail.pair.submit(cut_reads(remote, local, rail.pair.nic.read_size_bytes_max), segment)
        self._arriving[ready.popleft()] = begun
        return True

    def finished(self, *, wait: bool) -> list[int]:
        if self._yielded:
            self._moved_at, self._yielded = time.monotonic(), False
        if self._lost is None:
            self._lost = self._poll()
        done = []
        # What has arrived is not lost with its source: it is finished and returned first.
        while ended := self._finishing.take(wait=self._lost is not None):
            done += ended
        if self._lost is not None and not done:
            raise self._lost
        if not done and wait:
            listens = bool(self._awaited) and self.in_flight < self.window and not self._blocked
            stalls_at = self._deadline if self._landed else self._moved_at + self._link._stall_s
            beside = self._finished if self._landed else None
            _wait(self._channel, self._connection.rails, self._deadline, stalls_at, listens=listens, beside=beside)
        for segment in done:
            bounce = self._landed.pop(segment).bounce
            if bounce is not None:
                self._link._free.append(bounce)
        if done:
            self._blocked, self._yielded = False, True
        return done

    def _poll(self) -> Exception | None:
        """Take what has been read; return why no more will be, or None."""
        try:
            for rail in self._connection.rails:
                for segment in rail.pair.poll():
                    self._land(segment)
        except (VerbsError, Disconnected) as error:
            return error
        return Disconnected("cut the connection") if self._channel.is_cut() else None

    def _land(self, segment: int) -> None:
        """Finish a segment that was read completely, in another thread; its slot at the source is free."""
        self._landed[segment] = self._arriving.pop(segment)
        self._moved_at = time.monotonic()
        future = self._pool.submit(self._landed[segment].finish)
        future.add_done_callback(lambda _: os.eventfd_write(self._finished, 1))
        self._finishing.add(future)
        slot = self._slots.pop(segment)
        if self._ring is not None:
            self._channel.send_message(m.Taken(slot), self._deadline)

    def close(self) -> None:
        if self._arriving:
            self._connection.hang_up()  # before the target's memory is released
            for begun in self._arriving.values():
                begun.abandon()
        self._pool.shutdown()
        os.close(self._finished)

    def _local(self, views: Sequence[memoryview], nic: int, begun: _Arriving) -> list[tuple[int, int, int]]:
        """Return registered memory for these views: their own, or a bounce buffer that is copied to them at the end."""
        pieces: list[tuple[int, int, int]] = []
        inside = [None if begun.bounce is None else begun.bounce.find(view) for view in views]  # for a device
        used = sum(len(view) for view, start in zip(views, inside, strict=True) if start is not None)
        for view, start in zip(views, inside, strict=True):
            if not len(view):
                continue
            found = None if start is not None else self._link._in_place(view, nic)
            if found is not None:
                pieces += found
                continue
            if begun.bounce is None:
                begun.bounce = self._bounce_buffer()
            pieces.append(begun.bounce.piece(used if start is None else start, len(view), nic))
            if start is None:
                begun.buffered.append((used, view))
                used += len(view)
        return pieces

    def _bounce_buffer(self) -> BounceBuffer:
        free, link = self._link._free, self._link
        if free:
            return free.pop()
        return BounceBuffer(link._transport.nics, self._manifest.segment_size_bytes, link._device)


def _wait(
    channel: Channel,
    rails: Sequence[_Rail],
    deadline: float,
    stalls_at: float,
    *,
    listens: bool,
    beside: int | None = None,
) -> None:
    """Wait until something may have been read, or (listens) received, or the connection is cut, or (beside) this
    eventfd is set. Raise Silent when it is too late.

    Returns at once if it has just requested completion events: earlier completions generate none."""
    pairs = [rail.pair for rail in rails if rail.pair.busy]
    if any([each.arm() for each in pairs]):
        return
    poll = select.poll()
    cut = getattr(select, "POLLRDHUP", 0)
    poll.register(channel.sock, select.POLLIN | cut if listens else cut)
    for each in pairs:
        poll.register(each.fd, select.POLLIN)
    if beside is not None:
        poll.register(beside, select.POLLIN)
    now = time.monotonic()
    if now >= deadline:
        raise Silent("was not done")
    if now >= stalls_at:
        raise Silent("sent nothing")
    ready = dict(poll.poll(max(1, int((min(deadline, stalls_at, now + POLL_S_MAX) - now) * 1000))))
    for each in pairs:
        if each.fd in ready:
            each.take_event()
    if beside in ready:
        os.eventfd_read(beside)
