"""Which segments of a shard are read from which of its sources. PURE: a state and a time in, a list of actions out.

The missing segments of a shard stand in one queue, in stream order. Every open source is assigned the next ones, a
window of about `window_s` of its measured rate ahead, so that each takes the share it can deliver. When the queue is
empty, an idle source takes over from one that would take much longer: that source is left, and with it only its
segments in flight. One way out of death, freezing and slowness, and nothing is on its way twice.

An additional source is asked for when all that work are slow ("slow"), and more and more rarely while a transfer lasts
("idle"): then the hub only grants one that is near and has nothing to do. A source that waits for bytes itself is not
slow; the one that it waits for is, and that is its reader's business. A source in another data centre is given more
time: what is in flight has used a scarce line, and would have to come over it once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer.limits import TransferLimits


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
    last_at: float  # progress, or a sign of life
    is_far: bool
    window_first: int
    is_open: bool = False
    is_checked: bool = False
    assigned: dict[int, None] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)  # what has come from it
    rate: float = 0.0  # segments a second
    best_rate: float = 0.0
    since: float = 0.0  # of the rate being measured
    count: int = 0
    is_slow: bool = False

    def heard(self, now: float) -> None:
        """It lives, and the time until now says nothing about its rate."""
        self.last_at, self.since, self.count = now, now, 0

    def arrived(self, segment: int, now: float, *, waited: bool) -> None:
        """It gave a segment. waited: it said that it waited for the bytes itself, so that this is not its speed."""
        del self.assigned[segment]
        self.given.append(segment)
        self.last_at = now
        self.count += 1
        took = now - self.since
        if took >= self.limits.rate_s:
            rate = self.count / took
            self.rate = rate if not self.rate else (self.rate + rate) / 2
            self.best_rate = max(self.best_rate, self.rate)
            self.since, self.count = now, 0
            self.is_slow = not waited and not self.is_far and self.rate < self.limits.slow_rate * self.best_rate

    @property
    def window(self) -> int:
        """How many segments it may have to deliver at a time."""
        limits = self.limits
        return max(limits.window_min_segments, int(self.rate * limits.window_s)) if self.rate else self.window_first

    def is_silent(self, now: float, last_at: float) -> bool:
        """Whether it has said nothing for longer than a source does that is not slow."""
        limits = self.limits
        due_s = limits.slow_segments / self.rate if self.rate else 0.0
        return now - last_at > max(limits.slow_far_s if self.is_far else limits.slow_s, due_s)

    def rest_s(self, count: int, now: float, last_at: float) -> float:
        """Seconds until so many segments will have come, as far as we can see."""
        rate = self.rate or self.window_first / max(self.limits.slow_s, 1e-9)
        silent_s = now - last_at
        if silent_s > 1.0 / rate:  # the next one is due: believe what is seen
            rate = 1.0 / silent_s
        return count / rate


@dataclass
class Shard:
    """Progress on one shard. missing is None until there is memory for it; queue: of it, what no source is assigned.

    lender: the only source that can be read, because its own memory is what the shard is in.

    verify: whether every segment is checked as it comes; else nothing counts before its source's epoch was confirmed.
    """

    root: bytes
    verify: bool
    sources: dict[bytes, Source] = field(default_factory=dict)
    missing: dict[int, None] | None = None
    queue: deque[int] = field(default_factory=deque)
    is_preparing: bool = False
    lender: bytes | None = None
    peer: str = ""  # the last source that was lost
    began: float = 0.0
    additional_at: float = 0.0  # when the next question for an idle source is due

    @property
    def is_done(self) -> bool:
        """All of it is here and its sources have been dealt with: their epochs confirmed, their leases ended."""
        return self.is_whole and not self.sources

    @property
    def is_whole(self) -> bool:
        """Whether every segment that is needed is here."""
        return self.missing is not None and not self.missing

    def begin(self, needed: Iterable[int], now: float, limits: TransferLimits) -> None:
        """There is memory for it; these segments are to be read."""
        self.missing = dict.fromkeys(needed)
        self.queue = deque(self.missing)
        self.began, self.additional_at = now, now + limits.additional_after_s
        for source in self.sources.values():
            source.heard(now)

    def assign(self, session: bytes, segments: tuple[int, ...], now: float) -> None:
        """The first segments of the queue are this source's now."""
        source = self.sources[session]
        if not source.assigned:
            source.heard(now)
        for segment in segments:
            if self.queue.popleft() != segment:
                raise AssertionError(f"segment {segment} is not the first of the queue")
            source.assigned[segment] = None

    def remove(self, session: bytes, *, lost: bool) -> Source:
        """The source is none any more; what has to be read again or from others goes back into the queue."""
        source = self.sources.pop(session)
        returned = self.returned(source, source.assigned, lost=lost)
        if self.missing is not None:
            self.missing.update(dict.fromkeys(returned))
        self.queue = deque(sorted({*self.queue, *returned}))
        return source

    def returned(self, source: Source, assigned: Iterable[int], *, lost: bool) -> list[int]:
        """The segments to read from others when this source is left. lost: it failed, so that what it gave and no
        digest has confirmed counts for nothing."""
        unconfirmed = source.given if not self.verify and (lost or assigned) else []
        return [*assigned, *unconfirmed]


def plan(shard: Shard, now: float) -> list[Action]:
    """What is to be done now, in this order. Changes nothing."""
    actions: list[Action] = []
    queue = deque(shard.queue)
    held = {session: dict(source.assigned) for session, source in shard.sources.items()}
    last_at = {session: source.last_at for session, source in shard.sources.items()}
    while True:
        for session, assigned in held.items():
            source = shard.sources[session]
            if source.is_open and len(assigned) <= source.window // 2 and queue:
                batch = tuple(queue.popleft() for _ in range(min(len(queue), source.window - len(assigned))))
                if not assigned:
                    last_at[session] = now
                assigned.update(dict.fromkeys(batch))
                actions.append(Assign(session, batch))
        slowest = _too_slow(shard, held, now, last_at)
        if slowest is None:
            return actions
        returned = shard.returned(shard.sources[slowest], held.pop(slowest), lost=False)
        queue = deque(sorted({*queue, *returned}))
        actions.append(Leave(slowest))


def _too_slow(
    shard: Shard, held: Mapping[bytes, Mapping[int, None]], now: float, last_at: Mapping[bytes, float]
) -> bytes | None:
    """The source that would take longest, if an idle one would do its rest much sooner."""
    idle = [shard.sources[session] for session, assigned in held.items() if not assigned]
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
        if taker.is_open:
            mine_s = len(held[slowest]) / taker.rate if taker.rate else (0.0 if silent else rest_s)
            if rest_s > taker.limits.takeover_ratio * mine_s + taker.limits.takeover_s:
                return slowest
    return None


def reason_for_more(shard: Shard, now: float, limits: TransferLimits) -> Literal["slow", "idle", None]:
    """Whether an additional source is worth a question: all that work are slow, or the transfer lasts."""
    working = [source for source in shard.sources.values() if source.assigned]
    if not working or not shard.missing or shard.lender is not None or len(shard.sources) >= limits.sources_max:
        return None
    if all(source.is_slow or source.is_silent(now, source.last_at) for source in working):
        return "slow"
    lasting = now >= shard.additional_at and len(shard.missing) >= limits.additional_min_segments
    return "idle" if lasting else None
