"""Copies of many small runs of device memory into one, and of one into many.

A copy of a few bytes takes as long to launch as to copy 64 KiB. One kernel copies thousands of runs: each of its
programs copies a piece of one, whose two addresses and size it finds in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorhub_plugins.core.device.kernels.launch import Upload, addresses_of, done_by_triton

PIECE_SIZE_BYTES = 8 << 10  # of one program
WORD_SIZE_BYTES = 8


def move(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], upload: Upload) -> None:
    """Copy the bytes of all sources, in order, into all targets; one side is a single tensor. A Computation."""
    if done_by_triton(targets[0], lambda kernels: _launch(kernels, sources, targets, upload)):
        return
    if len(targets) == 1:
        torch.cat(list(sources), out=targets[0])
    else:
        torch._foreach_copy_(list(targets), torch.split(sources[0], [target.numel() for target in targets]))


def _launch(kernels: Any, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], upload: Upload) -> None:
    for rows, word_size_bytes in _tables(sources, targets):
        kernels.copy(upload(rows), len(rows), word_size_bytes, PIECE_SIZE_BYTES)


def _tables(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> list[tuple[npt.NDArray[np.int64], int]]:
    """Return int64[n, 3] of pieces (source address, target address, size in words) and the word's size: one table for
    those that words of 8 bytes can copy, one for those that need single bytes."""
    many = sources if len(targets) == 1 else targets
    size = np.fromiter((flat.numel() for flat in many), np.int64, len(many))
    starts = np.cumsum(size) - size
    ends = [addresses_of(side) + (starts if len(side) < len(many) else 0) for side in (sources, targets)]
    runs = np.stack([*ends, size], axis=1)
    is_in_words = ~np.any(runs % WORD_SIZE_BYTES, axis=1)
    tables = ((_cut(runs[is_in_words]), WORD_SIZE_BYTES), (_cut(runs[~is_in_words]), 1))
    return [
        (rows // np.array([1, 1, word_size_bytes]), word_size_bytes) for rows, word_size_bytes in tables if len(rows)
    ]


def _cut(runs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    counts = -(-runs[:, 2] // PIECE_SIZE_BYTES)
    pieces = np.repeat(runs, counts, axis=0)
    at = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE_SIZE_BYTES
    pieces[:, :2] += at[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - at, PIECE_SIZE_BYTES)
    return pieces
