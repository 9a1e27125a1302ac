"""Memory registered with verbs: slabs, once each, and bounce buffers for what cannot be registered."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.memory.runs import Runs, memory_of
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import Extent, Region, chunks, regions
from tensorhub_plugins.core.transports.rdma.verbs import Memory, Nic

SAID_MAX = 100

_log = logging.getLogger(__name__)


class Registration:
    """The registration of a slab's memory, piece by piece: all of it for a source, on demand for a target."""

    def __init__(
        self, nics: Sequence[Nic], extents: Sequence[Extent], keepalive: object, owner: Device | None = None
    ) -> None:
        """Plan the pieces. owner: the device whose memory it is. Raise VerbsError."""
        self.extents, self._nics, self._owner = extents, nics, owner
        self._keepalive = keepalive  # the storages, whose memory verbs know only by address
        try:
            self._chunks = chunks(extents, allocation=None if owner is None else owner.allocation)
        except OSError as error:
            raise VerbsError(f"it is not known which allocations it lies in: {error}") from error
        self._starts = [address for address, _ in self._chunks]
        self._regions: list[list[Memory] | None] = [None] * len(self._chunks)
        self._guard = threading.Lock()

    def offer(self) -> list[Region]:
        """Register all of it, and return it as peers may read it. Raise VerbsError."""
        registered = []
        for index, (address, size_bytes) in enumerate(self._chunks):
            known = self._registered(index)
            if len({region.address for region in known}) > 1:
                raise VerbsError("its cards register device memory in different ways: name one of them")
            registered.append((address, size_bytes, known[0].address, tuple(region.rkey for region in known)))
        return regions(self.extents, registered)

    def find(self, address: int, size_bytes: int, nic: int) -> list[tuple[int, int, int]] | None:
        """Return (address, size, local key) of a host range's pieces; None if not all is this slab's. VerbsError."""
        found = []
        while size_bytes:
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            first, length = self._chunks[index]
            count = min(size_bytes, first + length - address)
            if count <= 0:
                return None
            found.append((address, count, self._registered(index)[nic].lkey))
            address, size_bytes = address + count, size_bytes - count
        return found

    def _registered(self, index: int) -> list[Memory]:
        known = self._regions[index]
        if known is None:
            with self._guard:
                known = self._regions[index]
                if known is None:
                    address, size_bytes = self._chunks[index]
                    known = [nic.register(address, size_bytes, self._owner) for nic in self._nics]
                    self._regions[index] = known
                    if self._owner is not None:
                        log_once(logging.INFO, "rdma: device memory is served %s", known[0].how)
        return known

    def close(self) -> None:
        with self._guard:
            for known in self._regions:
                for region in known or ():
                    with suppress(Exception):
                        region.close()
            self._regions = [None] * len(self._chunks)


class Registry:
    """A cache by `Slab.runs`, which slabs of the same live tensors share (adoption.py): memory is registered once and
    stays registered, also when it is adopted anew for every version, until everything else has forgotten it."""

    def __init__(self, nics: Sequence[Nic]) -> None:
        self._nics = nics
        self._guard = threading.Lock()
        self._known: weakref.WeakKeyDictionary[Runs, Registration] = weakref.WeakKeyDictionary()

    def of(self, slab: Slab) -> Registration:
        """Return the registration of this slab's memory, made now if there is none. Raise VerbsError."""
        if slab.runs.scattered:
            raise VerbsError("columns of a matrix lie in as many pieces as it has rows")
        with self._guard:
            found = self._known.get(slab.runs)
            if found is None:
                tensors = list(slab.tensors().values())
                extents = [(run.start, run.size_bytes, run.address) for run in slab.runs.all]
                # The storages, not the tensors: the memory must stay, the tensors may be freed, and this with them.
                storages = [tensor.untyped_storage() for tensor in tensors]
                found = self._known[slab.runs] = Registration(self._nics, extents, storages, slab.device)
            return found

    def clear(self) -> None:
        """Forget all registrations; links in the middle of a read keep theirs."""
        with self._guard:
            self._known = weakref.WeakKeyDictionary()  # links in the middle of a read hold theirs


class BounceBuffer:
    """Registered host memory of no slab, for what cannot be read in place. host: the memory, as uint8."""

    def __init__(self, nics: Sequence[Nic], size_bytes: int, owner: Device | None = None) -> None:
        """Allocate and register it. owner: a device for whose copies it is pinned as well. Raise VerbsError."""
        size_bytes = max(size_bytes, mmap.PAGESIZE)
        block = mmap.mmap(-1, size_bytes) if owner is None else None
        self.host = torch.frombuffer(block, dtype=torch.uint8) if owner is None else owner.buffer(size_bytes)
        self.view = memory_of(self.host)
        self._address = address_of(self.view)
        self._regions = [nic.register(self._address, size_bytes) for nic in nics]

    def region(self, size_bytes: int) -> Region:
        """Return its first bytes as peers may read them."""
        return Region(0, size_bytes, self._address, tuple(region.rkey for region in self._regions))

    def piece(self, start: int, size_bytes: int, nic: int) -> tuple[int, int, int]:
        """Return (address, size, local key) of a part of it, for one card."""
        return self._address + start, size_bytes, self._regions[nic].lkey

    def find(self, view: memoryview) -> int | None:
        """Return the offset of this memory in the buffer; None if it is other memory."""
        start = address_of(view) - self._address
        return start if 0 <= start <= len(self.view) - len(view) else None

    def close(self) -> None:
        for region in self._regions:
            with suppress(Exception):
                region.close()


def log_once(level: int, message: str, argument: str) -> None:
    """Log a line that would otherwise repeat with every version."""
    if (message, argument) not in _said and len(_said) < SAID_MAX:
        _said.add((message, argument))
        _log.log(level, message, argument)


_said: set[tuple[str, str]] = set()


def address_of(view: memoryview) -> int:
    """Return the address of this view's memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
