"""Simulated workers: the shells around `Session` and `Shelf`, without threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from changing import Holder
from checks import SEGMENTS, Violation, manifest_of, some_bytes
from reading import INFINITY, LATE_S, Got, Offer, Replicate, Transfer
from world import World

from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.client.requested_copies import has_whole
from tensorhub_plugins.core.client.shelf import (
    Announce,
    Effect,
    GiveWay,
    MarkReady,
    Retain,
    Retract,
    Shelf,
    Ticket,
    Withdraw,
)
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.lineage import is_superseded
from tensorhub_plugins.core.transfer import events
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey

FAILED = -1
Program: TypeAlias = Generator[Any, Any, None]
Then: TypeAlias = "Callable[[m.Reply | None], None]"


def ignore(reply: m.Reply | None) -> None:
    pass


# --- a replica: workers that start, read and die together ---


class Group:
    def __init__(
        self,
        world: World,
        name: str,
        shard_count: int,
        location: Location,
        kind: str,
        program: Callable[[Worker], Program],
        *,
        preemptible: bool = False,
    ) -> None:
        self.preemptible = preemptible
        self.world, self.name, self.shard_count, self.location, self.kind = world, name, shard_count, location, kind
        self.program = program
        self.workers: list[Worker] = []
        self.life = 0
        self.round = self.rounds_before = 0
        self.arrived: list[tuple[Worker, Program]] = []

    @property
    def finished(self) -> bool:
        return bool(self.workers) and all(w.finished for w in self.workers)

    def start(self) -> None:
        self.life += 1
        self.rounds_before = self.round
        self.arrived = []
        self.workers = [Worker(self, shard) for shard in range(self.shard_count)]
        for worker in self.workers:
            self.world.workers[worker.session] = worker
            worker.start(self.program(worker))

    def crash(self, down_s: float) -> None:
        for worker in self.workers:
            worker.die()
        self.workers = []
        self.world.at(down_s, self.start)

    def haunt(self, down_s: float, zombie: Callable[[Worker], Program]) -> None:
        """It starts again while its former life goes on, cut off from the hub for a while or not, and speaks on."""
        for worker in self.workers:
            worker.haunts = zombie
            worker.cut_until = self.world.now + self.world.rng.choice(self.world.lasting.haunt_cut_s)
            worker.later(self.world.rng.uniform(*self.world.lasting.haunt_s), worker.die)
        for worker, _ in self.arrived:
            worker.step(zombie(worker), None)
        self.workers, self.arrived = [], []
        self.world.at(down_s, self.start)

    def meet(self, worker: Worker, program: Program) -> None:
        """A barrier of the group's shards, like the collective RPC that starts an update."""
        if worker.haunts is not None:
            worker.step(worker.haunts(worker), None)
            return
        self.arrived.append((worker, program))
        if len(self.arrived) == self.shard_count:
            self.round += 1
            arrived, self.arrived = self.arrived, []
            # After a round that failed for some, "latest" may mean the last round's version to one shard and a newer
            # one to another: the driver then names one.
            outcomes = {w.outcome for w in self.workers}
            agreed = len(outcomes) == 1 and outcomes != {FAILED}
            seen = [w.seen for w in self.workers if not w.machine.directive.is_over(w.seen)]
            version = 0 if agreed else max(seen, default=0) or FAILED
            answer = Met(self.round, version, self.world.calm)
            for each, waiting in arrived:
                delay = self.world.rng.uniform(0, 0.2)
                each.later(delay, lambda each=each, waiting=waiting: each.step(waiting, answer))

    def note(self, shard: int, round_: int, version: int) -> None:
        """Rule 2: the shards that read "latest" in the same round got the same version."""
        got = self.world.rounds.setdefault((f"{self.name}.{self.life}", round_), {})
        got[shard] = version
        if len(set(got.values())) > 1:
            raise Violation("group", self.world, f"{self.name} read different versions in one round: {got}")


# --- what programs may ask for ---


@dataclass
class Sleep:
    seconds: float


@dataclass
class Meet:
    """Wait for the other shards of the group; the answer is a Met."""


@dataclass
class Met:
    round: int
    version: int  # to read; 0: the latest; FAILED: none, because no shard has seen one since the last round failed
    calm: bool


@dataclass
class Request:
    """The answer is the hub's reply, or None when none came in time."""

    make: Callable[[int], s.Request]
    timeout_s: float


@dataclass
class Publish:
    """Offer a whole shard. The answer is the hub's reply, or None when none came in time."""

    key: ShardKey
    content: tuple[bytes, ...]
    was_read: bool = False


# --- one worker ---


class Worker:
    def __init__(self, group: Group, shard: int) -> None:
        self.group, self.world, self.shard = group, group.world, shard
        self.name = f"{group.name}/{shard}"
        self.session = some_bytes(self.name, group.life) * 2
        self.life, self.process = group.life, f"{self.name} {group.life}"
        hello = m.Hello(
            "run", "actor", group.name, shard, group.shard_count, group.location, {"sim": self.name},
            process=self.process, preemptible=group.preemptible,
        )  # fmt: skip
        self.machine = s.Session(hello, self.world.now, room_bytes=1 << 30)
        self.alive, self.finished = True, False
        self.frozen_until = self.cut_until = self.tired_until = 0.0
        self.seen = self.lent = 0
        self.haunts: Callable[[Worker], Program] | None = None  # a former life that others take for dead
        self.outcome = 0  # the version that the last read gave; 0: there was none; FAILED
        self.shelf: Shelf[Offer] = self.world.shelf_class()
        self.deltas = Holder(self)
        self.waiting: dict[int, Callable[[m.Reply | None], None]] = {}
        self.transfers: dict[Transfer, None] = {}
        self._timer = float("inf")

    def start(self, program: Program) -> None:
        self._tick()
        self.step(program, None)

    def die(self) -> None:
        if not self.alive:
            return
        self.alive = False
        world = self.world
        world.dead[self.session] = world.now - world.deaf_s
        world.graves[self.session] = {key for key, offer in self.offers.items() if offer.complete}
        world.died_with[self.group.name, self.life, self.shard] = world.graves[self.session]
        world.workers.pop(self.session)
        for link in list(world.links):
            if link.source is self:
                link.break_("the connection was reset")
            elif link.reader is self:
                link.close()

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """What a process does later it does not do when it is dead, and after it thaws when it is frozen."""

        def go() -> None:
            if not self.alive:
                return
            if self.world.now < self.frozen_until:
                self.world.at(self.frozen_until - self.world.now, go)
            else:
                action()

        self.world.at(delay, go)

    def step(self, program: Program, value: Any) -> None:
        """Let the program go on with the answer to what it asked for last."""
        try:
            asked = program.send(value)
        except StopIteration:
            return
        match asked:
            case Sleep(seconds):
                self.later(seconds, lambda: self.step(program, None))
            case Meet():
                self.group.meet(self, program)
            case Request(make, timeout_s):
                self.ask(make, self.world.now + timeout_s, lambda reply: self.step(program, reply))
            case Replicate():
                Transfer(self, asked, lambda outcome: self.step(program, outcome))
            case Publish():
                self.publish(asked, lambda reply: self.step(program, reply))

    # --- the session's shell ---

    def ask(self, make: Callable[[int], s.Request], deadline: float, then: Callable[[m.Reply | None], None]) -> int:
        request = self.machine.next_request_id()

        def answered(reply: m.Reply | None) -> None:
            if self.world.now > deadline + LATE_S and self.world.now > self.frozen_until + LATE_S:
                raise Violation("late", self.world, f"{self.name} got an answer {self.world.now - deadline:.1f} s late")
            then(reply)

        self.waiting[request] = answered
        message = make(request)
        if isinstance(message, m.Publish):  # again
            given_up = self.world.raised.get(self.session, {})
            given_up.update({number: None for number, key in given_up.items() if key == message.holding.key})
        self.feed(s.Ask(message, deadline))
        return request

    def feed(self, event: s.Event) -> None:
        for effect in self.machine.handle(event, self.world.now):
            match effect:
                case s.Send(message):
                    self.world.to_hub(self, message)
                case s.Answered(request, reply):
                    self._answer(request, reply)
                case s.Expired(request, _, was_sent):
                    self.world.counts["expired_unsent"] += not was_sent
                    self._gives_up(request)
                    self._answer(request, None)
                case s.SourceGone(session):
                    for transfer in list(self.transfers):
                        transfer.feed(events.SourceGone(session))
                case s.Directed(directive):
                    self.world.counts["directed"] += 1
                    for transfer in list(self.transfers):
                        self.world.counts["told_to_stop"] += directive.is_over(transfer.machine.version)
                        transfer.feed(events.Directed(directive))
                    dropped = self.shelf.supersede(partial(is_superseded, lineage=directive.attempts))
                    self.world.counts["superseded_copies"] += len(dropped)
                    self.carry_out(dropped)
                case s.Disowned(key):
                    self.world.counts["disowned"] += 1
                    self.carry_out(self.shelf.damaged(self.shelf.offering(key)))
                case s.MayRelease(keys):
                    self.world.counts["may_release"] += 1
                    self.step(self.unpublish(self.shelf.may_release(keys)), None)
                case _:
                    self.world.counts[type(effect).__name__] += 1
        self._arm()

    def _gives_up(self, request: int) -> None:
        asked = self.world.asked.get((self.session, request))
        key = asked.holding.key if isinstance(asked, m.Publish) else None
        # What arrives here is here, whatever became of the word that all of it has.
        self.world.raised.setdefault(self.session, {})[request] = None if key in self.machine.holdings else key

    def _answer(self, request: int, reply: m.Reply | None) -> None:
        then = self.waiting.pop(request, None)
        if then is not None:
            self.later(0.0, lambda: then(reply))

    def receive(self, frame: bytes) -> None:
        if self.alive and self.world.now >= self.cut_until:
            self.later(0.0, lambda: self._hear(m.decode_from_hub(frame)))

    def _hear(self, message: m.HubMessage) -> None:
        self.feed(s.Heard(message))
        if isinstance(message, m.Alive) and message.hold:
            self.step(self.hold(message.hold), None)

    def _arm(self) -> None:
        due = max(self.machine.next_deadline(), self.world.now + 0.001)
        if due < self._timer:
            self._timer = due
            self.later(due - self.world.now, lambda: self._fire(due))

    def _fire(self, due: float) -> None:
        if due == self._timer:
            self._tick()

    def _tick(self) -> None:
        self._timer = float("inf")
        self.feed(s.Tick())

    # --- the shelf's shell ---

    @property
    def offers(self) -> dict[ShardKey, Offer]:
        return {key: entry.offer for key, entry in self.shelf.entries.items()}

    def carry_out(self, effects: Iterable[Effect[Offer]], deadline: float = INFINITY, then: Then = ignore) -> None:
        """then: told what the hub answers to an announcement."""
        for effect in effects:
            match effect:
                case Announce(offer, is_whole, was_read):
                    self.world.cut_off.pop((self.session, offer.key), None)
                    origin = "replicated" if was_read else "published"
                    manifest = offer.manifest
                    holding = m.Holding(offer.key, manifest.root(), manifest.size_bytes, is_whole, origin)
                    self.ask(lambda number, holding=holding: m.Publish(number, holding), deadline, then)
                case MarkReady(offer, segment):
                    offer.ready |= set(range(SEGMENTS)) if segment is None else {segment}
                case Retract(keys):
                    self.ask(lambda number, keys=keys: m.Unpublish(number, keys, 0.0, gone=True), INFINITY, ignore)
                case Withdraw(_, offer) | GiveWay(_, offer, _):
                    self.withdraw(offer)
                case Retain(key, offer):
                    moved = Offer(key, list(offer.buffer), offer.manifest, offer.birth, True, ready=offer.ready)
                    if self.shelf.replace(key, offer, moved):
                        self.withdraw(offer)

    def withdraw(self, offer: Offer) -> None:
        """Cut its readers off."""
        offer.withdrawn = True
        for link in list(self.world.links):
            if link.source is self and link.offer is offer:
                self.world.counts["cut_off"] += 1
                link.break_("cut off: the version was withdrawn")

    def publish(self, asked: Publish, then: Then) -> None:
        key, manifest = asked.key, manifest_of(asked.content)
        offer = Offer(
            key, list(asked.content), manifest, self.machine.last_request_id + 1, True, ready=set(range(SEGMENTS))
        )
        # Which version may follow which is for the caller to know, and for the shelf's own tests.
        effects = self.shelf.publish(key, manifest, offer, returns=True, was_read=asked.was_read)
        self.whole(key)

        def answered(reply: m.Reply | None) -> None:
            if isinstance(reply, m.Done):
                self.shelf.announced(key, manifest)
            else:  # also when the version was withdrawn meanwhile
                self.carry_out(self.shelf.refused(key, offer))
                self.deltas.recycle(offer)
            then(reply)

        self.carry_out(effects, self.world.now + self.world.rng.choice([2.0, 30.0]), answered)

    def unpublish(self, ticket: Ticket) -> Program:
        """Afterwards the owner of the memory uses it again, whatever the hub says, or if it says nothing."""
        if not ticket:
            return
        keys, offers = tuple(ticket), [self.offers[key] for key in ticket]
        timeout_s = self.world.rng.choice([0.5, 3.0, 10.0])
        reply = yield Request(lambda number: m.Unpublish(number, keys, timeout_s), timeout_s)
        if isinstance(reply, m.Refused):  # to a zombie
            return
        keep = reply is None or (isinstance(reply, m.Unpublished) and reply.must_retain)
        self.carry_out(self.shelf.unpublished(ticket, keep=keep))
        for offer in offers:
            self.deltas.recycle(offer)
        what = "unpublished" if not keep else "kept" if reply is not None else "kept_without_hub"
        self.world.counts[what] += 1

    def hold(self, version: int) -> Program:
        """A copy for others, as client/requested_copies.py reads it."""
        if any(transfer.for_others and transfer.machine.version == version for transfer in self.transfers):
            return
        if has_whole(self.offers, version):
            return
        got = yield Replicate(version, 0, (CHECKPOINT,), False, 30.0, for_others=True)
        if isinstance(got, Got):
            self.world.counts["held_for_others"] += 1
            yield from self.unpublish(self.shelf.copies(version))

    def whole(self, key: ShardKey) -> None:
        """All of this shard is here; perhaps all shards of its replica now are, as far as anybody can know: ranks of a
        former life die one by one."""
        held = {
            k.shard
            for worker in self.world.workers.values()
            if worker.group is self.group and worker.life == self.life
            for k, offer in worker.offers.items()
            if offer.complete and (k.version, k.layout, k.shard_count) == (key.version, key.layout, key.shard_count)
        }
        held |= {
            k.shard
            for (group, life, _), keys in self.world.died_with.items()
            if (group, life) == (self.group.name, self.life)
            for k in keys
            if (k.version, k.layout, k.shard_count) == (key.version, key.layout, key.shard_count)
        }
        if len(held) == key.shard_count:
            self.world.ever_whole.add(key.version)

    def see(self, version: int) -> None:
        if version < self.seen:
            # Of a withdrawn version, older ones may have been given up before: it goes back to what is still held.
            operator_said_so = version in self.world.ever_pinned or self.seen <= max(
                self.world.ever_withdrawn, default=0
            )
            # What it was lent last is what the hub knows that it has seen, also if it never arrived.
            newest, self.lent = max(self.seen, self.lent), 0
            if not operator_said_so and not is_superseded(newest, self.world.attempts):
                raise Violation("backwards", self.world, f"{self.name} was given version {version} after {self.seen}")
            self.world.counts["went_back"] += 1
        self.seen = version
