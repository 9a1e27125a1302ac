"""A cast, and the sums for the digest of what it writes, in one pass: bfloat16 from fp32 masters, with XXH3-128.

Within a block of 1,024 bytes the lanes of XXH3 are plain sums (xxh3.py), which depend on nothing before it. So the pass
that writes a block sums it at once: tensor after tensor, in any order, all its blocks at a time (`cast_at`). Other
blocks are summed later (`sum_up`), one that two tensors share, for example. Only the mixing from block to block has an
order. It reads the sums alone, a sixteenth of the bytes (`mix`).

The rounding is to nearest, ties to even, as torch's. A NaN stays one; which of its bits are set depends on the
implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorhub_plugins.core.device.kernels.launch import Computation, Upload, addresses_of, done_by_triton
from tensorhub_plugins.core.device.kernels.xxh3 import (
    BLOCK_SIZE_BYTES,
    LANES_SIZE_BYTES,
    WORD_SIZE_BYTES,
    block_sums_by_torch,
    mixed_by_torch,
)

SOURCE, TARGET = torch.float32, torch.bfloat16
BLOCKS_AT_ONCE = 64  # of one program that sums
BLOCKS_BY_TORCH = 4096  # at once: intermediate results are several times as large


def cast_at(start: int) -> Computation:
    """Return the cast of a tensor that begins at this byte of a block.

    It reads the tensor's elements and `xxh3.constants()`; it writes the cast elements, and the sums of the blocks that
    lie wholly in it (at least one), LANES_SIZE_BYTES each, joined."""
    head = -start % BLOCK_SIZE_BYTES // TARGET.itemsize  # elements before the first whole block

    def cast(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], upload: Upload) -> None:
        source, table = reads[0].view(torch.int32), reads[1].view(torch.int64)
        target, sums = writes[0].view(torch.int16), writes[1].view(torch.int64)
        if not done_by_triton(writes[0], lambda kernels: kernels.cast(source, table, target, sums, head)):
            target.view(TARGET).copy_(source.view(SOURCE))
            whole = writes[0][head * TARGET.itemsize :][: len(writes[1]) // LANES_SIZE_BYTES * BLOCK_SIZE_BYTES]
            _sum_by_torch(whole, table, writes[1])

    return cast


def sum_up(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], upload: Upload) -> None:
    """Compute the sums of runs of whole blocks, those of each run into one of `writes`. A Computation. Reads the runs,
    followed by `xxh3.constants()`."""
    *runs, last = reads
    table = last.view(torch.int64)
    rows = _pieces(runs, writes)
    if not done_by_triton(writes[0], lambda kernels: kernels.sum_up(upload(rows), len(rows), table)):
        for run, sums in zip(runs, writes, strict=True):
            _sum_by_torch(run, table, sums)


def mix(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], upload: Upload) -> None:
    """Compute the lanes of segments of equal size, as `xxh3.lanes_of`, from the sums of all their blocks, except the
    last block of each. A Computation. Reads the sums and `xxh3.constants()`."""
    lanes, sums, table = writes[0].view(torch.int64), reads[0].view(torch.int64), reads[1].view(torch.int64)
    count = len(writes[0]) // LANES_SIZE_BYTES
    if not done_by_triton(lanes, lambda kernels: kernels.mix(sums, table, lanes, count)):
        shape = count, len(sums) // len(lanes), LANES_SIZE_BYTES // WORD_SIZE_BYTES
        lanes.view(count, -1).copy_(mixed_by_torch(sums.view(shape)[:, :-1], table))


def _pieces(runs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return int64[n, 3] of pieces of at most BLOCKS_AT_ONCE: source address, target address, number of blocks."""
    blocks = np.fromiter((len(run) // BLOCK_SIZE_BYTES for run in runs), np.int64, len(runs))
    counts = -(-blocks // BLOCKS_AT_ONCE)
    first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * BLOCKS_AT_ONCE
    return np.stack(
        [
            np.repeat(addresses_of(runs), counts) + first * BLOCK_SIZE_BYTES,
            np.repeat(addresses_of(sums), counts) + first * LANES_SIZE_BYTES,
            np.minimum(np.repeat(blocks, counts) - first, BLOCKS_AT_ONCE),
        ],
        axis=1,
    )


def _sum_by_torch(blocks: torch.Tensor, table: torch.Tensor, sums: torch.Tensor) -> None:
    pairs: Any = zip(
        torch.split(blocks, BLOCKS_BY_TORCH * BLOCK_SIZE_BYTES),
        torch.split(sums, BLOCKS_BY_TORCH * LANES_SIZE_BYTES),
        strict=True,
    )
    for some, of_some in pairs:
        block_sums_by_torch(some.view(torch.int64), table, of_some.view(torch.int64))
