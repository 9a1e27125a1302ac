"""A simulated cluster around the real hub and the real client machines.

Real: `Hub`, `Session`, `Replication` and the wire's encode and decode. Simulated, all from one seed: time, the network
(loss, duplication, delay and thereby reordering), memory, transfers, crashes, freezes, partitions, flipped bits.
The thin shell around the machines is written again here, without threads, as `Worker` and `Transfer`.

The run has two phases: faults, then calm, in which everybody must reach the last version and the hub must end up
knowing exactly what is true. In both, these are checked whenever they could break (`Violation` names the seed):

    torn        what a finished read hands over is, byte for byte, what was published under that name
    group       the shards of a replica that read "latest" together get one version
    backwards   no reader is given an older version than before, unless an operator said so
    withdrawn   no version is lent or named that the hub has been told is bad
    pinned      "latest" is the pinned version as long as the hub has been told of a pin
    atomic      a version is visible only if one replica really held all of it
    retained    no unpublish drops the last copy of a retained version
    lease       no byte is read without a lease at the hub, and no unpublish is confirmed while somebody it does not
                name is reading
    circle      nobody waits for bytes that depend on his own
    late        every operation ends by its deadline
    twice       no segment that has arrived intact is read again
    stuck       in the calm, everybody finishes
    ghost       in the calm, the hub's holdings, leases and waiters are the workers' own
    forgotten   in the calm, all know the same of what operators have decided
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.errors import HubUnreachable, TensorHubError, refusal
from tensorhub_plugins.core.hub import hub as hub_machine
from tensorhub_plugins.core.hub.report import validate
from tensorhub_plugins.core.manifest import (
    Manifest,
    TensorSpec,
    TensorTable,
)
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer import replication as r
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    Location,
    ShardKey,
)

SEGMENT_SIZE_BYTES = 8
SEGMENTS = 5
RUNTIME = "runtime:5eed"
FAILED = -1
# A transfer of five segments is to share, to ask for more and to take over like one of 256.
SMALL = TransferLimits(
    window_first_segments=2,
    window_min_segments=1,
    additional_min_segments=2,
    additional_after_s=0.05,
    slow_far_s=0.6,
)

FAULTS_S = 40.0
CALM_S_MAX = 150.0
INFINITY = float("inf")
QUIET_S = 20.0  # longer than a session's time-out: what is dead has been forgotten by then
STALL_S = 3.0  # a reader gives a silent source up
LATE_S = s.ANSWER_MARGIN_S + 0.6  # beyond a deadline: the margin for the hub's answer, and one timer's step


class Violation(AssertionError):
    def __init__(self, rule: str, world: World, text: str) -> None:
        super().__init__(f"{rule}: {text} (seed {world.seed}, at {world.now:.3f} s)")
        self.rule = rule


# --- what the bytes of a version are ---


def _bytes(*what: object) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=SEGMENT_SIZE_BYTES).digest()


@lru_cache(maxsize=4096)
def checkpoint_content(version: int, shard: int) -> tuple[bytes, ...]:
    return tuple(_bytes("checkpoint", version, shard, k) for k in range(SEGMENTS))


def convert(checkpoint: Iterable[tuple[bytes, ...]], shard: int) -> tuple[bytes, ...]:
    """The runtime layout of one shard from all shards of the checkpoint: a torn byte in, a torn shard out."""
    whole = b"".join(segment for content in checkpoint for segment in content)
    return tuple(_bytes("runtime", whole, shard, k) for k in range(SEGMENTS))


@lru_cache(maxsize=4096)
def truth(key: ShardKey, trainer_shards: int) -> tuple[bytes, ...]:
    if key.layout == CHECKPOINT:
        return checkpoint_content(key.version, key.shard)
    return convert([checkpoint_content(key.version, i) for i in range(trainer_shards)], key.shard)


@lru_cache(maxsize=4096)
def manifest_of(content: tuple[bytes, ...]) -> Manifest:
    spec = TensorSpec("w", "uint8", (SEGMENTS * SEGMENT_SIZE_BYTES,), SEGMENTS * SEGMENT_SIZE_BYTES)
    return Manifest(TensorTable.of([spec]), b"".join(xxhash.xxh3_128_digest(c) for c in content), SEGMENT_SIZE_BYTES)


@lru_cache(maxsize=4096)
def root_of(content: tuple[bytes, ...]) -> bytes:
    return manifest_of(content).root()


# --- the world ---


@dataclass
class Faults:
    """Probabilities, and mean seconds between two events of a kind (0: never)."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0  # a message that takes seconds
    corrupt: float = 0.0  # a segment with a flipped bit
    hub_crash_every_s: float = 0.0
    worker_crash_every_s: float = 0.0
    freeze_every_s: float = 0.0
    tire_every_s: float = 0.0  # a worker that answers, but serves slowly
    cut_every_s: float = 0.0  # a worker's line to the hub

    @classmethod
    def random(cls, rng: random.Random) -> Faults:
        return cls(
            loss=rng.choice([0.0, 0.02, 0.1, 0.25]),
            duplicate=rng.choice([0.0, 0.05, 0.3]),
            slow=rng.choice([0.0, 0.02, 0.1]),
            corrupt=rng.choice([0.0, 0.01, 0.1]),
            hub_crash_every_s=rng.choice([0.0, 12.0, 25.0]),
            worker_crash_every_s=rng.choice([0.0, 10.0, 25.0]),
            freeze_every_s=rng.choice([0.0, 12.0, 30.0]),
            tire_every_s=rng.choice([0.0, 6.0, 20.0]),
            cut_every_s=rng.choice([0.0, 12.0, 30.0]),
        )


Program = Generator[Any, Any, None]


class World:
    def __init__(self, seed: int, verify: bool = True) -> None:
        self.seed, self.verify = seed, verify
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = Faults.random(self.rng)
        self.calm = False
        self.log: Callable[[str], None] | None = None
        self.counts: Counter[str] = Counter()
        self.trace = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.hub: hub_machine.Hub | None = None
        self.lives = 0
        self.workers: dict[bytes, Worker] = {}
        self.links: dict[Link, None] = {}
        self.dead: dict[bytes, float] = {}  # session -> when it died
        self.graves: dict[bytes, set[ShardKey]] = {}  # what the dead held
        self.ever_whole: set[int] = set()
        self.ever_visible: set[int] = set()
        self.crossed: Counter[tuple[ShardKey, str, int]] = (
            Counter()
        )  # shard, data centre, segment -> times read into it
        self.cut_off: dict[
            tuple[bytes, ShardKey], set[str]
        ] = {}  # source, shard -> readers that it was told to cut off
        self.unpublishing: dict[tuple[bytes, int], tuple[ShardKey, ...]] = {}  # session, request -> what it gives up
        self.directive = m.NO_DIRECTIVE  # what this life of the hub has been told
        self.asked: dict[tuple[bytes, int], m.Wait | m.Target | m.Pin | m.Withdraw] = {}  # by session and request
        self.answered: set[tuple[int, bytes, int]] = set()  # hub's life, session, request
        self.ever_pinned: set[int] = set()
        self.ever_withdrawn: set[int] = set()
        self.visible_before: set[int] = set()  # the event that the hub is handling
        self.rounds: dict[tuple[str, int], dict[int, int]] = {}
        self.last_version = -1
        self.last_word: dict[bytes, float] = {}  # session -> when it sent what the hub last heard of all its leases
        self.retain_newest = self.rng.choice([0, 1, 1, 1, 2])
        self.trainers = Group(self, "trainer", self.rng.choice([1, 1, 2, 3]), Location("dc", "r0", "h0"), "trainer")
        self.groups = [self.trainers]
        for i in range(self.rng.randint(2, 4)):
            kind = self.rng.choice(["checkpoint", "runtime", "follower"])
            location = Location(self.rng.choice(["dc", "dc", "far"]), f"r{i % 2}", f"h{i}")
            shards = 1 if kind == "follower" else self.rng.choice([1, 1, 2])
            self.groups.append(Group(self, f"rollout-{i}", shards, location, kind))
        if self.rng.random() < 0.5:
            self.groups.append(Group(self, "operator", 1, Location("dc", "r0", "h0"), "operator"))

    # --- time ---

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, action))

    def run_until(self, stop: float, done: Callable[[], bool] = lambda: False) -> bool:
        while self._queue and self._queue[0][0] <= stop and not done():
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if done():
            return True
        self.now = stop
        return False

    def run(self) -> Counter[str]:
        self.start_hub()
        for group in self.groups:
            self.at(self.rng.uniform(0, 1), group.start)
        self._every(lambda: self.faults.hub_crash_every_s, self._crash_hub)
        self._every(lambda: self.faults.worker_crash_every_s, self._crash_worker)
        self._every(lambda: self.faults.freeze_every_s, self._freeze)
        self._every(lambda: self.faults.cut_every_s, self._cut)
        self._every(lambda: self.faults.tire_every_s, self._tire)
        self.run_until(FAULTS_S)
        self.calm, self.faults = True, Faults()
        for worker in self.workers.values():
            worker.cut_until = worker.tired_until = 0.0
        if not self.run_until(self.now + CALM_S_MAX, lambda: all(g.finished for g in self.groups)):
            missing = [w.name for g in self.groups for w in g.workers if not w.finished]
            raise Violation("stuck", self, f"{missing or 'a group that is down'} did not reach the last version")
        self.counts["calm_ms"] += int(1000 * (self.now - FAULTS_S))
        self.run_until(self.now + QUIET_S)
        self._check_no_ghosts()
        self._check_nothing_forgotten()
        return self.counts

    def _every(self, mean_s: Callable[[], float], action: Callable[[], None]) -> None:
        def go() -> None:
            if not self.calm:
                action()
                self.at(self.rng.expovariate(1 / mean_s()), go)

        if mean_s():
            self.at(self.rng.expovariate(1 / mean_s()), go)

    # --- faults ---

    def start_hub(self) -> None:
        self.lives += 1
        self.hub = hub_machine.Hub(_bytes("hub", self.lives) * 2, self.now)
        self.directive = m.NO_DIRECTIVE
        self._tick_hub(self.lives)

    def _crash_hub(self) -> None:
        if self.hub is not None:
            self.hub = None
            self.counts["hub_crashes"] += 1
            self.at(self.rng.choice([0.1, 1.0, 8.0]), self.start_hub)

    def _crash_worker(self) -> None:
        group = self.rng.choice(self.groups)
        if group.workers:
            self.counts["worker_crashes"] += 1
            group.crash(self.rng.uniform(0.2, 6.0))

    def _freeze(self) -> None:
        if self.workers:
            self.counts["freezes"] += 1
            worker = self.rng.choice(list(self.workers.values()))
            worker.frozen_until = max(worker.frozen_until, self.now + self.rng.choice([0.5, 4.0, 18.0]))

    def _tire(self) -> None:
        if self.workers:
            self.counts["tired"] += 1
            self.rng.choice(list(self.workers.values())).tired_until = self.now + self.rng.choice([2.0, 8.0])

    def _cut(self) -> None:
        if self.workers:
            self.counts["cuts"] += 1
            worker = self.rng.choice(list(self.workers.values()))
            worker.cut_until = self.now + self.rng.choice([1.0, 4.0, 18.0])

    # --- the network between workers and hub ---

    def _deliveries(self) -> list[float]:
        """Delays after which copies of a message arrive."""
        rng, faults = self.rng, self.faults
        copies = 0 if rng.random() < faults.loss else 2 if rng.random() < faults.duplicate else 1
        fast, slow = (0.0002, 0.02), (0.5, 4.0)
        return [rng.uniform(*(slow if rng.random() < faults.slow else fast)) for _ in range(copies)]

    def to_hub(self, worker: Worker, message: m.ClientMessage) -> None:
        frame, sent = m.encode(message), self.now
        if isinstance(message, m.Unpublish):
            self.unpublishing[worker.session, message.request_id] = message.keys
        elif isinstance(message, m.Wait | m.Target | m.Pin | m.Withdraw):
            self.asked[worker.session, message.request_id] = message
        if self.now >= worker.cut_until:
            for delay in self._deliveries():
                self.at(delay, lambda: self._hub_receives(worker, frame, sent))

    def _hub_receives(self, worker: Worker, frame: bytes, sent: float) -> None:
        if self.hub is not None and self.now >= worker.cut_until:
            message = m.decode_from_client(frame)
            if isinstance(message, m.Hello | m.Heartbeat):
                self.last_word[worker.session] = max(sent, self.last_word.get(worker.session, 0.0))
            if isinstance(message, m.Hello):
                self.directive = m.merge(self.directive, message.directive)
            self._feed_hub(hub_machine.Received(worker.session, m.decode_from_client(frame)))

    def _tick_hub(self, life: int) -> None:
        if self.hub is not None and life == self.lives:
            self._feed_hub(hub_machine.Tick())
            self.at(self.hub.next_deadline(self.now) - self.now, lambda: self._tick_hub(life))

    def _feed_hub(self, event: hub_machine.Event) -> None:
        assert self.hub is not None
        self.visible_before = self._visible()
        effects = self.hub.handle(event, self.now)
        if self.log is not None:
            self._log(event, effects)
        if not isinstance(event, hub_machine.Tick) or effects:
            validate(self.hub.registry)
        self.trace.update(f"{self.now:.6f} {len(effects)}".encode())
        for effect in effects:
            if isinstance(effect, hub_machine.Send):
                self._check_reply(effect)
                frame = m.encode(effect.message)
                worker = self.workers.get(effect.session)
                if worker is not None and self.now >= worker.cut_until:
                    for delay in self._deliveries():
                        self.at(delay, lambda worker=worker, frame=frame: worker.receive(frame))
        history = self.hub.registry.histories.get(("run", "actor"))
        for number, version in history.versions.items() if history else ():
            if version.visible and number not in self.ever_visible:
                self.ever_visible.add(number)
                if number not in self.ever_whole:
                    raise Violation("atomic", self, f"version {number} is visible and was never whole anywhere")

    def _log(self, event: hub_machine.Event, effects: list[hub_machine.Effect]) -> None:
        """One line for what the hub was told, one for each thing it said. For reading a failed seed."""
        assert self.log is not None
        names = {session: worker.name for session, worker in self.workers.items()}
        quiet = m.Heartbeat | m.Alive
        if isinstance(event, hub_machine.Received) and not isinstance(event.message, quiet):
            self.log(f"{self.now:8.3f} {names.get(event.session, 'dead'):>14} > {event.message}")
        for effect in effects:
            if isinstance(effect, hub_machine.Log):
                self.log(f"{self.now:8.3f} {'hub':>14} : {effect.text}")
            elif not isinstance(effect.message, quiet):
                self.log(f"{self.now:8.3f} {names.get(effect.session, 'dead'):>14} < {effect.message}")

    def _visible(self) -> set[int]:
        history = self.hub.registry.histories.get(("run", "actor")) if self.hub is not None else None
        return {number for number, version in history.versions.items() if version.visible} if history else set()

    # --- checks on what the hub says and on what readers do ---

    def _check_directed(self, session: bytes, reply: m.HubMessage) -> None:
        """What the hub decides agrees with what operators have decided."""
        if not isinstance(reply, m.Done | m.Granted | m.Visible):
            return
        asked, old = self.asked.get((session, reply.request_id)), self.directive
        match reply, asked:
            case m.Done(), m.Pin(_, version):
                self.ever_pinned.add(version)
                self.directive = m.Directive(old.serial + bool(version or old.pin), version, old.withdrawn)
            case m.Done(), m.Withdraw(_, version):
                self.ever_withdrawn.add(version)
                known = version in old.withdrawn
                new = m.merge(old, m.Directive(0, 0, (version,)))
                self.directive = m.Directive(old.serial + (not known), new.pin, new.withdrawn)
            case ((m.Granted() | m.Visible()), _):
                version = reply.version
                if version in old.withdrawn:
                    raise Violation("withdrawn", self, f"version {version} is named, and was withdrawn")
                if isinstance(asked, m.Wait | m.Target) and old.pin and version != old.pin:
                    raise Violation("pinned", self, f"version {version} is named, and {old.pin} is pinned")
                returns = version == old.pin or getattr(asked, "installed", 0) in old.withdrawn
                if isinstance(asked, m.Target) and version < asked.installed and not returns:
                    raise Violation("backwards", self, f"{asked} is answered with version {version}")

    def _check_reply(self, effect: hub_machine.Send) -> None:
        answer = (self.lives, effect.session, getattr(effect.message, "request_id", 0))
        repeated = answer in self.answered  # what it says again was decided before
        self.answered.add(answer)
        if not repeated:
            self._check_directed(effect.session, effect.message)
        if not isinstance(effect.message, m.Unpublished) or effect.message.must_retain:
            return
        for key in self.unpublishing.get((effect.session, effect.message.request_id), ()):
            self.cut_off.setdefault((effect.session, key), set()).update(effect.message.cut_off)
        source = self.workers.get(effect.session)
        asked = source.machine.asked.get(effect.message.request_id) if source else None
        if asked is None or not isinstance(asked.message, m.Unpublish):
            return
        for key in asked.message.keys:
            offer = source.offers.get(key)
            if not repeated and not asked.message.gone and offer is not None and offer.complete:
                self._check_retained(source, key)
        for link in self.links:
            # Another unpublish of the same shard may have ended before, and named it, though nobody waits for it now.
            named = link.reader.name in self.cut_off.get((effect.session, link.key), ())
            if link.source is source and link.key in asked.message.keys and not named:
                self._check_lease(link, f"unpublish of {link.key} was confirmed to {source.name}")

    def _check_lease(self, link: Link, what: str) -> None:
        """The hub must know of this read, unless it could not: it was down, or its word or the reader's was lost."""
        hub = self.hub
        if hub is None or hub.registry.recovering(self.now) or self.now >= link.lease_deadline:
            return
        reader = hub.registry.workers.get(link.reader.session)
        if reader is None or link.source.session not in hub.registry.workers:
            return
        if self.last_word[link.reader.session] < link.began:
            return  # its grant may have been overtaken on the way by what ended it; its next heartbeat tells the hub
        lease = reader.leases.get(link.request)
        if lease is None or lease.sources.get(link.key.shard) != link.source.session:
            raise Violation("lease", self, f"{what} while {link.reader.name} reads without a lease")

    def check_read(self, link: Link) -> None:
        source = self.hub.registry.workers.get(link.source.session) if self.hub is not None else None
        if source is not None and link.key in source.holdings:
            # Else the unpublish has reached its deadline, and the source is about to be told whom to cut off.
            self._check_lease(link, f"{link.key} is read from {link.source.name}")
        if link.offer is not None and link.offer.complete:
            return  # it waits for nobody
        waits_for: dict[bytes, set[bytes]] = {}
        for each in self.links:
            offer = each.source.offers.get(each.key)
            # A reader whose deadline has passed gives up as soon as it wakes: what it asked for is nothing to wait for.
            if offer is not None and not offer.complete and self.now < each.lease_deadline:
                waits_for.setdefault(each.reader.session, set()).add(each.source.session)
        todo, seen = [link.source.session], set()
        while todo:
            session = todo.pop()
            if session == link.reader.session and link.reader.session in waits_for:
                raise Violation("circle", self, f"{link.reader.name} waits for itself through {link.source.name}")
            if session not in seen:
                seen.add(session)
                todo.extend(waits_for.get(session, ()))

    def _check_retained(self, worker: Worker, key: ShardKey) -> None:
        """The hub has just allowed worker to drop this complete copy: was it the last of a retained version?"""
        assert self.hub is not None
        # How many are retained is known to the hub while one lives who has asked for it.
        asker = any(w.session in self.hub.registry.workers for w in self.trainers.workers)
        count = self.retain_newest if asker else min(1, self.retain_newest)
        good = self.ever_visible - set(self.directive.withdrawn)
        if self.ever_withdrawn:  # what was given up as too old before is not retained when a newer one is withdrawn
            good &= self.visible_before
        retained = sorted(good, reverse=True)[:count]
        if self.directive.pin in self.visible_before:
            retained.append(self.directive.pin)
        if key.version not in retained or key.layout != CHECKPOINT:
            return
        others = [other for other in self.workers.values() if other is not worker]
        held = {k for other in others for k, offer in other.offers.items() if offer.complete}
        # A holder that died is believed alive for a while; what dies is not lost by an unpublish.
        recently = self.now - self.hub.limits.session_timeout_s - 6.0  # its last words may be that late
        buried = {k for session, keys in self.graves.items() if self.dead[session] > recently for k in keys}
        rest = {ShardKey(key.version, key.layout, shard, key.shard_count) for shard in range(key.shard_count)} - {key}
        rest -= {k for k, offer in worker.offers.items() if offer.complete}
        known = {k for other in self.hub.registry.workers.values() for k, h in other.holdings.items() if h.complete}
        if key not in held | buried and rest <= held & known:  # without the rest, the hub thinks it lost already
            raise Violation("retained", self, f"{worker.name} was allowed to drop the last copy of {key}")

    def _check_no_ghosts(self) -> None:
        assert self.hub is not None
        for session, known in self.hub.registry.workers.items():
            worker = self.workers.get(session)
            if worker is None:
                raise Violation("ghost", self, f"the hub still knows {known.name}, which is dead")
            true = {key: offer.complete for key, offer in worker.offers.items() if not offer.withdrawn}
            if {key: h.complete for key, h in known.holdings.items()} != true:
                said, real = sorted(map(str, known.holdings)), sorted(map(str, true))
                raise Violation("ghost", self, f"{known.name} holds {real}, the hub believes {said}")
            if known.leases or known.readers:
                raise Violation("ghost", self, f"{known.name} has leases though nobody reads")
            if any(not isinstance(pending.message, m.Wait | m.Target) for pending in known.pending.values()):
                raise Violation("ghost", self, f"{known.name} waits, says the hub: {list(known.pending.values())}")
        if len(self.hub.registry.workers) != len(self.workers):
            raise Violation("ghost", self, "the hub has forgotten a worker that lives")

    def _check_nothing_forgotten(self) -> None:
        assert self.hub is not None
        known = {worker.name: worker.machine.directive for worker in self.workers.values()}
        known["hub"] = self.hub.registry.histories["run", "actor"].directive
        if len(set(known.values())) > 1 or known["hub"] != self.directive:
            raise Violation("forgotten", self, f"{known} differ, or from {self.directive}")


# --- a replica: workers that start, read and die together ---


class Group:
    def __init__(self, world: World, name: str, shard_count: int, location: Location, kind: str) -> None:
        self.world, self.name, self.shard_count, self.location, self.kind = world, name, shard_count, location, kind
        self.workers: list[Worker] = []
        self.life = 0
        self.round = 0
        self.arrived: list[tuple[Worker, Program]] = []

    @property
    def finished(self) -> bool:
        return bool(self.workers) and all(w.finished for w in self.workers)

    def start(self) -> None:
        self.life += 1
        self.arrived = []
        self.workers = [Worker(self, shard) for shard in range(self.shard_count)]
        program = {"trainer": trainer, "operator": operator, "follower": follower}.get(self.kind, rollout)
        for worker in self.workers:
            self.world.workers[worker.session] = worker
            worker.start(program(worker))

    def crash(self, down_s: float) -> None:
        for worker in self.workers:
            worker.die()
        self.workers = []
        self.world.at(down_s, self.start)

    def meet(self, worker: Worker, program: Program) -> None:
        """A barrier of the group's shards, like the collective RPC that starts an update."""
        self.arrived.append((worker, program))
        if len(self.arrived) == self.shard_count:
            self.round += 1
            arrived, self.arrived = self.arrived, []
            # After a round that failed for some, "latest" may mean the last round's version to one shard and a newer
            # one to another: the driver then names one.
            outcomes = {w.outcome for w in self.workers}
            agreed = len(outcomes) == 1 and outcomes != {FAILED}
            seen = [w.seen for w in self.workers if w.seen not in w.machine.directive.withdrawn]
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
class Replicate:
    """The answer is a Got, or the error's class name."""

    version: int
    at_least: int
    layouts: tuple[str, ...]
    claim: bool
    timeout_s: float


@dataclass
class Got:
    version: int
    layout: str
    shards: dict[int, tuple[bytes, ...]]


# --- one worker ---


@dataclass(eq=False)
class Offer:
    key: ShardKey
    buffer: list[bytes]
    manifest: Manifest
    ready: set[int]
    complete: bool = False
    withdrawn: bool = False
    birth: int = 0


class Worker:
    def __init__(self, group: Group, shard: int) -> None:
        self.group, self.world, self.shard = group, group.world, shard
        self.name = f"{group.name}/{shard}"
        self.session = _bytes(self.name, group.life) * 2
        hello = m.Hello("run", "actor", group.name, shard, group.shard_count, group.location, {"sim": self.name})
        self.machine = s.Session(hello, self.world.now)
        self.alive, self.finished = True, False
        self.frozen_until = self.cut_until = self.tired_until = 0.0
        self.seen = 0
        self.outcome = 0  # the version that the last read gave; 0: there was none; FAILED
        self.offers: dict[ShardKey, Offer] = {}
        self.waiting: dict[int, Callable[[m.Reply | None], None]] = {}
        self.transfers: dict[Transfer, None] = {}
        self._timer = float("inf")

    def start(self, program: Program) -> None:
        self._tick()
        self.step(program, None)

    def die(self) -> None:
        self.alive = False
        world = self.world
        world.dead[self.session] = world.now
        world.graves[self.session] = {key for key, offer in self.offers.items() if offer.complete}
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

    # --- the session's shell ---

    def ask(self, make: Callable[[int], s.Request], deadline: float, then: Callable[[m.Reply | None], None]) -> int:
        request = self.machine.number()

        def answered(reply: m.Reply | None) -> None:
            if self.world.now > deadline + LATE_S and self.world.now > self.frozen_until + LATE_S:
                raise Violation("late", self.world, f"{self.name} got an answer {self.world.now - deadline:.1f} s late")
            then(reply)

        self.waiting[request] = answered
        self.feed(s.Ask(make(request), deadline))
        return request

    def feed(self, event: s.Event) -> None:
        for effect in self.machine.handle(event, self.world.now):
            match effect:
                case s.Send(message):
                    self.world.to_hub(self, message)
                case s.Answered(request, reply):
                    self._answer(request, reply)
                case s.Expired(request):
                    self._answer(request, None)
                case s.SourceGone(session):
                    for transfer in list(self.transfers):
                        transfer.feed(r.SourceGone(session))
                case s.Directed(directive):
                    self.world.counts["directed"] += 1
                    for transfer in list(self.transfers):
                        self.world.counts["told_to_stop"] += transfer.machine.version in directive.withdrawn
                        transfer.feed(r.Withdrawn(directive.withdrawn))
                case s.MayDrop(keys):
                    self.world.counts["may_drop"] += 1
                    self.step(drop(self, keys), None)
                case _:
                    self.world.counts[type(effect).__name__] += 1
        self._arm()

    def _answer(self, request: int, reply: m.Reply | None) -> None:
        then = self.waiting.pop(request, None)
        if then is not None:
            self.later(0.0, lambda: then(reply))

    def receive(self, frame: bytes) -> None:
        if self.alive and self.world.now >= self.cut_until:
            self.later(0.0, lambda: self.feed(s.Heard(m.decode_from_hub(frame))))

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

    # --- what it holds ---

    def offer(self, key: ShardKey, content: Iterable[bytes], manifest: Manifest, complete: bool) -> Offer:
        buffer = list(content)
        self.world.cut_off.pop((self.session, key), None)
        ready = set(range(len(buffer))) if complete else set()
        offer = Offer(key, buffer, manifest, ready, complete, birth=self.machine.sequence + 1)
        self.offers[key] = offer
        if complete:
            self._maybe_whole(key)
        return offer

    def make_complete(self, offer: Offer) -> None:
        offer.complete = True
        self._maybe_whole(offer.key)

    def _maybe_whole(self, key: ShardKey) -> None:
        held = {
            k.shard
            for worker in self.group.workers
            for k, offer in worker.offers.items()
            if offer.complete and (k.version, k.layout, k.shard_count) == (key.version, key.layout, key.shard_count)
        }
        if len(held) == key.shard_count:
            self.world.ever_whole.add(key.version)

    def holding(self, offer: Offer, origin: m.Origin) -> m.Holding:
        return m.Holding(offer.key, offer.manifest.root(), offer.manifest.size_bytes, offer.complete, origin)

    def withdraw(self, key: ShardKey) -> None:
        """Cut readers off, then the memory is used for something else."""
        offer = self.offers.pop(key, None)
        if offer is None:
            return
        offer.withdrawn = True
        for link in list(self.world.links):
            if link.source is self and link.offer is offer:
                self.world.counts["cut_off"] += 1
                link.break_("cut off: the version was withdrawn")
        offer.buffer[:] = [b"overwritten"[:SEGMENT_SIZE_BYTES]] * SEGMENTS

    def expects(self, key: ShardKey, sequence: int) -> bool:
        """Whether an offer of this shard is about to be made, as the hub may have told others already."""
        for transfer in self.transfers:
            machine = transfer.machine
            granted = (machine.version, machine.layout) == (key.version, key.layout) and key.shard in machine.shards
            if transfer.birth <= sequence and (transfer.asking or granted):
                return True
        return False

    def see(self, version: int) -> None:
        if version < self.seen:
            if version not in self.world.ever_pinned and self.seen not in self.world.ever_withdrawn:
                raise Violation("backwards", self.world, f"{self.name} was given version {version} after {self.seen}")
            self.world.counts["went_back"] += 1
        self.seen = version


# --- reading ---


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
            offer = source.offers.get(self.key)
            if offer is None and source.expects(self.key, self.grant.as_of):
                self.world.counts["waited_for_offer"] += 1
                self._again(self._open)
                return
            if offer is None or offer.birth > self.grant.as_of:
                self.break_("not offered")
                return
            self.source, self.offer = source, offer
            self.world.links[self] = None
            event = r.Opened(self.key.shard, self.grant.session, offer.manifest)
            self.reader.later(self._latency(), lambda: self._tell(event))

    def _again(self, action: Callable[[], None]) -> None:
        if self.world.now - self._since > STALL_S:
            self.break_("stalled")
        else:
            self.world.at(0.1, action)

    def _tell(self, event: r.Event) -> None:
        if self.is_open:
            self.transfer.feed(event)

    def read(self, segments: tuple[int, ...]) -> None:
        self._todo += segments
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
        event = r.EpochChecked(self.key.shard, self.grant.session, not self.offer.withdrawn)
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
            waits = r.SourceWaiting(self.key.shard, self.grant.session)
            self.reader.later(self._latency(), lambda: self._tell(waits))
            self._again(self._read)
            return
        self._since = self.world.now
        self._todo.pop(0)
        self.world.check_read(self)
        data = self.offer.buffer[segment]
        if not self.offer.complete:
            self.world.counts["pipelined_segments"] += 1
        if self.grant.location.data_center != self.reader.group.location.data_center:
            self.world.crossed[self.key, self.reader.group.location.data_center, segment] += 1
        if self.world.rng.random() < self.world.faults.corrupt:
            self.world.counts["corrupt_segments"] += 1
            data = bytes([data[0] ^ 1]) + data[1:]
        latency = self._latency() + (
            self.world.rng.uniform(0.2, 1.5) if self.world.now < self.source.tired_until else 0.0
        )
        self.reader.later(latency, lambda: self._arrive(segment, data))

    def _arrive(self, segment: int, data: bytes) -> None:
        if not self.is_open:
            return
        assert self.offer is not None
        buffer = self.transfer.buffers[self.key.shard]
        if (
            self.world.verify
            and buffer[segment]
            and xxhash.xxh3_128_digest(buffer[segment]) == self.offer.manifest.digest(segment)
        ):
            raise Violation("twice", self.world, f"{self.reader.name} reads segment {segment} of {self.key} again")
        buffer[segment] = data
        intact = xxhash.xxh3_128_digest(data) == self.offer.manifest.digest(segment)
        intact = intact or not self.world.verify
        self._tell(r.Arrived(self.key.shard, self.grant.session, segment, intact, segment in self._late))
        self.world.at(0.0, self._read)

    def break_(self, why: str) -> None:
        """The other side is lost; the reader hears of it a moment later."""
        self.world.links.pop(self, None)
        if self.is_open:
            self.world.counts["lost_sources"] += 1
            event = r.Lost(self.key.shard, self.grant.session, why)
            self.reader.later(self._latency(), lambda: self._tell(event))

    def close(self) -> None:
        self.is_open = False
        self.world.links.pop(self, None)


class Transfer:
    """The shell around one Replication."""

    def __init__(self, worker: Worker, asked: Replicate, then: Callable[[Got | str], None]) -> None:
        self.worker, self.world, self.then = worker, worker.world, then
        world = self.world
        deadline = self.world.now + asked.timeout_s
        self.machine = r.Replication(
            asked.version,
            asked.at_least,
            asked.layouts,
            asked.claim,
            deadline,
            asked.timeout_s,
            world.verify,
            True,
            limits=SMALL,
        )
        self.asking = True
        self.birth = worker.machine.sequence + 1
        self.requests: list[int] = []
        self.buffers: dict[int, list[bytes]] = {}
        self.links: dict[tuple[int, bytes], Link] = {}
        self.offers: dict[int, Offer] = {}
        worker.transfers[self] = None
        self._timer = float("inf")
        self.feed(r.Begin())

    def feed(self, event: r.Event) -> None:
        worker = self.worker
        for effect in self.machine.handle(event, self.world.now):
            match effect:
                case r.AskSources(acquire):
                    self._ask(acquire)
                case r.Restart():
                    self.world.counts["restarts_in_another_layout"] += 1
                    self._drop()
                case r.Open(key, grant, request):
                    self.buffers.setdefault(key.shard, [b""] * SEGMENTS)
                    self.links[key.shard, grant.session] = Link(self, key, grant, request)
                case r.Read(shard, session, segments):
                    self.links[shard, session].read(segments)
                case r.ConfirmEpoch(shard, session):
                    self.links[shard, session].check()
                case r.Close(shard, session):
                    self.links.pop((shard, session)).close()
                case r.EndLease(request, shard, lost):
                    worker.waiting.pop(request, None)
                    worker.feed(s.EndLease(request, shard, lost))
                case r.Prepare(key, manifest):
                    self._serve_on(key.shard, manifest)
                    self.feed(r.Prepared(key.shard, tuple(range(SEGMENTS))))
                case r.Verified(shard, _, segment):
                    if shard in self.offers:
                        self.offers[shard].ready.add(segment)
                case r.Complete():
                    self._complete()
                case r.GiveUp(error):
                    self._end(type(error).__name__)
        due = max(self.machine.next_deadline(), self.world.now + 0.001)
        if not self.machine.finished and due < self._timer:
            self._timer = due
            worker.later(due - self.world.now, lambda: self._fire(due))

    def _fire(self, due: float) -> None:
        if due == self._timer and not self.machine.finished:
            self._timer = float("inf")
            self.feed(r.Tick())

    def _ask(self, acquire: m.Acquire) -> None:
        request = 0

        def answered(reply: m.Reply | None) -> None:
            if reply is None:
                reply = HubUnreachable("no answer")
            elif isinstance(reply, m.Refused):
                reply = refusal(reply.error, reply.message)
            assert isinstance(reply, m.Granted | TensorHubError)
            self.asking = False
            if acquire.beside and isinstance(reply, m.Granted):
                self.world.counts["further_urgent" if acquire.urgent else "further_idle"] += 1
            self.feed(r.Answer(request, reply, bool(acquire.beside)))

        request = self.worker.ask(
            lambda number: msgspec.structs.replace(acquire, request_id=number),
            self.machine.deadline,
            answered,
        )
        self.requests.append(request)

    def _serve_on(self, shard: int, manifest: Manifest) -> None:
        """Rule 3: what arrives is offered while the rest is on its way."""
        machine, worker = self.machine, self.worker
        key = ShardKey(machine.version, machine.layout, shard, machine.shard_count)
        if key in worker.offers:
            return  # kept for retention, and complete
        self.world.cut_off.pop((worker.session, key), None)
        offer = Offer(key, self.buffers[shard], manifest, set(), birth=self.birth)
        worker.offers[key] = self.offers[shard] = offer
        self._publish(offer)

    def _publish(self, offer: Offer) -> None:
        holding = self.worker.holding(offer, origin="replicated")
        self.worker.ask(lambda number: m.Publish(number, holding), self.world.now + 30.0, lambda reply: None)

    def _complete(self) -> None:
        machine, worker = self.machine, self.worker
        shards = {shard: tuple(self.buffers[shard]) for shard in machine.shards}
        for shard, content in shards.items():
            key = ShardKey(machine.version, machine.layout, shard, machine.shard_count)
            if content != truth(key, self.world.trainers.shard_count):
                raise Violation("torn", self.world, f"{worker.name} was handed wrong bytes as {key}")
            offer = self.offers.get(shard)
            if offer is not None:
                worker.make_complete(offer)
                self._publish(offer)
        self.offers = {}
        self.world.counts["replications"] += 1
        worker.see(machine.version)
        self._end(Got(machine.version, machine.layout, shards))

    def _end(self, outcome: Got | str) -> None:
        if self.world.now > self.machine.deadline + LATE_S and self.world.now > self.worker.frozen_until + LATE_S:
            raise Violation("late", self.world, f"{self.worker.name} ended a replicate after its deadline")
        self.worker.transfers.pop(self, None)
        for request in self.requests:
            self.worker.waiting.pop(request, None)
            self.worker.feed(s.EndLease(request, None, False))
        self._drop()
        if isinstance(outcome, str):
            self.world.counts[f"gave_up_{outcome}"] += 1
        self.worker.later(0.0, lambda: self.then(outcome))

    def _drop(self) -> None:
        """Partial shards are worth nothing to us any more."""
        for link in self.links.values():
            link.close()
        keys = tuple(offer.key for offer in self.offers.values())
        self.links, self.offers, self.buffers = {}, {}, {}
        for key in keys:
            self.worker.withdraw(key)
        if keys:
            self.worker.ask(lambda number: m.Unpublish(number, keys, 0.0, gone=True), INFINITY, lambda reply: None)


# --- what trainers and rollouts do ---


def trainer(worker: Worker) -> Program:
    world = worker.world
    yield Request(lambda number: m.Retain(number, world.retain_newest), 30.0)
    while True:
        yield Sleep(world.rng.uniform(0.2, 4.0))
        met = yield Meet()
        version = met.round + 1000 * (worker.group.life - 1)  # a group that starts again goes on higher
        held = [key for key in worker.offers if key.version < version]
        content = checkpoint_content(version, worker.shard)
        key = ShardKey(version, CHECKPOINT, worker.shard, worker.group.shard_count)
        offer = worker.offer(key, content, manifest_of(content), complete=True)
        reply = yield Request(
            lambda number, offer=offer: m.Publish(number, worker.holding(offer, origin="published")), 30.0
        )
        if not isinstance(reply, m.Done):
            worker.withdraw(key)
        world.counts["published" if reply is not None else "publish_expired"] += 1
        if held:
            yield from unpublish(worker, tuple(held))
        if met.calm:
            world.last_version = version
            worker.finished = True
            return


def rollout(worker: Worker) -> Program:
    world, group = worker.world, worker.group
    layouts = (RUNTIME, CHECKPOINT) if group.kind == "runtime" else (CHECKPOINT,)
    current = 0
    while not group.finished:
        timeout_s = world.rng.choice([2.0, 10.0, 30.0])
        reply = yield Request(lambda number: m.Wait(number, 0, current, timeout_s), timeout_s)  # noqa: B023
        if isinstance(reply, m.Visible):
            worker.see(reply.version)
        met = yield Meet()
        if met.version == FAILED:
            worker.finished = world.calm and current == world.last_version
            continue
        if world.rng.random() < 0.3 and len(layouts) == 1:  # direct: the old bytes are overwritten in place
            yield from unpublish(worker, tuple(worker.offers))
        claim = len(layouts) > 1
        timeout_s = world.rng.choice([3.0, 10.0, 30.0])
        got = yield Replicate(met.version, 0 if met.version else worker.seen, layouts, claim, timeout_s)
        worker.outcome = FAILED if isinstance(got, str) else got.version
        if isinstance(got, str):
            continue
        group.note(worker.shard, met.round, got.version)
        old = tuple(key for key in worker.offers if key.version < got.version)
        if claim and got.layout == CHECKPOINT:
            yield from convert_and_publish(worker, got)
        if old:
            yield from unpublish(worker, old)
        current = got.version
        yield Sleep(world.rng.uniform(0.0, 1.0))
        worker.finished = world.calm and current == world.last_version


def follower(worker: Worker) -> Program:
    """It runs what it is told to run, and goes back, too."""
    world = worker.world
    current = 0
    while not worker.group.finished:
        timeout_s = world.rng.choice([2.0, 10.0, 30.0])
        reply = yield Request(lambda number: m.Target(number, current, timeout_s), timeout_s)  # noqa: B023
        if isinstance(reply, m.Visible):
            got = yield Replicate(reply.version, 0, (CHECKPOINT,), False, world.rng.choice([3.0, 10.0]))
            if not isinstance(got, str):
                old = tuple(key for key in worker.offers if key.version != got.version)
                if old:
                    yield from unpublish(worker, old)
                current = got.version
        yield Sleep(world.rng.uniform(0.0, 1.0))
        worker.finished = world.calm and current == world.last_version


def operator(worker: Worker) -> Program:
    """Pins, unpins and withdraws as it likes; in the calm, what is pinned still is let go."""
    world = worker.world
    while not world.calm:
        yield Sleep(world.rng.uniform(0.5, 8.0))
        reply = yield Request(m.AskVersions, 5.0)
        held = [info.version for info in reply.versions if info.visible] if isinstance(reply, m.Versions) else []
        what = world.rng.choice([m.Pin, m.Pin, m.Withdraw])
        version = world.rng.choice(held) if held and (what is m.Withdraw or world.rng.random() < 0.6) else 0
        if not world.calm and (what is m.Pin or version):  # the last version is everybody's goal
            reply = yield Request(lambda number: what(number, version, 10.0), 10.0)  # noqa: B023
            done = "pinned" if version and what is m.Pin else "unpinned" if what is m.Pin else "withdrawn"
            world.counts[done] += isinstance(reply, m.Done)
    worker.finished = True
    while not all(group.finished for group in world.groups):
        yield Sleep(1.0)
        if worker.machine.directive.pin:
            yield Request(lambda number: m.Pin(number, 0, 10.0), 10.0)


def convert_and_publish(worker: Worker, got: Got) -> Program:
    world = worker.world
    world.counts["conversions"] += 1
    yield Sleep(world.rng.uniform(0.0, 1.0))
    key = ShardKey(got.version, RUNTIME, worker.shard, worker.group.shard_count)
    if world.rng.random() < 0.1 and not world.calm:
        world.counts["abandoned"] += 1
        yield Request(lambda number: m.Abandon(number, key), 10.0)
        return
    content = convert([got.shards[i] for i in sorted(got.shards)], worker.shard)
    offer = worker.offer(key, content, manifest_of(content), complete=True)
    reply = yield Request(lambda number: m.Publish(number, worker.holding(offer, origin="replicated")), 30.0)
    if not isinstance(reply, m.Done):  # also when it was withdrawn meanwhile
        worker.withdraw(key)
    checkpoint = tuple(k for k in worker.offers if k.layout == CHECKPOINT)
    if checkpoint:
        yield from unpublish(worker, checkpoint)


def unpublish(worker: Worker, keys: tuple[ShardKey, ...]) -> Program:
    world = worker.world
    timeout_s = world.rng.choice([0.5, 3.0, 10.0])
    offers = {key: worker.offers.get(key) for key in keys}
    reply = yield Request(lambda number: m.Unpublish(number, keys, timeout_s), timeout_s)
    if reply is None or (
        isinstance(reply, m.Unpublished) and reply.must_retain
    ):  # then from memory that nobody overwrites
        world.counts["kept" if reply is not None else "kept_without_hub"] += 1
        return
    world.counts["unpublished"] += 1
    for key in keys:
        if worker.offers.get(key) is offers[key]:  # else it was read again, after another unpublish of it had ended
            worker.withdraw(key)


def drop(worker: Worker, keys: tuple[ShardKey, ...]) -> Program:
    held = tuple(key for key in keys if key in worker.offers)
    if held:
        yield from unpublish(worker, held)


def simulate(seed: int, *, verify: bool = True) -> Counter[str]:
    """Run one seed to its end; raise Violation when a rule is broken."""
    return World(seed, verify).run()


if __name__ == "__main__":
    import sys

    for argument in sys.argv[1:]:  # the whole talk of one seed: python tests/sim/simulator.py 17
        world = World(int(argument))
        world.log = print
        print(dict(world.run()))
