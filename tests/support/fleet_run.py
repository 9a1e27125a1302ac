"""A framework in small for tests of the fleet: engines without vLLM, a launcher and a dispatcher, all real actors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm.ray import preemption
from tensorhub_plugins.vllm.ray.fleet import handle as fleet
from tensorhub_plugins.vllm.ray.fleet.events import Reported
from tensorhub_plugins.vllm.ray.fleet.types import Entry
from tensorhub_plugins.vllm.ray.fleet.types import Member as Shown
from tensorhub_plugins.vllm.ray.members import Member, Members
from tensorhub_plugins.vllm.ray.placement import slots
from tensorhub_plugins.vllm.ray.reporting import Reporter

BUNDLE = {"engine": 1.0}
BEAT_S = 0.2
BEAT_TIMEOUT_S = 5.0
DEADLINE_S = 90.0


class Engine:
    """An engine that answers a prompt after the time that it names. An aborted one returns what it has."""

    def __init__(self, spare: bool = False) -> None:
        self.version, self.is_aborted = 0 if spare else 1, asyncio.Event()
        self.watching: asyncio.Task[None] | None = None

    async def tensorhub_heartbeat(self) -> dict[str, Any]:
        if self.watching is None:
            self.watching = asyncio.create_task(preemption.watch("engine"))
        node = ray.get_runtime_context().get_node_id()
        is_ready = self.version > 0
        return {"node": node, "pid": os.getpid(), "version": self.version, "ready": is_ready, "spare": not is_ready}

    async def join(self) -> None:
        self.version = 1

    async def generate(self, prompt: int, seconds: float) -> int:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.is_aborted.wait(), seconds)
            raise InterruptedError
        return prompt * prompt

    async def abort(self) -> None:
        self.is_aborted.set()


class Launcher:
    """A launcher that fails to start as often as its file says."""

    def __init__(self, failures: str) -> None:
        self.failures = failures

    async def start(self, name: str, rank: int, avoid: Collection[str], spare: bool = False) -> Any:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.failures)
            raise RuntimeError("the engine cannot start\nfor a long reason")
        if not await asyncio.to_thread(slots, [BUNDLE], avoid=avoid):
            raise RuntimeError("no node has room")
        elsewhere = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] if avoid else None
        group = ray.util.placement_group([BUNDLE], name=name, bundle_label_selector=elsewhere)
        await asyncio.wait_for(group.ready(), 20)
        where = PlacementGroupSchedulingStrategy(group)
        handle = engine(name, spare=spare, max_restarts=1, resources=BUNDLE, scheduling_strategy=where)
        beat = await handle.tensorhub_heartbeat.remote()
        if beat["node"] in avoid:
            raise RuntimeError("Ray has placed it on a node that drains")
        return handle

    async def join(self, name: str, handle: Any) -> None:
        await handle.join.remote()

    async def start_external(self, name: str, url: str) -> Any:
        return engine(name)

    async def abort(self, name: str, handle: Any) -> None:
        await handle.abort.remote()

    async def stop(self, name: str, handle: Any | None) -> None:
        if handle is not None:
            ray.kill(handle)
        with contextlib.suppress(ValueError):
            ray.util.remove_placement_group(ray.util.get_placement_group(name))

    def settle(self, names: Collection[str]) -> None:
        """Do nothing: a place is found by its name."""

    def slots(self, avoid: Collection[str]) -> int:
        return slots([BUNDLE], avoid=avoid)


def engine(name: str, *, spare: bool = False, **options: Any) -> Any:
    return ray.remote(Engine).options(**{"name": f"engine-{name}", "num_cpus": 0, **options}).remote(spare)


class Dispatcher:
    """The work of a framework's router, over the table that theirs have: heartbeats, reports, and requests that outlive
    their engine."""

    def __init__(self, firsts: dict[str, Any]) -> None:
        self.members = Members(BEAT_TIMEOUT_S)
        for name, handle in firsts.items():
            self.members.add(name, time.monotonic(), handle, worker=f"{name}/0")
        self.in_flight: Counter[str] = Counter()
        self.answered: dict[int, int] = {}
        self.by: Counter[str] = Counter()
        self.asked_again = 0
        self.waiting = 0

    async def run(self) -> None:
        reporter = Reporter(self)
        while True:
            await asyncio.gather(*map(self._beat, list(self.members.all.values())))
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                await asyncio.wait_for(reporter.report(), BEAT_TIMEOUT_S)
            await asyncio.sleep(BEAT_S)

    async def _beat(self, member: Member) -> None:
        try:
            answer = await asyncio.wait_for(member.handle.tensorhub_heartbeat.remote(), BEAT_TIMEOUT_S)
            self.members.heard(member.name, time.monotonic(), answer)
        except (ActorUnavailableError, asyncio.TimeoutError):
            self.members.failed(member.name, time.monotonic(), "restarting")
        except RayError:  # also ActorUnschedulableError, which is no RayActorError
            self.members.failed(member.name, time.monotonic(), "died")

    def seen(self) -> Reported:
        return self.members.seen(lambda name: self.in_flight[name], self.waiting, now=time.monotonic())

    def apply(self, told: Collection[str], roster: Sequence[Entry]) -> None:
        self.members.apply(told, roster, time.monotonic())

    async def ask(self, prompt: int, seconds: float) -> str:
        """Return the engine that has answered."""
        self.waiting += 1
        while True:
            if not (able := self.members.able()):
                await asyncio.sleep(0.05)
                continue
            member = min(able, key=lambda one: self.in_flight[one.name])
            self.waiting -= 1
            self.in_flight[member.name] += 1
            try:
                answer = await member.handle.generate.remote(prompt, seconds)
                assert prompt not in self.answered, "answered twice"
                self.answered[prompt] = answer
                self.by[member.name] += 1
                return member.name
            except (RayActorError, InterruptedError):
                self.asked_again += 1
                self.waiting += 1
                await asyncio.sleep(0.05)
            finally:
                self.in_flight[member.name] -= 1

    async def report_of(self) -> dict[str, Any]:
        in_flight = {name: self.in_flight[name] for name in self.members.all}
        return {"answered": self.answered, "by": dict(self.by), "again": self.asked_again, "in_flight": in_flight}


class Run:
    """A run on the Ray cluster to which this process is connected."""

    def __init__(self, firsts: int, failures: str, **options: Any) -> None:
        self.actor = fleet.start(Launcher(failures), TrainingOptions(**options))
        self.fleet = fleet.find(ray.get_runtime_context().get_job_id())
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        restarted = {"max_restarts": 2, "resources": BUNDLE, "scheduling_strategy": here}
        handles = {f"rollout-{n}": engine(f"rollout-{n}", **restarted) for n in range(firsts)}
        how = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": here}
        self.dispatcher = ray.remote(Dispatcher).options(**how).remote(handles)
        self.failures = failures
        self.running = self.dispatcher.run.remote()

    def member(self, name: str) -> Shown:
        view = self.fleet.list()
        return next(one for one in (*view.members, *view.gone) if one.name == name)

    def states(self) -> dict[str, str]:
        with contextlib.suppress(Exception):
            return {member.name: member.state for member in self.fleet.list().members}
        return {}

    def until(self, **wanted: str) -> None:
        """Wait until the members are exactly these, in these states (names with _ for -)."""
        expected = {name.replace("_", "-"): state for name, state in wanted.items()}
        wait(lambda: self.states() == expected, lambda: f"{self.states()} instead of {expected}: {self.fleet.list()}")

    def pid(self, name: str) -> int:
        return int(ray.get(ray.get_actor(f"engine-{name}").tensorhub_heartbeat.remote())["pid"])

    def numbers(self) -> dict[str, Any]:
        return dict(ray.get(self.dispatcher.report_of.remote()))


def wait(condition: Callable[[], bool], otherwise: Callable[[], str], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.1)


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: __import__("os").getpid())))


def command(*arguments: str) -> tuple[int, str]:
    """Run `tensorhub fleet ...` in a process of its own."""
    call = [sys.executable, "-m", "tensorhub_plugins.core.cli", "fleet", *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.returncode, done.stdout + done.stderr


@contextlib.contextmanager
def cluster(*engines: int) -> Iterator[Any]:
    """Ray with one raylet for each number: so many engines fit there. The first is the head, and ours."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    before = os.environ.get("RAY_ADDRESS")
    try:
        for number in engines:
            made.add_node(num_cpus=2, resources={"engine": number}, include_dashboard=False)
        os.environ["RAY_ADDRESS"] = made.address  # also for commands: there may be other clusters on this machine
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
    finally:
        ray.shutdown()
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.update({} if before is None else {"RAY_ADDRESS": before})
        fleet._owned.clear()
        made.shutdown()
