"""Which segments of a shard are read from which of its sources. PURE: a state and a time in, a list of actions out.

The missing segments of a shard are in one queue, in stream order. Every open source is assigned the next ones, a window
of about `window_s` at its measured rate, so that each takes the share it can deliver. When the queue is empty, an idle
source takes over from one that would take much longer: that source is left, which costs only its segments in flight.
Dead, frozen and slow sources are handled alike, and no segment is on its way twice.

An additional source is asked for when all working ones are slow ("slow"), and more and more rarely while a transfer
lasts ("idle"): then the hub only grants one that is near and idle. A source that waits for bytes itself is not slow;
its own source is, and it deals with that itself; but one that says so for `waits_s` is no better than a silent one. A
source in another data centre is allowed more time: the segments in flight have used a scarce link, and would have to
cross it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer.limits import (
    RATE_S,
    SLOW_RATE,
    SLOW_SEGMENTS,
    TAKEOVER_RATIO,
    TAKEOVER_S,
    TransferLimits,
)

PACE_SEGMENTS = 64  # a source of which so many have come within `waits_s` may wait before each of them


class Assign(NamedTuple):
    """Read these segments from this source, after those that it was assigned before."""

    session: bytes
    segments: tuple[int, ...]


class Leave(NamedTuple):
    """Close this source: another takes over the rest of its segments."""

    session: bytes


Action: TypeAlias = Assign | Leave


@dataclass
class Source:
    """One source of one shard. assigned: segments that were asked of it and have not arrived, in that order."""

    limits: TransferLimits
    grant: m.Grant
    request_id: int
    last_at: float  # when it last made progress, or was heard
    is_far: bool
    window_first: int
    is_elsewhere: bool = True  # not on this host
    expects_deltas: bool = False  # of most of the shard an earlier version is here, and it is elsewhere
    is_open: bool = False
    is_checked: bool = False
    assigned: dict[int, None] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)  # segments that came from it
    rate: float = 0.0  # segments a second
    best_rate: float = 0.0
    since: float = 0.0  # start of the current measurement of the rate
    count: int = 0
    is_slow: bool = False
    by_delta: bool = False  # what came last was what has changed in a segment
    asked_at: float = 0.0  # since when it has been asked for segments without a pause
    came_at: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_SEGMENTS))  # the last ones since then

    def begins(self, now: float) -> None:
        """Note that it is asked for bytes from now on."""
        self.heard(now)
        self.asked_at = now
        self.came_at.clear()

    def heard(self, now: float) -> None:
        """Note that it is alive; the time until now does not count for its rate."""
        self.last_at, self.since, self.count = now, now, 0

    def quiet_since(self, now: float) -> float:
        """Return when it was last heard; that it waits itself does not count for ever, it may say so without end."""
        came_at = self.came_at[-1] if self.came_at else self.asked_at
        return came_at if now - came_at > self.limits.waits_s else self.last_at

    def arrived(self, segment: int, now: float, *, waited: bool, by_delta: bool = False) -> None:
        """Count a segment from it. waited: it had to wait for the bytes itself, so that this is not its speed.
        by_delta: what has changed came, and a hundred of these take as long as a whole one: rates are not compared."""
        del self.assigned[segment]
        self.given.append(segment)
        self.last_at = now
        self.came_at.append(now)
        if by_delta != self.by_delta:
            self.by_delta, self.since, self.count = by_delta, now, 0
            self.rate, self.best_rate, self.is_slow = 0.0, 0.0, False
            return
        self.count += 1
        took = now - self.since
        if took >= RATE_S:
            rate = self.count / took
            self.rate = rate if not self.rate else (self.rate + rate) / 2
            self.best_rate = max(self.best_rate, self.rate)
            self.since, self.count = now, 0
            self.is_slow = not waited and not self.is_far and self.rate < SLOW_RATE * self.best_rate

    @property
    def window(self) -> int:
        """Return how many segments may be assigned to it at a time."""
        limits = self.limits
        if not self.rate:
            return self.window_first * (limits.window_delta_times if self.expects_deltas else 1)
        return max(limits.window_min_segments, int(self.rate * limits.window_s))

    def is_silent(self, now: float, last_at: float) -> bool:
        """Return whether it was silent for longer than a source that is not slow."""
        limits = self.limits
        due_s = SLOW_SEGMENTS / self.rate if self.rate else 0.0
        return now - last_at > max(limits.slow_far_s if self.is_far else limits.slow_s, due_s)

    def rest_s(self, count: int, now: float, last_at: float) -> float:
        """Return the estimated seconds until so many segments will have come."""
        rate = self.rate or self.window_first / max(self.limits.slow_s, 1e-9)
        silent_s = now - last_at
        if silent_s > 1.0 / rate:  # the next one is overdue: use the observed rate
            rate = 1.0 / silent_s
        return max(count / rate, self._waiting_s(count, now))

    def _waiting_s(self, count: int, now: float) -> float:
        """Return the same as of the last `waits_s`, with the time for which it waited itself; 0: it is no matter."""
        since = max(self.asked_at, now - self.limits.waits_s)
        came = sum(at >= since for at in self.came_at)
        if self.is_far or not 0 < came < PACE_SEGMENTS:
            return 0.0
        rest_s = count * (now - since) / came
        return rest_s if rest_s > self.limits.waits_s else 0.0


@dataclass
class Shard:
    """Progress on one shard. missing is None until there is memory for it; queue: the part assigned to no source.

    lender: the only source that can be read, because the shard is in its memory.

    verify: whether every segment is checked as it comes; else nothing counts before its source's epoch was confirmed.
    """

    root: bytes
    verify: bool
    sources: dict[bytes, Source] = field(default_factory=dict)
    missing: dict[int, None] | None = None
    queue: deque[int] = field(default_factory=deque)
    is_preparing: bool = False
    has_bases: bool = False  # an earlier version of most of it is here
    lender: bytes | None = None
    peer: str = ""  # the last source that was lost
    began: float = 0.0
    additional_at: float = 0.0  # when the next request for an idle source is due

    @property
    def is_done(self) -> bool:
        """Return whether all of it is here and no source is left: epochs are confirmed, leases ended."""
        return self.is_whole and not self.sources

    @property
    def is_whole(self) -> bool:
        """Return whether every segment that is needed is here."""
        return self.missing is not None and not self.missing

    def begin(self, needed: Iterable[int], now: float, limits: TransferLimits) -> None:
        """Begin to read these segments, for which there is memory now."""
        self.missing = dict.fromkeys(needed)
        self.queue = deque(self.missing)
        self.began, self.additional_at = now, now + limits.additional_after_s
        for source in self.sources.values():
            source.begins(now)
            source.expects_deltas = self.has_bases and source.is_elsewhere

    def assign(self, session: bytes, segments: tuple[int, ...], now: float) -> None:
        """Assign the first segments of the queue to this source."""
        source = self.sources[session]
        if not source.assigned:
            source.begins(now)
        for segment in segments:
            if self.queue.popleft() != segment:
                raise AssertionError(f"segment {segment} is not the first of the queue")
            source.assigned[segment] = None

    def remove(self, session: bytes, *, lost: bool) -> Source:
        """Remove a source; what has to be read again or from others goes back into the queue."""
        source = self.sources.pop(session)
        returned = self.returned(source, source.assigned, lost=lost)
        if self.missing is not None:
            self.missing.update(dict.fromkeys(returned))
        self.queue = deque(sorted({*self.queue, *returned}))
        return source

    def returned(self, source: Source, assigned: Iterable[int], *, lost: bool) -> list[int]:
        """Return the segments to read from others when this source is left. lost: it failed, so that what came from it
        and was not confirmed by a digest does not count."""
        unconfirmed = source.given if not self.verify and (lost or assigned) else []
        return [*assigned, *unconfirmed]


def plan(shard: Shard, now: float) -> list[Action]:
    """Return what is to be done now, in this order, without changing anything."""
    actions: list[Action] = []
    queue = deque(shard.queue)
    held = {session: dict(source.assigned) for session, source in shard.sources.items()}
    last_at = {session: source.quiet_since(now) for session, source in shard.sources.items()}
    while True:
        for session, assigned in held.items():
            source = shard.sources[session]
            if source.is_open and len(assigned) <= source.window // 2 and queue:
                batch = tuple(queue.popleft() for _ in range(min(len(queue), source.window - len(assigned))))
                if not assigned:
                    last_at[session] = now
                assigned.update(dict.fromkeys(batch))
                actions.append(Assign(session, batch))
        slowest = _too_slow(shard, held, now, last_at) if len(held) > 1 else None  # another one to do its rest
        if slowest is None:
            return actions
        returned = shard.returned(shard.sources[slowest], held.pop(slowest), lost=False)
        queue = deque(sorted({*queue, *returned}))
        actions.append(Leave(slowest))


def _too_slow(
    shard: Shard, held: Mapping[bytes, Mapping[int, None]], now: float, last_at: Mapping[bytes, float]
) -> bytes | None:
    """Return the source that would take longest, if an idle one would do its rest much sooner; None: there is none."""
    idle = [s for s in (shard.sources[session] for session, assigned in held.items() if not assigned) if s.is_open]
    if not idle:
        return None
    busy = [
        (shard.sources[session].rest_s(len(assigned), now, last_at[session]), session)
        for session, assigned in held.items()
        if assigned
    ]
    if not busy:
        return None
    rest_s, slowest = max(busy)
    victim = shard.sources[slowest]
    silent = victim.is_silent(now, last_at[slowest])
    if victim.is_far and not silent:
        return None
    for taker in idle:
        unproven_s = 0.0 if silent or rest_s > taker.limits.waits_s else rest_s
        mine_s = len(held[slowest]) / taker.rate if taker.rate else unproven_s
        if rest_s > TAKEOVER_RATIO * mine_s + TAKEOVER_S:
            return slowest
    return None


def reason_for_more(shard: Shard, now: float, limits: TransferLimits) -> Literal["slow", "idle", None]:
    """Return why to ask for an additional source: all working ones are slow, or it takes long; None: no reason."""
    working = [source for source in shard.sources.values() if source.assigned]
    if not working or not shard.missing or shard.lender is not None or len(shard.sources) >= limits.sources_max:
        return None
    if all(source.is_slow or source.is_silent(now, source.quiet_since(now)) for source in working):
        return "slow"
    if now < shard.additional_at:
        return None
    rest_s = max(source.rest_s(len(source.assigned), now, source.quiet_since(now)) for source in working)
    return "idle" if len(shard.missing) >= limits.additional_min_segments or rest_s > limits.waits_s else None
