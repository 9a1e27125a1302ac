"""Memory in verbs' terms: slabs that are registered once, and bounce buffers for what cannot be."""

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

from tensorhub_plugins.core.device import Device
from tensorhub_plugins.core.memory.runs import Runs, memory_of
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import Extent, Region, chunks, regions
from tensorhub_plugins.core.transports.rdma.verbs import Memory, Nic

SAID_MAX = 100

_log = logging.getLogger(__name__)


class Registration:
    """A slab's memory in verbs' terms: registered piece by piece, all of it for a source, as needed for a target."""

    def __init__(
        self,
        nics: Sequence[Nic],
        extents: Sequence[Extent],
        keepalive: object,
        owner: Device | None = None,
    ) -> None:
        """owner: the device whose memory it is. VerbsError."""
        self.extents = extents
        self._nics = nics
        self._owner = owner
        self._keepalive = keepalive  # the storages, whose memory verbs knows by address only
        try:
            self._chunks = chunks(extents, allocation=None if owner is None else owner.allocation)
        except OSError as error:
            raise VerbsError(f"it is not known which allocations it lies in: {error}") from error
        self._starts = [address for address, _ in self._chunks]
        self._regions: list[list[Memory] | None] = [None] * len(self._chunks)
        self._guard = threading.Lock()

    def offer(self) -> list[Region]:
        """All of it, as peers may read it. VerbsError."""
        registered = []
        for index, (address, size_bytes) in enumerate(self._chunks):
            known = self._registered(index)
            if len({region.address for region in known}) > 1:
                raise VerbsError("its cards register device memory in different ways: name one of them")
            registered.append((address, size_bytes, known[0].address, tuple(region.rkey for region in known)))
        return regions(self.extents, registered)

    def find(self, address: int, size_bytes: int, nic: int) -> list[tuple[int, int, int]] | None:
        """(address, size, local key) of a range on the host; None when some of it is not of this slab. VerbsError."""
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
    """All memory is registered once, and until everything else has forgotten it: by `Slab.runs`, which slabs of the
    same live tensors share (adoption.py), so that what is adopted anew for every version stays registered."""

    def __init__(self, nics: Sequence[Nic]) -> None:
        self._nics = nics
        self._guard = threading.Lock()
        self._known: weakref.WeakKeyDictionary[Runs, Registration] = weakref.WeakKeyDictionary()

    def of(self, slab: Slab) -> Registration:
        """The registration of this slab's memory, made now where there is none. VerbsError."""
        if slab.runs.scattered:
            raise VerbsError("columns of a matrix lie in as many pieces as it has rows")
        with self._guard:
            found = self._known.get(slab.runs)
            if found is None:
                tensors = list(slab.tensors().values())
                extents = [(run.start, run.size_bytes, run.address) for run in slab.runs.all]
                # The storages, not the tensors: the memory must stay, the tensors are free to go and take this along.
                storages = [tensor.untyped_storage() for tensor in tensors]
                found = self._known[slab.runs] = Registration(self._nics, extents, storages, slab.device)
            return found

    def clear(self) -> None:
        """Forget all of them; links in the middle of a read keep what they use."""
        with self._guard:
            self._known = weakref.WeakKeyDictionary()  # links in the middle of a read hold what they use


class BounceBuffer:
    """Registered host memory that no slab owns, for what cannot be read in place. host: it, as uint8."""

    def __init__(self, nics: Sequence[Nic], size_bytes: int, owner: Device | None = None) -> None:
        """owner: pinned for copies from and to this device as well. VerbsError."""
        size_bytes = max(size_bytes, mmap.PAGESIZE)
        block = mmap.mmap(-1, size_bytes) if owner is None else None
        self.host = torch.frombuffer(block, dtype=torch.uint8) if owner is None else owner.buffer(size_bytes)
        self.view = memory_of(self.host)
        self._address = address_of(self.view)
        self._regions = [nic.register(self._address, size_bytes) for nic in nics]

    def region(self, size_bytes: int) -> Region:
        """Its first bytes as peers may read them."""
        return Region(0, size_bytes, self._address, tuple(region.rkey for region in self._regions))

    def piece(self, start: int, size_bytes: int, nic: int) -> tuple[int, int, int]:
        """(address, size, local key) of a part of it, for one card."""
        return self._address + start, size_bytes, self._regions[nic].lkey

    def find(self, view: memoryview) -> int | None:
        """Where in it this memory begins; None: it is other memory."""
        start = address_of(view) - self._address
        return start if 0 <= start <= len(self.view) - len(view) else None

    def close(self) -> None:
        for region in self._regions:
            with suppress(Exception):
                region.close()


def log_once(level: int, message: str, argument: str) -> None:
    """A line in the log that would otherwise come with every version."""
    if (message, argument) not in _said and len(_said) < SAID_MAX:
        _said.add((message, argument))
        _log.log(level, message, argument)


_said: set[tuple[str, str]] = set()


def address_of(view: memoryview) -> int:
    """Where the memory of this view begins."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
