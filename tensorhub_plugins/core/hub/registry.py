"""All records of the hub, in every index in which they are looked up. PURE, and it sends nothing.

A holding, lease, claim or request is in several indexes: of its worker, of its version, of the candidates a reader may
be given (`Sources`), of the requests that wait. Each method here changes all of them together, and marks what may have
become possible (`waiters`) for the hub to act on afterwards. `report.validate` states the invariants that hold then.
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from typing_extensions import assert_never

from tensorhub_plugins.core.deadline import size_s
from tensorhub_plugins.core.hub.candidates import Candidate, Sources
from tensorhub_plugins.core.hub.copy_counts import Counted
from tensorhub_plugins.core.hub.limits import CLAIMS_PER_SESSION_MAX, RECORDS_OF_READERS_MAX, HubLimits
from tensorhub_plugins.core.hub.selection import UplinkBudget
from tensorhub_plugins.core.hub.state import (
    Aside,
    Bound,
    Claim,
    GroupResolution,
    History,
    Holding,
    Lease,
    Pending,
    Timed,
    Version,
    Worker,
    beside,
    check_of,
    count,
    drop,
    put,
)
from tensorhub_plugins.core.hub.waiters import Waiters
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.security.leases import name_of
from tensorhub_plugins.core.types import FAR, HOST, ShardKey, distance

Reference: TypeAlias = "weakref.ref[Worker | Lease | Pending | Claim] | None"  # to what has a timer; None: recovery
CONVERTERS_MAX = 64  # layouts of one model whose last converter is remembered
LEASE_BOUNDS_KEPT_MAX = 2048  # per session, twice the leases that it may have
TIMERS_KEPT_MIN = 1024  # beyond that, at most twice those that are current
MISSED_HEARTBEATS = 3  # in a row: no live worker misses more
CLAIM_TIMES_MAX = 10  # as long as was expected: for a worker that works on others wait no longer
EXTEND_SHARE = 0.1  # of claim_s: a claim is extended by no less, as that looks at all of its version
OWED_MAX = 2  # successive claims of readers' keys on a layout that may fail
OWED_TIMES = 10  # for so many times the duration of such a claim, no other one is waited for
UNUSED_HEARTBEATS = 10  # a segment takes less, and a reader that first needs memory can read elsewhere
TIMER_STEP_S = 0.005  # the resolution of deadlines
DEAF_KEPT_MAX = 32  # times that the hub was deaf; silence before the first of them is counted in full
VERSIONS_REMEMBERED_MAX = 1024  # invisible or lost versions that are kept only to answer requests about them


def _count(lease: Lease, key: ShardKey, change: int) -> None:
    """Count one lease more or less under which its reader reads this shard."""
    count(lease.reader, "reading", key, change)
    if not lease.serves:
        count(lease.reader, "keeping", key, change)


class Registry:
    """All records of one hub. session: identifies the hub's incarnation; now: its start."""

    def __init__(self, session: bytes, now: float, limits: HubLimits) -> None:
        self.session = session
        self.started, self.restarts = now, 0  # while workers were connected, of hubs, lately
        self.limits, self._grace_s = limits, limits.grace_s
        self.workers: dict[bytes, Worker] = {}
        self.histories: dict[tuple[str, str], History] = {}
        self.waiters = Waiters()
        self.uplink = UplinkBudget(limits.uplink_readers_max)
        self._marks = 0
        self._timers: list[tuple[float, int, Reference]] = []
        self._timers_set, self._timers_max = 0, TIMERS_KEPT_MIN
        self._recovered = 0  # how many of the times of `schedule_recovery` have come
        self.readers_records_max = RECORDS_OF_READERS_MAX
        self.readers_records = 0  # what workers with a reader's key hold, report and read
        self._deaf: deque[tuple[float, float]] = deque(maxlen=DEAF_KEPT_MAX)  # begin and end of each deaf time

    def was_deaf(self, seconds: float, now: float) -> float:
        """Record that the hub has not read all that came for so long, until now; return for how long in one piece."""
        began = self._deaf.pop()[0] if self._deaf and self._deaf[-1][1] >= now - seconds else now - seconds
        self._deaf.append((began, now))
        self.schedule_recovery()
        return now - began

    def silent_after(self, since: float, seconds: float) -> float:
        """Return when the hub has listened for so many seconds from `since` on."""
        deaf_s = sum(until - max(began, since) for began, until in self._deaf if until > since) if self._deaf else 0.0
        return since + seconds + deaf_s

    @property
    def recovered(self) -> float:
        """Return when all live workers have sent their Hello (rule 6)."""
        return self.silent_after(self.started, self._grace_s)

    def expect(self, hello: m.Hello, now: float) -> None:
        """Note how seldom the workers of a previous hub send a heartbeat: they learn of this one as late."""
        seldom_s = 0.0 if hello.welcomed == self.session else min(hello.heartbeat_s, self.limits.heartbeat_s_max)
        grace_s = self.limits.grace_s * seldom_s / self.limits.heartbeat_s
        if grace_s > self._grace_s and self.recovering(now):
            self._grace_s = grace_s
            self.schedule_recovery()

    @property
    def heartbeat_s(self) -> float:
        """Return the seconds between two heartbeats of a worker, while there are as many as now."""
        return self.limits.heartbeat_s_of(len(self.workers))

    def schedule_recovery(self) -> None:
        """Have the hub try again what it could not answer while it did not know all workers."""
        for later in (self.recovered, self.all_silent_are_dead):
            self.schedule(later, None)

    def recovers(self, now: float) -> bool:
        """Return whether one of these times has come since this was asked before. Deaf time moves those that have not:
        a timer may end that was set for an earlier one."""
        before, self._recovered = self._recovered, (now >= self.recovered) + (now >= self.all_silent_are_dead)
        return self._recovered > before

    def recovering(self, now: float) -> bool:
        """Return whether some workers may not have sent their Hello yet (rule 6)."""
        return now < self.recovered

    @property
    def all_silent_are_dead(self) -> float:
        """Return when a worker of the time before our start, not heard since, counts as dead."""
        return self.silent_after(self.started, max(self.limits.session_timeout_s, self._grace_s))

    def is_ours(self, mark: bytes) -> bool:
        """Return whether this incarnation of the hub has begun the attempt of that mark."""
        return mark.startswith(self.session[:8])

    def new_mark(self, launch_id: str) -> bytes:
        """Return the mark of an attempt that is begun with this launch id; it is unique among all hubs."""
        self._marks += 1
        return self.session[:8] + self._marks.to_bytes(4, "big") + check_of(launch_id)

    # --- time ---

    def schedule(self, when: float, record: Timed) -> None:
        """Have `pop_due` return this record when its time has come, if it still exists."""
        self._timers_set += 1
        reference = None if record is None else weakref.ref(record)
        heapq.heappush(self._timers, (when, self._timers_set, reference))
        if len(self._timers) > self._timers_max:  # most of what has a deadline ends long before it
            self._timers = [timer for timer in self._timers if timer[2] is None or self._is_alive(timer[2]())]
            heapq.heapify(self._timers)
            self._timers_max = max(TIMERS_KEPT_MIN, 2 * len(self._timers))

    def schedule_silence(self, worker: Worker) -> None:
        """Schedule the time at which it will have been silent for too long."""
        worker.silence_at = self.silent_after(worker.last_heard, self.silence_s(worker)) + TIMER_STEP_S
        self.schedule(worker.silence_at, worker)

    def refuses(self, worker: Worker) -> None:
        """Note that another worker has found it ended: it is declared dead after less silence."""
        if not worker.refuses:
            worker.refuses = True
            self.schedule_silence(worker)

    def silence_s(self, worker: Worker) -> float:
        """Return the seconds of silence after which it is declared dead. The kernel answers for a busy process: where
        nothing listens, or no process has that number, it has ended, unless it sends a message."""
        least = MISSED_HEARTBEATS * worker.beat_s
        return least if worker.refuses else max(self.limits.session_timeout_s, least)

    def pop_due(self, now: float) -> Iterable[Timed]:
        """Yield the records whose time has come, each once."""
        while self._timers and self._timers[0][0] <= now:
            _, _, reference = heapq.heappop(self._timers)
            record = None if reference is None else reference()
            if reference is None or self._is_alive(record):
                yield record

    def next_timer(self, now: float) -> float:
        """Return when `pop_due` has something to return, at the latest in a heartbeat."""
        latest = now + self.limits.heartbeat_s
        due = self._timers[0][0] if self._timers else latest
        return min(max(due, now + TIMER_STEP_S), latest)

    def _is_alive(self, record: Timed) -> bool:
        match record:
            case Worker():
                return self.workers.get(record.session) is record
            case Lease():
                return record.reader.leases.get(record.request_id) is record
            case Pending():
                return record.worker.pending.get(record.message.request_id) is record
            case Claim():
                return record.version.claims.get(record.key) is record
            case None:
                return False
            case _:
                assert_never(record)

    # --- workers ---

    def history(self, hello: m.Hello) -> History:
        """Return the history of this worker's run and model; it is made with its first worker."""
        history = self.histories.get((hello.run, hello.model))
        if history is None:
            history = self.histories[hello.run, hello.model] = History(hello.run, hello.model)
        return history

    def add_worker(self, worker: Worker) -> None:
        """Add the worker of a session that has sent its Hello."""
        session, hello, history = worker.session, worker.hello, worker.history
        self.restarts = max(self.restarts, (hello.welcomed not in (b"", self.session)) * (hello.restarts + 1))
        for other in history.replicas.get(hello.replica, {}).values():
            if other.hello.shard == hello.shard and worker.is_zombie and not other.is_zombie:
                worker.is_replaced = True  # it was only away
            elif other.hello.shard == hello.shard:  # the replica starts again: it agrees on "latest" anew
                other.is_replaced = True
                for pending in list(other.pending.values()):  # requests of its former incarnation
                    if not isinstance(pending.message, m.Unpublish):  # these concern what it still holds
                        self.waiters.remove(pending)
        for lease in history.leases_on_unknown_sources.pop(session, {}).values():
            self.attach_reader(worker, lease)
        self.workers[session] = worker
        history.workers[session] = worker
        history.replicas.setdefault(hello.replica, {})[session] = worker
        history.groups.setdefault(worker.group, GroupResolution()).arrive(hello)
        history.lost.pop(worker.name, None)
        self.schedule_silence(worker)

    def remove_worker(self, worker: Worker) -> None:
        """Forget it and all it holds, reads, waits for and has claimed, and end the leases on it."""
        history = worker.history
        for pending in list(worker.pending.values()):
            self.waiters.remove(pending)
        for holding in list(worker.holdings.values()):
            self.remove_holding(holding)
        for lease in list(worker.readers.values()):  # announced after a restart for shards it never had
            for shard in [s for s, session in lease.sources.items() if session == worker.session]:
                self.end_lease_shard(lease, shard)
        for claim in list(worker.claims.values()):
            self.remove_claim(claim)
        for key in list(worker.aside):
            self.take_from_aside(worker, key)
        del self.workers[worker.session]
        del history.workers[worker.session]
        replica = history.replicas[worker.hello.replica]
        replica.pop(worker.session)
        left = [other for other in replica.values() if other.hello.shard == worker.hello.shard]
        if left and all(other.is_replaced for other in left):
            left[-1].is_replaced = False  # its replacement has gone before it
        mates = [other for other in replica.values() if other.group == worker.group]
        if not mates:
            del history.groups[worker.group]
        elif not worker.is_replaced:
            history.group(worker).forget_shard(worker.hello.shard)
        if not replica:
            del history.replicas[worker.hello.replica]
        for key in list(worker.depth):
            self.refresh_candidate(worker, key)
        self.waiters.mark_all_ready(history.beginning.values())  # it may have been the previous trainer
        self.waiters.mark_dirty(history)

    def has_replica(self, hello: m.Hello) -> bool:
        """Return whether a worker of this replica is known."""
        history = self.histories.get((hello.run, hello.model))
        return history is not None and hello.replica in history.replicas

    # --- holdings ---

    def add_holding(self, holding: Holding, version: Version) -> None:
        """Add a shard that a worker has, or begins to read."""
        worker, key = holding.worker, holding.key
        self._count_record(worker, 1, key.layout)
        worker.holdings[key] = holding
        by_shard = version.holdings.setdefault((key.layout, key.shard_count), {})
        by_shard.setdefault(key.shard, {})[worker.session] = holding
        self.count_copy(holding)

    def count_copy(self, holding: Holding | None, *, held: bool = True) -> None:
        """Update the counts after a holding has come, has changed or is to go (held=False)."""
        if holding is None:
            return
        worker, key = holding.worker, holding.key
        is_whole = held and holding.complete
        counted = Counted(is_whole, is_whole and holding.stays)
        if counted != holding.counted:
            worker.history.versions[key.version].copies.change(key, worker.group, holding.counted, counted)
            if holding.is_published:
                more = (counted.is_whole - holding.counted.is_whole) * holding.size_bytes
                worker.published_size_bytes += more
                worker.history.published_size_bytes += more
            holding.counted = counted

    def remove_holding(self, holding: Holding) -> None:
        """Forget it, and end the leases on it."""
        worker, key = holding.worker, holding.key
        worker.holdings.pop(key, None)
        worker.holdings_checksum = 0
        self._count_record(worker, -1, key.layout)
        if key not in worker.reading:
            drop(worker.depth, key)
        version = worker.history.versions[key.version]
        version.may_be_lost = True
        self.count_copy(holding, held=False)
        by_shard = version.holdings[key.layout, key.shard_count]
        by_shard[key.shard].pop(worker.session, None)
        if not by_shard[key.shard]:
            del by_shard[key.shard]
            if not version.was_visible:  # no worker has read it: its number is free
                version.contents.pop((key.layout, key.shard_count, key.shard), None)
        if not by_shard:
            del version.holdings[key.layout, key.shard_count]
        for lease in self.leases_on(worker, key):
            self.end_lease_shard(lease, key.shard)
        self.refresh_candidate(worker, key)

    def refresh_candidate(self, worker: Worker, key: ShardKey) -> None:
        """Update whether this worker may be read from for this shard, and how it ranks, after a change."""
        history = worker.history
        version = history.versions.get(key.version)
        if version is None:
            return
        held, sources = worker.holdings.get(key), version.sources.get(key)
        self.count_copy(held)
        serves_on = worker.reading.get(key, 0) > worker.keeping.get(key, 0)  # what arrives of this shard
        arriving = held is None and serves_on
        lives = self.workers.get(worker.session) is worker
        if lives and (arriving or (held is not None and held.stays)):
            candidate = Candidate(
                location=worker.hello.location,
                depth=0 if held is not None and held.complete else worker.depth.get(key, 1),
                readers=worker.network_readers,
                origin="replicated" if held is None else held.origin,
            )
            if sources is None:
                sources = version.sources[key] = Sources()
            sources.put(worker.session, candidate)
        elif sources is not None:
            sources.remove(worker.session)
            if not sources:
                del version.sources[key]
        shard = key.layout, key.shard_count, key.shard
        if shard in version.by_readers and key not in version.sources and not version.holders(key):
            version.by_readers.discard(shard)  # only what a publisher has named is remembered
            version.contents.pop(shard, None)
        self.waiters.mark_changed(history, key.version, room=True)

    def _count_record(self, worker: Worker, change: int, layout: str = "") -> None:
        """Count so many records more for this worker. layout: the one of a shard that it holds or reports."""
        if worker.role == "reader":
            self.readers_records += change
            if layout:
                count(worker, "layouts", layout, change)

    # --- what readers report of versions that no publisher has named ---

    def put_aside(self, worker: Worker, key: ShardKey, said: Aside) -> None:
        """Keep a reader's report until a publisher names the version."""
        worker.holdings_checksum = 0
        self.take_from_aside(worker, key)
        self._count_record(worker, 1, key.layout)
        put(worker, "aside", key, said)
        worker.history.aside.setdefault(key.version, {})[worker.session] = worker

    def take_from_aside(self, worker: Worker, key: ShardKey) -> Aside | None:
        """Forget and return a report that was put aside; None: there is none."""
        said = drop(worker.aside, key)
        if said is not None:
            worker.holdings_checksum = 0
            self._count_record(worker, -1, key.layout)
            waiting = worker.history.aside[key.version]
            if all(other.version != key.version for other in worker.aside):
                del waiting[worker.session]
            if not waiting:
                del worker.history.aside[key.version]
        return said

    # --- leases ---

    def leases_on(self, worker: Worker, key: ShardKey) -> list[Lease]:
        """Return the leases that read this shard from this worker."""
        return [
            lease
            for lease in worker.readers.values()
            if lease.version == key.version
            and lease.layout == key.layout
            and lease.sources.get(key.shard) == worker.session
        ]

    def lease_until(self, worker: Worker, request_id: int, wanted: float, now: float) -> float:
        """Return when a lease of this request ends: at most lease_s after it was first known, however often a Hello
        says that there is time left."""
        bounds = worker.lease_bounds
        bound = bounds.setdefault(request_id, Bound(now + self.limits.lease_s, now))
        while len(bounds) > LEASE_BOUNDS_KEPT_MAX:
            del bounds[next(iter(bounds))]
        return min(wanted, bound.until)

    def idle_at(self, lease: Lease) -> float:
        """Return when this lease will have been idle for too long."""
        bound = lease.reader.lease_bounds.get(lease.request_id)
        return lease.deadline if bound is None else self.silent_after(bound.progress_at, self.limits.lease_idle_s)

    def renew(self, worker: Worker, progress: Mapping[int, int], now: float) -> None:
        """Take the progress of its reads, by request: a lease whose read has advanced is not idle."""
        for request_id in progress.keys() & worker.leases.keys():
            bound = worker.lease_bounds.get(request_id)
            if bound is not None:
                bound.renew(progress[request_id], now)

    def record_used(self, source: Worker, served: Iterable[str], now: float) -> list[Lease]:
        """Take a source's report of which leases on it were used; return those that kept a slot there unused for too
        long. The holder of a reader's key may report any progress of its own: what its sources report counts."""
        used, unused = frozenset(served), []
        for lease in source.readers.values():
            if lease.reader.role != "reader":
                continue
            since = now - self.unused_s(source) if lease.is_announced else now  # a Hello makes no unpublish wait
            at = lease.served_at.get(source.session)
            if at is None:
                put(lease, "served_at", source.session, at := since)
            if name_of(lease.reader.session, lease.request_id) in used:
                lease.served_at[source.session] = now
            elif now > self.silent_after(at, self.limits.lease_idle_s):
                unused.append(lease)
        return unused

    def unused_s(self, source: Worker) -> float:
        """Return the seconds after which an unpublish ignores a reader's key that got nothing from that source."""
        return UNUSED_HEARTBEATS * source.beat_s

    def is_unused(self, lease: Lease, source: Worker, now: float) -> bool:
        """Return whether the source reports that nothing is read from it under this lease."""
        at = lease.served_at.get(source.session)
        return at is not None and now > self.silent_after(at, self.unused_s(source))

    def add_lease(self, lease: Lease) -> None:
        """Add the lease of a reader that was granted sources."""
        reader, history = lease.reader, lease.reader.history
        before = reader.leases.get(lease.request_id)
        if before is not None:  # a Hello that names a number twice
            self.end_lease(before)
        reader.leases[lease.request_id] = lease
        self._count_record(reader, len(lease.sources))
        reader.announced_shards += len(lease.sources) * lease.is_announced
        self.schedule(min(lease.deadline, self.idle_at(lease)), lease)
        for session in lease.shards_of:
            count(reader, "sources", session, 1)
            source = history.workers.get(session)
            if source is not None:
                self.attach_reader(source, lease)
            else:  # it has not sent its Hello since the hub's restart
                unknown = history.leases_on_unknown_sources.setdefault(session, {})
                unknown[reader.session, lease.request_id] = lease
        for key in lease.shard_keys():
            _count(lease, key, 1)
            source = history.workers.get(lease.sources[key.shard])
            known = source.depth.get(key, 0) if source is not None else 0
            if not lease.beside:
                reader.depth[key] = known + 1
            self.refresh_candidate(reader, key)

    def attach_reader(self, source: Worker, lease: Lease) -> None:
        """Note that this source is read from under this lease."""
        reader = lease.reader
        source.readers[reader.session, lease.request_id] = lease
        far = distance(source.hello.location, reader.hello.location)
        if far > HOST:
            source.network_readers += 1
        if far == FAR:
            self.uplink.reserve(reader.hello.location.data_center, reader.history.id)
        self._refresh_candidates(source)

    def detach_reader(self, source: Worker, lease: Lease) -> None:
        """Note that it is not read from any more under this lease; requests that waited for that are tried again."""
        reader = lease.reader
        drop(source.readers, (reader.session, lease.request_id))
        far = distance(source.hello.location, reader.hello.location)
        if far > HOST:
            source.network_readers -= 1
        if far == FAR:
            for model in self.uplink.release(reader.hello.location.data_center, reader.history.id):
                if model in self.histories:
                    for number in self.histories[model].versions:
                        self.waiters.mark_changed(self.histories[model], number, room=True)
        self._refresh_candidates(source)
        self.waiters.mark_all_ready(p for p in source.pending.values() if isinstance(p.message, m.Unpublish))

    def _refresh_candidates(self, source: Worker) -> None:
        for key in {*source.holdings, *source.depth}:
            self.refresh_candidate(source, key)

    def end_lease(self, lease: Lease) -> None:
        """End a lease on all of its sources."""
        for shard in list(lease.sources):
            self.end_lease_shard(lease, shard)

    def end_lease_shard(self, lease: Lease, shard: int) -> None:
        """End a lease on the source of one shard."""
        reader, key = lease.reader, lease.key(shard)
        session = lease.sources.pop(shard, None)
        if session is not None:
            self._count_record(reader, -1)
            reader.announced_shards -= lease.is_announced
            _count(lease, key, -1)
            count(lease, "shards_of", session, -1)
            if session not in lease.shards_of:  # no other shard is read from it
                count(reader, "sources", session, -1)
                self._detach(lease, session)
        if not lease.sources:
            drop(reader.leases, lease.request_id)
        if key not in reader.reading:
            held = reader.holdings.get(key)
            if held is None or held.complete:
                drop(reader.depth, key)
        self.refresh_candidate(reader, key)

    def _detach(self, lease: Lease, session: bytes) -> None:
        """Detach a lease from a source, which may not have sent its Hello since the hub's restart."""
        history, reading = lease.reader.history, (lease.reader.session, lease.request_id)
        source = history.workers.get(session)
        if source is not None and reading in source.readers:
            self.detach_reader(source, lease)
        unknown = history.leases_on_unknown_sources
        if session in unknown:
            unknown[session].pop(reading, None)
            if not unknown[session]:
                del unknown[session]

    # --- claims ---

    def add_claim(self, version: Version, worker: Worker, key: ShardKey, now: float, request_id: int = 0) -> None:
        """Record that a worker is to convert this shard. request_id: the Acquire with which it was assigned.

        Others wait for it, for claim_s and what the version's size adds, or as long as it works. The holder of a
        reader's key could claim again and again, under new names, and never publish: failed claims on a layout are
        waited for OWED_MAX times as long at once, and a tenth of the time in the long run. Beyond that each engine
        converts for itself."""
        claim_s = self.limits.claim_s + size_s(version.published_size_bytes)
        claim = Claim(worker, version, key, now + claim_s, now + CLAIM_TIMES_MAX * claim_s, request_id)
        if worker.role == "reader":
            self._charge(claim, now)
        if key in version.claims:
            self.remove_claim(version.claims[key])
        while len(worker.claims) >= CLAIMS_PER_SESSION_MAX:
            self.remove_claim(next(iter(worker.claims.values())))
        version.claims[key] = claim
        put(worker, "claims", key, claim)
        self.schedule(claim.deadline, claim)

    def _charge(self, claim: Claim, now: float) -> None:
        """Charge once for all shards of its replica, which are to be converted by the same deadline."""
        cut, history, claim_s = (claim.key.layout, claim.key.shard_count), claim.worker.history, claim.deadline - now
        if (other := next(beside(claim), None)) is not None:
            claim.is_waited_for, claim.deadline, claim.until = other.is_waited_for, other.deadline, other.until
            return
        owed = history.owed_until = {each: until for each, until in history.owed_until.items() if until > now}
        until = owed.get(cut, now)
        is_full = cut not in owed and len(owed) >= CONVERTERS_MAX
        if is_full or until - now > (OWED_MAX - 1) * OWED_TIMES * claim_s:
            claim.is_waited_for = False
            return
        claim.charged_s, owed[cut] = OWED_TIMES * claim_s, until + OWED_TIMES * claim_s

    def end_claim(self, worker: Worker, key: ShardKey, now: float, *, converted: bool = False) -> None:
        """End this worker's claim: the next waiting reader may make it. converted: it has published the layout."""
        version = worker.history.versions.get(key.version)
        claim = version.claims.get(key) if version else None
        if claim is None or claim.worker is not worker:
            return
        cut, owed = (key.layout, key.shard_count), worker.history.owed_until
        if claim.charged_s and (other := next(beside(claim), None)) is not None:
            other.charged_s = claim.charged_s  # its replica is still waited for
        elif claim.charged_s and cut in owed:  # charge only the time that was waited in vain
            owed[cut] -= claim.charged_s if converted else min(claim.charged_s, OWED_TIMES * (claim.deadline - now))
        self.remove_claim(claim)
        if converted:
            last = worker.history.converters
            last.pop((key.layout, key.shard_count), None)
            last[key.layout, key.shard_count] = worker.hello.replica
            if len(last) > CONVERTERS_MAX:
                del last[next(iter(last))]

    def remove_claim(self, claim: Claim) -> None:
        """Remove a claim that was fulfilled, or will not be."""
        del claim.version.claims[claim.key], claim.worker.claims[claim.key]
        self.waiters.mark_changed(claim.worker.history, claim.version.number, room=True)

    # --- versions ---

    def forget_old_versions(self, history: History, numbers: Iterable[int]) -> None:
        """Drop those of these versions that are over, and the oldest beyond VERSIONS_REMEMBERED_MAX."""

        def idle(number: int) -> bool:
            version = history.versions[number]
            return not (version.holdings or version.claims or version.visible or version.sources)

        for number in [n for n in numbers if n in history.versions and n < history.newest_visible and idle(n)]:
            history.forget_version(number)
        if len(history.versions) > VERSIONS_REMEMBERED_MAX:
            for number in sorted(filter(idle, history.versions))[:-VERSIONS_REMEMBERED_MAX]:
                history.forget_version(number)

    def is_gone(self, history: History, number: int, now: float) -> bool:
        """Return whether this version, which is not visible, will not be visible (again)."""
        return not self.recovering(now) and number <= history.newest_visible
