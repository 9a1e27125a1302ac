"""The reference server's state machine. PURE: `handle(event, now)` returns what to send; no clock, socket or thread.

What it knows
    Workers (one session each), the shards they hold, the leases under which they read each other, and who waits
    for what. Never a weight byte. All of it is soft: the Hello of every worker rebuilds a restarted hub (rule 6).

The rules it keeps (numbers as in the design)
    1  A holding that is being unpublished gets no new lease; its unpublish is answered when its last lease has
       ended or at its deadline, when the leases that are left are ended and named in the answer.
    2  A version becomes visible when one replica holds all its shards. "latest" is resolved once per reading
       replica and never below what the reader has seen; but an operator's word counts more, see below.
    3  A holding may be incomplete and still be read (pipelining), but never in a circle: what a reader reads from must
       not, over any number of steps, read from that reader.
    4  The last copy of a retained version is not given up: its holder is told to keep it, and later when to drop it.
    5  Every pending request has a deadline and ends in a reply.
    6  In the first `GRACE` after its start the hub says nothing that depends on having heard everybody: it confirms no
       unpublish, declares no version gone, elects no converter and gives no directive.

What operators decide
    A *pinned* version is "latest" as long as the pin stands, also for readers that have seen newer ones, and it is
    retained; newer ones become visible meanwhile and nobody follows them. A *withdrawn* version is not visible any
    more: nobody is lent it, and a reader that has seen it may go back. One that reads it is told to stop, and its
    lease ends with its own word, because until then it reads. Both are in the history's directive (messages.py), which
    every worker keeps and announces. A follower asks for its `Target`; it goes back only if one of the two says so.

Who converts
    Engines want their own runtime layout, trainers publish the checkpoint layout. A reader that asks for (runtime,
    checkpoint) gets runtime if anybody has it, waits if somebody has claimed to make it, and else makes the claim
    itself: it gets the checkpoint and is expected to publish the runtime layout. A claim ends with that publication,
    when it is abandoned, when its holder is lost, or at its deadline; then the next waiting reader makes it.

Where to read on
    `handle` takes one event, changes the books, and then settles: answers whatever has become possible. The way of one
    version is `_publish`, `_hold`, `_settle`, `_try_acquire`, `_grant`, `_choose`. state.py has the records,
    registry.py keeps their indexes in step, selection.py compares sources, report.py states what is true between any
    two calls of `handle`, in which all changes happen.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core.hub.registry import ANY, Books
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.selection import (
    Verdict,
)
from tensorhub_plugins.core.hub.state import Claim, History, Holding, Latest, Lease, Pending, Timed, Version, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    FAR,
    ShardKey,
    distance,
)

HEARTBEAT_S = 1.0
SESSION_TIMEOUT_S = 15.0  # a worker whose interpreter is held by one long kernel launch or compile must not be given up
GRACE_S = 3.0  # three heartbeats: every live worker has said Hello again by then
CLAIM_S = 120.0  # reading and converting the largest models takes less; a dead converter is noticed much sooner
READERS_PER_SOURCE_MAX = 16  # beyond that one source's link is shared so thinly that waiting for a peer is faster
UPLINK_READERS_MAX = 32  # leases that cross into one data centre: as many as a large model has shards
TIMER_STEP_S = 0.005  # deadlines are kept as exactly as that
FRUITLESS_MAX = 4  # of readers that wait for the same: when so many cannot be served, nor can the rest
PENDING_PER_SESSION_MAX = 256
REPLIES_KEPT_MAX = 256  # per session, for requests that are sent again
WITHDRAWN_KEPT_MAX = 256  # per session: shards whose late Publish must not bring them back
HOLDINGS_PER_SESSION_MAX = 65536
VERSIONS_LISTED_MAX = 16  # in one sentence


# --- events and effects ---


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message from the worker whose session (ZeroMQ identity) this is."""

    session: bytes
    message: m.ClientMessage


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed."""


class Send(msgspec.Struct, frozen=True, gc=False):
    session: bytes
    message: m.HubMessage


class Log(msgspec.Struct, frozen=True, gc=False):
    """Something a person may want to know."""

    text: str


Event: TypeAlias = Received | Tick
Effect: TypeAlias = Send | Log


class Hub(Books):
    """One hub. `hub_session` is its life's identity, sent in every Welcome; `now` is seconds on any steady clock."""

    def __init__(self, hub_session: bytes, now: float) -> None:
        super().__init__(hub_session, now)
        self._effects: list[Effect] = []
        self._at(now + GRACE_S, None)

    # --- the one mutator ---

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._effects = []
        match event:
            case Received(session, message):
                self._receive(session, message, now)
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)
        while self._dirty:
            _, history = self._dirty.popitem()
            self._settle(history, now)
        return self._effects

    def next_deadline(self, now: float) -> float:
        """When the next Tick is due at the latest."""
        due = self._timers[0][0] if self._timers else now + HEARTBEAT_S
        return min(max(due, now + TIMER_STEP_S), now + HEARTBEAT_S)

    def _ring(self, thing: Timed, now: float) -> None:
        match thing:
            case Worker():
                if now - thing.last_heard > SESSION_TIMEOUT_S:
                    self._forget(thing, f"not heard for {SESSION_TIMEOUT_S:g} s", now)
                else:
                    self._at(thing.last_heard + SESSION_TIMEOUT_S + TIMER_STEP_S, thing)
            case Lease():
                self._end_lease(thing)
            case Pending():
                self._look_at(thing)
            case Claim():
                self._effects.append(Log(f"{thing.worker.name}: claim to convert {thing.key} has expired"))
                del thing.version.claims[thing.key]
                self._change(thing.worker.history, thing.version.number, room=True)
            case None:  # everybody has had time to say Hello
                for history in self.histories.values():
                    for pending in history.waiting.values():
                        self._look_at(pending)
                    for number in history.versions:
                        self._change(history, number, room=True)
            case _:
                assert_never(thing)

    def recovering(self, now: float) -> bool:
        """Within the time in which not everybody may have said Hello yet (rule 6)."""
        return now < self.started + GRACE_S

    # --- messages ---

    def _receive(self, session: bytes, message: m.ClientMessage, now: float) -> None:
        if isinstance(message, m.AskStatus):  # for people, who have no session
            self._send(session, m.Status(message.request_id, report(self, now)))
            return
        worker = self.workers.get(session)
        if isinstance(message, m.Hello):
            self._hello(session, message, worker, now)
            return
        if worker is None:
            if not isinstance(message, m.Bye):
                self._send(session, m.Unknown())
            return
        worker.last_heard, worker.suspect = now, False
        match message:
            case m.Heartbeat():
                self._heartbeat(worker, message, now)
                return
            case m.Bye():
                self._forget(worker, "left", now)
                return
            case m.Release(request_id, shard, lost):
                self._release(worker, request_id, shard, lost)
                return
            case _:
                pass
        if message.request_id <= worker.hello.request_id and message.request_id not in worker.hello.pending:
            return  # from before its last Hello, and over
        worker.sequence = max(worker.sequence, message.request_id)
        if self._answer_again(worker, message.request_id):  # the first answer was lost
            return
        if message.request_id in worker.pending:
            return
        if len(worker.pending) >= PENDING_PER_SESSION_MAX:
            self._refuse(
                worker, message.request_id, "UsageError", f"more than {PENDING_PER_SESSION_MAX} requests pending"
            )
            return
        match message:
            case m.Publish(request, holding):
                self._publish(worker, request, holding)
            case m.Acquire() | m.Unpublish() | m.Wait() | m.Target() | m.Pin() | m.Withdraw():
                self._wait(worker, message, now)
            case m.Abandon(request, key):
                self._end_claim(worker, key)
                self._reply(worker, m.Done(request))
            case m.Retain(request, newest):
                worker.history.retain_newest = newest
                self._reply(worker, m.Done(request))
            case m.AskVersions(request):
                self._reply(worker, m.Versions(request, worker.history.version_infos()))
            case _:
                assert_never(message)

    def _heartbeat(self, worker: Worker, heartbeat: m.Heartbeat, now: float) -> None:
        """Make up for what was lost on the way, in either direction."""
        if heartbeat.hub != self.session:  # it has not heard of us: all we have is a Hello that came late
            self._send(worker.session, m.Unknown())
            return
        if heartbeat.last_request_id >= worker.sequence and not self._agrees(worker, heartbeat):
            self._send(worker.session, m.Unknown())  # its Hello will say
        worker.sequence = max(worker.sequence, heartbeat.last_request_id)
        unseen = []
        for request in heartbeat.pending:
            if not self._answer_again(worker, request) and request not in worker.pending:
                unseen.append(request)
        for lease in list(worker.leases.values()):
            if lease.request_id <= heartbeat.last_request_id and lease.request_id not in (
                *heartbeat.pending,
                *heartbeat.leases,
            ):
                self._end_lease(lease)
        history = worker.history
        knows = heartbeat.directive_checksum in (0, history.directive_checksum)
        self._send(worker.session, m.Alive(tuple(unseen), None if knows else history.directive))
        if not self.recovering(now):
            kept = [h for h in worker.holdings.values() if h.must_retain]
            spare = tuple(h.key for h in kept if not self._is_last_copy(worker.history, h, [h]))
            if spare:
                self._send(worker.session, m.MayRelease(spare))

    @staticmethod
    def _agrees(worker: Worker, heartbeat: m.Heartbeat) -> bool:
        """Whether we know what it holds and how it reads; an answer of ours or of a former hub may have crossed."""
        leases = {r: len(worker.leases[r].sources) for r in heartbeat.leases if r in worker.leases}
        if heartbeat.holdings_checksum and not worker.holdings_checksum:
            worker.holdings_checksum = m.holdings_checksum((key, h.complete) for key, h in worker.holdings.items())
        return leases == heartbeat.leases and heartbeat.holdings_checksum in (0, worker.holdings_checksum)

    def _hello(self, session: bytes, hello: m.Hello, known: Worker | None, now: float) -> None:
        if hello.shard >= hello.shard_count:
            self._refuse_session(session, f"shard {hello.shard} of {hello.shard_count}: shards count from 0")
            return
        key = (hello.run, hello.model)
        history = self.histories.setdefault(key, History(hello.run, hello.model))
        if known is not None and known.history is history:
            known.last_heard, known.suspect = now, False
            if hello.request_id <= known.sequence:  # delayed or doubled on the way: we know better
                return
            known.hello = hello
            worker = known
            self._forget_what_is_not_in(hello, worker)
        else:
            if known is not None:
                self._forget(known, "joined another run", now)
            worker = Worker(session, hello, history, now)
            self._join(worker)
            self._recall_group(worker)
        worker.sequence = hello.request_id
        worker.seen_version = max(worker.seen_version, hello.seen)
        if hello.retain_newest is not None:
            history.retain_newest = hello.retain_newest
        self._direct(history, m.merge(history.directive, hello.directive), welcomed=session)
        for announced in hello.holdings:
            if worker.withdrawn.get(announced.key) in hello.pending:
                continue  # withdrawn, and the answer that says so is on its way or will be sent again
            problem = self._hold(worker, announced, hello.request_id)
            if problem:
                self._effects.append(Log(f"{worker.name}: {problem}"))
        for held in hello.leases:
            if held.sources:
                lease = Lease(
                    worker,
                    held.request_id,
                    held.version,
                    held.layout,
                    held.shard_count,
                    dict(held.sources),
                    now + held.seconds_left,
                )
                self._lease(lease)
        for claimed in hello.claims:
            version = history.versions.setdefault(claimed.version, Version(claimed.version))
            if claimed not in version.claims:
                self._claim(version, worker, claimed, now)
        for each in history.replicas[hello.replica].values():  # its group may be complete now
            for pending in each.pending.values():
                self._look_at(pending)
        welcome = m.Welcome(self.session, HEARTBEAT_S, SESSION_TIMEOUT_S, hello.request_id, history.directive)
        self._send(session, welcome)

    def _join(self, worker: Worker) -> None:
        session, hello, history = worker.session, worker.hello, worker.history
        for other in history.replicas.get(hello.replica, {}).values():
            if other.hello.shard == hello.shard:  # the replica starts again: so do its rounds
                history.latest[hello.replica].version = 0
                for pending in list(other.pending.values()):  # what its former life asked is not its round
                    self._forget_pending(pending)
        for lease in history.leases_on_strangers.pop(session, {}).values():
            self._count_reader(worker, lease, 1)
        self.workers[session] = worker
        history.workers[session] = worker
        history.replicas.setdefault(hello.replica, {})[session] = worker
        history.latest.setdefault(hello.replica, Latest())
        self._at(worker.last_heard + SESSION_TIMEOUT_S + TIMER_STEP_S, worker)

    def _forget_what_is_not_in(self, hello: m.Hello, worker: Worker) -> None:
        announced = {holding.key for holding in hello.holdings}
        for holding in [h for key, h in worker.holdings.items() if key not in announced]:
            self._drop(holding)
        for lease in list(worker.leases.values()):
            if lease.request_id not in hello.pending:
                self._end_lease(lease)
        for pending in [p for request, p in worker.pending.items() if request not in hello.pending]:
            self._forget_pending(pending)  # it has had its answer, from a hub before us

    def _recall_group(self, worker: Worker) -> None:
        """What was agreed on before a hub's restart is agreed on after it."""
        hello, latest = worker.hello, worker.history.latest[worker.hello.replica]
        if hello.generation > latest.generation:
            latest.generation, latest.version, latest.told = hello.generation, hello.resolved, {hello.shard}
        elif hello.generation == latest.generation:
            latest.told.add(hello.shard)
        else:
            latest.told.discard(hello.shard)  # it never heard the answer, and asks again

    def _publish(self, worker: Worker, request: int, holding: m.Holding) -> None:
        if request < worker.withdrawn.get(holding.key, 0):  # overtaken on the way by its own Unpublish
            self._reply(worker, m.Done(request))
            return
        problem = self._cannot_be_new(worker, holding) or self._hold(worker, holding, request, request)
        if problem:
            self._refuse(worker, request, "UsageError", problem)
        else:
            self._end_claim(worker, holding.key)
            self._reply(worker, m.Done(request))

    @staticmethod
    def _cannot_be_new(worker: Worker, holding: m.Holding) -> str | None:
        """A worker that has just read a withdrawn version holds it, and says so; but nobody begins to offer one."""
        number = holding.key.version
        if number not in worker.history.withdrawn or holding.origin == "replicated" or holding.key in worker.holdings:
            return None
        return (
            f"version {number} was withdrawn and cannot be published again: publish under a higher number, or under "
            "another run name when a run starts again"
        )

    def _wait(
        self,
        worker: Worker,
        message: m.Acquire | m.Unpublish | m.Wait | m.Target | m.Pin | m.Withdraw,
        now: float,
    ) -> None:
        self._arrivals += 1
        pending = Pending(worker, message, now + message.timeout_s, self._arrivals)
        worker.pending[message.request_id] = pending
        worker.history.waiting[worker.session, message.request_id] = pending
        self._at(pending.deadline, pending)
        self._look_at(pending)
        if isinstance(message, m.Unpublish):
            for held in self._given_up(worker, message):
                held.unpublishing, held.must_retain = message.request_id, False
                worker.history.versions[held.key.version].may_be_lost = True
                self._reconsider(worker, held.key)

    # --- holdings ---

    def _hold(self, worker: Worker, announced: m.Holding, sequence: int, offered: int = 0) -> str | None:
        """Record a holding; return what is wrong with it, if anything."""
        key = announced.key
        if key.version < 1 or key.shard >= key.shard_count:
            return f"no such shard: {key}"
        if len(worker.holdings) >= HOLDINGS_PER_SESSION_MAX and key not in worker.holdings:
            return f"more than {HOLDINGS_PER_SESSION_MAX} shards held by one worker"
        history = worker.history
        version = history.versions.setdefault(key.version, Version(key.version))
        root, _ = version.contents.setdefault(
            (key.layout, key.shard_count, key.shard), (announced.root, announced.size_bytes)
        )
        if root != announced.root:
            return (
                f"other bytes are already published as {key}: a version is never changed; use a higher version, or "
                "another run name when a run starts again"
            )
        mine = worker.holdings.get(key)
        worker.holdings_checksum = 0
        if mine is None:
            size_bytes, complete = announced.size_bytes, announced.complete
            mine = Holding(worker, key, root, size_bytes, complete, announced.origin, sequence, offered)
            worker.holdings[key] = mine
            by_shard = version.holdings.setdefault((key.layout, key.shard_count), {})
            by_shard.setdefault(key.shard, {})[worker.session] = mine
        else:
            mine.complete |= announced.complete
            mine.sequence = max(mine.sequence, sequence)
        if mine.complete:
            worker.depth.pop(key, None)
        self._reconsider(worker, key)
        if not mine.complete or version.visible or key.version in history.withdrawn:
            return None
        if mine.origin == "replicated" or self._replica_is_whole(version, worker, key):
            version.visible = True
            history.newest_visible = max(history.newest_visible, key.version)
            self._change(history, ANY, room=False)
            self._effects.append(Log(f"{history.run}/{history.model}: version {key.version} is visible"))
        return None

    def _replica_is_whole(self, version: Version, worker: Worker, key: ShardKey) -> bool:
        """Rule 2: whether worker's replica by itself holds every shard."""
        by_shard = version.holdings.get((key.layout, key.shard_count), {})
        return all(
            any(h.complete and h.worker.hello.replica == worker.hello.replica for h in by_shard.get(shard, {}).values())
            for shard in range(key.shard_count)
        )

    # --- leases ---

    def _release(self, worker: Worker, request: int, shard: int | None, lost: bool) -> None:
        pending = worker.pending.get(request)
        if pending is not None:  # the reader gave up before it was answered
            self._forget_pending(pending)
        lease = worker.leases.get(request)
        if lease is None or shard is None or set(lease.sources) <= {shard}:
            self._remember(worker, m.Done(request))  # its Acquire, if doubled or late on the way, must not begin again
        if lease is None:
            return
        for each in list(lease.sources) if shard is None else [shard]:
            source = self.workers.get(lease.sources.get(each, b""))
            if lost and source is not None:
                source.suspect = True
            self._end_lease_shard(lease, each)

    def _answer_again(self, worker: Worker, request: int) -> bool:
        reply = worker.replies.get(request)
        if reply is None:
            return False
        self._send(worker.session, reply)
        return True

    # --- the end of things ---

    def _tick(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, thing = heapq.heappop(self._timers)
            if self._is_alive(thing):
                self._ring(thing, now)

    def _forget(self, worker: Worker, why: str, now: float) -> None:
        history = worker.history
        self._effects.append(Log(f"{history.run}/{history.model}: {worker.name} {why}"))
        for lease in list(worker.leases.values()):
            self._end_lease(lease)
        for reader in {lease.reader.session: None for lease in worker.readers.values()}:
            if reader in self.workers and reader != worker.session:
                self._send(reader, m.SourceGone(worker.session))
        for pending in list(worker.pending.values()):
            self._forget_pending(pending)
        for holding in list(worker.holdings.values()):
            self._drop(holding)
        for lease in list(worker.readers.values()):  # announced after a restart for shards it never had
            for shard in [s for s, session in lease.sources.items() if session == worker.session]:
                self._end_lease_shard(lease, shard)
        for version in history.versions.values():
            for key in [key for key, claim in version.claims.items() if claim.worker is worker]:
                del version.claims[key]
                self._change(history, version.number, room=True)
        del self.workers[worker.session]
        del history.workers[worker.session]
        replica = history.replicas[worker.hello.replica]
        replica.pop(worker.session)
        if not replica:
            del history.replicas[worker.hello.replica]
            history.latest.pop(worker.hello.replica, None)
        for key in list(worker.depth):
            self._reconsider(worker, key)
        self._touch(history)

    def _claim(self, version: Version, worker: Worker, key: ShardKey, now: float) -> None:
        claim = version.claims[key] = Claim(worker, version, key, now + CLAIM_S)
        self._at(claim.deadline, claim)

    # --- settling: answer whatever can be answered now ---

    def _settle(self, history: History, now: float) -> None:
        # Unpublish first: it may keep the last copy of a version that would otherwise be declared lost.
        for pending in _in_order(history.due):
            if isinstance(pending.message, m.Unpublish):
                history.due.pop((pending.worker.session, pending.message.request_id), None)
                self._answer(pending, self._try_unpublish(pending, pending.message, now))
        while history.changed or history.due:
            changed, history.changed = history.changed, {}
            self._lose_versions(history, changed, now)
            due, history.due = history.due, {}
            for number in changed:
                if not history.is_visible(number):
                    for line in history.lines.get(number, {}).values():
                        due.update(line)
            for pending in _in_order(due):
                self._try(pending, now)
            for number, room in changed.items():
                if room and history.is_visible(number):
                    self._serve_lines(history, number, now)
            self._forget_old_versions(history, list(history.versions) if ANY in changed else changed)
        if not history.workers:
            self.histories.pop((history.run, history.model), None)

    def _serve_lines(self, history: History, number: int, now: float) -> None:
        for line in list(history.lines.get(number, {}).values()):
            fruitless = 0
            for pending in list(line.values()):
                fruitless += not self._try(pending, now)
                if fruitless >= FRUITLESS_MAX:
                    break

    def _try(self, pending: Pending, now: float) -> bool:
        """Answer a request if that can be done now."""
        key = (pending.worker.session, pending.message.request_id)
        if pending.worker.history.waiting.get(key) is not pending:
            return True
        match pending.message:
            case m.Unpublish():
                reply = self._try_unpublish(pending, pending.message, now)
            case m.Acquire():
                reply = self._try_acquire(pending, pending.message, now)
            case m.Wait():
                reply = self._try_wait(pending, pending.message, now)
            case m.Target():
                reply = self._try_target(pending, pending.message, now)
            case m.Pin() | m.Withdraw():
                reply = self._try_direct(pending, pending.message, now)
            case _:
                assert_never(pending.message)
        self._answer(pending, reply)
        if reply is None and not isinstance(pending.message, m.Unpublish):
            self._stand_in_line(pending)
        return reply is not None

    def _answer(self, pending: Pending, reply: m.Reply | None) -> None:
        if reply is not None:
            self._forget_pending(pending)
            self._reply(pending.worker, reply)

    def _lose_versions(self, history: History, numbers: Iterable[int], now: float) -> None:
        if self.recovering(now):
            return
        for number in numbers:
            version = history.versions.get(number)
            if version is None or not version.visible or not version.may_be_lost:
                continue
            version.may_be_lost = not version.is_held()
            if version.may_be_lost:
                version.visible = False
                self._change(history, ANY, room=False)
                if version.number == history.newest_visible:
                    self._effects.append(
                        Log(f"{history.run}/{history.model}: version {version.number} is lost with its last holder")
                    )

    def _try_wait(self, pending: Pending, wait: m.Wait, now: float) -> m.Reply | None:
        history = pending.worker.history
        number = self._latest(history, max(wait.newer_than + 1, history.floor(pending.worker.seen_version)))
        if number is not None and number <= wait.newer_than:  # pinned
            number = None
        if wait.version:
            version = history.versions.get(wait.version)
            number = wait.version if version is not None and version.visible else None
            if number is None and (wait.version in history.withdrawn or self._is_gone(history, wait.version, now)):
                return self._gone(wait.request_id, history, wait.version)
        if number is not None:
            pending.worker.seen_version = max(pending.worker.seen_version, number)
            return m.Visible(wait.request_id, number)
        if pending.deadline <= now:
            what = f"version {wait.version}" if wait.version else f"a version newer than {wait.newer_than}"
            return m.Refused(wait.request_id, "NotPublished", f"{what} was not published before the deadline")
        return None

    def _try_target(self, pending: Pending, target: m.Target, now: float) -> m.Reply | None:
        """What a follower is to run. It goes back to a pinned version, or from a withdrawn one, and never else."""
        history, installed = pending.worker.history, target.installed
        pin = history.directive.pin if target.pins else 0
        if pin:
            overruled = history.directive.serial > target.serial  # pinned after it was refused
            number = pin if history.is_visible(pin) and (pin not in target.refused or overruled) else None
        else:
            number = self._newest(history, history.floor(installed), target.refused)
            if number is not None and number < installed and self.recovering(now):
                number = None  # somebody who has not said Hello yet may hold a newer one
        if number is not None and number != installed:
            pending.worker.seen_version = max(pending.worker.seen_version, number)
            return m.Visible(target.request_id, number)
        if pending.deadline > now:
            return None
        text = f"no other version than {installed or 'none'} was to be run before the deadline"
        if self.recovering(now):  # others may still say what they hold
            return m.Refused(target.request_id, "NotPublished", text)
        if pin and not history.is_visible(pin):
            text = f"version {pin} is pinned and nobody holds it: unpin it, or pin another; held: {_listed(history)}"
            return m.Refused(target.request_id, "VersionGone", text)
        if installed in history.withdrawn:
            text = f"version {installed}, which is installed, was withdrawn, and there is no other to run: publish one"
            return m.Refused(target.request_id, "VersionGone", text)
        return m.Refused(target.request_id, "NotPublished", text)

    def _try_direct(self, pending: Pending, message: m.Pin | m.Withdraw, now: float) -> m.Reply | None:
        """An operator's decision, once it is known what is held and what was decided before."""
        history, number = pending.worker.history, message.version
        if self.recovering(now):
            if pending.deadline > now:
                return None
            text = "the hub has just been started and does not know yet what is held: ask again in a few seconds"
            return m.Refused(message.request_id, "DeadlineExceeded", text)
        old = history.directive
        if isinstance(message, m.Pin):
            problem = self._cannot_pin(history, number) if number else None
            # The same pin once more is a new decision: engines that have refused the version try it again.
            new = m.Directive(old.serial + 1, number, old.withdrawn) if number or old.pin else old
        else:
            new = m.merge(old, m.Directive(old.serial, old.pin, (number,)))
            problem = self._cannot_withdraw(history, number, new)
            if new != old:
                new = msgspec.structs.replace(new, serial=old.serial + 1)
        if problem is None and new.serial > m.SERIAL_MAX:
            problem = f"{m.SERIAL_MAX} directives were given in {history.run}/{history.model}: use another run name"
        if problem is not None:
            self._effects.append(Log(f"{pending.worker.name}: refused: {problem}"))
            return m.Refused(message.request_id, "UsageError", problem)
        self._direct(history, new)
        return m.Done(message.request_id)

    @staticmethod
    def _cannot_pin(history: History, number: int) -> str | None:
        if number in history.withdrawn:
            return f"version {number} was withdrawn and cannot be pinned; held: {_listed(history)}"
        if not history.is_visible(number):
            return f"version {number} cannot be pinned because nobody holds it; held: {_listed(history)}"
        return None

    @staticmethod
    def _cannot_withdraw(history: History, number: int, new: m.Directive) -> str | None:
        if number not in new.withdrawn:
            return f"version {number} cannot be withdrawn: {m.WITHDRAWN_MAX} newer ones are, and no more are remembered"
        if number in history.withdrawn or number <= history.newest_visible:
            return None
        return f"version {number} cannot be withdrawn because it was never published; held: {_listed(history)}"

    def _direct(self, history: History, directive: m.Directive, *, welcomed: bytes | None = None) -> None:
        """From now on this is what operators have decided. welcomed: this worker hears it with its Welcome."""
        old = history.directive
        if directive == old:
            return
        history.direct(directive)
        name = f"{history.run}/{history.model}"
        for number in (number for number in directive.withdrawn if number not in old.withdrawn):
            self._effects.append(Log(f"{name}: version {number} is withdrawn"))
            version = history.versions.get(number)
            if version is not None:
                version.visible = False
                version.claims.clear()
                self._change(history, number, room=True)
        if directive.pin != old.pin:
            self._effects.append(Log(f"{name}: pinned version {directive.pin or 'none'}, before {old.pin or 'none'}"))
        self._change(history, ANY, room=False)
        for session in history.workers:
            if session != welcomed:
                self._send(session, m.Alive((), directive))

    def _try_unpublish(self, pending: Pending, unpublish: m.Unpublish, now: float) -> m.Reply | None:
        worker, history = pending.worker, pending.worker.history
        holdings = self._given_up(worker, unpublish)
        leases = [lease for h in holdings for lease in self._leases_on(worker, h.key)]
        if not unpublish.gone:
            # Rule 6: others may still have to say that they read it or hold it, or how many are retained.
            recovering = self.recovering(now)
            if recovering and now < pending.deadline:
                return None
            if any(h.complete and (recovering or self._is_last_copy(history, h, holdings)) for h in holdings):
                for h in holdings:
                    h.unpublishing, h.must_retain = None, True
                    self._reconsider(worker, h.key)
                return m.Unpublished(unpublish.request_id, must_retain=True)
            if leases and now < pending.deadline:
                return None
        cut_off = tuple(sorted({lease.reader.name for lease in leases}))
        for h in holdings:
            self._drop(h)
        for key in unpublish.keys:
            worker.withdrawn.pop(key, None)
            worker.withdrawn[key] = unpublish.request_id
        while len(worker.withdrawn) > WITHDRAWN_KEPT_MAX:
            del worker.withdrawn[next(iter(worker.withdrawn))]
        return m.Unpublished(unpublish.request_id, cut_off)

    @staticmethod
    def _given_up(worker: Worker, unpublish: m.Unpublish) -> list[Holding]:
        """Not what it has begun to offer since, under the same name."""
        held = (worker.holdings.get(key) for key in unpublish.keys)
        return [h for h in held if h is not None and h.offered < unpublish.request_id]

    def _is_last_copy(self, history: History, holding: Holding, leaving: list[Holding]) -> bool:
        """Rule 4: whether giving these up would lose a retained version, or its universal checkpoint layout."""
        if holding.key.version not in history.retained():
            return False
        version = history.versions[holding.key.version]
        without = frozenset(id(h) for h in leaving)
        if holding.key.layout == CHECKPOINT:
            return not version.has_whole(CHECKPOINT, without=without)
        return not version.is_held(without=without)

    def _try_acquire(self, pending: Pending, acquire: m.Acquire, now: float) -> m.Reply | None:
        worker, history = pending.worker, pending.worker.history
        number = acquire.version or self._resolve_latest(pending, acquire, now)
        if isinstance(number, m.Refused):
            return number
        if number in history.withdrawn:
            return self._gone(acquire.request_id, history, number)
        version = history.versions.get(number) if number else None
        if version is not None and version.visible:
            for layout in acquire.layouts:
                granted = self._grant(pending, acquire, version, layout, now)
                if granted is not None:
                    worker.seen_version = max(worker.seen_version, version.number)
                    latest = history.latest[worker.hello.replica]
                    if latest.version != number:
                        return granted
                    latest.told.add(worker.hello.shard)  # also if it missed the round, and names what came of it
                    return msgspec.structs.replace(granted, generation=latest.generation)
                if acquire.claim and self._somebody_converts(version, worker, layout):
                    break  # wait for it instead of reading the next layout and doing the same work
        elif number and self._is_gone(history, number, now):
            return self._gone(acquire.request_id, history, number)
        if pending.deadline <= now:
            if version is not None and version.visible:
                return m.Refused(
                    acquire.request_id,
                    "DeadlineExceeded",
                    f"version {version.number} is visible but no source had room or a readable layout "
                    f"({', '.join(acquire.layouts)}) before the deadline; held: {version.held_text()}",
                )
            what = f"version {number}" if number else f"a version from {acquire.at_least} on"
            if not number and history.directive.pin:
                what = f"version {history.directive.pin}, which is pinned,"
            return m.Refused(acquire.request_id, "NotPublished", f"{what} was not published before the deadline")
        return None

    def _resolve_latest(self, pending: Pending, acquire: m.Acquire, now: float) -> int | m.Refused:
        """Rule 2: one version for all shards of the reading replica; 0 when there is none yet."""
        worker, history = pending.worker, pending.worker.history
        if history.is_visible(pending.version):
            return pending.version
        replica, shard, shard_count = worker.hello.replica, worker.hello.shard, worker.hello.shard_count
        present = {w.hello.shard for w in history.replicas[replica].values()}
        if len(present) < shard_count:
            return 0  # the one we do not know may have been told already, by a hub that was restarted since
        at_least = max(history.floor(acquire.at_least), history.floor(worker.seen_version))
        latest = history.latest[replica]
        if latest.version and shard_count > 1 and (shard not in latest.told or pending.version):
            too_old = latest.version < at_least and latest.version != history.directive.pin
            if too_old or not history.is_visible(latest.version):
                if self.recovering(now):
                    return 0
                text = (
                    f"other shards of {replica} took version {latest.version} as the latest, and this one cannot: "
                    "let all of them read again, naming one version"
                )
                latest.version = 0
                return m.Refused(acquire.request_id, "VersionGone", text)
        else:
            newest = self._latest(history, at_least)
            if newest is None:
                return 0
            latest.generation, latest.version, latest.told = latest.generation + 1, newest, set()
        latest.told.add(shard)
        pending.version = latest.version
        return latest.version

    def _grant(
        self, pending: Pending, acquire: m.Acquire, version: Version, layout: str, now: float
    ) -> m.Granted | None:
        """Sources for every shard that is needed in this layout, all or none."""
        worker = pending.worker
        for shard_count in sorted({count for held, count in version.layouts() if held == layout}):
            if layout == CHECKPOINT:
                needed: Iterable[int] = range(shard_count)
            elif shard_count == worker.hello.shard_count:
                needed = (worker.hello.shard,)
            else:
                continue
            again = acquire.shards and (layout, shard_count) == (acquire.shards_layout, acquire.shard_count)
            shards = acquire.shards if again else tuple(needed)
            grants = []
            for shard in shards:
                source = self._choose(worker, acquire, version, ShardKey(version.number, layout, shard, shard_count))
                if source is None:
                    break
                root, size_bytes = version.contents[layout, shard_count, shard]
                held = source.holdings.get(ShardKey(version.number, layout, shard, shard_count))
                promised = [lease.request_id for lease in source.leases.values() if lease.serves]
                hello = source.hello
                grants.append(
                    m.Grant(
                        shard,
                        source.session,
                        source.name,
                        hello.endpoints,
                        hello.location,
                        root,
                        size_bytes,
                        held.sequence if held is not None else max(promised, default=0),
                    )
                )
            else:
                claim = None
                if acquire.claim and layout != acquire.layouts[0]:
                    if self.recovering(now):
                        return None
                    claim = self._claimed_by(version, worker, acquire.layouts[0])
                    self._claim(version, worker, claim, now)
                sources = {grant.shard: grant.session for grant in grants}
                self._lease(
                    Lease(
                        worker,
                        acquire.request_id,
                        version.number,
                        layout,
                        shard_count,
                        sources,
                        pending.deadline,
                        acquire.serve,
                        bool(acquire.beside),
                    )
                )
                return m.Granted(
                    acquire.request_id, version.number, layout, shard_count, tuple(grants), claim, hub=self.session
                )
        return None

    def _choose(self, reader: Worker, acquire: m.Acquire, version: Version, key: ShardKey) -> Worker | None:
        sources = version.sources.get(key)
        if sources is None:
            return None

        here = reader.hello.location
        known = [self.workers[session].hello.location for session in acquire.beside if session in self.workers]
        near = any(distance(here, location) < FAR for location in known)

        def judge(session: bytes, far: int) -> Verdict:
            source = self.workers[session]
            if source is reader or session in acquire.exclude or session in acquire.beside:
                return Verdict.NEVER
            held = source.holdings.get(key)
            complete = held is not None and held.complete
            if not complete and self._reads_from(source, reader):
                return Verdict.NEVER
            extra = acquire.beside and not acquire.urgent
            if extra and (source.readers or not complete):
                return Verdict.NEVER
            if far == FAR and (near or extra):  # what it has goes on: no reason to use a long way, or to use it twice
                return Verdict.NEVER
            if far == FAR and not self._may_cross(reader):
                return Verdict.NEVER
            if len(source.readers) >= READERS_PER_SOURCE_MAX:
                return Verdict.FULL
            return Verdict.LAST_RESORT if session in acquire.avoid or source.suspect else Verdict.GOOD

        best = sources.best(reader.hello.location, judge)
        return None if best is None else self.workers[best]

    def _may_cross(self, reader: Worker) -> bool:
        """Whether one more lease may cross into the reader's data centre; when they are scarce, in equal shares."""
        place, name = reader.hello.location.data_center, (reader.history.run, reader.history.model)
        crossing = self._crossings.get(place, Counter())
        others = [waiting for waiting in self._wants_to_cross.get(place, ()) if waiting != name]
        share = UPLINK_READERS_MAX // (1 + len(others)) if others else UPLINK_READERS_MAX
        if crossing.total() < UPLINK_READERS_MAX and crossing[name] < max(1, share):
            return True
        self._wants_to_cross.setdefault(place, {})[name] = None
        return False

    @staticmethod
    def _claimed_by(version: Version, worker: Worker, layout: str) -> ShardKey:
        return ShardKey(version.number, layout, worker.hello.shard, worker.hello.shard_count)

    def _somebody_converts(self, version: Version, worker: Worker, layout: str) -> bool:
        # One replica converts all its shards. If the first shard were claimed by one replica and the second by another,
        # each would wait for the other: none can install, and so convert, before all its own workers are ready.
        mine = self._claimed_by(version, worker, layout)
        for key, claim in version.claims.items():
            others = claim.worker.hello.replica != worker.hello.replica
            same = (key.layout, key.shard_count) == (mine.layout, mine.shard_count)
            if (key == mine and claim.worker is not worker) or (others and same):
                return True
        # all its holders may be busy, or on their way: that is still cheaper than to convert again
        return layout != CHECKPOINT and any(
            h.unpublishing is None and h.worker is not worker for h in version.holders(mine).values()
        )

    def _latest(self, history: History, at_least: int) -> int | None:
        pin = history.directive.pin
        if pin:
            return pin if history.is_visible(pin) else None
        return self._newest(history, at_least)

    def _newest(self, history: History, at_least: int, without: Iterable[int] = ()) -> int | None:
        visible = (n for n, v in history.versions.items() if v.visible and n >= at_least and n not in without)
        return max(visible, default=None)

    def _is_gone(self, history: History, number: int, now: float) -> bool:
        return not self.recovering(now) and number <= history.newest_visible

    def _gone(self, request: int, history: History, number: int) -> m.Refused:
        why = "has been unpublished or lost with its last holder"
        if number in history.withdrawn:
            why = "was withdrawn, and nobody is to use it any more"
        return m.Refused(request, "VersionGone", f"version {number} {why}; visible now: {_listed(history)}")

    # --- sending ---

    def _send(self, session: bytes, message: m.HubMessage) -> None:
        self._effects.append(Send(session, message))

    def _reply(self, worker: Worker, message: m.Reply) -> None:
        self._remember(worker, message)
        self._send(worker.session, message)

    def _remember(self, worker: Worker, message: m.Reply) -> None:
        worker.replies[message.request_id] = message
        while len(worker.replies) > REPLIES_KEPT_MAX:
            del worker.replies[next(iter(worker.replies))]

    def _refuse(self, worker: Worker, request: int, error: str, text: str) -> None:
        self._effects.append(Log(f"{worker.name}: refused: {text}"))
        self._reply(worker, m.Refused(request, error, text))

    def _refuse_session(self, session: bytes, text: str) -> None:
        self._effects.append(Log(f"refused: {text}"))
        self._send(session, m.Refused(0, "UsageError", text))


def _listed(history: History) -> str:
    """The versions that can be had, for people."""
    visible = history.visible()
    if not visible:
        return "none"
    more = ["..."] if len(visible) > VERSIONS_LISTED_MAX else []
    return f"[{', '.join([*more, *map(str, reversed(visible[:VERSIONS_LISTED_MAX]))])}]"


def _in_order(pending: dict[tuple[bytes, int], Pending]) -> list[Pending]:
    return sorted(pending.values(), key=lambda each: each.order)
