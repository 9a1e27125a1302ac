"""Verbs without a device: one process' memory, read by address. What `rdma` decides can be tested with it anywhere.

A queue pair answers as long as it is open. A read fails where a real one would: a wrong key, memory that is closed or
was never registered, a peer that is gone. Completions come a few at a time, whenever `poll` is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tensorhub_plugins.core.transports.rdma import link, source, transport
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import Port
from tensorhub_plugins.core.transports.rdma.verbs import Endpoint, ReadFailed

READS_PER_POLL = 7

_numbers = itertools.count(1)
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()  # by key
_pairs: dict[int, QueuePair] = {}  # by number
_lock = threading.Lock()


def held() -> tuple[int, ...]:
    """Return what is registered now."""
    return (len(_regions),)


class Region:
    """Registered as long as it lives, as bindings.Region is."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.rkey = self.lkey = next(_numbers)
        self.address, self.size_bytes = address, size_bytes
        self.how = "as it is"
        _regions[self.rkey] = self

    def holds(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes

    def close(self) -> None:
        _regions.pop(self.rkey, None)


class Nic:
    """A card. register_size_bytes_max: what is left of the locked-memory limit; None: unlimited. It takes no device
    memory."""

    def __init__(self, port: Port, register_size_bytes_max: int | None = None) -> None:
        self.port = port
        self.read_size_bytes_max = 300  # far smaller than a segment
        self.registered: list[tuple[int, int]] = []
        self.left = register_size_bytes_max

    def register(self, address: int, size_bytes: int, owner: object = None) -> Region:
        if owner is not None:
            raise VerbsError("cannot register a device's memory: no peer memory, no dma-buf")
        if self.left is not None:
            if size_bytes > self.left:
                raise VerbsError("cannot register: raise `ulimit -l`")
            self.left -= size_bytes
        self.registered.append((address, size_bytes))
        return Region(address, size_bytes)

    def close(self) -> None:
        pass


class QueuePair:
    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.peer: Endpoint | None = None
        self.endpoint = Endpoint(next(_numbers), 0, nic.port.gid, 0, 5, 16)
        _pairs[self.endpoint.queue_pair] = self

    def connect(self, peer: Endpoint) -> None:
        self.peer = peer

    def abort(self) -> None:
        with _lock:
            _pairs.pop(self.endpoint.queue_pair, None)

    close = abort


class ReadQueuePair:
    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self._pair = QueuePair(nic)
        self.endpoint = self._pair.endpoint
        self._waiting: deque[tuple[Any, int, bool]] = deque()
        self.fd, self._write = os.pipe()
        self._armed = False
        self._closed = False

    def connect(self, peer: Endpoint) -> None:
        self._pair.connect(peer)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, reads: Iterable[Any], token: int) -> None:
        before = len(self._waiting)
        self._waiting += [(read, token, False) for read in reads]
        assert len(self._waiting) > before, "a read of nothing"
        read, token, _ = self._waiting.pop()
        self._waiting.append((read, token, True))
        if self._armed:
            os.write(self._write, b"x")
            self._armed = False

    def poll(self) -> list[int]:
        ended = []
        for _ in range(min(READS_PER_POLL, len(self._waiting))):
            (remote, remote_key, local, local_key, size_bytes), token, last = self._waiting.popleft()
            with _lock:  # nothing is closed in the middle of a read
                peer = self._pair.peer
                if peer is None or peer.queue_pair not in _pairs:
                    raise ReadFailed("RETRY_EXC_ERR")
                for address, key, status in (
                    (remote, remote_key, "REM_ACCESS_ERR"),
                    (local, local_key, "LOC_PROT_ERR"),
                ):
                    region = _regions.get(key)
                    if region is None or not region.holds(address, size_bytes):
                        raise ReadFailed(status)
                ctypes.memmove(local, remote, size_bytes)
            if last:
                ended.append(token)
        return ended

    def arm(self) -> bool:
        if self._armed:
            return False
        self._armed = True
        os.write(self._write, b"x")  # there is always more to poll
        return True

    def take_event(self) -> None:
        os.read(self.fd, 4096)
        self._armed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pair.close()
            os.close(self.fd)
            os.close(self._write)


PORT = Port("fake0", 1, "Ethernet", 1, "0000:0000:0000:0000:0000:ffff:0a00:0001", 100.0)


@contextlib.contextmanager
def installed(ports: Callable[[], list[Port]] = lambda: [PORT], make: Callable[[Port], Nic] = Nic) -> Iterator[None]:
    """Let transports that are made now find these ports, and fake verbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "find_ports", lambda gid_index=None: (ports(), []))
        patch.setattr(transport, "open_nics", lambda chosen: [make(port) for port in chosen])
        patch.setattr(link, "ReadQueuePair", ReadQueuePair)
        patch.setattr(source, "QueuePair", QueuePair)
        yield
