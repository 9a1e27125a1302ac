"""The reference server's state machine. PURE: `handle(event, now)` returns what to send; no clock, socket or thread.

What it knows
    Workers (one session each), the shards they hold, the leases under which they read each other, and which requests
    wait. Never a weight byte. All of it is soft: the Hello of every worker rebuilds a restarted hub (rule 6).

The rules it keeps (numbers as in the design)
    1  A holding that is being unpublished gets no new lease; its unpublish is answered when its last lease has
       ended or at its deadline, when the leases that are left are ended and named in the answer.
    2  A version becomes visible when one replica holds all its shards. "latest" is resolved once per reading
       replica and never below what the reader has seen; but an operator's decision counts more (following.py).
    3  A holding may be incomplete and still be read (pipelining), but never in a circle: what a reader reads from must
       not, over any number of steps, read from that reader.
    4  The last copy of a retained version is not evicted: its worker must retain it, and is notified later when it may
       release it. Where copies in several failure domains are wanted, a worker is asked for one (failure_domains.py).
    5  Every pending request has a deadline and ends in a reply, if its caller still waits.
    6  In the first `HubLimits.grace_s` after its start the hub answers nothing that depends on all workers:
       it confirms no unpublish, declares no version gone, elects no converter and gives no directive.
       A Hello that was sent to a previous hub is not believed: its worker is asked to send it again.
       Time in which the hub was deaf (`Tick`) counts neither here nor as silence of a worker.
    7  An abandoned request is not carried out: each request says until when it is valid (`messages.Until`), because a
       hub that was stopped or disconnected receives later what has waited in a buffer meanwhile.

Which worker converts
    Engines want their own runtime layout, trainers publish the checkpoint layout. A reader that asks for (runtime,
    checkpoint) gets runtime if a worker has it, waits if one has claimed to make it, and else makes the claim itself:
    it gets the checkpoint and is expected to publish the runtime layout. A claim ends with that publication, when it is
    abandoned, when its worker is lost, or at its deadline; then the next waiting reader claims it.

Where to read on
    `handle` takes one event, which changes records, and then answers whatever has become possible (`_run_ready`). The
    path of one version: `Publishing.publish` (publishing.py), `_run_ready` and `_try` here, `Reading.try_acquire`
    (reading.py), `judge` (selection.py). state.py has the records, registry.py keeps their indexes in step, waiters.py
    knows which requests to try again, report.py states the invariants between any two calls of `handle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core.hub import unreached
from tensorhub_plugins.core.hub.attempts import Beginning, changes, over
from tensorhub_plugins.core.hub.duplicate_names import Namesakes, is_same, without_records
from tensorhub_plugins.core.hub.failure_domains import FailureDomains
from tensorhub_plugins.core.hub.following import Following
from tensorhub_plugins.core.hub.limits import (
    ANNOUNCED_SHARDS_MAX,
    ANSWER_SIZE_BYTES_MAX,
    CLAIMS_PER_SESSION_MAX,
    LEASES_PER_SESSION_MAX,
    PENDING_ITEMS_MAX,
    PENDING_PER_SESSION_MAX,
    SESSIONS_MAX,
    SESSIONS_OF_PUBLISHERS,
    HubLimits,
)
from tensorhub_plugins.core.hub.outbox import Effect, Log, Outbox, Send
from tensorhub_plugins.core.hub.permissions import believed, refusal, senseless
from tensorhub_plugins.core.hub.publishing import Publishing
from tensorhub_plugins.core.hub.reading import Reading
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.report import report, validate
from tensorhub_plugins.core.hub.selection import LEASES_PER_SOURCE_MAX
from tensorhub_plugins.core.hub.state import Claim, History, Lease, Pending, Room, Timed, Waiting, Worker, items_of
from tensorhub_plugins.core.hub.waiters import ANY_VERSION
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.types import CHECKPOINT, WAYS, Role, ShardKey

__all__ = ["Effect", "Event", "Hub", "Log", "Received", "Send", "Tick"]

# When so many of the requests that wait for the same thing cannot be served, the rest cannot either. A request whose
# worker has changed since, and that has moved to a queue of its own, does not count.
FAILURES_PER_QUEUE_MAX = 4
TRIES_MAX = 256  # requests that are tried with one event: that takes 4 ms, in which the hub reads no message
DEAF_LOG_S = 10.0  # between two lines about one deaf time


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message from the worker whose session (its public name) this is. role: the one its connection has proved."""

    session: bytes
    message: m.ClientMessage
    role: Role = "publisher"


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed. deaf_s: the part of it in which messages may have come and were not read: this process stood
    still (SIGSTOP, a held interpreter), or had more to do than it can."""

    deaf_s: float = 0.0


Event: TypeAlias = Received | Tick


class Hub:
    """One hub. `session` identifies its incarnation and is sent in every Welcome; `now` is seconds on any steady clock.
    lease_key: the key that signs leases (security/leases.py); b"": leases are not signed."""

    def __init__(self, session: bytes, now: float, limits: HubLimits | None = None, lease_key: bytes = b"") -> None:
        self.limits = HubLimits() if limits is None else limits
        self.session = session
        self.registry = Registry(session, now, self.limits)
        self.workers: Mapping[bytes, Worker] = self.registry.workers  # that are known, by session
        self.sessions_max = SESSIONS_MAX  # fewer where the process cannot have so many connections
        self.tries_max = TRIES_MAX
        self._outbox = Outbox()
        self._publishing = Publishing(self.registry, self._outbox)
        self._reading = Reading(self.registry, lease_key)
        self._following = Following(self.registry, self._outbox)
        self._domains = FailureDomains(self.registry, self._outbox)
        self._namesakes = Namesakes(self.registry, self._outbox, lease_key)
        self._beginning = Beginning(self.registry, self._outbox, self._following)
        self._has_recovered = False
        self.registry.schedule_recovery()

    # --- the one mutator ---

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what to do, in order: messages to send, lines to log."""
        if isinstance(event, Tick) and event.deaf_s:
            self._was_deaf(event.deaf_s, now)
        if not self._has_recovered and not self.registry.recovering(now):  # requests that waited for that come first
            self._has_recovered = True
            self._check_all()
        match event:
            case Received(session, message, role):
                self._receive(session, message, role, now)
            case Tick():
                for due in self.registry.pop_due(now):
                    self._on_timer(due, now)
            case _:
                assert_never(event)
        self._run_dirty(now)
        return self._outbox.drain()

    def next_deadline(self, now: float) -> float:
        """Return when the next Tick is due at the latest: at once while requests are still to be tried."""
        return now if self.registry.waiters.put_off else self.registry.next_timer(now)

    # --- answering whatever can be answered now ---

    def _run_dirty(self, now: float) -> None:
        self.registry.waiters.allow_tries(self.tries_max)
        while history := self.registry.waiters.pop_dirty():
            self._run_ready(history, now)

    def _run_ready(self, history: History, now: float) -> None:
        waiters = self.registry.waiters
        while history.leaving or history.changed or (history.ready and history.id not in waiters.put_off):
            # Unpublish first: it may keep the last copy of a version that would otherwise be declared lost.
            for pending in waiters.pop_unpublishes(history):
                self._try(pending, now)
            changed = waiters.pop_changed(history)
            self._publishing.lose_versions(history, changed, now)
            for pending in waiters.pop_ready(history, changed):
                self._try(pending, now)
            for queue in waiters.queues_with_room(history, changed):
                failures = 0
                for pending in list(queue.values()):
                    failures += not self._try(pending, now) and pending.id in queue
                    if failures >= FAILURES_PER_QUEUE_MAX:
                        break
            self.registry.forget_old_versions(history, list(history.versions) if ANY_VERSION in changed else changed)
        if not history.workers:
            self.registry.histories.pop(history.id, None)

    def _try(self, pending: Pending, now: float) -> bool:
        """Answer a request if that can be done now, else park it."""
        waiters = self.registry.waiters
        if not waiters.is_waiting(pending):
            return True
        if pending.is_overdue(now):  # its caller may ask again, as in `_request`
            waiters.remove(pending)
            pending.worker.dropped = pending.message.request_id, pending.version
            if isinstance(pending.message, m.Unpublish):
                self._publishing.retain(pending.worker, pending.message)
            return True
        match pending.message:
            case m.Unpublish():
                reply = self._publishing.try_unpublish(pending, pending.message, now)
            case m.Acquire():
                reply = self._reading.try_acquire(pending, pending.message, now)
            case m.Wait():
                reply = self._following.try_wait(pending, pending.message, now)
            case m.Target():
                reply = self._following.try_target(pending, pending.message, now)
            case m.Pin() | m.Withdraw():
                reply = self._following.try_direct(pending, pending.message, now)
            case m.Begin():
                reply = self._beginning.try_begin(pending, pending.message, now)
            case _:
                assert_never(pending.message)
        if reply is not None:
            waiters.remove(pending)
            self._outbox.reply(pending.worker, reply)
        elif not isinstance(pending.message, m.Unpublish):
            waiters.park(pending)
        return reply is not None

    def _was_deaf(self, seconds: float, now: float) -> None:
        deaf_s = self.registry.was_deaf(seconds, now)
        if deaf_s == seconds or deaf_s % DEAF_LOG_S < seconds:
            self._outbox.log(
                f"this hub has not read all that has come for {deaf_s:.1f} s: it stood still, or its core has more to "
                "do than it can. No worker is taken for silent meanwhile"
            )

    def _on_timer(self, due: Timed, now: float) -> None:
        waiters = self.registry.waiters
        match due:
            case Worker():
                silence_s = self.registry.silence_s(due)
                if now > self.registry.silent_after(due.last_heard, silence_s):
                    why = ", and others have found that it has ended" if due.refuses else ""
                    due.history.note_lost(due, now)
                    self._forget(due, f"not heard for {silence_s:g} s{why}")
                elif now >= due.silence_at:  # else it is checked later
                    self.registry.schedule_silence(due)
            case Lease():
                self._check_lease(due, now)
            case Pending():
                waiters.mark_ready(due)
            case Claim() if now < due.deadline:  # it has worked meanwhile
                self.registry.schedule(due.deadline, due)
            case Claim():
                self._outbox.log(f"{due.worker.name}: claim to convert {due.key} has expired")
                self.registry.remove_claim(due)
            case None:
                if self.registry.recovers(now):
                    self._check_all()
            case _:
                assert_never(due)

    def _check_all(self) -> None:
        """Try all requests again: every worker has had time to send a Hello, or is declared dead."""
        for history in self.registry.histories.values():
            self.registry.waiters.mark_all_ready(history.waiting.values())
            for number in history.versions:
                self.registry.waiters.mark_changed(history, number, room=True)

    def survive(self, session: bytes | None, now: float) -> list[Effect]:
        """Recover after `handle` has raised: forget the session whose message caused it. Return what to do. Raise when
        the records are inconsistent, so that only a new hub helps."""
        worker = None if session is None else self.registry.workers.get(session)
        if worker is not None:
            self._forget(worker, "is evicted, because the hub has failed over what it said")
        for history in self.registry.histories.values():
            self.registry.waiters.mark_dirty(history)
        self._run_dirty(now)
        validate(self.registry)
        return self._outbox.drain()

    def _check_lease(self, lease: Lease, now: float) -> None:
        """End a lease that is over: at its deadline, which its reader knows; at the bound of all leases, or because it
        is idle, of which the reader is notified, and of idleness the sources, whose slots it keeps unused, too."""
        reader, ends_at = lease.reader, min(lease.deadline, self.registry.idle_at(lease))
        if now < ends_at:  # it was renewed
            self.registry.schedule(ends_at, lease)
            return
        bound, is_idle = reader.lease_bounds.get(lease.request_id), now < lease.deadline
        if bound is not None and is_idle:
            bound.until = now  # no Hello brings it back
        if bound is not None and bound.until <= lease.deadline:
            self._take_lease(lease, is_idle=is_idle)
        self.registry.end_lease(lease)

    def _take_lease(self, lease: Lease, *, is_idle: bool) -> None:
        """Notify the reader of this lease, and its sources if it was idle."""
        reader = lease.reader
        what = f"got no byte of version {lease.version} for {self.limits.lease_idle_s:g} s and loses its lease"
        said = f"has read version {lease.version} for {self.limits.lease_s:g} s"
        self._outbox.log(f"{reader.name} {what if is_idle else said}")
        for source in lease.shards_of:
            self._outbox.send(reader.session, m.SourceGone(source))
            if is_idle and source in self.registry.workers:
                self._outbox.send(source, m.Alive(idle=reader.name))

    # --- messages ---

    def _receive(self, session: bytes, message: m.ClientMessage, role: Role, now: float) -> None:
        worker = self.registry.workers.get(session)
        if self._refuse(session, message, role, worker):
            return
        message = believed(role, message)
        match message:
            case m.AskStatus(request_id):  # operators have no session
                self._outbox.send(session, m.Status(request_id, report(self.registry, now)))
                return
            case m.Hello():
                self._hello(session, message, worker, role, now)
                return
        if worker is None:
            if not isinstance(message, m.Bye):
                self._outbox.send(session, m.Unknown(self.session, now))
            return
        worker.hear(now)
        match message:
            case m.Heartbeat():
                self._heartbeat(worker, message, now)
            case m.Bye():
                self._forget(worker, "left")
            case m.Release():
                self._release(worker, message, now)
            case _:
                self._request(worker, message, now)

    def _refuse(self, session: bytes, message: m.ClientMessage, role: Role, worker: Worker | None) -> bool:
        """Refuse what this role may not ask for, and what no worker may."""
        problem = refusal(role, message, worker) or senseless(message, worker)
        if problem is None:
            return False
        request_id = 0 if isinstance(message, m.Hello) else getattr(message, "request_id", 0)
        self._outbox.send(session, m.Refused(request_id, "UsageError", problem))
        return True

    def _request(self, worker: Worker, message: m.Request, now: float) -> None:
        request_id = message.request_id
        if request_id <= worker.settled and request_id not in worker.asked:
            return  # it has the answer
        worker.last_request_id = max(worker.last_request_id, request_id)
        if self._outbox.answer_again(worker, request_id):  # the first answer was lost
            return
        if request_id in worker.pending:
            return
        if isinstance(message, m.Dated) and message.until is not None and message.until.is_over(self.session, now):
            self._outbox.log(f"{worker.name}: a {type(message).__name__} was heard after it was evicted: dropped")
            return  # a caller that still waits (our clock seems earlier to it) asks again
        items = worker.pending_items + items_of(message)
        if len(worker.pending) >= PENDING_PER_SESSION_MAX or items > PENDING_ITEMS_MAX:
            text = f"more than {PENDING_PER_SESSION_MAX} requests pending, or {PENDING_ITEMS_MAX} shards in them"
            self._outbox.refuse(worker, request_id, "UsageError", text)
            return
        if (worker.is_zombie or worker.is_replaced) and changes(message):
            problem = over(worker) or self._namesakes.taken(worker)
            if problem is not None:
                self._outbox.refuse(worker, request_id, "Superseded", problem)
                return
        match message:
            case m.Publish(_, holding):
                self._publishing.publish(worker, request_id, holding, now)
            case m.Acquire() | m.Unpublish() | m.Wait() | m.Target() | m.Pin() | m.Withdraw() | m.Begin():
                self._wait(worker, message, now)
            case m.Abandon(_, key):
                self.registry.end_claim(worker, key, now)
                self._outbox.reply(worker, m.Done(request_id))
            case m.Retain(_, newest, domains, across, _, also):
                serial = min(worker.history.retain_serial + 1, SERIAL_MAX)
                worker.history.retain(newest, domains, across, serial, also)
                self._outbox.reply(worker, m.Done(request_id, serial))
            case m.AskVersions():
                room = Room(ANSWER_SIZE_BYTES_MAX)
                infos = worker.history.version_infos(room)
                self._outbox.reply(worker, m.Versions(request_id, infos, room.left_out))
            case _:
                assert_never(message)

    def _wait(self, worker: Worker, message: Waiting, now: float) -> None:
        if isinstance(message, m.Begin):
            self._beginning.suspect(worker.history, message)
        pending = Pending(worker, message, now + message.timeout_s, now)
        pending.version = worker.dropped[1] if worker.dropped[0] == message.request_id else 0
        self.registry.waiters.add(pending)
        self.registry.schedule(pending.deadline, pending)
        if isinstance(message, m.Unpublish):
            self._publishing.begin_unpublish(worker, message)

    # --- sessions ---

    def believes(self, hello: m.Hello, now: float) -> bool:
        """Return whether this was sent to us, and so is not older than this incarnation: what it says was true in our
        time. Not believed is what was sent in it and abandoned meanwhile.

        The first Hello of a worker that is all of its replica, and replaces no other, is believed at once: if it
        comes late, it says nothing that could be wrong by then."""
        if hello.hub == b"":
            says = (*hello.holdings, *hello.leases, *hello.claims, *hello.pending)
            return hello.shard_count == 1 and not says and not self.registry.has_replica(hello)
        is_over = hello.until is not None and hello.until.is_over(self.session, now)
        return hello.hub in (None, self.session) and not is_over

    def _hello(self, session: bytes, hello: m.Hello, known: Worker | None, role: Role, now: float) -> None:
        problem = self._cannot_be_welcome(hello, known, role)
        if problem is None and known is None:
            problem = self._namesakes.problem(session, hello, role, now)
        if problem is not None:
            if problem:
                self._outbox.refuse_session(session, problem)
            return
        if known is not None:
            known.hear(now)
            if hello.request_id <= known.last_request_id:  # delayed or duplicated on the way: our records are newer
                return
        if not self.believes(hello, now):
            self._outbox.send(session, m.Unknown(self.session, now))
            return
        history = self.registry.history(hello)
        self._following.direct(history, self._following.announced(history, hello.directive, now), welcomed=session)
        if known is not None:
            worker = known
            worker.hello = without_records(hello)
            if hello.mark == history.directive.mark:  # else our answer may not have reached it yet
                worker.mark = hello.mark
            self._forget_what_is_not_in(hello, worker)
            if hello.generation >= history.group(worker).generation:  # a previous hub has answered it once more
                history.group(worker).recall(hello.shard, hello.generation, hello.resolved)
        else:
            for squatter in self._of_other_roles(hello, role):
                self._forget(squatter, "gives its name to a worker that has the run's secret")
            worker = Worker(session, without_records(hello), history, now, role, hello.mark)
            worker.has_proved_name = self._namesakes.has_proved(session, hello)
            self.registry.add_worker(worker)
            for former in self._namesakes.former_lives(worker):
                self._forget(former, "has started again: this was its former incarnation")
            history.group(worker).recall(hello.shard, hello.generation, hello.resolved)
        if not worker.is_zombie:
            history.recall_retain(hello)
        worker.seen_version = max(worker.seen_version, history.floor(hello.seen))
        not_held = self._take_over(worker, hello, now)
        for each in history.replicas[hello.replica].values():  # its group may be complete now
            self.registry.waiters.mark_all_ready(each.pending.values())
        welcome = m.Welcome(
            hub=self.session,
            heartbeat_s=worker.beat_s,
            session_timeout_s=self.limits.session_timeout_s,
            request_id=hello.request_id,
            directive=history.directive,
            clock=now,
            not_held=not_held[: m.NOT_HELD_MAX],
        )
        self._outbox.send(session, welcome)

    def _cannot_be_welcome(self, hello: m.Hello, known: Worker | None, role: Role) -> str | None:
        if hello.shard >= hello.shard_count:
            return f"shard {hello.shard} of {hello.shard_count}: shards count from 0"
        if known is not None and not is_same(known.hello, hello):
            return f"this session is {known.name} of {known.history.name}, and stays that: begin another one"
        most = min(SESSIONS_MAX, self.sessions_max) - (SESSIONS_OF_PUBLISHERS if role == "reader" else 0)
        if known is None and len(self.registry.workers) >= max(most, self.sessions_max // 2):
            return (
                f"{len(self.registry.workers)} workers are known to this hub, and it takes no more (of {role}s): start "
                "another one, or raise its limit of open files (ulimit -n)"
            )
        if role == "reader" and self._of_other_roles(hello, role):
            return f"{hello.replica}/{hello.shard} is here with another key than a {role}'s: take another name"
        return None

    def _of_other_roles(self, hello: m.Hello, role: Role) -> list[Worker]:
        """Return the workers that have this name with another key."""
        history = self.registry.histories.get((hello.run, hello.model))
        namesakes = history.replicas.get(hello.replica, {}) if history is not None else {}
        return [each for each in namesakes.values() if each.hello.shard == hello.shard and each.role != role]

    def _take_over(self, worker: Worker, hello: m.Hello, now: float) -> tuple[tuple[ShardKey, str], ...]:
        """Take over what it holds, reads and has claimed, which a previous hub may have known of; return what is
        refused, and why."""
        self.registry.expect(hello, now)
        worker.last_request_id, worker.beat_s = hello.request_id, self.registry.heartbeat_s
        worker.settled, worker.asked = hello.request_id, hello.pending
        still_asked, problems = set(hello.pending), list[tuple[ShardKey, str]]()
        for announced in hello.holdings:
            if worker.withdrawn.get(announced.key) in still_asked:
                continue  # unpublished, and the answer is on its way or will be sent again
            problem = self._publishing.hold(worker, announced, now, as_of=hello.request_id)
            if problem:
                problems.append((announced.key, problem))
        if problems:
            more = f", and {len(problems) - 1} more of the kind" if problems[1:] else ""
            self._outbox.log(f"{worker.name}: {problems[0][1]}{more}")
        for held in hello.leases:
            until = self.registry.lease_until(worker, held.request_id, now + held.seconds_left, now)
            if held.sources and until > now and self._may_read_so(worker, held):
                lease = Lease(
                    reader=worker,
                    request_id=held.request_id,
                    version=held.version,
                    layout=held.layout,
                    shard_count=held.shard_count,
                    sources=dict(held.sources),
                    deadline=until,
                    is_announced=True,
                )
                self.registry.add_lease(lease)
        for claimed in hello.claims[:CLAIMS_PER_SESSION_MAX]:
            if self._may_claim(worker, claimed, now):
                self.registry.add_claim(worker.history.version(claimed.version, now), worker, claimed, now)
        return tuple(problems)

    def _may_claim(self, worker: Worker, key: ShardKey, now: float) -> bool:
        """Return whether a previous hub can have assigned it this conversion; our own assignments are known."""
        if not self.registry.recovering(now) or key.layout == CHECKPOINT:
            return False
        version, hello = worker.history.versions.get(key.version), worker.hello
        if version is None:
            return worker.role != "reader"
        return key not in version.claims and (key.shard, key.shard_count) == (hello.shard, hello.shard_count)

    def _may_read_so(self, worker: Worker, held: m.HeldLease) -> bool:
        """Return whether a hub can have granted this in addition to its other leases."""
        before = worker.leases.get(held.request_id)
        if before is not None:
            self.registry.end_lease(before)
        most = max(worker.sources.get(source, 0) for source in held.sources.values())
        if (
            len(worker.leases) < LEASES_PER_SESSION_MAX
            and most < LEASES_PER_SOURCE_MAX
            and worker.announced_shards + len(held.sources) <= ANNOUNCED_SHARDS_MAX
            and (worker.role != "reader" or self.registry.readers_records < self.registry.readers_records_max)
        ):
            return True
        self._outbox.log(f"{worker.name}: a lease too many of one reader, not believed")
        return False

    def _forget_what_is_not_in(self, hello: m.Hello, worker: Worker) -> None:
        announced, pending_ids = {holding.key for holding in hello.holdings}, set(hello.pending)
        leases = {held.request_id for held in hello.leases}
        for holding in [h for key, h in worker.holdings.items() if key not in announced]:
            self.registry.remove_holding(holding)
        for lease in list(worker.leases.values()):
            if lease.request_id not in (leases if lease.is_announced else pending_ids):
                self.registry.end_lease(lease)
        for claim in list(worker.claims.values()):
            if claim.key not in hello.claims and claim.request_id not in pending_ids:
                self.registry.remove_claim(claim)
        for key in [key for key in worker.aside if key not in announced]:
            self.registry.take_from_aside(worker, key)
        for pending in [p for request_id, p in worker.pending.items() if request_id not in pending_ids]:
            self.registry.waiters.remove(pending)  # a previous hub has answered it

    def _heartbeat(self, worker: Worker, heartbeat: m.Heartbeat, now: float) -> None:
        """Make up for what was lost on the way, in either direction."""
        if heartbeat.hub != self.session:  # it does not know us: all we have is a late Hello
            self._outbox.send(worker.session, m.Unknown(self.session, now))
            return
        most = self.registry.limits.heartbeat_s_max
        heartbeat_s = self.registry.heartbeat_s
        worker.beat_s = max(heartbeat_s, min(heartbeat.heartbeat_s, most))  # the old one, if our answer is lost
        last_request_id = heartbeat.last_request_id
        if last_request_id >= worker.last_request_id and not self._reading.agrees(worker, heartbeat, now):
            self._outbox.send(worker.session, m.Unknown(self.session, now))  # so that it sends a new Hello
        worker.last_request_id = max(worker.last_request_id, last_request_id)
        unseen = tuple(
            request_id
            for request_id in heartbeat.pending
            if not self._outbox.answer_again(worker, request_id) and request_id not in worker.pending
        )
        if worker.leases or worker.pending:
            self._reading.end_what_is_not_in(worker, heartbeat)
        self._outbox.settle(worker, heartbeat)
        if heartbeat.progress:
            self.registry.renew(worker, heartbeat.progress, now)
        self._reading.extend_claims(worker, heartbeat.worked, now)
        self._record_used(worker, heartbeat.served, now)
        unreached.hear(worker, heartbeat.unreached, self._outbox, now)
        history = worker.history
        self.registry.waiters.mark_all_ready(history.beginning.values())  # the previous trainer may be the live one
        knows = heartbeat.directive_checksum in (0, history.directive_checksum)
        directive = None if knows else history.directive
        proof = self._namesakes.prove(worker, now)
        self._outbox.send(
            worker.session,
            m.Alive(unseen, directive, clock=now, hub=self.session, name_proof=proof, heartbeat_s=heartbeat_s),
        )
        if not self.registry.recovering(now):
            spare = self._publishing.spare_copies(worker)
            if spare:
                self._outbox.send(worker.session, m.MayRelease(spare))
        worker.room_bytes, worker.is_leaving, worker.lacks = heartbeat.room_bytes, heartbeat.leaving, heartbeat.lacks
        self._domains.look(history, now)

    def _record_used(self, source: Worker, served: tuple[str, ...] | None, now: float) -> None:
        """End the leases of readers' keys that are not used, so that no unpublish waits for them."""
        if served is None or not source.readers:
            return
        for lease in self.registry.record_used(source, served, now):
            self._take_lease(lease, is_idle=True)
            self.registry.end_lease(lease)
        self.registry.waiters.mark_all_ready(p for p in source.pending.values() if isinstance(p.message, m.Unpublish))

    def _release(self, worker: Worker, release: m.Release, now: float) -> None:
        request_id, shard = release.request_id, release.shard
        pending = worker.pending.get(request_id)
        if pending is not None:  # the reader abandoned it before it was answered
            self.registry.waiters.remove(pending)
        lease = worker.leases.get(request_id)
        is_last = lease is None or shard is None or set(lease.sources) <= {shard}
        if is_last:
            # its Acquire, if duplicated or late on the way, must not begin again
            self._outbox.remember(worker, m.Done(request_id))
        if lease is None:
            return
        if shard is not None and release.corrupt:
            self._publishing.doubt(lease, shard, release.corrupt, now)
        way, size_bytes, wire_size_bytes = release.came
        if shard in lease.sources and way in WAYS:
            worker.history.note_read(way, size_bytes, wire_size_bytes)
            if is_last and not (release.lost or release.corrupt):
                self._following.note_read(worker, lease.version, now)
        for each in list(lease.sources) if shard is None else [shard]:
            source = self.registry.workers.get(lease.sources.get(each, b""))
            if release.lost and source is not None:
                source.suspect = True
                if release.refused:
                    self.registry.refuses(source)
            self.registry.end_lease_shard(lease, each)

    def _forget(self, worker: Worker, why: str) -> None:
        self._outbox.log(f"{worker.history.name}: {worker.name} {why}")
        for lease in list(worker.leases.values()):
            self.registry.end_lease(lease)
        for reader in {lease.reader.session: None for lease in worker.readers.values()}:
            if reader in self.registry.workers and reader != worker.session:
                self._outbox.send(reader, m.SourceGone(worker.session))
        self.registry.remove_worker(worker)
