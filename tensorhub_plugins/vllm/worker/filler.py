"""Memory for tensors that loaders want whole, and of which they take a small part: noise, and what lies around regions.

Made anew for each tensor this would be passes over the whole checkpoint in every worker, while the engine stands still.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import numpy
import torch

ZERO = 0x00  # in every byte: as unlike NONSENSE as possible
NONSENSE = 0x7F  # in every byte: 3e38 as a float of any kind

NOISE_LENGTH = 1_048_583  # elements; a prime, so that rows and blocks of a weight do not repeat with it
NOISE_STEP = 7_919  # offset between the noise of one tensor and of the next
BLOCK_SIZE_BYTES_MAX = 512 << 20  # for tensors of which only regions are needed


class Noise:
    """Blocks of noise, the same every time, of which tensors are views."""

    def __init__(self, lengths: Iterable[tuple[torch.dtype, int]]) -> None:
        """Make them long enough for tensors of these dtypes and lengths."""
        longest: dict[torch.dtype, int] = {}
        for dtype, length in lengths:
            longest[dtype] = max(longest.get(dtype, 0), length)
        values = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
        self._blocks = {dtype: _repeated(values.to(dtype), NOISE_LENGTH + n) for dtype, n in longest.items()}

    def of(self, number: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return a contiguous tensor, for each number another. Do not write into it: others are views of its memory."""
        first = number * NOISE_STEP % NOISE_LENGTH
        return self._blocks[dtype][first : first + shape.numel()].view(shape)


def _repeated(values: torch.Tensor, length: int) -> torch.Tensor:
    block = torch.empty(length, dtype=values.dtype)
    for part in torch.split(block, len(values)):
        part.copy_(values[: len(part)])
    return block


class Filler:
    """A maker of tensors of which their user writes only some regions. Released memory is reused for the same regions:
    what lies around them need not be filled for each layer, nor pages be taken."""

    def __init__(self, byte: int | None) -> None:
        """Keep no memory yet. byte: what every byte around the regions is; None: whatever the memory held."""
        self.byte = byte
        self._free: defaultdict[Hashable, list[numpy.ndarray[Any, Any]]] = defaultdict(list)

    def tensor(self, dtype: torch.dtype, shape: torch.Size, regions: Hashable) -> torch.Tensor:
        """Return a contiguous tensor of its own, whose user writes all of these regions and nothing else."""
        size_bytes = dtype.itemsize * shape.numel()
        if not size_bytes:
            return torch.empty(shape, dtype=dtype)
        free = self._free[dtype, shape, regions]
        memory = free.pop() if free else self._filled(size_bytes)
        lent = memory[:]  # the tensor and its views keep this object alive
        weakref.finalize(lent, free.append, memory)
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _filled(self, size_bytes: int) -> numpy.ndarray[Any, Any]:
        if self.byte is None:
            return numpy.empty(size_bytes, numpy.uint8)
        if self.byte == ZERO:
            return numpy.zeros(size_bytes, numpy.uint8)  # untouched pages are not written
        return numpy.full(size_bytes, self.byte, numpy.uint8)
