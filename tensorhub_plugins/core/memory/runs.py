"""Where the bytes of a stream lie in this process's memory.

Neighbours in the stream that are neighbours in memory form one *run*; a range of the stream is found by bisection. A
model whose tensor sizes are multiples of 64 bytes is a single run in a block, 5,000 tiny adopted tensors are 5,000.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Extents: TypeAlias = "npt.NDArray[np.uint64]"  # [n, 2]: where pieces of a stream lie, address and size in bytes of each


class Run(NamedTuple):
    """Stream bytes that are contiguous in memory: [start, start + size_bytes)."""

    start: int
    size_bytes: int
    address: int
    view: memoryview | None  # host memory, which others keep alive; None on a device


class Runs:
    """All runs of one slab, in the stream's order. It keeps no memory. Slabs of the same tensors, which lie where they
    lay, have the same one: it stands for that memory wherever something is to be known of it once."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.all = runs
        self.starts = [run.start for run in runs]
        self.views = [run.view for run in runs if run.view is not None]  # none for a device
        self.size_bytes = sum(run.size_bytes for run in runs)

    @cached_property
    def extents(self) -> Extents:
        """Of all of them. It takes milliseconds for thousands, and once."""
        extents = np.array([(run.address, run.size_bytes) for run in self.all], np.uint64).reshape(-1, 2)
        extents.flags.writeable = False
        return extents

    def cut(self, start: int, stop: int) -> tuple[int, int, int, int]:
        """The runs that hold a range that is not empty, as indices [first, last), where in the first one it begins, and
        where in the last one it ends, in bytes."""
        first = bisect_right(self.starts, start) - 1
        last = bisect_left(self.starts, stop)
        return first, last, start - self.starts[first], stop - self.starts[last - 1]

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """The host memory of a range of the stream, in order."""
        if start == stop:
            return []
        first, last, skip, take = self.cut(start, stop)
        views = self.views[first:last]  # whole runs: thousands of tiny tensors cost one slice
        views[-1] = views[-1][:take]
        views[0] = views[0][skip:]
        return views

    def addresses(self, start: int, stop: int) -> Extents:
        """Where a range of the stream lies, in order."""
        if stop - start == self.size_bytes:
            return self.extents
        if start == stop:
            return self.extents[:0]
        return cut_extents(self.extents, *self.cut(start, stop))


def cut_extents(extents: Extents, first: int, last: int, skip: int, take: int) -> Extents:
    """A copy of those in [first, last), without the first `skip` bytes, and with `take` bytes of the last one as it was
    before that."""
    part: Extents = extents[first:last].copy()
    part[-1, 1] = take
    part[0, 0] += np.uint64(skip)
    part[0, 1] -= np.uint64(skip)
    return part


def memory_of(flat: torch.Tensor) -> memoryview:
    """The memory of a uint8 host tensor, which the view keeps alive."""
    array: Any = flat.numpy()
    return memoryview(array)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Host memory that others keep alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
