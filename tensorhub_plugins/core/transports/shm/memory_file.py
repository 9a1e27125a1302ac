"""The memory of another process of this host, read by its file: an allocated slab's memfd.

Memory that is read once is read with preadv, which is faster than the page faults of a mapping, scatters into thousands
of tiny tensors in one call, and fails where a file is cut. A trainer writes every version into the same few slabs:
memory that is read again is mapped, for as long as its owner keeps it (`MappingCache`): a read is then one copy at
memcpy's speed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.manifest import Manifest, TensorTable
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.loans import Borrowed, KeptFromChildren, Loan, bytes_over
from tensorhub_plugins.core.memory.pinning import Pinned, pin_lent
from tensorhub_plugins.core.transports.mapping_cache import Kept
from tensorhub_plugins.core.transports.read_plan import parts_in
from tensorhub_plugins.core.transports.stream.channel import IOV_MAX, remaining_buffers

PIECES_MAX = 16  # for a copy from a mapping, which takes one call a piece, where preadv takes one for all
MAPPINGS_MAX = 32  # slabs that a reader reads repeatedly: a few of each shard's trainer, and of peers

_Identity: TypeAlias = "tuple[int, int, int]"  # a file's device, inode, size


class MemoryFile:
    """A stream of bytes in an allocated block."""

    def __init__(self, manifest: Manifest, fd: int, mapped: memoryview | None = None) -> None:
        """Take `fd` over. mapped: all of the file. Raise ProtocolError when it does not match the manifest."""
        self._fd, self._mapped = fd, mapped
        self._spans = manifest.tensors.spans
        self._starts = [span.start for span in self._spans]
        size_bytes, extent = os.fstat(fd).st_size, manifest.tensors.block_size_bytes
        if size_bytes < extent:
            self.close()
            raise ProtocolError(f"the source's memory has {size_bytes} bytes, its manifest needs {extent}")

    def read(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        """Fill the views with the stream's bytes [start, stop). Raise ProtocolError where the file ends early."""
        pending = deque(views)
        for index, skip, size_bytes in parts_in(self._starts, start, stop):
            is_all = size_bytes == stop - start  # nearly always
            here = list(views) if is_all else _take(pending, size_bytes)
            self._read_span(self._spans[index].offset + skip, size_bytes, here)

    def _read_span(self, at: int, size_bytes: int, views: list[memoryview]) -> None:
        if self._mapped is not None and len(views) <= PIECES_MAX:
            copy_views([self._mapped[at : at + size_bytes]], views)
            return
        for first in range(0, len(views), IOV_MAX):
            batch = views[first : first + IOV_MAX]
            while batch:
                count = os.preadv(self._fd, batch, at)
                if not count:
                    raise ProtocolError("the source's memory ends before its manifest does")
                at += count
                batch = remaining_buffers(batch, count)

    def close(self) -> None:
        self._mapped = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _take(pending: deque[memoryview], size_bytes: int) -> list[memoryview]:
    """Remove the first `size_bytes` of the views, and return them."""
    taken = []
    while size_bytes:
        view = pending.popleft()
        if len(view) > size_bytes:
            pending.appendleft(view[size_bytes:])
            view = view[:size_bytes]
        taken.append(view)
        size_bytes -= len(view)
    return taken


class _Mapping:
    """A file of another process that was read, or is borrowed."""

    def __init__(self) -> None:
        self.access_count = 0
        self.memory: memoryview | None = None
        self.pinned: Pinned | None = None
        self.kept: KeptFromChildren | None = None

    def map(self, fd: int, size_bytes: int) -> memoryview | None:
        # OSError: out of address space, or of mappings; preadv needs none. ValueError: the file is empty.
        if self.memory is None:
            with contextlib.suppress(OSError, ValueError):
                mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
                self.memory, self.kept = memoryview(mapped), KeptFromChildren(mapped)
        return self.memory

    def pin(self, device: Device | None, borders: Sequence[int]) -> None:
        """Pin it for this device, in the background, unless that was done before. borders: see `TensorTable`."""
        if self.pinned is None and device is not None and self.memory is not None:
            self.pinned = pin_lent(bytes_over(self.memory), device, borders)

    def __del__(self) -> None:
        if self.pinned is not None:
            self.pinned.release()


class MappingCache:
    """The files of other processes that this one keeps mapped, each as long as its owner keeps it. Thread-safe."""

    def __init__(self, map_from: int = 2) -> None:
        """Make a cache. map_from: at which access memory is mapped."""
        self._map_from = map_from
        self._guard = threading.Lock()
        self.kept: Kept[_Identity, _Mapping] = Kept("tensorhub-shm-mappings", MAPPINGS_MAX)

    def __len__(self) -> int:
        """Return how many are mapped."""
        return sum(mapping.memory is not None for mapping in self.kept.values())

    def get_or_map(self, fd: int, owner_liveness_fd: int) -> memoryview | None:
        """Return all bytes of this file, if mapping it pays and is safe. Takes over `owner_liveness_fd`, not `fd`."""
        if not _is_sealed(fd):
            os.close(owner_liveness_fd)
            return None
        size_bytes = os.fstat(fd).st_size
        mapping = self.kept.get(_identity(fd), owner_liveness_fd, _Mapping)
        if mapping is None:
            return None
        with self._guard:
            mapping.access_count += 1
            return mapping.map(fd, size_bytes) if mapping.access_count >= self._map_from else mapping.memory

    def borrow(
        self, table: TensorTable, fd: int, owner_liveness_fd: int, loan: Loan, device: Device | None, *, is_shared: bool
    ) -> Borrowed | None:
        """Return all of this file's memory, to be used in place; None where it is not safe to map it.

        is_shared: it is not written to here: it is mapped once, kept like what is read, and pinned for the device. Else
        the mapping is private: a writer, some model's loader, gets its own copy of the pages that it changes."""
        if not _is_sealed(fd):
            return None
        memory, pinned = None, None
        if not is_shared:
            with contextlib.suppress(OSError, ValueError):
                mapped = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE)
                memory = bytes_over(memoryview(mapped), loan, KeptFromChildren(mapped))
        elif (mapping := self.kept.get(_identity(fd), os.dup(owner_liveness_fd), _Mapping)) is not None:
            with self._guard:
                shared = mapping.map(fd, os.fstat(fd).st_size)
                if shared is not None:
                    mapping.pin(device, table.block_borders)
                    # The pinned mapping stays until the last tensor over it is gone.
                    memory, pinned = bytes_over(shared, loan, mapping), mapping.pinned
        if memory is None:
            return None
        borrowed = Borrowed(memory, os.dup(fd), -1, loan, pinned)
        borrowed.owner_liveness_fd = os.dup(owner_liveness_fd)  # if that fails, `borrowed` closes the other one
        return borrowed

    def close(self) -> None:
        """Drop all mappings; those in use stay until they are released. Idempotent."""
        self.kept.close()


def _identity(fd: int) -> _Identity:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size


def _is_sealed(fd: int) -> bool:
    """Return whether the file can never become shorter: shrinking it would kill every process that has it mapped."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
