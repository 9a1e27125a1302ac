"""One replicate(). PURE: what has happened goes in, what to do next comes out; no thread, socket or tensor.

Phases: ask the hub for sources -> open each -> prepare memory -> read the missing segments -> every segment verified
-> confirm that the sources have not withdrawn what was read -> complete. sharing.py assigns segments to sources.

Its invariants
    Nothing that was verified is read again: a lost source costs the segments in flight, the rest comes from another.
    A source that failed is avoided while there is another, and excluded once it has sent corrupt bytes too often.
    Borrowed memory, of a source on this host, is lost if that source is lost before all is verified: then all is
    read again, once, into memory of its own. Afterwards it stays, whatever becomes of the source.
    The version, once resolved, stays. The layout may change while there are alternatives (the peers that had the
    runtime layout died, the trainer still has the checkpoint): then it starts again in that layout.
    Everything ends by the deadline, in Complete or GiveUp; and at once when an operator withdraws the version.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.deadline import TIMEOUT_S, remaining_s, size_s
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol import reach
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive
from tensorhub_plugins.core.transfer import events
from tensorhub_plugins.core.transfer.limits import (
    BACKOFF_FIRST_S,
    RATES_CHECKED_S,
    WINDOW_HERE_SEGMENTS,
    TransferLimits,
)
from tensorhub_plugins.core.transfer.sharing import Assign, Leave, Shard, Source, plan, reason_for_more
from tensorhub_plugins.core.types import FAR, HOST, Location, ShardKey, distance

NAMES_SHOWN_MAX = 5  # of tensors, in an error's message
LOSSES_SHOWN_MAX = 3  # the last ones, in an error's message
UNREACHED_REMEDY = f"if a source lives that cannot be connected to from here, {reach.REMEDY}"


@dataclass
class Replication:
    """The state of one transfer. wanted: the first request for sources; the others follow from it. If it grows, each
    shard extends the deadline by the time for its size, each segment to TIMEOUT_S from then. borrows: whether a source
    on this host is asked to lend its memory. verify: whether the shell compares digests. algorithm: the only digest
    algorithm that is accepted; None: any. deadline: an instant on the clock of `now`. timeout_s: the same as seconds,
    for errors."""

    wanted: m.Acquire
    deadline: float
    timeout_s: float
    verify: bool = True
    borrows: bool = False
    location: Location = Location()  # of the reader
    limits: TransferLimits = TransferLimits()
    algorithm: str | None = None
    layout: str = ""
    shard_count: int = 0
    shards: dict[int, Shard] = field(default_factory=dict)
    claimed: ShardKey | None = None
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.version, self.finished = self.wanted.version, False
        self._asking = False  # an AskSources is unanswered
        self._asked_until = self.deadline  # the deadline of the last one
        self._asking_more = False
        self._ask_at: float | None = None
        self._look_at: float | None = None
        self._retries = 0  # requests after a loss, since the last progress
        self._avoid: dict[bytes, None] = {}
        self._has_unreached = False  # a source was never connected to
        self._exclude: dict[bytes, None] = {}
        self._corrupt: Counter[bytes] = Counter()
        self._damage: errors.TensorHubError | None = None  # the last one
        self._directive = NO_DIRECTIVE  # the last one received
        self._grown: set[ShardKey] = set()  # shards for which the deadline was extended
        self._effects: list[events.Effect] = []

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Take one event at time `now` (seconds of a monotonic clock); return what the shell is to do, in order."""
        self._effects = []
        if self.finished:
            if isinstance(event, events.Answer) and isinstance(event.reply, m.Granted):
                self._effects.append(m.Release(event.request_id))
            return self._effects
        match event:
            case events.Begin():
                self._ask(now)
            case events.Answer(request_id, reply, additional):
                if additional:
                    self._answer_additional(request_id, reply, now)
                else:
                    self._answer(request_id, reply, now)
            case events.Opened(shard, session, manifest):
                self._opened(shard, session, manifest, now)
            case events.Prepared():
                self._prepared(event, now)
            case events.Arrived():
                self._arrived(event, now)
            case events.SourceWaiting(shard, session):
                self._waits(shard, session, now)
            case events.EpochChecked(shard, session, unchanged):
                self._epoch_checked(shard, session, unchanged, now)
            case events.Lost(shard, session, why, refused, unreached):
                self._has_unreached |= unreached
                self._lost(shard, session, why, now, refused=refused)
            case events.SourceGone(session):
                self._gone(session, now)
            case events.Directed(directive):
                self._direct(directive)
            case events.Tick():
                for shard in self.shards:
                    self._check_speed(shard, now)
            case _:
                assert_never(event)
        self._keep_time(now)
        return self._effects

    # --- time ---

    def _keep_time(self, now: float) -> None:
        """Do what is due by now, and set when to check again; called after every event."""
        if not self.finished and now >= self._ends_at():
            self._give_up(self._too_late())
        if not self.finished and self._ask_at is not None and now >= self._ask_at and not self._asking:
            self._retries += 1
            self._ask(now)
        reading = any(state.sources for state in self.shards.values())
        self._look_at = now + RATES_CHECKED_S if reading else None

    def next_deadline(self) -> float:
        """Return when the next Tick is due."""
        due = self._ends_at()
        if self._ask_at is not None and not self._asking:
            due = min(due, self._ask_at)
        return due if self._look_at is None else min(due, self._look_at)

    def _ends_at(self) -> float:
        return self.deadline + self.limits.hub_answer_s if self._asking else self.deadline

    # --- sources ---

    def _ask(self, now: float) -> None:
        orphans = tuple(shard for shard, state in self.shards.items() if not state.sources and not state.is_done)
        self._asking, self._asked_until, self._ask_at = True, self.deadline, None
        left_s = remaining_s(self.deadline, now)
        self._effects.append(events.AskSources(self._acquire(orphans, left_s)))

    def _acquire(self, shards: tuple[int, ...], timeout_s: float, **other: Any) -> m.Acquire:
        """Return the request for sources of these shards. other: fields that are not as in the first one."""
        return msgspec.structs.replace(
            self.wanted,
            version=self.version,
            timeout_s=timeout_s,
            shards=shards,
            shards_layout=self.layout,
            shard_count=self.shard_count,
            avoid=tuple(self._avoid),
            exclude=tuple(self._exclude),
            **other,
        )

    def _answer(self, request_id: int, reply: m.Granted | errors.TensorHubError, now: float) -> None:
        self._asking = False
        if isinstance(reply, errors.TensorHubError):
            unheard = isinstance(reply, errors.HubUnreachable)
            if self.deadline > self._asked_until and (unheard or isinstance(reply, errors.DeadlineExceeded)):
                self._ask_at = now  # what has come meanwhile has moved it
                return
            self._give_up(self._no_hub(reply.peer, f": {reply.message}") if unheard else self._explained(reply))
            return
        if (reply.layout, reply.shard_count) != (self.layout, self.shard_count):
            if self.layout:
                self._drop_all()
                self._effects.append(events.Restart(reply.layout))
            self.layout, self.shard_count = reply.layout, reply.shard_count
            self.shards = {grant.shard: Shard(grant.root, self.verify) for grant in reply.grants}
        self.version = reply.version
        if reply.claim is not None:
            self.claimed = reply.claim
        if self._directive.is_over(self.version):  # a moment after it was granted
            self._effects.append(m.Release(request_id))
            self._give_up(self._is_over())
            return
        self._take(request_id, reply, now, sources_max=1)
        if self._ask_at is None and any(not s.sources and not s.is_done for s in self.shards.values()):
            self._ask_at = now

    def _answer_additional(self, request_id: int, reply: m.Granted | errors.TensorHubError, now: float) -> None:
        self._asking_more = False
        if not isinstance(reply, m.Granted):
            return  # there is none; the present sources go on
        if (reply.version, reply.layout, reply.shard_count) == (self.version, self.layout, self.shard_count):
            self._take(request_id, reply, now, sources_max=self.limits.sources_max)
        else:
            self._effects.append(m.Release(request_id))

    def _take(self, request_id: int, reply: m.Granted, now: float, *, sources_max: int) -> None:
        """Open what was granted, up to so many sources of a shard."""
        for grant in reply.grants:
            state = self.shards.get(grant.shard)
            if state is None or state.is_whole or grant.session in state.sources or len(state.sources) >= sources_max:
                self._effects.append(m.Release(request_id, grant.shard))
                continue
            away = distance(self.location, grant.location)
            limits = self.limits
            first = WINDOW_HERE_SEGMENTS if away == HOST else limits.window_first_segments
            source = Source(limits, grant, request_id, now, away == FAR, first, away != HOST)
            source.expects_deltas = state.has_bases and source.is_elsewhere
            state.sources[grant.session] = source
            self._effects.append(events.Open(self._key(grant.shard), grant, request_id))

    def _key(self, shard: int) -> ShardKey:
        return ShardKey(self.version, self.layout, shard, self.shard_count)

    def _opened(self, shard: int, session: bytes, manifest: Manifest, now: float) -> None:
        source = self._current(shard, session)
        if source is None or source.is_open or not self._believes(shard, session, manifest, now):
            return
        state = self.shards[shard]
        source.is_open = True
        source.begins(now)
        if state.missing is not None:
            self._go_on(shard, state, now)
        elif not state.is_preparing:
            state.is_preparing = True
            state.lender = session if self.borrows else None
            self._effects.append(events.Prepare(self._key(shard), manifest, state.lender))

    def _believes(self, shard: int, session: bytes, manifest: Manifest, now: float) -> bool:
        """Return whether this is what was published, with digests that we accept; if not, leave its source."""
        peer = self.shards[shard].sources[session].grant.worker
        if manifest.root() != self.shards[shard].root:
            why = "its manifest is not the one that was published"
            self._exclude_opened(shard, session, why, self._corrupt_bytes(shard, session, why), now)
            return False
        if self.verify and not manifest.has_digests:
            text = "was published without digests: read with verify=False, or publish with verify=True"
            self._give_up(errors.UsageError(f"{self._key(shard)} {text}", peer=peer))
            return False
        if self.algorithm not in (None, manifest.digest_algorithm):  # by the publisher, or by a forger of the root
            error = self._other_digests(shard, peer, manifest.digest_algorithm)
            self._exclude_opened(shard, session, error.message, error, now)
            return False
        return True

    def _prepared(self, event: events.Prepared, now: float) -> None:
        state = self.shards[event.shard]
        state.lender = state.lender if event.is_borrowed else None
        if self.wanted.grows and self._key(event.shard) not in self._grown:
            self._grown.add(self._key(event.shard))
            self._extend(size_s(event.size_bytes))
        state.has_bases = 2 * event.based > len(event.needed)
        state.begin(event.needed, now, self.limits)
        self._go_on(event.shard, state, now)

    def _extend(self, more_s: float) -> None:
        self.deadline += more_s
        self.timeout_s += more_s

    # --- reading ---

    def _go_on(self, shard: int, state: Shard, now: float) -> None:
        if state.is_whole:
            self._shard_done(shard, state)
        else:
            self._share(shard, state, now)

    def _share(self, shard: int, state: Shard, now: float) -> None:
        for action in plan(state, now):
            match action:
                case Assign(session, segments):
                    state.assign(session, segments, now)
                    self._effects.append(events.Read(shard, session, segments))
                case Leave(session):
                    state.peer = state.sources[session].grant.worker
                    self.losses.append(f"shard {shard} from {state.peer}: it was slow, another took over its rest")
                    self._avoid[session] = None
                    self._leave(shard, state, session)
                    self._leave_unopened(session, now)
                case _:
                    assert_never(action)

    def _leave_unopened(self, session: bytes, now: float) -> None:
        """Leave this source, which was slow, for the shards that it has not opened yet: they may wait for their turn.
        Another one may have come meanwhile."""
        for shard, state in self.shards.items():
            source = state.sources.get(session)
            if source is not None and not source.is_open:
                state.peer = source.grant.worker
                self.losses.append(f"shard {shard} from {state.peer}: it was slow for another shard")
                self._leave(shard, state, session)
                if not state.sources and self._ask_at is None:
                    self._ask_at = now

    def _check_speed(self, shard: int, now: float) -> None:
        """Check the progress of this shard, and ask for an additional source where it is slow."""
        state = self.shards[shard]
        if not state.missing:
            return
        self._share(shard, state, now)
        reason = reason_for_more(state, now, self.limits)
        if reason is None or self._asking_more:
            return
        state.additional_at = now + (now - state.began)
        self._asking_more = True
        urgent = reason == "slow"
        left_s = remaining_s(self.deadline, now) if urgent else 0.0  # else: one that is idle now, or none
        other = {"layouts": (self.layout,), "claim": False, "beside": tuple(state.sources), "urgent": urgent}
        self._effects.append(events.AskSources(self._acquire((shard,), left_s, **other)))

    def _arrived(self, event: events.Arrived, now: float) -> None:
        source = self._current(event.shard, event.session)
        if source is None or event.segment not in source.assigned:
            return
        state = self.shards[event.shard]
        assert state.missing is not None
        if not event.intact:
            self._arrived_corrupt(event, now)
            return
        self._retries = 0  # progress: the next loss is a new one
        if self.wanted.grows and self.deadline < now + TIMEOUT_S:  # what is slow but comes is waited for
            self._extend(now + TIMEOUT_S - self.deadline)
        del state.missing[event.segment]
        source.arrived(event.segment, now, waited=event.waited, by_delta=event.by_delta)
        self._effects.append(events.Verified(event.shard, event.session, event.segment))
        self._go_on(event.shard, state, now)

    def _arrived_corrupt(self, event: events.Arrived, now: float) -> None:
        self._corrupt[event.session] += 1
        if self._corrupt[event.session] >= self.limits.corrupt_segments_max:
            self._exclude[event.session] = None
        shown = ", ".join(map(repr, event.tensors[:NAMES_SHOWN_MAX]))
        more = f" and {len(event.tensors) - NAMES_SHOWN_MAX} more" if len(event.tensors) > NAMES_SHOWN_MAX else ""
        why = f"segment {event.segment} arrived corrupt" + (f" (of {shown}{more})" if shown else "")
        self._damage = self._corrupt_bytes(event.shard, event.session, why, event.segment, event.tensors)
        self._lost(event.shard, event.session, why, now, corrupt=(event.segment,))

    def _exclude_opened(self, shard: int, session: bytes, why: str, error: errors.TensorHubError, now: float) -> None:
        """Exclude this source. error: to be raised when no other source is left."""
        self._exclude[session] = None
        self._damage = error
        self._lost(shard, session, why, now)

    def _corrupt_bytes(
        self, shard: int, session: bytes, why: str, segment: int | None = None, tensors: tuple[str, ...] = ()
    ) -> errors.CorruptBytes:
        peer = self.shards[shard].sources[session].grant.worker
        context = {"version": self.version, "shard": shard, "peer": peer, "phase": "read", "timeout_s": self.timeout_s}
        text = f"{why}; no source is left that has not sent other bytes than were published"
        return errors.CorruptBytes(text, segment=segment, tensors=tensors, **context)

    def _shard_done(self, shard: int, state: Shard) -> None:
        """Ask the sources of a shard whose bytes are all here whether they have withdrawn it meanwhile."""
        self._retries = 0  # it has come nearer, also where all was in place
        for session, source in list(state.sources.items()):
            if not source.given:
                self._leave(shard, state, session)
            elif not source.is_checked:
                source.is_checked = True
                self._effects.append(events.ConfirmEpoch(shard, session))
        self._complete_if_done()

    def _epoch_checked(self, shard: int, session: bytes, unchanged: bool, now: float) -> None:
        source = self._current(shard, session)
        if source is None:
            return
        state = self.shards[shard]
        if not unchanged and not self.verify:  # without digests only the epoch shows that bytes may be torn
            self._give_up(self._unsure(shard, source.grant.worker))
        elif source.assigned:
            self._lost(shard, session, f"{len(source.assigned)} segments did not arrive", now)
        else:
            self._leave(shard, state, session)
            self._complete_if_done()

    def _complete_if_done(self) -> None:
        if all(s.is_done for s in self.shards.values()):
            self.finished = True
            self._effects.append(events.Complete())

    # --- losses ---

    def _leave(self, shard: int, state: Shard, session: bytes, *, lost: bool = False, **why: Any) -> None:
        """Leave a source. why: what the hub is to know besides, as in Release."""
        request_id = state.remove(session, lost=lost).request_id
        self._effects += [events.Close(shard, session), m.Release(request_id, shard, lost, **why)]

    def _lost(self, shard: int, session: bytes, why: str, now: float, **more: Any) -> None:
        source = self._current(shard, session)
        if source is None:
            return
        state = self.shards[shard]
        self.losses.append(f"shard {shard} from {source.grant.worker}: {why}")
        state.peer = source.grant.worker
        self._avoid[session] = None
        self._leave(shard, state, session, lost=True, **more)
        if state.is_whole:
            self._complete_if_done()  # every byte had arrived intact: nothing is lost with the source
            return
        if state.lender == session:
            self._go_without_loans()
        state = self.shards[shard]
        if any(s.is_open for s in state.sources.values()):
            self._share(shard, state, now)
        if not state.sources and self._ask_at is None:  # one request for all shards that are lost together
            self._ask_at = now + backoff_s(self._retries, self.limits)

    def _go_without_loans(self) -> None:
        """Start again without loans: the lost source's memory has what has come, and cannot take the rest."""
        self.borrows = False
        self._drop_all()
        self._effects.append(events.Restart(self.layout))
        self.shards = {shard: Shard(state.root, self.verify, peer=state.peer) for shard, state in self.shards.items()}

    def _waits(self, shard: int, session: bytes, now: float) -> None:
        source = self._current(shard, session)
        if source is not None:
            source.heard(now)

    def _gone(self, session: bytes, now: float) -> None:
        for shard, state in self.shards.items():
            if session in state.sources:
                self._lost(shard, session, "the hub gave it up", now)

    def _direct(self, directive: Directive) -> None:
        self._directive = directive
        if self.layout and directive.is_over(self.version):  # before that the hub refuses, and explains more
            self._give_up(self._is_over())

    def _current(self, shard: int, session: bytes) -> Source | None:
        """Return the source's state, or None if it was left: its late messages are ignored."""
        state = self.shards.get(shard)
        return state.sources.get(session) if state is not None else None

    def _drop_all(self) -> None:
        for shard, state in self.shards.items():
            for session, source in state.sources.items():
                self._effects += [events.Close(shard, session), m.Release(source.request_id, shard)]
            state.sources = {}

    # --- errors ---

    def _give_up(self, error: errors.TensorHubError) -> None:
        self._drop_all()
        self.finished = True
        self._effects.append(events.GiveUp(error))

    def _explained(self, error: errors.TensorHubError) -> errors.TensorHubError:
        """Return the hub's refusal, extended by what this transfer knows."""
        if self._damage is not None and isinstance(error, errors.VersionGone):
            return self._damage
        return error.within(
            self._with_losses(error.message),
            version=self.version or None,
            peer=self._peers(),
            phase="find sources",
            timeout_s=self.timeout_s,
        )

    def _no_hub(self, peer: str | None = None, why: str = "") -> errors.TensorHubError:
        return errors.HubUnreachable(
            f"the hub did not answer a request for sources{why}",
            version=self.version or None,
            peer=peer,
            phase="find sources",
            timeout_s=self.timeout_s,
        )

    def _is_over(self) -> errors.TensorHubError:
        why = "withdrawn" if self.version in self._directive.withdrawn else "superseded by a newer attempt"
        return errors.VersionGone(
            f"the version was {why} while it was read, and must not be used",
            version=self.version,
            phase="read",
        )

    def _other_digests(self, shard: int, peer: str, found: str) -> errors.UsageError:
        text = f"is offered with digests by {found}, and this reader believes {self.algorithm} only: publish with that"
        return errors.UsageError(f"{self._key(shard)} {text}", peer=peer)

    def _unsure(self, shard: int, peer: str) -> errors.TensorHubError:
        return errors.SourceLost(
            "the source withdrew its version while it was read, and digests are switched off",
            version=self.version,
            shard=shard,
            peer=peer,
            phase="read",
        )

    def _too_late(self) -> errors.TensorHubError:
        if not self.shards and self._asking:
            return self._no_hub()
        missing = [s for s in self.shards.values() if not s.is_done]
        segments = sum(len(s.missing) for s in missing if s.missing is not None)
        unopened = sum(s.missing is None for s in missing)
        what = [f"{segments} segments"] * (segments > 0) + [f"{unopened} shards not yet opened"] * (unopened > 0)
        what = what or ["confirmations that what was read is still published"]
        preparing = any(s.is_preparing and s.missing is None for s in missing)
        return errors.DeadlineExceeded(
            self._with_losses(f"{' and '.join(what)} were still missing"),
            version=self.version or None,
            phase="prepare" if preparing else "read",
            peer=self._peers(),
            timeout_s=self.timeout_s,
        )

    def _with_losses(self, text: str) -> str:
        text += f"; lost on the way: {'; '.join(self.losses[-LOSSES_SHOWN_MAX:])}" if self.losses else ""
        return f"{text}; {UNREACHED_REMEDY}" if self._has_unreached else text

    def _peers(self) -> str | None:
        """Return the names of the sources that it waits for, or has waited for in vain."""
        missing = [s for s in self.shards.values() if not s.is_done]
        peers = {source.grant.worker for state in missing for source in state.sources.values()}
        return ", ".join(sorted((peers | {state.peer for state in missing if not state.sources}) - {""})) or None


def backoff_s(retries: int, limits: TransferLimits) -> float:
    """Return the wait before the next request after so many without progress: the first retry is immediate."""
    if not retries:
        return 0.0
    return min(limits.backoff_max_s, BACKOFF_FIRST_S * 2.0 ** min(retries - 1, 16))
