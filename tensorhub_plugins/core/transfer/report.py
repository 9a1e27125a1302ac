"""What one replicate() has read, from where, and how long it took. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReplicateReport:
    """The result of `replicate` or `fetch`.

    size_bytes: of all that is published. seconds by phase: "find" (until sources were granted), "read" (until all was
    verified). sources: "replica/shard" -> bytes that were read from it, fewer where not all was wanted. transports:
    name -> bytes; ways: "same_host shm" -> bytes. losses: the sources that failed on the way, and why. wire_size_bytes:
    what was sent for these bytes; delta_size_bytes: as many of them came as deltas. What was in place is in none of
    these. reads: source -> seconds until its last byte had come, and for how many of these it had not got it itself."""

    version: int
    layout: str
    size_bytes: int
    seconds: dict[str, float]
    sources: dict[str, int]
    transports: dict[str, int]
    losses: tuple[str, ...]
    roots: dict[int, str]  # source shard -> hex of its manifest's root
    algorithms: dict[int, str]  # source shard -> the algorithm of its digests and root
    wire_size_bytes: int = 0
    delta_size_bytes: int = 0
    reads: dict[str, tuple[float, float]] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
