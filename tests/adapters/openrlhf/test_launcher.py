"""How the fleet makes and ends OpenRLHF's engines. Ray is played by a few lines; needs no framework."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Collection
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_plugins.core import DeadlineExceeded, UsageError
from tensorhub_plugins.openrlhf import install, launcher
from tensorhub_plugins.openrlhf.config import Options

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402


class Engine:
    """An actor's handle. closes: how its `tensorhub_leave` ends."""

    def __init__(self, options: dict[str, Any], arguments: dict[str, Any], closes: Any = None) -> None:
        self.options, self.arguments, self.closes = options, arguments, closes
        self.called: list[str] = []
        self.tensorhub_leave = SimpleNamespace(remote=lambda: self._call("leave"))
        self.tensorhub_join = SimpleNamespace(remote=lambda: asyncio.wrap_future(self._call("join").future()))

    def _call(self, name: str) -> Any:
        self.called.append(name)
        future: Future[None] = Future()
        if isinstance(self.closes, Exception):
            future.set_exception(self.closes)
        elif self.closes != "never":
            future.set_result(None)
        return SimpleNamespace(future=lambda: future)


class FakeRay:
    def __init__(self, free: int) -> None:
        self.free = free  # GPUs
        self.reserved: list[Any] = []
        self.killed: list[Engine] = []
        self.is_taken = False  # by somebody else, in the last moment

    def actor_class(self, _: type) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda **arguments: Engine(options, arguments))
        )

    def kill(self, handle: Engine, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(handle)

    def reserve(self, name: str, bundles: list[dict[str, float]], *, avoid: Collection[str]) -> Any:
        group = SimpleNamespace(bundles=bundles, name=name, avoid=avoid)
        self.free -= len(bundles)
        self.reserved.append(group)
        if self.is_taken:
            raise DeadlineExceeded("somebody else took them")
        return group

    def find(self, name: str) -> Any:
        for group in self.reserved:
            if group.name == name:
                return group
        raise ValueError("no group has this name")

    def remove(self, group: Any) -> None:
        self.reserved.remove(group)
        self.free += len(group.bundles)

    def slots(self, bundles: list[Any], *, avoid: Collection[str], same_node: bool) -> int:
        return self.free // len(bundles)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(free=2)
    monkeypatch.setattr(launcher, "ray", fake)
    monkeypatch.setattr(launcher, "get_placement_group", fake.find)
    monkeypatch.setattr(launcher, "remove_placement_group", fake.remove)
    monkeypatch.setattr(launcher, "placement", fake)
    monkeypatch.setattr(launcher, "owned", fake)
    parts = SimpleNamespace(TensorHubEngine=object, get_bundle_indices=lambda group, at, count: [3, 1][:count])
    monkeypatch.setattr(launcher, "import_module", lambda _: parts)
    monkeypatch.setattr(launcher, "CLOSE_TIMEOUT_S", 0.01)
    return fake


SHARED = "OpenRLHF's placement group"
FIRST = PlacementGroupSchedulingStrategy(placement_group=SHARED, placement_group_bundle_index=0)


def make(*, gpus: int = 1) -> launcher.EngineLauncher:
    arguments = {"model": "m", "seed": 42, "tensor_parallel_size": gpus, "bundle_indices": None}
    extra = {"backend": "tensorhub", "partial": True, "sync": False}
    made = launcher.EngineLauncher({"num_gpus": 1}, arguments, extra, {"rollout-0": (FIRST, None)})
    return pickle.loads(pickle.dumps(made))  # type: ignore[no-any-return]  # it is sent by value


def test_a_joiner_is_made_as_the_first_one_in_a_group_of_its_own(ray: FakeRay) -> None:
    one = make()
    assert one.slots(()) == 2
    engine = asyncio.run(one.start("rollout-3", 3, ()))
    extra = {"backend": "tensorhub", "partial": True, "sync": False}
    assert engine.arguments == {
        "model": "m",
        "seed": 45,
        "tensor_parallel_size": 1,
        "bundle_indices": None,
        "tensorhub": {**extra, "engine": 3, "joins": True, "spare": False},
    }
    strategy = engine.options.pop("scheduling_strategy")
    assert engine.options == {"num_gpus": 1} and strategy.placement_group is ray.reserved[0]
    assert ray.reserved[0].bundles == [{"GPU": 1, "CPU": 1}] and one.slots(()) == 1
    asyncio.run(one.stop("rollout-3", engine))
    assert engine.called == ["leave"] and ray.killed == [engine] and not ray.reserved
    again = asyncio.run(one.start("rollout-4", 4, ()))
    asyncio.run(make().stop("rollout-4", again))  # by another one: the actor that had it was started again
    assert not ray.reserved
    asyncio.run(one.stop("rollout-3", None))  # again: nothing is there any more


def test_a_spare_is_one_that_is_told_to_join(ray: FakeRay) -> None:
    engine = asyncio.run((one := make()).start("rollout-3", 3, (), spare=True))
    assert engine.arguments["tensorhub"]["spare"]
    asyncio.run(one.join("rollout-3", engine))
    assert engine.called == ["join"]


def test_several_gpus_are_named_to_vllm(ray: FakeRay) -> None:
    engine = asyncio.run(make(gpus=2).start("rollout-1", 1, ("a", "b")))
    assert engine.arguments["bundle_indices"] == [3, 1]
    assert engine.options["scheduling_strategy"].placement_group_bundle_index == 3
    assert ray.reserved[0].avoid == ("a", "b")


def test_its_place_is_taken_before_anything_that_lasts(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet counts on it (fleet/state.py), and vLLM takes many seconds to import."""
    reserved: list[int] = []
    parts = launcher.import_module("openrlhf")
    monkeypatch.setattr(launcher, "import_module", lambda _: reserved.append(len(ray.reserved)) or parts)
    asyncio.run(make().start("rollout-1", 1, ()))
    assert reserved == [1]


def test_the_place_of_a_first_engine_is_taken_by_the_next(ray: FakeRay) -> None:
    one, first = make(), Engine({}, {})
    asyncio.run(one.stop("rollout-0", first))
    assert ray.killed == [first] and one.slots(()) == 3
    engine = asyncio.run(one.start("rollout-1", 1, ()))
    assert engine.options["scheduling_strategy"].placement_group == SHARED and not ray.reserved
    asyncio.run(one.stop("rollout-1", engine))
    assert one.slots(()) == 3


@pytest.mark.parametrize(("there", "room"), [({"rollout-1"}, 3), ({"rollout-0", "rollout-1"}, 2)])
def test_what_stands_for_a_lost_launcher_finds_the_place_of_a_first_engine_that_had_left(
    ray: FakeRay, there: set[str], room: int
) -> None:
    """It had been given to another one, which ended with the launcher's actor: no engine could be started there."""
    again = make()
    again.settle(there)
    again.settle(there)
    assert again.slots(()) == room
    engine = asyncio.run(again.start("rollout-2", 2, ()))
    assert (engine.options["scheduling_strategy"].placement_group == SHARED) == (room == 3)


def test_a_place_that_may_be_on_a_drained_node_is_no_room(ray: FakeRay) -> None:
    """It was counted: starts failed one after another, and those for which there was room later were put off."""
    one, ray.free = make(), 0
    asyncio.run(one.stop("rollout-0", Engine({}, {})))
    assert one.slots(()) == 1
    assert one.slots({"a"}) == 0
    with pytest.raises(UsageError, match="there is no room"):
        asyncio.run(one.start("rollout-1", 1, {"a"}))


@pytest.mark.parametrize("closes", [ActorDiedError(), "never"])
def test_an_engine_that_is_dead_or_hangs_is_ended_all_the_same(ray: FakeRay, closes: Any) -> None:
    one, engine = make(), Engine({}, {}, closes)
    asyncio.run(one.stop("rollout-0", engine))
    assert ray.killed == [engine]


def test_without_room_it_says_so_and_never_waits(ray: FakeRay) -> None:
    one = make()
    ray.free = 0
    with pytest.raises(UsageError, match="there is no room: an engine needs 1 free GPU"):
        asyncio.run(one.start("rollout-1", 1, ()))
    assert not ray.reserved
    ray.free, ray.is_taken = 1, True
    with pytest.raises(DeadlineExceeded, match="somebody else took them"):
        asyncio.run(one.start("rollout-1", 1, ()))
    asyncio.run(one.stop("rollout-1", None))
    assert not ray.reserved, "what was asked for is given back"


def test_what_openrlhf_makes_its_engines_with_is_how_more_are_made() -> None:
    made: list[Engine] = []
    started: list[launcher.EngineLauncher] = []

    def remote_engine(**options: Any) -> Any:
        return SimpleNamespace(remote=lambda **arguments: made.append(Engine(options, arguments)))

    chosen = SimpleNamespace(backend="tensorhub://h:1?run=r", partial=True, sync=False, lora=8, engines=2)
    factory = install.EngineFactory(SimpleNamespace(options=remote_engine), Options(restarts=4), chosen, started.append)
    for number in range(2):  # as create_vllm_engines does
        assert not started
        actor = factory.options(num_cpus=1, num_gpus=1, scheduling_strategy=f"place {number}")
        actor.remote(model="m", seed=42 + number, tensor_parallel_size=1, bundle_indices=None)
    assert [engine.arguments["tensorhub"] for engine in made] == [
        {"backend": chosen.backend, "partial": True, "sync": False, "lora": 8, "engine": number, "joins": False}
        for number in range(2)
    ]
    assert [engine.options["scheduling_strategy"] for engine in made] == ["place 0", "place 1"]
    (one,) = started
    assert one.arguments == {"model": "m", "seed": 42, "tensor_parallel_size": 1, "bundle_indices": None}
    assert one.actor_options["max_restarts"] == 4 and one.actor_options["num_gpus"] == 1
    assert one.places == {"rollout-0": ("place 0", None), "rollout-1": ("place 1", None)}
