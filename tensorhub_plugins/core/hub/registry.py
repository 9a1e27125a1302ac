"""The hub's bookkeeping. PURE, and it sends nothing: what is entered here is entered wherever it will be looked for.

A holding, lease, claim or request is in several places: with its worker, with its version, among the sources a reader
may be given (`Sources`), in a line of those who wait for the same. Each method here changes all of them together, and
notes what may have become possible (`_change`, `_look_at`) for `Hub` to settle afterwards. `report.validate` states
what is then true.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from typing_extensions import assert_never

from tensorhub_plugins.core.hub.selection import (
    Candidate,
    Sources,
)
from tensorhub_plugins.core.hub.state import Claim, History, Holding, Lease, Pending, Timed, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import (
    FAR,
    HOST,
    ShardKey,
    distance,
)

TIMERS_SWEPT_EVERY = 100_000
VERSIONS_REMEMBERED_MAX = 1024  # invisible or lost versions that are kept only to answer questions about them
ANY = 0  # in the place of a version: that one becomes visible, or is lost


class Books:
    """Everything the hub knows, in every index in which it is looked up. session: of the hub's life; now: its start."""

    def __init__(self, session: bytes, now: float) -> None:
        self.session = session
        self.started = now
        self.workers: dict[bytes, Worker] = {}
        self.histories: dict[tuple[str, str], History] = {}
        self._dirty: dict[tuple[str, str], History] = {}
        self._arrivals = 0
        self._timers: list[tuple[float, int, Timed]] = []
        self._crossings: dict[str, Counter[tuple[str, str]]] = {}  # into a data centre, by run and model
        self._wants_to_cross: dict[str, dict[tuple[str, str], None]] = {}

    # --- time ---

    def _at(self, when: float, thing: Timed) -> None:
        """Look at this when its time has come, if it is still there."""
        self._arrivals += 1
        heapq.heappush(self._timers, (when, self._arrivals, thing))
        if self._arrivals % TIMERS_SWEPT_EVERY == 0:  # most of what has a deadline ends long before it
            self._timers = [timer for timer in self._timers if self._is_alive(timer[2])]
            heapq.heapify(self._timers)

    def _is_alive(self, thing: Timed) -> bool:
        match thing:
            case Worker():
                return self.workers.get(thing.session) is thing
            case Lease():
                return thing.reader.leases.get(thing.request_id) is thing
            case Pending():
                return thing.worker.pending.get(thing.message.request_id) is thing
            case Claim():
                return thing.version.claims.get(thing.key) is thing
            case None:
                return True
            case _:
                assert_never(thing)

    # --- holdings ---

    def _drop(self, holding: Holding) -> None:
        """Forget a holding and end the leases on it."""
        worker, key = holding.worker, holding.key
        worker.holdings.pop(key, None)
        worker.holdings_checksum = 0
        version = worker.history.versions[key.version]
        version.may_be_lost = True
        by_shard = version.holdings[key.layout, key.shard_count]
        by_shard[key.shard].pop(worker.session, None)
        if not by_shard[key.shard]:
            del by_shard[key.shard]
        if not by_shard:
            del version.holdings[key.layout, key.shard_count]
        for lease in self._leases_on(worker, key):
            self._end_lease_shard(lease, key.shard)
        self._reconsider(worker, key)

    def _reconsider(self, worker: Worker, key: ShardKey) -> None:
        """Whether this worker may be read from for this shard, and how it compares, after something has changed."""
        history = worker.history
        version = history.versions.get(key.version)
        if version is None:
            return
        held = worker.holdings.get(key)
        arriving = held is None and any(lease.serves and key in lease.shard_keys() for lease in worker.leases.values())
        lives = self.workers.get(worker.session) is worker
        if lives and (arriving or (held is not None and (held.unpublishing is None or held.must_retain))):
            depth = 0 if held is not None and held.complete else worker.depth.get(key, 1)
            first_hand = held is not None and held.origin == "published"
            candidate = Candidate(worker.hello.location, depth, worker.network_readers, first_hand)
            version.sources.setdefault(key, Sources()).put(worker.session, candidate)
        elif key in version.sources:
            version.sources[key].remove(worker.session)
            if not version.sources[key]:
                del version.sources[key]
        self._change(history, key.version, room=True)

    def _leases_on(self, worker: Worker, key: ShardKey) -> list[Lease]:
        return [
            lease
            for lease in worker.readers.values()
            if lease.version == key.version
            and lease.layout == key.layout
            and lease.sources.get(key.shard) == worker.session
        ]

    # --- leases ---

    def _lease(self, lease: Lease) -> None:
        reader = lease.reader
        before = reader.leases.get(lease.request_id)
        if before is not None:  # a Hello that names a number twice
            self._end_lease(before)
        reader.leases[lease.request_id] = lease
        self._at(lease.deadline, lease)
        for session in set(lease.sources.values()):
            source = reader.history.workers.get(session)
            if source is not None:
                self._count_reader(source, lease, 1)
            else:
                strangers = reader.history.leases_on_strangers.setdefault(session, {})
                strangers[reader.session, lease.request_id] = lease
        for key in lease.shard_keys():
            source = reader.history.workers.get(lease.sources[key.shard])
            known = source.depth.get(key, 0) if source is not None else 0
            if not lease.beside:
                reader.depth[key] = known + 1
            self._reconsider(reader, key)

    def _count_reader(self, source: Worker, lease: Lease, change: int) -> None:
        """A reader begins (1) or ends (-1) to read from this source."""
        reader, history = lease.reader, lease.reader.history
        if change > 0:
            source.readers[reader.session, lease.request_id] = lease
        else:
            source.readers.pop((reader.session, lease.request_id), None)
        far = distance(source.hello.location, reader.hello.location)
        if far > HOST:
            source.network_readers += change
        if far == FAR:
            place, name = reader.hello.location.data_center, (history.run, history.model)
            crossing = self._crossings.setdefault(place, Counter())
            crossing[name] += change
            if change < 0:
                if not crossing[name]:
                    del crossing[name]
                for waiting in self._wants_to_cross.pop(place, {}):
                    if waiting in self.histories:
                        for number in self.histories[waiting].versions:
                            self._change(self.histories[waiting], number, room=True)
        for key in {*source.holdings, *source.depth}:
            self._reconsider(source, key)
        if change < 0:
            for pending in source.pending.values():
                if isinstance(pending.message, m.Unpublish):
                    self._look_at(pending)

    def _end_lease_shard(self, lease: Lease, shard: int) -> None:
        reader = lease.reader
        key = lease.key(shard)
        session = lease.sources.pop(shard, None)
        if session is not None and session not in lease.sources.values():
            source = reader.history.workers.get(session)
            if source is not None and (reader.session, lease.request_id) in source.readers:
                self._count_reader(source, lease, -1)
            strangers = reader.history.leases_on_strangers
            if session in strangers:
                strangers[session].pop((reader.session, lease.request_id), None)
                if not strangers[session]:
                    del strangers[session]
        if not lease.sources:
            reader.leases.pop(lease.request_id, None)
        if not any(key in other.shard_keys() for other in reader.leases.values()):
            held = reader.holdings.get(key)
            if held is None or held.complete:
                reader.depth.pop(key, None)
        self._reconsider(reader, key)

    def _end_lease(self, lease: Lease) -> None:
        for shard in list(lease.sources):
            self._end_lease_shard(lease, shard)

    def _reads_from(self, worker: Worker, reader: Worker) -> bool:
        """Rule 3: whether worker's own reading depends on reader, over any number of steps, as far as we can see.

        What a stranger reads, who has not said Hello since a restart, may be the reader's."""
        if not reader.readers and not reader.history.leases_on_strangers:
            return False
        seen: set[bytes] = set()
        todo = [worker]
        while todo:
            for lease in todo.pop().leases.values():
                for session in lease.sources.values():
                    if session == reader.session:
                        return True
                    source = self.workers.get(session)
                    if source is None:
                        return True
                    if session not in seen:
                        seen.add(session)
                        todo.append(source)
        return False

    # --- claims and waiters ---

    def _end_claim(self, worker: Worker, key: ShardKey) -> None:
        version = worker.history.versions.get(key.version)
        claim = version.claims.get(key) if version else None
        if version is not None and claim is not None and claim.worker is worker:
            del version.claims[key]
            self._change(worker.history, key.version, room=True)

    def _forget_pending(self, pending: Pending) -> None:
        history, key = pending.worker.history, (pending.worker.session, pending.message.request_id)
        pending.worker.pending.pop(pending.message.request_id, None)
        for queue in (history.waiting, history.due):
            queue.pop(key, None)
        self._leave_line(pending)

    def _stand_in_line(self, pending: Pending) -> None:
        """Where it is found when what it needs may have come."""
        worker, history, message = pending.worker, pending.worker.history, pending.message
        number, need = ANY, None
        if isinstance(message, m.Acquire) and history.is_visible(message.version or pending.version):
            number = message.version or pending.version
            need = self._need(worker, message, number)
        if pending.line != (number, need):
            self._leave_line(pending)
            pending.line = number, need
            line = history.lines.setdefault(number, {}).setdefault(need, {})
            line[worker.session, message.request_id] = pending

    @staticmethod
    def _need(worker: Worker, acquire: m.Acquire, number: int) -> object:
        """Equal for those who can be served by the same sources."""
        hello = worker.hello
        if acquire.avoid or acquire.exclude or acquire.shards or worker.readers:
            return worker.session, acquire.request_id
        if any(held.version == number for held in worker.holdings):
            return worker.session, acquire.request_id
        claim = hello.replica if acquire.claim else None
        place = hello.location.data_center
        return acquire.layouts, acquire.serve, claim, hello.shard, hello.shard_count, place

    @staticmethod
    def _leave_line(pending: Pending) -> None:
        if pending.line is None:
            return
        (number, need), pending.line = pending.line, None
        lines = pending.worker.history.lines
        line = lines[number][need]
        del line[pending.worker.session, pending.message.request_id]
        if not line:
            del lines[number][need]
        if not lines[number]:
            del lines[number]

    def _forget_old_versions(self, history: History, numbers: Iterable[int]) -> None:
        def idle(number: int) -> bool:
            version = history.versions[number]
            return not (version.holdings or version.claims or version.visible or version.sources)

        for number in [n for n in numbers if n in history.versions and n < history.newest_visible and idle(n)]:
            del history.versions[number]
        if len(history.versions) > VERSIONS_REMEMBERED_MAX:
            for number in sorted(filter(idle, history.versions))[:-VERSIONS_REMEMBERED_MAX]:
                del history.versions[number]

    # --- what is to be settled ---

    def _touch(self, history: History) -> None:
        self._dirty[history.run, history.model] = history

    def _look_at(self, pending: Pending) -> None:
        """It may be possible to answer this request now."""
        history = pending.worker.history
        history.due[pending.worker.session, pending.message.request_id] = pending
        self._touch(history)

    def _change(self, history: History, number: int, *, room: bool) -> None:
        """Something about this version has changed; room: so that readers may find a source."""
        history.changed[number] = history.changed.get(number, False) or room
        self._touch(history)
