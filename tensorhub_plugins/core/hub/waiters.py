"""Which requests wait for what, and which of them are to be tried again. PURE.

A request that cannot be answered now is parked in a queue: of the version it waits for, and within it of requests with
an equal `wait_key`, which are interchangeable: if one of them finds no source, neither will the others. So when a
version changes, only the first few of each of its queues are tried, however many thousands wait.

Changes of records are noted here (`mark_ready`, `mark_changed`), and `hub.Hub` acts on them when the event has been
handled completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from tensorhub_plugins.core.hub.state import History, Pending, drop, items_of
from tensorhub_plugins.core.protocol import messages as m

ANY_VERSION = 0  # in place of a version: requests that wait for one to become visible, or to be lost
LEASES_ALIKE_MAX = 4  # a worker with more may have too many on one source, see selection.py
Queue = dict[tuple[bytes, int], Pending]


class Waiters:
    """The queues of requests that wait, and the marks of what may be answered now."""

    def __init__(self) -> None:
        self._dirty: dict[tuple[str, str], History] = {}  # there is something to do
        self.put_off: dict[tuple[str, str], History] = {}  # as those, with the next event
        self._tries_left = 0
        self._arrivals = 0

    # --- requests that wait ---

    def add(self, pending: Pending) -> None:
        """Add a request that has arrived."""
        self._arrivals += 1
        pending.order = self._arrivals
        pending.worker.pending[pending.message.request_id] = pending
        pending.worker.pending_items += items_of(pending.message)
        pending.worker.history.waiting[pending.id] = pending
        if isinstance(pending.message, m.Begin):
            pending.worker.history.beginning[pending.id] = pending
        self.mark_ready(pending)

    def remove(self, pending: Pending) -> None:
        """Remove a request that was answered, or is not wanted any more."""
        history = pending.worker.history
        if drop(pending.worker.pending, pending.message.request_id) is not None:
            pending.worker.pending_items -= items_of(pending.message)
        history.waiting.pop(pending.id, None)
        history.beginning.pop(pending.id, None)
        history.ready.pop(pending.id, None)
        history.leaving.pop(pending.id, None)
        _leave_queue(pending)

    def is_waiting(self, pending: Pending) -> bool:
        """Return whether it has not been answered yet."""
        return pending.worker.history.waiting.get(pending.id) is pending

    def park(self, pending: Pending) -> None:
        """Queue a request that cannot be answered now, to be found when what it needs may have come."""
        history, message = pending.worker.history, pending.message
        number, key = ANY_VERSION, None
        if isinstance(message, m.Acquire) and history.is_visible(message.version or pending.version):
            number = message.version or pending.version
            key = wait_key(pending, message, number)
        if pending.queue != (number, key):
            _leave_queue(pending)
            pending.queue = number, key
            history.wait_queues.setdefault(number, {}).setdefault(key, {})[pending.id] = pending

    # --- requests to be tried again ---

    def allow_tries(self, most: int) -> None:
        """Have `pop_ready` return so many requests; those beyond are put off until this is called again."""
        self._tries_left = most
        if self.put_off:
            self._dirty, self.put_off = self.put_off | self._dirty, {}

    def mark_dirty(self, history: History) -> None:
        """Note that this history has something to do."""
        self._dirty[history.id] = history

    def mark_ready(self, pending: Pending) -> None:
        """Note that it may be possible to answer this request now."""
        history = pending.worker.history
        marked = history.leaving if isinstance(pending.message, m.Unpublish) else history.ready
        marked[pending.id] = pending
        self.mark_dirty(history)

    def mark_all_ready(self, pending: Iterable[Pending]) -> None:
        """Call `mark_ready` for each of these."""
        for each in pending:
            self.mark_ready(each)

    def mark_changed(self, history: History, number: int, *, room: bool) -> None:
        """Note that something about this version has changed. room: so that readers may find a source."""
        history.changed[number] = history.changed.get(number, False) or room
        self.mark_dirty(history)

    def pop_dirty(self) -> History | None:
        """Remove and return a history with something to do."""
        return self._dirty.popitem()[1] if self._dirty else None

    def pop_unpublishes(self, history: History) -> list[Pending]:
        """Remove and return the marked requests to unpublish: they come before all others."""
        found, history.leaving = history.leaving, {}
        return in_order(found)

    def pop_changed(self, history: History) -> dict[int, bool]:
        """Remove and return the versions that changed, and whether readers may find a source."""
        changed, history.changed = history.changed, {}
        return changed

    def pop_ready(self, history: History, changed: Iterable[int]) -> list[Pending]:
        """Remove and return the marked requests, and all for changed versions that are not visible (any more); of more
        than may be tried now, the first."""
        for number in changed:
            if not history.is_visible(number):
                for queue in history.wait_queues.get(number, {}).values():
                    history.ready.update(queue)
        found, history.ready = history.ready, {}
        if len(found) > self._tries_left:
            history.ready, found = found, dict(islice(found.items(), self._tries_left))
            for key in found:
                del history.ready[key]
            self.put_off[history.id] = history
        self._tries_left -= len(found)
        return in_order(found)

    def queues_with_room(self, history: History, changed: dict[int, bool]) -> Iterator[Queue]:
        """Yield the queues of visible versions for which there may be a source now."""
        for number, room in changed.items():
            if room and history.is_visible(number):
                yield from list(history.wait_queues.get(number, {}).values())


def wait_key(pending: Pending, acquire: m.Acquire, number: int) -> object:
    """Return a key that is equal for requests that can be served by the same sources."""
    worker, hello = pending.worker, pending.worker.hello
    picky = acquire.avoid or acquire.exclude or acquire.shards or acquire.beside
    if picky or worker.readers or len(worker.leases) >= LEASES_ALIKE_MAX:
        return pending.id
    if any(held.version == number for held in worker.holdings):
        return pending.id
    claimant = worker.session if acquire.claim else None
    data_center = hello.location.data_center
    return acquire.layouts, acquire.serve, claimant, hello.shard, hello.shard_count, data_center


def in_order(pending: Queue) -> list[Pending]:
    """Return requests in the order in which they arrived."""
    return sorted(pending.values(), key=lambda each: each.order) if len(pending) > 1 else list(pending.values())


def _leave_queue(pending: Pending) -> None:
    if pending.queue is None:
        return
    (number, key), pending.queue = pending.queue, None
    queues = pending.worker.history.wait_queues
    del queues[number][key][pending.id]
    if not queues[number][key]:
        del queues[number][key]
    if not queues[number]:
        del queues[number]
