"""The hub by itself: thousands of workers on the real wire, which all want a new version at once.

    python -m recipes.bench.hub                     # 512, 1,024, ... 8,192 workers
    python -m recipes.bench.hub --workers 8192 --shards 1
    python -m recipes.bench.hub --simulated --workers 65536   # the hub's machine alone, on one core (simulated.py)

The hub and its ZeroMQ thread have one core, the workers another. A trainer of `--shards` shards and replicas of as many
publish and read as `Client` does: Hello, Wait, Acquire, Publish of what arrives, Publish of what is complete, Release,
and a heartbeat a second. No weight byte moves, so that everybody asks at the same moment, as fast as the hub answers.

Time runs from the trainer's Publish to the last worker's end. Service time is what the hub spends on one message, from
its bytes to the last answer given to ZeroMQ. Beside it stands how busy the two cores were, so that one sees which of
them the time is: the hub's (its thread and ZeroMQ's) or the workers'; and what the heartbeats alone take of the hub's
core while no worker wants anything. The limit is the same wire with a hub that decodes every message and answers with
a constant.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import select
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from recipes.bench.hub.simulated import simulate
from recipes.bench.hub.story import TRAINERS_HOST, Readers, checksum_of, heartbeat_of, hello, holding
from recipes.bench.results import save
from tensorhub_plugins.core import HubLimits, Server
from tensorhub_plugins.core.hub import hub as hub_machine
from tensorhub_plugins.core.hub.server import collect_rarely
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import new_session

PHASE_S_MAX = 120.0
LIMIT_MESSAGES = 8  # of each worker, to find what the wire costs
IDLE_S = 2.0  # two heartbeats of each
GOALS = {"seconds": 10.0, "p99_ms": 5.0}  # at 8,192 workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--shards", type=int, default=8, help="of the trainer and of every replica")
    parser.add_argument("--processes", type=int, default=2, help="that play the workers")
    parser.add_argument("--no-heartbeats", action="store_true")
    parser.add_argument("--profile", type=Path, help="of the hub's thread, for pstats")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulated", action="store_true", help="without sockets, see simulated.py")
    parser.add_argument("--wire-us", type=float, default=15.0, help="of the hub's core for one message, if simulated")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.simulated:
        for count in options.workers:
            rows.append(_simulate(count, options))
        save(options.json, {"goals": GOALS, "rows": rows})
        return
    for count in options.workers:
        rows.append(measure(count, options))
        row = rows[-1]
        print(
            f"{row['workers']:6} workers  {row['seconds']:6.2f} s  {row['per_worker_us']:6.0f} us each  "
            f"{row['messages']:7} messages  service p50 {row['p50_ms']:.3f} p99 {row['p99_ms']:.3f} "
            f"({row['cpu_p99_ms']:.3f} on the processor) max {row['max_ms']:.1f} ms  "
            f"hub's core {row['hub_core']:4.0%} (thread {row['thread_s']:.2f} s, ZeroMQ {row['zeromq_s']:.2f} s: "
            f"{row['hub_us']:.0f} us each beside heartbeats), workers' {row['workers_core']:4.0%}, "
            f"hub's when idle {row['idle_core']:3.0%}  "
            f"{row['memory_before_mb']:.0f} to {row['memory_mb']:5.0f} MB  "
            f"{row['ratio']:.1f} x the bare wire  load {row['load']:.1f}",
            flush=True,
        )
    save(options.json, {"goals": GOALS, "rows": rows})


def _simulate(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Simulate in a process of its own, whose memory is the hub's, and print it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        row: dict[str, Any] = pool.apply(simulate, (count, options.shards, options.wire_us / 1e6))
    print(
        f"{row['workers']:7} workers  {row['seconds']:7.2f} s  {row['per_worker_us']:5.0f} us each, "
        f"{row['hub_us']:5.0f} beside heartbeats  service p50 {row['p50_ms']:.3f} p99 {row['p99_ms']:.3f} "
        f"max {row['max_ms']:.1f} ms  joined in {row['joined_s']:6.2f} s  idle: {row['idle_beats_per_s']:6.0f} "
        f"heartbeats a second of {row['beat_us']:.0f} us, {row['idle_core']:4.0%} of the core  "
        f"{row['joined_bytes']:.0f} to {row['memory_bytes']:.0f} bytes each",
        flush=True,
    )
    return row


def measure(count: int, options: argparse.Namespace) -> dict[str, Any]:
    limit = _run(count, options, "limit")
    row = _run(count, options, "hub")
    # One wire message is one request with its answer; a worker's whole story is several.
    row["wire_us"] = limit["seconds"] / (count * LIMIT_MESSAGES) * 1e6
    row["ratio"] = row["seconds"] / row["messages"] * 1e6 / row["wire_us"]
    row["load"] = os.getloadavg()[0]
    return row


def _run(count: int, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    mine, theirs = {cores[0]}, set(cores[1:]) or {cores[0]}
    hub_line, hub_end = context.Pipe()
    server = context.Process(target=_serve, args=(hub_end, kind, mine, options.profile))
    server.start()
    hub_end.close()  # so that a process that dies is heard of at once
    address = _hear(hub_line, str)
    processes, lines = [], []
    per_process = -(-count // options.processes)
    for first in range(0, count, per_process):
        line, end = context.Pipe()
        span = range(first, min(count, first + per_process))
        arguments = (end, address, kind, span, options.shards, theirs, not options.no_heartbeats)
        processes.append(context.Process(target=_play, args=arguments))
        processes[-1].start()
        end.close()
        lines.append(line)
    try:
        for line in lines:
            _hear(line, "ready")
        idle_core = _idle(hub_line) if kind == "hub" else 0.0
        hub_line.send("begin")
        before = _hear(hub_line, dict)
        began = time.monotonic()
        if kind == "hub":
            publisher = _Trainer(address, options.shards)
            began = time.monotonic()
            publisher.publish()
        for line in lines:
            line.send("go")
        ends: list[tuple[float, float]] = []  # when, and the processor's seconds
        while len(ends) < len(lines):
            if kind == "hub":
                publisher.beat()
            ends += [_hear(line, tuple) for line in lines if line.poll(0.2)]
            if time.monotonic() - began > PHASE_S_MAX:
                raise TimeoutError(f"not done within {PHASE_S_MAX:g} s")
        ended = max(end for end, _ in ends)
        hub_line.send("end")
        after = _hear(hub_line, dict)
        for line in lines:
            line.send("stop")
    finally:
        for process in (*processes, server):
            process.join(10)
            if process.is_alive():
                process.kill()
    seconds = ended - began
    thread_s, zeromq_s = (after[name] - before[name] for name in ("thread_s", "zeromq_s"))
    return {
        "workers": count,
        "shards": options.shards,
        "seconds": seconds,
        "per_worker_us": seconds / count * 1e6,
        **{name: after[name] for name in ("messages", "p50_ms", "p99_ms", "cpu_p99_ms", "max_ms")},
        "thread_s": thread_s,
        "zeromq_s": zeromq_s,
        "hub_us": (thread_s + zeromq_s - idle_core * seconds) / count * 1e6,  # of its core, of each worker
        "hub_core": (thread_s + zeromq_s) / seconds,
        "workers_core": sum(cpu_s for _, cpu_s in ends) / seconds,
        "idle_core": idle_core,
        "memory_mb": after["memory_mb"],
        "memory_before_mb": before["memory_mb"],
    }


def _idle(hub_line: Connection) -> float:
    """Return the share of its core that the hub takes while no worker wants anything."""
    used_s = []
    for wait_s in (IDLE_S, 0.0):
        hub_line.send("used")
        used = _hear(hub_line, dict)
        used_s.append(used["thread_s"] + used["zeromq_s"])
        time.sleep(wait_s)
    return (used_s[1] - used_s[0]) / IDLE_S


def _hear(line: Connection, what: Any) -> Any:
    if not line.poll(PHASE_S_MAX):
        raise TimeoutError(f"no {what} within {PHASE_S_MAX:g} s")
    said = line.recv()
    if isinstance(said, str) and what not in (str, said):
        raise RuntimeError(said)
    return said


# --- the hub's process ---


class _Timed(Server):
    """A wrapper that records how long each message took, in wall time and processor time."""

    taken: list[float] = []
    cpu: list[float] = []

    def _handle(self, event: hub_machine.Event, now: float) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        super()._handle(event, now)
        self.cpu.append(time.thread_time() - cpu)
        self.taken.append(time.perf_counter() - began)


class _Constant:
    """A hub that computes nothing."""

    def __init__(self, session: bytes, now: float, limits: HubLimits, lease_key: bytes) -> None:
        self.session = session
        self.workers: dict[bytes, object] = {}

    def handle(self, event: hub_machine.Event, now: float) -> list[hub_machine.Effect]:
        if isinstance(event, hub_machine.Tick):
            return []
        return [hub_machine.Send(event.session, m.Alive())]

    def next_deadline(self, now: float) -> float:
        return now + 1.0


def _serve(line: Connection, kind: str, cores: set[int], profile: Path | None) -> None:
    os.sched_setaffinity(0, cores)
    if kind == "limit":
        hub_machine.Hub = _Constant  # type: ignore[assignment,misc]
    elif profile is not None:
        import cProfile

        run = _Timed._run

        def profiled(self: _Timed) -> None:
            profiler = cProfile.Profile()
            profiler.runcall(run, self)
            profiler.dump_stats(profile)

        _Timed._run = profiled  # type: ignore[method-assign]
    server = _Timed()
    collect_rarely()  # as `tensorhub server` does
    line.send(server.address)
    while line.recv() == "used":
        line.send(_used(server))
    line.send(_used(server))
    server.taken.clear()
    server.cpu.clear()
    assert line.recv() == "end"
    taken = sorted(server.taken) or [0.0]
    cpu = sorted(server.cpu) or [0.0]
    line.send(
        {
            "messages": len(taken),
            "p50_ms": taken[len(taken) // 2] * 1e3,
            "p99_ms": taken[len(taken) * 99 // 100] * 1e3,
            "max_ms": taken[-1] * 1e3,
            "cpu_p99_ms": cpu[len(cpu) * 99 // 100] * 1e3,
            **_used(server),
        }
    )
    server.close()


def _used(server: Server) -> dict[str, float]:
    """Return the processor seconds so far of the hub's thread and of the others, which are ZeroMQ's; and the memory."""
    thread_s = time.clock_gettime(time.pthread_getcpuclockid(server._thread.ident or 0))
    others_s = time.process_time() - thread_s - time.thread_time()
    return {"thread_s": thread_s, "zeromq_s": others_s, "memory_mb": _memory_mb()}


def _memory_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# --- the workers' processes ---


class _Wire:
    """Many ZeroMQ sockets, one for each worker, and which of them have input."""

    def __init__(self, address: str, count: int) -> None:
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, count + 16)
        self.sockets: list[zmq.Socket[bytes]] = []
        self.poll = select.epoll()
        self.by_fd: dict[int, int] = {}
        self.overlooked: set[int] = set()
        for index in range(count):
            socket = self.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, new_session())
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(address)
            self.overlooked.add(index)
            fd = socket.getsockopt(zmq.FD)
            self.poll.register(fd, select.EPOLLIN | select.EPOLLET)
            self.by_fd[fd] = index
            self.sockets.append(socket)

    def say(self, index: int, message: m.ClientMessage) -> None:
        socket = self.sockets[index]
        socket.send(m.encode(message), zmq.NOBLOCK)
        if (
            socket.getsockopt(zmq.EVENTS) & zmq.POLLIN
        ):  # the descriptor is edge triggered, and sending may take the edge
            self.overlooked.add(index)

    def hear(self, index: int) -> list[m.HubMessage]:
        heard = []
        while True:
            try:
                heard.append(m.decode_from_hub(self.sockets[index].recv(zmq.NOBLOCK)))
            except zmq.Again:
                return heard

    def ready(self, seconds: float) -> list[int]:
        found, self.overlooked = self.overlooked, set()
        return [*found, *(self.by_fd[fd] for fd, _ in self.poll.poll(0 if found else seconds, 4096))]

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.context.term()


class _Trainer:
    def __init__(self, address: str, shards: int) -> None:
        self.shards = shards
        self.wire = _Wire(address, shards)
        for shard in range(shards):
            self.wire.say(shard, hello("trainer", shard, shards, TRAINERS_HOST))
        for shard in range(shards):
            while not (heard := self.wire.hear(shard)):
                self.wire.ready(0.1)
            assert isinstance(heard[0], m.Welcome), heard
            self.hub = heard[0].hub
        self.beaten_at = 0.0

    def publish(self) -> None:
        for shard in range(self.shards):
            self.wire.say(shard, m.Publish(1, holding(shard, self.shards, True, "published")))

    def beat(self) -> None:
        if time.monotonic() > self.beaten_at + 1.0:
            self.beaten_at = time.monotonic()
            for shard in range(self.shards):
                self.wire.hear(shard)
                self.wire.say(shard, heartbeat_of(self.hub, 0, checksum=checksum_of(shard, self.shards)))


def _play(
    line: Connection, address: str, kind: str, span: range, shards: int, cores: set[int], heartbeats: bool
) -> None:
    os.sched_setaffinity(0, cores)
    try:
        wire = _Wire(address, len(span))
        if kind == "limit":
            _play_limit(line, wire)
        else:
            _play_workers(line, wire, span, shards, heartbeats)
        line.recv()
        wire.close()
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")
        raise


def _play_limit(line: Connection, wire: _Wire) -> None:
    count = len(wire.sockets)
    message = m.Publish(1, holding(0, 8, True, "replicated"))
    left = [1] * count
    for index in range(count):
        wire.say(index, message)
    unfinished = count
    said_ready = False
    deadline = time.monotonic() + PHASE_S_MAX
    while unfinished:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{unfinished} workers have not been answered")
        for index in wire.ready(1.0):
            for _ in wire.hear(index):
                left[index] -= 1
                if left[index]:
                    wire.say(index, message)
                else:
                    unfinished -= 1
        if not unfinished and not said_ready:
            said_ready = True
            line.send("ready")
            line.recv()
            cpu_s = time.process_time()
            left, unfinished = [LIMIT_MESSAGES] * count, count
            for index in range(count):
                wire.say(index, message)
    line.send((time.monotonic(), time.process_time() - cpu_s))


def _play_workers(line: Connection, wire: _Wire, span: range, shards: int, heartbeats: bool) -> None:
    readers = Readers(span, shards)
    beats: list[tuple[float, int]] = []

    def beat(now: float) -> None:
        while heartbeats and beats and beats[0][0] <= now:
            due, index = beats[0]
            heapq.heapreplace(beats, (due + readers.beat_s[index], index))
            heartbeat = readers.heartbeat(index)
            if heartbeat is not None:
                wire.say(index, heartbeat)

    def hear() -> None:
        for index in wire.ready(0.05):
            for message in wire.hear(index):
                if isinstance(message, m.Welcome):
                    heapq.heappush(beats, (time.monotonic() + message.heartbeat_s, index))
                answer = readers.hear(index, message)
                if answer is not None:
                    wire.say(index, answer)

    def until(done: str) -> None:
        deadline = time.monotonic() + PHASE_S_MAX
        while left := len(span) - readers.step.count(done):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"{left} workers of {len(span)} are not done")
            beat(now)
            hear()

    for index in range(len(span)):
        wire.say(index, readers.begin(index))
    until("visible")
    line.send("ready")
    while not line.poll(0):
        beat(time.monotonic())
        hear()
    line.recv()
    cpu_s = time.process_time()
    until("done")
    line.send((time.monotonic(), time.process_time() - cpu_s))


if __name__ == "__main__":
    from recipes.bench.hub import __main__ as importable  # what the processes run must be found by name

    importable.main()
