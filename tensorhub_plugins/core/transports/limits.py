"""The limits of the transports that an operator may tune, and the reasons for the defaults. PURE."""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.options import check_numbers

SEND_STALL_S = 60.0  # a reader that receives nothing for so long has lost the connection
DIAL_S = 10.0  # a reader that has opened an offer over RDMA makes its queue pairs at once


class TransportLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the transports, for `Client(transport_limits=...)`. `_s`: seconds; `_max`: a count of connections.
    UsageError names an impossible value."""

    # A reader.
    stall_s: float = 10.0  # a source that sends nothing for so long, not even that it waits, is frozen or unreachable
    idle_at_reader_max: int = 8  # connections kept for the next version: tcp, tls, rdma
    # A source.
    readers_max: int = 256  # each has a thread here; the hub spreads readers long before
    readers_per_peer_max: int = 128  # from one address: no single host takes all slots
    hello_s: float = 10.0  # a peer introduces itself, asks for an offer, and completes a message, at once
    alive_s: float = 0.25  # how often a waiting source sends a sign of life; below what a reader takes for slow
    vanished_s: float = 0.25  # how soon a waiting source notices that its reader has gone
    # shm: the shared copy of adopted memory.
    together_s: float = 1.0  # readers that come so soon after one another count as simultaneous
    shared_copy_kept_s: float = 600.0  # for the next version; freed then if no version comes
    # rdma.
    unreachable_s: float = 60.0  # how long a source that no rail reached is not retried
    idle_at_source_max: int = 128  # half of what a source accepts

    def __post_init__(self) -> None:
        check_numbers(self, above_0=("stall_s", "readers_max", "readers_per_peer_max", "alive_s", "vanished_s"))


DEFAULT_LIMITS = TransportLimits()
