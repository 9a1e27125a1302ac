"""Digests of a device's memory, and those of what is cast: rows 13, 14 and 16 of the suite."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from tensorhub_plugins.core import Slab, contiguous_spec
from tensorhub_plugins.core.manifest import TensorTable
from tensorhub_plugins.core.memory.downloads import Downloads
from tensorhub_plugins.core.memory.stream_copy import StreamCopy


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
    place.judge(ratio >= 0.2, f"the digest reaches {ratio:.2f} of a device copy")


def publish_cast(place, masters):
    """What came to the host of fp32 masters, and the digests that were taken on the device."""
    specs = [contiguous_spec(name, torch.bfloat16, master.shape) for name, master in masters.items()]
    slab = Slab.allocate(specs, pin=False)
    with Downloads(None, digested=slab.specs) as downloads:
        for name, master in masters.items():
            slab.write_later(name, master, downloads)
    return slab, downloads.digests(slab.segment_size_bytes)


def masters_on(place, sizes):
    """fp32 of all sizes that are numbers, in the order in which they come."""
    generator = torch.Generator().manual_seed(7)
    return {
        f"w{number:03}": place.put(
            torch.randn(size, generator=generator) * 2.0 ** torch.randint(-60, 60, (size,), generator=generator)
        )
        for number, size in enumerate(sizes)
    }


def test_a_cast_and_its_digest_are_torchs_and_xxhashs(place):
    """Row 16. Tensors of any size, several of which share a segment, come in no order."""
    chance = random.Random(2)
    sizes = [place.size(64 << 20, 700_000), *(chance.randrange(1, 200_000) for _ in range(place.size(200, 5)))]
    masters = masters_on(place, sizes)
    names = chance.sample(sorted(masters), k=len(masters))
    slab, digests = publish_cast(place, {name: masters[name] for name in names})
    with slab:
        assert digests == slab.manifest().digests
        for name, arrived in slab.tensors().items():
            expected = torch.frombuffer(bytearray(place.content(masters[name])), dtype=torch.float32).bfloat16()
            assert torch.equal(arrived, expected), name
        slab.tensors()[names[0]].view(torch.int16)[0] ^= 1
        assert digests != slab.manifest().digests  # the control
    place.check()


def test_a_cast_with_a_digest_takes_one_pass(place, figure):
    """Beside torch's cast alone, which moves the same bytes but a sum for each block, a sixteenth of what it writes."""
    if not place.is_gpu:
        pytest.skip("speed is the GPU's")
    count = min(2 << 30, torch.cuda.mem_get_info()[0] // 16)
    source = torch.zeros(count, device=place.torch_device)
    target = torch.empty(count, dtype=torch.bfloat16, device=place.torch_device)
    bare = place.timed(lambda: target.copy_(source))
    spec = contiguous_spec("w", torch.bfloat16, [count])
    copy = StreamCopy(place.device, TensorTable.of([spec]))
    like = torch.empty(count, dtype=torch.bfloat16)
    taken = place.timed(lambda: copy.write("w", source, like))
    ratio = figure("cast with digest, GB/s", 6 * count / taken / 1e9, limit=6 * count / bare / 1e9)
    place.judge(ratio >= 0.5, f"a cast with a digest reaches {ratio:.2f} of a cast")
