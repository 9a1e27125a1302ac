"""The shell of the pure `Shelf`: serves what is on it, and announces it to the hub.

Transports' threads look up offers here (`find`, `await_offer`); the client's callers publish, unpublish and read.
Decisions are taken under one lock; their effects, messages to the hub or disconnected readers, are carried out outside
of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from weakref import WeakKeyDictionary

from typing_extensions import assert_never

from tensorhub_plugins.core import machine, resources
from tensorhub_plugins.core.client import calls, shelf
from tensorhub_plugins.core.client.budget import Budget
from tensorhub_plugins.core.client.changes import Changes
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.client.reports import UnpublishReport
from tensorhub_plugins.core.client.session import Disowned, Doubted
from tensorhub_plugins.core.client.shelf import Published, Shelf
from tensorhub_plugins.core.deadline import NEVER, Deadline, check_time, size_s, timeout_for
from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.errors import DeadlineExceeded, HubUnreachable, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.manifest import Manifest, TensorSpec, TensorTable
from tensorhub_plugins.core.memory.assembly import check_whole, whole_of
from tensorhub_plugins.core.memory.contents import KnownContents
from tensorhub_plugins.core.memory.downloads import Downloads
from tensorhub_plugins.core.memory.moves import Paced, check_cover
from tensorhub_plugins.core.memory.pool import SlabPool
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.options import Delta
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.lineage import Lineage, is_superseded
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.types import ShardKey, printable

log = logging.getLogger("tensorhub.client")

BACKGROUND_TIMEOUT_S = 30.0  # for readers of a copy that is unpublished in the background
RETAIN_S = 0.25  # at least, to move a last copy to host memory
NAMES_SHOWN_MAX = 5  # of tensors, in a log line
SAMPLED_SEGMENTS = 4  # 16 MiB at most: a training step that began too early has changed nearly all of them
SAMPLE_S = 0.1  # at least, to compare them
OWN_KINDS = ("allocated", "view")  # kinds of slabs in memory of the client's own
ANNOUNCE_S = 0.3  # a hub that is up has answered long before; one that is away is notified when it is back


class Serving:
    """What one worker ("replica/shard") offers. Set `hub` before anything is published or read."""

    hub: HubLink

    def __init__(self, worker: str, pool: SlabPool, budget: Budget, delta: Delta = "auto") -> None:
        self.worker, self.pool, self._budget = worker, pool, budget
        self.contents = KnownContents()
        self.changes = Changes(self._whole_offers, delta)
        self.changes.deltas.limit(budget.size_bytes)
        self._is_over = False
        self._disowned: UsageError | None = None
        self._shelf: Shelf[Offer] = Shelf()
        self._changed = threading.Condition()  # guards the shelf; notified when an offer came, or will not come
        self._fetched: WeakKeyDictionary[Slab, tuple[int, str]] = WeakKeyDictionary()  # version, layout; from others
        self._lent: dict[Slab, tuple[Slab, ...]] = {}  # views that are offered -> the slabs of their memory
        self._covered: tuple[dict[int, TensorTable], TensorTable] | None = None  # all sources of a read, and its target
        self._parts: dict[int, TensorTable] = {}  # what came in parts in the last read, by source shard
        self._background = resources.pool_of(1, "tensorhub-background")

    # --- for the transports' serving threads: their Shelf ---

    def find(self, key: ShardKey) -> Offer | None:
        with self._changed:
            return self._shelf.find(key)

    def await_offer(self, key: ShardKey, request_id: int, deadline: float) -> Offer | None:
        until = Deadline(deadline)
        with self._changed:
            while self._shelf.find(key) is None and self._shelf.is_expected(key, request_id) and not until.expired:
                self._changed.wait(until.remaining())
            return self._shelf.find(key)

    def _whole_offers(self) -> list[Offer]:
        """Return what is offered and has arrived, the newest first."""
        with self._changed:
            entries = sorted(self._shelf.entries.items(), reverse=True)
        return [entry.offer for _, entry in entries if not entry.is_arriving]

    # --- publish and unpublish ---

    def keys(self) -> list[ShardKey]:
        """Return the shards that are offered, sorted."""
        with self._changed:
            return sorted(self._shelf.entries)

    def check(self, key: ShardKey) -> None:
        """Raise UsageError when this may not be published now, whatever its bytes."""
        with self._changed:
            self._shelf.check(key, returns=self._returns(key))

    def published(self, layout: str) -> Published | None:
        """Return the newest version that was published here in this layout."""
        with self._changed:
            return self._shelf.published.get(layout)

    def publish(
        self, key: ShardKey, manifest: Manifest, slab: Slab, deadline: Deadline, *, lends: bool = False
    ) -> None:
        """Offer a whole shard; return when the hub knows of it. On an error nothing is published. lends: only the pool
        writes to its memory once it is no longer offered."""
        check_time(deadline)
        was_read = self._fetched.get(slab) == (key.version, key.layout)
        offer = self._offer_of(key, manifest, slab, self.hub.last_request_id + 1, lends=lends)
        offer.mark_all_ready()
        try:
            for answer in self.decide(
                lambda it: it.publish(key, manifest, offer, returns=self._returns(key), was_read=was_read),
                deadline,
            ):
                calls.result(answer)  # the session machine ends every request at its deadline
        except BaseException as error:
            is_left = isinstance(error, calls.Interrupted)
            self.decide(lambda it: it.refused(key, offer, left=is_left))
            offer.withdraw()  # the shelf may not have taken it
            raise
        with self._changed:
            self._shelf.announced(key, manifest)
        calls.undone_by(lambda: self.take_back([key]))

    def take_back(self, keys: Iterable[ShardKey]) -> None:
        """Withdraw these, and notify the hub: the caller that put them here does not know of them."""
        self.decide(lambda it: it.take_back(keys))

    def unpublish(self, version: int, layout: str | None, timeout_s: float | None) -> UnpublishReport:
        """Unpublish a version, as `Client.unpublish`."""
        with self._changed:
            ticket = self._shelf.unpublish(version, layout)
        return self._unpublish(version, ticket, timeout_s)

    def may_release(self, keys: Iterable[ShardKey]) -> None:
        """Unpublish copies that, as the hub says, need not be retained any more. Does not block."""
        with self._changed:
            ticket = self._shelf.may_release(keys)
        self._soon(self._release, ticket)

    def release_borrowed(self) -> None:
        """Stop offering what is in borrowed memory, so that its owner may reuse that. Does not block."""
        with self._changed:
            entries = self._shelf.entries.items()
            keys = [k for k, entry in entries if entry.offer.slab.borrowed is not None and not entry.is_arriving]
            ticket = {key: number for each in keys for key, number in self._shelf.offering(each).items()}
        if ticket:
            self._soon(self._release, ticket)

    def release_copies(self, version: int) -> None:
        """Unpublish what was read for others: the hub says whether and how long it has to stay. Does not block."""
        with self._changed:
            ticket = self._shelf.copies(version)
        self._soon(self._release, ticket)

    def supersede(self, lineage: Lineage) -> None:
        """Withdraw what a newer attempt of the trainer has superseded. Does not block."""
        self._soon(self.decide, lambda it: it.supersede(lambda version: is_superseded(version, lineage)))

    def _release(self, ticket: shelf.Ticket) -> None:
        with self._changed:  # after a wait in the queue it may be published again by now
            ticket = self._shelf.still_meant(ticket)
        try:
            self._unpublish(0, ticket)
        except TensorHubError as error:
            log.info("%s: copies that others may need stay for now: %s", self.worker, error)

    def _unpublish(self, version: int, ticket: shelf.Ticket, timeout_s: float | None = None) -> UnpublishReport:
        if not ticket:
            return UnpublishReport(version, 0.0)
        with self._changed:
            slabs = [entry.offer.slab for key, entry in self._shelf.entries.items() if key in ticket]
        size_bytes = sum(slab.size_bytes for slab in slabs if slab.kind == "adopted")  # these may have to be moved
        timeout_s = timeout_for(timeout_s, size_bytes, base_s=BACKGROUND_TIMEOUT_S)
        began, deadline = time.monotonic(), Deadline.after(timeout_s)
        readers_s = timeout_s - (min(timeout_s / 2, RETAIN_S + size_s(size_bytes)) if size_bytes else 0.0)
        try:
            until_read = Deadline.after(readers_s)
            reply = self.hub.ask(lambda n: messages.Unpublish(n, tuple(ticket), readers_s), until_read).result()
            assert isinstance(reply, messages.Unpublished)
        except HubUnreachable:  # it may be the last copy; a hub that is back says when it may go
            log.warning("%s: version %d is kept, the hub does not answer", self.worker, next(iter(ticket)).version)
            reply = messages.Unpublished(0, must_retain=True)
        damaged = self._check_adopted(ticket, Deadline(max(deadline, time.monotonic() + SAMPLE_S)))
        deadline = Deadline(max(deadline, time.monotonic() + RETAIN_S))
        try:
            damaged += self._check_adopted(ticket, deadline, moves=True) if reply.must_retain else ()
            self.decide(lambda it: it.unpublished(ticket, keep=reply.must_retain), deadline)
        except DeadlineExceeded as error:
            text = "the last copy could not be moved to host memory in time: it is offered on, and must not change yet"
            raise error.within(text, version=version, phase="retain", timeout_s=timeout_s) from error
        except Exception as error:
            found = resources.refusal(error)
            if found is None:
                raise
            text = "the last copy cannot be moved to host memory: it is offered on, and must not change yet"
            raise found.within(f"{text}; {found.message}", version=version, phase="retain") from error
        kept = reply.must_retain and not damaged
        return UnpublishReport(version, time.monotonic() - began, reply.cut_off, kept, tuple(damaged))

    # --- check that what is offered is what was published ---

    def recheck(self, version: int, layout: str | None) -> tuple[str, ...]:
        """Compare a version with its digests, as `Client.recheck`."""
        with self._changed:
            entries = self._shelf.entries.items()
            keys = [k for k, e in entries if k.version == version and layout in (None, k.layout) and not e.is_arriving]
        return tuple(dict.fromkeys(name for key in keys for name in self._check(key, None)))

    def doubt(self, effect: Doubted | Disowned) -> None:
        """Handle a reader's report that it got other bytes than were published, or the hub's that it does not accept a
        shard. Does not block."""
        if isinstance(effect, Doubted):
            self._soon(self._look_into, effect.key, effect.segments)
        else:
            self._soon(self._disown, effect)

    def _disown(self, effect: Disowned) -> None:
        """Withdraw a shard: the hub sends no reader here for it, and its number may mean other bytes there."""
        text = f"{effect.key} is offered no more: the hub does not take it: {printable(effect.why)}"
        log.error("%s: %s", self.worker, text)
        with self._changed:
            if effect.was_published:
                self._disowned = UsageError(text, version=effect.key.version, shard=effect.key.shard)
        self.decide(lambda it: it.damaged(self._shelf.offering(effect.key)))

    def take_disowned(self) -> UsageError | None:
        """Return the error for what was published here and a later hub does not accept; once, then None."""
        with self._changed:
            problem, self._disowned = self._disowned, None
        return problem

    def _look_into(self, key: ShardKey, segments: Sequence[int]) -> None:
        try:
            if not self._check(key, segments) and self.find(key) is not None:
                log.warning("%s: a reader got corrupt bytes of %s, and they are right here", self.worker, key)
        except TensorHubError as error:
            log.info("%s: cannot look into what a reader says of %s: %s", self.worker, key, error)

    def _check_adopted(self, keys: Iterable[ShardKey], deadline: Deadline, *, moves: bool = False) -> list[str]:
        """Check some segments of tensors published in place, so that writes to them meanwhile are reported; or (moves:
        they are about to be copied) that all of them are still there."""
        with self._changed:
            found = {key: self._shelf.find(key) for key in keys}
        offers = {key: offer for key, offer in found.items() if offer is not None and offer.slab.kind == "adopted"}
        names: list[str] = []
        with suppress(*() if moves else (DeadlineExceeded,)):  # they may be of very many tensors
            for key, offer in offers.items():
                segments = None if moves else sample(offer.manifest.segment_count, key.version)
                names += self._check(key, segments, deadline, moves=moves)
        return names

    def _check(
        self, key: ShardKey, segments: Sequence[int] | None, deadline: Deadline = NEVER, *, moves: bool = False
    ) -> tuple[str, ...]:
        """Return the tensors whose bytes, in these segments (None: all), do not have their digests, or (moves) are
        gone: then the shard is no longer offered."""
        with self._changed:
            ticket, offer = self._shelf.offering(key), self._shelf.find(key)
        if offer is None:
            return ()
        try:
            reader = offer.attach(lambda: None)  # while it is checked, its memory is not reused
        except VersionGone:
            return ()
        try:
            if segments is not None:
                segments = [k for k in segments if k < offer.manifest.segment_count and offer.poll_ready(k, 0.0)]
            look = offer.slab.gone if moves else offer.slab.damaged
            found = look(offer.manifest, segments, deadline=deadline)
        finally:
            offer.detach(reader)
        if not found:
            return ()
        names = tuple(dict.fromkeys(spec.tensor for spec in offer.manifest.specs_in(found)))
        log.error(
            "%s: %s was written to while it was published, and is offered no more: %d tensors, first %s. Nothing may "
            "change them between publish and unpublish; publish with copy=True otherwise",
            self.worker,
            key,
            len(names),
            list(names[:NAMES_SHOWN_MAX]),
        )
        self.decide(lambda it: it.damaged(ticket))
        return names

    # --- serve what is being read ---

    def begin_read(self, *, for_others: bool) -> int:
        """Begin a transfer; return its number, by which the calls below name it."""
        with self._changed:
            return self._shelf.begin_read(self.hub.last_request_id + 1, is_for_others=for_others)

    def prepare(self, read: int, key: ShardKey, manifest: Manifest, slab: Slab) -> bool:
        """Offer what arrives in this slab. Return False where the shelf declines it: what is here already stays."""
        with self._changed:
            offer = self._offer_of(key, manifest, slab, self._shelf.readings[read].since(key), lends=True)
            effects = self._shelf.prepare(read, key, offer)
            if not effects:
                offer.withdraw()
                self._lent.pop(slab, None)
            self._changed.notify_all()
        self._carry_out(effects)
        return bool(effects)

    def arriving(self, read: int) -> list[Offer]:
        """Return what this transfer serves to others while it arrives."""
        with self._changed:
            return self._shelf.arriving(read)

    def complete(self, read: int) -> None:
        """Finish a transfer: everything is here. The hub is notified, without making the caller wait for it."""
        answers = self.decide(lambda it: it.complete(read))
        if wait(answers, 0.0 if self.hub.is_far else ANNOUNCE_S).not_done:
            log.debug("%s: the hub has not heard yet what was read", self.worker)

    # --- memory ---

    def take(
        self,
        specs: Iterable[TensorSpec],
        deadline: float = NEVER,
        *,
        is_read: bool = False,
        for_others: bool = False,
        of_read: Room | None = None,
    ) -> Slab:
        """Return a slab for these tensors, a used one where there is one. Raise UsageError without free memory, and for
        copies for others also beyond the budget. is_read: it is read into, which is not refused. of_read: what that
        read may still take."""
        table = TensorTable.of(specs)
        if for_others and table.size_bytes > (room := self.room_bytes()):  # it was more when reported to the hub
            raise UsageError(f"a copy of {table.size_bytes / 1e6:.1f} MB, and room for {room / 1e6:.1f} MB is left")
        left_bytes = self._left_bytes() - table.size_bytes
        self.changes.deltas.limit(left_bytes)
        if left_bytes >= 0:
            self._is_over = False
        elif not for_others:
            self._spend(table.size_bytes, refuses=self._budget.refuses and not is_read)
        slab = self.pool.take(table, deadline, of_read)
        self._fetched.pop(slab, None)
        return slab

    def _spend(self, size_bytes: int, *, refuses: bool) -> None:
        """Check the budget for so many more bytes offered from memory of our own. Copies for others do not count: they
        were made in what was left."""
        with self._changed:
            entries = [(k, e) for k, e in self._shelf.entries.items() if not e.is_for_others]
        offered = [(key, entry) for key, entry in entries if entry.offer.slab.kind in OWN_KINDS]
        spent = sum(entry.offer.slab.size_bytes for _, entry in offered)
        was_over, self._is_over = self._is_over, spent + size_bytes > self._budget.size_bytes
        if not self._is_over:
            return
        text = self._exceeded(offered, spent, size_bytes)
        resources.note(text)
        if refuses:
            raise UsageError(text)
        if not was_over:  # logged once, until it was below again
            log.warning("%s", text)

    def _exceeded(self, offered: Sequence[tuple[ShardKey, shelf.Entry[Offer]]], spent: int, size_bytes: int) -> str:
        """Return that so many more bytes are above the budget, and what to do."""
        newest = [
            f"version {key.version} {key.layout} {entry.offer.slab.size_bytes / 1e6:.1f} MB"
            f"{', retained' if entry.is_retained else ''}"
            for key, entry in offered[-NAMES_SHOWN_MAX:]
        ]
        return (
            f"{self.worker} offers {len(offered)} copies of {spent / 1e6:.1f} MB, and {size_bytes / 1e6:.1f} MB more "
            f"are above its budget of {self._budget.size_bytes / 1e6:.1f} MB; the last: {'; '.join(newest) or 'none'}. "
            "Unpublish versions that are over, retain fewer, or raise memory_budget_bytes"
        )

    def room_bytes(self) -> int:
        """Return the bytes free for copies that others need: what the budget leaves, at most half of what is free."""
        return max(0, min(self._left_bytes(), machine.available_bytes() // 2))

    def _left_bytes(self) -> int:
        """Return what the budget leaves beside all that is offered from memory of our own."""
        with self._changed:
            offered = [e.offer.slab for e in self._shelf.entries.values() if e.offer.slab.kind in OWN_KINDS]
        return self._budget.size_bytes - sum(slab.size_bytes for slab in offered)

    def holds_fetched(self, slabs: Iterable[Slab], version: int, layout: str) -> None:
        """Note that these slabs hold what was read from others. They are not reused, whatever is unpublished, before
        they are released."""
        for slab in slabs:
            self._fetched[slab] = version, layout
            self.pool.hold(slab)

    def recycle(self, slab: Slab, hand_out: int | None = None) -> None:
        """Return this slab to the pool, unless it is on the shelf. hand_out: as in `SlabPool.give_back`."""
        with self._changed:
            blocks = self._lent.pop(slab, ())
            is_offered = any(entry.offer.slab is slab for entry in self._shelf.entries.values())
            is_offered = is_offered or any(slab in lent for lent in self._lent.values())
        for block in blocks:
            self.recycle(block)
        if not is_offered:
            self.pool.give_back(slab, hand_out)
        elif hand_out is not None:
            self.pool.release(slab)

    def releaser(self, slabs: Iterable[Slab]) -> Callable[[], None]:
        """Return a function that recycles these slabs as handed out now: not those recycled and reused since. In a
        forked child it does nothing: the child's memory is its own, and locks may be held for ever there."""
        handed_out, pid = [(slab, self.pool.hand_out(slab)) for slab in slabs], os.getpid()

        def release() -> None:
            for slab, hand_out in handed_out if os.getpid() == pid else ():
                self.recycle(slab, hand_out)

        return release

    def lend(self, view: Slab, blocks: Iterable[Slab]) -> None:
        """Offer the memory of these slabs as the view; it returns to the pool with the last view of it."""
        with self._changed:
            self._lent[view] = tuple(blocks)

    def check_parts(self, tables: Mapping[int, TensorTable], deadline: float = NEVER) -> None:
        """Check what has come in parts, by source shard. Raise UsageError if they do not make whole tensors; those that
        do are remembered, as the next version will almost always come in the same parts."""
        if self._parts != tables:
            check_whole(tables, deadline)
            self._parts = dict(tables)

    def check_cover(self, tables: Mapping[int, TensorTable], wanted: TensorTable, paced: Paced) -> None:
        """Do `moves.check_cover` for source shards. What was right is remembered: checking all tensors of hundreds of
        shards takes seconds, and comparing them with those of the last version almost nothing."""
        if self._covered != (tables, wanted):
            check_cover(tables, wanted, paced)
            self._covered = dict(tables), wanted

    def forget_tables(self) -> None:
        """Forget the tables of the last read: the next one will be different."""
        self._parts, self._covered = {}, None

    def parts_as_before(self, shard: int, table: TensorTable) -> TensorTable | None:
        """Return all whole tensors of which parts came the last time; None if this shard had others."""
        before = self._parts
        if before.get(shard) != table:
            return None
        # One part of each is enough: hundreds of shards have a million.
        parts = {spec.tensor: spec for each in before.values() for spec in each if spec.part is not None}
        return TensorTable.of(map(whole_of, parts.values()))

    def close(self) -> None:
        """Expect no more offers: readers that wait for one are notified. Idempotent."""
        self.changes.is_on = False
        with self._changed:
            self._shelf.closed = True
            self._changed.notify_all()

    def free(self) -> None:
        """Disconnect readers and release all memory. The transports serve no more."""
        self._background.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            effects = self._shelf.close()
        self.pool.close()
        self._carry_out(effects)

    # --- inside ---

    def _offer_of(self, key: ShardKey, manifest: Manifest, slab: Slab, created_after: int, *, lends: bool) -> Offer:
        offer = Offer(key, manifest, slab, created_after=created_after, lends=lends)
        offer.deltas = self.changes.sender(offer)
        offer.doubt = lambda segment: self._soon(self._look_into, key, [segment])
        return offer

    def _soon(self, work: Callable[..., object], *about: object) -> None:
        """Do this in the background, unless it is closed. Does not block."""
        with suppress(RuntimeError):
            self._background.submit(work, *about)

    def decide(
        self, decision: Callable[[Shelf[Offer]], list[shelf.Effect[Offer]]], deadline: Deadline = NEVER
    ) -> list[Future[messages.Reply]]:
        """Have the shelf decide, and carry that out; return the futures of the hub's answers."""
        with self._changed:
            effects = decision(self._shelf)
            self._changed.notify_all()
        return self._carry_out(effects, deadline)

    def _carry_out(
        self, effects: list[shelf.Effect[Offer]], deadline: Deadline = NEVER
    ) -> list[Future[messages.Reply]]:
        """Carry out effects; return the futures of the hub's answers."""
        answers = []
        for effect in effects:
            match effect:
                case shelf.Announce(offer, is_whole, was_read):
                    answers.append(self._announce(offer, is_whole, was_read, deadline))
                case shelf.MarkReady(offer, segment):
                    if segment is None:
                        offer.mark_all_ready()
                    else:
                        offer.mark_ready(segment)
                case shelf.Retract(keys):
                    self._retract(keys)
                case shelf.Withdraw(_, offer):
                    offer.withdraw()
                    self.recycle(offer.slab)
                case shelf.GiveWay(_, offer, is_arriving):
                    self._give_way(offer, is_arriving=is_arriving)
                case shelf.Retain(key, offer):
                    self._retain(key, offer, deadline)
                case _:
                    assert_never(effect)
        return answers

    def _announce(self, offer: Offer, is_whole: bool, was_read: bool, deadline: Deadline) -> Future[messages.Reply]:
        manifest = offer.manifest
        origin: messages.Origin = "replicated" if was_read else "published"
        holding = messages.Holding(offer.key, manifest.root(), manifest.size_bytes, is_whole, origin)
        return self.hub.ask(lambda n: messages.Publish(n, holding), deadline)

    def _retract(self, keys: tuple[ShardKey, ...]) -> None:
        with suppress(UsageError):  # closed meanwhile: the hub knows, or will know
            deadline = Deadline.after(BACKGROUND_TIMEOUT_S)
            self.hub.ask(lambda n: messages.Unpublish(n, keys, 0.0, gone=True), deadline)

    def _give_way(self, offer: Offer, *, is_arriving: bool) -> None:
        """Withdraw an offer and discard its memory, which its read may still be about to return."""
        offer.withdraw()
        with self._changed:
            blocks = self._lent.pop(offer.slab, (offer.slab,))
        for block in () if is_arriving else blocks:
            self.pool.discard(block)

    def _retain(self, key: ShardKey, offer: Offer, deadline: Deadline) -> None:
        """Serve the last copy from memory that the caller does not touch (rule 4)."""
        if offer.slab.kind != "adopted":
            return
        self._spend(offer.slab.size_bytes, refuses=False)  # rule 4 takes precedence
        # With their strides: the published bytes are those of the storage.
        copy = self.pool.take_once(offer.manifest.tensors, deadline)
        try:
            with Downloads() as downloads:
                for name, tensor in devices.settled(offer.slab.tensors().items()):
                    copy.write_later(name, tensor, downloads, stays=True, deadline=deadline)
        except BaseException:
            self.pool.discard(copy)
            raise
        moved = self._offer_of(key, offer.manifest, copy, offer.created_after, lends=offer.lends)
        moved.mark_all_ready()
        with self._changed:
            replaced = self._shelf.replace(key, offer, moved)
        if not replaced:
            self.pool.discard(copy)
            return
        offer.wait_no_readers(deadline)
        offer.withdraw()

    def _returns(self, key: ShardKey) -> bool:
        """Return whether operators make the fleet go back from the newest version published here to this one."""
        directive, last = self.hub.directive, self._shelf.published.get(key.layout)
        return key.version == directive.pin or (last is not None and last.version in directive.withdrawn)


def sample(count: int, seed: int) -> list[int]:
    """Return SAMPLED_SEGMENTS of so many, spread over all of them, and others for the next seed."""
    taken = min(count, SAMPLED_SEGMENTS)
    return sorted({(seed * 7919 + each * count // taken) % count for each in range(taken)})
