"""How much one session may send: a token bucket. PURE.

A message costs one unit and one more for each KiB, before it is decoded; what is expensive to answer is charged
afterwards, and may leave a debt. A worker sends a few messages a second (thousands when it ends the leases of as many
shards), so only a flood empties the bucket. What is refused is lost, and our client repeats it with a heartbeat.
"""

from __future__ import annotations

from itertools import islice

BURST_S = 16  # so many seconds' units at once
UNIT_SIZE_BYTES = 1024
BUCKETS_KEPT_MAX = 65_536


class Rates:
    """Token buckets of all sessions. per_s: units a second, of each session."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._full = BURST_S * per_s
        self._buckets: dict[bytes, tuple[float, float]] = {}  # units left, and as of when
        self._notified_at: dict[bytes, float] = {}  # when a sender whose bucket is empty was notified last

    def __len__(self) -> int:
        return len(self._buckets)

    def admits(self, who: bytes, size_bytes: int, now: float) -> bool:
        """Return whether a message of this size is to be decoded."""
        left, then = self._buckets.get(who, (self._full, now))
        left = min(self._full, left + (now - then) * self._per_s)
        if left <= 0.0:
            self._buckets[who] = left, now
            return False
        self._buckets[who] = left - 1 - size_bytes / UNIT_SIZE_BYTES, now
        if len(self._buckets) > BUCKETS_KEPT_MAX:  # a new bucket is full: the oldest are likely to be full again
            for old in list(islice(self._buckets, BUCKETS_KEPT_MAX // 2)):
                del self._buckets[old]
                self._notified_at.pop(old, None)
        return True

    def charge(self, who: bytes, units: float) -> None:
        """Charge for a request that was expensive to answer."""
        left, then = self._buckets.get(who, (self._full, 0.0))
        self._buckets[who] = left - units, then

    def may_notify(self, who: bytes, now: float) -> bool:
        """Return whether a refused sender is to be notified: once a second."""
        if now - self._notified_at.get(who, -1.0) < 1.0:
            return False
        self._notified_at[who] = now
        return True
