"""Digests of a device's memory: rows 13 and 14 of the suite."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from tensorhub_plugins.core import Slab


def expected_of(content, segment_size_bytes):
    parts = (content[at : at + segment_size_bytes] for at in range(0, len(content), segment_size_bytes))
    return b"".join(map(xxhash.xxh3_128_digest, parts))


def digests_of(flat, segment_size_bytes):
    with Slab.adopt({"w": flat}) as slab:
        return slab.manifest(segment_size_bytes).digests


def test_the_digest_is_xxhashs(place):
    """Of every length of a last block and stripe, at every alignment, up to 1 GiB."""
    chance = random.Random(1)
    sizes = [241, 255, 256, 1023, 1024, 1025, 1088, 4 << 20, (4 << 20) + 12_345, place.size(1 << 30, 100_000)]
    sizes = [min(size, place.size(size, 100_000)) for size in sizes]
    sizes += [chance.randrange(241, 5000) for _ in range(place.size(10_000, 20))]
    whole = place.random(max(sizes) + 64, 1)
    content = place.content(whole)
    for size in sizes:
        shift, segment = chance.choice([0, 8, 16, 3]), chance.choice([248, 1024, 4096, 64 << 10, 4 << 20])
        if size / segment > 10_000:
            segment = 4 << 20
        found = digests_of(whole[shift : shift + size], segment)
        assert found == expected_of(content[shift : shift + size], segment), (size, shift, segment)
    place.check()


def test_a_wrong_bit_is_found(place):
    """The control."""
    flat = place.random(100_000, 1)
    content = bytearray(place.content(flat))
    content[77_777] ^= 4
    assert digests_of(flat, 4096) != expected_of(bytes(content), 4096)


def test_the_digest_is_as_fast_as_it_can_be(place, figure):
    if not place.is_gpu:
        pytest.skip("speed is the GPU's")
    size_bytes = min(16 << 30, torch.cuda.mem_get_info()[0] // 3 // (4 << 20) * (4 << 20))
    flat = torch.zeros(size_bytes, dtype=torch.uint8, device=place.torch_device)
    beside = torch.empty_like(flat)
    bare = place.timed(lambda: beside.copy_(flat))
    taken = place.timed(lambda: digests_of(flat, 4 << 20))
    ratio = figure("digest, GB/s", size_bytes / taken / 1e9, limit=size_bytes / bare / 1e9)
    place.judge(ratio >= 0.5, f"the digest reaches {ratio:.2f} of a device copy")
