"""The limits of this machine, without the store: GB/s of the bare means."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, fields

import torch
import xxhash

from recipes.bench.gpu.machine import Machine

TIMES = 3
STREAM_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits in GB/s. d2h, h2d: one pinned copy; device_copy: from device memory to device memory, counted once;
    memcpy, xxhash: one thread; tcp: one plain stream over loopback."""

    d2h: float
    h2d: float
    device_copy: float
    memcpy: float
    xxhash: float
    tcp: float

    def best_of(self, other: Limits) -> Limits:
        """Return the better of two runs, for each limit."""
        return Limits(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


def measure(machine: Machine, size_bytes: int) -> Limits:
    """Measure all limits, with so many bytes."""
    there, beside = machine.block(size_bytes), machine.block(size_bytes, 1)
    host, other = machine.host_block(size_bytes), torch.zeros(size_bytes, dtype=torch.uint8)
    threads = torch.get_num_threads()

    def gb_s(call: object) -> float:
        assert callable(call)
        return size_bytes / machine.timed(call, TIMES) / 1e9

    d2h = gb_s(lambda: host.copy_(there, non_blocking=True))
    h2d = gb_s(lambda: there.copy_(host, non_blocking=True))
    device_copy = gb_s(lambda: beside.copy_(there))
    torch.set_num_threads(1)
    memcpy = gb_s(lambda: other.copy_(host))
    torch.set_num_threads(threads)
    view = memoryview(other.numpy())
    digest = gb_s(lambda: xxhash.xxh3_128_digest(view))
    tcp = gb_s(lambda: _stream(view))
    return Limits(d2h, h2d, device_copy, memcpy, digest, tcp)


def _stream(view: memoryview) -> None:
    """Send all bytes through one connection, to a thread that receives them into memory of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener.getsockname(), view))
        sender.start()
        connection, _ = listener.accept()
        with connection:
            left, into = len(view), bytearray(STREAM_PIECE_BYTES)
            while left:
                left -= connection.recv_into(into, min(left, len(into)))
        sender.join()


def _send(address: tuple[str, int], view: memoryview) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(view)
