"""The limits of a hub that operators and tests may change. PURE."""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.protocol.messages import FROM_HUB_SIZE_BYTES_MAX, GRANTS_MAX, HOLDINGS_MAX

HEARTBEAT_S_MIN = 0.01  # more often, and the hub does nothing else
DAY_S = 86_400.0
READERS_MAX = 65_536  # as many as a version has shards

# What one session may add to the hub's records, whatever it sends; what a Hello leaves out is removed. The records of a
# version are bounded by that, too: each (holding, lease, claim) belongs to a session and is removed with it.
SESSIONS_MAX = 65_536  # workers of one hub: more than that and its core is full of heartbeats (docs/sizing.md)
SESSIONS_OF_PUBLISHERS = 8_192  # of them, reserved for the run's secret: readers' keys take the others at most
PENDING_PER_SESSION_MAX = 256
PENDING_ITEMS_MAX = 4 * HOLDINGS_MAX  # shards and sessions named in them: four times what a worker can hold
LEASES_PER_SESSION_MAX = 1024
ANNOUNCED_SHARDS_MAX = 2 * GRANTS_MAX  # that a Hello reports as being read: one read of the most shards, and the next
CLAIMS_PER_SESSION_MAX = 8  # versions that one worker converts at a time: one, and those not abandoned yet
LAYOUTS_PER_READER_MAX = 16  # the checkpoint, its engine's own, and those of the versions before an upgrade
# Of all readers' keys together: 8,192 workers with two versions in 128 shards, 1 GB. Publishers go on beyond it.
RECORDS_OF_READERS_MAX = 2_000_000
DOUBTS_MAX = 16  # from readers, passed on to one source in DOUBT_AGAIN_S: for each it digests the doubted segments
DOUBT_AGAIN_S = 60.0
# Versions and status are truncated at half of what a client takes, and say how much was left out.
ANSWER_SIZE_BYTES_MAX = FROM_HUB_SIZE_BYTES_MAX // 2

# For each limit: least, most, and the help text, which the flags of `tensorhub server` show.
LIMITS: dict[str, tuple[float, float, str]] = {
    "session_timeout_s": (HEARTBEAT_S_MIN, DAY_S, "seconds of silence that end a worker; 3 of its heartbeats at least"),
    "heartbeat_s": (HEARTBEAT_S_MIN, DAY_S, "seconds between two heartbeats of a worker"),
    "heartbeats_per_s_max": (
        1,
        10**9,
        "heartbeats a second of all workers; with more workers each sends fewer, but one in session_timeout_s",
    ),
    "grace_s": (0.0, DAY_S, "seconds after its start in which the hub decides nothing that depends on all workers"),
    "claim_s": (
        0.0,
        DAY_S,
        "seconds, and one more for each half GB, to convert what was promised; then another one does",
    ),
    "converter_first_s": (0.0, DAY_S, "seconds in which the engine of a host that converted last is waited for"),
    "readers_per_source_max": (1, READERS_MAX, "leases on one source; more readers wait, or read from another one"),
    "uplink_readers_max": (1, READERS_MAX, "leases that cross into one data centre, shared between models"),
    "lease_s": (1.0, DAY_S, "seconds after which a reader that is not done has to ask for sources again"),
    "lease_idle_s": (1.0, DAY_S, "seconds without a read segment after which a reader loses its lease"),
    "published_bytes_max": (0, 1 << 60, "bytes that one model's trainers hold published before it is said; 0: any"),
    "messages_per_s_max": (
        1,
        10**9,
        "messages (of a KiB) a second of one session, 16 s of them at once; more are lost",
    ),
}


class HubLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a hub, described in `LIMITS`. Raise UsageError for a value that is out of bounds, and name it."""

    # A worker whose interpreter is held by one long kernel launch or compile must not expire.
    session_timeout_s: float = 15.0
    heartbeat_s: float = 1.0
    # An eighth of one core, with ZeroMQ: by that, 65,536 workers that sent one a second would need two for it.
    heartbeats_per_s_max: int = 4096
    # Three heartbeats: every live worker has sent its Hello again by then.
    grace_s: float = 3.0
    # And a second more for each half GB that was published; a dead converter is noticed much sooner.
    claim_s: float = 120.0
    # It has the memory for it; a second one on its host would need as much again. All learn of it at once.
    converter_first_s: float = 0.5
    # Beyond that one source's link is shared so thinly that waiting for a peer is faster.
    readers_per_source_max: int = 16
    # As many as a large model has shards.
    uplink_readers_max: int = 32
    # A terabyte at 300 MB/s; a longer read loses what is in flight, once an hour.
    lease_s: float = 3600.0
    # A reader drops a source that is silent for 5 s (`TransferLimits.stall_s`), and may take a minute to get memory for
    # the largest shards; a reader that was only slow loses a source, and asks for the next.
    lease_idle_s: float = 60.0
    # Only the operator knows how much memory the hosts have; a client's own budget is half of its memory.
    published_bytes_max: int = 0
    # A worker sends a few a second; no worker needs a thousand in each of its sessions.
    messages_per_s_max: int = 1000

    def __post_init__(self) -> None:
        for name, (least, most, _) in LIMITS.items():
            given, whole = getattr(self, name), name.endswith("_max")
            kinds = (int,) if whole else (int, float)
            if isinstance(given, bool) or not isinstance(given, kinds) or not least <= given <= most:
                kind = "a whole number" if whole else "a number of seconds"
                raise UsageError(f"{name}={given!r}: must be {kind} from {least:g} to {most:g}")
        self._check_heartbeat()

    def heartbeat_s_of(self, workers: int) -> float:
        """Return the seconds between two heartbeats of one of so many workers."""
        return max(self.heartbeat_s, min(workers / self.heartbeats_per_s_max, self.heartbeat_s_max))

    @property
    def heartbeat_s_max(self) -> float:
        """Return the same for the most workers."""
        return max(self.heartbeat_s, self.session_timeout_s)

    def _check_heartbeat(self) -> None:
        if self.session_timeout_s <= self.heartbeat_s:
            raise UsageError(
                f"session_timeout_s={self.session_timeout_s!r}: must be more than heartbeat_s={self.heartbeat_s!r}, "
                "or every worker is evicted between two heartbeats"
            )
