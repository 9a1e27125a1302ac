"""The actor of a replica, without an engine: what it makes of vLLM's answers. verl's own part of it is played."""

from __future__ import annotations

import asyncio
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

vllm = pytest.importorskip("vllm")

from ray.exceptions import GetTimeoutError  # noqa: E402
from verl.workers.rollout.replica import RolloutMode, TokenOutput  # noqa: E402

from tensorhub_plugins.core import VersionRefused, version_of  # noqa: E402
from tensorhub_plugins.verl import config  # noqa: E402

with pytest.MonkeyPatch.context() as patch:  # verl looks for a package of this name, and vLLM's for the CPU has another
    there = metadata.version
    patch.setattr(metadata, "version", lambda name: vllm.__version__ if name == "vllm" else there(name))
    from tensorhub_plugins.verl import engine
from tensorhub_plugins.verl.routing import ReplicaLost, _hand_over  # noqa: E402
from tensorhub_plugins.vllm.engine.spans import Spans  # noqa: E402
from tensorhub_plugins.vllm.engine.status import Status  # noqa: E402
from tensorhub_plugins.vllm.ray.owned import OwnedEngine  # noqa: E402


def server(monkeypatch: pytest.MonkeyPatch, stop_reason: str = "completed", spans: str = "split") -> Any:
    """One with version 3, whose engine goes to version 4 after the first two tokens of an answer of five."""
    one = engine.TensorHubServer.__new__(engine.TensorHubServer)
    core = Spans()
    core.settle(3, {})

    async def call_utility_async(method: str, name: str, forget: bool) -> Any:
        assert method == "tensorhub_starts" and forget
        return core.pop(name)

    async def generate(self: Any, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> TokenOutput:
        assert self is one
        one.names.append(request_id)
        one.core.added(f"{request_id}-1a2b3c4d")
        one.core.switched(version_of(1, 4), {f"{request_id}-1a2b3c4d": 2})
        extra = {"global_steps": None}
        return TokenOutput(token_ids=one.tokens, log_probs=None, stop_reason=stop_reason, extra_fields=extra)

    vllms = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call_utility_async))
    owned = OwnedEngine(vllms, "rollout-0/0")
    owned.status = Status(version=3)
    one.__dict__.update(
        _owned=owned,
        core=core,
        names=[],
        tokens=[1, 2, 3, 4, 5],
        worker="rollout-0/0",
        rollout_mode=RolloutMode.STANDALONE,
        options=config.parse({"spans": spans}),
        _gives_back=False,
    )
    monkeypatch.setattr(engine.TensorHubServer.__base__, "generate", generate)
    return one


def ask(one: Any) -> TokenOutput:
    return asyncio.run(one.generate([7, 8], {}, "verls-own-name"))


def test_each_token_is_of_the_version_that_the_engine_core_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl asks all turns of a sample under one name: each has versions of its own all the same."""
    one = server(monkeypatch)
    output = ask(one)
    assert output.extra_fields["tensorhub_spans"] == [(2, 2), (3, 3)] and output.extra_fields["global_steps"] == 2
    whole = _hand_over(output)
    assert (whole.extra_fields["min_global_steps"], whole.extra_fields["max_global_steps"]) == (2, 3)
    assert ask(one).extra_fields["tensorhub_spans"] == [(3, 5)] and len(set(one.names)) == 2
    assert not one.core._starts, "nothing is kept of what was answered"


def test_an_answer_without_tokens_is_of_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = server(monkeypatch, stop_reason="aborted")
    one.tokens = []
    assert ask(one).extra_fields["tensorhub_spans"] == [(2, 0)]
    one.core.added = lambda name: None  # aborted before its engine had heard of it
    assert ask(one).extra_fields["tensorhub_spans"] == [(2, 0)]


@pytest.mark.parametrize("why", ["unknown", "none of the store's"])
def test_an_answer_whose_versions_cannot_be_told_is_asked_elsewhere(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    one = server(monkeypatch)
    if why == "unknown":
        one.core.added = lambda name: None
    else:
        one.core.switched(0, {})
    with pytest.raises(ReplicaLost, match="cannot tell the version of an answer"):
        ask(one)


def test_a_replica_without_weights_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = server(monkeypatch)
    one._owned.status, one._has_router = Status(), True
    with pytest.raises(ReplicaLost, match="no weights yet"):
        ask(one)
    assert not one.names


async def test_where_no_router_of_ours_asks_it_waits_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of the user's, or verl's own, asks no other replica: the sample would be lost, or the run end."""
    one = server(monkeypatch)
    one.engine, one._has_router, one._owned.status = None, False, Status()
    asked = asyncio.create_task(one.generate([7, 8], {}, "r"))
    await asyncio.sleep(0.3)
    assert not asked.done() and not one.names
    one._owned.status = Status(version=3)
    assert (await asked).token_ids == one.tokens
    one._owned.status = Status(refusal=(1, "it has no tensor 'x'"))
    with pytest.raises(VersionRefused, match="version 1 cannot be installed .* it has no tensor 'x'"):
        await one.generate([7, 8], {}, "q")
    one._owned.status = Status()
    asked = asyncio.create_task(one.generate([7, 8], {}, "s"))  # of a server that was started again
    await asyncio.sleep(0)
    one._has_router = True
    with pytest.raises(ReplicaLost, match="no weights yet"):
        await asked


@pytest.mark.parametrize("spans", ["split", "oldest"])
def test_what_a_leaving_replica_broke_off_goes_to_clients_that_go_on_from_there(
    monkeypatch: pytest.MonkeyPatch, spans: str
) -> None:
    one = server(monkeypatch, stop_reason="aborted", spans=spans)
    one._gives_back = True
    if spans == "split":
        assert ask(one).extra_fields["tensorhub_spans"] == [(2, 2), (3, 3)]
    else:
        with pytest.raises(ReplicaLost, match="leaves the run"):
            ask(one)


async def test_a_spare_joins_the_store_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything before that done: what is left are the weights."""
    did: list[str] = []
    busy = [True]  # Ray's head: it does not answer within the minute that Ray gives it

    async def store(*_: Any) -> Any:
        if busy.pop() if busy else False:
            raise GetTimeoutError("There was timeout in getting the actor handle")
        did.append("hub")
        return config.parse({"hub": "tcp://h:1", "run": "r"}), None

    async def follow(*_: Any) -> None:
        did.append("follow")

    async def warm_up() -> None:
        # What compiles may answer nothing for minutes: a spare that said that it waits would pass for one that hangs.
        assert not (await one.tensorhub_heartbeat())["spare"]
        did.append("warm up")

    async def nothing() -> None: ...

    monkeypatch.setattr(engine, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(engine.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node-1"))
    for kind in (engine.TensorHubServer, engine.SpareServer):
        one = server(monkeypatch)
        one.__class__, one._store, one._joining, one._name, one.engine = kind, store, lambda _: {}, "rollout-0", None
        one.replica_rank, one._launch, one._owned.follow, one._owned.watch = 0, None, follow, nothing
        one._owned.warm_up, is_spare = warm_up, kind is engine.SpareServer
        one._owned.status, one._joins, one._waits = Status(), asyncio.Event(), False
        did.clear()
        busy[:] = [True]
        if is_spare:
            following = asyncio.create_task(one._start_following(one._owned))
            while "hub" not in did:
                await asyncio.sleep(0)
            beat = await one.tensorhub_heartbeat()
            assert (beat["spare"], beat["ready"], did) == (True, False, ["warm up", "hub"])
            await one.tensorhub_join()
            await one.tensorhub_join()  # again
            await following
        else:
            one._joins.set()
            await one._start_following(one._owned)
        assert did == [*(["warm up"] if is_spare else []), "hub", "follow"]
        assert not (await one.tensorhub_heartbeat())["spare"]
