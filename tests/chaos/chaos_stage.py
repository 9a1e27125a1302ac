"""One chaos run: real processes in network namespaces, faults by a plan, then calm; and what is left to judge.

Two sites, joined by a thin link. In the east: the hub, the trainer's two ranks on one host, two rollouts on another
(they read each other's memory), one on a third. In the west: two rollouts on one host, one on another, and the liar.
The stranger stands in the east.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos_checks import Evidence
from chaos_crew import RANKS, Hub, Post, Rank, Rollout, read_diaries, serve
from chaos_plan import FAULTS, Fault, plan
from chaos_strangers import Liar, Stranger

from recipes.bench import network
from tensorhub_plugins.core import Location, version_of

LAN_MBIT, WAN_MBIT = 400, 100
HUB_PORT = 7070
HAUNTS = 2  # versions that a zombie wants to publish
RANK_NAMES = tuple(f"trainer/{rank}" for rank in range(RANKS))
ROLLOUTS = ("rollout-0", "rollout-1", "rollout-2", "rollout-3", "rollout-4", "rollout-5")
HOMES = {  # worker -> (site, host)
    "hub": ("east", "hub"),
    "trainer/0": ("east", "trainers"),
    "trainer/1": ("east", "trainers"),
    "rollout-0": ("east", "e0"),
    "rollout-1": ("east", "e0"),
    "rollout-2": ("east", "e1"),
    "rollout-3": ("west", "w0"),
    "rollout-4": ("west", "w0"),
    "rollout-5": ("west", "w1"),
    "liar": ("west", "w2"),
    "stranger": ("east", "outside"),
}
KINDS: dict[str, type] = {"hub": Hub, "trainer": Rank, "rollout": Rollout, "liar": Liar, "stranger": Stranger}
SECRET = "the secret of a run that nobody else knows"
STEP_S = 0.4  # between two versions, beside what they take
ANSWER_S = 90.0  # for a process to answer: only a broken one takes so long
ARRIVE_S = 60.0  # in the calm, for all to come to the last version
TRACEBACK = re.compile(rb"Traceback.*?^(\w[^\n]*)$", re.S | re.M)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["torch", "numpy", "xxhash", "zmq", "tensorhub_plugins.core", "recipes.bench.network"]
)


@dataclass
class Actor:
    """A process that may be killed and started again."""

    who: str
    life: int = 0
    process: Any = None
    pipe: Connection | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # one question at a time
    frozen_at: float | None = None
    is_left: bool = False  # a zombie now: nobody waits for it, and another process will have its name


class Chaos:
    """`run()` once; `evidence` is what it has left."""

    def __init__(
        self,
        seed: int,
        seconds: float,
        folder: Path,
        *,
        verify: bool = True,
        kinds: Sequence[str] = tuple(FAULTS),
        betrayed: bool = False,
    ) -> None:
        self.seed, self.seconds, self.folder, self.verify = seed, seconds, folder, verify
        self.betrayed = betrayed  # the stranger has been told the secret
        targets = {
            "rollout": ROLLOUTS,
            "trainer": RANK_NAMES,
            "hub": ["hub"],
            "host": ["trainers", "e0", "e1", "w0", "w1"],
            "site": ["west"],
            "stranger": ["stranger"],
        }
        self.plan = plan(seed, seconds, targets, kinds)
        self.evidence = Evidence(expected=ROLLOUTS)
        self._actors = {who: Actor(who) for who in HOMES}
        self._hosts: dict[str, network.Host] = {}
        self._rng = random.Random(seed)  # of the trainer's loop
        self._scene = threading.RLock()  # who is there, and in what state: two threads start, stop and kill
        self._ghosts: list[Actor] = []  # stopped ranks of former lives of the trainer
        self._haunting: list[threading.Thread] = []
        self._lives = count(1)  # of the trainer: each life publishes other bytes
        self._calm, self._calm_at = threading.Event(), float("inf")

    def run(self) -> Evidence:
        with network.Network() as self._wires:
            self._build()
            try:
                self._start("hub", "trainer/0", "trainer/1", *ROLLOUTS, "liar", "stranger")
                trainer = threading.Thread(target=self._train)
                trainer.start()
                self._play()
                self._calm_at = time.monotonic()
                self._calm.set()
                trainer.join()
                for ghost in self._haunting:
                    ghost.join()
                self._settle()
            finally:
                self._calm.set()
                self._end()
        self._gather()
        return self.evidence

    # --- the stage ---

    def _build(self) -> None:
        self._wires.site("east")
        self._wires.site("west")
        self._wires.join("east", "west", WAN_MBIT)
        for site, host in dict.fromkeys(HOMES.values()):
            self._hosts[host] = self._wires.host(site, LAN_MBIT)

    def _post(self, who: str, life: int) -> Post:
        site, host = HOMES[who]
        at, hub = self._hosts[host], f"tcp://{self._hosts['hub'].address}:{HUB_PORT}"
        seed = hash((self.seed, life, *who.encode()))  # of integers: the same in every process
        where, secret = Location(site, "", host), "" if who == "stranger" and not self.betrayed else SECRET
        return Post(who, life, abs(seed), at.name, where, at.address, hub, str(self.folder), secret, self.verify)

    def _start(self, *names: str) -> None:
        life = next(self._lives)
        begun = []
        with self._scene:
            for who in names:
                actor = self._actors[who]
                actor.life, (actor.pipe, theirs) = life, _processes.Pipe()
                actor.is_left, actor.frozen_at = False, None
                kind = KINDS[re.split("[-/]", who)[0]]
                arguments = (theirs, kind, self._post(who, life))
                actor.process = _processes.Process(target=serve, args=arguments, daemon=True)
                actor.process.start()
                theirs.close()
                begun.append((actor, actor.pipe))
        for actor, pipe in begun:
            with actor.lock, contextlib.suppress(EOFError):  # killed again already: whoever asks it next finds out
                self._answer(actor, pipe)

    def _ask(self, who: str, method: str, *arguments: Any) -> Any:
        """None from one that is dead, or dies of it."""
        actor = self._actors[who]
        with actor.lock:
            pipe = actor.pipe
            assert pipe is not None
            try:
                pipe.send((method, arguments))
                return self._answer(actor, pipe)
            except (EOFError, OSError):
                return None

    def _answer(self, actor: Actor, pipe: Connection) -> Any:
        deadline = time.monotonic() + ANSWER_S
        while not pipe.poll(0.2):
            if actor.is_left or actor.pipe is not pipe:  # what comes now answers others
                raise EOFError
            if time.monotonic() > deadline:
                raise TimeoutError(f"{actor.who} does not answer")
        return pipe.recv()

    # --- the job ---

    def _train(self) -> None:
        """Both ranks begin an attempt and publish each step of it; when one is lost both start again, as under
        torchrun, from a step that is at most three back. At last the final version."""
        step, attempt = 0, -1
        while True:
            last = self._calm.is_set()
            if attempt < 0:
                step = max(0, step - self._rng.randrange(4))
                begun = self._ask_ranks("begin", step, f"life {self._actors[RANK_NAMES[0]].life}")
                if None not in begun and min(begun) >= 0:
                    attempt = begun[0]
            else:
                step += 1
                versions = self._ask_ranks("publish", version_of(attempt, step))
                if None in versions:
                    attempt = -1
                elif all(versions):
                    self._wake_ghosts()
                    if last:
                        self.evidence.final_version = versions[0]
                        return
            if last and time.monotonic() > self._calm_at + ARRIVE_S:
                return
            self._calm.wait(STEP_S)

    def _ask_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Of each rank; when one of them is lost, all are, and start again."""
        with ThreadPoolExecutor(RANKS) as asking:
            answers = list(asking.map(lambda who: self._ask(who, method, *arguments), RANK_NAMES))
        if None in answers:
            for who in RANK_NAMES:
                self._kill(who)
            self._start(*RANK_NAMES)
        return answers

    def _wake_ghosts(self) -> None:
        """Let the ranks of former lives go on as if they were the trainer, now that a later life has published.

        A rank that was stopped while the other one still worked on the same version may not: its own life is the one
        that has published, and what the rank publishes then is no zombie's."""
        former = [ghost for ghost in self._ghosts if ghost.life != self._actors[ghost.who].life]
        for ghost in former:
            self._ghosts.remove(ghost)
            thread = threading.Thread(target=self._haunt, args=(ghost,), daemon=True)
            self._haunting.append(thread)
            thread.start()

    def _haunt(self, ghost: Actor) -> None:
        assert ghost.frozen_at is not None and ghost.pipe is not None
        os.kill(ghost.process.pid, signal.SIGCONT)
        self.evidence.stopped.setdefault((ghost.who, ghost.life), []).append((ghost.frozen_at, time.monotonic()))
        with contextlib.suppress(EOFError, OSError):
            for _ in range(HAUNTS):
                ghost.pipe.send(("go_on", ()))
            for _ in range(1 + HAUNTS):  # and what it was asked before it was stopped
                if not ghost.pipe.poll(ANSWER_S / 3):
                    break
                ghost.pipe.recv()
        os.kill(ghost.process.pid, signal.SIGKILL)
        self.evidence.killed[ghost.who, ghost.life] = time.monotonic()
        ghost.process.join()

    # --- the faults ---

    def _play(self) -> None:
        began = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        order = count()
        for fault in self.plan:
            heapq.heappush(self._due, (fault.at_s, next(order), lambda fault=fault: self._strike(fault)))
        self._after = lambda seconds, action: heapq.heappush(
            self._due, (time.monotonic() - began + seconds, next(order), action)
        )
        while self._due:
            at_s, _, action = heapq.heappop(self._due)
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            action()
        time.sleep(max(0.0, began + self.seconds - time.monotonic()))

    def _strike(self, fault: Fault) -> None:
        verb, kind = fault.kind.split()
        who = fault.target
        match verb, kind:
            case "kill", _:
                self._kill(who)
                if kind != "trainer":  # the trainer's loop starts both ranks again
                    self._after(fault.lasts_s, lambda: self._start(who))
            case "stop", _:
                self._freeze(who)
                self._after(fault.lasts_s, lambda: self._thaw(who))
            case "haunt", _:
                self._leave(who)
            case "cut", "site":
                self._wires.cut(who)
                self._after(fault.lasts_s, lambda: self._wires.mend(who))
            case (("cut" | "mute" | "deafen"), "host"):
                host = self._hosts[who]
                self._wires.impair(host, verb)
                self._after(fault.lasts_s, lambda: self._wires.repair(host))
            case "flip", _:
                threading.Thread(target=self._ask, args=(who, "flip"), daemon=True).start()
            case "strike", _:
                ports = self._ports()
                threading.Thread(target=self._ask, args=(who, "strike", ports), daemon=True).start()
            case _:
                raise AssertionError(fault)

    def _leave(self, who: str) -> None:
        """It stops, and the trainer's loop starts both ranks again, under the same names."""
        actor = self._actors[who]
        with self._scene:
            self._freeze(who)
            if actor.frozen_at is not None:
                self._ghosts.append(replace(actor, lock=threading.Lock()))
                actor.is_left, actor.frozen_at = True, None

    def _kill(self, who: str) -> None:
        actor = self._actors[who]
        with self._scene:
            if actor.is_left:
                return
            if actor.process.is_alive():
                os.kill(actor.process.pid, signal.SIGKILL)
                self.evidence.killed[who, actor.life] = time.monotonic()
            actor.process.join()
            if actor.frozen_at is not None:
                self.evidence.stopped.setdefault((who, actor.life), []).append((actor.frozen_at, time.monotonic()))
            actor.frozen_at = None

    def _freeze(self, who: str) -> None:
        actor = self._actors[who]
        with self._scene:
            if not actor.is_left and actor.process.is_alive():
                os.kill(actor.process.pid, signal.SIGSTOP)
                actor.frozen_at = actor.frozen_at or time.monotonic()

    def _thaw(self, who: str) -> None:
        actor = self._actors[who]
        with self._scene:
            if actor.frozen_at is None or not actor.process.is_alive():
                return
            os.kill(actor.process.pid, signal.SIGCONT)
            self.evidence.stopped.setdefault((who, actor.life), []).append((actor.frozen_at, time.monotonic()))
            actor.frozen_at = None

    def _ports(self) -> list[tuple[str, int]]:
        """Where anything listens, in any of the namespaces."""
        found = defaultdict(set)
        for who, actor in self._actors.items():
            if who != "stranger" and actor.process.is_alive():
                for line in Path(f"/proc/{actor.process.pid}/net/tcp").read_text().splitlines()[1:]:
                    local, state = line.split()[1], line.split()[3]
                    if state == "0A":
                        found[self._hosts[HOMES[who][1]].address].add(int(local.split(":")[1], 16))
        return sorted((address, port) for address, ports in found.items() for port in ports)

    # --- the calm ---

    def _settle(self) -> None:
        """Faults have stopped: all must come to the last version."""
        deadline = time.monotonic() + ARRIVE_S
        waiting = set(ROLLOUTS)
        while waiting and time.monotonic() < deadline:
            for who in sorted(waiting):
                version = self._ask(who, "version")
                self.evidence.arrived[who] = version or 0
                if version == self.evidence.final_version:
                    waiting.discard(who)
            time.sleep(0.1)
        got = self._ask("stranger", "ask")
        self.evidence.intrusions = ["it died"] if got is None else got
        self.hub_memory_bytes = self._ask("hub", "memory_bytes")

    def _end(self) -> None:
        for ghost in self._ghosts:
            ghost.process.kill()
            ghost.process.join()
        for who, actor in self._actors.items():
            if actor.process is not None:
                self._kill(who)
                actor.process.close()
                assert actor.pipe is not None
                actor.pipe.close()

    def _gather(self) -> None:
        stops = [f"{who} life {life}: {times}" for (who, life), times in self.evidence.stopped.items()]
        (self.folder / "stops").write_text("\n".join(stops))  # with the diaries, for whoever looks
        self.evidence.calls = read_diaries(str(self.folder))
        for log in sorted(self.folder.glob("*.log")):
            self.evidence.tracebacks += [f"{log.stem}: {end.decode()}" for end in TRACEBACK.findall(log.read_bytes())]
