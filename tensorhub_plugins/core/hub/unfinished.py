"""Connections with a message that never ends: cut, before they take the hub's memory.

ZeroMQ hands over a message of several frames when the last one is there, and limits the size of each, not their number.
So every peer that the hub admits, with an observer's key, too, could have it keep as many as its memory takes. (Ours
have one frame.) What the kernel has received on a connection is compared with what was handed over. To ask takes
microseconds for each connection: that is done when this process has grown, and once in a while.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Collection

import zmq

from tensorhub_plugins.core.protocol.messages import FROM_CLIENT_SIZE_BYTES_MAX

UNFINISHED_BYTES_MAX = 8 * FROM_CLIENT_SIZE_BYTES_MAX
GROWTH_BYTES = 64 << 20
GROWN_S, LOOK_S = 0.1, 600.0  # between two looks at this process's size, and at all connections
RECEIVED = struct.Struct("=128xQ")  # of Linux' struct tcp_info, since 4.1: tcpi_bytes_received
SRCFD = int(zmq.SRCFD)


class Unfinished:
    """Counts what comes over each connection, by its descriptor. Only the hub's thread uses it.

    bytes_max: of one connection, received and not handed over. growth_bytes: of this process, before it looks again."""

    def __init__(self, now: float, *, bytes_max: int = UNFINISHED_BYTES_MAX, growth_bytes: int = GROWTH_BYTES) -> None:
        self._bytes_max, self._growth_bytes = bytes_max, growth_bytes
        self._taken: dict[int, int] = {}  # bytes that were handed over, since the connection was accepted
        self._known: dict[int, tuple[int, int]] = {}  # received and taken, as of the last look that found a message
        self._size_bytes, self._sized_at, self._looked_at = math.inf, now, now
        self._statm = -1  # open from the first look on: one that comes and goes would be counted now and then

    def accepted(self, descriptor: int) -> None:
        """Count a new connection from the beginning."""
        self._taken[descriptor], self._known[descriptor] = 0, (0, 0)

    def took(self, frame: zmq.Frame) -> None:
        """Count a frame that was handed over."""
        with contextlib.suppress(zmq.ZMQError):  # of a protocol before ZMTP 3, which none of our workers speaks
            descriptor = frame.get(SRCFD)
            self._taken[descriptor] = self._taken.get(descriptor, 0) + len(frame)

    def cut(self, connections: Collection[int], now: float) -> list[int]:
        """Cut those of these connections, by their descriptors, that have sent too much of one message; return them."""
        if now - self._sized_at < GROWN_S:
            return []
        self._sized_at, size_bytes = now, self._measure()
        self._size_bytes = min(self._size_bytes, size_bytes)
        if size_bytes - self._size_bytes < self._growth_bytes and now - self._looked_at < LOOK_S:
            return []
        self._size_bytes, self._looked_at = size_bytes, now
        return [each for each in connections if self._is_too_much(each) and _shut_down(each)]

    def _is_too_much(self, descriptor: int) -> bool:
        received, taken = _received(descriptor), self._taken.get(descriptor, 0)
        received_before, taken_before = self._known.get(descriptor, (0, 0))
        is_too_much = received - received_before - (taken - taken_before) > self._bytes_max
        if taken != taken_before and not is_too_much:  # headers and signs of life would add up for months
            self._known[descriptor] = received, taken
        return is_too_much

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


def _received(descriptor: int) -> int:
    """Return how many bytes have come over this connection; 0: that is unknown, or it is over."""
    with contextlib.suppress(OSError, struct.error), socket.socket(fileno=os.dup(descriptor)) as connection:
        return int(RECEIVED.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size))[0])
    return 0


def _shut_down(descriptor: int) -> bool:
    """Shut down a connection of ZeroMQ's, which then frees what it has of it; return whether it was still there."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
