"""The client's protocol state. PURE: events in, effects out, `now` as an argument.

It numbers requests, sends them again when they or their answers were lost, sends heartbeats, and remembers all that a
restarted hub must be told: what this worker holds, reads, and has claimed to convert, and what operators have decided.
The workers have the authoritative state; the hub only has a copy (rule 6).

What it holds here and what is on the shelf are two records. This one is what the hub has been asked to know: it changes
with each request and answer, so that no Hello repeats what the hub has just refused or released. The shelf is what
readers get: it changes when they have been disconnected. At rest the two name the same shards.

A deadline that passes without the hub's answer
    Publish: it is withdrawn, unless the shard was announced before (it arrives, and is here whatever the hub says).
    Unpublish: the copy is retained, as if the hub had said so, because it may be the last one (rule 4); MayRelease
    follows when the hub is heard again. Only shards that are `gone` are reported to the hub until it has answered.

An expired request has no effect later
    Every request that changes something says until when it is valid, on the hub's clock, and the hub drops what it
    receives after that, or what was sent to a previous hub: a request may wait in a buffer while the hub is stopped or
    the link is cut. What was dropped too soon is sent again at the next heartbeat. We know the hub's clock from its
    last message, which takes time to get here, so that we estimate it too early, never too late. Among unanswered
    requests a Hello puts only the shards of Publishes into effect, and it says until when it may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core.client.asked import Asked, Read
from tensorhub_plugins.core.deadline import bounded, remaining_s
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive, directive_checksum, merge
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.types import RECENT_S, ShardKey

HELLO_EVERY_S = 0.5
HUB_QUIET_S = 2.0  # two heartbeats without an answer: a request that has none has not reached it
HUB_SILENT_S = 5.0  # five heartbeats without an answer: report that the hub is away
REDIAL_S = 20.0  # without a message: the connection may be half-open, or lead to where the hub was
REDIAL_SEVERAL_S = 5.0  # the same where the hub may be at several addresses
ANSWER_MARGIN_S = 0.4  # beyond a request's own deadline, for the hub's refusal, which explains more
FORMER_HUBS_MAX = 64
DRIFT_MAX = 1e-3  # of two clocks, per second: NTP slews each by at most half of that

Request: TypeAlias = m.Request

# --- events ---


class Ask(msgspec.Struct, frozen=True):
    """Send this request (its number from `Session.next_request_id`), to be answered by `deadline`, on `now`'s clock."""

    message: Request
    deadline: float


class Heard(msgspec.Struct, frozen=True):
    """A message from the hub has arrived."""

    message: m.HubMessage


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: check the timers."""


Event: TypeAlias = Ask | m.Release | Heard | Tick  # a Release cancels its Acquire, if that is unanswered

# --- effects ---


class Send(msgspec.Struct, frozen=True):
    """Send this to the hub."""

    message: m.ClientMessage


class Answered(msgspec.Struct, frozen=True):
    """The request with this number has its answer; it is not sent again."""

    request_id: int
    reply: m.Reply


class Expired(msgspec.Struct, frozen=True):
    """No answer by the deadline. hub_silent: because no hub answers at all. was_sent: it may have been carried out, and
    the answer was lost; from now on it will not be."""

    request_id: int
    hub_silent: bool
    was_sent: bool = False


class SourceGone(msgspec.Struct, frozen=True):
    """The hub knows that the worker of this session is gone: stop reading from it."""

    session: bytes


class MayRelease(msgspec.Struct, frozen=True):
    """Retained copies for which another unpublish may succeed."""

    keys: tuple[ShardKey, ...]


class Directed(msgspec.Struct, frozen=True):
    """Operators have decided something new, or a trainer has begun an attempt."""

    directive: Directive


class Doubted(msgspec.Struct, frozen=True):
    """A reader has reported that it got other bytes from us than were published."""

    key: ShardKey
    segments: tuple[int, ...]


class Disowned(msgspec.Struct, frozen=True):
    """The hub does not accept this shard, which a Hello has announced: no reader will be sent here for it."""

    key: ShardKey
    why: str
    was_published: bool


class HubAway(msgspec.Struct, frozen=True):
    """The hub has not been heard for `silent_s` seconds. Requests are kept until their deadlines."""

    silent_s: float


class Redial(msgspec.Struct, frozen=True):
    """After so long a silence try a new connection, to the next address if there are several."""


class HubBack(msgspec.Struct, frozen=True):
    """The hub is heard again. restarted: it had forgotten this worker, which has reported everything anew. former: it
    is one that another hub had replaced before: there are two."""

    restarted: bool
    former: bool = False


Effect: TypeAlias = (
    Send | Answered | Expired | SourceGone | MayRelease | Directed | Doubted | Disowned | HubAway | HubBack | Redial
)

# --- the machine ---


@dataclass
class Session:
    """The protocol state of one worker. `identity`: its Hello, without what changes; `now`: the time of creation."""

    identity: m.Hello
    now: float
    hub: bytes | None = None  # the incarnation of the hub that has welcomed us
    addressed: bytes = b""  # the one that we send Hello to: the last one known
    last_request_id: int = 0
    asked: dict[int, Asked] = field(default_factory=dict)
    leases: dict[int, Read] = field(default_factory=dict)
    holdings: dict[ShardKey, m.Holding] = field(default_factory=dict)
    offered: dict[ShardKey, int] = field(default_factory=dict)  # for each holding: its last Publish
    retained: set[ShardKey] = field(default_factory=set)  # for retention only
    claims: dict[ShardKey, bool] = field(default_factory=dict)  # whether others read it
    retain: m.Retain | None = None  # the last one that was answered
    retain_serial: int = 0  # of that one
    seen: int = 0  # the newest version that the hub has named
    resolved: int = 0  # our replica's "latest" in `generation`, the last one
    generation: int = 0
    directive: Directive = NO_DIRECTIVE
    mark: bytes = b""  # of the attempt that we have begun
    name_proof: bytes = b""  # a hub's proof that our name is ours
    heartbeat_s: float = 1.0
    redial_s: float = REDIAL_S
    room_bytes: int = 0  # for copies that others need; the shell keeps it up to date
    worked: int = 0  # pieces of work that this process has done; likewise
    lacks: str = ""  # what the system has refused it lately; likewise
    unreached: tuple[bytes, ...] = ()  # sources that could not be connected to; likewise
    leaving: bool = False  # what we hold is about to go
    gate: Gate | None = None  # records which leases on us were used

    def __post_init__(self) -> None:
        self._welcomed = False
        self._former_hubs: dict[bytes, float] = {}  # that had welcomed us -> when another one did; newest first
        self._clock: tuple[bytes, float] | None = None  # a hub, and the least lead of its clock on ours
        self._hello_first = 0  # the first Hello to `addressed` since the last Welcome
        self._retry_retained = False
        self.heard_at = self._dialed_at = self.now
        self._away = False
        self._next_hello = self.now
        self._next_heartbeat = self.now
        self._effects: list[Effect] = []

    def next_request_id(self) -> int:
        """Return a number that no request has had."""
        self.last_request_id += 1
        return self.last_request_id

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time `now` (seconds of a monotonic clock); return what the shell is to do, in order."""
        self._effects = []
        match event:
            case Ask(message, deadline):
                self._ask(message, deadline, now)
            case m.Release():
                self._end_lease(event)
            case Heard(message):
                self._hear(message, now)
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)
        return self._effects

    def renew(self, came: Mapping[int, int]) -> None:
        """Note how many bytes have come under the lease of each request, for the next heartbeat; that none have is
        progress, too."""
        for request_id in came.keys() & self.leases.keys():
            lease = self.leases[request_id]
            lease.progress = max(lease.progress + 1, came[request_id])

    def leave(self, now: float) -> None:
        """Note that what we hold is about to go: the hub is notified with the next Tick."""
        self.leaving, self._next_heartbeat = True, now

    def is_heartbeat_due(self, now: float) -> bool:
        """Return whether a Tick at `now` sends a heartbeat, and so what the shell keeps up to date."""
        return self._welcomed and now >= self._next_heartbeat

    def next_deadline(self) -> float:
        """Return when the next Tick is due."""
        due = self._next_heartbeat if self._welcomed else self._next_hello
        return min([due, *(a.deadline + ANSWER_MARGIN_S for a in self.asked.values())])

    def _ask(self, message: Request, deadline: float, now: float) -> None:
        announced = False
        if isinstance(message, m.Publish):
            announced = message.holding.key in self.holdings
            self.holdings[message.holding.key] = message.holding
            self.offered[message.holding.key] = message.request_id
        elif isinstance(message, m.Unpublish) and message.gone:
            deadline = float("inf")
            for key in message.keys:
                self._drop(key)
            for overtaken in self._publishing(message):
                del self.asked[overtaken]
                self._effects.append(Answered(overtaken, self._overtaken(overtaken, message.keys)))
        self.asked[message.request_id] = Asked(message, deadline, now, announced)
        self._send_asked(message.request_id, now)

    def _send_asked(self, request_id: int, now: float) -> None:
        """Send a request, unless no hub listens, or another one has to be answered first."""
        asked = self.asked[request_id]
        if self._welcomed and not (isinstance(asked.message, m.Unpublish) and self._publishing(asked.message)):
            asked.was_sent = True
            self._send(self._dated(request_id, now))

    def _publishing(self, message: m.Unpublish) -> list[int]:
        """Return the unanswered Publishes of the shards of this Unpublish: the hub must know of them first."""
        return [
            request_id
            for request_id, asked in self.asked.items()
            if isinstance(asked.message, m.Publish)
            and asked.message.holding.key in message.keys
            and request_id < message.request_id
        ]

    def _overtaken(self, request_id: int, keys: tuple[ShardKey, ...]) -> m.Reply:
        """Return the answer to a Publish of what is gone: perhaps because a newer attempt has just begun."""
        if not any(self.directive.is_over(key.version) for key in keys):
            return m.Done(request_id)
        return m.Refused(request_id, "Superseded", "a newer attempt of the trainer has begun: end this process")

    def _dated(self, request_id: int, now: float) -> Request:
        """Return the request with the seconds that are left of its deadline, and until when it is valid."""
        asked = self.asked[request_id]
        dated = asked.message
        if isinstance(dated, m.Dated):
            dated = msgspec.structs.replace(dated, until=self._until(asked.deadline, now))
        if isinstance(dated, m.Acquire | m.Unpublish | m.Wait | m.Target | m.Pin | m.Withdraw | m.Begin):
            dated = msgspec.structs.replace(dated, timeout_s=bounded(remaining_s(asked.deadline, now)))
        return dated

    def _until(self, deadline: float, now: float) -> m.Until | None:
        """Return when a request is abandoned, or slightly earlier, on the hub's clock; None: never, or its clock is not
        known, as the hub is older than that field."""
        if self._clock is None or deadline == float("inf"):
            return None
        hub, lead = self._clock
        given_up = deadline + ANSWER_MARGIN_S
        return m.Until(hub, given_up + lead - DRIFT_MAX * remaining_s(given_up, now))

    def _hear_clock(self, hub: bytes, clock: float, now: float) -> None:
        """Take this hub's clock, read at `now` or before. The last reading counts: a delayed one only makes our
        estimate too early, and after its machine stood still a hub's clock is different."""
        if clock:
            self._clock = hub, clock - now

    def _end_lease(self, ended: m.Release) -> None:
        request_id, shard = ended.request_id, ended.shard
        self.asked.pop(request_id, None)
        lease = self.leases.get(request_id)
        if lease is not None:
            if shard is not None:
                lease.sources.pop(shard, None)
            if shard is None or not lease.sources:
                del self.leases[request_id]
        if self._welcomed:
            self._send(ended)

    def _hear(self, message: m.HubMessage, now: float) -> None:
        self.heard_at = now
        match message:
            case m.Welcome():
                self._welcome(message, now)
            case m.Unknown(hub, clock):
                self._hear_clock(hub, clock, now)
                if self._welcomed or hub != self.addressed:
                    self._hello_to(hub, now)
            case m.Alive():
                self._hub_lives(message, now)
            case m.SourceGone(session):
                self._effects.append(SourceGone(session))
            case m.MayRelease(keys):
                wanted = tuple(key for key in keys if key in self.retained)
                if wanted:
                    self._effects.append(MayRelease(wanted))
            case _:
                # While not welcome we have just sent a Hello with everything, and will repeat all that is unanswered:
                # an answer to an earlier message would contradict that Hello.
                # So would one of a previous hub: this hub is asked again, and may begin another attempt.
                late = isinstance(message, m.Granted | m.Begun) and message.hub not in (b"", self.hub)
                if (self._welcomed and not late) or message.request_id == 0:
                    self._answered(message, now)

    def _welcome(self, welcome: m.Welcome, now: float) -> None:
        hub = welcome.hub
        self._direct(welcome.directive)
        if self._welcomed or welcome.request_id < self._hello_first:
            return  # duplicated or late: it answers an older Hello, perhaps an older hub's
        if self.addressed not in (b"", hub):
            self._hello_to(hub, now)  # it ignored the Hello's addressee, or is a previous hub's
            return
        restarted = self.hub is not None and hub != self.hub
        if self._away or restarted:
            self._away = False
            self._effects.append(HubBack(restarted, restarted and hub in self._former_hubs))
        if restarted and self.hub is not None:
            self._former_hubs = {self.hub: now, **dict(list(self._former_hubs.items())[: FORMER_HUBS_MAX - 1])}
        for key, why in welcome.not_held:
            self._disown(key, why)
        self.hub, self.addressed, self._welcomed = hub, hub, True
        self._hear_clock(hub, welcome.clock, now)
        self._pace(welcome.heartbeat_s, now)
        for request_id in list(self.asked):
            self._send_asked(request_id, now)
        self._retry_retained = True

    def _pace(self, heartbeat_s: float, now: float) -> None:
        """Send a heartbeat so often from now on, as the hub wishes, which may have tens of thousands of workers."""
        self.heartbeat_s = heartbeat_s
        self._next_heartbeat = min(self._next_heartbeat, now + heartbeat_s)

    @property
    def _late_s(self) -> float:
        """Return how much later than after a second an answer of the hub may come, for each heartbeat."""
        return max(0.0, self.heartbeat_s - 1.0)

    def _disown(self, key: ShardKey, why: str) -> None:
        """Drop a holding that the hub refuses, unless a Publish of it is unanswered, whose answer will tell."""
        held = self.holdings.get(key)
        publishes = (a.message for a in self.asked.values() if isinstance(a.message, m.Publish))
        if held is not None and not any(publish.holding.key == key for publish in publishes):
            self._drop(key)
            self._effects.append(Disowned(key, why, held.origin == "published"))

    def _hub_lives(self, alive: m.Alive, now: float) -> None:
        """Handle the answer to a heartbeat: send what the hub has missed."""
        directive = alive.directive
        if self._welcomed and alive.hub == self.hub:
            self._hear_clock(alive.hub, alive.clock, now)
        if alive.heartbeat_s:
            self._pace(alive.heartbeat_s, now)
        self.name_proof = alive.name_proof or self.name_proof
        if alive.doubted is not None:
            self._effects.append(Doubted(*alive.doubted))
        if self._away:
            self._away = False
            self._effects.append(HubBack(False))
        if directive is not None and not self._direct(directive) and self._welcomed:
            self._hello_to(self.addressed, now)  # it does not know all that we do
        for request_id in alive.resend:
            if request_id in self.asked:
                self._send_asked(request_id, now)
        if self._retry_retained:
            self._retry_retained = False
            if self.retained:
                self._effects.append(MayRelease(tuple(sorted(self.retained))))

    def _hello_to(self, hub: bytes, now: float) -> None:
        """Send a Hello to this incarnation of the hub, which does not know all of us that it should."""
        self.addressed, self._welcomed = hub, False
        self._hello_first = self.last_request_id + 1
        self._hello(now)

    def _direct(self, directive: Directive) -> bool:
        """Merge a directive; return whether it contains all that operators have decided, as far as we know."""
        merged = merge(self.directive, directive)
        if merged != self.directive:
            self.directive = merged
            self._has_seen(0)
            self._effects.append(Directed(merged))
        return merged == directive

    def _has_seen(self, version: int) -> None:
        """Note a version that was seen, and forget one that is over: nothing has to be newer than that."""
        self.seen = max((n for n in (self.seen, version) if not self.directive.is_over(n)), default=0)

    def _answered(self, reply: m.Reply, now: float) -> None:
        asked = self.asked.pop(reply.request_id, None)
        if asked is None:
            self._answered_in_vain(reply, now)
            return
        match asked.message, reply:
            case m.Publish(_, holding), m.Refused():
                self._drop(holding.key)
            case m.Publish(_, holding), _:
                self.claims.pop(holding.key, None)
            case m.Unpublish(request_id, keys, _), m.Unpublished(_, _, must_retain):
                self._unpublished(request_id, keys, must_retain=must_retain)
            case m.Abandon(_, key), _:
                self.claims.pop(key, None)
            case m.Acquire(), m.Granted():
                sources = {grant.shard: grant.session for grant in reply.grants}
                ends_at = float("inf") if asked.message.grows else asked.deadline
                self.leases[reply.request_id] = Read(reply.version, reply.layout, sources, ends_at, reply.shard_count)
                self._has_seen(0 if asked.message.for_others else reply.version)
                if reply.generation:
                    self.resolved, self.generation = reply.version, reply.generation
                if reply.claim is not None:
                    self.claims[reply.claim] = reply.awaited
            case m.Begin(), m.Begun(_, attempt):
                self.mark = attempt.mark
                self._direct(Directive(attempts=(attempt,)))
            case m.Wait() | m.Target(), m.Visible(_, version):
                self._has_seen(version)
            case m.Retain() as retain, m.Done(_, serial) if serial >= self.retain_serial:
                self.retain, self.retain_serial = retain, serial
        self._effects.append(Answered(reply.request_id, reply))
        if isinstance(asked.message, m.Publish):
            self._send_unblocked(asked.message.holding.key, now)

    def _answered_in_vain(self, reply: m.Reply, now: float) -> None:
        """Handle an answer for which no caller waits any more."""
        if isinstance(reply, m.Granted) and reply.request_id not in self.leases:
            self._send(m.Release(reply.request_id))
            if reply.claim is not None and reply.claim not in self.claims:
                request_id = self.next_request_id()
                self._ask(m.Abandon(request_id, reply.claim), now + ANSWER_MARGIN_S, now)
        elif reply.request_id == 0:  # a refused Hello answers no request
            self._effects.append(Answered(0, reply))

    def _unpublished(self, request_id: int, keys: Iterable[ShardKey], *, must_retain: bool) -> None:
        # A shard that was unpublished twice concurrently may have been read again after the first answer.
        for key in (key for key in keys if self.offered.get(key, 0) < request_id):
            if must_retain and key in self.holdings:
                self.retained.add(key)
            else:
                self._drop(key)

    def _drop(self, key: ShardKey) -> None:
        self.holdings.pop(key, None)
        self.offered.pop(key, None)
        self.retained.discard(key)

    def _send_unblocked(self, published: ShardKey, now: float) -> None:
        for request_id, asked in list(self.asked.items()):
            if isinstance(asked.message, m.Unpublish) and published in asked.message.keys:
                self._send_asked(request_id, now)

    def _tick(self, now: float) -> None:
        for request_id, asked in list(self.asked.items()):
            if now >= asked.deadline + ANSWER_MARGIN_S:
                self._expire(request_id, asked, now)
        for request_id in [r for r, lease in self.leases.items() if lease.deadline + ANSWER_MARGIN_S <= now]:
            del self.leases[request_id]
        if not self._away and now - self.heard_at > HUB_SILENT_S + 5 * self._late_s:
            self._away = True
            self._effects.append(HubAway(now - self.heard_at))
        if now - max(self.heard_at, self._dialed_at) > self.redial_s + 2 * self._late_s:
            self._dialed_at = now
            self._effects.append(Redial())
        if not self._welcomed:
            if now >= self._next_hello:
                self._hello(now)
        elif self.is_heartbeat_due(now):
            self._beat(now)

    def _expire(self, request_id: int, asked: Asked, now: float) -> None:
        """End a request whose deadline has passed without an answer."""
        del self.asked[request_id]
        match asked.message:
            case m.Publish(_, holding):
                if not asked.announced and self.holdings.get(holding.key) is holding:
                    self._ask(m.Unpublish(self.next_request_id(), (holding.key,), 0.0, gone=True), now, now)
                self._send_unblocked(holding.key, now)
            case m.Unpublish(_, keys, _):
                self.retained.update(key for key in keys if 0 < self.offered.get(key, 0) < request_id)
                self._retry_retained = True
            case m.Abandon(_, key):
                self.claims.pop(key, None)
            case m.Acquire():
                if self._welcomed:
                    self._send(m.Release(request_id))
        is_silent = self.heard_at <= asked.asked_at or now - self.heard_at > HUB_QUIET_S + 2 * self._late_s
        self._effects.append(Expired(request_id, is_silent, asked.was_sent))

    def _beat(self, now: float) -> None:
        self._next_heartbeat = now + self.heartbeat_s
        held = {r: lease for r, lease in self.leases.items() if lease.deadline > now}
        assert self.hub is not None
        changing = any(isinstance(asked.message, m.Publish | m.Unpublish) for asked in self.asked.values())
        checksum = 0 if changing else m.holdings_checksum((key, h.complete) for key, h in self.holdings.items())
        self._send(
            m.Heartbeat(
                self.hub,
                self.last_request_id,
                pending=tuple(self.asked),
                leases={r: len(lease.sources) for r, lease in held.items()},
                holdings_checksum=checksum,
                directive_checksum=directive_checksum(self.directive),
                progress={r: lease.progress for r, lease in held.items()},
                room_bytes=self.room_bytes,
                leaving=self.leaving,
                served=None if self.gate is None else self.gate.take_served(),
                unreached=self.unreached,
                worked=self.worked,
                lacks=self.lacks,
                heartbeat_s=self.heartbeat_s,
            )
        )

    def _hello(self, now: float) -> None:
        self._next_hello = now + HELLO_EVERY_S
        self._settle_unpublishes()
        announced = [asked for asked in self.asked.values() if self._is_announced_by_hello(asked)]
        for asked in announced:
            asked.was_sent = True
        self._send(
            msgspec.structs.replace(
                self.identity,
                holdings=tuple(self.holdings.values()),
                leases=tuple(
                    m.HeldLease(
                        request_id,
                        lease.version,
                        lease.layout,
                        dict(lease.sources),
                        bounded(remaining_s(lease.deadline, now)),
                        lease.shard_count,
                    )
                    for request_id, lease in self.leases.items()
                ),
                claims=tuple(self.claims),
                retain_newest=None if self.retain is None else self.retain.newest,
                retain_domains=1 if self.retain is None else self.retain.domains,
                retain_across="host" if self.retain is None else self.retain.across,
                retain_serial=self.retain_serial,
                retain_also=0 if self.retain is None else self.retain.also,
                request_id=self.next_request_id(),
                pending=tuple(self.asked),
                seen=self.seen,
                resolved=self.resolved,
                generation=self.generation,
                directive=self.directive,
                hub=self.addressed,
                mark=self.mark,
                welcomed=self.hub or b"",
                restarts=sum(now - at < RECENT_S for at in self._former_hubs.values()),
                heartbeat_s=self.heartbeat_s if self.hub else 0.0,
                name_proof=self.name_proof,
                until=self._until(min((asked.deadline for asked in announced), default=float("inf")), now),
            )
        )

    def _is_announced_by_hello(self, asked: Asked) -> bool:
        """Return whether this is a Publish without effect so far, which a Hello would put into effect."""
        message = asked.message
        return isinstance(message, m.Publish) and not asked.announced and message.holding.key in self.holdings

    def _settle_unpublishes(self) -> None:
        """Settle unpublishes, which a Hello with all holdings carries out; what was offered again meanwhile stays. Sent
        again after it, an Unpublish would withdraw what the Hello has just announced."""
        for request_id, asked in list(self.asked.items()):
            if not isinstance(asked.message, m.Unpublish):
                continue
            keys = tuple(key for key in asked.message.keys if 0 < self.offered.get(key, 0) < request_id)
            if keys:
                asked.message = msgspec.structs.replace(asked.message, keys=keys)
            else:
                del self.asked[request_id]
                self._effects.append(Answered(request_id, m.Unpublished(request_id)))

    def _send(self, message: m.ClientMessage) -> None:
        self._effects.append(Send(message))
