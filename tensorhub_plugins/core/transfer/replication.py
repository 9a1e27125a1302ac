"""One replicate(). PURE: what has happened goes in, what to do next comes out; no thread, socket or tensor.

Its life: ask the hub for sources -> open each -> read the missing segments -> every segment verified -> complete.

Several sources for one shard
    The missing segments of a shard stand in one queue, in stream order. Every source that is open is given the next
    ones, a window of about `WINDOW_S` of its measured rate ahead, so that each takes the share it can deliver. When the
    queue is empty, whoever is done takes over from whoever would take much longer: that source is left, and with it
    only its segments in flight. One way out of death, freezing and slowness, and nothing is on its way twice.
    A further source is asked for when a source turns slow (`urgent`), and more and more rarely while a transfer lasts:
    then it is only granted by a hub that knows of one near by with nothing to do. A source that waits for bytes itself
    is not slow; the one that it waits for is, and that is its reader's business. A source in another data centre is
    given more time: what is in flight has used a scarce line, and would have to come over it once more.

What it holds on to
    Nothing that was verified is read again: a lost source costs the segments in flight, the rest comes from another.
    A source that failed is avoided while there is another, and excluded once it has sent corrupt bytes too often.
    The version, once resolved, stays. The layout may change while there are alternatives (the peers that had the
    runtime layout died, the trainer still has the checkpoint): then it starts again in that layout.
    Everything ends by the deadline, in Complete or GiveUp; and at once when an operator withdraws the version.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.messages import refusal
from tensorhub_plugins.core.types import (
    FAR,
    HOST,
    Location,
    ShardKey,
    distance,
)

CORRUPT_SEGMENTS_MAX = 3  # from one source; more is a broken source rather than a flipped bit on the way
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
LOSSES_SHOWN_MAX = 3  # the last ones, in an error's message
SOURCES_MAX = 3  # of one shard at a time; more only take each other's bandwidth
WINDOW_S = 0.5  # what a source is given ahead: beyond any round trip, and little to do again when it is lost
WINDOW_SEGMENTS_MIN = 4
WINDOW_FIRST_SEGMENTS = 16  # before its rate is known
WINDOW_HERE_SEGMENTS = 128  # the same of one on this host: 16 small ones are copied before the next are asked for
RATE_S = 0.1  # rates are measured over at least so long
SLOW_S = 0.5  # without a segment, or a sign that the source itself waits
SLOW_FAR_S = 2.0  # across data centres: a lost packet or a full queue on the way is no reason to begin again
SLOW_SEGMENTS = 8  # and not before so many could have come at the rate it had
SLOW_RATE = 0.25  # of the best rate it had
FURTHER_AFTER_S = 1.0  # a transfer that lasts longer is worth another question, and again when it has lasted twice that
FURTHER_SEGMENTS_MIN = 16  # that are still missing then
STEAL_RATIO = 2.0  # when the rest would take so much longer where it is, its connection is worth giving up
STEAL_S = 0.2
LOOK_S = 0.25  # how often rates are looked at
HUB_ANSWER_S = 1.0  # beyond the deadline: the hub's own answer that it has passed says more than we know

# --- events ---


class Begin(msgspec.Struct, frozen=True):
    pass


class Answer(msgspec.Struct, frozen=True):
    """The hub's answer to an AskSources."""

    request: int
    reply: m.Granted | m.Refused | None  # None: no answer in time
    further: bool = False  # the question named sources that it came beside


class Opened(msgspec.Struct, frozen=True):
    """The source of this shard has shown its manifest (already checked to hold together).

    needed: the segments with bytes that are wanted, in order; None: all.
    """

    shard: int
    session: bytes
    manifest: Manifest
    needed: tuple[int, ...] | None = None


class Arrived(msgspec.Struct, frozen=True):
    """A segment is in place; intact: its digest is the manifest's. waited: it had to reach its source first."""

    shard: int
    session: bytes
    segment: int
    intact: bool
    waited: bool = False


class Waits(msgspec.Struct, frozen=True):
    """The source of this shard lives, and waits for bytes itself."""

    shard: int
    session: bytes


class ReadEnded(msgspec.Struct, frozen=True):
    """The answer to Check. same_epoch: the source had not withdrawn what was read until then."""

    shard: int
    session: bytes
    same_epoch: bool


class Lost(msgspec.Struct, frozen=True):
    """The source of this shard failed: refused, died, froze or cut us off."""

    shard: int
    session: bytes
    why: str


class SourceGone(msgspec.Struct, frozen=True):
    """The hub says that this worker is no more."""

    session: bytes


class Withdrawn(msgspec.Struct, frozen=True):
    """Operators have withdrawn these versions."""

    versions: tuple[int, ...]


class Tick(msgspec.Struct, frozen=True):
    pass


Event: TypeAlias = Begin | Answer | Opened | Arrived | Waits | ReadEnded | Lost | SourceGone | Withdrawn | Tick

# --- effects ---


class AskSources(msgspec.Struct, frozen=True):
    """Send this Acquire; the shell numbers it and reports the number with `asked`."""

    acquire: m.Acquire


class Restart(msgspec.Struct, frozen=True):
    """Forget everything that was read: it goes on in another layout."""

    layout: str


class Open(msgspec.Struct, frozen=True):
    key: ShardKey
    grant: m.Grant
    request: int


class Read(msgspec.Struct, frozen=True):
    """Read these after those asked for before."""

    shard: int
    session: bytes
    segments: tuple[int, ...]


class Check(msgspec.Struct, frozen=True):
    """Nothing more is read from this source: ask whether it has withdrawn its offer meanwhile."""

    shard: int
    session: bytes


class Close(msgspec.Struct, frozen=True):
    """Close the link to this shard's source. What it was asked for and has not arrived may be asked of another at once:
    nothing of the old may be written any more when the new begins."""

    shard: int
    session: bytes


class EndLease(msgspec.Struct, frozen=True):
    request: int
    shard: int | None
    lost: bool


class Verified(msgspec.Struct, frozen=True):
    """This segment may be served on."""

    shard: int
    segment: int


class Complete(msgspec.Struct, frozen=True):
    pass


class GiveUp(msgspec.Struct, frozen=True):
    error: errors.TensorHubError


Effect: TypeAlias = AskSources | Restart | Open | Read | Check | Close | EndLease | Verified | Complete | GiveUp

# --- the machine ---


@dataclass
class _Source:
    """One source of one shard. assigned: segments that were asked of it and have not arrived, in that order."""

    grant: m.Grant
    request: int
    last_at: float  # progress, or a sign of life
    is_far: bool
    first: int  # its window before its rate is known
    is_open: bool = False
    is_checked: bool = False
    assigned: dict[int, None] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)  # what has come from it
    rate: float = 0.0  # segments a second
    best_rate: float = 0.0
    since: float = 0.0  # of the rate being measured
    count: int = 0
    is_slow: bool = False

    def arrived(self, now: float, *, waited: bool) -> None:
        self.last_at = now
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
        return max(WINDOW_SEGMENTS_MIN, int(self.rate * WINDOW_S)) if self.rate else self.first

    def silence_s(self) -> float:
        """How long it may say nothing before it counts as slow."""
        return max(SLOW_FAR_S if self.is_far else SLOW_S, SLOW_SEGMENTS / self.rate if self.rate else 0.0)

    def rest_s(self, now: float) -> float:
        """How long what it was asked for will take, as far as we can see."""
        rate = self.rate or self.first / SLOW_S
        silent = now - self.last_at
        if silent > 1.0 / rate:  # the next one is due: believe what is seen
            rate = 1.0 / silent
        return len(self.assigned) / rate


@dataclass
class _Shard:
    """Progress on one shard. missing is None until a manifest was seen; queue: of it, what nobody was asked for."""

    root: bytes
    sources: dict[bytes, _Source] = field(default_factory=dict)
    missing: dict[int, None] | None = None
    queue: deque[int] = field(default_factory=deque)
    peer: str = ""  # the last source that was lost
    began: float = 0.0
    further_at: float = 0.0  # when the next question for an idle source is due

    @property
    def is_done(self) -> bool:
        """All of it is here and its sources have been dealt with: their epochs checked, their leases ended."""
        return self.missing is not None and not self.missing and not self.sources

    def give_back(self, segments: Iterable[int]) -> None:
        self.queue = deque(sorted({*self.queue, *segments}))


@dataclass
class Replication:
    """layouts: in order of preference. claim, serve: as in Acquire. verify: whether the shell compares digests."""

    version: int
    at_least: int
    layouts: tuple[str, ...]
    claim: bool
    deadline: float
    timeout_s: float
    verify: bool = True
    serve: bool = False
    location: Location = Location()  # of the reader
    layout: str = ""
    shard_count: int = 0
    shards: dict[int, _Shard] = field(default_factory=dict)
    claimed: ShardKey | None = None
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = False
        self._asking = False  # an AskSources is unanswered
        self._asking_further = False
        self._ask_at: float | None = None
        self._look_at: float | None = None
        self._retries = 0  # questions after a loss, since the last progress
        self._avoid: dict[bytes, None] = {}
        self._exclude: dict[bytes, None] = {}
        self._corrupt: Counter[bytes] = Counter()
        self._withdrawn: tuple[int, ...] = ()
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._effects = []
        if self.finished:
            if isinstance(event, Answer) and isinstance(event.reply, m.Granted):
                self._effects.append(EndLease(event.request, None, False))
            return self._effects
        match event:
            case Begin():
                self._ask(now)
            case Answer(request, reply, further):
                if further:
                    self._answer_further(request, reply, now)
                else:
                    self._answer(request, reply, now)
            case Opened():
                self._opened(event, now)
            case Arrived():
                self._arrived(event, now)
            case Waits(shard, session):
                source = self._current(shard, session)
                if source is not None:
                    source.last_at, source.since, source.count = now, now, 0
            case ReadEnded(shard, session, same_epoch):
                self._read_ended(shard, session, same_epoch, now)
            case Lost(shard, session, why):
                self._lost(shard, session, why, now)
            case SourceGone(session):
                for shard, state in self.shards.items():
                    if session in state.sources:
                        self._lost(shard, session, "the hub gave it up", now)
            case Withdrawn(versions):
                self._withdrawn = versions
                if self.version in versions:
                    self._give_up(self._was_withdrawn())
            case Tick():
                for shard in self.shards:
                    self._look(shard, now)
            case _:
                assert_never(event)
        if not self.finished and now >= self._ends_at():
            self._give_up(self._too_late())
        if not self.finished and self._ask_at is not None and now >= self._ask_at and not self._asking:
            self._retries += 1
            self._ask(now)
        self._look_at = now + LOOK_S if any(state.sources for state in self.shards.values()) else None
        return self._effects

    def next_deadline(self) -> float:
        """When the next Tick is due."""
        due = self._ends_at()
        if self._ask_at is not None and not self._asking:
            due = min(due, self._ask_at)
        return due if self._look_at is None else min(due, self._look_at)

    def _ends_at(self) -> float:
        return self.deadline + HUB_ANSWER_S if self._asking else self.deadline

    def _ask(self, now: float) -> None:
        orphans = tuple(shard for shard, state in self.shards.items() if not state.sources and not state.is_done)
        self._asking, self._ask_at = True, None
        left_s = max(0.0, self.deadline - now)
        self._effects.append(AskSources(self._acquire(self.layouts, orphans, left_s, claim=self.claim)))

    def _acquire(
        self,
        layouts: tuple[str, ...],
        shards: tuple[int, ...],
        timeout_s: float,
        *,
        claim: bool = False,
        beside: tuple[bytes, ...] = (),
        urgent: bool = False,
    ) -> m.Acquire:
        return m.Acquire(
            request_id=0,
            version=self.version,
            at_least=self.at_least,
            layouts=layouts,
            timeout_s=timeout_s,
            claim=claim,
            shards=shards,
            shards_layout=self.layout,
            shard_count=self.shard_count,
            avoid=tuple(self._avoid),
            exclude=tuple(self._exclude),
            serve=self.serve,
            beside=beside,
            urgent=urgent,
        )

    def _answer(self, request: int, reply: m.Granted | m.Refused | None, now: float) -> None:
        self._asking = False
        if reply is None:
            self._give_up(
                errors.HubUnreachable(
                    "the hub did not answer a request for sources",
                    version=self.version or None,
                    phase="find sources",
                    timeout_s=self.timeout_s,
                )
            )
            return
        if isinstance(reply, m.Refused):
            text = self._with_losses(reply.message)
            self._give_up(
                refusal(
                    msgspec.structs.replace(reply, message=text),
                    version=self.version or None,
                    peer=self._peers(),
                    phase="find sources",
                    timeout_s=self.timeout_s,
                )
            )
            return
        if (reply.layout, reply.shard_count) != (self.layout, self.shard_count):
            if self.layout:
                self._drop_all()
                self._effects.append(Restart(reply.layout))
            self.layout, self.shard_count = reply.layout, reply.shard_count
            self.shards = {grant.shard: _Shard(grant.root) for grant in reply.grants}
        self.version = reply.version
        if reply.claim is not None:
            self.claimed = reply.claim
        if self.version in self._withdrawn:  # a moment after it was granted
            self._effects.append(EndLease(request, None, False))
            self._give_up(self._was_withdrawn())
            return
        self._take(request, reply, now, room=1)
        if self._ask_at is None and any(not s.sources and not s.is_done for s in self.shards.values()):
            self._ask_at = now

    def _answer_further(self, request: int, reply: m.Granted | m.Refused | None, now: float) -> None:
        self._asking_further = False
        if not isinstance(reply, m.Granted):
            return  # there is none; what we have goes on
        if (reply.version, reply.layout, reply.shard_count) == (self.version, self.layout, self.shard_count):
            self._take(request, reply, now, room=SOURCES_MAX)
        else:
            self._effects.append(EndLease(request, None, False))

    def _take(self, request: int, reply: m.Granted, now: float, *, room: int) -> None:
        """room: how many sources a shard may have then."""
        for grant in reply.grants:
            state = self.shards.get(grant.shard)
            if (
                state is None
                or state.is_done
                or (state.missing is not None and not state.missing)
                or grant.session in state.sources
                or len(state.sources) >= room
            ):
                self._effects.append(EndLease(request, grant.shard, False))
                continue
            away = distance(self.location, grant.location)
            first = WINDOW_HERE_SEGMENTS if away == HOST else WINDOW_FIRST_SEGMENTS
            state.sources[grant.session] = _Source(grant, request, now, away == FAR, first)
            key = ShardKey(reply.version, reply.layout, grant.shard, reply.shard_count)
            self._effects.append(Open(key, grant, request))

    def _opened(self, event: Opened, now: float) -> None:
        shard, session, manifest = event.shard, event.session, event.manifest
        source = self._current(shard, session)
        if source is None or source.is_open:
            return
        state = self.shards[shard]
        if manifest.root() != state.root:
            self._exclude[session] = None
            self._lost(shard, session, "its manifest is not the one that was published", now)
            return
        if state.missing is None:
            needed = range(manifest.segment_count) if event.needed is None else event.needed
            state.missing = dict.fromkeys(needed)
            state.queue = deque(needed)
            state.began, state.further_at = now, now + FURTHER_AFTER_S
        source.is_open, source.last_at, source.since = True, now, now
        if state.missing:
            self._give_work(shard, state, now)
        else:
            self._shard_done(shard, state)

    def _arrived(self, event: Arrived, now: float) -> None:
        source = self._current(event.shard, event.session)
        if source is None or event.segment not in source.assigned:
            return
        state = self.shards[event.shard]
        assert state.missing is not None
        if event.intact:
            self._retries = 0  # progress: the next loss is a new one
            del state.missing[event.segment], source.assigned[event.segment]
            source.given.append(event.segment)
            source.arrived(now, waited=event.waited)
            self._effects.append(Verified(event.shard, event.segment))
            if state.missing:
                self._give_work(event.shard, state, now)
            else:
                self._shard_done(event.shard, state)
            return
        self._corrupt[event.session] += 1
        if self._corrupt[event.session] >= CORRUPT_SEGMENTS_MAX:
            self._exclude[event.session] = None
        self._lost(event.shard, event.session, f"segment {event.segment} arrived corrupt", now)

    def _give_work(self, shard: int, state: _Shard, now: float) -> None:
        """Every open source gets the next segments of the queue; who gets none may take another's."""
        for session, source in list(state.sources.items()):
            if state.sources.get(session) is not source:  # left a moment ago, for one that stands before it
                continue
            if not source.is_open or len(source.assigned) > source.window // 2:
                continue
            batch = tuple(
                state.queue.popleft() for _ in range(min(len(state.queue), source.window - len(source.assigned)))
            )
            if batch:
                if not source.assigned:
                    source.last_at, source.since, source.count = now, now, 0
                source.assigned.update(dict.fromkeys(batch))
                self._effects.append(Read(shard, session, batch))
            elif not source.assigned:
                self._take_over(shard, state, session, now)

    def _take_over(self, shard: int, state: _Shard, idle: bytes, now: float) -> None:
        """Leave the source that would take longest, if the idle one would do its rest much sooner."""
        others = [(s.rest_s(now), session) for session, s in state.sources.items() if s.assigned]
        if not others:
            return
        rest_s, slowest = max(others)
        victim, taker = state.sources[slowest], state.sources[idle]
        silent = now - victim.last_at > victim.silence_s()
        if victim.is_far and not silent:
            return
        mine_s = len(victim.assigned) / taker.rate if taker.rate else (0.0 if silent else rest_s)
        if rest_s > STEAL_RATIO * mine_s + STEAL_S:
            state.peer = victim.grant.worker
            self.losses.append(f"shard {shard} from {state.peer}: it was slow, another took over its rest")
            self._leave(shard, state, slowest, lost=False)
            self._avoid[slowest] = None
            self._give_work(shard, state, now)

    def _look(self, shard: int, now: float) -> None:
        """Is this going well?"""
        state = self.shards[shard]
        if not state.missing:
            return
        self._give_work(shard, state, now)
        working = {session: s for session, s in state.sources.items() if s.assigned}
        slow = [s for s in working.values() if s.is_slow or now - s.last_at > s.silence_s()]
        urgent = bool(slow) and len(slow) == len(working)
        lasting = now >= state.further_at and len(state.missing) >= FURTHER_SEGMENTS_MIN
        room = working and len(state.sources) < SOURCES_MAX and not self._asking_further
        if room and (urgent or lasting):
            state.further_at = now + (now - state.began)
            self._asking_further = True
            left_s = max(0.0, self.deadline - now) if urgent else 0.0  # else: one that is idle now, or none
            beside = tuple(state.sources)
            self._effects.append(
                AskSources(self._acquire((self.layout,), (shard,), left_s, beside=beside, urgent=urgent))
            )

    def _read_ended(self, shard: int, session: bytes, same_epoch: bool, now: float) -> None:
        source = self._current(shard, session)
        if source is None:
            return
        state = self.shards[shard]
        if not same_epoch and not self.verify:  # without digests the epoch alone tells that bytes may be torn
            self._give_up(
                errors.SourceLost(
                    "the source withdrew its version while it was read, and digests are switched off",
                    version=self.version,
                    shard=shard,
                    peer=source.grant.worker,
                    phase="read",
                )
            )
        elif source.assigned:
            self._lost(shard, session, f"{len(source.assigned)} segments did not arrive", now)
        else:
            self._leave(shard, state, session, lost=False)
            self._complete_if_done()

    def _shard_done(self, shard: int, state: _Shard) -> None:
        """All bytes are here: what is left is to ask those they came from whether they still stand by them."""
        for session, source in list(state.sources.items()):
            if not source.given:
                self._leave(shard, state, session, lost=False)
            elif not source.is_checked:
                source.is_checked = True
                self._effects.append(Check(shard, session))
        self._complete_if_done()

    def _complete_if_done(self) -> None:
        if all(s.is_done for s in self.shards.values()):
            self.finished = True
            self._effects.append(Complete())

    def _leave(self, shard: int, state: _Shard, session: bytes, *, lost: bool) -> None:
        source = state.sources.pop(session)
        self._effects += [Close(shard, session), EndLease(source.request, shard, lost)]
        state.give_back(source.assigned)
        if source.given and not self.verify and (lost or source.assigned) and state.missing is not None:
            state.missing.update(dict.fromkeys(source.given))  # nothing counts before its epoch was checked
            state.give_back(source.given)

    def _lost(self, shard: int, session: bytes, why: str, now: float) -> None:
        source = self._current(shard, session)
        if source is None:
            return
        state = self.shards[shard]
        self.losses.append(f"shard {shard} from {source.grant.worker}: {why}")
        state.peer = source.grant.worker
        self._avoid[session] = None
        self._leave(shard, state, session, lost=True)
        if state.missing is not None and not state.missing:
            self._complete_if_done()  # every byte had arrived intact: nothing is lost with the source
            return
        if any(s.is_open for s in state.sources.values()):
            self._give_work(shard, state, now)
        if not state.sources and self._ask_at is None:  # one question for all shards that are lost together
            self._ask_at = now + backoff_s(self._retries)

    def _current(self, shard: int, session: bytes) -> _Source | None:
        """The source's state, if it still is one: words of a source that was left are ignored."""
        state = self.shards.get(shard)
        return state.sources.get(session) if state is not None else None

    def _drop_all(self) -> None:
        for shard, state in self.shards.items():
            for session, source in state.sources.items():
                self._effects += [Close(shard, session), EndLease(source.request, shard, False)]
            state.sources = {}

    def _give_up(self, error: errors.TensorHubError) -> None:
        self._drop_all()
        self.finished = True
        self._effects.append(GiveUp(error))

    def _was_withdrawn(self) -> errors.TensorHubError:
        return errors.VersionGone(
            "the version was withdrawn while it was read, and nobody is to use it any more",
            version=self.version,
            phase="read",
        )

    def _too_late(self) -> errors.TensorHubError:
        version, timeout_s = self.version or None, self.timeout_s
        if not self.shards and self._asking:
            return errors.HubUnreachable(
                "the hub did not answer a request for sources",
                version=version,
                phase="find sources",
                timeout_s=timeout_s,
            )
        missing = [s for s in self.shards.values() if not s.is_done]
        segments = sum(len(s.missing) for s in missing if s.missing is not None)
        unopened = sum(s.missing is None for s in missing)
        what = [f"{segments} segments"] * (segments > 0) + [f"{unopened} shards not yet opened"] * (unopened > 0)
        return errors.DeadlineExceeded(
            self._with_losses(f"{' and '.join(what)} were still missing"),
            version=version,
            phase="read",
            peer=self._peers(),
            timeout_s=timeout_s,
        )

    def _with_losses(self, text: str) -> str:
        return f"{text}; lost on the way: {'; '.join(self.losses[-LOSSES_SHOWN_MAX:])}" if self.losses else text

    def _peers(self) -> str | None:
        """Whom we wait for, or waited for in vain."""
        missing = [s for s in self.shards.values() if not s.is_done]
        peers = {source.grant.worker for state in missing for source in state.sources.values()}
        return ", ".join(sorted((peers | {state.peer for state in missing if not state.sources}) - {""})) or None


def backoff_s(retries: int) -> float:
    """How long to wait before the next question after so many without progress: the first one is for free."""
    if not retries:
        return 0.0
    return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(retries - 1, 16))
