"""The hub's machine by itself on one core: no sockets, so that a million workers need no machine for each thousand.

All that `Server` does with a message except ZeroMQ is done here and measured: its bytes are counted and decoded, the
hub handles it, and what it sends is encoded. The workers and the wire are free: their time is not counted. The clock of
the simulation moves by what the hub needs and by `wire_s` for each message, which is what ZeroMQ takes of the hub's
core as measured with sockets, so that heartbeats come as often as beside a real hub with a core of its own. Of more
workers than a hub takes, each has so long a timeout that all together send no more heartbeats.
"""

from __future__ import annotations

import gc
import heapq
import os
import time
from array import array
from collections import deque
from functools import partial
from typing import Any

from recipes.bench.hub.story import TRAINERS_HOST, Readers, heartbeat_of, hello, holding
from tensorhub_plugins.core import HubLimits
from tensorhub_plugins.core.hub import hub as machine
from tensorhub_plugins.core.hub.names import Names, public_name
from tensorhub_plugins.core.hub.rates import Rates
from tensorhub_plugins.core.hub.server import DEAF_S_MIN, collect_rarely
from tensorhub_plugins.core.protocol import messages as m

IDLE_S = 2.0


def simulate(count: int, shards: int, wire_s: float) -> dict[str, Any]:
    """Return what one hub needs for a version that `count` workers want at once. wire_s: of its core, a message."""
    before = _memory_bytes()
    simulation = _Simulation(count, shards, wire_s)
    workers = _memory_bytes()
    collect_rarely()  # as `tensorhub server` does
    for index in range(count):
        simulation.send(index, simulation.readers.begin(index))
    simulation.run(lambda: simulation.heard["Welcome"] == count)
    simulation.run(lambda: not simulation.inbox)
    joined_s, joined = simulation.now - simulation.began, _memory_bytes()
    simulation.begin_phase()
    until = simulation.now + IDLE_S
    simulation.run(lambda: simulation.now >= until)
    idle_core, idle_beats = simulation.busy_s / IDLE_S, len(simulation.taken) / IDLE_S
    simulation.begin_phase()
    for shard in range(shards):
        simulation.send(count + shard, m.Publish(1, holding(shard, shards, True, "published")))
    simulation.run(lambda: simulation.ended == count)
    seconds, busy_s, taken = simulation.now - simulation.began, simulation.busy_s, sorted(simulation.taken)
    simulation.run(lambda: not simulation.inbox)  # the last workers' Release
    return {
        "workers": count,
        "shards": shards,
        "seconds": seconds,
        "per_worker_us": seconds / count * 1e6,
        "hub_us": (busy_s - idle_core * seconds) / count * 1e6,
        "messages": len(taken),
        "p50_ms": taken[len(taken) // 2] * 1e3,
        "p99_ms": taken[len(taken) * 99 // 100] * 1e3,
        "max_ms": taken[-1] * 1e3,
        "joined_s": joined_s,
        "idle_core": idle_core,
        "idle_beats_per_s": idle_beats,
        "beat_us": idle_core / max(idle_beats, 1.0) * 1e6,
        "joined_bytes": (joined - workers) / count,
        "memory_bytes": (_memory_bytes() - workers) / count,
        "workers_bytes": (workers - before) / count,
    }


class _Simulation:
    def __init__(self, count: int, shards: int, wire_s: float) -> None:
        limits = HubLimits()
        timeout_s = max(limits.session_timeout_s, (count + shards) / limits.heartbeats_per_s_max)
        limits = HubLimits(session_timeout_s=timeout_s)
        self.now, self.wire_s = 1000.0, wire_s
        machine.SESSIONS_MAX = max(machine.SESSIONS_MAX, count + shards)
        self.hub = machine.Hub(b"hub of this test", self.now, limits)
        self.hub.sessions_max = 1 << 30
        self.names, self.rates = Names(), Rates(limits.messages_per_s_max)
        self.count, self.shards = count, shards
        self.readers = Readers(range(count), shards)
        self.identities = [b"%016d" % index for index in range(count + shards)]
        self.numbers = {public_name(identity): index for index, identity in enumerate(self.identities)}
        self.inbox: deque[tuple[int, bytes]] = deque()
        self.beats: list[tuple[float, int]] = []
        self.beat_s = [0.0] * (count + shards)
        self.heard = {"Welcome": 0}
        self.ended = 0
        self.tick_at = self.caught_up_at = self.now
        self.begin_phase()
        for shard in range(shards):
            self.send(count + shard, hello("trainer", shard, shards, TRAINERS_HOST))
        self.run(lambda: self.heard["Welcome"] == shards)
        self.heard["Welcome"] = 0
        self.now += limits.grace_s
        self.begin_phase()

    def begin_phase(self) -> None:
        self.began, self.busy_s, self.taken = self.now, 0.0, array("d")

    def send(self, index: int, message: m.ClientMessage) -> None:
        self.inbox.append((index, m.encode(message)))

    def run(self, is_over: Any) -> None:
        """Let the hub work until then, or until there is nothing to do but to wait."""
        while not is_over():
            while self.beats and self.beats[0][0] <= self.now:
                self._beat(*self.beats[0])
            if self.now >= self.tick_at:
                self._spend(lambda: self.hub.handle(machine.Tick(), self.now), wire_s=0.0)
                self.tick_at = self.hub.next_deadline(self.now)
            if not self.inbox:
                self.caught_up_at = self.now
            elif self.now - self.caught_up_at > DEAF_S_MIN:
                deaf = machine.Tick(self.now - self.caught_up_at)
                self.caught_up_at = self.now
                self._spend(partial(self.hub.handle, deaf, self.now), wire_s=0.0)
            if self.inbox:
                self._receive(*self.inbox.popleft())
                self.tick_at = min(self.tick_at, self.hub.next_deadline(self.now))
            else:
                beat_at = self.beats[0][0] if self.beats else self.tick_at
                self.now = max(self.now, min(self.tick_at, beat_at))

    def _beat(self, due: float, index: int) -> None:
        heapq.heapreplace(self.beats, (due + self.beat_s[index], index))
        is_reader = index < self.count
        beat = self.readers.heartbeat(index) if is_reader else heartbeat_of(self.readers.hub, 0)
        if beat is not None:
            self.send(index, beat)

    def _receive(self, index: int, frame: bytes) -> None:
        identity = self.identities[index]

        def handle() -> list[tuple[bytes, bytes]]:
            self.rates.admits(identity, len(frame), self.now)
            message = m.decode_from_client(frame)
            session = self.names.public(identity, self.hub.workers)
            return self.hub.handle(machine.Received(session, message), self.now)

        self._spend(handle, wire_s=self.wire_s)

    def _spend(self, handle: Any, wire_s: float) -> None:
        began = time.thread_time()
        effects = handle()
        frames = [(self.names.identity(e.session), m.encode(e.message)) for e in effects if hasattr(e, "session")]
        spent_s = time.thread_time() - began + wire_s
        self.taken.append(spent_s)
        self.busy_s += spent_s
        self.now += spent_s
        for identity, frame in frames:
            self._hear(self.numbers[public_name(identity)], m.decode_from_hub(frame))

    def _hear(self, index: int, message: m.HubMessage) -> None:
        if isinstance(message, m.Welcome):
            self.heard["Welcome"] += 1
            self.readers.hub = message.hub
            self.beat_s[index] = message.heartbeat_s
            heapq.heappush(self.beats, (self.now + message.heartbeat_s, index))
        elif isinstance(message, m.Alive):
            self.beat_s[index] = getattr(message, "heartbeat_s", 0.0) or self.beat_s[index]
        if index < self.count:
            answer = self.readers.hear(index, message)
            if answer is not None:
                self.send(index, answer)
            self.ended += isinstance(answer, m.Release)


def _memory_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
