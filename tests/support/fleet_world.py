"""The environment of a FleetState, simulated: Ray's nodes, the starter, the dispatcher and operators.

After every step the rules of a fleet are checked against what this world knows by itself.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.ray.fleet import events
from tensorhub_plugins.vllm.ray.fleet import state as machine
from tensorhub_plugins.vllm.ray.fleet.state import FleetState
from tensorhub_plugins.vllm.ray.fleet.types import Lost, Seen

NODES = ("a", "b", "c")
MAY_BECOME = {
    "starting": {"spare", "ready", "draining", "stopping"},
    "spare": {"starting", "stopping"},
    "ready": {"lost", "draining", "stopping"},
    "lost": {"ready", "draining", "stopping"},
    "draining": {"stopping"},
    "stopping": {"gone"},
    "gone": set(),
}
SPARE = ("starting", "spare")
OPS = (
    *("report", "report", "report", "tick", "tick", "cluster", "started", "started", "start failed", "stopped"),
    *("stop failed", "ready", "ready", "unready", "restarting", "gone", "asked", "answered", "node dies", "node comes"),
    *("add", "add external", "drain", "drain now", "drain node", "undrain node", "target", "policy"),
    *("fleet dies", "minutes pass", "others wait", "all is well", "all is well"),
)
Step = tuple[str, int]


@dataclass
class Replica:
    """A replica as it really runs, or did."""

    node: str
    ready: bool = False
    in_flight: int = 0
    draining: bool = False  # as the dispatcher knows it
    lost: Lost = ""
    is_made_as_spare: bool = False
    has_joined: bool = True  # or it is a spare, and never ready
    runs: bool = False  # its engine does


@dataclass
class World:
    state: FleetState
    now: float = 1000.0
    nodes: set[str] = field(default_factory=lambda: set(NODES))
    dispatcher: dict[str, Replica] = field(default_factory=dict)
    launching: dict[str, str] = field(default_factory=dict)  # name, kind
    stopping: set[str] = field(default_factory=set)
    real: dict[str, Replica] = field(default_factory=dict)
    owed: set[str] = field(default_factory=set)  # started, and not given back
    ranks: set[int] = field(default_factory=set)
    states: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    is_wanted: bool = False  # by others; as told last
    slots: int = 0  # told last, less what was started since
    drained: dict[str, float] = field(default_factory=dict)  # until when answers may take
    aborted: dict[str, float] = field(default_factory=dict)
    at_once: set[str] = field(default_factory=set)  # those that leave even if too few others are ready
    failures: int = 0
    quiet_until: float = 0.0
    told: set[str] = field(default_factory=set)  # the nodes that lived when the fleet was told last
    avoided: set[str] = field(default_factory=set)

    def begin(self, firsts: int) -> World:
        for number in range(firsts):
            self.real[f"rollout-{number}"] = self.dispatcher[f"rollout-{number}"] = Replica(NODES[number % 2])
            self.ranks.add(number)
        self.tell_cluster()
        self.report()
        return self

    def tell_cluster(self) -> None:
        self.told = set(self.nodes)
        self.avoided &= self.told
        self.give(events.Cluster(self.addresses(), self.slots, self.is_wanted))

    def addresses(self) -> dict[str, str]:
        return {node: f"10.0.0.{ord(node)}" for node in sorted(self.nodes)}

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, what: str, which: int) -> None:
        self.now += 1.0
        pick = self._pick
        match what:
            case "report":
                self.report()
            case "tick":
                self.give(events.Tick())
            case "minutes pass":
                self.now += 400.0 * (which + 1)
                self.report()  # it has gone on all the time
                self.give(events.Tick())
            case "cluster":
                self.slots = which % 4
                self.tell_cluster()
            case "started":
                if name := pick(self.launching, which):
                    self._has_started(name, which)
            case "start failed":
                if name := pick(self.launching, which):
                    self.launching.pop(name)
                    if self.kinds[name] == "joined" and self.states[name] == "starting":
                        self._failed()
                    self.give(events.StartFailed(name, "no room"))
            case "stopped":
                if name := pick(self.stopping, which):
                    self._has_stopped(name)
            case "stop failed":
                if name := pick(self.stopping, which):
                    self.stopping.discard(name)
                    self.give(events.StopFailed(name, "Ray does not answer"))
            case "ready" | "unready" | "restarting" | "gone" | "asked" | "answered":
                if name := pick(self.dispatcher, which):
                    self._happens(self.dispatcher[name], what)
            case "node dies" | "node comes":
                (self.nodes.discard if what == "node dies" else self.nodes.add)(NODES[which % 3])
                self.nodes.add("a")  # Ray's head
            case "add":
                self.give(events.Add(which % 3))
            case "add external":
                self.give(events.AddExternal(f"http://server-{which % 3}"))
            case "drain" | "drain now":
                name = pick(self.state.members, which) or "nobody"
                self.at_once |= {name} if what == "drain now" else set()
                self.give(events.Drain(name, 10.0 * which, now=what == "drain now"))
            case "drain node":
                self.avoided |= {NODES[which % 3]} & self.told
                self.give(events.DrainNodes(frozenset({NODES[which % 3]}), 10.0 * which))
            case "undrain node":
                nodes = frozenset({NODES[which % 3]})
                if nodes & self.avoided & self.told:
                    self.avoided -= nodes
                self.give(events.UndrainNodes(nodes, NODES[which % 3]))
            case "target":
                self.give(events.SetTarget(which - 1 if which else None))
            case "policy":
                self.give(events.PolicySaid(which * 3 - 5))
            case "others wait":
                self.is_wanted = which < 4
                self.tell_cluster()
            case "all is well":
                self.is_wanted = False
                for _ in range(2 + which % 3):
                    self.succeed()
            case "fleet dies":
                self.restart_fleet()
            case _:
                raise ValueError(what)

    @staticmethod
    def _pick(names: Sequence[str] | dict[str, object] | set[str], which: int) -> str:  # type: ignore[type-arg]
        return sorted(names)[which % len(names)] if names else ""

    def _failed(self) -> None:
        self.quiet_until = self.now + min(300.0, 5.0 * 2**self.failures)
        self.failures += 1

    def _has_started(self, name: str, which: int) -> None:
        kind = self.launching.pop(name)
        free = sorted(self.nodes - self.avoided) or ["a"]
        self.real[name] = Replica(free[which % len(free)] if kind != "external" else "")
        self.real[name].is_made_as_spare, self.real[name].has_joined = kind == "spare", kind != "spare"
        self.give(events.Started(name, f"handle of {name}"))

    def _has_stopped(self, name: str) -> None:
        self.stopping.discard(name)
        self.launching.pop(name, None)
        self.real.pop(name, None)
        self.owed.discard(name)
        self.give(events.Stopped(name))

    @staticmethod
    def _happens(replica: Replica, what: str) -> None:
        match what:
            case "ready" if replica.lost != "gone":
                replica.runs = True
                if replica.has_joined:
                    replica.ready, replica.lost = True, ""
            case "unready":
                replica.ready = False
            case "restarting" if replica.lost != "gone":
                replica.ready, replica.lost, replica.in_flight = False, "restarting", 0
                replica.runs, replica.has_joined = False, not replica.is_made_as_spare
            case "gone":
                replica.ready, replica.lost, replica.in_flight = False, "gone", 0
            case "asked" if replica.ready and not replica.draining:
                replica.in_flight += 1
            case "answered" if replica.in_flight:
                replica.in_flight -= 1
            case _:
                pass

    def report(self) -> None:
        """Play the dispatcher's second: report, then apply the roster."""
        for name, replica in self.dispatcher.items():
            is_joining = self.states.get(name) == "starting" and self.kinds.get(name) == "joined"
            is_misplaced = replica.node in self.avoided and not (replica.ready and not replica.lost)
            if is_joining and (replica.lost == "gone" or is_misplaced):
                self._failed()
            elif replica.ready and self.states.get(name) == "starting":
                self.failures = 0
        self.give(
            events.Reported(
                tuple(
                    Seen(
                        *(name, f"handle of {name}", r.node, r.ready, 7, r.in_flight, r.draining, r.lost),
                        spare=r.runs and not r.has_joined,
                    )
                    for name, r in self.dispatcher.items()
                )
            )
        )
        roster = {entry.name: entry for entry in self.state.roster()}
        assert roster.keys() <= self.real.keys()
        self.dispatcher = {name: self.real[name] for name in roster}
        for name, entry in roster.items():
            self.dispatcher[name].draining = entry.draining

    def restart_fleet(self) -> None:
        """Kill its process, and restart it with its saved state."""
        self.state = pickle.loads(pickle.dumps(self.state))
        # Their outcome was not received; the starter knows it, and is asked again.
        launching, self.launching = self.launching, {}
        self.stopping = set()
        for effect in self.state.resume(self.now):
            match effect:
                case events.Start(name) | events.StartExternal(name):
                    self.launching[name] = launching[name]
                case events.Stop(name):
                    self.stopping.add(name)
                case _:
                    raise AssertionError(effect)
        self.check()

    # --- the rules ----------------------------------------------------------------------------------------------------

    def give(self, event: events.Event) -> None:
        before, again_at = _plain(self.state), self.state.start_again_at["joined"]
        lost = {name for name, replica in self.dispatcher.items() if replica.lost}
        try:
            effects = self.state.handle(event, self.now)
        except UsageError as error:
            assert len(error.message) > 10 and _plain(self.state) == before
            return
        own_before = len(self.own())
        starts = [effect for effect in effects if isinstance(effect, events.Start)]
        for effect in effects:
            self._carry_out(effect, lost)
        if starts:
            own = self.own()
            assert len(own) <= self.state.wanted <= self.state.maximum, (own_before, own)
            assert self.slots >= 0, "there was no room"
            young = [name for name, state in self.states.items() if state == "starting" and name in self.owed]
            assert len([name for name in young if name.startswith("rollout")]) <= machine.STARTS_MAX
        if any(not effect.spare for effect in starts):
            assert self.now >= self.quiet_until, "it was started too early after one that failed"
        if any(effect.spare for effect in starts):
            assert len(self.spares()) <= self.state.spares and not self.is_wanted, "there are enough, or no place"
            assert len(own) == self.state.wanted, "a replica was needed, not a spare"
            assert all(self.states[name] != "starting" for name in own), "it is in the way of a replica that starts"
        if self.state.is_known:
            lacks = self.state.wanted - len(self.own())
            assert lacks <= 0 or not self.spares(), "a spare waits, and is needed"
            is_put_off = self.state.slots <= 0 or self.now < self.state.start_again_at["joined"]
            assert lacks <= 0 or is_put_off, "one was not started"
        changed = [effect.member for effect in effects if isinstance(effect, events.Changed)]
        has_failed = any((member.kind, member.state) == ("joined", "stopping") for member in changed)
        assert has_failed or self.state.start_again_at["joined"] == again_at, (
            "replicas wait, and none of them has failed"
        )
        self.check()

    def spares(self) -> list[str]:
        return [name for name, state in self.states.items() if self.kinds[name] == "spare" and state in SPARE]

    def own(self) -> list[str]:
        """Return those that count for the target: not one that leaves when others are ready."""
        leaving = {name for name, member in self.state.members.items() if member.leaves_within_s is not None}
        counted = [name for name, state in self.states.items() if _counts(self.kinds[name], state)]
        return [name for name in counted if name not in leaving]

    def _carry_out(self, effect: object, lost: set[str]) -> None:
        match effect:
            case events.Start(name, rank, avoid, spare):
                assert rank not in self.ranks and name == f"rollout-{rank}"
                assert avoid == self.avoided
                self.ranks.add(rank)
                self.owed.add(name)
                self.launching[name] = "spare" if spare else "joined"
                self.slots -= 1
            case events.Join(name, handle):
                assert handle == f"handle of {name}" and self.state.members[name].kind == "joined"
                assert self.real[name].is_made_as_spare
                self.real[name].has_joined = True
            case events.StartExternal(name, _):
                self.owed.add(name)
                self.launching[name] = "external"
            case events.Abort(name, handle):
                assert handle == f"handle of {name}" and self.states[name] == "draining" and name not in self.aborted
                assert self.now >= self.state.members[name].since
                self.aborted[name] = self.now
            case events.Stop(name, handle):
                assert name not in self.stopping, "it is being stopped"
                assert handle == (None if name not in self.real else f"handle of {name}")
                self._was_free_to_stop(name, lost)
                self.launching.pop(name, None)
                self.stopping.add(name)
            case events.Changed(member):
                before = self.states.get(member.name, "starting")
                was = self.kinds.setdefault(member.name, member.kind)
                assert (was, member.kind) == ("spare", "joined") or was == member.kind
                assert member.kind != "spare" or (member.in_flight == 0 and member.state not in ("ready", "draining"))
                self.kinds[member.name] = member.kind
                assert member.state == before or member.state in MAY_BECOME[before], (before, member)
                if (before, member.state, member.why) == ("ready", "draining", machine.BY_NAME):
                    others = [name for name, state in self.states.items() if state == "ready" and name != member.name]
                    assert len(others) >= self.state.minimum or member.name in self.at_once, "too few are ready"
                self.states[member.name] = member.state
                if member.state == "draining" and before != "draining":
                    self.drained[member.name] = self.now
            case _:
                pass

    def _was_free_to_stop(self, name: str, lost: set[str]) -> None:
        if self.states[name] not in ("ready", "draining"):
            return
        replica = self.real[name]
        is_empty = replica.in_flight == 0 and replica.draining
        has_had_its_time = name in self.aborted and self.now >= self.aborted[name] + machine.ABORT_TIMEOUT_S
        is_lost = name in lost or replica.node not in {*self.nodes, ""}
        is_draining = self.states[name] == "draining"
        assert is_draining and (is_empty or has_had_its_time) or is_lost, f"{name} had requests"

    def check(self) -> None:
        """Check the invariants."""
        state = self.state
        listed = {name for name, member in state.members.items() if member.kind != "first"}
        assert self.owed - {n for n in self.owed if n in state.members} == set(), "lost sight of what was started"
        assert listed <= self.owed
        assert all(self.states[name] == member.state for name, member in state.members.items())
        in_roster = {entry.name for entry in state.roster()}
        assert not in_roster & self.stopping
        for entry in state.roster():
            assert entry.draining == (state.members[entry.name].state == "draining") and entry.handle
        for name, member in state.members.items():
            assert (name in self.stopping or member.stops) if member.state == "stopping" else True
            assert (name in self.launching) == (member.handle is None and member.state == "starting")
        view = state.view(self.now)
        assert view.minimum <= view.target <= view.maximum and len(view.members) == len(state.members)

    def settle(self) -> None:
        """Let everything succeed from now on: the fleet reaches its target."""
        self.nodes = {*NODES, "d"}  # that one was never drained
        for _ in range(60):
            self.is_wanted = False
            self.succeed()
        ready = [name for name, state in self.states.items() if state == "ready" and not name.startswith("external")]
        assert len(ready) == self.state.wanted, f"{len(ready)} of {self.state.wanted} are ready"
        spares = [name for name, state in self.states.items() if state == "spare"]
        assert len(spares) == self.state.spares, f"{len(spares)} of {self.state.spares} spares are there"
        assert {member.state for member in self.state.members.values()} <= {"ready", "spare"}
        assert not self.launching and not self.stopping

    def succeed(self) -> None:
        """Let everything that is under way succeed."""
        for name in sorted(self.launching):
            if name in self.launching:  # not stopped meanwhile, as a spare whose place is wanted
                self._has_started(name, 0)
        for name in sorted(self.stopping):
            self._has_stopped(name)
        for replica in self.dispatcher.values():
            self._happens(replica, "ready")
            replica.in_flight = 0
        self.now += 30.0
        self.slots = 5
        self.tell_cluster()
        self.report()
        self.give(events.Tick())


def _counts(kind: str, state: str) -> bool:
    return state in ("starting", "ready", "lost") and kind in ("first", "joined")


def _plain(state: FleetState) -> object:
    return {name: repr(value) for name, value in vars(state).items() if name != "_effects"}


def run(steps: Sequence[Step], *, firsts: int = 2, **options: object) -> World:
    world = World(FleetState(**options)).begin(firsts)  # type: ignore[arg-type]
    for what, which in steps:
        world.step(what, which)
    world.settle()
    return world


def program(seed: int, length: int = 60) -> list[Step]:
    chance = random.Random(seed)
    return [(chance.choice(OPS), chance.randrange(8)) for _ in range(length)]
