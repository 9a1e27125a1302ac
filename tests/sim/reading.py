"""One simulated read: the shell around `Replication`, and the links over which it reads from others' offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from changing import Memory, Patches, is_here
from checks import OVERWRITTEN, SEGMENTS, Violation, check_read, check_served, truth

from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.client.changes import Bases, Sender
from tensorhub_plugins.core.errors import HubUnreachable, TensorHubError, VersionGone, refusal
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.lineage import is_superseded
from tensorhub_plugins.core.transfer import events, replication
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from workers import Worker

# A transfer of five segments is to share, to ask for more and to take over like one of 256.
SMALL = TransferLimits(
    window_first_segments=2,
    window_min_segments=1,
    additional_min_segments=2,
    additional_after_s=0.05,
    slow_far_s=0.6,
)
INFINITY = float("inf")
STALL_S = 3.0  # a reader gives a silent source up
LATE_S = s.ANSWER_MARGIN_S + 0.6  # beyond a deadline: the margin for the hub's answer, and one timer's step


@dataclass
class Replicate:
    """The answer is a Got, or the class of the error."""

    version: int
    at_least: int
    layouts: tuple[str, ...]
    claim: bool
    timeout_s: float
    for_others: bool = False


@dataclass
class Got:
    version: int
    layout: str
    shards: dict[int, tuple[bytes, ...]]


@dataclass(eq=False)
class Offer:
    """complete: all of its bytes are here, whatever the shelf believes."""

    key: ShardKey
    buffer: list[bytes]
    manifest: Manifest
    birth: int
    complete: bool = False
    withdrawn: bool = False
    ready: set[int] = field(default_factory=set)  # segments that are served
    sender: Sender | None = None
    readers: int = 0  # that make something of it at this moment
    is_recycled: bool = False

    def reuse(self) -> None:
        """Its memory is used for something else."""
        self.buffer[:] = [OVERWRITTEN] * SEGMENTS

    # --- for deltas, as the real one ---

    @property
    def version(self) -> int:
        return self.key.version

    @property
    def slab(self) -> Memory:
        return Memory(self.buffer)

    def attach(self, cut: Callable[[], None]) -> int:
        if self.withdrawn:
            raise VersionGone("the source has withdrawn its offer")
        self.readers += 1
        return 0

    def detach(self, reader: int) -> None:
        self.readers -= reader == 0

    def check_memory(self, segment: int) -> None:
        """Find it there: no file of a source is cut off here."""


class Link:
    """One reader at one source, reading segment after segment."""

    def __init__(self, transfer: Transfer, key: ShardKey, grant: m.Grant, request: int) -> None:
        self.transfer, self.key, self.grant, self.request = transfer, key, grant, request
        self.reader = transfer.worker
        self.world = self.reader.world
        self.source: Worker  # once it is open
        self.lease_deadline = transfer.machine.deadline
        self.offer: Offer | None = None
        self.is_open = True
        self.began = self.world.now
        self._since = self.world.now
        self._todo: list[int] = []
        self._reading = False
        self._late: set[int] = set()
        self._patches = Patches(self)
        self.world.at(self._latency(), self._open)

    def _latency(self) -> float:
        return self.world.rng.uniform(0.0005, 0.05)

    def _open(self) -> None:
        if not self.is_open:
            return
        source = self.world.workers.get(self.grant.session)
        if source is None:
            self.break_("connection refused")
        elif self.world.now < source.frozen_until:
            self._again(self._open)
        else:
            offer = source.shelf.find(self.key)
            if offer is None and source.shelf.is_expected(self.key, self.grant.as_of):
                self.world.counts["waited_for_offer"] += 1
                self._again(self._open)
                return
            if offer is None or offer.birth > self.grant.as_of:
                self.break_("not offered")
                return
            self.source, self.offer = source, offer
            self._patches.opened()
            self.world.links[self] = None
            event = events.Opened(self.key.shard, self.grant.session, offer.manifest)
            self.reader.later(self._latency(), lambda: self._tell(event))

    def _again(self, action: Callable[[], None]) -> None:
        if self.world.now - self._since > STALL_S:
            self.break_("stalled")
        else:
            self.world.at(0.1, action)

    def _tell(self, event: events.Event) -> None:
        if self.is_open:
            self.transfer.feed(event)

    def read(self, segments: tuple[int, ...]) -> None:
        self._todo += segments
        self._patches.ask(segments)
        if not self._reading:
            self._reading = True
            self._since = self.world.now
            self.world.at(self._latency(), self._read)

    def check(self) -> None:
        self._since = self.world.now
        self.world.at(self._latency(), self._check)

    def _check(self) -> None:
        if not self.is_open:
            return
        assert self.offer is not None
        if self.world.now < self.source.frozen_until:
            self._again(self._check)
            return
        event = events.EpochChecked(self.key.shard, self.grant.session, not self.offer.withdrawn)
        self.reader.later(self._latency(), lambda: self._tell(event))

    def _read(self) -> None:
        if not self.is_open:
            return
        assert self.offer is not None
        if not self._todo:
            self._reading = False
            return
        segment = self._todo[0]
        if self.world.now < self.source.frozen_until:
            self._again(self._read)
            return
        if segment not in self.offer.ready:
            if self.offer.complete is False:
                self.world.counts["waited_for_pipeline"] += 1
            self._late.add(segment)
            waits = events.SourceWaiting(self.key.shard, self.grant.session)
            self.reader.later(self._latency(), lambda: self._tell(waits))
            self._again(self._read)
            return
        self._since = self.world.now
        self._todo.pop(0)
        check_read(self.world, self)
        data = self.offer.buffer[segment]
        check_served(self, segment, data)
        frame = self._patches.answer(segment)
        if not self.offer.complete:
            self.world.counts["pipelined_segments"] += 1
        if self.grant.location.data_center != self.reader.group.location.data_center:
            self.world.crossed[self.key, self.reader.group.location.data_center, segment] += 1
        if self.world.rng.random() < self.world.faults.corrupt:
            self.world.counts["corrupt_segments"] += 1
            sent = data if frame is None else frame
            sent = bytes([sent[0] ^ 1]) + sent[1:]
            data, frame = (sent, None) if frame is None else (data, sent)
        latency = self._latency() + (
            self.world.rng.uniform(0.2, 1.5) if self.world.now < self.source.tired_until else 0.0
        )
        self.reader.later(latency, lambda: self._arrive(segment, data, frame))

    def _arrive(self, segment: int, data: bytes, frame: bytes | None) -> None:
        if not self.is_open:
            return
        assert self.offer is not None
        buffer = self.transfer.buffers[self.key.shard]
        digest = self.offer.manifest.digest(segment)
        if self.world.verify and buffer[segment] and is_here(buffer[segment], digest):
            raise Violation("twice", self.world, f"{self.reader.name} reads segment {segment} of {self.key} again")
        if self._patches.make(segment, frame, buffer, self.offer.manifest):
            if frame is None:
                buffer[segment] = data
            intact = not self.world.verify or is_here(buffer[segment], digest)
            waited, by_delta = segment in self._late, frame is not None
            self._tell(events.Arrived(self.key.shard, self.grant.session, segment, intact, waited, (), by_delta))
        else:  # asked for again, whole
            self._todo.append(segment)
            self._patches.ask((segment,))
        self.world.at(0.0, self._read)

    def break_(self, why: str) -> None:
        """The other side is lost; the reader hears of it a moment later."""
        self.world.links.pop(self, None)
        if self.is_open:
            self.world.counts["lost_sources"] += 1
            event = events.Lost(self.key.shard, self.grant.session, why)
            self.reader.later(self._latency(), lambda: self._tell(event))

    def close(self) -> None:
        self.is_open = False
        self.world.links.pop(self, None)


class Transfer:
    """The shell around one Replication."""

    def __init__(self, worker: Worker, asked: Replicate, then: Callable[[Got | type[TensorHubError]], None]) -> None:
        self.worker, self.world, self.then, self.for_others = worker, worker.world, then, asked.for_others
        wanted = m.Acquire(0, asked.version, asked.at_least, asked.layouts, asked.timeout_s, claim=asked.claim)
        self.machine = replication.Replication(
            msgspec.structs.replace(wanted, serve=True, for_others=asked.for_others),
            self.world.now + asked.timeout_s,
            asked.timeout_s,
            verify=self.world.verify,
            limits=SMALL,
        )
        created_after = worker.machine.last_request_id + 1
        self.read = worker.shelf.begin_read(created_after, is_for_others=asked.for_others)
        self.requests: list[int] = []
        self.buffers: dict[int, list[bytes]] = {}
        self.links: dict[tuple[int, bytes], Link] = {}
        self.offers: dict[ShardKey, Offer] = {}  # what was prepared, whether or not it is on the shelf
        self.bases: dict[int, Bases] = {}
        worker.transfers[self] = None
        self._timer = float("inf")
        self.feed(events.Directed(worker.machine.directive))
        self.feed(events.Begin())

    def feed(self, event: events.Event) -> None:
        worker, shelf = self.worker, self.worker.shelf
        for effect in self.machine.handle(event, self.world.now):
            match effect:
                case events.AskSources(acquire):
                    self._ask(acquire)
                case events.Restart():
                    self.world.counts["restarts_in_another_layout"] += 1
                    self._drop(restarts=True)
                case events.Open(key, grant, request_id):
                    shelf.grant(self.read, key)
                    self.buffers.setdefault(key.shard, [b""] * SEGMENTS)
                    self.links[key.shard, grant.session] = Link(self, key, grant, request_id)
                case events.Prepare(key, manifest):
                    self._prepare(key, manifest)
                case events.Read(shard, session, segments):
                    self.links[shard, session].read(segments)
                case events.Verified(shard, _, segment):
                    worker.carry_out(shelf.verified(self.read, self._key(shard), segment))
                    worker.machine.renew(dict.fromkeys(self.requests, 0))
                case events.ConfirmEpoch(shard, session):
                    self.links[shard, session].check()
                case events.Close(shard, session):
                    self.links.pop((shard, session)).close()
                case m.Release(request_id, shard, lost):
                    worker.waiting.pop(request_id, None)
                    worker.feed(m.Release(request_id, shard, lost))
                case events.Complete():
                    self._complete()
                case events.GiveUp(error):
                    self._end(type(error))
        due = max(self.machine.next_deadline(), self.world.now + 0.001)
        if not self.machine.finished and due < self._timer:
            self._timer = due
            worker.later(due - self.world.now, lambda: self._fire(due))

    def _prepare(self, key: ShardKey, manifest: Manifest) -> None:
        worker, shelf = self.worker, self.worker.shelf
        buffer, was = worker.deltas.take(key)
        self.buffers[key.shard] = buffer
        offer = self.offers[key] = Offer(key, buffer, manifest, shelf.readings[self.read].since(key))
        worker.carry_out(shelf.prepare(self.read, key, offer))
        here, bases = worker.deltas.prepare(key, manifest, buffer, was)
        for segment in sorted(here):
            worker.carry_out(shelf.verified(self.read, key, segment))
        if bases is not None:
            self.bases[key.shard] = bases
        needed = tuple(segment for segment in range(SEGMENTS) if segment not in here)
        self.feed(events.Prepared(key.shard, needed, based=0 if bases is None else bases.count))

    def _fire(self, due: float) -> None:
        if due == self._timer and not self.machine.finished:
            self._timer = float("inf")
            self.feed(events.Tick())

    def _key(self, shard: int) -> ShardKey:
        return ShardKey(self.machine.version, self.machine.layout, shard, self.machine.shard_count)

    def _ask(self, acquire: m.Acquire) -> None:
        request_id = 0

        def answered(reply: m.Reply | None) -> None:
            answer: Any = HubUnreachable("no answer") if reply is None else reply
            if isinstance(reply, m.Refused):
                answer = refusal(reply.error, reply.message)
            if acquire.beside and isinstance(reply, m.Granted):
                self.world.counts["further_urgent" if acquire.urgent else "further_idle"] += 1
            self.feed(events.Answer(request_id, answer, bool(acquire.beside)))

        request_id = self.worker.ask(
            lambda number: msgspec.structs.replace(acquire, request_id=number),
            self.machine.deadline,
            answered,
        )
        self.requests.append(request_id)

    def _complete(self) -> None:
        machine, worker = self.machine, self.worker
        if is_superseded(machine.version, worker.machine.directive.attempts):
            raise Violation("superseded", self.world, f"{worker.name} was handed {machine.version}, and knows better")
        shards = {shard: tuple(self.buffers[shard]) for shard in machine.shards}
        for shard, content in shards.items():
            if content != truth(self._key(shard), self.world.trainers.shard_count):
                raise Violation("torn", self.world, f"{worker.name} was handed wrong bytes as {self._key(shard)}")
        for offer in worker.shelf.arriving(self.read):
            offer.complete = True
            worker.whole(offer.key)
        worker.carry_out(worker.shelf.complete(self.read))
        self.world.counts["replications"] += 1
        if not self.for_others:
            worker.see(machine.version)
        self._end(Got(machine.version, machine.layout, shards))

    def _end(self, outcome: Got | type[TensorHubError]) -> None:
        if self.world.now > self.machine.deadline + LATE_S and self.world.now > self.worker.frozen_until + LATE_S:
            raise Violation("late", self.world, f"{self.worker.name} ended a replicate after its deadline")
        self.worker.transfers.pop(self, None)
        for request_id in self.requests:
            self.worker.waiting.pop(request_id, None)
            self.worker.feed(m.Release(request_id))
        if isinstance(outcome, Got):
            self._close_links()
        else:
            self._drop(restarts=False)
            self.world.counts[f"{'held_no_copy' if self.for_others else 'gave_up'}_{outcome.__name__}"] += 1
        self.worker.later(0.0, lambda: self.then(outcome))

    def _close_links(self) -> None:
        for link in self.links.values():
            link.close()
        self.links = {}

    def _drop(self, *, restarts: bool) -> None:
        """Partial shards are worth nothing any more, and their memory is used again."""
        self._close_links()
        after = self.worker.machine.last_request_id + 1 if restarts else None
        self.worker.carry_out(self.worker.shelf.drop(self.read, restarts_after=after))
        for offer in self.offers.values():
            self.worker.deltas.recycle(offer)
        self.offers, self.buffers, self.bases = {}, {}, {}
