"""What workers hold: when a version becomes visible, which copies must stay, and when one may go. PURE.

Rules 1 (unpublish), 2 (atomic visibility) and 4 (retention) of `hub.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from tensorhub_plugins.core.hub.failure_domains import needs_its_domain
from tensorhub_plugins.core.hub.limits import DOUBT_AGAIN_S, DOUBTS_MAX, LAYOUTS_PER_READER_MAX
from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.permissions import Standing, never_published, standing
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import Aside, History, Holding, Lease, Pending, Version, Worker, drop, put
from tensorhub_plugins.core.hub.waiters import ANY_VERSION
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, STEPS_AHEAD_MAX, ShardKey, attempt_of, step_of, version_text

SPENDERS_NAMED_MAX = 3
WITHDRAWN_KEPT_MAX = 256  # per session: unpublished shards, which a late Publish must not bring back


class Publishing:
    """The handler of what is published, retained and unpublished."""

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry, self._outbox = registry, outbox

    # --- a shard is published ---

    def publish(self, worker: Worker, request_id: int, announced: m.Holding, now: float) -> None:
        """Answer a Publish: record what the worker holds, or refuse the request."""
        if request_id < worker.withdrawn.get(announced.key, 0):  # overtaken on the way by its own Unpublish
            self._outbox.reply(worker, m.Done(request_id))
            return
        if self._registry.recovering(now) and self._may_be_taken(worker, announced):
            return  # it is sent again with the next heartbeat
        if worker.history.directive.attempts and (problem := self.is_of_the_past(worker, announced)):
            self._outbox.refuse(worker, request_id, "Superseded", problem)
            return
        problem = self.cannot_be_new(worker, announced) if announced.key.version in worker.history.withdrawn else None
        problem = problem or self.hold(worker, announced, now, as_of=request_id, offered=request_id)
        if problem:
            self._outbox.refuse(worker, request_id, "UsageError", problem)
        else:
            if announced.key in worker.claims:
                self._registry.end_claim(worker, announced.key, now, converted=True)
            if self._registry.limits.published_bytes_max:
                self._check_budget(worker.history)
            self._outbox.reply(worker, m.Done(request_id))

    def _may_be_taken(self, worker: Worker, announced: m.Holding) -> bool:
        """Return whether a version of this number was seen whose holder may still send a Hello with other bytes. What a
        reader's key has seen does not block a trainer."""
        key, history = announced.key, worker.history
        if announced.origin == "replicated" or key.layout != CHECKPOINT:
            return False
        version, shard = history.versions.get(key.version), (key.layout, key.shard_count, key.shard)
        if key in worker.holdings or (version is not None and shard in version.contents):
            return False
        return any(w.seen_version >= key.version for w in history.workers.values() if w.role != "reader")

    def _check_budget(self, history: History) -> None:
        """Log an excess of the budget once, until it is kept again. Refuse nothing: a trainer must go on."""
        most = self._registry.limits.published_bytes_max
        was_over, history.is_over_budget = history.is_over_budget, 0 < most < history.published_size_bytes
        if was_over or not history.is_over_budget:
            return
        named = ", ".join(f"{name} {size / 1e6:.1f} MB of {count} versions" for name, size, count in spenders(history))
        self._outbox.log(
            f"{history.name}: its trainers hold {history.published_size_bytes / 1e6:.1f} MB published, above the "
            f"budget of {most / 1e6:.1f} MB: {named}. Unpublish versions that are over, or retain fewer"
        )

    def is_of_the_past(self, worker: Worker, announced: m.Holding) -> str | None:
        """Return why this may not be added to a former attempt, of which only what counts may be passed on, or to the
        newest one by a worker that has not begun it; None: it may be added."""
        number, history = announced.key.version, worker.history
        newest = history.directive.attempts[-1]
        if announced.origin == "replicated" or announced.key in worker.holdings:
            return None
        if history.is_visible(number) and not history.is_over(number):
            return None
        if attempt_of(number) >= newest.number:
            if worker.mark == newest.mark or announced.key.layout != CHECKPOINT:
                return None
            return (
                f"version {version_text(number)} cannot be published: attempt {newest.number} of {history.name} has "
                "begun, and this process has not begun it. Call Client.begin first, or end it"
            )
        return (
            f"version {version_text(number)} cannot be published: attempt {newest.number} of {history.name} has begun "
            f"at step {newest.step}. A trainer that starts again calls Client.begin; one that was replaced ends"
        )

    def cannot_be_new(self, worker: Worker, announced: m.Holding) -> str | None:
        """Return why a withdrawn version cannot be published again. A worker that has just read it may report it, and
        the last shards may come of a version that was withdrawn while its replica published it."""
        number, key = announced.key.version, announced.key
        is_here = announced.origin == "replicated" or key in worker.holdings
        if is_here or self._is_missing(worker, key):
            return None
        return (
            f"version {number} was withdrawn and cannot be published again: publish under a higher number, or call "
            "Client.begin when a run starts again"
        )

    def _is_missing(self, worker: Worker, key: ShardKey) -> bool:
        """Return whether others of this replica hold their shards of this version, and this one is not there yet."""
        version = worker.history.versions.get(key.version)
        if version is None or (key.layout, key.shard_count, key.shard) in version.contents:
            return False
        return any(held.version == key.version for each in worker.history.members(worker) for held in each.holdings)

    def hold(self, worker: Worker, announced: m.Holding, now: float, *, as_of: int, offered: int = 0) -> str | None:
        """Record a holding; return what is wrong with it, if anything."""
        key, history = announced.key, worker.history
        problem = self._cannot_be_held(worker, announced, now, offered)
        if problem is not None or (worker.role == "reader" and self._waits(worker, announced, as_of, offered, now)):
            return problem
        version, shard = history.version(key.version, now), (key.layout, key.shard_count, key.shard)
        if worker.role != "reader" and shard in version.by_readers and version.contents[shard][0] != announced.root:
            for other in list(version.holders(key).values()):  # a publisher's word counts more than those of readers
                self._registry.remove_holding(other)
        if (problem := _other_bytes(worker, announced, now)) is not None:
            return problem
        mine = worker.holdings.get(key)
        worker.holdings_checksum = 0
        if mine is None:
            like = next(iter(version.holders(key).values()), announced)  # its words are one object for all holders
            said = like.root, like.size_bytes, announced.complete, announced.origin
            mine = Holding(worker, like.key, *said, as_of=as_of, offered=offered)
            self._registry.add_holding(mine, version)
        else:
            mine.complete |= announced.complete
            mine.as_of = max(mine.as_of, as_of)
        if mine.complete:
            drop(worker.depth, key)
        self._registry.refresh_candidate(worker, key)
        if not version.visible and self._shows(version, mine):
            self._show(history, version, now)
        if version.number in history.aside and worker.role != "reader" and version.visible:
            self._take_in(history, version, now)
        return None

    def _shows(self, version: Version, mine: Holding) -> bool:
        """Return whether this holding makes the version visible. What a reader has converted does not."""
        worker, key = mine.worker, mine.key
        if not mine.complete or worker.history.is_over(key.version):
            return False
        if worker.role == "reader" and key.layout != CHECKPOINT:
            return False
        # Rule 2: a replica that holds every shard by itself.
        return mine.origin == "replicated" or version.copies.replica_has_all(key.layout, key.shard_count, worker.group)

    def _waits(self, worker: Worker, announced: m.Holding, as_of: int, offered: int, now: float) -> bool:
        """Return whether what a reader's key reports is kept aside until a publisher names it: none has, or one named
        other bytes."""
        key = announced.key
        if key in worker.holdings:
            return False
        before = self._registry.take_from_aside(worker, key)
        waits = self._standing(worker, announced, offered, now) == "aside"
        if not waits and (before is not None or not offered):  # a Publish of other bytes is refused
            waits = _other_bytes(worker, announced, now) is not None
        if waits:
            self._registry.put_aside(worker, key, Aside(announced, as_of, offered))
        return waits

    def _standing(self, worker: Worker, announced: m.Holding, offered: int, now: float) -> Standing:
        known, recovering = worker.history.versions.get(announced.key.version), self._registry.recovering(now)
        return standing(worker.role, announced.key, known, recovering=recovering, is_new=bool(offered))

    def _take_in(self, history: History, version: Version, now: float) -> None:
        """Record what readers have reported of a version before a publisher named it, where it is the same."""
        for worker in list(history.aside[version.number].values()):
            for said in [said for key, said in worker.aside.items() if key.version == version.number]:
                self.hold(worker, said.holding, now, as_of=said.as_of, offered=said.offered)

    def _cannot_be_held(self, worker: Worker, announced: m.Holding, now: float, offered: int) -> str | None:
        key, is_new = announced.key, bool(offered)
        if key.version < 1 or key.shard >= key.shard_count:
            return f"no such shard: {key}"
        is_known, count = key in worker.holdings or key in worker.aside, len(worker.holdings) + len(worker.aside)
        if count >= m.HOLDINGS_MAX and not is_known:
            return f"more than {m.HOLDINGS_MAX} shards held by one worker"
        if worker.role == "reader" and not is_known and (problem := self._is_too_much(worker, key)) is not None:
            return problem
        recovers = not is_new and (self._registry.recovering(now) or not worker.history.newest_visible)
        if not recovers and (problem := too_far_ahead(worker.history, key.version)) is not None:
            return problem
        begun = worker.history.directive.attempts
        if is_new and announced.origin == "published" and attempt_of(key.version) > (begun[-1].number if begun else 0):
            return f"version {version_text(key.version)}: that attempt was not begun: Client.begin says which is next"
        if worker.role == "reader" and self._standing(worker, announced, offered, now) == "refused":
            return never_published(key)
        return None

    def _is_too_much(self, worker: Worker, key: ShardKey) -> str | None:
        """Return why this reader may hold no more; None: it may."""
        if self._registry.readers_records >= self._registry.readers_records_max:
            return f"workers with a reader's key have {self._registry.readers_records} shards, and may have no more"
        if key.layout in worker.layouts or len(worker.layouts) < LAYOUTS_PER_READER_MAX:
            return None
        return f"more than {LAYOUTS_PER_READER_MAX} layouts of one worker with a reader's key"

    def _show(self, history: History, version: Version, now: float) -> None:
        version.visible = version.was_visible = True
        history.show(version.number, now)
        self._registry.waiters.mark_changed(history, ANY_VERSION, room=False)
        self._outbox.log(f"{history.name}: version {version_text(version.number)} is visible")

    def lose_versions(self, history: History, numbers: Iterable[int], now: float) -> None:
        """Make those of these versions invisible that no worker holds any more."""
        if self._registry.recovering(now):
            return
        for number in numbers:
            if (version := history.versions.get(number)) is None or not version.visible or not version.may_be_lost:
                continue
            version.may_be_lost = not version.copies.is_held()
            if version.may_be_lost:
                version.visible = False
                self._registry.waiters.mark_changed(history, ANY_VERSION, room=False)
                if version.number == history.newest_visible:
                    self._outbox.log(f"{history.name}: version {version.number} is lost with its last holder")

    # --- a shard is doubted ---

    def doubt(self, lease: Lease, shard: int, segments: tuple[int, ...], now: float) -> None:
        """Handle the report of a reader that got other bytes than were published. Its source is notified, and compares
        its bytes with their digests: one reader, which may lie or be behind a broken link, withdraws no copy of others.
        Pass its report on once in DOUBT_AGAIN_S."""
        source, key = self._registry.workers.get(lease.sources.get(shard, b"")), lease.key(shard)
        if source is None:
            return
        source.corrupt_segments += len(segments)
        source.history.corrupt_segments += len(segments)
        source.doubts = {doubt: at for doubt, at in source.doubts.items() if now < at + DOUBT_AGAIN_S}
        doubt = key, lease.reader.session
        if doubt in source.doubts or len(source.doubts) >= DOUBTS_MAX:
            return
        if key in source.holdings and all(other != key for other, _ in source.doubts):
            self._outbox.log(
                f"{source.history.name}: {lease.reader.name} got corrupt bytes of {key} from {source.name}"
            )
        source.doubts[doubt] = now
        self._outbox.send(source.session, m.Alive(doubted=(key, segments)))

    # --- a shard is unpublished ---

    def begin_unpublish(self, worker: Worker, unpublish: m.Unpublish) -> None:
        """Grant no new lease on these shards from now on."""
        for held in self._given_up(worker, unpublish):
            held.unpublishing, held.must_retain = unpublish.request_id, False
            worker.history.versions[held.key.version].may_be_lost = True
            self._registry.refresh_candidate(worker, held.key)

    def try_unpublish(self, pending: Pending, unpublish: m.Unpublish, now: float) -> m.Reply | None:
        """Return the answer once the last reader has left, or at the deadline; None: not yet."""
        worker = pending.worker
        holdings = self._given_up(worker, unpublish)
        leases = _leases_on(worker, {h.key for h in holdings})
        if not unpublish.gone:
            # Rule 6: others may still have to report that they read it or hold it, or how many are retained.
            recovering = self._registry.recovering(now)
            if recovering and now < pending.deadline:
                return None
            if recovering and any(h.complete for h in holdings) or self._must_stay(worker.history, holdings):
                return self.retain(worker, unpublish)
            reads = any(not self._registry.is_unused(lease, worker, now) for lease in leases)
            if reads and now < pending.deadline:
                return None
        cut_off = tuple(sorted({lease.reader.name for lease in leases}))
        for h in holdings:
            self._registry.remove_holding(h)
        for key in [key for key in unpublish.keys if key in worker.aside]:
            if worker.aside[key].offered < unpublish.request_id:
                self._registry.take_from_aside(worker, key)
        _remember_withdrawn(worker, unpublish)
        return m.Unpublished(unpublish.request_id, cut_off)

    def retain(self, worker: Worker, unpublish: m.Unpublish) -> m.Unpublished:
        """Make the worker keep what it wanted to unpublish."""
        for h in self._given_up(worker, unpublish):
            h.unpublishing, h.must_retain = None, True
            self._registry.refresh_candidate(worker, h.key)
        return m.Unpublished(unpublish.request_id, must_retain=True)

    def _given_up(self, worker: Worker, unpublish: m.Unpublish) -> list[Holding]:
        """Return the holdings to unpublish, without those that were offered again since under the same name."""
        held = (worker.holdings.get(key) for key in dict.fromkeys(unpublish.keys))  # a key that comes twice counts once
        return [h for h in held if h is not None and h.offered < unpublish.request_id]

    def _must_stay(self, history: History, leaving: list[Holding]) -> bool:
        """Return whether removing these would lose a retained version (rule 4)."""
        retained = history.retained()
        if any(h.key.version in retained and self.is_last_copy(history, h, each) for h, each in _alike(leaving)):
            return True
        return any(h.complete and h.key.version in retained and needs_its_domain(h) for h in leaving)

    def is_last_copy(self, history: History, holding: Holding, leaving: list[Holding]) -> bool:
        """Return whether removing these would lose their version, or its universal checkpoint layout (rule 4)."""
        copies = history.versions[holding.key.version].copies
        without = [h.key for h in leaving if h.counted.stays]
        if holding.key.layout == CHECKPOINT:
            return not copies.has_whole(CHECKPOINT, without=without)
        return not copies.is_held(without=without)

    def spare_copies(self, worker: Worker) -> tuple[ShardKey, ...]:
        """Return the copies that had to be retained and are not the last ones any more."""
        kept = [h for h in worker.holdings.values() if h.must_retain]
        if not kept:
            return ()
        retained = worker.history.retained()
        return tuple(
            h.key
            for h in kept
            if h.key.version not in retained or not (self.is_last_copy(worker.history, h, [h]) or needs_its_domain(h))
        )


def _other_bytes(worker: Worker, announced: m.Holding, now: float) -> str | None:
    """Return why this cannot be that version's shard; None: it can, and defines the shard if it is the first."""
    key, history = announced.key, worker.history
    version = history.version(key.version, now)
    shard, said = (key.layout, key.shard_count, key.shard), (announced.root, announced.size_bytes)
    known = history.roots.get(key.version, {}).get(shard)
    is_new = known is None and shard not in version.contents
    if is_new and announced.origin == "published" and (count := _other_cut(history, version, shard)):
        return (
            f"version {version_text(key.version)} was published in {count} shards: a version is never changed; use a "
            "higher version, or call Client.begin when a run starts again"
        )
    if worker.role != "reader":
        version.by_readers.discard(shard)
    elif is_new:
        version.by_readers.add(shard)
    root, _ = version.contents.setdefault(shard, said if known is None else known)
    if root == announced.root:
        return None
    return (
        f"other bytes are already published as {key}: a version is never changed; use a higher version, or call "
        "Client.begin when a run starts again"
    )


def _other_cut(history: History, version: Version, shard: tuple[str, int, int]) -> int:
    """Return in how many shards this checkpoint was published that others may have read, if in another number than this
    one: whether the bytes are the same is not known. 0: there is no conflict."""
    layout, count, _ = shard
    if layout != CHECKPOINT:
        return 0  # each engine converts into a layout of its own
    had = (each for each in version.contents if version.was_visible and each not in version.by_readers)
    cuts = (of for name, of, _ in chain(history.roots.get(version.number, ()), had) if name == CHECKPOINT)
    return next((of for of in cuts if of != count), 0)


def spenders(history: History) -> list[tuple[str, int, int]]:
    """Return the workers that hold most of what they published, a few: name, bytes and number of versions."""
    most = sorted(history.workers.values(), key=lambda worker: -worker.published_size_bytes)[:SPENDERS_NAMED_MAX]
    return [
        (w.name, w.published_size_bytes, len({k.version for k, h in w.holdings.items() if h.is_published}))
        for w in most
        if w.published_size_bytes
    ]


def too_far_ahead(history: History, number: int) -> str | None:
    """Return why this version cannot follow the newest one; None: it can. One that is far too high (a time, a hash, a
    slip) would be "latest" for good, and readers that have seen it would take no other."""
    newest = history.newest_visible
    known = step_of(newest) if attempt_of(newest) == attempt_of(number) else 0
    known = max([known, *(begun.step for begun in history.directive.attempts if begun.number == attempt_of(number))])
    if step_of(number) <= known + STEPS_AHEAD_MAX:
        return None
    return (
        f"version {number} is {step_of(number) - known} steps above the newest of {history.name} ({newest or 'none'}), "
        f"and no version may be more than {STEPS_AHEAD_MAX} ahead: publish the framework's global step"
    )


def _alike(holdings: list[Holding]) -> Iterator[tuple[Holding, list[Holding]]]:
    """Yield each complete holding to check with `is_last_copy`, and what leaves with it of its version."""
    by_version: dict[int, list[Holding]] = {}
    for h in holdings:
        by_version.setdefault(h.key.version, []).append(h)
    for alike in by_version.values():
        one_each = {h.key.layout == CHECKPOINT: h for h in alike if h.complete}
        for h in one_each.values():
            yield h, alike


def _leases_on(worker: Worker, keys: set[ShardKey]) -> list[Lease]:
    """Return the leases that read any of these shards from this worker."""
    return [
        lease
        for lease in worker.readers.values()
        if any(session == worker.session and lease.key(shard) in keys for shard, session in lease.sources.items())
    ]


def _remember_withdrawn(worker: Worker, unpublish: m.Unpublish) -> None:
    for key in unpublish.keys:
        drop(worker.withdrawn, key)
        put(worker, "withdrawn", key, unpublish.request_id)
    while len(worker.withdrawn) > WITHDRAWN_KEPT_MAX:
        del worker.withdrawn[next(iter(worker.withdrawn))]
