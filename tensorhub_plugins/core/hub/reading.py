"""Acquire: which version a reader gets, in which layout, from which sources. PURE.

`try_acquire` handles one request: it resolves "latest" for its replica (rule 2), finds a source for each shard that it
needs, and grants the lease; with it the reader claims the conversion, when no worker has the layout that it wants.
"""

from __future__ import annotations

import msgspec

from tensorhub_plugins.core.hub import selection
from tensorhub_plugins.core.hub.candidates import Verdict, the_same
from tensorhub_plugins.core.hub.following import gone
from tensorhub_plugins.core.hub.registry import EXTEND_SHARE, OWED_TIMES, Registry
from tensorhub_plugins.core.hub.state import Claim, Lease, Pending, Version, Worker, beside, checksum_of
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.security.leases import issue, name_of
from tensorhub_plugins.core.types import CHECKPOINT, FAR, HOST, ShardKey, distance


class Found(msgspec.Struct, frozen=True):
    """The sources of every shard that the reader needs of this layout."""

    layout: str
    shard_count: int
    sources: dict[int, Worker]
    converts: bool  # the reader is to convert it to the layout that it asked for first


class Reading:
    """The handler of reads: which sources a reader gets, and which reader converts a layout that no worker has."""

    def __init__(self, registry: Registry, lease_key: bytes = b"") -> None:
        self._registry, self._lease_key = registry, lease_key

    def try_acquire(self, pending: Pending, acquire: m.Acquire, now: float) -> m.Reply | None:
        """Return sources for this reader; None: not yet. Refused at the deadline, or when the version is gone."""
        history = pending.worker.history
        if acquire.layouts[0] != CHECKPOINT:
            pending.worker.prefers = the_same(acquire.layouts[0])
        number = acquire.version or self.resolve_latest(pending, acquire, now)
        if isinstance(number, m.Refused):
            return number
        if history.is_over(number):
            return gone(acquire.request_id, history, number)
        if number and history.is_visible(number):
            version = history.versions[number]
            found = self.find_sources(pending, acquire, version, now)
            if found is not None and len(found.sources) > m.GRANTS_MAX:
                text = f"{len(found.sources)} shards of {found.layout} are more than the {m.GRANTS_MAX} that one reader"
                return m.Refused(acquire.request_id, "UsageError", f"{text} may ask for")
            if found is not None:
                return self._grant(pending, acquire, version, found, now)
        elif number and self._registry.is_gone(history, number, now):
            return gone(acquire.request_id, history, number)
        return self._refuse(pending, acquire, number, now)

    # --- which version ---

    def resolve_latest(self, pending: Pending, acquire: m.Acquire, now: float) -> int | m.Refused:
        """Return one version for all shards of the reading replica (rule 2); 0 when there is none yet."""
        worker, history = pending.worker, pending.worker.history
        if history.is_visible(pending.version):
            return pending.version
        shard, shard_count = worker.hello.shard, worker.hello.shard_count
        if worker.is_replaced and shard_count > 1:
            text = f"another process has said Hello as {worker.name} since: only the newest one may read the latest"
            return m.Refused(acquire.request_id, "UsageError", text)
        if len({w.hello.shard for w in history.members(worker)}) < shard_count:
            return 0  # an unknown one may have been answered already, before the hub was restarted
        at_least = max(history.floor(acquire.at_least), history.floor(worker.seen_version))
        group = history.group(worker)
        if group.has_refused(shard, worker.session, acquire.request_id):
            return self._refusal(worker, acquire)  # what the others have agreed on since stays
        if group.version and shard_count > 1 and (shard not in group.notified_shards or pending.version):
            too_old = group.version < at_least and group.version != history.directive.pin
            if too_old or not history.is_visible(group.version):
                return 0 if self._registry.recovering(now) else self._cannot_follow(worker, acquire)
        elif (newest := history.latest(at_least)) is None:
            return 0
        else:
            group.begin(newest)
        group.notified_shards.add(shard)
        pending.version = group.version
        return group.version

    def _cannot_follow(self, worker: Worker, acquire: m.Acquire) -> m.Refused:
        """Refuse a request that cannot have what the other shards took as the latest: that is its answer."""
        refusal = self._refusal(worker, acquire)
        worker.history.group(worker).refuse(worker.hello.shard, worker.session, acquire.request_id)
        return refusal

    def _refusal(self, worker: Worker, acquire: m.Acquire) -> m.Refused:
        group = worker.history.group(worker)
        taken = f"version {group.version}" if group.version else "another version"
        text = (
            f"other shards of {worker.hello.replica} took {taken} as the latest, and this one cannot: let all of them "
            "read again, naming one version"
        )
        return m.Refused(acquire.request_id, "VersionGone", text)

    # --- from which sources ---

    def find_sources(self, pending: Pending, acquire: m.Acquire, version: Version, now: float) -> Found | None:
        """Return sources in the first layout available now; None: none is, or a conversion is worth waiting for."""
        worker = pending.worker
        for layout in acquire.layouts:
            converts = acquire.claim and layout != acquire.layouts[0]
            for shard_count in sorted({count for held, count in version.layouts() if held == layout}):
                shards = shards_needed(worker, acquire, layout, shard_count)
                sources = self._choose_all(
                    worker, acquire, version, [version.key(layout, s, shard_count) for s in shards]
                )
                if sources is None:
                    continue
                if converts and (self._registry.recovering(now) or self._gives_way(pending, acquire, now)):
                    break
                return Found(layout, shard_count, sources, converts)
            if acquire.claim and converter_of(version, worker, layout, acquire.exclude):
                return None  # wait for it instead of reading the next layout and doing the same work
        return None

    def _choose_all(
        self, worker: Worker, acquire: m.Acquire, version: Version, keys: list[ShardKey]
    ) -> dict[int, Worker] | None:
        """Return a source for each of these shards, or None."""
        sources: dict[int, Worker] = {}
        for key in keys:
            choice = selection.choose(self._question(worker, acquire, key), version)
            if choice.uplink_full:
                self._registry.uplink.wait(worker.hello.location.data_center, worker.history.id)
            if choice.session is None:
                return None
            sources[key.shard] = self._registry.workers[choice.session]
        return sources or None

    def _question(self, worker: Worker, acquire: m.Acquire, key: ShardKey) -> selection.Question:
        return selection.Question(
            reader=worker,
            acquire=acquire,
            key=key,
            workers=self._registry.workers,
            uplink=self._registry.uplink,
            readers_per_source_max=self._registry.limits.readers_per_source_max,
        )

    def _only_excluded_are_left(self, worker: Worker, acquire: m.Acquire, version: Version, now: float) -> bool:
        """Return whether waiting is useless: no other worker has a shard that it needs, or is to make it."""
        if not acquire.exclude or acquire.beside or self._registry.recovering(now):
            return False

        def may_come(key: ShardKey) -> bool:
            sources, question = version.sources.get(key), self._question(worker, acquire, key)
            return sources is not None and any(
                question.judge(session, HOST) is not Verdict.NEVER for session in sources.sessions()
            )

        for layout in acquire.layouts:
            if converter_of(version, worker, layout, acquire.exclude):
                return False
            for shard_count in {count for held, count in version.layouts() if held == layout}:
                shards = shards_needed(worker, acquire, layout, shard_count)
                if shards and all(may_come(version.key(layout, shard, shard_count)) for shard in shards):
                    return False
        return True

    def agrees(self, worker: Worker, heartbeat: m.Heartbeat, now: float) -> bool:
        """Return whether we know what it holds and reads; our answer or a former hub's may still be on its way."""
        for request_id, shards in heartbeat.leases.items():
            lease, bound = worker.leases.get(request_id), worker.lease_bounds.get(request_id)
            is_over = lease is None and bound is not None and bound.until <= now
            if not is_over and (lease is None or len(lease.sources) != shards):
                return False
        if heartbeat.holdings_checksum and not worker.holdings_checksum:
            worker.holdings_checksum = checksum_of(worker)
        return heartbeat.holdings_checksum in (0, worker.holdings_checksum)

    def end_what_is_not_in(self, worker: Worker, heartbeat: m.Heartbeat) -> None:
        """End the reads that a worker does not name: they are over, and the message that says so was lost."""
        last_request_id, asked = heartbeat.last_request_id, set(heartbeat.pending)
        for lease in list(worker.leases.values()):
            named = lease.request_id in asked or lease.request_id in heartbeat.leases
            if lease.request_id <= last_request_id and not named:
                self._registry.end_lease(lease)
        for pending in list(worker.pending.values()):
            request_id = pending.message.request_id
            if isinstance(pending.message, m.Acquire) and request_id <= last_request_id and request_id not in asked:
                self._registry.waiters.remove(pending)

    # --- which reader converts ---

    def extend_claims(self, worker: Worker, worked: int, now: float) -> None:
        """Have others wait for claim_s from now, if this worker has worked since its last heartbeat."""
        if worked <= worker.worked:
            return
        worker.worked, worker.worked_at = worked, now
        until = now + self._registry.limits.claim_s
        for claim in worker.claims.values():
            if claim.is_waited_for and until - claim.deadline >= EXTEND_SHARE * self._registry.limits.claim_s:
                self._extend(claim, until, now)

    def _extend(self, claim: Claim, until: float, now: float) -> None:
        """Extend it with those of its replica's other shards: for each of them others wait, and one has the charge."""
        owed, cut = claim.worker.history.owed_until, (claim.key.layout, claim.key.shard_count)
        for each in (claim, *beside(claim)):
            more_s = max(0.0, min(until, each.until) - each.deadline)
            each.deadline += more_s
            if each.charged_s and more_s:
                each.charged_s += OWED_TIMES * more_s
                owed[cut] = owed.get(cut, now) + OWED_TIMES * more_s

    def _gives_way(self, pending: Pending, acquire: m.Acquire, now: float) -> bool:
        """Return whether to wait for another engine of this host, which converted the last version and has the memory
        for it, to do so again."""
        worker, mine = pending.worker, pending.worker.hello
        last = worker.history.converters.get((acquire.layouts[0], mine.shard_count), mine.replica)
        others = {} if last == mine.replica else worker.history.replicas.get(last, {})
        if not any(
            distance(other.hello.location, mine.location) == HOST and session not in acquire.exclude
            for session, other in others.items()
        ):
            return False
        if not pending.gives_way_until:
            pending.gives_way_until = now + self._registry.limits.converter_first_s
            self._registry.schedule(pending.gives_way_until, pending)
        return now < pending.gives_way_until

    # --- the answer ---

    def _grant(self, pending: Pending, acquire: m.Acquire, version: Version, found: Found, now: float) -> m.Granted:
        worker, registry = pending.worker, self._registry
        grants = tuple(self._grant_of(pending, acquire, version, found, shard, now) for shard in found.sources)
        claim = _claim_key(version, worker, acquire.layouts[0]) if found.converts else None
        if claim is not None:
            registry.add_claim(version, worker, claim, now, acquire.request_id)
        lease = Lease(
            reader=worker,
            request_id=acquire.request_id,
            version=version.number,
            layout=the_same(found.layout),
            shard_count=found.shard_count,
            sources={shard: source.session for shard, source in found.sources.items()},
            deadline=registry.lease_until(worker, acquire.request_id, _ends_at(pending, acquire), now),
            serves=acquire.serve and not (acquire.in_part and found.layout == CHECKPOINT),
            beside=bool(acquire.beside),
        )
        registry.add_lease(lease)
        group, generation = worker.history.group(worker), 0
        worker.seen_version = max(worker.seen_version, 0 if acquire.for_others else version.number)
        if group.version == version.number and not acquire.for_others:
            generation = group.generation
            group.notified_shards.add(worker.hello.shard)  # also if it missed the generation and names its version
        return m.Granted(
            request_id=acquire.request_id,
            version=version.number,
            layout=found.layout,
            shard_count=found.shard_count,
            grants=grants,
            claim=claim,
            generation=generation,
            hub=registry.session,
            awaited=claim is None or self._is_awaited(worker, claim),
        )

    def _is_awaited(self, worker: Worker, key: ShardKey) -> bool:
        """Return whether another replica has asked for what this one converts, which to offer may take as long as the
        conversion. Of one that has not converted before nothing is known: others may be about to start."""
        history, mine = worker.history, worker.hello.replica
        if history.converters.get((key.layout, key.shard_count)) != mine:
            return True
        return any(each.prefers == key.layout and each.hello.replica != mine for each in history.workers.values())

    def _grant_of(
        self, pending: Pending, acquire: m.Acquire, version: Version, found: Found, shard: int, now: float
    ) -> m.Grant:
        key, source = version.key(found.layout, shard, found.shard_count), found.sources[shard]
        root, size_bytes = version.contents[key.layout, key.shard_count, key.shard]
        ticket = None
        if self._lease_key:
            ends_at = _ends_at(pending, acquire)
            until = self._registry.lease_until(pending.worker, acquire.request_id, ends_at, now)
            claim = m.Claim(self._registry.session, name_of(*pending.id), until)
            ticket = issue(self._lease_key, source.hello.endpoints, key, claim)
        held = source.holdings.get(key)
        promised = [lease.request_id for lease in source.leases.values() if lease.serves]
        return m.Grant(
            shard=key.shard,
            session=source.session,
            worker=source.name,
            endpoints=_endpoints_for(pending.worker, source),
            location=source.hello.location,
            root=root,
            size_bytes=size_bytes,
            as_of=held.as_of if held is not None else max(promised, default=0),
            ticket=ticket,
            hosts=source.hello.hosts,
        )

    def _refuse(self, pending: Pending, acquire: m.Acquire, number: int, now: float) -> m.Refused | None:
        """Return why there is nothing to grant, once that is certain: for good, or because the deadline has passed."""
        worker, history = pending.worker, pending.worker.history
        visible = number != 0 and history.is_visible(number)
        if visible and self._only_excluded_are_left(worker, acquire, history.versions[number], now):
            text = f"all that is left of version {number} is held by sources that this reader has excluded"
            return m.Refused(acquire.request_id, "VersionGone", text)
        if now < pending.deadline:
            return None
        if visible:
            held = history.versions[number].held_text(worker)
            text = (
                f"version {number} is visible but no source had room or a readable layout "
                f"({', '.join(acquire.layouts)}) before the deadline; held: {held}"
            )
            return m.Refused(acquire.request_id, "DeadlineExceeded", text)
        what = f"version {number}" if number else f"a version from {acquire.at_least} on"
        if not number and history.directive.pin:
            what = f"version {history.directive.pin}, which is pinned,"
        return m.Refused(acquire.request_id, "NotPublished", f"{what} was not published before the deadline")


def _endpoints_for(reader: Worker, source: Worker) -> dict[str, str]:
    """Return where this reader may connect: without TLS it gets nothing from a source that requires it."""
    endpoints = source.hello.endpoints
    if source.hello.tls_only and distance(reader.hello.location, source.hello.location) == FAR:
        return {name: endpoint for name, endpoint in endpoints.items() if name == "tls"}
    return endpoints


def shards_needed(worker: Worker, acquire: m.Acquire, layout: str, shard_count: int) -> tuple[int, ...]:
    """Return the shards of this layout, in so many, that the reader needs; none: it cannot use the layout."""
    if layout != CHECKPOINT and shard_count != worker.hello.shard_count:
        return ()
    if acquire.shards and (layout, shard_count) == (acquire.shards_layout, acquire.shard_count):
        return acquire.shards
    return tuple(range(shard_count)) if layout == CHECKPOINT else (worker.hello.shard,)


def _ends_at(pending: Pending, acquire: m.Acquire) -> float:
    """Return when the read has ended; infinity, where that follows from the size: only the lease's bound counts."""
    return float("inf") if acquire.grows else pending.deadline


def _claim_key(version: Version, worker: Worker, layout: str) -> ShardKey:
    return version.key(layout, worker.hello.shard, worker.hello.shard_count)


def converter_of(version: Version, worker: Worker, layout: str, exclude: tuple[bytes, ...] = ()) -> Worker | None:
    """Return another worker that is expected to publish this layout of the version; None: none is."""
    # One replica converts all its shards. If the first shard were claimed by one replica and the second by another,
    # each would wait for the other: none can install, and so convert, before all its own workers are ready.
    mine = _claim_key(version, worker, layout)
    for key, claim in version.claims.items():
        others = claim.worker.hello.replica != worker.hello.replica
        same = (key.layout, key.shard_count) == (mine.layout, mine.shard_count)
        if claim.is_waited_for and ((key == mine and claim.worker is not worker) or (others and same)):
            return claim.worker
    # all its holders may be busy, or still reading it: waiting is still cheaper than to convert again
    for h in version.holders(mine).values() if layout != CHECKPOINT else ():
        may_serve = h.unpublishing is None and h.worker.session not in exclude
        if may_serve and h.worker is not worker and (h.complete or mine in h.worker.reading):
            return h.worker
    return None


def awaited(worker: Worker) -> tuple[Pending, int, Worker | None] | None:
    """Return its oldest read that has no source yet, the version, and the worker that converts that or is too busy."""
    for pending in worker.pending.values():
        acquire = pending.message
        if isinstance(acquire, m.Acquire) and (number := acquire.version or pending.version):
            version = worker.history.versions.get(number)
            may_wait = acquire.claim and version is not None and version.visible
            layout, exclude = acquire.layouts[0], acquire.exclude
            return pending, number, converter_of(version, worker, layout, exclude) if version and may_wait else None
    return None
