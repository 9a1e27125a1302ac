"""The reference server's state machine. PURE: `handle(event, now)` returns what to send; no clock, socket or thread.

What it knows
    Workers (one session each), the shards they hold, the leases under which they read each other, and which requests
    wait. Never a weight byte. All of it is soft: the Hello of every worker rebuilds a restarted hub (rule 6).

The rules it keeps (numbers as in the design)
    1  A holding that is being unpublished gets no new lease; its unpublish is answered when its last lease has
       ended or at its deadline, when the leases that are left are ended and named in the answer.
    2  A version becomes visible when one replica holds all its shards. "latest" is resolved once per reading
       replica and never below what the reader has seen; but an operator's word counts more (following.py).
    3  A holding may be incomplete and still be read (pipelining), but never in a circle: what a reader reads from must
       not, over any number of steps, read from that reader.
    4  The last copy of a retained version is not given up: its worker must retain it, and later hears when it may
       release it.
    5  Every pending request has a deadline and ends in a reply.
    6  In the first `HubLimits.grace_s` after its start the hub says nothing that depends on having heard all workers:
       it confirms no unpublish, declares no version gone, elects no converter and gives no directive.
       A Hello that was said to a hub before this one is not believed: its worker is asked to say it again.

Who converts
    Engines want their own runtime layout, trainers publish the checkpoint layout. A reader that asks for (runtime,
    checkpoint) gets runtime if a worker has it, waits if one has claimed to make it, and else makes the claim itself:
    it gets the checkpoint and is expected to publish the runtime layout. A claim ends with that publication, when it is
    abandoned, when its worker is lost, or at its deadline; then the next waiting reader makes it.

Where to read on
    `handle` takes one event, which changes records, and then answers whatever has become possible (`_run_ready`). The
    way of one version: `Publishing.publish` (publishing.py), `_run_ready` and `_try` here, `Reading.try_acquire`
    (reading.py), `RULES` (selection.py). state.py has the records, registry.py keeps their indexes in step, waiters.py
    knows which requests to try again, report.py states what is true between any two calls of `handle`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core.hub.following import Following
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.outbox import Effect, Log, Outbox, Send
from tensorhub_plugins.core.hub.publishing import Publishing
from tensorhub_plugins.core.hub.reading import Reading
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.state import Claim, History, Lease, Pending, Timed, Worker
from tensorhub_plugins.core.hub.waiters import ANY_VERSION
from tensorhub_plugins.core.protocol import messages as m

__all__ = ["Effect", "Event", "Hub", "Log", "Received", "Send", "Tick"]

PENDING_PER_SESSION_MAX = 256
FAILURES_PER_QUEUE_MAX = 4  # of requests that wait for the same: when so many cannot be served, nor can the rest


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message from the worker whose session (ZeroMQ identity) this is."""

    session: bytes
    message: m.ClientMessage


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed."""


Event: TypeAlias = Received | Tick


class Hub:
    """One hub. `session` is its life's identity, sent in every Welcome; `now` is seconds on any steady clock."""

    def __init__(self, session: bytes, now: float, limits: HubLimits | None = None) -> None:
        self.limits = HubLimits() if limits is None else limits
        self.registry = Registry(session, now, self.limits)
        self._outbox = Outbox()
        self._publishing = Publishing(self.registry, self._outbox)
        self._reading = Reading(self.registry)
        self._following = Following(self.registry, self._outbox)
        self.registry.schedule(now + self.limits.grace_s, None)

    @property
    def session(self) -> bytes:
        """Of this hub's life."""
        return self.registry.session

    # --- the one mutator ---

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what to do, in order: messages to send, lines to log."""
        match event:
            case Received(session, message):
                self._receive(session, message, now)
            case Tick():
                for due in self.registry.pop_due(now):
                    self._on_timer(due, now)
            case _:
                assert_never(event)
        while history := self.registry.waiters.pop_dirty():
            self._run_ready(history, now)
        return self._outbox.take()

    def next_deadline(self, now: float) -> float:
        """When the next Tick is due at the latest."""
        return self.registry.next_timer(now)

    # --- answering whatever can be answered now ---

    def _run_ready(self, history: History, now: float) -> None:
        waiters = self.registry.waiters
        # Unpublish first: it may keep the last copy of a version that would otherwise be declared lost.
        for pending in waiters.pop_unpublishes(history):
            self._try(pending, now)
        while history.changed or history.ready:
            changed = waiters.pop_changed(history)
            self._publishing.lose_versions(history, changed, now)
            for pending in waiters.pop_ready(history, changed):
                self._try(pending, now)
            for queue in waiters.queues_with_room(history, changed):
                failures = 0
                for pending in list(queue.values()):
                    failures += not self._try(pending, now)
                    if failures >= FAILURES_PER_QUEUE_MAX:
                        break
            self.registry.forget_old_versions(history, list(history.versions) if ANY_VERSION in changed else changed)
        if not history.workers:
            self.registry.forget_history(history)

    def _try(self, pending: Pending, now: float) -> bool:
        """Answer a request if that can be done now, else park it."""
        waiters = self.registry.waiters
        if not waiters.is_waiting(pending):
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
            case _:
                assert_never(pending.message)
        if reply is not None:
            waiters.remove(pending)
            self._outbox.reply(pending.worker, reply)
        elif not isinstance(pending.message, m.Unpublish):
            waiters.park(pending)
        return reply is not None

    def _on_timer(self, due: Timed, now: float) -> None:
        waiters = self.registry.waiters
        match due:
            case Worker():
                if now - due.last_heard > self.limits.session_timeout_s:
                    self._forget(due, f"not heard for {self.limits.session_timeout_s:g} s")
                else:
                    self.registry.schedule_silence(due)
            case Lease():
                self.registry.end_lease(due)
            case Pending():
                waiters.mark_ready(due)
            case Claim():
                self._outbox.log(f"{due.worker.name}: claim to convert {due.key} has expired")
                self.registry.remove_claim(due)
            case None:  # all workers have had time to say Hello
                for history in self.registry.histories.values():
                    waiters.mark_all_ready(history.waiting.values())
                    for number in history.versions:
                        waiters.mark_changed(history, number, room=True)
            case _:
                assert_never(due)

    # --- messages ---

    def _receive(self, session: bytes, message: m.ClientMessage, now: float) -> None:
        worker = self.registry.workers.get(session)
        match message:
            case m.AskStatus(request_id):  # for people, who have no session
                self._outbox.send(session, m.Status(request_id, report(self.registry, now)))
                return
            case m.Hello():
                self._hello(session, message, worker, now)
                return
            case _:
                pass
        if worker is None:
            if not isinstance(message, m.Bye):
                self._outbox.send(session, m.Unknown(self.session))
            return
        worker.last_heard, worker.suspect = now, False
        match message:
            case m.Heartbeat():
                self._heartbeat(worker, message, now)
            case m.Bye():
                self._forget(worker, "left")
            case m.Release(request_id, shard, lost):
                self._release(worker, request_id, shard, lost)
            case _:
                self._request(worker, message, now)

    def _request(self, worker: Worker, message: m.Request, now: float) -> None:
        request_id = message.request_id
        if request_id <= worker.hello.request_id and request_id not in worker.hello.pending:
            return  # from before its last Hello, and over
        worker.last_request_id = max(worker.last_request_id, request_id)
        if self._outbox.answer_again(worker, request_id):  # the first answer was lost
            return
        if request_id in worker.pending:
            return
        if len(worker.pending) >= PENDING_PER_SESSION_MAX:
            text = f"more than {PENDING_PER_SESSION_MAX} requests pending"
            self._outbox.refuse(worker, request_id, "UsageError", text)
            return
        match message:
            case m.Publish(_, holding):
                self._publishing.publish(worker, request_id, holding)
            case m.Acquire() | m.Unpublish() | m.Wait() | m.Target() | m.Pin() | m.Withdraw():
                self._wait(worker, message, now)
            case m.Abandon(_, key):
                self.registry.end_claim(worker, key)
                self._outbox.reply(worker, m.Done(request_id))
            case m.Retain(_, newest):
                worker.history.retain_newest = newest
                self._outbox.reply(worker, m.Done(request_id))
            case m.AskVersions():
                self._outbox.reply(worker, m.Versions(request_id, worker.history.version_infos()))
            case _:
                assert_never(message)

    def _wait(
        self, worker: Worker, message: m.Acquire | m.Unpublish | m.Wait | m.Target | m.Pin | m.Withdraw, now: float
    ) -> None:
        pending = Pending(worker, message, now + message.timeout_s)
        self.registry.waiters.add(pending)
        self.registry.schedule(pending.deadline, pending)
        if isinstance(message, m.Unpublish):
            self._publishing.begin_unpublish(worker, message)

    # --- sessions ---

    def believes(self, hello: m.Hello) -> bool:
        """Whether this was said to us, and so is not older than our life: what it says was true in our time.

        The first Hello of a worker that is all of its replica is believed at once: if it comes late, it says nothing
        that could be wrong by then.
        """
        if hello.hub == b"":
            says = (*hello.holdings, *hello.leases, *hello.claims, *hello.pending)
            return hello.shard_count == 1 and not says
        return hello.hub in (None, self.session)

    def _hello(self, session: bytes, hello: m.Hello, known: Worker | None, now: float) -> None:
        if hello.shard >= hello.shard_count:
            text = f"shard {hello.shard} of {hello.shard_count}: shards count from 0"
            self._outbox.refuse_session(session, text)
            return
        if known is not None and known.history.id == (hello.run, hello.model):
            known.last_heard, known.suspect = now, False
            if hello.request_id <= known.last_request_id:  # delayed or doubled on the way: we know better
                return
        if not self.believes(hello):
            self._outbox.send(session, m.Unknown(self.session))
            return
        history = self.registry.history(hello)
        if known is not None and known.history is history:
            worker = known
            worker.hello = hello
            self._forget_what_is_not_in(hello, worker)
            if hello.generation >= history.group(worker).generation:  # a hub before us has answered it once more
                history.group(worker).recall(hello.shard, hello.generation, hello.resolved)
        else:
            if known is not None:
                self._forget(known, "joined another run")
            worker = Worker(session, hello, history, now)
            self.registry.add_worker(worker)
            history.group(worker).recall(hello.shard, hello.generation, hello.resolved)
        worker.last_request_id = hello.request_id
        worker.seen_version = max(worker.seen_version, hello.seen)
        if hello.retain_newest is not None:
            history.retain_newest = hello.retain_newest
        self._following.direct(history, m.merge(history.directive, hello.directive), welcomed=session)
        self._take_over(worker, hello, now)
        for each in history.replicas[hello.replica].values():  # its group may be complete now
            self.registry.waiters.mark_all_ready(each.pending.values())
        welcome = m.Welcome(
            hub=self.session,
            heartbeat_s=self.limits.heartbeat_s,
            session_timeout_s=self.limits.session_timeout_s,
            request_id=hello.request_id,
            directive=history.directive,
        )
        self._outbox.send(session, welcome)

    def _take_over(self, worker: Worker, hello: m.Hello, now: float) -> None:
        """What it holds, reads and has claimed, which a hub before this one may have known of."""
        for announced in hello.holdings:
            if worker.withdrawn.get(announced.key) in hello.pending:
                continue  # withdrawn, and the answer that says so is on its way or will be sent again
            problem = self._publishing.hold(worker, announced, as_of=hello.request_id)
            if problem:
                self._outbox.log(f"{worker.name}: {problem}")
        for held in hello.leases:
            if held.sources:
                lease = Lease(
                    reader=worker,
                    request_id=held.request_id,
                    version=held.version,
                    layout=held.layout,
                    shard_count=held.shard_count,
                    sources=dict(held.sources),
                    deadline=now + held.seconds_left,
                )
                self.registry.add_lease(lease)
        for claimed in hello.claims:
            version = worker.history.version(claimed.version)
            if claimed not in version.claims:
                self.registry.add_claim(version, worker, claimed, now)

    def _forget_what_is_not_in(self, hello: m.Hello, worker: Worker) -> None:
        announced = {holding.key for holding in hello.holdings}
        for holding in [h for key, h in worker.holdings.items() if key not in announced]:
            self.registry.remove_holding(holding)
        for lease in list(worker.leases.values()):
            if lease.request_id not in hello.pending:
                self.registry.end_lease(lease)
        for pending in [p for request_id, p in worker.pending.items() if request_id not in hello.pending]:
            self.registry.waiters.remove(pending)  # it has had its answer, from a hub before us

    def _heartbeat(self, worker: Worker, heartbeat: m.Heartbeat, now: float) -> None:
        """Make up for what was lost on the way, in either direction."""
        if heartbeat.hub != self.session:  # it has not heard of us: all we have is a Hello that came late
            self._outbox.send(worker.session, m.Unknown(self.session))
            return
        last_request_id = heartbeat.last_request_id
        if last_request_id >= worker.last_request_id and not self._agrees(worker, heartbeat):
            self._outbox.send(worker.session, m.Unknown(self.session))  # its Hello will say
        worker.last_request_id = max(worker.last_request_id, last_request_id)
        unseen = []
        for request_id in heartbeat.pending:
            if not self._outbox.answer_again(worker, request_id) and request_id not in worker.pending:
                unseen.append(request_id)
        for lease in list(worker.leases.values()):
            named = lease.request_id in heartbeat.pending or lease.request_id in heartbeat.leases
            if lease.request_id <= last_request_id and not named:
                self.registry.end_lease(lease)
        history = worker.history
        knows = heartbeat.directive_checksum in (0, history.directive_checksum)
        self._outbox.send(worker.session, m.Alive(tuple(unseen), None if knows else history.directive))
        if not self.registry.recovering(now):
            spare = self._publishing.spare_copies(worker)
            if spare:
                self._outbox.send(worker.session, m.MayRelease(spare))

    def _agrees(self, worker: Worker, heartbeat: m.Heartbeat) -> bool:
        """Whether we know what it holds and how it reads; an answer of ours or of a former hub may have crossed."""
        leases = {r: len(worker.leases[r].sources) for r in heartbeat.leases if r in worker.leases}
        if heartbeat.holdings_checksum and not worker.holdings_checksum:
            held = ((key, h.complete) for key, h in worker.holdings.items())
            worker.holdings_checksum = m.holdings_checksum(held)
        return leases == heartbeat.leases and heartbeat.holdings_checksum in (0, worker.holdings_checksum)

    def _release(self, worker: Worker, request_id: int, shard: int | None, lost: bool) -> None:
        pending = worker.pending.get(request_id)
        if pending is not None:  # the reader gave up before it was answered
            self.registry.waiters.remove(pending)
        lease = worker.leases.get(request_id)
        if lease is None or shard is None or set(lease.sources) <= {shard}:
            # its Acquire, if doubled or late on the way, must not begin again
            self._outbox.remember(worker, m.Done(request_id))
        if lease is None:
            return
        for each in list(lease.sources) if shard is None else [shard]:
            source = self.registry.workers.get(lease.sources.get(each, b""))
            if lost and source is not None:
                source.suspect = True
            self.registry.end_lease_shard(lease, each)

    def _forget(self, worker: Worker, why: str) -> None:
        self._outbox.log(f"{worker.history.name}: {worker.name} {why}")
        for lease in list(worker.leases.values()):
            self.registry.end_lease(lease)
        for reader in {lease.reader.session: None for lease in worker.readers.values()}:
            if reader in self.registry.workers and reader != worker.session:
                self._outbox.send(reader, m.SourceGone(worker.session))
        self.registry.remove_worker(worker)
