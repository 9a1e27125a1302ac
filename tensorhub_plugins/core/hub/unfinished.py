"""Connections of which more has come than the hub has taken: cut, before they take its memory.

ZeroMQ takes in all that comes: its queues have no end here, as it aborts the process where a peer that it has stopped
reading resets its connection, with a sign of life among what it had sent (`!_io_error`, libzmq 4.3.5). And it hands
over a message of several frames when the last one is there, and limits the size of each, not their number. So every
peer that the hub admits, with an observer's key, too, could have it keep as much as its memory takes. What the kernel
has received on a connection is compared with what was handed over. To ask takes microseconds for each connection: that
is done when this process has grown, and once in a while.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Collection

import zmq

from tensorhub_plugins.core.process_lifetime import socket_of
from tensorhub_plugins.core.protocol.messages import FROM_CLIENT_SIZE_BYTES_MAX

WAITING_BYTES_MAX = 8 * FROM_CLIENT_SIZE_BYTES_MAX  # of one connection
WAITING_BYTES_MAX_OF_ALL = 512 << 20  # a hello of a KiB of each of SESSIONS_MAX workers is an eighth of that
BESIDE_BYTES_PER_S = 1 << 10  # of one connection: headers and signs of life, which are never handed over
FRAME_SIZE_BYTES, HEADER_SIZE_BYTES = 200, 2  # beside its contents: in memory, as measured, and on the wire, at least
GROWTH_BYTES = 64 << 20
GROWN_S, LOOK_S = 0.1, 600.0  # between two looks at this process's size, and at all connections
RECEIVED = struct.Struct("=128xQ")  # of Linux' struct tcp_info, since 4.1: tcpi_bytes_received
CLOSED = (b"\x07", b"\x08")  # of its first byte, tcpi_state: TCP_CLOSE, TCP_CLOSE_WAIT
SRCFD = int(zmq.SRCFD)


class Unfinished:
    """Counts what comes over each connection, by its descriptor. Only the hub's thread uses it.

    port: the hub's: a descriptor may have become another socket's of this process. bytes_max, bytes_max_of_all: of
    memory that takes what was received and not handed over, of one connection and of all. growth_bytes: of this
    process, before it looks again."""

    def __init__(
        self,
        now: float,
        port: int,
        *,
        bytes_max: int = WAITING_BYTES_MAX,
        bytes_max_of_all: int = WAITING_BYTES_MAX_OF_ALL,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        self._port = port
        self._bytes_max, self._bytes_max_of_all, self._growth_bytes = bytes_max, bytes_max_of_all, growth_bytes
        self._taken: dict[int, tuple[int, int]] = {}  # frames and bytes handed over, since the connection was accepted
        self._known: dict[int, tuple[int, int, int, float]] = {}  # received and taken when nothing waited, and when
        self._size_bytes, self._sized_at, self._looked_at = math.inf, now, now
        self._cut: set[int] = set()  # they may still be listed for a moment
        self._left_bytes = 0  # by those that were cut off since all was taken
        self._statm = -1  # open from the first look on: one that comes and goes would be counted now and then

    def accepted(self, descriptor: int, now: float) -> None:
        """Count a new connection from the beginning."""
        self._taken[descriptor], self._known[descriptor] = (0, 0), (0, 0, 0, now)
        self._cut.discard(descriptor)

    def took(self, frame: zmq.Frame) -> None:
        """Count a frame that was handed over."""
        with contextlib.suppress(zmq.ZMQError):  # of a protocol before ZMTP 3, which none of our workers speaks
            descriptor = frame.get(SRCFD)
            frames, taken = self._taken.get(descriptor, (0, 0))
            self._taken[descriptor] = frames + 1, taken + len(frame)

    def cut(self, connections: Collection[int], now: float, *, is_all_taken: bool) -> list[int]:
        """Cut those of these connections, by their descriptors, of which too much waits; return them. is_all_taken: of
        what waits now nothing is whole: it can be taken when the rest has come."""
        self._left_bytes = 0 if is_all_taken else self._left_bytes
        if now - self._sized_at < GROWN_S:
            return []
        self._sized_at, size_bytes = now, self._measure()
        self._size_bytes = min(self._size_bytes, size_bytes)
        if size_bytes - self._size_bytes < self._growth_bytes and now - self._looked_at < LOOK_S:
            return []
        self._size_bytes, self._looked_at = size_bytes, now
        waiting = {each: self._waiting(each, now, is_all_taken=is_all_taken) for each in set(connections) - self._cut}
        of_all, found = sum(waiting.values()), []
        for each, size in sorted(waiting.items(), key=lambda item: -item[1]):
            if size <= self._bytes_max and of_all <= self._bytes_max_of_all:
                break
            of_all -= size
            found.append(each)
        cut = [each for each in found if self._shut_down(each)]
        self._cut.update(cut)
        self._left_bytes += sum(waiting[each] for each in cut)
        return cut

    @property
    def has_left_too_much(self) -> bool:
        """Return whether those that were cut off have left more to be read than may wait of all."""
        return self._left_bytes > self._bytes_max_of_all

    def count_left(self, connections: Collection[int]) -> int:
        """Return how many of these connections, by their descriptors, were closed by their peers and are open here."""
        return sum(self._tcp_info(each)[:1] in CLOSED for each in connections)

    def _waiting(self, descriptor: int, now: float, *, is_all_taken: bool) -> int:
        """Return how much memory takes what has come over this connection and is still to be handed over, if it is in
        frames like those that were."""
        received, (frames, taken) = self._received(descriptor), self._taken.get(descriptor, (0, 0))
        received_before, frames_before, taken_before, since = self._known.setdefault(descriptor, (0, 0, 0, now))
        waiting = received - received_before - (taken - taken_before)
        if is_all_taken and frames != frames_before and waiting <= self._bytes_max:
            self._known[descriptor] = received, frames, taken, now
            return 0
        waiting = max(0, waiting - int(BESIDE_BYTES_PER_S * (now - since)))
        count = frames - frames_before
        return waiting + waiting * FRAME_SIZE_BYTES * count // max(1, taken - taken_before + HEADER_SIZE_BYTES * count)

    def _received(self, descriptor: int) -> int:
        """Return how many bytes have come over this connection; 0: that is unknown, or it is over."""
        info = self._tcp_info(descriptor)
        return int(RECEIVED.unpack(info)[0]) if len(info) == RECEIVED.size else 0

    def _tcp_info(self, descriptor: int) -> bytes:
        """Return what the system says of a connection; b"": it is over."""
        with contextlib.suppress(OSError), socket_of(descriptor) as connection:
            if connection.getsockname()[1:2] == (self._port,):
                return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
        return b""

    def _shut_down(self, descriptor: int) -> bool:
        """Shut down a connection of ZeroMQ's, which then frees what it has of it; return whether it was still there."""
        with contextlib.suppress(OSError), socket_of(descriptor) as connection:
            if connection.getsockname()[1:2] == (self._port,):
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _measure(self) -> int:
        """Return the memory that this process has; 0: unknown."""
        with contextlib.suppress(OSError):
            if self._statm < 0:
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._statm, 200, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def close(self) -> None:
        """Look no more."""
        if self._statm >= 0:
            os.close(self._statm)
        self._statm = -1
