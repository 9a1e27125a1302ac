"""Which source, in which order. PURE: candidates in, candidates out.

Near before far (same host, rack, data centre), because distance is what a job pays for (rule 7). At equal distance a
reader that became a source before the publisher, because the publisher has a training step to get on with and every
reader it serves costs it memory bandwidth. Then the least busy, then by a hash that spreads ties evenly over readers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from tensorhub_plugins.core.values import Location


class Candidate(msgspec.Struct, frozen=True):
    """A worker that could serve a shard. readers: leases it serves now. avoid: it failed this reader, or looks dead."""

    session: bytes
    location: Location
    readers: int
    is_publisher: bool
    avoid: bool


def distance(a: Location, b: Location) -> int:
    """0 same host, 1 same rack, 2 same data centre, 3 farther. Unknown data centres count as one."""
    if a.data_center != b.data_center:
        return 3
    if a.host and a.host == b.host:
        return 0
    if a.rack and a.rack == b.rack:
        return 1
    return 2


def order(candidates: Iterable[Candidate], reader: Location, reader_session: bytes) -> list[Candidate]:
    """Best first."""
    return sorted(
        candidates,
        key=lambda c: (
            c.avoid,
            distance(c.location, reader),
            c.is_publisher,
            c.readers,
            hashlib.blake2b(c.session + reader_session, digest_size=8).digest(),
        ),
    )
