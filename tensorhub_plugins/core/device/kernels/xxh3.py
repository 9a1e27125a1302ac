"""XXH3-128 of the segments of a device's memory, in place: bit for bit what xxhash computes from the same bytes.

XXH3 of more than 240 bytes keeps eight sums of 64 bits, its lanes. A stripe of 64 bytes gives each lane one word; after
sixteen stripes, a block, the lanes are mixed. Only that mixing depends on what came before: within a block each lane is
a plain sum, and segments are independent of each other. So a program of the kernel takes some segments and goes from
block to block (`lanes_of`); torch sums up all blocks, and mixes one after the other. What follows the last whole block
of a segment, at most 1,024 bytes, and the merging of the lanes into 128 bits are done on the host, for all at once
(`finish`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tensorhub_plugins.core.device.kernels.launch import Upload, addresses_of, done_by_triton

BLOCK_SIZE_BYTES = 1024  # 16 stripes, one for each 8 bytes of the secret's 192 before its last 64
STRIPE_SIZE_BYTES = 64
STRIPES = 16  # of a block
LONG_FROM_BYTES = 241  # shorter ones have formulas of their own
WORD_SIZE_BYTES = 8  # where a segment begins is a multiple of it
LANES_SIZE_BYTES = 64  # of one segment

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
SECRET_OF_MIXING = 128
SECRET_OF_LAST_STRIPE = len(SECRET) - STRIPE_SIZE_BYTES - 7
SECRET_OF_LOW, SECRET_OF_HIGH = 11, len(SECRET) - STRIPE_SIZE_BYTES - 11

LOW_HALF, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = npt.NDArray[np.uint64]


def lanes_of(segments: Sequence[torch.Tensor], lanes: Sequence[torch.Tensor], upload: Upload) -> None:
    """Compute the lanes of segments of equal size after the last whole block, LANES_SIZE_BYTES each. A Computation."""
    out, count, (blocks, _) = lanes[0].view(torch.int64), len(segments), tail_start(segments[0].numel())
    table = upload(constants())
    addresses = addresses_of(segments)
    if not done_by_triton(out, lambda kernels: kernels.lanes(upload(addresses), table, out, count, blocks)):
        out.view(count, len(LANES)).copy_(_by_torch(segments, table, blocks))


def constants() -> npt.NDArray[np.int64]:
    """Return the constants of the kernels: the initial lanes, the secret's words for mixing, and for each stripe."""
    joined = np.concatenate([np.array(LANES, np.uint64), secret_words(SECRET_OF_MIXING, len(LANES)), *_KEYS])
    table: npt.NDArray[np.int64] = joined.view(np.int64)
    return table


def tail_start(size_bytes: int) -> tuple[int, int]:
    """Return the number of whole blocks that `lanes_of` takes of a segment of this size, and the offset of the tail
    that `finish` needs: the last block's end, or the last stripe's start, whichever comes first."""
    blocks = (size_bytes - 1) // BLOCK_SIZE_BYTES
    return blocks, min(blocks * BLOCK_SIZE_BYTES, size_bytes - STRIPE_SIZE_BYTES)


def finish(lanes: Words, tails: npt.NDArray[np.uint8], size_bytes: int) -> bytes:
    """Return the digests of segments of this size, joined. lanes: uint64[segments, 8] after the last whole block.
    tails: uint8[segments, n], their last bytes, from `tail_start` on."""
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
    """Return uint64[count] of the secret, from this byte on."""
    return np.frombuffer(SECRET, "<u8", count, start).astype(np.uint64)


_KEYS = [secret_words(WORD_SIZE_BYTES * stripe, len(LANES)) for stripe in range(STRIPES)]


def _by_torch(segments: Sequence[torch.Tensor], table: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the lanes, int64[segments, 8]. It takes a sixteenth of the segments' size for the sums."""
    sums = torch.empty(len(segments), blocks, len(LANES), dtype=torch.int64, device=table.device)
    for segment, of_blocks in zip(segments, sums, strict=True):
        block_sums_by_torch(segment[: blocks * BLOCK_SIZE_BYTES].view(torch.int64), table, of_blocks)
    return mixed_by_torch(sums, table)


def block_sums_by_torch(words: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Compute what whole blocks add to the lanes. out: int64, 8 a block. table: `constants`."""
    keys = table[2 * len(LANES) :].view(STRIPES, len(LANES))
    words = words.view(-1, STRIPES, len(LANES))
    beside = words.view(-1, STRIPES, len(LANES) // 2, 2).flip(-1).view(words.shape)
    keyed = words ^ keys
    torch.sum(beside + (keyed & 0xFFFFFFFF) * (keyed >> 32 & 0xFFFFFFFF), 1, out=out.view(-1, len(LANES)))


def mixed_by_torch(sums: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return int64[segments, 8]: the lanes after all blocks. sums: int64[segments, blocks, 8]. table: `constants`."""
    start, mixing, _ = torch.split(table, [len(LANES), len(LANES), STRIPES * len(LANES)])
    lanes: torch.Tensor = start.repeat(len(sums), 1)
    for block in range(sums.shape[1]):
        lanes += sums[:, block]
        lanes = (lanes ^ (lanes >> 47 & 0x1FFFF) ^ mixing) * PRIME32_1
    return lanes


def _accumulated(lanes: Words, stripes: npt.NDArray[np.uint8], secret: int) -> Words:
    words: Words = np.ascontiguousarray(stripes).view("<u8").astype(np.uint64)
    keyed = words ^ secret_words(secret, len(LANES))
    added: Words = lanes + words[:, list(BESIDE)] + (keyed & LOW_HALF) * (keyed >> HALF)
    return added


def _merged(lanes: Words, secret: int, start: int) -> Words:
    """Merge all lanes into 64 bits."""
    keyed = lanes ^ secret_words(secret, len(LANES))
    found = np.full(len(lanes), start % 2**64, np.uint64)
    for lane in range(0, len(LANES), 2):
        found += _folded_product(keyed[:, lane], keyed[:, lane + 1])
    found ^= found >> np.uint64(37)
    found *= np.uint64(AVALANCHE)
    found ^= found >> HALF
    return found


def _folded_product(one: Words, other: Words) -> Words:
    """Return both halves of the product of 128 bits, XORed."""
    a, b, c, d = one & LOW_HALF, one >> HALF, other & LOW_HALF, other >> HALF
    middle = b * c + (a * c >> HALF)
    low_middle = a * d + (middle & LOW_HALF)
    folded: Words = one * other ^ (b * d + (middle >> HALF) + (low_middle >> HALF))
    return folded
