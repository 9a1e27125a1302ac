"""What an operator may tune of one replicate(), and where the defaults come from."""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.options import check_numbers


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a transfer, for `Client(limits=...)`. `_s`: seconds; `_segments`: a count of segments (4 MiB for large
    shards); rates and ratios have no unit. UsageError names a value that cannot be.
    """

    # When a source is dropped.
    stall_s: float = 5.0  # without one segment (4 MiB): below 1 MB/s a link is as good as dead; a loaded host naps less
    open_s: float = 10.0  # to connect and receive a manifest
    corrupt_segments_max: int = 3  # from one source; more is a broken source rather than a flipped bit on the way
    # Asking again after a loss.
    backoff_first_s: float = 0.1
    backoff_max_s: float = 2.0
    hub_answer_s: float = 0.45  # beyond the deadline: the hub's own answer that it has passed says more than we know
    # How much a source is asked for ahead.
    sources_max: int = 3  # of one shard at a time; more only take each other's bandwidth
    window_s: float = 0.5  # beyond any round trip, and little to do again when the source is lost
    window_min_segments: int = 4
    window_first_segments: int = 16  # before its rate is known
    window_here_segments: int = 128  # the same on this host: 16 small ones are copied before the next are asked for
    rate_s: float = 0.1  # rates are measured over at least so long
    # When a source counts as slow.
    slow_s: float = 0.5  # without a segment, or a sign that the source itself waits
    slow_far_s: float = 2.0  # across data centres: a lost packet or a full queue is no reason to begin again
    slow_segments: int = 8  # and not before so many could have come at the rate it had
    slow_rate: float = 0.25  # of the best rate it had
    # Additional sources, and taking over the rest of a slow one.
    additional_after_s: float = 1.0  # a transfer that lasts longer is worth a question, and again after twice that
    additional_min_segments: int = 16  # that are still missing then
    takeover_ratio: float = 2.0  # when the rest would take so much longer where it is, that connection is given up
    takeover_s: float = 0.2
    look_s: float = 0.25  # how often rates are looked at

    def __post_init__(self) -> None:
        # Or nothing would ever be read.
        windows = ("window_min_segments", "window_first_segments", "window_here_segments")
        check_numbers(self, above_0=("sources_max", *windows, "look_s"))
