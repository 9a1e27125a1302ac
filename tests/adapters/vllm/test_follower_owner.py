"""The gate, and what the owner of an engine asks its follower: no framework is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from recorded_engine import RecordedEngine

from tensorhub_plugins.core import NotPublished, VersionGone, VersionRefused, work
from tensorhub_plugins.vllm.engine.follower import Follower, Gate, UpdateFailed


class FakeEngine(RecordedEngine):
    """Two vLLM workers that take every version, unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, str] = {}  # method -> error
        self.breaks = self.refuses = False

    async def rpc(self, method: str, *args: object) -> list[dict[str, object]]:
        name = method.removeprefix("tensorhub_")
        self.log.append(name)
        if name == "poll":
            error = self.fails.get("fetch")
            kind = "VersionRefused" if self.refuses else "SourceLost"
            return [{"state": "failed" if error else "ready", "error": error, "error_kind": kind}] * 2
        if name == "install":
            error = self.fails.get("install")
            return [{"installed": error is None, "error": error, "broken": "mixed" if self.breaks else None}] * 2
        return [{}] * 2


class FakeHub:
    """As the hub answers `Client.target`."""

    def __init__(self, newest: int = 0, pinned: int = 0) -> None:
        self.newest, self.pinned = newest, pinned
        self.withdrawn: set[int] = set()

    def target(
        self, installed: int, *, refused: Sequence[int] = (), pins: bool = True, failure: str = "", timeout_s: float
    ) -> int:
        version = self.pinned if self.pinned and pins else self.newest
        back = (self.pinned and pins) or installed in self.withdrawn
        if version in (0, installed) or (version < installed and not back):
            error = VersionGone if installed in self.withdrawn and not version else NotPublished
            raise error("nothing else")
        return version


def follower(
    engine: FakeEngine,
    *,
    gate: Gate | None = None,
    until: int | None = None,
    newest: int = 0,
    hub: FakeHub | None = None,
    pins: bool = True,
) -> Follower:
    hub = hub or FakeHub(newest)

    async def no_sleep(_: float) -> None:
        await asyncio.sleep(0)

    target = hub.target
    return Follower(engine, target, worker="w/0", timeout_s=0.2, gate=gate, until=until, sleep=no_sleep, pins=pins)


async def need(one: Follower, version: int) -> None:
    """Wait as a prompt does."""
    async with one.answering(version):
        pass


UPDATE = ["start_fetch", "poll", "prepare_install", "pause", "install", "forget", "resume"]


async def test_an_update_stops_the_engine_only_for_the_installation() -> None:
    engine = FakeEngine()
    one = follower(engine)
    await one.update(3)
    assert engine.log == UPDATE
    assert one.version == 3


async def test_without_partial_rollout_an_update_waits_for_the_prompts_inside_and_new_ones_wait_for_it() -> None:
    engine, gate = FakeEngine(), Gate()
    one = follower(engine, gate=gate)
    await gate.__aenter__()
    update = asyncio.create_task(one.update(1))
    while not gate.is_closed:
        await asyncio.sleep(0)
    seen = []

    async def prompt() -> None:
        async with gate:
            seen.append(one.version)

    waiting = asyncio.create_task(prompt())
    for _ in range(20):
        await asyncio.sleep(0)
    assert "pause" not in engine.log and not seen
    await gate.__aexit__()
    await asyncio.gather(update, waiting)
    assert seen == [1]


async def test_with_partial_rollout_nothing_waits() -> None:
    one = follower(FakeEngine())
    await one.update(1)  # with any number of prompts in flight: there is no gate
    await need(one, 1)


async def test_a_version_that_fails_to_arrive_leaves_the_engine_running() -> None:
    engine = FakeEngine()
    one = follower(engine)
    await one.update(1)
    engine.fails["fetch"] = "no source"
    with pytest.raises(UpdateFailed, match="no source"):
        await one.update(2)
    assert one.version == 1 and engine.log.count("pause") == 1
    with pytest.raises(UpdateFailed, match="has version 1"):
        await need(one, 2)


async def test_half_an_installation_never_answers_until_it_is_repaired() -> None:
    engine, gate = FakeEngine(), Gate()
    one = follower(engine, gate=gate, newest=2)
    await one.update(1)
    engine.fails["install"], engine.breaks = "half way", True
    with pytest.raises(UpdateFailed):
        await one.update(2)
    assert engine.log[-1] == "install"  # not resumed
    with pytest.raises(UpdateFailed):
        await need(one, 1)
    engine.fails.clear()
    engine.breaks = False
    assert await one.next_version() == 2
    await one.update(2)
    assert engine.log[-1] == "resume"
    await need(one, 2)


async def test_what_waits_for_a_version_that_waits_for_a_slow_prompt_waits_as_long() -> None:
    """Its engine was called lost each `timeout_s`, and the run ended after twenty times."""

    engine, gate = FakeEngine(), Gate()
    one = follower(engine, gate=gate)
    await one.update(1)
    async with one.answering(1):  # its agent, or its reward, takes long
        update = asyncio.create_task(one.update(2))
        while not gate.is_closed:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(need(one, 2))
        await asyncio.sleep(2 * one.timeout_s)
        assert not waiting.done() and one.version == 1
    await asyncio.gather(update, waiting)
    assert one.version == 2


async def test_a_prompt_that_waits_at_the_gate_does_not_go_into_a_broken_engine() -> None:
    """It waited in an engine that stands still, and the installation that would mend it waited for it."""

    engine, gate = FakeEngine(), Gate()
    one = follower(engine, gate=gate)
    one.timeout_s = 10.0
    await one.update(1)
    engine.fails["install"], engine.breaks = "half way", True
    seen: list[int] = []

    async def prompt() -> None:
        async with one.answering(1):
            seen.append(one.version)

    async with one.answering(1):
        breaking = asyncio.create_task(one.update(2))
        while not gate.is_closed:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(prompt())
        await asyncio.sleep(0)
    with pytest.raises(UpdateFailed, match="half way"):
        await breaking
    for _ in range(20):
        await asyncio.sleep(0)
    assert gate.inside == 0 and not seen
    engine.fails.clear()
    engine.breaks = False
    await one.update(3)
    await waiting
    assert seen == [3]


async def test_a_prompt_that_waits_at_the_gate_of_a_broken_engine_keeps_its_deadline() -> None:
    gate = Gate()
    one = follower(FakeEngine(), gate=gate)
    await gate.close()

    async def prompt() -> None:
        async with one.answering(0):
            pytest.fail("the engine is broken")

    waiting = asyncio.create_task(prompt())
    await asyncio.sleep(0)
    one.is_broken = True
    await gate.open()
    with pytest.raises(UpdateFailed, match="w/0"):
        await waiting


@pytest.mark.parametrize("mends", [True, False])
async def test_an_evaluation_does_not_hold_a_broken_engine_as_it_is(mends: bool) -> None:
    """It said that it had its version, and was kept from being repaired."""

    engine = FakeEngine()
    one = follower(engine)
    await one.update(1)
    engine.fails["install"], engine.breaks = "half way", True
    with pytest.raises(UpdateFailed):
        await one.update(2)
    with pytest.raises(UpdateFailed, match="no whole weights"):
        await one.hold(0)
    assert not one.is_held  # it follows on
    if not mends:
        with pytest.raises(UpdateFailed, match="half way"):
            await one.hold(1)
        assert not one.is_held
        return
    engine.fails.clear()
    engine.breaks = False
    assert await one.hold(1) == 1 and not one.is_broken and one.is_held


async def test_an_engine_that_is_held_stays_with_its_version() -> None:
    engine = FakeEngine()
    one = follower(engine, newest=5, until=9)
    assert await one.hold(2) == 2
    following = asyncio.create_task(one.follow())
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert one.version == 2
    await one.release()
    await asyncio.wait_for(need(one, 5), 5)
    following.cancel()


async def test_an_engine_that_follows_no_pins_does_not_stay_with_one() -> None:
    """It took work with a version of a former attempt while one was pinned. The control follows them."""
    free, pinned = follower(FakeEngine(), pins=False), follower(FakeEngine())
    for one in (free, pinned):
        one.of_hub = lambda: {"why_not": "", "pinned": 1, "attempt": 2}  # type: ignore[method-assign]
        await one.update(1)
    assert not free.status_now().stays and "waits for the first of attempt 2" in free.status_now().why_not
    assert pinned.status_now().stays and not pinned.status_now().why_not


async def test_a_hold_for_a_while_ends_by_itself_unless_it_is_renewed() -> None:
    """A client that has asked over HTTP may be gone."""
    engine = FakeEngine()
    one = follower(engine, newest=5, until=9)
    assert await one.hold(2, 0.05) == 2
    following = asyncio.create_task(one.follow())
    assert await one.hold(2, 60.0) == 2  # longer from now on
    await asyncio.sleep(0.1)
    assert one.is_held and one.version == 2
    assert await one.hold(2, 0.01) == 2
    await asyncio.wait_for(need(one, 5), 5)
    assert not one.is_held
    following.cancel()
    assert await one.hold(0, 0.01) == await one.hold(0) == 5  # an owner's has no end
    await asyncio.sleep(0.05)
    assert one.is_held
    await one.hold(0, 0.01)
    await one.release()
    assert one._lapse is None, "nothing is left to end"
    await one.hold(0)
    await asyncio.sleep(0.05)
    assert one.is_held, "what was released does not end the next one"


async def test_a_hold_for_a_while_that_is_given_up_while_it_waits_ends_too() -> None:
    """The control: one that is released in its update leaves nothing that ends the next one."""
    gate = Gate()
    one = follower(FakeEngine(), gate=gate, newest=5)
    await one.update(1)
    for gives_up in (True, False):
        await one.enter("prompt", 1)
        one._asked_with = one.version
        update = asyncio.create_task(one.take(one.version + 1) if gives_up else one.hold(one.version + 1, 60.0))
        while not gate.is_closed:
            await asyncio.sleep(0)
        if gives_up:
            held = asyncio.create_task(one.hold(0, 0.01))
            await asyncio.sleep(0)
            held.cancel()
        else:
            await one.release()
        await one.leave("prompt")
        await update
        while one.is_held:
            await asyncio.sleep(0.001)
    assert one._lapse is None


async def test_a_hold_that_fails_ends_by_itself_too() -> None:
    engine = FakeEngine()
    one = follower(engine, newest=5, until=9)
    await one.update(1)
    engine.fails["fetch"] = "gone"
    with pytest.raises(UpdateFailed):
        await one.hold(2, 0.01)
    engine.fails.clear()
    following = asyncio.create_task(one.follow())
    await asyncio.wait_for(need(one, 5), 5)
    following.cancel()


async def test_a_release_that_overtakes_its_hold_leaves_the_engine_free() -> None:
    """The hold waits for an update, and its owner gives up: it held the engine afterwards, for ever."""

    gate = Gate()
    one = follower(FakeEngine(), gate=gate, newest=5)
    await one.update(1)
    await one.enter("prompt", 1)
    one._asked_with = 1
    update = asyncio.create_task(one.take(2))
    while not gate.is_closed:
        await asyncio.sleep(0)
    held = asyncio.create_task(one.hold(0))
    await asyncio.sleep(0)
    await one.release()
    await one.leave("prompt")
    await update
    with pytest.raises(UpdateFailed, match="released before it was held"):
        await held
    following = asyncio.create_task(one.follow())
    await need(one, 5)
    following.cancel()


async def test_pulling_can_be_switched_off_after_a_version() -> None:
    one = follower(FakeEngine(), newest=5, until=3)
    assert await one.next_version() is None
    await one.update(3)
    await need(one, 5)  # nobody waits for what will not come
    assert await one.hold(5) == 3


async def test_a_prompt_hears_at_once_that_its_version_is_refused() -> None:
    engine = FakeEngine()
    one = follower(engine, newest=5)
    one.timeout_s = 60.0
    await one.update(4)
    engine.refuses, engine.fails["fetch"] = True, "tensor 'x' is unknown"
    waiting = asyncio.create_task(need(one, 5))
    while not one._changed._waiters:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    following = asyncio.create_task(one.follow())
    with pytest.raises(VersionRefused, match="tensor 'x' is unknown") as refused:
        await asyncio.wait_for(waiting, 4.0)  # before it would ask the hub again
    assert refused.value.version == 5 and one.version == 4
    await need(one, 4)  # the control: it has this one
    following.cancel()


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub_plugins.vllm.engine.follower.ASK_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("quick_looks")
async def test_prompts_do_not_wait_for_a_version_that_operators_do_not_want_to_be_run() -> None:
    hub = FakeHub(newest=4)
    one = follower(FakeEngine(), hub=hub)
    await one.update(4)
    hub.newest = 5
    waiting = asyncio.create_task(need(one, 5))
    while hub.newest and not one._changed._waiters:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    assert not waiting.done()  # the control: it waits for what is still to come
    hub.pinned = 4
    await waiting
    hub.pinned, hub.newest = 0, 4
    hub.withdrawn.add(5)
    await need(one, 5)
    hub.newest = 0
    hub.withdrawn.add(4)
    await need(one, 5)  # there is nothing to be run: from whatever it has
    hub.newest = 6
    with pytest.raises(UpdateFailed, match="has version 4"):
        await need(one, 6)


@pytest.mark.usefixtures("quick_looks")
async def test_pins_do_not_apply_to_an_engine_of_sync_training() -> None:
    hub = FakeHub(newest=5, pinned=4)
    one, free = follower(FakeEngine(), hub=hub, pins=False), follower(FakeEngine(), hub=hub)
    assert await one.next_version() == 5 and await free.next_version() == 4
    await one.update(4)
    await free.update(4)
    await need(free, 5)
    with pytest.raises(UpdateFailed, match="has version 4"):
        await need(one, 5)


async def test_an_engine_goes_back_and_a_held_one_does_so_afterwards() -> None:
    hub = FakeHub(newest=5)
    one = follower(FakeEngine(), hub=hub)
    following = asyncio.create_task(one.follow())
    await need(one, 5)
    assert await one.hold() == 5
    hub.pinned = 3
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert one.version == 5
    assert await one.hold(3) == 3  # an evaluation of the pinned version
    await one.release()
    hub.pinned = 2
    while one.version != 2:
        await asyncio.sleep(0.001)
    following.cancel()


async def test_an_answer_that_was_overtaken_by_an_evaluation_is_not_taken() -> None:
    """The hub said 5, and before that was installed an evaluation has brought the engine to 6."""

    engine = FakeEngine()
    one = follower(engine, newest=5)
    version = await one.next_version()
    assert version == 5
    await one.hold(6)
    taking = asyncio.create_task(one.take(version))
    await one.release()
    await taking
    assert one.version == 6
    one._asked_with = 6
    await one.take(5)  # the control: an answer to the engine as it is
    assert one.version == 5


@pytest.mark.parametrize(("newest", "until", "version"), [(0, None, 0), (4, None, 4), (4, 2, 0)])
async def test_an_engine_that_was_started_again_catches_up_before_it_answers(
    newest: int, until: int | None, version: int
) -> None:
    one = follower(FakeEngine(), newest=newest, until=until)
    assert not one.status_now().has_caught_up
    await one.catch_up()
    assert one.status_now().has_caught_up and one.version == version


async def test_an_engine_that_was_started_again_and_refuses_all_there_is_says_so() -> None:
    class Hub(FakeHub):
        def target(
            self, installed: int, *, refused: Sequence[int] = (), pins: bool = True, failure: str = "", timeout_s: float
        ) -> int:
            if held := {3, 4} - set(refused):
                return max(held)
            raise NotPublished("no other one")

    engine = FakeEngine()
    engine.refuses, engine.fails["fetch"] = True, "tensor 'x' is unknown"
    one = follower(engine, hub=Hub())
    await asyncio.wait_for(one.catch_up(), 30)
    assert one.version == 0 and one.status_now().refusal == (4, "tensor 'x' is unknown")


async def test_its_owner_hears_of_every_change_and_of_nothing_else() -> None:
    class Engine(FakeEngine):
        async def rpc(self, method: str, *args: object) -> list[dict[str, object]]:
            for _ in range(5):  # as one that is not made of coroutines of this very loop
                await asyncio.sleep(0)
            return await super().rpc(method, *args)

    one = follower(Engine(), hub=FakeHub())
    first = await one.news(-1)
    waiting = asyncio.create_task(one.news(first["revision"]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done(), "control: nothing has changed"
    seen: list[bool] = []

    async def listen() -> None:
        known = first["revision"]
        while True:
            told = await one.news(known)
            known = told["revision"]
            seen.append(bool(told["busy_since"]))

    listening = asyncio.create_task(listen())
    await one.update(3)
    told = await one.news(first["revision"])
    assert told["version"] == 3 and not told["busy_since"] and await waiting
    for _ in range(20):
        await asyncio.sleep(0)
    assert True in seen and seen[-1] is False, "that it may be busy is told before it is"
    listening.cancel()


async def test_what_its_owner_asks_is_answered_with_the_error_that_it_came_to() -> None:
    engine = FakeEngine()
    one = follower(engine, newest=5)
    assert await one.answer("hold", 2) == (("", "", 0), 2)
    engine.refuses, engine.fails["fetch"] = True, "tensor 'x' is unknown"
    with pytest.raises(UpdateFailed):
        await one.update(5)
    assert await one.answer("enter", "a", 5) == (("VersionRefused", "tensor 'x' is unknown", 5), None)
    assert await one.answer("leave", "a") == (("", "", 0), None), "as after a prompt that was answered"
    (kind, message, version), answer = await one.answer("update", 5)
    assert (kind, version, answer) == ("UsageError", 0, None) and "'update'" in message


async def test_a_prompt_that_is_given_up_while_it_waits_is_not_waited_for() -> None:
    gate = Gate()
    one = follower(FakeEngine(), gate=gate)
    await one.update(1)
    await one.enter("first", 1)
    update = asyncio.create_task(one.update(2))
    while not gate.is_closed:
        await asyncio.sleep(0)
    second = asyncio.create_task(one.answer("enter", "second", 1))
    await asyncio.sleep(0)
    assert gate.inside == 1 and not second.done()
    await one.leave("second")
    await one.leave("first")
    await update
    assert second.cancelled() and one.version == 2 and gate.inside == 0 and not one._prompts
    await one.leave("unknown")


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("grows", [True, False])
def test_a_prompt_waits_for_an_engine_that_works_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    """Each update fails, and is tried again: that is work, too."""

    async def story() -> float:
        one, began = follower(FakeEngine(), newest=4), time.monotonic()
        one.timeout_s, one.grows = 0.05, grows
        with pytest.raises(UpdateFailed, match="has version 0"):
            await asyncio.wait_for(need(one, 4), 20)
        return time.monotonic() - began

    monkeypatch.setattr(work, "last_at", time.monotonic)
    assert (asyncio.run(story()) >= work.TIMES_MAX * 0.05) == grows
