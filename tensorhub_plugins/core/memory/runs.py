"""The location of a stream's bytes in this process's memory.

Neighbours in the stream that are neighbours in memory form one *run*; a range of the stream is found by bisection. A
model whose tensor sizes are multiples of 64 bytes is a single run in a block, 5,000 tiny adopted tensors are 5,000.
Columns of a matrix are a run that is *scattered*: one piece for each row, copied together and never handed out singly.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

NOTHING = memoryview(b"")
MADV_POPULATE_READ = 22  # since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
Extents: TypeAlias = "npt.NDArray[np.uint64]"  # [n, 2]: where pieces of a stream lie, address and size in bytes of each


class Run(NamedTuple):
    """Stream bytes that are contiguous in memory: [start, start + size_bytes)."""

    start: int
    size_bytes: int
    address: int
    view: memoryview | None  # host memory, which others keep alive; None on a device, and where it is scattered
    rows: torch.Tensor | None = None  # uint8[rows, bytes of a row]: set if it is scattered; begins at the address


class Runs:
    """All runs of one slab, in the stream's order. This keeps no memory alive. Slabs of the same tensors at the same
    addresses share one object, which serves as the key for whatever is known of that memory."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.all = runs
        self.starts = [run.start for run in runs]
        # None for a device.
        self.views = [run.view or NOTHING for run in runs if run.view is not None or run.rows is not None]
        self.size_bytes = sum(run.size_bytes for run in runs)
        self.may_be_written = False  # known, see `Slab.check_writable`
        self.scattered = [index for index, run in enumerate(runs) if run.rows is not None]

    def is_scattered(self, start: int, stop: int) -> bool:
        """Return whether some of this range of the stream is scattered."""
        if not self.scattered or start == stop:
            return False
        first, last, _, _ = self.cut(start, stop)
        return bisect_left(self.scattered, first) < bisect_left(self.scattered, last)

    @cached_property
    def extents(self) -> Extents:
        """Return the extents of all runs. It takes milliseconds for thousands, once."""
        extents = np.array([(run.address, run.size_bytes) for run in self.all], np.uint64).reshape(-1, 2)
        extents.flags.writeable = False
        return extents

    @cached_property
    def is_of_files(self) -> bool:
        """Return whether some of this host memory is of a mapped file, which may be cut off."""
        files = np.array(mapped(lambda access, inode: inode != b"0") or [(0, 0)], np.uint64)
        before = np.searchsorted(files[:, 0], self.extents.sum(axis=1, dtype=np.uint64))  # that begin before each end
        return bool(((before > 0) & (files[before - 1, 1] > self.extents[:, 0])).any())

    def cut(self, start: int, stop: int) -> tuple[int, int, int, int]:
        """Return the runs that hold a range that is not empty, as indices [first, last), the offset in bytes at which
        it begins in the first one, and the offset at which it ends in the last one."""
        first = bisect_right(self.starts, start) - 1
        last = bisect_left(self.starts, stop)
        return first, last, start - self.starts[first], stop - self.starts[last - 1]

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return the host memory of a range of the stream, in order; a copy where it is scattered."""
        if start == stop:
            return []
        if self.is_scattered(start, stop):
            return [self._gathered(start, stop)]
        first, last, skip, take = self.cut(start, stop)
        views = self.views[first:last]  # whole runs: thousands of tiny tensors cost one slice
        views[-1] = views[-1][:take]
        views[0] = views[0][skip:]
        return views

    @contextmanager
    def receiving(self, ranges: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
        """Provide host memory to receive these ranges into, in order; a scattered range gets a buffer, which is copied
        to its place when the block ends without an exception."""
        views: list[memoryview] = []
        copies: list[tuple[torch.Tensor, int, int]] = []
        for start, stop in ranges:
            if self.is_scattered(start, stop):
                copies.append((torch.empty(stop - start, dtype=torch.uint8), start, stop))
                views.append(memory_of(copies[-1][0]))
            else:
                views += self.pieces(start, stop)
        yield views
        for host, start, stop in copies:
            for copy, here in self._flats(host, start, stop):
                here.copy_(copy)

    def _gathered(self, start: int, stop: int) -> memoryview:
        host = torch.empty(stop - start, dtype=torch.uint8)
        for copy, here in self._flats(host, start, stop):
            copy.copy_(here)
        return memory_of(host)

    def _flats(self, host: torch.Tensor, start: int, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs (piece of `host`, piece of the range in its place) of equal shape, with one or two dimensions."""
        first, last, _, _ = self.cut(start, stop)
        at = 0
        for run in self.all[first:last]:
            low, high = max(start - run.start, 0), min(stop - run.start, run.size_bytes)
            if run.rows is not None:
                flats = cut_rows(run.rows, low, high)
            else:
                assert run.view is not None
                flats = [torch.frombuffer(run.view[low:high], dtype=torch.uint8)]
            for flat in flats:
                yield host[at : at + flat.numel()].view(flat.shape), flat
                at += flat.numel()

    def addresses(self, start: int, stop: int) -> Extents:
        """Return the extents of a range of the stream, in order."""
        if stop - start == self.size_bytes:
            return self.extents
        if start == stop:
            return self.extents[:0]
        return cut_extents(self.extents, *self.cut(start, stop))


def cut_rows(rows: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Return bytes [start, stop), counted row by row, of uint8[rows, bytes of a row]: the end of a row, whole rows, and
    the beginning of one, as far as they exist."""
    length = rows.shape[1]
    first, last = -(-start // length), stop // length  # whole rows
    if first > last:
        return [rows[last, start - last * length : stop - last * length]]
    head, tail = first * length - start, stop - last * length
    found = [rows[first - 1, length - head :]] if head else []
    found += [rows[first:last]] if first < last else []
    return [*found, rows[last, :tail]] if tail else found


def cut_extents(extents: Extents, first: int, last: int, skip: int, take: int) -> Extents:
    """Return a copy of the extents [first, last), where the last one is cut to its first `take` bytes and the first one
    loses its first `skip` bytes."""
    part: Extents = extents[first:last].copy()
    part[-1, 1] = take
    part[0, 0] += np.uint64(skip)
    part[0, 1] -= np.uint64(skip)
    return part


def mapped(wanted: Callable[[bytes, bytes], bool]) -> list[tuple[int, int]]:
    """Return the addresses [first, end) of this process's mappings, in order, for which wanted(access, inode) is true;
    none where the system does not say."""
    with suppress(OSError):
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_bytes().splitlines()]
        ranges = [where.partition(b"-") for where, access, _, _, inode, *_ in maps if wanted(access, inode)]
        return [(int(first, 16), int(end, 16)) for first, _, end in ranges]
    return []


def can_be_read(extents: Extents | None) -> bool:
    """Return whether host memory of this process can be read. The rest of a mapped file that was cut off cannot: to
    touch it ends the process (SIGBUS). True where the system does not say, and for other memory (None)."""
    for first, end in () if extents is None else _pages(extents).tolist():
        failed = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_POPULATE_READ)
        if failed and ctypes.get_errno() == errno.EFAULT:
            return False
    return True


def _pages(extents: Extents) -> Extents:
    """Return the pages of this memory, [first, end) in bytes, each once. Neighbours are one: a segment may have a
    hundred thousand tiny tensors, and in each call to the system this thread may lose the GIL for 5 ms."""
    page = np.uint64(mmap.PAGESIZE)
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    first, end = extents[:, 0] // page * page, -(-extents.sum(axis=1, dtype=np.uint64) // page) * page
    end = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.append(True, first[1:] > end[:-1])[: len(first)])
    return np.stack([first[begins], end[np.append(begins[1:] - 1, len(end) - 1)[: len(begins)]]], axis=1)


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a uint8 host tensor, which the view keeps alive."""
    array: Any = flat.numpy()
    return memoryview(array)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a view of host memory, which the view does not keep alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
