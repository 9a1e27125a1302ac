"""Requests outlive their replica: the router actor's class and its handles, with actors made of plain coroutines."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the router is a subclass of verl's")
ray = pytest.importorskip("ray")

from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl_router import Actor, Router, Server, until  # noqa: E402

from tensorhub_plugins.core import VersionRefused  # noqa: E402
from tensorhub_plugins.verl import routing  # noqa: E402
from tensorhub_plugins.verl.routing import Handle, ReplicaLost, TensorHubRouter  # noqa: E402
from tensorhub_plugins.vllm.ray import reporting, rotation  # noqa: E402
from tensorhub_plugins.vllm.ray.actor_handles import opened, sealed  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.types import Entry  # noqa: E402


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(routing, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(routing, "JOIN_INTERVAL_S", 0.02)
    monkeypatch.setattr(reporting, "REPORT_INTERVAL_S", 0.02)


def seen_by(router):
    """What the fleet is told: by its names; and how many have none yet."""
    now = router.real.seen()
    return {one.name: one for one in now.seen}, now.unnamed


async def ask(handle, prompt=(7, 8)):
    # as verl's client does it
    return await handle.generate.remote(request_id="vllm-id", prompt_ids=list(prompt), sampling_params={})


async def test_a_dead_replicas_request_goes_to_another():
    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    handle = await router.handle("r1")
    first, other = (a, b) if handle._at[0] == "a" else (b, a)
    first.dead = ray.exceptions.ActorDiedError()
    output = await ask(handle)
    assert output.token_ids == [0, 1]
    assert other.asked == 1
    assert list(router.real._inflight_requests) == [other.name]  # no new requests for the dead one


async def test_a_frozen_replicas_request_goes_to_another_and_it_returns_when_it_has_caught_up():
    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    handle = await router.handle("r1")
    frozen, other = (a, b) if handle._at[0] == "a" else (b, a)
    frozen.frozen.clear()
    output = await ask(handle)
    assert output.token_ids == [0, 1] and other.asked == 1
    for _ in range(10):
        assert (await router.handle("new"))._at[0] == other.name
        router.real._request_id_to_server.clear()
    other.version = 9
    await until(lambda: router.real.members.all[other.name].version == 9)
    frozen.frozen.set()  # it wakes up with version 1
    await until(lambda: router.real.members.all[frozen.name].catch_up_to == 9)
    assert frozen.name not in router.real._inflight_requests
    frozen.version = 9
    await until(lambda: frozen.name in router.real._inflight_requests)


@pytest.mark.parametrize("what", ["server", "engine"])
async def test_the_only_replica_hangs_and_is_ended_and_started_again(what, monkeypatch, caplog):
    killed = []

    def kill(handle, no_restart):
        killed.append((handle.name, no_restart))
        handle.dead, handle.tells = ray.exceptions.ActorUnavailableError("Ray starts it again", None), {}
        handle.frozen.set()

    monkeypatch.setattr(ray, "kill", kill)
    a = Server("rollout-0")
    a.tells = {"engine_timeout_s": 0.6}
    router = Router({"a": a})
    handle = await router.handle("r")
    stuck = asyncio.ensure_future(ask(handle))
    if what == "server":
        a.frozen.clear()
    else:
        a.tells["silent_s"] = 99.0
    await until(lambda: killed)
    assert a.dead and "a" not in router.real._inflight_requests and router.real.members.all["a"].is_lost
    a.dead = None
    assert (await stuck).token_ids == [0, 1]
    await until(lambda: "a" in router.real._inflight_requests)
    await asyncio.sleep(0)
    assert killed == [("rollout-0", False)]
    said = [one.getMessage() for one in caplog.records]
    late = "rollout-0/0 has not answered for 0 s, and no other one is ready; it is ended and started again"
    assert late == said[0].partition(" after")[0]
    assert any("rollout-0/0 hangs (no answer for" in one for one in said)


async def test_what_a_request_of_a_former_epoch_says_takes_no_replica_out():
    router = Router({"a": Server("rollout-0")})
    epoch = (await router.handle("r"))._at[2]
    await router.report_lost("a", epoch - 1, "ActorUnavailableError")
    assert router.real.members.all["a"].in_rotation and "a" in router.real._inflight_requests
    await router.report_lost("a", epoch, "ActorUnavailableError")  # the control
    assert router.real.members.all["a"].is_lost and "a" not in router.real._inflight_requests


async def test_many_requests_ask_one_question():
    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    a.frozen.clear()
    requests = [asyncio.ensure_future(ask(await router.handle(f"r{i}"), (7, i))) for i in range(40)]
    outputs = await asyncio.gather(*requests)
    assert len(outputs) == 40 and b.asked == 40
    assert router.questions < 10


@pytest.mark.parametrize("error", ["ActorUnschedulableError", "OutOfMemoryError"])
async def test_a_replica_on_a_lost_node_is_asked_no_more(error, caplog):
    """Ray says so with an error that is no RayActorError, for ever; once it is enough, and not in a traceback. So does
    it of one that its memory monitor has ended and that is not started again."""
    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    handle = await router.handle("r")
    lost = a if handle._at[0] == "a" else b
    lost.dead = getattr(ray.exceptions, error)("the node is dead, or short of memory")
    assert (await ask(handle)).token_ids == [0, 1]  # by the other one
    await until(lambda: router.real._beats[lost.name].done())
    assert router.real.members.all[lost.name].is_gone
    assert lost.name not in router.real._inflight_requests
    told = [record for record in caplog.records if "tensorhub" in record.name]
    assert [record.exc_info for record in told] == [None] * len(told)
    assert sum("will not come back" in record.getMessage() for record in told) == 1


async def test_a_replica_that_is_started_again_is_asked_on():
    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    a.dead = ray.exceptions.ActorDiedError()
    await until(lambda: router.real.members.all["a"].is_lost)
    a.dead = ray.exceptions.ActorUnavailableError("it is being started", None)
    for _ in range(10):
        await asyncio.sleep(routing.HEARTBEAT_INTERVAL_S)
    a.dead = None
    await until(lambda: "a" in router.real._inflight_requests)


async def test_what_cannot_be_explained_is_said_once(caplog):
    a = Server("a")
    router = Router({"a": a})
    await router.handle("warm up")
    a.dead = ValueError("a bug")
    for _ in range(10):
        await asyncio.sleep(routing.HEARTBEAT_INTERVAL_S)
    assert sum("heartbeat of a failed" in record.getMessage() for record in caplog.records) == 1


async def test_requests_under_way_are_counted_while_their_replica_gets_no_new_ones():
    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    for request in range(6):
        await router.handle(f"r{request}")
    before = await router.real.get_inflight_count("a")
    a.broken = True
    await until(lambda: "a" not in router.real._inflight_requests)
    assert await router.real.get_inflight_count("a") == before > 1
    mine = next(name for name, at in router.real._request_id_to_server.items() if at == "a")
    await router.real.release_server("a", mine)
    await router.real.release_server("a", mine)  # twice is once
    a.broken = False
    await until(lambda: "a" in router.real._inflight_requests)
    assert router.real._inflight_requests["a"] == before - 1


async def test_validation_waits_for_all_replicas_in_rotation(monkeypatch):
    a, b, c = Server("a", version=3), Server("b", version=3), Server("c", version=3)
    router = Router({"a": a, "b": b, "c": c})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 3)
    waiting = asyncio.ensure_future(router.real.wait_for_version(4, 20.0))
    a.version = 4
    await until(lambda: router.real.members.all["a"].version == 4)
    assert not waiting.done()
    b.dead = ray.exceptions.ActorDiedError()  # a lost one delays nobody
    c.version = 4
    assert await waiting == []
    assert await router.real.wait_for_version(5, 0.1) == ["a/0 has 4", "c/0 has 4"]
    a.tells = c.tells = {"stays": True}  # pinned: it would be waited for in vain
    assert await router.real.wait_for_version(5, 20.0) == []


async def test_the_fleets_roster_is_carried_out():
    a = Server("rollout-0", version=4)
    router = Router({"10.0.0.1:80": a})
    await router.handle("warm up")
    (seen,), unnamed = seen_by(router)[0].values(), seen_by(router)[1]
    assert (seen.name, seen.handle, seen.ready, seen.version, seen.in_flight) == ("rollout-0", a, True, 4, 1)
    assert unnamed == 0

    # A joiner is known by its name, and gets nothing before it has what the others have.
    b = Server("rollout-1", version=3)
    names = {"rollout-0": "10.0.0.1:80"}
    both = [Entry("rollout-0", a, "first"), Entry("rollout-1", b, "joined")]
    router.real.apply(names, both)
    await until(lambda: router.real.members.all["rollout-1"].version == 3)
    told, _ = seen_by(router)
    assert not told["rollout-1"].ready and "rollout-1" not in router.real._inflight_requests
    b.version = 4
    await until(lambda: "rollout-1" in router.real._inflight_requests)

    # Drained: nothing new, also not by a session that was there; what it has is counted.
    names["rollout-1"] = "rollout-1"
    router.real.apply(names, [Entry("rollout-0", a, "first", draining=True), both[1]])
    assert (await router.handle("warm up"))._at[0] == "rollout-1"
    told, _ = seen_by(router)
    assert (told["rollout-0"].draining, told["rollout-0"].in_flight) == (True, 1)
    assert told["rollout-0"].ready  # it answers what it has

    # Out of the roster: what is under way there goes on elsewhere.
    a.frozen.clear()
    stuck = asyncio.ensure_future(ask(Handle("10.0.0.1:80", a, 0, router, "old")))
    while not a.asked:
        await asyncio.sleep(0.01)
    router.real.apply(names, both[1:])
    assert (await stuck).token_ids == [0, 1] and b.asked == 1
    assert list(seen_by(router)[0]) == ["rollout-1"]


@pytest.mark.parametrize("stands_still", [True, False], ids=["router", "spare"])
async def test_a_spare_is_not_silent_while_the_router_stands_still(monkeypatch, stands_still):
    """The second: the control."""
    router = Router({"10.0.0.1:80": Server("rollout-0")})
    await router.handle("warm up")
    spare = Server("rollout-1", version=0)
    spare.tells = {"spare": True, "timeout_s": 15.0}
    router.real.apply({"rollout-0": "10.0.0.1:80"}, [Entry("rollout-1", spare, "spare")])
    await until(lambda: router.real.members.all["rollout-1"].is_spare)
    ahead, monotonic = 0.0, routing.time.monotonic
    for module in (routing, rotation):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: monotonic() + ahead))
    for _ in range(1 if stands_still else 10):
        ahead += 20.0 if stands_still else 2.0
        told, _ = seen_by(router)
    assert told["rollout-1"].spare == stands_still


async def test_all_leave_and_another_one_joins(monkeypatch):
    # An empty roster was taken for none: what had been ended was kept, and called lost, until another one had started.
    class Fleet(Actor):
        told, roster = None, ()

        async def report(self, seen, waiting, unnamed):
            self.told = {one.name for one in opened(seen)}
            return sealed(self.roster)

    fleet, a, b = Fleet(), Server("rollout-0", version=4), Server("rollout-1", version=4)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(reporting.fleet, "of_this_job", lambda: fleet)
    monkeypatch.setattr(TensorHubRouter, "_announce", lambda self: None)
    fleet.roster = [Entry("rollout-0", a, "first")]
    router = Router({"10.0.0.1:80": a})
    await router.handle("warm up")
    fleet.roster = []
    await until(lambda: fleet.told == set())
    assert not router.real._inflight_requests
    fleet.roster = [Entry("rollout-1", b, "joined")]
    assert (await router.handle("next"))._at[0] == "rollout-1"


async def test_silence_is_noticed_after_rays_head_has_not_answered(monkeypatch):
    """The task that notices it, and ends what hangs, ended with Ray's error, for the rest of the run."""
    asked = []

    def get_actor(name):
        asked.append(name)
        raise ray.exceptions.GetTimeoutError("the GCS server is dead or under high load")

    a, b = Server("a"), Server("b")
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(reporting.fleet, "of_this_job", lambda: None)
    await until(lambda: asked)
    a.frozen.clear()
    await asyncio.wait_for(until(lambda: list(router.real._inflight_requests) == ["b"]), 5.0)


async def test_one_that_leaves_is_not_lost(monkeypatch):
    events = []
    monkeypatch.setattr(rotation, "record", lambda event, **more: events.append((event, more["worker"])))
    a, b, c = Server("rollout-0"), Server("rollout-1"), Server("rollout-2")
    router = Router({"a": a, "b": b, "c": c})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 3)
    names = {"rollout-0": "a", "rollout-1": "b", "rollout-2": "c"}
    here = [Entry("rollout-0", a, "first"), Entry("rollout-2", c, "first")]
    router.real.apply(names, [*here, Entry("rollout-1", b, "first", draining=True)])
    b.dead = ray.exceptions.ActorDiedError()  # it has been ended, a moment before the roster says so
    await until(lambda: seen_by(router)[0]["rollout-1"].lost == "gone")  # the fleet is told
    assert (await router.real.figures())["tensorhub/replicas/lost"] == 0.0
    assert (await router.real.get_status())["lost"] == [] and events == []
    router.real.apply(names, here)
    assert events == [("replica_left", "rollout-1/0")]
    c.dead = ray.exceptions.ActorDiedError()  # nobody has asked that one to go
    await until(lambda: router.real.members.all["c"].is_lost)
    assert (await router.real.figures())["tensorhub/replicas/lost"] == 1.0
    assert (await router.real.get_status())["lost"] == ["c"] and events[1:] == [("replica_lost", "rollout-2/0")]


async def test_replicas_that_verl_moves_in_and_out_are_not_the_fleets():
    a, b = Server("rollout-0"), Server("rollout-1")
    b.tells = {"follows": False}
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    assert list(seen_by(router)[0]) == ["rollout-0"]
    unheard = Router({"a": Server("rollout-0")})
    unheard.real._start()
    assert seen_by(unheard) == ({}, 1)


BYTES = {"same_host": 100.0, "near": 0.0, "far": 0.0, "rdma": 0.0, "wire": 90.0}


async def test_the_trainers_log_says_how_the_replicas_do():
    a, b = Server("a", version=4), Server("b", version=3)
    a.tells = {"pull_s": 0.5, "pause_s": 0.1, "sources": {"trainer/0": 100}}
    b.tells = {"pull_s": 0.2, "pause_s": 0.3, "sources": {"a/0": 100}, "ways": {"same_host shm": 100, "wire": 90}}
    router = Router({"a": a, "b": b, "c": Server("c", version=0)})
    await router.handle("warm up")
    await until(lambda: len(router.real._inflight_requests) == 2)
    told = await router.real.figures()
    assert 0.0 < told["tensorhub/last_pull_age_s"] < 30.0
    assert {**told, "tensorhub/last_pull_age_s": 0.0} == {
        "tensorhub/replicas/ready": 2.0,
        "tensorhub/replicas/lost": 0.0,
        "tensorhub/replicas/refused": 0.0,
        "tensorhub/version_lag/max": 1.0,
        "tensorhub/version_lag/mean": 0.5,
        "tensorhub/last_pull_age_s": 0.0,
        "tensorhub/pull/seconds_max": 0.5,
        "tensorhub/pause/seconds_max": 0.3,
        "tensorhub/pull/share_from_peers": 0.5,
        **{f"tensorhub/pull/bytes_{name}": size for name, size in BYTES.items()},
    }


async def test_an_error_of_the_request_itself_is_not_retried():
    a = Server("a")
    router = Router({"a": a})
    handle = await router.handle("r")
    a.dead = ValueError("prompt too long")
    with pytest.raises(ValueError, match="prompt too long"):
        await ask(handle)
    assert a.asked == 1


async def test_a_request_that_kills_replicas_ends(monkeypatch):
    monkeypatch.setattr(routing, "RETRIES_MAX", 2)

    class Poisoned(Server):
        async def generate(self, *args, **kwargs):
            self.asked += 1
            raise ReplicaLost("died of it")

    a = Poisoned("a")
    router = Router({"a": a})
    with pytest.raises(RuntimeError, match="lost with 3 replicas"):
        await ask(await router.handle("r"))
    assert a.asked == 3


async def test_nobody_is_ready(monkeypatch):
    monkeypatch.setattr(routing, "NO_REPLICA_TIMEOUT_S", 0.1)
    router = Router({"a": Server("a", version=0)})
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await router.handle("r")


async def test_a_replica_that_works_at_its_first_version_is_waited_for(monkeypatch):
    """The control above stands still."""
    monkeypatch.setattr(routing, "NO_REPLICA_TIMEOUT_S", 0.5)
    monkeypatch.setattr(routing, "HEARTBEAT_INTERVAL_S", 0.01)
    server = Server("a", version=0)
    server.tells = {"idle_s": -60.0}  # as if it went on for a minute
    router = Router({"a": server})
    router.real._start()
    while not router.real.members.worked_at:
        await asyncio.sleep(0)
    asked = asyncio.create_task(router.handle("r"))
    done, _ = await asyncio.wait({asked}, timeout=0.8)
    assert not done
    server.version = 1
    await asyncio.wait_for(asked, 10)


async def test_replicas_that_work_for_ever_without_a_result_are_not_waited_for(monkeypatch):
    """Each update fails, and is tried again."""
    monkeypatch.setattr(routing, "NO_REPLICA_TIMEOUT_S", 0.02)
    server = Server("a", version=0)
    server.tells = {"idle_s": -60.0}
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await asyncio.wait_for(Router({"a": server}).handle("r"), 10)


def test_a_sample_says_first_and_last_to_the_plain_client():
    output = TokenOutput(
        token_ids=[1, 2, 3],
        extra_fields={"global_steps": 4, "tensorhub_spans": [(4, 1), (5, 2)], "tensorhub_split": False},
    )
    told = routing._hand_over(output).extra_fields
    assert (told["min_global_steps"], told["max_global_steps"], told["global_steps"]) == (4, 5, 4)
    assert not [name for name in told if name.startswith("tensorhub")]


WHY = "tensor 'layers.0.mlp' is unknown"


async def test_a_version_that_all_replicas_refuse_ends_what_waits_for_it():
    a, b = Server("a", version=0), Server("b", version=0)
    a.tells = {"refusal": (1, WHY)}
    router = Router({"a": a, "b": b})
    waiting = [
        asyncio.ensure_future(wait)
        for wait in (router.handle("r"), router.real.wait_for_any(1, 20.0), router.real.wait_for_version(1, 20.0))
    ]
    await until(lambda: [one.name for one in router.real.members.refusing()] == ["a"])
    assert not any(wait.done() for wait in waiting)  # the other one may take it
    b.tells = {"refusal": (1, WHY)}
    for wait in waiting:
        with pytest.raises(VersionRefused, match=f"version 1 cannot be installed in any of 2 .*: a/0: {WHY}"):
            await wait
    b.version, b.tells = 2, {}  # the trainer has published another one
    assert await router.real.wait_for_any(2, 20.0)
    assert (await router.handle("r"))._at[0] == "b"


async def test_replicas_that_refuse_and_have_another_version_go_on():
    a, b = Server("a", version=3), Server("b", version=3)
    a.tells = b.tells = {"refusal": (4, WHY), "stays": True}
    router = Router({"a": a, "b": b})
    await router.handle("warm up")
    assert await router.real.wait_for_any(4, 20.0) and await router.real.wait_for_version(4, 20.0) == []
    await until(lambda: len(router.real._inflight_requests) == 2)
    told = await router.real.figures(6)
    assert (told["tensorhub/replicas/refused"], told["tensorhub/version_lag/mean"]) == (0.0, 3.0)
    assert (await router.real.figures(4))["tensorhub/replicas/refused"] == 2.0


async def test_who_waits_for_a_version_does_not_wait_for_the_next_heartbeat(monkeypatch):
    monkeypatch.setattr(routing, "HEARTBEAT_INTERVAL_S", 1000.0)
    a = Server("a", version=3)
    router = Router({"a": a})
    await router.handle("warm up")
    a.version = 4
    assert await router.real.wait_for_version(4, 20.0) == []
    a.version = 5
    first, second = (asyncio.ensure_future(router.real.wait_for_version(n, 20.0)) for n in (5, 6))
    assert await first == [] and not second.done()  # and goes on looking for the other
    a.version = 6
    assert await second == []
