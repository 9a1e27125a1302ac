"""What an operator may tune of the transports, and where the defaults come from."""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.options import check_numbers


class TransportLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the transports, for `Client(transport_limits=...)`. `_s`: seconds; `_max`: a count of connections.
    UsageError names a value that cannot be.
    """

    # A reader.
    stall_s: float = 10.0  # a source that says nothing for so long, not even that it waits, is frozen or unreachable
    # A source.
    readers_max: int = 256  # each has a thread here; the hub spreads readers long before
    readers_per_peer_max: int = 128  # from one address: a host alone does not take all places
    hello_s: float = 10.0  # a peer introduces itself, asks for an offer, and says what it has begun to say, at once
    send_stall_s: float = 60.0  # a reader that takes nothing for so long has lost the connection, not only its turn
    alive_s: float = 0.25  # how often a waiting source says that it lives; below what a reader takes for slow
    vanished_s: float = 0.25  # how soon a waiting source notices that its reader has gone
    # shm: the shared copy of adopted memory.
    together_s: float = 1.0  # readers that come so soon after another want to read at the same time
    shared_copy_kept_s: float = 600.0  # for the next version; tensors that stay as they are get their memory back then
    # rdma.
    unreachable_s: float = 60.0  # how long a source that no rail reached is not tried again
    idle_at_reader_max: int = 8  # connections kept for the next version
    idle_at_source_max: int = 128  # half of what a source accepts
    dial_s: float = 10.0  # a reader that has opened makes its queue pairs at once

    def __post_init__(self) -> None:
        check_numbers(self, above_0=("stall_s", "readers_max", "readers_per_peer_max", "alive_s", "vanished_s"))


DEFAULT_LIMITS = TransportLimits()
