"""What workers hold: when a version becomes visible, which copies must stay, and when one is given up. PURE.

Rules 1 (unpublish), 2 (atomic visibility) and 4 (retention) of `hub.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Holding, Pending, Version, Worker
from tensorhub_plugins.core.hub.waiters import ANY_VERSION
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

WITHDRAWN_KEPT_MAX = 256  # per session: shards whose late Publish must not bring them back
HOLDINGS_PER_SESSION_MAX = 65536


class Publishing:
    """What is published, retained and given up."""

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry = registry
        self._outbox = outbox

    # --- a shard is there ---

    def publish(self, worker: Worker, request_id: int, announced: m.Holding) -> None:
        """Answer a Publish: what the worker holds is recorded, or the request refused."""
        if request_id < worker.withdrawn.get(announced.key, 0):  # overtaken on the way by its own Unpublish
            self._outbox.reply(worker, m.Done(request_id))
            return
        problem = self.cannot_be_new(worker, announced) or self.hold(
            worker, announced, as_of=request_id, offered=request_id
        )
        if problem:
            self._outbox.refuse(worker, request_id, "UsageError", problem)
        else:
            self._registry.end_claim(worker, announced.key)
            self._outbox.reply(worker, m.Done(request_id))

    def cannot_be_new(self, worker: Worker, announced: m.Holding) -> str | None:
        """A worker that has just read a withdrawn version holds it, and says so; but it cannot be published again."""
        number = announced.key.version
        if number not in worker.history.withdrawn or announced.origin == "replicated":
            return None
        if announced.key in worker.holdings:
            return None
        return (
            f"version {number} was withdrawn and cannot be published again: publish under a higher number, or under "
            "another run name when a run starts again"
        )

    def hold(self, worker: Worker, announced: m.Holding, *, as_of: int, offered: int = 0) -> str | None:
        """Record a holding; return what is wrong with it, if anything."""
        key, history = announced.key, worker.history
        problem = self._cannot_be_held(worker, announced)
        if problem is not None:
            return problem
        version = history.versions[key.version]
        mine = worker.holdings.get(key)
        worker.holdings_checksum = 0
        if mine is None:
            mine = Holding(
                worker=worker,
                key=key,
                root=announced.root,
                size_bytes=announced.size_bytes,
                complete=announced.complete,
                origin=announced.origin,
                as_of=as_of,
                offered=offered,
            )
            self._registry.add_holding(mine, version)
        else:
            mine.complete |= announced.complete
            mine.as_of = max(mine.as_of, as_of)
        if mine.complete:
            worker.depth.pop(key, None)
        self._registry.refresh_candidate(worker, key)
        if version.visible or not mine.complete or key.version in history.withdrawn:
            return None
        if mine.origin == "replicated" or self.replica_is_whole(version, worker, key):
            self._show(history, version)
        return None

    def _cannot_be_held(self, worker: Worker, announced: m.Holding) -> str | None:
        key = announced.key
        if key.version < 1 or key.shard >= key.shard_count:
            return f"no such shard: {key}"
        if len(worker.holdings) >= HOLDINGS_PER_SESSION_MAX and key not in worker.holdings:
            return f"more than {HOLDINGS_PER_SESSION_MAX} shards held by one worker"
        version = worker.history.version(key.version)
        said = announced.root, announced.size_bytes
        root, _ = version.contents.setdefault((key.layout, key.shard_count, key.shard), said)
        if root != announced.root:
            return (
                f"other bytes are already published as {key}: a version is never changed; use a higher version, or "
                "another run name when a run starts again"
            )
        return None

    def replica_is_whole(self, version: Version, worker: Worker, key: ShardKey) -> bool:
        """Rule 2: whether worker's replica by itself holds every shard."""
        by_shard = version.holdings.get((key.layout, key.shard_count), {})
        return all(
            any(h.complete and h.worker.hello.replica == worker.hello.replica for h in by_shard.get(shard, {}).values())
            for shard in range(key.shard_count)
        )

    def _show(self, history: History, version: Version) -> None:
        version.visible = True
        history.newest_visible = max(history.newest_visible, version.number)
        self._registry.waiters.mark_changed(history, ANY_VERSION, room=False)
        self._outbox.log(f"{history.name}: version {version.number} is visible")

    def lose_versions(self, history: History, numbers: Iterable[int], now: float) -> None:
        """Those of them that are not visible any more, because no worker holds them."""
        if self._registry.recovering(now):
            return
        for number in numbers:
            version = history.versions.get(number)
            if version is None or not version.visible or not version.may_be_lost:
                continue
            version.may_be_lost = not version.is_held()
            if version.may_be_lost:
                version.visible = False
                self._registry.waiters.mark_changed(history, ANY_VERSION, room=False)
                if version.number == history.newest_visible:
                    self._outbox.log(f"{history.name}: version {version.number} is lost with its last holder")

    # --- a shard is given up ---

    def begin_unpublish(self, worker: Worker, unpublish: m.Unpublish) -> None:
        """From now on no new lease is given on these shards."""
        for held in self._given_up(worker, unpublish):
            held.unpublishing, held.must_retain = unpublish.request_id, False
            worker.history.versions[held.key.version].may_be_lost = True
            self._registry.refresh_candidate(worker, held.key)

    def try_unpublish(self, pending: Pending, unpublish: m.Unpublish, now: float) -> m.Reply | None:
        """The answer once the last reader has left, or at the deadline; None: not yet."""
        worker = pending.worker
        holdings = self._given_up(worker, unpublish)
        leases = [lease for h in holdings for lease in self._registry.leases_on(worker, h.key)]
        if not unpublish.gone:
            # Rule 6: others may still have to say that they read it or hold it, or how many are retained.
            recovering = self._registry.recovering(now)
            if recovering and now < pending.deadline:
                return None
            if any(h.complete and (recovering or self.is_last_copy(worker.history, h, holdings)) for h in holdings):
                return self._retain(worker, unpublish, holdings)
            if leases and now < pending.deadline:
                return None
        cut_off = tuple(sorted({lease.reader.name for lease in leases}))
        for h in holdings:
            self._registry.remove_holding(h)
        _remember_withdrawn(worker, unpublish)
        return m.Unpublished(unpublish.request_id, cut_off)

    def _retain(self, worker: Worker, unpublish: m.Unpublish, holdings: list[Holding]) -> m.Unpublished:
        for h in holdings:
            h.unpublishing, h.must_retain = None, True
            self._registry.refresh_candidate(worker, h.key)
        return m.Unpublished(unpublish.request_id, must_retain=True)

    def _given_up(self, worker: Worker, unpublish: m.Unpublish) -> list[Holding]:
        """Not what it has begun to offer since, under the same name."""
        held = (worker.holdings.get(key) for key in unpublish.keys)
        return [h for h in held if h is not None and h.offered < unpublish.request_id]

    def is_last_copy(self, history: History, holding: Holding, leaving: list[Holding]) -> bool:
        """Rule 4: whether giving these up would lose a retained version, or its universal checkpoint layout."""
        if holding.key.version not in history.retained():
            return False
        version = history.versions[holding.key.version]
        without = frozenset(id(h) for h in leaving)
        if holding.key.layout == CHECKPOINT:
            return not version.has_whole(CHECKPOINT, without=without)
        return not version.is_held(without=without)

    def spare_copies(self, worker: Worker) -> tuple[ShardKey, ...]:
        """Copies that had to be retained and are not the last ones any more."""
        retained = [h for h in worker.holdings.values() if h.must_retain]
        return tuple(h.key for h in retained if not self.is_last_copy(worker.history, h, [h]))


def _remember_withdrawn(worker: Worker, unpublish: m.Unpublish) -> None:
    for key in unpublish.keys:
        worker.withdrawn.pop(key, None)
        worker.withdrawn[key] = unpublish.request_id
    while len(worker.withdrawn) > WITHDRAWN_KEPT_MAX:
        del worker.withdrawn[next(iter(worker.withdrawn))]
