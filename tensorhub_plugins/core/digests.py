"""PURE: digests, which distinguish the published bytes from others. A manifest names the algorithm of its digests.

xxh3_128   at the memory's speed. Detects every accident: a flipped bit, a torn write, two blocks that were swapped.
           An attacker can construct other bytes of the same digest.
blake3     cryptographic, and slower (recipes/bench/README.md). No attacker can: for versions that are passed on by
           hosts which the run does not trust. 128 bits of it suffice, as a forgery is a second preimage.
none       random bytes, which identify one publish and nothing else: nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import xxhash
from blake3 import blake3

from tensorhub_plugins.core.errors import UsageError

Algorithm = Literal["xxh3_128", "blake3"]

DIGEST_SIZE_BYTES = 16
XXH3: Algorithm = "xxh3_128"  # sees two swapped blocks, as an XOR or a sum does not, and releases the GIL
BLAKE3: Algorithm = "blake3"
NO_DIGESTS = "none"
KNOWN = (XXH3, BLAKE3, NO_DIGESTS)


def chosen(algorithm: str, *, verify: bool) -> str:
    """Return the algorithm to publish with. Raise UsageError for an unknown one. verify: False for no digests."""
    if algorithm not in get_args(Algorithm):
        raise UsageError(f"digest={algorithm!r}: choose one of {', '.join(get_args(Algorithm))}")
    if algorithm == BLAKE3 and not verify:
        raise UsageError('digest="blake3" compares every byte: leave verify=True')
    return algorithm if verify else NO_DIGESTS


def digest_of(views: Iterable[memoryview | bytes], algorithm: str = XXH3) -> bytes:
    """Return the digest of these bytes, concatenated: DIGEST_SIZE_BYTES that depend on every byte and its position."""
    if algorithm == BLAKE3:
        strong = blake3()
        for view in views:
            strong.update(view)
        return strong.digest(DIGEST_SIZE_BYTES)
    fast = xxhash.xxh3_128()
    for view in views:
        fast.update(view)
    return fast.digest()
