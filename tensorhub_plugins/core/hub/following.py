"""Which version is to be run: what followers wait for, and what operators decide. PURE.

A *pinned* version is "latest" as long as the pin stands, also for readers that have seen newer ones, and it is
retained; newer ones become visible meanwhile and are not followed. A *withdrawn* version is not visible any more: it
gets no lease, and a reader that has seen it may go back. The same holds for a *superseded* one, which a newer attempt
of the trainer has ended (attempts.py). A worker that reads it is notified, and its lease ends when that worker
releases it, because until then it reads. All are in the history's directive (messages.py), which every worker keeps
and announces. A follower asks for its `Target`; it goes back only because of one of the three.
"""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Pending, Worker
from tensorhub_plugins.core.hub.waiters import ANY_VERSION
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import WITHDRAWN_MAX, Directive, merge
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.protocol.lineage import Attempt, conflicts
from tensorhub_plugins.core.types import version_text

SERIALS_AHEAD_MAX = 4096  # that a hub may have missed; with the highest serial operators could decide nothing more
ATTEMPTS_AHEAD_MAX = 1000  # starts of a trainer that a hub may have missed; all numbers are 281,474
MARKS_REFUSED_MAX = 64  # trainers that were warned of, so that the warning comes once
VERSIONS_LISTED_MAX = 16  # in one sentence
NOT_HEARD = "the hub has just been started and does not know yet what is held: ask again in a few seconds"


class Following:
    """The handler of requests that wait for versions, and of operators' decisions."""

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry, self._outbox = registry, outbox

    # --- followers ---

    def try_wait(self, pending: Pending, wait: m.Wait, now: float) -> m.Reply | None:
        """Return a version that this reader may have; None: not yet. Refused at the deadline."""
        history = pending.worker.history
        self._note_loop(pending.worker, wait, now)
        number = history.latest(max(wait.newer_than + 1, history.floor(pending.worker.seen_version)))
        if number is not None and number <= wait.newer_than:  # pinned
            number = None
        if wait.version:
            number = wait.version if history.is_visible(wait.version) else None
            if number is None and (history.is_over(wait.version) or self._registry.is_gone(history, wait.version, now)):
                return gone(wait.request_id, history, wait.version)
        if number is not None:
            pending.worker.seen_version = max(pending.worker.seen_version, number)
            return m.Visible(wait.request_id, number)
        if pending.deadline <= now:
            what = f"version {wait.version}" if wait.version else f"a version newer than {wait.newer_than}"
            return m.Refused(wait.request_id, "NotPublished", f"{what} was not published before the deadline")
        return None

    def try_target(self, pending: Pending, target: m.Target, now: float) -> m.Reply | None:
        """Return the version for a follower to run. It goes back only to a pinned version, or from one that is over."""
        history, installed = pending.worker.history, target.installed
        self._note_follower(pending.worker, target, now)
        pin = history.directive.pin if target.pins else 0
        if pin:
            overruled = history.directive.serial > target.serial  # pinned after it was refused
            number = pin if history.is_visible(pin) and (pin not in target.refused or overruled) else None
        else:
            number = history.newest(history.floor(installed), target.refused)
            if number is not None and number < installed and self._registry.recovering(now):
                number = None  # a worker whose Hello has not come yet may hold a newer one
        if number is not None and number != installed:
            pending.worker.seen_version = max(pending.worker.seen_version, number)
            return m.Visible(target.request_id, number)
        if pending.deadline > now:
            return None
        error: m.ErrorCode = "NotPublished"
        text = f"no other version than {installed or 'none'} was to be run before the deadline"
        if self._registry.recovering(now):  # others may still report what they hold
            if not installed:  # with no version, "none was published" would be taken for the end of the matter
                error, text = "DeadlineExceeded", NOT_HEARD
        elif pin and not history.is_visible(pin):
            error = "VersionGone"
            text = f"version {pin} is pinned, but no worker holds it: unpin it, or pin another; held: {listed(history)}"
        elif installed in history.withdrawn:
            error = "VersionGone"
            text = f"version {installed}, which is installed, was withdrawn, and there is no other to run: publish one"
        return m.Refused(target.request_id, error, text)

    def _note_follower(self, worker: Worker, target: m.Target, now: float) -> None:
        """Remember for people what the worker runs, and the newest version that it refuses, if that is above it.

        A question that does not wait, and names none, says nothing of that."""
        if not (target.refused or target.timeout_s):
            return
        self._note_installed(worker, target.installed, now)
        worker.runs_what_it_reads = False  # an engine may read long before it installs
        worker.failure = target.failure
        newest = max(target.refused, default=0)
        refusal = (newest, target.why) if newest > target.installed else (0, "")
        if refusal != worker.refusal:
            worker.refusal = refusal
            if newest := refusal[0]:
                self._outbox.log(f"{worker.name} cannot install version {version_text(newest)}: {target.why}")

    def _note_loop(self, worker: Worker, wait: m.Wait, now: float) -> None:
        """Remember that it has this version and wants the next: a loop by hand asks so. A trainer, which asks when it
        may unpublish, is no follower."""
        if wait.version or not wait.timeout_s or worker.published_size_bytes:
            return
        self._note_installed(worker, wait.newer_than, now)
        worker.runs_what_it_reads = True

    def note_read(self, worker: Worker, version: int, now: float) -> None:
        """Note that a follower has read this version. What it read for others is older than what it has seen.

        A worker of an engine asks as a follower once, before it has any version; afterwards its engine says what runs,
        if it follows."""
        if worker.installed is None or version != worker.seen_version:
            return
        if worker.runs_what_it_reads:
            self._note_installed(worker, version, now)
        elif not worker.installed:
            worker.installed = None

    def _note_installed(self, worker: Worker, version: int, now: float) -> None:
        if worker.installed != version:
            worker.installed, worker.installed_at = version, now

    # --- operators ---

    def try_direct(self, pending: Pending, message: m.Pin | m.Withdraw, now: float) -> m.Reply | None:
        """Carry out an operator's decision, once it is known what is held and what was decided before."""
        history, number = pending.worker.history, message.version
        if self._registry.recovering(now):
            if pending.deadline > now:
                return None
            return m.Refused(message.request_id, "DeadlineExceeded", NOT_HEARD)
        old = history.directive
        if isinstance(message, m.Pin):
            problem = _cannot_pin(history, number) if number else None
            # The same pin once more is a new decision: engines that have refused the version try it again.
            again = msgspec.structs.replace(old, serial=old.serial + 1, pin=number)
            new = again if number or old.pin else old
        else:
            new = merge(old, Directive(old.serial, old.pin, (number,)))
            problem = _cannot_withdraw(history, number, new)
            if new != old:
                new = msgspec.structs.replace(new, serial=old.serial + 1)
        if problem is None and new.serial > SERIAL_MAX:
            problem = f"{SERIAL_MAX} directives were given in {history.name}: use another run name"
        if problem is not None:
            self._outbox.log(f"{pending.worker.name}: refused: {problem}")
            return m.Refused(message.request_id, "UsageError", problem)
        self.direct(history, new)
        return m.Done(message.request_id)

    def announced(self, history: History, directive: Directive, now: float) -> Directive:
        """Return the directive after a worker has announced this one, which is ignored where it is impossible."""
        is_far = directive.serial > history.directive.serial + SERIALS_AHEAD_MAX
        known_attempt = max([0, *(attempt.number for attempt in history.directive.attempts)])
        is_far |= any(attempt.number > known_attempt + ATTEMPTS_AHEAD_MAX for attempt in directive.attempts)
        if is_far and not self._registry.recovering(now):
            known = history.directive.serial
            self._outbox.log(f"{history.name}: directive {directive.serial} cannot follow {known}: not believed")
            return history.directive
        for counts, other in conflicts(history.directive.attempts, directive.attempts):
            self._warn(history, counts, other)
        return merge(history.directive, directive)

    def _warn(self, history: History, counts: Attempt, other: Attempt) -> None:
        """Warn once of two trainers with one attempt: every worker that knows of the other one announces it."""
        if other.mark in history.marks_refused:
            return
        history.marks_refused[other.mark] = None
        while len(history.marks_refused) > MARKS_REFUSED_MAX:
            del history.marks_refused[next(iter(history.marks_refused))]
        self._outbox.warn(
            f"{history.name}: two trainers have begun attempt {counts.number}, at hubs that did not know of each "
            f"other: mark {counts.mark.hex()} at step {counts.step} and mark {other.mark.hex()} at step {other.step}. "
            f"The one of mark {counts.mark.hex()} counts, and what the other publishes is refused: end that one"
        )

    def direct(self, history: History, directive: Directive, *, welcomed: bytes | None = None) -> None:
        """Apply a new directive and send it to all workers. welcomed: this worker gets it with its Welcome."""
        old, waiters = history.directive, self._registry.waiters
        if directive == old:
            return
        history.direct(directive)
        for number in (number for number in directive.withdrawn if number not in old.withdrawn):
            self._outbox.log(f"{history.name}: version {version_text(number)} is withdrawn")
        for number in [number for number in history.versions if directive.is_over(number) and not old.is_over(number)]:
            version = history.versions[number]
            version.visible = False
            for claim in list(version.claims.values()):
                self._registry.remove_claim(claim)
            waiters.mark_changed(history, number, room=True)
        if directive.pin != old.pin:
            self._outbox.log(f"{history.name}: pinned version {directive.pin or 'none'}, before {old.pin or 'none'}")
        waiters.mark_changed(history, ANY_VERSION, room=False)
        for worker in history.workers.values():
            worker.seen_version = history.floor(worker.seen_version)
        for session in history.workers:
            if session != welcomed:
                self._outbox.send(session, m.Alive((), directive))


def _cannot_pin(history: History, number: int) -> str | None:
    if number in history.withdrawn:
        return f"version {number} was withdrawn and cannot be pinned; held: {listed(history)}"
    if not history.is_visible(number):
        return f"version {number} cannot be pinned because no worker holds it; held: {listed(history)}"
    return None


def _cannot_withdraw(history: History, number: int, new: Directive) -> str | None:
    if number not in new.withdrawn:
        return f"version {number} cannot be withdrawn: {WITHDRAWN_MAX} newer ones are, and no more are remembered"
    version = history.versions.get(number)  # some of its shards may be here, and others be published right now
    if number in history.withdrawn or number <= history.newest_visible or (version is not None and version.holdings):
        return None
    return f"version {number} cannot be withdrawn because it was never published; held: {listed(history)}"


def gone(request_id: int, history: History, number: int) -> m.Refused:
    """Return the refusal of a version that no worker holds any more, or that was withdrawn."""
    if number in history.withdrawn:
        why = "was withdrawn and must not be used"
    elif history.is_over(number):
        newest = history.directive.attempts[-1]
        why = f"is superseded: attempt {newest.number} has begun at step {newest.step}"
    else:
        why = "has been unpublished or lost with its last holder"
    return m.Refused(request_id, "VersionGone", f"version {version_text(number)} {why}; visible now: {listed(history)}")


def listed(history: History) -> str:
    """Return the versions that are available, as text for users."""
    visible = history.visible()
    if not visible:
        return "none"
    more = ["..."] if len(visible) > VERSIONS_LISTED_MAX else []
    return f"[{', '.join([*more, *map(version_text, reversed(visible[:VERSIONS_LISTED_MAX]))])}]"
