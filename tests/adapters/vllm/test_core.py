"""What another client asks of an engine's core while our update has stopped it, and which versions it tells."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreRequestType
from vllm_cores import TIMEOUT_S, EngineCore, engine, ours, theirs
from vllm_engines import wait_until

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.vllm.engine import core_follower
from tensorhub_plugins.vllm.engine.caches import Caches, StaleCaches
from tensorhub_plugins.vllm.engine.core import INSTALL, Core, before_shutdown
from tensorhub_plugins.vllm.engine.core_follower import _stand_still, attach
from tensorhub_plugins.vllm.engine.spans import PREFIX

__all__ = ["engine"]  # a fixture


def test_a_resume_of_another_client_waits_for_the_end_of_our_update(engine: Any) -> None:
    """It came between the pause and the install: the engine computed on, with requests that the install forgot."""
    ours(engine, "pause")
    asked = theirs(engine, engine.resume_scheduler)
    assert not asked.done() and engine.paused
    ours(engine, "install", "resume")
    assert asked.result(TIMEOUT_S) is None
    assert engine.log == ["pause keep", "tensorhub_install", "resume", "resume"]


def test_a_pause_of_another_client_begins_when_our_update_has_ended(engine: Any) -> None:
    ours(engine, "pause", "install")
    asked = theirs(engine, lambda: engine.pause_scheduler("wait"))
    assert not asked.done()
    ours(engine, "resume")
    asked.result(TIMEOUT_S)
    assert engine.log == ["pause keep", "tensorhub_install", "resume", "pause wait"] and engine.paused
    with pytest.raises(UsageError, match="another client has paused"):
        ours(engine, "pause")


def test_without_an_update_other_clients_are_served_at_once(engine: Any) -> None:
    assert theirs(engine, lambda: engine.pause_scheduler("abort")).done() and engine.core.is_paused_by_another
    assert theirs(engine, engine.resume_scheduler).done() and not engine.core.is_paused_by_another
    ours(engine, "pause")
    assert engine.paused and not engine.core.is_paused_by_another  # the update has
    ours(engine, "install", "resume")
    assert theirs(engine, lambda: engine.pause_scheduler("abort")).done()
    assert engine.log[:2] == ["pause abort", "resume"] and engine.log[-1] == "pause abort"


def test_while_the_weights_are_broken_others_hear_why(engine: Any) -> None:
    """An install has failed half way, and the engine stays paused until one succeeds: nobody waits for that."""
    ours(engine, "pause")
    engine.broken, engine.resumes = True, False
    early = theirs(engine, engine.resume_scheduler)
    ours(engine, "install")
    with pytest.raises(UsageError, match="broken"):
        early.result(TIMEOUT_S)
    with pytest.raises(UsageError, match="broken"):
        theirs(engine, engine.resume_scheduler)
    engine.broken, engine.resumes = False, True
    ours(engine, "install")  # the next version: it is ours again until it runs
    late = theirs(engine, engine.resume_scheduler)
    assert not late.done() and engine.paused
    ours(engine, "resume")
    assert late.result(TIMEOUT_S) is None and not engine.paused


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_pause_of_another_client_while_the_weights_are_broken_lasts(engine: Any, early: bool, resumes: bool) -> None:
    """It was answered, and the next version ended it."""
    ours(engine, "pause")
    engine.broken, engine.resumes = True, False
    asked = theirs(engine, lambda: engine.pause_scheduler("abort")) if early else None
    ours(engine, "install")
    asked = asked or theirs(engine, lambda: engine.pause_scheduler("abort"))
    assert asked.result(TIMEOUT_S) is None and engine.log[-1] == "pause abort"  # it aborts what there is
    if resumes:  # the control: that client does not want it to stand still any more
        with pytest.raises(UsageError, match="broken"):
            theirs(engine, engine.resume_scheduler)
    assert not engine.core.is_paused_by_another  # it stands still for its weights first
    engine.broken, engine.resumes = False, True
    ours(engine, "install", "resume")
    assert engine.paused is engine.core.is_paused_by_another is not resumes
    theirs(engine, engine.resume_scheduler)
    ours(engine, "pause", "install", "resume")  # it was of that time only
    assert not engine.paused


@pytest.mark.parametrize("theirs_last", ["resume", "pause", None])
def test_weights_that_another_client_has_lost_are_mended(engine: Any, theirs_last: str | None) -> None:
    """A reload that failed half way, or sleep(level=2): nobody could resume it, and no update began."""
    assert asyncio.run(engine.core.look()) == (0, False)
    health: list[str | None] = [None]
    rpc, engine.resumes = engine.model_executor.collective_rpc, False
    engine.model_executor.collective_rpc = lambda method, args=(): (
        health if method == "tensorhub_health" else rpc(method, args)
    )
    if theirs_last is None:
        _stand_still(engine)
        _stand_still(engine)
    else:
        theirs(engine, lambda: engine.pause_scheduler("keep"))
    if theirs_last == "resume":  # as a wake-up does
        with pytest.raises(UsageError, match="broken"):
            theirs(engine, engine.resume_scheduler)
    assert asyncio.run(engine.core.look()) == (0, False)  # the control: whole weights, of an engine that is paused
    health[0], engine.model_executor.is_sleeping = "lost", True
    assert asyncio.run(engine.core.look()) == (0, False)  # not awake yet
    engine.model_executor.is_sleeping = False
    assert asyncio.run(engine.core.look()) == (0, True)
    health[0], engine.resumes = None, True
    ours(engine, "install", "resume")
    assert engine.paused is (theirs_last == "pause") and engine.log.count("pause keep") == 1
    assert asyncio.run(engine.core.look()) == (1, False)


def test_a_rank_whose_weights_count_as_lost_stands_still_until_an_update_has_mended_them(engine: Any) -> None:
    engine.resumes = False  # as vLLM's, while they are broken
    ours(engine, "lose")
    assert engine.log == ["tensorhub_lose", "pause keep"] and engine.paused
    with pytest.raises(UsageError, match="broken"):
        theirs(engine, engine.resume_scheduler)
    engine.resumes = True
    ours(engine, "install", "resume")
    assert not engine.paused


def test_nothing_ends_on_broken_weights_so_nobody_waits_for_that(engine: Any) -> None:
    """vLLM lets requests run on where a pause is to wait for their end."""
    ours(engine, "pause")
    engine.broken = True
    ours(engine, "install")
    engine.scheduler.running = ["a"]
    with pytest.raises(UsageError, match="nothing to wait for ends"):
        theirs(engine, lambda: engine.pause_scheduler("wait"))
    engine.scheduler.running = []
    assert theirs(engine, lambda: engine.pause_scheduler(mode="wait")).done()


def test_nobody_waits_for_an_install_that_never_answered(engine: Any) -> None:
    def gone(method: str, args: Any = ()) -> list[Any]:
        raise RuntimeError("the workers are gone")

    ours(engine, "pause")
    engine.model_executor.collective_rpc = gone
    early = theirs(engine, engine.resume_scheduler)
    with pytest.raises(RuntimeError, match="gone"):
        ours(engine, "install")
    assert early.result(TIMEOUT_S) is None and theirs(engine, engine.resume_scheduler).done()


def test_a_pause_that_failed_on_another_rank_lets_go_of_this_one(engine: Any) -> None:
    """There another client was quicker: this rank is paused for it, too, and waits for its resume."""
    ours(engine, "pause")
    asked = theirs(engine, lambda: engine.pause_scheduler("keep"))
    ours(engine, "let_go")
    assert asked.result(TIMEOUT_S) is None and engine.log == ["pause keep"]
    assert theirs(engine, engine.resume_scheduler).done() and not engine.paused


def test_a_pause_that_fails_leaves_the_engine_running(engine: Any) -> None:
    """It stayed paused, and held: nobody else could resume it, and the follower waited for somebody to do so."""
    engine.forgets = False
    with pytest.raises(StaleCaches, match="connector"):
        ours(engine, "pause")
    assert theirs(engine, lambda: engine.pause_scheduler("keep")).done()
    assert engine.log == ["pause keep", "resume", "pause keep"]


def test_what_nobody_waits_for_any_more_is_not_done(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of another client took longer: the pause came when nobody would resume, and its answer ended the loop."""
    monkeypatch.setattr("tensorhub_plugins.vllm.engine.core.LOOP_TIMEOUT_S", 0.01)
    begun, end = threading.Event(), threading.Event()

    def take_long() -> None:
        begun.set()
        end.wait(TIMEOUT_S)

    long = engine.core._queue(take_long)
    assert begun.wait(TIMEOUT_S)
    with pytest.raises(TimeoutError):
        ours(engine, "pause")
    end.set()
    long.result(TIMEOUT_S)
    monkeypatch.undo()
    assert theirs(engine, lambda: "served").result(TIMEOUT_S) == "served"
    assert engine.log == [] and not engine.paused


def test_an_install_that_has_begun_is_waited_for_however_long_it_takes(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 900 s its follower took it for failed, and began another one behind it."""
    monkeypatch.setattr("tensorhub_plugins.vllm.engine.core.LOOP_TIMEOUT_S", 0.01)
    begun, end = threading.Event(), threading.Event()

    def take_long(*_: Any, **__: Any) -> list[Any]:
        begun.set()
        end.wait(TIMEOUT_S)
        return ["done"]

    def queue(action: Callable[[], Any]) -> Future[Any]:
        done = original(action)
        assert begun.wait(TIMEOUT_S)  # so it has begun before anybody waits; the control above has not
        return done

    engine.collective_rpc, original = take_long, engine.core._queue
    monkeypatch.setattr(engine.core, "_queue", queue)
    asked: list[Any] = []
    asker = threading.Thread(target=lambda: asked.append(asyncio.run(engine.core.rpc("tensorhub_poll"))))
    asker.start()
    asker.join(0.2)
    assert asker.is_alive()
    end.set()
    asker.join(TIMEOUT_S)
    assert asked == [["done"]]


def test_who_leaves_during_an_update_is_noted(engine: Any) -> None:
    """They were counted among the requests that an update has lost."""
    running = SimpleNamespace(num_output_tokens=0, status=SimpleNamespace(name="RUNNING"))
    engine.scheduler.requests = dict.fromkeys("abcd", running)
    engine.abort_requests(["a"])
    ours(engine, "pause")
    engine.abort_requests(["b", "x"])
    del engine.scheduler.requests["c"]  # nobody has aborted it
    assert engine.core.departed() == ["b"]
    assert engine.core.departed() == []
    ours(engine, "install", "resume")
    engine.abort_requests(["d"])
    assert engine.core.departed() == []


# --- which version tokens came from ---


class Serving(EngineCore):
    """With requests, of which each gets a token in each step; workers have no version of the store's at first."""

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        self.scheduler.requests[request[0].request_id] = SimpleNamespace(num_output_tokens=0)

    def _rpc(self, method: str, args: Any = ()) -> list[Any]:
        return [(0, 0) if method == "tensorhub_weights" else None] if method != INSTALL else super()._rpc(method, args)

    def serve(self, *names: str) -> None:
        for name in names:
            asked = SimpleNamespace(request_id=f"{name}-1a2b3c4d")
            self._handle_client_request(EngineCoreRequestType.ADD, (asked, 0))

    def step(self) -> None:
        for request in self.scheduler.requests.values():
            request.num_output_tokens += 1


def serving(cores: type[Serving] = Serving) -> Any:
    core = cores()
    attach(core, SimpleNamespace(load_config=SimpleNamespace(load_format="auto")), owned=True)
    return core


NAMES = [f"{PREFIX}{number:032x}" for number in range(1024)]


@pytest.mark.parametrize("asked", ["by the owner", "by its name", "by our own follower"])
def test_tokens_are_of_the_new_version_from_the_very_install_on(asked: str) -> None:
    core = serving()
    core.serve(NAMES[0])
    core.step()
    core.broken = True
    core.collective_rpc(INSTALL, None, (1, 60.0), None)
    core.step()
    assert core.tensorhub_starts(NAMES[0]) == [((0, 0), [(0, 0)])] and core.weights == "none"  # it has failed
    core.broken = False
    if asked == "by the owner":
        core.collective_rpc(INSTALL, None, (2, 60.0), None)
    elif asked == "by its name":
        core.collective_rpc(INSTALL, None, (), {"version": 2})
    else:
        core.loop.start()
        ours(SimpleNamespace(core=Core(core, Caches(core))), "install")
        core.input_queue.put(None)
        core.loop.join()
    version = 1 if asked == "by our own follower" else 2
    core.serve(NAMES[1])
    core.step()
    assert core.tensorhub_starts(NAMES[0]) == [((0, 0), [(0, 0), (version, 2)])]
    assert core.tensorhub_starts(NAMES[1], True) == [((0, 0), [(version, 0)])] and core.weights == str(version)
    assert core.tensorhub_starts(NAMES[1]) == []


class Changing(Serving):
    """With weights that a function of another client's changes, and loses where it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.fails, self.lost, self.forgotten = 1, False, "", 0

    def _rpc(self, method: Any, args: Any = ()) -> list[Any]:
        if method == "tensorhub_guard" and self.lost:
            raise RuntimeError(self.lost)
        if method is not print:
            known = {"tensorhub_weights": (self.version, 0), "tensorhub_health": self.lost or None}
            return [known[method]] if method in known else super()._rpc(method, args)
        self.version, self.lost = (1, "half way") if self.fails else (0, "")
        if self.fails:
            raise RuntimeError("print failed")
        return [None]

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.forgotten += 1
        return super().reset_prefix_cache(running, connector)


@pytest.mark.parametrize("fails", [False, True])
def test_an_owned_engine_knows_what_a_function_of_another_client_has_made_of_its_weights(fails: bool) -> None:
    """What it then answered was said to be of the version before, with that one's caches; or its next step ended it,
    also when a client had resumed what stood still for that."""
    core = serving(Changing)
    core.collective_rpc(INSTALL, None, (1, 60.0), None)
    core.serve(NAMES[0])
    core.step()
    core.collective_rpc("get_model")  # the control
    assert (core.weights, core.forgotten, core.paused) == ("1", 0, False)
    core.fails = fails
    with pytest.raises(RuntimeError, match="print failed") if fails else nullcontext():
        core.collective_rpc(print)
    assert (core.weights, core.forgotten, core.paused) == ("none", 1, fails)
    with pytest.raises(RuntimeError, match="half way") if fails else nullcontext():
        core.resume_scheduler()
    assert core.paused == fails
    core.step()
    assert core.tensorhub_starts(NAMES[0]) == [((0, 0), [(1, 0), (0, 1)])]


# --- following, as the owner says ---


class Owned(Serving):
    """With one worker, which joins the store when it is told to, and takes every version."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.cannot = False, ""

    def _rpc(self, method: str, args: Any = ()) -> list[Any]:
        said = {"state": "ready", "version": None, "broken": None, "error": None}
        weights = (0 if self.joined else None, 0)
        told = {"tensorhub_weights": weights, "tensorhub_health": None, "tensorhub_poll": said}
        told["tensorhub_guard"] = None
        if method in told:
            return [told[method]]
        self.log.append(method)
        if method == "tensorhub_connect":
            if self.cannot:
                raise RuntimeError(self.cannot)
            self.joined = True
        return [{"installed": True, "broken": None}]


@pytest.fixture
def owned(hub: Server) -> Iterator[Any]:
    core = serving(Owned)
    core.joining = {"hub": hub.address, "run": "r", "model": "m", "replica": "rollout-0"}
    core.loop.start()
    yield core
    core.shutdown()
    for thread in threading.enumerate():
        if thread.name == "tensorhub-follow":
            thread.join(TIMEOUT_S)
    core.input_queue.put(None)
    core.loop.join()


def answered(core: Any, method: str, *args: Any) -> Any:
    """What vLLM would send the owner."""
    assert len(args) <= len(signature(getattr(core, method)).parameters), "or vLLM refuses it"
    answer = getattr(core, method)(*args)
    return answer.result(TIMEOUT_S) if isinstance(answer, Future) else answer


def news(core: Any, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that is so."""
    revision, told = -1, {}
    while not told or not is_it(told):
        error, told = answered(core, "tensorhub_ask", "news", [revision])
        assert error == ("", "", 0) and told["revision"] > revision
        revision = told["revision"]
    return told


SWITCH = ["tensorhub_start_fetch", "tensorhub_prepare_install", "pause keep", INSTALL, "resume"]


@pytest.mark.slow
def test_an_engine_follows_when_its_owner_says_how_and_tells_it_everything(hub: Server, owned: Any) -> None:
    how = {"worker": "rollout-0/0", "timeout_s": 9.0, "staleness_s": 60.0, "catches_up": True}
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.retain(newest=2)
        trainer.publish(1, {"weight": torch.ones(4)})
        assert not hasattr(owned, "tensorhub_ask")
        assert answered(owned, "tensorhub_leave") is None, "it may be ended before its owner knows whom to follow"
        assert answered(owned, "tensorhub_follow", owned.joining, how, None) == (("", "", 0), None)
        told = news(owned, lambda told: told["has_caught_up"])
        assert told["version"] == 1 and not told["stays"] and told["why_not"] == ""
        assert owned.log == ["tensorhub_connect", *SWITCH] and owned.weights == "1"
        assert answered(owned, "tensorhub_ask", "hold", [0])[1] == 1
        trainer.publish(2, {"weight": torch.ones(4)})
        waiting = owned.tensorhub_ask("enter", ["a", 2])
        trainer.pin(1)
        assert news(owned, lambda told: told["pinned"] == 1)["stays"]
        assert waiting.result(TIMEOUT_S) == (("", "", 0), 1), "operators want what it has"
        trainer.unpin()
        answered(owned, "tensorhub_ask", "release", [])
        assert not news(owned, lambda told: told["version"] == 2)["refusal"][0]
        assert answered(owned, "tensorhub_ask", "hold", [2])[1] == 2, "after the install has ended"
        assert owned.log == ["tensorhub_connect", *SWITCH, *SWITCH]
        assert answered(owned, "tensorhub_leave") is None and owned.log[-1] == "tensorhub_close"
        names = [line for line in status_text(fetch_status(hub.address)).splitlines() if "rollout-0-follow" in line]
        assert not names, "the hub knows its follower no more"


def test_what_a_worker_has_against_an_install_is_shown(
    hub: Server, owned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a weight that was moved: an error of vLLM's executor. Only the engine's own log had it."""
    monkeypatch.setattr(core_follower, "RETRY_DELAY_S", 0.01)
    rpc, moved = owned._rpc, "a weight is not where it was"

    def refuse(method: str, args: Any = ()) -> list[Any]:
        if method == "tensorhub_prepare_install" and moved:
            raise RuntimeError(f"Worker failed with error {moved!r}")
        return rpc(method, args)

    owned._rpc = owned.model_executor.collective_rpc = refuse
    answered(owned, "tensorhub_follow", owned.joining, {}, None)
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4)})
        wait_until(lambda: moved in status_text(fetch_status(hub.address)), "shown to people")
        assert moved in owned.tensorhub_status()["failure"]
        moved = ""
        wait_until(lambda: owned.weights == "1" and not owned.tensorhub_status()["failure"], "it went well")


def test_an_engine_that_is_held_for_an_evaluation_leaves_when_it_is_told_to(hub: Server, owned: Any) -> None:
    """Its follower waited to be released, and the owner for its follower."""
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.retain(newest=2)
        trainer.publish(1, {"weight": torch.ones(4)})
        answered(owned, "tensorhub_follow", owned.joining, {"catches_up": True}, None)
        news(owned, lambda told: told["has_caught_up"])
        answered(owned, "tensorhub_ask", "hold", [0])
        trainer.publish(2, {"weight": torch.ones(4)})
        while not owned.tensorhub_ask.__self__._changed._waiters:
            time.sleep(0.001)
        assert answered(owned, "tensorhub_leave") is None and "tensorhub_close" in owned.log


def test_an_engine_that_leaves_between_pause_and_install_goes_on(hub: Server, owned: Any) -> None:
    """It stood still for ever, and deferred what other clients asked."""
    whole, left = owned.tensorhub_starts.__self__, Future[Any]()
    at_once = whole.at_once

    async def leave_first(steps: Any) -> Any:
        leave = partial(answered, owned, "tensorhub_leave")
        owned.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, lambda: left.set_result(leave())))
        return await at_once(steps)

    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4)})
        whole.at_once = leave_first
        answered(owned, "tensorhub_follow", owned.joining, {}, None)
        assert left.result(TIMEOUT_S) is None
    assert INSTALL not in owned.log and not owned.paused
    assert owned.log[-3:] == ["pause keep", "resume", "tensorhub_close"]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_the_owner_says_how_it_is_paused_and_whether_it_forgets(hub: Server, owned: Any, mode: str) -> None:
    owned.forgets = False  # it would fail
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4)})
        answered(owned, "tensorhub_follow", owned.joining, {"pause_mode": mode, "recompute": False, "until": 1}, None)
        assert news(owned, lambda told: told["version"] == 1)["stays"]
        assert f"pause {mode}" in owned.log


@pytest.mark.parametrize("wrong", ["the worker", "an option", "the store's configuration"])
def test_the_owner_hears_why_an_engine_cannot_follow(owned: Any, wrong: str) -> None:
    owned.cannot = "this model cannot be updated" if wrong == "the worker" else ""
    joining = {**owned.joining, "hubb": ""} if wrong == "the store's configuration" else owned.joining
    how = {"patient": 1} if wrong == "an option" else {}
    (kind, message, _), answer = answered(owned, "tensorhub_follow", joining, how, None)
    assert answer is None and not hasattr(owned, "tensorhub_ask")
    if wrong == "the worker":
        assert (kind, message) == ("UpdateFailed", "tensorhub_connect: this model cannot be updated")
    else:
        assert (
            kind == "UsageError"
            and ("patient" in message or "hubb" in message)
            and "tensorhub_connect" not in owned.log
        )


class FrontEnd:
    """vLLM's AsyncLLM as far as order goes (async_llm.py: `output_handler`; core_client.py:
    `process_outputs_socket`): answers to questions come at once, tokens are worked off CHUNK outputs at a time by a
    task that yields in between."""

    CHUNK = 128

    def __init__(self, core: Any, install_turns: int) -> None:
        self.core, self.install_turns = core, install_turns
        self.counted: Counter[str] = Counter()
        self.outputs: asyncio.Queue[list[str]] = asyncio.Queue()
        self.told: dict[str, int] = {}  # tokens of each request that it knew of when the install was answered
        self.engine_core = self

    def step(self) -> None:
        self.core.step()
        self.outputs.put_nowait(list(NAMES))

    async def work(self) -> None:
        while True:
            outputs = await self.outputs.get()
            for first in range(0, len(outputs), self.CHUNK):
                self.counted.update(outputs[first : first + self.CHUNK])
                await asyncio.sleep(0)
            self.outputs.task_done()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        for _ in range(self.install_turns if INSTALL in args else 1):
            await asyncio.sleep(0)
        return getattr(self.core, method)(*args)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self.call_utility_async("collective_rpc", method, None, args, None)
        self.told = dict(self.counted)
        return answers


@pytest.mark.parametrize(("install_turns", "late"), [(2, 640), (60, 0)], ids=["a short install", "a long one"])
async def test_versions_are_exact_where_the_owner_counts_tokens_too_late(install_turns: int, late: int) -> None:
    """verl's server counted what it knew of when the install was answered: with 1,024 requests and an install shorter
    than the front end needs for the tokens of one step, the last ones of the old weights passed for the new ones'."""
    pytest.importorskip("ray", reason="an actor's questions to vLLM go through its lifeline")
    from tensorhub_plugins.vllm.ray.owned import OwnedEngine

    core = serving()
    front = FrontEnd(core, install_turns)
    core.serve(*NAMES)
    core.collective_rpc(INSTALL, None, (1, 60.0), None)
    worker = asyncio.create_task(front.work())
    for _ in range(3):
        front.step()
    await front.outputs.join()
    front.step()  # the last one of the old weights
    owned = OwnedEngine(front, "r/0")
    await front.call_utility_async("pause_scheduler", "keep", False)
    await front.rpc(INSTALL, 2, 60.0)
    front.step()
    front.step()
    await front.outputs.join()
    assert sum(front.told[name] < 4 for name in NAMES) == late  # the control
    spans = [await owned.spans(name, front.counted[name]) for name in NAMES]
    assert spans == [((1, 4), (2, 2))] * len(NAMES)
    assert await owned.spans(NAMES[0], 6) == ()  # once
    worker.cancel()


def test_what_has_to_be_done_is_done_before_an_engine_shuts_down():
    done = []
    core = SimpleNamespace(shutdown=lambda why, *, timeout: done.append((why, timeout)) or "ended")
    before_shutdown(core, lambda: done.append("left the store"))
    before_shutdown(core, lambda: done.append("left another one"))
    assert core.shutdown("asked to", timeout=1.0) == "ended"
    assert done == ["left another one", "left the store", ("asked to", 1.0)]
