"""The start or restart of a trainer: which attempt it makes, and which processes may no longer publish. PURE.

All shards of one replica begin an attempt together, so that its ranks agree. Only one trainer works on a model: while
another one that has published, or begun an attempt, sends heartbeats, a Begin is refused; while that one is silent, the
Begin waits until it is declared dead, which is soon where its machine reports that its process has ended (`suspect`). A
Begin also waits at a restarted hub that has not heard from the trainer of the newest attempt, which other workers have
reported, until that trainer has had as long to be heard. What former attempts made above the step is superseded
(protocol/lineage.py), and from then on their processes change nothing: they may only read.
"""

from __future__ import annotations

from tensorhub_plugins.core.hub.following import Following
from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Pending, Worker, check_of
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive, merge
from tensorhub_plugins.core.protocol.lineage import Attempt
from tensorhub_plugins.core.types import ATTEMPTS_MAX, attempt_of

RIVALS_NAMED_MAX = 8


class Beginning:
    """The handler of requests to begin an attempt."""

    def __init__(self, registry: Registry, outbox: Outbox, following: Following) -> None:
        self._registry, self._outbox, self._following = registry, outbox, following

    def try_begin(self, pending: Pending, begin: m.Begin, now: float) -> m.Reply | None:
        """Return the attempt, once all shards ask for it and no other trainer is left; None: not yet."""
        worker, history = pending.worker, pending.worker.history
        if worker.is_replaced:
            text = f"another process has said Hello as {worker.name} since: it is the trainer now"
            return m.Refused(begin.request_id, "Superseded", text)
        if self._registry.recovering(now):
            return self._not_in_time(pending, now, "the hub has just been started and does not know yet its workers")
        members = _members(history, pending, now)
        if pending.id in history.begun_by or _may_join(history, pending):
            worker.mark = history.directive.mark
            return m.Begun(begin.request_id, history.directive.attempts[-1], self._registry.session)
        rivals = [w for w in history.workers.values() if _is_rival(w, pending, members)]
        if rivals and not begin.waits:
            names = tuple(w.name for w in rivals)[:RIVALS_NAMED_MAX]
            return m.Rivals(begin.request_id, names, tuple(w.hello.process for w in rivals if w.hello.process)[:1024])
        lives = [w for w in rivals if w.last_heard > pending.since + self._registry.limits.heartbeat_s]
        if lives:
            return m.Refused(begin.request_id, "UsageError", _lives(history, lives))
        if rivals:
            text = f"{_listed(rivals)} of a former attempt may still live, and is evicted after"
            silence_s = max(map(self._registry.silence_s, rivals))
            return self._not_in_time(pending, now, f"{text} {silence_s:g} s of silence")
        if self._may_be_unheard(history, now):
            newest = history.directive.attempts[-1].number
            text = f"attempt {newest} has begun before this hub was started, and its trainer may still say Hello"
            return self._not_in_time(pending, now, text)
        missing = [shard for shard in range(worker.hello.shard_count) if shard not in members]
        if missing:
            return self._not_in_time(pending, now, f"shards {missing[:RIVALS_NAMED_MAX]} have not begun it as well")
        return self._begin(pending, begin, list(members.values()))

    def _may_be_unheard(self, history: History, now: float) -> bool:
        """Return whether the newest attempt is a former hub's and its trainer, not heard here yet, may be alive."""
        mark = history.directive.mark
        if not mark or now >= self._registry.all_silent_are_dead or self._registry.is_ours(mark):
            return False
        return not any(worker.mark == mark for worker in history.workers.values())

    def _not_in_time(self, pending: Pending, now: float, why: str) -> m.Refused | None:
        if now < pending.deadline:
            return None
        return m.Refused(pending.message.request_id, "DeadlineExceeded", f"the attempt was not begun in time: {why}")

    def _begin(self, pending: Pending, begin: m.Begin, members: list[Pending]) -> m.Reply:
        history, old, hub = pending.worker.history, pending.worker.history.directive, self._registry.session
        number = _next_number(history)
        if number >= ATTEMPTS_MAX:
            text = f"{ATTEMPTS_MAX} attempts were begun in {history.name}: use another run name"
            return m.Refused(begin.request_id, "UsageError", text)
        attempt = Attempt(number, begin.step, self._registry.new_mark(begin.launch_id))
        for member in members:
            member.worker.mark = attempt.mark
        self._outbox.log(f"{history.name}: {pending.worker.hello.replica} begins attempt {number} at step {begin.step}")
        self._following.direct(history, merge(old, Directive(old.serial, old.pin, (), (attempt,))))
        history.begun_by = frozenset(member.id for member in members)
        for member in members:
            if member is not pending:
                self._registry.waiters.remove(member)
                self._outbox.reply(member.worker, m.Begun(member.message.request_id, attempt, hub))
        return m.Begun(begin.request_id, attempt, hub)

    def suspect(self, history: History, begin: m.Begin) -> None:
        """Suspect trainers whose processes have ended, as this Begin says. It may be wrong: a copy of a virtual machine
        looks like the original, where it may be at work. One that is heard is alive. Else it is declared dead when its
        connection has ended as well, which the server notices by what is sent here, or after a few heartbeats."""
        gone = frozenset(begin.gone)
        for worker in history.workers.values() if gone else ():
            if worker.hello.process in gone and is_trainer(worker):
                worker.said_gone = True
                self._registry.refuses(worker)
                self._outbox.send(worker.session, m.Alive())


def changes(message: m.Request) -> bool:
    """Return whether this message changes what others may read, and not only what its worker reads or has lost."""
    match message:
        case m.Publish(_, holding):
            return holding.origin == "published"
        case m.Unpublish():
            return not message.gone
        case _:
            return isinstance(message, m.Retain | m.Pin | m.Withdraw)


def over(worker: Worker) -> str | None:
    """Return why a worker of a former attempt is refused what `changes`; None: it is not."""
    if not worker.is_zombie:
        return None
    newest = worker.history.directive.attempts[-1]
    return (
        f"{worker.name} belongs to a former attempt of {worker.history.name}: attempt {newest.number} has begun at "
        f"step {newest.step}. End this process"
    )


def _members(history: History, pending: Pending, now: float) -> dict[int, Pending]:
    """Return the requests, by shard, that begin the same attempt as this one and were not abandoned."""
    asked, hello = pending.message, pending.worker.hello
    assert isinstance(asked, m.Begin)
    return {
        other.worker.hello.shard: other
        for other in history.beginning.values()
        if isinstance(other.message, m.Begin)
        and (other.message.step, other.message.launch_id) == (asked.step, asked.launch_id)
        and (other.worker.hello.replica, other.worker.hello.shard_count) == (hello.replica, hello.shard_count)
        and not other.worker.is_replaced
        and not other.is_overdue(now)
    }


def _may_join(history: History, pending: Pending) -> bool:
    """Return whether its other shards have begun just this attempt and it is late: it missed the answer, perhaps that
    of a previous hub, or a rank of the previous start was taken for it."""
    asked, hello, directive = pending.message, pending.worker.hello, history.directive
    assert isinstance(asked, m.Begin)
    if not directive.mark or directive.attempts[-1].step != asked.step:
        return False
    if not directive.mark.endswith(check_of(asked.launch_id)) or hello.shard_count == 1:
        return False
    workers = [w for w in history.members(pending.worker) if w is not pending.worker and not w.is_replaced]
    mates = [w for w in workers if w.mark == directive.mark]
    begun = directive.attempts[-1].number
    return bool(mates) and not any(attempt_of(version) == begun for version in _made(history))


def _made(history: History) -> list[int]:
    """Return the versions that any worker has made."""
    made = {*history.versions, *history.withdrawn, *history.shown}
    made |= {w.seen_version for w in history.workers.values() if w.role != "reader"}
    return sorted(made - {0})


def is_trainer(worker: Worker) -> bool:
    """Return whether it has published, or begun an attempt, or is about to. A reader is none, whatever it claims."""
    holds = any(h.is_published for h in worker.holdings.values())
    return holds or bool(worker.mark) or any(isinstance(p.message, m.Begin) for p in worker.pending.values())


def _is_rival(worker: Worker, pending: Pending, members: dict[int, Pending]) -> bool:
    """Return whether this is another trainer that may be alive. Excluded are one that a newer attempt has ended, a
    later one that begins as well, and another client of the same process."""
    if any(worker is member.worker for member in members.values()):
        return False
    processes = {member.worker.hello.process for member in members.values()} - {""}
    if worker.hello.process in processes or worker.is_zombie:
        return False
    asked = [p for p in worker.pending.values() if isinstance(p.message, m.Begin)]
    if asked and not worker.mark:
        return any(other.order < pending.order for other in asked)
    return is_trainer(worker)


def _next_number(history: History) -> int:
    """Return a number above all that any worker has made; the very first is 0, and its versions are plain steps."""
    numbers = [attempt.number for attempt in history.directive.attempts]
    return max([*numbers, *map(attempt_of, _made(history))], default=-1) + 1


def _lives(history: History, rivals: list[Worker]) -> str:
    return (
        f"{_listed(rivals)} is the trainer of {history.name} and still sends heartbeats: a second one is refused. End "
        "it, or take another run or model name"
    )


def _listed(workers: list[Worker]) -> str:
    return ", ".join(worker.name for worker in workers[:RIVALS_NAMED_MAX])
