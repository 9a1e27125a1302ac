"""The limits of one replicate() that an operator may tune, and the reasons for their defaults. PURE."""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.options import check_numbers

BACKOFF_FIRST_S = 0.1  # before it asks again after a loss; twice that after the next one
WINDOW_HERE_SEGMENTS = 128  # asked for ahead of a source on this host: 16 small ones are copied before the next come
RATE_S = 0.1  # the shortest time over which a rate is measured
RATES_CHECKED_S = 0.25  # how often
SLOW_SEGMENTS = 8  # a source is not slow before so many could have come at its measured rate
SLOW_RATE = 0.25  # it is slow below this fraction of its best rate
TAKEOVER_RATIO, TAKEOVER_S = 2.0, 0.2  # leave a source where the rest would take so many times, and seconds, longer


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a transfer, for `Client(limits=...)`. `_s`: seconds; `_segments`: a count of segments (4 MiB for large
    shards); rates and ratios have no unit. Raise UsageError that names a value out of bounds."""

    # When a source is dropped.
    stall_s: float = 5.0  # without one segment (4 MiB): below 1 MB/s a link is dead; a loaded host pauses for less
    open_s: float = 10.0  # to connect and receive a manifest
    # To open another endpoint of a source, to measure it, and for its first segment beyond what the first one took.
    measure_s: float = 0.4
    corrupt_segments_max: int = 3  # from one source; more is a broken source rather than a flipped bit on the way
    # Asking again after a loss.
    backoff_max_s: float = 2.0
    hub_answer_s: float = 0.45  # beyond the deadline: the hub's own refusal explains more than we know
    # How much a source is asked for ahead.
    sources_max: int = 3  # of one shard at a time; more only share the same bandwidth
    window_s: float = 0.5  # more than any round trip, and little to repeat when the source is lost
    window_min_segments: int = 4
    window_first_segments: int = 16  # before its rate is known
    window_delta_times: int = 16  # as many, where an earlier version is here: what has changed is small
    # When a source counts as slow.
    slow_s: float = 0.9  # without a segment, or a sign that it waits itself: with three missing, as one is late often
    slow_far_s: float = 2.0  # across data centres: a lost packet or a full queue is no reason to begin again
    waits_s: float = 10.0  # without a segment, whatever it says: twice what the source of a source has (stall_s)
    # Additional sources.
    additional_after_s: float = 1.0  # in a longer transfer ask for one, and again after twice that
    additional_min_segments: int = 16  # only if so many are still missing then

    def __post_init__(self) -> None:
        # With a zero here nothing would ever be read.
        windows = ("window_min_segments", "window_first_segments", "window_delta_times")
        check_numbers(self, above_0=("sources_max", *windows))
