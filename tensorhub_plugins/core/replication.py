"""One replicate(). PURE: what has happened goes in, what to do next comes out; no thread, socket or tensor.

Its life: ask the hub for sources -> open each -> read the missing segments -> every segment verified -> complete.

What it holds on to
    Nothing that was verified is read again: a lost source costs the segments in flight, the rest comes from another.
    A source that failed is avoided while there is another, and excluded once it has sent corrupt bytes too often.
    The version, once resolved, stays. The layout may change while there are alternatives (the peers that had the
    runtime layout died, the trainer still has the checkpoint): then it starts again in that layout.
    Everything ends by the deadline, in Complete or GiveUp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core import errors
from tensorhub_plugins.core import messages as m
from tensorhub_plugins.core.values import Manifest, ShardKey

CORRUPT_SEGMENTS_MAX = 3  # from one source; more is a broken source rather than a flipped bit on the way
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
LOSSES_SHOWN_MAX = 3  # the last ones, in an error's message
HUB_ANSWER_S = 1.0  # beyond the deadline: the hub's own answer that it has passed says more than we know

# --- events ---


class Begin(msgspec.Struct, frozen=True):
    pass


class Answer(msgspec.Struct, frozen=True):
    """The hub's answer to an AskSources."""

    request: int
    reply: m.Granted | m.Refused | None  # None: no answer in time


class Opened(msgspec.Struct, frozen=True):
    """The source of this shard has shown its manifest (already checked to hold together)."""

    shard: int
    session: bytes
    manifest: Manifest


class Arrived(msgspec.Struct, frozen=True):
    """A segment is in place; intact: its digest is the manifest's."""

    shard: int
    session: bytes
    segment: int
    intact: bool


class ReadEnded(msgspec.Struct, frozen=True):
    """All segments asked for have arrived; same_epoch: the source had not withdrawn them by then."""

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


class Tick(msgspec.Struct, frozen=True):
    pass


Event: TypeAlias = Begin | Answer | Opened | Arrived | ReadEnded | Lost | SourceGone | Tick

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
    shard: int
    session: bytes
    segments: tuple[int, ...]


class Close(msgspec.Struct, frozen=True):
    """Close the link to this shard's source."""

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


Effect: TypeAlias = AskSources | Restart | Open | Read | Close | EndLease | Verified | Complete | GiveUp

# --- the machine ---


@dataclass
class _Shard:
    """Progress on one shard. missing is None until a manifest has been seen."""

    root: bytes
    grant: m.Grant | None = None
    request: int = 0
    missing: dict[int, None] | None = None
    reading: bool = False
    peer: str = ""  # the last source that was lost

    @property
    def is_done(self) -> bool:
        """All of it is here and its source has been dealt with: its epoch checked, its lease ended."""
        return self.missing is not None and not self.missing and self.grant is None


@dataclass
class Replication:
    """layouts: in order of preference. claim: as in Acquire. verify: whether the shell compares digests."""

    version: int
    at_least: int
    layouts: tuple[str, ...]
    claim: bool
    deadline: float
    deadline_s: float
    verify: bool = True
    layout: str = ""
    shard_count: int = 0
    shards: dict[int, _Shard] = field(default_factory=dict)
    claimed: ShardKey | None = None
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = False
        self._asking = False  # an AskSources is unanswered
        self._ask_at: float | None = None
        self._retries = 0  # questions after a loss, since the last progress
        self._avoid: dict[bytes, None] = {}
        self._exclude: dict[bytes, None] = {}
        self._corrupt: Counter[bytes] = Counter()
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
            case Answer(request, reply):
                self._answer(request, reply, now)
            case Opened(shard, session, manifest):
                self._opened(shard, session, manifest, now)
            case Arrived():
                self._arrived(event, now)
            case ReadEnded(shard, session, same_epoch):
                self._read_ended(shard, session, same_epoch, now)
            case Lost(shard, session, why):
                self._lost(shard, session, why, now)
            case SourceGone(session):
                for shard, state in self.shards.items():
                    if state.grant is not None and state.grant.session == session:
                        self._lost(shard, session, "the hub gave it up", now)
            case Tick():
                pass
            case _:
                assert_never(event)
        if not self.finished and now >= self._ends_at():
            self._give_up(self._too_late())
        if not self.finished and self._ask_at is not None and now >= self._ask_at and not self._asking:
            self._retries += 1
            self._ask(now)
        return self._effects

    def next_deadline(self) -> float:
        """When the next Tick is due."""
        return self._ends_at() if self._ask_at is None or self._asking else min(self.deadline, self._ask_at)

    def _ends_at(self) -> float:
        return self.deadline + HUB_ANSWER_S if self._asking else self.deadline

    def _ask(self, now: float) -> None:
        orphans = tuple(shard for shard, state in self.shards.items() if state.grant is None and not state.is_done)
        self._asking, self._ask_at = True, None
        self._effects.append(
            AskSources(
                m.Acquire(
                    request=0,
                    version=self.version,
                    at_least=self.at_least,
                    layouts=self.layouts,
                    deadline_s=max(0.0, self.deadline - now),
                    claim=self.claim,
                    shards=orphans,
                    shards_layout=self.layout,
                    shard_count=self.shard_count,
                    avoid=tuple(self._avoid),
                    exclude=tuple(self._exclude),
                )
            )
        )

    def _answer(self, request: int, reply: m.Granted | m.Refused | None, now: float) -> None:
        self._asking = False
        if reply is None:
            self._give_up(
                errors.HubUnreachable(
                    "the hub did not answer a request for sources",
                    version=self.version or None,
                    phase="find sources",
                    deadline_s=self.deadline_s,
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
                    deadline_s=self.deadline_s,
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
        for grant in reply.grants:
            state = self.shards.get(grant.shard)
            if state is None or state.grant is not None or state.is_done:
                self._effects.append(EndLease(request, grant.shard, False))
                continue
            state.grant, state.request, state.reading = grant, request, False
            key = ShardKey(reply.version, reply.layout, grant.shard, reply.shard_count)
            self._effects.append(Open(key, grant, request))
        if self._ask_at is None and any(state.grant is None and not state.is_done for state in self.shards.values()):
            self._ask_at = now

    def _opened(self, shard: int, session: bytes, manifest: Manifest, now: float) -> None:
        state = self._current(shard, session)
        if state is None or state.reading:
            return
        if manifest.root() != state.root:
            self._exclude[session] = None
            self._lost(shard, session, "its manifest is not the one that was published", now)
            return
        if state.missing is None:
            state.missing = dict.fromkeys(range(manifest.segment_count))
        state.reading = True
        if state.missing:
            self._effects.append(Read(shard, session, tuple(state.missing)))
        else:
            self._shard_done(shard, state)

    def _arrived(self, event: Arrived, now: float) -> None:
        state = self._current(event.shard, event.session)
        if state is None or state.missing is None or event.segment not in state.missing:
            return
        if event.intact:
            self._retries = 0  # progress: the next loss is a new one
            del state.missing[event.segment]
            self._effects.append(Verified(event.shard, event.segment))
            return
        self._corrupt[event.session] += 1
        if self._corrupt[event.session] >= CORRUPT_SEGMENTS_MAX:
            self._exclude[event.session] = None
        self._lost(event.shard, event.session, f"segment {event.segment} arrived corrupt", now)

    def _read_ended(self, shard: int, session: bytes, same_epoch: bool, now: float) -> None:
        state = self._current(shard, session)
        if state is None or state.missing is None:
            return
        if not same_epoch and not self.verify:  # without digests the epoch alone tells that bytes may be torn
            self._give_up(
                errors.SourceLost(
                    "the source withdrew its version while it was read, and digests are switched off",
                    version=self.version,
                    shard=shard,
                    peer=state.grant.worker if state.grant else None,
                    phase="read",
                )
            )
        elif state.missing:
            self._lost(shard, session, f"{len(state.missing)} segments did not arrive", now)
        else:
            self._shard_done(shard, state)

    def _shard_done(self, shard: int, state: _Shard) -> None:
        if state.grant is not None:
            self._effects += [Close(shard, state.grant.session), EndLease(state.request, shard, False)]
            state.grant = None
        self._complete_if_done()

    def _complete_if_done(self) -> None:
        if all(s.is_done for s in self.shards.values()):
            self.finished = True
            self._effects.append(Complete())

    def _lost(self, shard: int, session: bytes, why: str, now: float) -> None:
        state = self._current(shard, session)
        if state is None or state.grant is None:
            return
        self.losses.append(f"shard {shard} from {state.grant.worker}: {why}")
        self._effects += [Close(shard, session), EndLease(state.request, shard, True)]
        state.peer, state.grant, state.reading = state.grant.worker, None, False
        self._avoid[session] = None
        if state.missing is not None and not state.missing:
            if self.verify:  # every byte had arrived intact: nothing is lost with the source
                self._complete_if_done()
                return
            state.missing = None  # without digests nothing counts before the epoch was checked
        if self._ask_at is None:  # one question for all shards that are lost together
            self._ask_at = now + backoff_s(self._retries)

    def _current(self, shard: int, session: bytes) -> _Shard | None:
        """The shard's state, if this is still its source: words of a source that was left are ignored."""
        state = self.shards.get(shard)
        return state if state is not None and state.grant is not None and state.grant.session == session else None

    def _drop_all(self) -> None:
        for shard, state in self.shards.items():
            if state.grant is not None:
                self._effects += [Close(shard, state.grant.session), EndLease(state.request, shard, False)]
                state.grant = None

    def _give_up(self, error: errors.TensorHubError) -> None:
        self._drop_all()
        self.finished = True
        self._effects.append(GiveUp(error))

    def _too_late(self) -> errors.TensorHubError:
        version, deadline_s = self.version or None, self.deadline_s
        if not self.shards and self._asking:
            return errors.HubUnreachable(
                "the hub did not answer a request for sources",
                version=version,
                phase="find sources",
                deadline_s=deadline_s,
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
            deadline_s=deadline_s,
        )

    def _with_losses(self, text: str) -> str:
        return f"{text}; lost on the way: {'; '.join(self.losses[-LOSSES_SHOWN_MAX:])}" if self.losses else text

    def _peers(self) -> str | None:
        """Whom we wait for, or waited for in vain."""
        missing = [s for s in self.shards.values() if not s.is_done]
        return ", ".join(sorted({s.grant.worker if s.grant else s.peer for s in missing} - {""})) or None


def backoff_s(retries: int) -> float:
    """How long to wait before the next question after so many without progress: the first one is for free."""
    if not retries:
        return 0.0
    return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(retries - 1, 16))


def refusal(
    refused: m.Refused,
    *,
    version: int | None = None,
    peer: str | None = None,
    phase: str | None = None,
    deadline_s: float | None = None,
) -> errors.TensorHubError:
    """The hub's refusal as the error class it names."""
    known = {
        cls.__name__: cls
        for cls in (errors.NotPublished, errors.VersionGone, errors.UsageError, errors.DeadlineExceeded)
    }
    cls = known.get(refused.error, errors.ProtocolError)
    return cls(refused.message, version=version, peer=peer, phase=phase, deadline_s=deadline_s)
