"""A simulated cluster around the real hub and the real client machines.

Real: `Hub`, `Session`, `Shelf`, `Replication` and the wire's encode and decode. Simulated, all from one seed: time, the
network (loss, duplication, delay and thereby reordering), memory, crashes, freezes, partitions, flipped bits. The thin
shells around the machines are written again, without threads, in workers.py and reading.py. What must hold: checks.py.
What trainers and rollouts do: programs.py, which also replays a seed.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from changing import check_nothing_is_kept
from checks import (
    Violation,
    check_domains,
    check_no_ghosts,
    check_not_held_later,
    check_nothing_forgotten,
    check_reply,
    held_by,
    missing_domains,
    some_bytes,
)

from tensorhub_plugins.core.client.shelf import Shelf
from tensorhub_plugins.core.hub import hub as hub_machine
from tensorhub_plugins.core.hub.report import validate
from tensorhub_plugins.core.hub.server import DEAF_S_MIN
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, merge
from tensorhub_plugins.core.protocol.lineage import Lineage
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from workers import Group, Link, Program, Worker

FAULTS_S = 40.0
CALM_S_MAX = 150.0
HUB_ALONE_S = 10.0  # the first one has been there for longer than it waits for workers
COPIES_S = 30.0  # in which copies are made whose lack was seen only when the dead were forgotten
QUIET_S = 20.0  # longer than a session's time-out: what is dead has been forgotten by then


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
    hub_freeze_every_s: float = 0.0  # what is said to it lies in buffers meanwhile
    harm_every_s: float = 0.0  # a worker's deltas are lost, or poisoned

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
            hub_freeze_every_s=random.Random(rng.getstate()[1][1]).choice([0.0, 12.0, 25.0]),  # leaves rng as it is
            harm_every_s=random.Random(rng.getstate()[1][2]).choice([0.0, 1.0, 4.0]),  # the same
        )


@dataclass
class Lasting:
    """How many seconds a fault lasts, one of these."""

    hub_down_s: tuple[float, ...] = (0.1, 1.0, 8.0)
    hub_freeze_s: tuple[float, ...] = (0.5, 4.0, 12.0)
    freeze_s: tuple[float, ...] = (0.5, 4.0, 18.0)
    cut_s: tuple[float, ...] = (1.0, 4.0, 18.0)
    haunt_cut_s: tuple[float, ...] = (0.0, 4.0, 25.0)
    haunt_s: tuple[float, float] = (5.0, 60.0)  # from, to


class World:
    """Time, the network and the hub. `programs.cluster` puts groups of workers into it."""

    trainers: Group
    zombie: Callable[[Worker], Program]  # what a trainer does whose former life has been taken for dead

    def __init__(
        self,
        seed: int,
        shelf_class: type[Shelf[Any]] = Shelf,
        verify: bool = True,
    ) -> None:
        self.seed, self.shelf_class, self.verify = seed, shelf_class, verify
        self.rng = random.Random(seed)
        self.now = 0.0
        self.harm = random.Random(f"deltas {seed}")  # of its own, as deltas come and go with what they are tested for
        self.faults = Faults.random(self.rng)
        self.lasting = Lasting()
        self.calm = False
        self.log: Callable[[str], None] | None = None
        self.counts: Counter[str] = Counter()
        self.trace = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.hub: hub_machine.Hub | None = None
        self.lives = 0
        self.hub_frozen_until = 0.0
        self.hub_deaf_since: float | None = None  # as its shell finds when it thaws
        self.hub_listens_from = 0.0  # since when it would be listening now if it had never been frozen
        self.hub_lead = 0.0  # of this life's clock on everybody else's
        self.raised: dict[bytes, dict[int, ShardKey | None]] = {}  # session -> requests that were given up, and what
        # they would have published
        self.workers: dict[bytes, Worker] = {}
        self.links: dict[Link, None] = {}
        self.deaf_s = 0.0  # for how long the hub has been frozen so far
        self.dead: dict[bytes, float] = {}  # session -> when it died, in seconds in which a hub was not frozen
        self.graves: dict[bytes, set[ShardKey]] = {}  # what the dead held
        self.ever_whole: set[int] = set()
        self.died_with: dict[tuple[str, int, int], set[ShardKey]] = {}  # group, its life, shard
        self.ever_visible: set[int] = set()
        self.crossed: Counter[tuple[ShardKey, str, int]] = (
            Counter()
        )  # shard, data centre, segment -> times read into it
        self.cut_off: dict[
            tuple[bytes, ShardKey], dict[str, float]
        ] = {}  # source, shard -> readers that it was told to cut off, and when the hub last decided so
        self.unpublishing: dict[tuple[bytes, int], tuple[ShardKey, ...]] = {}  # session, request -> what it gives up
        self.directive = NO_DIRECTIVE  # what this life of the hub has been told
        self.attempts: Lineage = ()  # all that were ever begun
        self.begun: dict[int, set[bytes]] = {}  # number -> marks of the attempts that have had it
        self.asked: dict[tuple[bytes, int], m.ClientMessage] = {}  # by session and request
        self.asked_under: dict[tuple[int, bytes, int], bytes] = {}  # hub's life, session, request -> attempt it knew of
        self.answered: set[tuple[int, bytes, int, type]] = set()  # hub's life, session, request, kind of answer
        self.ever_pinned: set[int] = set()
        self.ever_withdrawn: set[int] = set()
        self.visible_before: set[int] = set()  # the event that the hub is handling
        self.rounds: dict[tuple[str, int], dict[int, int]] = {}
        self.last_version = -1
        self.met: set[bytes] = set()  # sessions that this life of the hub has known
        self.returned: dict[bytes, float] = {}  # of them -> when it came to know one again that it had given up
        # What a worker was allowed to drop, and has not offered since. It keeps the copy until it hears so, and may ask
        # once more when that version counts again: the hub has counted on others since the first answer.
        self.given_up: set[tuple[bytes, ShardKey]] = set()
        self.last_hello: dict[bytes, float] = {}  # session -> when it sent the last Hello that the hub has heard
        self.last_word: dict[bytes, float] = {}  # session -> when it sent what the hub last heard of all its leases
        self.newest_step, self.resumed = 0, dict[int, int]()  # of trainers; by life, from which step
        self.retain_newest = self.rng.choice([0, 1, 1, 1, 2])
        self.retain_domains = self.rng.choice([1, 1, 2, 2, 3])
        self.told_to_retain = False  # this life of the hub has heard how many, and has had workers ever since
        self.groups: list[Group] = []

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
        self._every(lambda: self.faults.hub_freeze_every_s, self._freeze_hub)
        self._every(lambda: self.faults.worker_crash_every_s, self._crash_worker)
        self._every(lambda: self.faults.freeze_every_s, self._freeze)
        self._every(lambda: self.faults.cut_every_s, self._cut)
        self._every(lambda: self.faults.tire_every_s, self._tire)
        self._every(lambda: self.faults.harm_every_s, self._harm)
        self.run_until(FAULTS_S)
        self.calm, self.faults = True, Faults()
        for worker in list(self.workers.values()):
            worker.cut_until = worker.tired_until = 0.0
            if worker.haunts is not None:
                worker.die()
        if not self.run_until(self.now + CALM_S_MAX, lambda: all(g.finished for g in self.groups)):
            missing = [w.name for g in self.groups for w in g.workers if not w.finished]
            raise Violation("stuck", self, f"{missing or 'a group that is down'} did not reach the last version")
        self.counts["calm_ms"] += int(1000 * (self.now - FAULTS_S))
        self.run_until(self.now + QUIET_S)
        self.run_until(self.now + COPIES_S, lambda: not missing_domains(self) and not self.links)
        self.run_until(self.now + 5.0)  # what is not needed any more is let go
        check_domains(self)
        check_no_ghosts(self)
        check_nothing_forgotten(self)
        check_nothing_is_kept(self)
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
        self.met, self.returned, self.told_to_retain = set(), {}, False
        born = self.now if self.lives > 1 else self.now - HUB_ALONE_S
        self.hub_listens_from = born
        self.hub_lead = random.Random(self.lives).uniform(-1000.0, 1000.0)  # leaves self.rng as it is
        self.hub = hub_machine.Hub(some_bytes("hub", self.lives) * 2, born + self.hub_lead)
        if self.lives % 2 == 0:
            self.hub.tries_max = 1  # as if all were very many
        self.directive = NO_DIRECTIVE
        self.hub_deaf_since = self.now if self.now < self.hub_frozen_until else None
        self._tick_hub(self.lives)

    def _crash_hub(self) -> None:
        if self.hub is not None:
            self.hub = None
            self.counts["hub_crashes"] += 1
            self.at(self.rng.choice(self.lasting.hub_down_s), self.start_hub)

    @property
    def hub_now(self) -> float:
        """The time on the hub's clock."""
        return self.now + self.hub_lead

    def _freeze_hub(self) -> None:
        self.counts["hub_freezes"] += 1
        if self.now >= self.hub_frozen_until:
            self.hub_deaf_since = self.now
        self.hub_frozen_until = self.now + self.rng.choice(self.lasting.hub_freeze_s)

    def _crash_worker(self) -> None:
        group = self.rng.choice(self.groups)
        if group.workers:
            self.counts["worker_crashes"] += 1
            if group is self.trainers and self.rng.random() < 0.5:
                self.counts["haunted"] += 1
                group.haunt(self.rng.uniform(0.2, 6.0), self.zombie)
            else:
                group.crash(self.rng.uniform(0.2, 6.0))

    def _freeze(self) -> None:
        if self.workers:
            self.counts["freezes"] += 1
            worker = self.rng.choice(list(self.workers.values()))
            worker.frozen_until = max(worker.frozen_until, self.now + self.rng.choice(self.lasting.freeze_s))

    def _tire(self) -> None:
        if self.workers:
            self.counts["tired"] += 1
            self.rng.choice(list(self.workers.values())).tired_until = self.now + self.rng.choice([2.0, 8.0])

    def _harm(self) -> None:
        if self.workers:
            self.harm.choice(list(self.workers.values())).deltas.harm(self.harm)

    def _cut(self) -> None:
        if self.workers:
            self.counts["cuts"] += 1
            worker = self.rng.choice(list(self.workers.values()))
            worker.cut_until = self.now + self.rng.choice(self.lasting.cut_s)

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
        if isinstance(message, m.Wait | m.Target | m.Hello | m.Dated):
            self.asked[worker.session, message.request_id] = message
        if self.now >= worker.cut_until:
            for delay in self._deliveries():
                self.at(delay, lambda: self._hub_receives(worker, frame, sent))

    def _hub_receives(self, worker: Worker, frame: bytes, sent: float) -> None:
        if self.hub is not None and self.now < self.hub_frozen_until:
            self.at(self.hub_frozen_until - self.now, partial(self._hub_receives, worker, frame, sent))
        elif self.hub is not None and self.now >= worker.cut_until:
            message = m.decode_from_client(frame)
            believed = isinstance(message, m.Hello) and self.hub.believes(message, self.hub_now)
            if believed or isinstance(message, m.Heartbeat):
                self.last_word[worker.session] = max(sent, self.last_word.get(worker.session, 0.0))
            if isinstance(message, m.Hello) and believed:
                if worker.session in self.met and worker.session not in self.hub.registry.workers:
                    self.returned[worker.session] = self.now
                self.met.add(worker.session)
                self.last_hello[worker.session] = max(sent, self.last_hello.get(worker.session, 0.0))
                self.directive = merge(self.directive, message.directive)
                self.given_up -= {(worker.session, holding.key) for holding in message.holdings}
            if isinstance(message, m.Publish):
                self.given_up.discard((worker.session, message.holding.key))
            if hasattr(message, "request_id"):
                asked = self.lives, worker.session, message.request_id
                self.asked_under.setdefault(asked, self.directive.mark)
            self._feed_hub(hub_machine.Received(worker.session, m.decode_from_client(frame)))

    def _tick_hub(self, life: int) -> None:
        if self.hub is None or life != self.lives:
            return
        if self.now < self.hub_frozen_until:  # what was said meanwhile it hears first, as the server does
            self.at(self.hub_frozen_until - self.now + 0.001, lambda: self._tick_hub(life))
            return
        self._feed_hub(hub_machine.Tick())
        self.at(self.hub.next_deadline(self.hub_now) - self.hub_now, lambda: self._tick_hub(life))

    def _feed_hub(self, event: hub_machine.Event) -> None:
        assert self.hub is not None
        deaf_s, self.hub_deaf_since = self.now - (self.hub_deaf_since or self.now), None
        if deaf_s > DEAF_S_MIN:
            self.hub_listens_from += deaf_s
            self.deaf_s += deaf_s
            self._feed_hub(hub_machine.Tick(deaf_s))
        self.visible_before = self._visible()
        held_before = held_by(self, event)
        effects = self.hub.handle(event, self.hub_now)
        if self.log is not None:
            self._log(event, effects)
        if not isinstance(event, hub_machine.Tick) or effects:
            validate(self.hub.registry)
        self.trace.update(f"{self.now:.6f} {len(effects)}".encode())
        check_not_held_later(self, event, held_before)
        for effect in effects:
            if isinstance(effect, hub_machine.Send):
                check_reply(self, effect)
                frame = m.encode(effect.message)
                worker = self.workers.get(effect.session)
                if worker is not None and self.now >= worker.cut_until:
                    for delay in self._deliveries():
                        self.at(delay, lambda worker=worker, frame=frame: worker.receive(frame))
        history = self.hub.registry.histories.get(("run", "actor"))
        self.told_to_retain &= history is not None
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
