"""XXH3-128 of the segments of a device's memory, where they lie: bit for bit what xxhash says of the same bytes.

XXH3 of more than 240 bytes keeps eight sums of 64 bits, its lanes. A stripe of 64 bytes gives each lane one word; after
sixteen stripes, a block, the lanes are mixed. Only that mixing depends on what was before: within a block each lane is
a plain sum, and segments do not know of each other. So a program of the kernel (xxh3_kernel.py) takes some segments
and goes from block to block. What follows their last whole block, at most 1,024 bytes, and the merging of the lanes
into 128 bits are done on the host, for all segments at once.

The kernel reads words: memory that does not begin at a multiple of 8 bytes, or is cut at none, is digested on the host,
and so is everything where there is no Triton. Neither changes a digest.

Slabs do not ask for it yet: in Triton's interpreter it agrees with xxhash, compiled it has not run on a GPU.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tensorhub_plugins.core.device import of, on_host
from tensorhub_plugins.core.memory.runs import memory_of

BLOCK_SIZE_BYTES = 1024  # 16 stripes: one for each 8 bytes of the secret's 192 before its last 64
STRIPE_SIZE_BYTES = 64
LONG_FROM_BYTES = 241  # shorter ones have formulas of their own
WORD_SIZE_BYTES = 8

# xxhash.h: XXH3_kSecret and the primes.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
LANES = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
BESIDE = (1, 0, 3, 2, 5, 4, 7, 6)  # each lane also adds the word of this one
AVALANCHE = 0x165667919E3779F9
SECRET_OF_LAST_STRIPE = len(SECRET) - STRIPE_SIZE_BYTES - 7
SECRET_OF_LOW, SECRET_OF_HIGH = 11, len(SECRET) - STRIPE_SIZE_BYTES - 11

LOW_HALF, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = npt.NDArray[np.uint64]


def digests_of_flat(flat: torch.Tensor, segment_size_bytes: int) -> bytes:
    """The digests of the segments of this memory (uint8, contiguous, any device), 16 bytes each, joined.

    The last segment may be shorter. What is queued on this thread's stream comes before."""
    if not can_run(flat, segment_size_bytes):
        return _on_host(flat, segment_size_bytes)
    count = flat.numel() // segment_size_bytes
    rest = flat[count * segment_size_bytes :]
    joined = _by_kernel(flat[: count * segment_size_bytes], count, segment_size_bytes) if count else b""
    if rest.numel() >= LONG_FROM_BYTES:
        return joined + _by_kernel(rest, 1, rest.numel())
    return joined + (_on_host(rest, segment_size_bytes) if rest.numel() else b"")


def can_run(flat: torch.Tensor, segment_size_bytes: int) -> bool:
    """Whether the kernel can read these segments. The host's memory it reads in Triton's interpreter only."""
    if find_spec("triton") is None or (of(flat) is None and os.environ.get("TRITON_INTERPRET") != "1"):
        return False
    is_aligned = not flat.data_ptr() % WORD_SIZE_BYTES and not segment_size_bytes % WORD_SIZE_BYTES
    return is_aligned and segment_size_bytes >= LONG_FROM_BYTES


def finish(lanes: Words, tails: npt.NDArray[np.uint8], size_bytes: int) -> bytes:
    """The digests of segments of this size, joined. lanes: uint64[segments, 8] after the last whole block. tails:
    uint8[segments, n], their last bytes, from that block's end or the last stripe's begin, whichever comes first."""
    done = (size_bytes - 1) // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES
    first = done - (size_bytes - tails.shape[1])
    for stripe in range((size_bytes - 1 - done) // STRIPE_SIZE_BYTES):
        start = first + stripe * STRIPE_SIZE_BYTES
        lanes = _accumulated(lanes, tails[:, start : start + STRIPE_SIZE_BYTES], stripe * WORD_SIZE_BYTES)
    lanes = _accumulated(lanes, tails[:, -STRIPE_SIZE_BYTES:], SECRET_OF_LAST_STRIPE)
    low = _merged(lanes, SECRET_OF_LOW, size_bytes * PRIME64_1)
    high = _merged(lanes, SECRET_OF_HIGH, ~(size_bytes * PRIME64_2))
    return np.stack([high, low], axis=1).astype(">u8").tobytes()


def secret_words(start: int, count: int) -> Words:
    """uint64[count] of the secret, from this byte on."""
    return np.frombuffer(SECRET, "<u8", count, start).astype(np.uint64)


def _on_host(flat: torch.Tensor, segment_size_bytes: int) -> bytes:
    host = memory_of(on_host(flat))
    cut = (host[start : start + segment_size_bytes] for start in range(0, len(host), segment_size_bytes))
    return b"".join(map(xxhash.xxh3_128_digest, cut))


def _by_kernel(flat: torch.Tensor, count: int, size_bytes: int) -> bytes:
    """Of so many segments, all of this size."""
    blocks = (size_bytes - 1) // BLOCK_SIZE_BYTES
    from tensorhub_plugins.core.memory import xxh3_kernel  # Triton is no requirement

    words = flat[: flat.numel() // WORD_SIZE_BYTES * WORD_SIZE_BYTES].view(torch.int64)
    lanes = xxh3_kernel.lanes_of_blocks(words, count, size_bytes // WORD_SIZE_BYTES, blocks)
    start = min(blocks * BLOCK_SIZE_BYTES, size_bytes - STRIPE_SIZE_BYTES)
    tails = on_host(flat.view(count, size_bytes)[:, start:].contiguous().view(-1)).numpy()
    found = on_host(lanes.view(-1).view(torch.uint8)).numpy().view(np.uint64)
    return finish(found.reshape(count, len(LANES)), tails.reshape(count, -1), size_bytes)


def _accumulated(lanes: Words, stripes: npt.NDArray[np.uint8], secret: int) -> Words:
    words: Words = np.ascontiguousarray(stripes).view("<u8").astype(np.uint64)
    keyed = words ^ secret_words(secret, len(LANES))
    added: Words = lanes + words[:, list(BESIDE)] + (keyed & LOW_HALF) * (keyed >> HALF)
    return added


def _merged(lanes: Words, secret: int, start: int) -> Words:
    """64 bits of all lanes."""
    keyed = lanes ^ secret_words(secret, len(LANES))
    found = np.full(len(lanes), start % 2**64, np.uint64)
    for lane in range(0, len(LANES), 2):
        found += _folded_product(keyed[:, lane], keyed[:, lane + 1])
    found ^= found >> np.uint64(37)
    found *= np.uint64(AVALANCHE)
    found ^= found >> HALF
    return found


def _folded_product(one: Words, other: Words) -> Words:
    """Both halves of the product of 128 bits, XORed."""
    a, b, c, d = one & LOW_HALF, one >> HALF, other & LOW_HALF, other >> HALF
    middle = b * c + (a * c >> HALF)
    low_middle = a * d + (middle & LOW_HALF)
    folded: Words = one * other ^ (b * d + (middle >> HALF) + (low_middle >> HALF))
    return folded
