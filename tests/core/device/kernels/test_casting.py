"""A cast and its digest are what torch casts and xxhash says of it: by torch here, by Triton in its interpreter."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import xxhash
from interpreted import IS_INTERPRETED, run_by_triton, was_triton

from tensorhub_plugins.core.device.kernels import casting, xxh3

SEGMENT_SIZE_BYTES = 4096
ODD = [float("inf"), -float("inf"), -0.0, 1e-45, -1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 65_504.0]


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="this is it")
def test_triton_computes_the_same() -> None:
    run_by_triton(__file__)


def table():
    return torch.from_numpy(xxh3.constants()).view(torch.uint8)


def masters(count, seed):
    """fp32 of all sizes, halves that round both ways, and what is no ordinary number."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-130, 120, (count,), generator=generator)
    found.view(torch.int32)[::5] &= -(1 << 15)  # half way between two of bfloat16, or one of them
    for at, value in zip(range(3, count, 11), ODD * count, strict=False):
        found[at] = value
    return found


class Memory:
    """A stream that tensors are cast into, and the sums of its blocks."""

    def __init__(self, size_bytes, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.bytes = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
        self.sums = torch.full((-(-size_bytes // xxh3.BLOCK_SIZE_BYTES) * xxh3.LANES_SIZE_BYTES,), 0x5A).byte()

    def sums_of(self, first, last):
        return self.sums[first * xxh3.LANES_SIZE_BYTES : last * xxh3.LANES_SIZE_BYTES]

    def cast(self, source, start):
        """The blocks, [first, last), that are summed up."""
        stop = start + 2 * len(source)
        first, last = -(-start // xxh3.BLOCK_SIZE_BYTES), stop // xxh3.BLOCK_SIZE_BYTES
        computation = casting.cast_at(start % xxh3.BLOCK_SIZE_BYTES)
        writes = [self.bytes[start:stop], self.sums_of(first, last)]
        computation([source.view(torch.uint8), table()], writes, torch.from_numpy)
        return first, last

    def sum_up(self, runs):
        size = xxh3.BLOCK_SIZE_BYTES
        reads = [self.bytes[first * size : last * size] for first, last in runs if first < last]
        writes = [self.sums_of(first, last) for first, last in runs if first < last]
        if reads:
            casting.sum_up([*reads, table()], writes, torch.from_numpy)

    def digests(self):
        """Of the whole segments."""
        count = len(self.bytes) // SEGMENT_SIZE_BYTES
        lanes = torch.empty(count * xxh3.LANES_SIZE_BYTES, dtype=torch.uint8)
        sums = self.sums_of(0, count * SEGMENT_SIZE_BYTES // xxh3.BLOCK_SIZE_BYTES)
        casting.mix([sums, table()], [lanes], torch.from_numpy)
        _, tail = xxh3.tail_start(SEGMENT_SIZE_BYTES)
        segments = self.bytes[: count * SEGMENT_SIZE_BYTES].view(count, -1).numpy()
        return xxh3.finish(lanes.numpy().view(np.uint64).reshape(count, -1), segments[:, tail:], SEGMENT_SIZE_BYTES)

    def expected_digests(self):
        whole = len(self.bytes) // SEGMENT_SIZE_BYTES * SEGMENT_SIZE_BYTES
        starts = range(0, whole, SEGMENT_SIZE_BYTES)
        content = self.bytes.numpy().tobytes()
        return b"".join(xxhash.xxh3_128_digest(content[at : at + SEGMENT_SIZE_BYTES]) for at in starts)


PLACES = [(0, 6144), (2, 5000), (1022, 7000), (1024, 4096), (3000, 9999), (5000, 9216), (700, 513)]


@pytest.mark.parametrize(("start", "count"), PLACES)
def test_it_is_torchs_cast_and_xxhashs_digest(start: int, count: int) -> None:
    """Wherever the tensor begins and ends in a block. Nothing beside it is written."""
    source, memory = masters(count, start), Memory(start + 2 * count + 100)
    before, stop = memory.bytes.clone(), start + 2 * count
    first, last = memory.cast(source, start)
    assert torch.equal(memory.bytes[start:stop].view(torch.bfloat16), source.bfloat16())
    assert torch.equal(memory.bytes[:start], before[:start]) and torch.equal(memory.bytes[stop:], before[stop:])
    memory.sum_up([(0, first), (last, len(memory.bytes) // xxh3.BLOCK_SIZE_BYTES)])
    if len(memory.bytes) >= SEGMENT_SIZE_BYTES:
        assert memory.digests() == memory.expected_digests()


def test_what_was_written_by_others_is_summed_up_later() -> None:
    """In runs of any length, longer than a program takes, too."""
    memory = Memory(70 * xxh3.BLOCK_SIZE_BYTES)
    chance = random.Random(1)
    cuts = sorted({0, 1, 66, 70, *chance.sample(range(70), k=1)})
    runs = list(zip(cuts, cuts[1:], strict=False))
    memory.sum_up(runs[1:])
    assert memory.digests() != memory.expected_digests()  # the control: one block is missing
    memory.sum_up(runs[:1])
    assert memory.digests() == memory.expected_digests()


def test_nan_stays_nan() -> None:
    """Also those whose bits are all in the half that is cut off, which a carry would make an infinity or a zero."""
    bits = [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF, 0x7FC00000, 0x7F80FFFF]
    source, memory = torch.tensor(bits * 100, dtype=torch.int32).view(torch.float32), Memory(1200)
    memory.cast(source, 0)
    assert memory.bytes.view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("what", ["bytes", "sums"])
def test_a_digest_that_is_wrong_is_found(what: str) -> None:
    """The control: one bit of what was written, or of what was summed up."""
    memory = Memory(8192)
    memory.cast(masters(4096, 1), 0)
    assert memory.digests() == memory.expected_digests()
    getattr(memory, what)[100] ^= 1
    assert memory.digests() != memory.expected_digests()


def test_it_was_triton() -> None:
    """The control of the interpreter's run."""
    assert was_triton() == IS_INTERPRETED
