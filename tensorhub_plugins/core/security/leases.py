"""Proof of a lease: the hub signs what it grants, and the source checks it without asking the hub. PURE.

The hub's Grant carries a Ticket: a Claim (which reader, until when) and a key made of the lease key, the claim, the
shard and the source's endpoints. The reader shows the claim and proves the key over the nonce of its connection
(`prove`). The source, which has the lease key, makes the same key (`Gate`). So what is overheard on a connection opens
no other one, and a claim is valid for one shard of one source.

A lease expires on the hub's clock, which the source knows from the hub's answers to its heartbeats: hosts need not have
the same time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from tensorhub_plugins.core.protocol.messages import SERVED_MAX, Claim, Ticket
from tensorhub_plugins.core.types import ShardKey

SERVED_KEPT_MAX = 2 * SERVED_MAX  # leases that a source has served and not reported yet
HUBS_KEPT_MAX = 1024  # hub incarnations whose clock a source remembers; beyond that it rejects unknown ones


def name_of(session: bytes, request_id: int) -> str:
    """Return the name of a lease: by its reader's session and the Acquire that it answers."""
    return f"{session.hex()}-{request_id}"


def issue(lease_key: bytes, endpoints: Mapping[str, str], shard: ShardKey, claim: Claim) -> Ticket:
    """Return the ticket of a reader of this shard at the source with these endpoints."""
    return Ticket(claim, _key(lease_key, _source(endpoints), shard, claim))


def prove(key: bytes, nonce: bytes) -> bytes:
    """Return a proof that the key is known, for the connection with this nonce."""
    return hmac.digest(key, b"reader" + nonce, hashlib.sha256)


class Gate:
    """A source's check of leases. Used by several threads: each call is one step."""

    def __init__(self, lease_key: bytes) -> None:
        self._lease_key = lease_key
        self._source = b""
        self._offsets: dict[bytes, float] = {}  # of the hubs' clocks from ours
        self._has_forgotten = False  # a hub's clock: a lease of an unknown hub may have expired long ago
        self._served: dict[str, None] = {}  # leases, since the last report

    def serves_at(self, endpoints: Mapping[str, str]) -> None:
        """Set where readers connect; before that no reader is admitted."""
        self._source = _source(endpoints)

    def hear(self, hub: bytes, clock: float, now: float) -> None:
        """Take the hub's clock, read at `now` or before. It has taken time to get here: the latest reading counts."""
        self._offsets[hub] = max(clock - now, self._offsets.get(hub, clock - now))
        while len(self._offsets) > HUBS_KEPT_MAX:
            del self._offsets[next(iter(self._offsets))]
            self._has_forgotten = True

    def refusal(self, shard: ShardKey, claim: Claim | None, proof: bytes, nonce: bytes, now: float) -> str | None:
        """Return why this reader does not get this shard; None: it does."""
        if claim is None or not self._source:
            return "it shows no lease of the hub"
        key = _key(self._lease_key, self._source, shard, claim)
        if not hmac.compare_digest(prove(key, nonce), proof):
            return f"its lease is not of this hub, source, connection and {shard}"
        offset = self._offsets.get(claim.hub)  # None: a hub that the reader knows of before we do
        if offset is None and self._has_forgotten:
            return "its lease is of a hub that this source has not heard, or long ago"
        late_s = 0.0 if offset is None else now + offset - claim.expires
        return f"its lease has expired {late_s:.1f} s ago" if late_s > 0 else None

    def serve(self, lease: str) -> None:
        """Note that a reader with this lease is sent something, or has asked for what has not arrived yet."""
        if len(self._served) < SERVED_KEPT_MAX:
            self._served[lease] = None

    def take_served(self) -> tuple[str, ...]:
        """Return the leases that were served since the last call."""
        return tuple(self._served.popitem()[0] for _ in range(min(len(self._served), SERVED_MAX)))


def _source(endpoints: Mapping[str, str]) -> bytes:
    return msgspec.msgpack.encode(sorted(endpoints.items()))


def _key(lease_key: bytes, source: bytes, shard: ShardKey, claim: Claim) -> bytes:
    return hmac.digest(lease_key, msgspec.msgpack.encode((source, shard, claim)), hashlib.sha256)
