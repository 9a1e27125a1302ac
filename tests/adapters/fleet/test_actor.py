"""The shell of the fleet's state: the actor's own class with the starter's own class, without Ray or a framework."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from tensorhub_plugins.core import UsageError, version_of  # noqa: E402
from tensorhub_plugins.core.options import TrainingOptions  # noqa: E402
from tensorhub_plugins.vllm.ray import policy, preemption  # noqa: E402
from tensorhub_plugins.vllm.ray.actor_handles import opened, sealed  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet import actor as fleet_actor  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet import commands, events  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.actor import FleetActor, address_of  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.starter import Starter  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.types import Member, Seen, View  # noqa: E402


class Launcher:
    def __init__(self) -> None:
        self.did: list[Any] = []
        self.settled: list[list[str]] = []
        self.room, self.error, self.may_start = 9, "", asyncio.Event()
        self.may_start.set()

    async def start(self, name: str, rank: int, avoid: Collection[str], spare: bool = False) -> Any:
        self.did.append(("start a spare" if spare else "start", name))
        await self.may_start.wait()
        if self.error:
            raise RuntimeError(self.error)
        return f"handle of {name}"

    async def join(self, name: str, handle: Any) -> None:
        self.did.append(("join", name, handle))

    async def start_external(self, name: str, url: str) -> Any:
        self.did.append(("external", name, url))
        if self.error:
            raise RuntimeError(self.error)
        return f"handle of {name}"

    async def abort(self, name: str, handle: Any) -> None:
        self.did.append(("abort", name, handle))

    async def stop(self, name: str, handle: Any | None) -> None:
        self.did.append(("stop", name, handle))
        if self.error:
            raise RuntimeError(self.error)

    def settle(self, names: Collection[str]) -> None:
        self.settled.append(sorted(names))

    def slots(self, avoid: Collection[str]) -> int:
        return self.room


class Remote:
    """Looks like a handle: every method has `.remote`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        class Method:
            @staticmethod
            def remote(*args: Any) -> Any:
                return asyncio.ensure_future(method(*args))

        return Method


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.actors: list[FleetActor] = []
        self.launcher = Launcher()
        starter = Starter(self.launcher)
        monkeypatch.setattr(ray, "get_actor", lambda name: Remote(starter))
        self.options = TrainingOptions(**options)
        self.actor = self.new_actor()

    def new_actor(self) -> FleetActor:
        self.actors.append(FleetActor("starter", self.options))
        return self.actors[-1]

    async def end(self) -> None:
        # Again and again: `asyncio.wait_for` of Python 3.11 swallows a cancellation that meets the answer.
        while tasks := [task for actor in self.actors for task in actor._tasks]:
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0.01)

    async def command(self, event: events.Event) -> tuple[str, bool]:
        return await self.actor.command(event)

    async def report(self, *names: str, **more: Any) -> dict[str, bool]:
        seen = [Seen(name, f"handle of {name}", "n1", **{"ready": True, "version": 1, **more}) for name in names]
        return {entry.name: entry.draining for entry in opened(await self.actor.report(sealed(seen)))}

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.01)


async def is_there(url: str) -> None:
    """In the place of `knock`: stories name servers that nobody has started."""


def play(story: Callable[[Stage], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    async def whole() -> None:
        nodes = [{"NodeID": "n1", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "one"}]
        monkeypatch.setattr(fleet_actor, "live_nodes", lambda: nodes)
        monkeypatch.setattr(fleet_actor, "TICK_INTERVAL_S", 0.02)
        monkeypatch.setattr(policy, "POLICY_INTERVAL_S", 0.02)
        monkeypatch.setattr(fleet_actor, "knock", is_there)
        stage = Stage(monkeypatch, **options)
        try:
            await story(stage)
        finally:
            await stage.end()

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_commands_answer_at_once_and_what_they_begin_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        assert await stage.report("rollout-0") == {"rollout-0": False}
        stage.launcher.may_start.clear()
        assert await stage.command(events.Add(1)) == ("the target is 2, it was 1; starting rollout-1", False)
        assert await stage.command(events.SetTarget(2)) == ("the target is 2, as it was", False)
        assert await stage.command(events.Add(5000)) == (
            "the target is 2, and 5000 more are above fleet_max, 1024",
            True,
        )
        stage.launcher.may_start.set()
        await stage.until(lambda: stage.actor._state.members["rollout-1"].handle)
        assert await stage.report("rollout-0") == {"rollout-0": False, "rollout-1": False}
        await stage.report("rollout-0", "rollout-1")
        assert "2 requests" not in (await stage.command(events.Drain("rollout-1", 5.0)))[0]
        assert await stage.report("rollout-0", "rollout-1") == {"rollout-0": False, "rollout-1": True}
        assert await stage.report("rollout-0", "rollout-1", draining=True) == {"rollout-0": False}
        await stage.until(lambda: ("stop", "rollout-1", "handle of rollout-1") in stage.launcher.did)
        await stage.until(lambda: stage.actor._state.gone)
        view = await stage.actor.view()
        assert [one.name for one in view.members] == ["rollout-0"] and view.members[0].node == "10.0.0.1"

    play(story, monkeypatch)


def test_a_start_nobody_wants_any_more_is_cancelled_and_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        await stage.report("rollout-0")
        stage.launcher.may_start.clear()
        await stage.command(events.Add(1))
        await stage.until(lambda: ("start", "rollout-1") in stage.launcher.did)
        said, _ = await stage.command(events.Drain("rollout-1", 1.0))
        assert said == "the target is 1, it was 2; rollout-1 is stopped"
        await stage.until(lambda: ("stop", "rollout-1", None) in stage.launcher.did)
        await stage.until(lambda: stage.actor._state.gone)

    play(story, monkeypatch)


def test_what_cannot_be_stopped_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub_plugins.vllm.ray.fleet.state.STOP_DELAY_S", 0.05)

    async def story(stage: Stage) -> None:
        await stage.report("rollout-0", "rollout-1")
        stage.launcher.error = "Ray does not answer\nand more"
        await stage.command(events.Drain("rollout-1", 1.0))
        await stage.report("rollout-1", draining=True)
        await stage.until(lambda: stage.launcher.did.count(("stop", "rollout-1", "handle of rollout-1")) > 1)
        stage.launcher.error = ""
        await stage.until(lambda: stage.actor._state.gone)

    play(story, monkeypatch)


def test_an_actor_that_is_started_again_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        await stage.report("rollout-0")
        stage.launcher.may_start.clear()
        await stage.command(events.Add(1))
        await stage.until(lambda: stage.launcher.did)
        stage.actor = stage.new_actor()
        view = await stage.actor.view()
        assert view.target == 2 and [one.state for one in view.members] == ["ready", "starting"]
        stage.launcher.may_start.set()
        await stage.until(lambda: stage.actor._state.members["rollout-1"].handle)
        assert stage.launcher.did == [("start", "rollout-1")]  # once

    play(story, monkeypatch)


def test_a_starter_that_was_lost_keeps_the_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an actor that is lost after it knows no target any more. Nothing else happens meanwhile."""

    async def story(stage: Stage) -> None:
        stage.launcher.room = 0
        await stage.report("rollout-0")
        await stage.command(events.SetTarget(3))
        again = Starter(stage.launcher)
        stage.actor._starter._actor = again
        monkeypatch.setattr(ray, "get_actor", lambda name: Remote(again))
        await stage.until(lambda: again._saved)
        assert (await stage.new_actor().view()).target == 3

    play(story, monkeypatch)


def test_a_launcher_learns_once_in_each_starter_which_members_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object that knew who had left is lost with its actor."""

    async def story(stage: Stage) -> None:
        stage.launcher.room = 0
        await stage.command(events.SetTarget(3))  # before any report: nothing is known yet
        await stage.until(lambda: stage.actor._state.target == 3)
        assert not stage.launcher.settled
        await stage.report("rollout-0", "rollout-1")
        await stage.until(lambda: stage.launcher.settled)
        await stage.command(events.SetTarget(1))
        await stage.report("rollout-0", "rollout-1", draining=True)
        await stage.until(lambda: "rollout-1" in stage.actor._state.gone)
        assert stage.launcher.settled == [["rollout-0", "rollout-1"]]
        stage.actor._starter._actor = Starter(stage.launcher)
        await stage.until(lambda: len(stage.launcher.settled) > 1)
        assert stage.launcher.settled[1] == ["rollout-0"]

    play(story, monkeypatch)


def test_the_last_that_is_ready_is_drained_at_once_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(stage: Stage) -> None:
        await stage.report("rollout-0")
        stage.launcher.may_start.clear()
        assert await stage.command(events.Drain("rollout-0", 5.0)) == (
            "another one is started in its place: fleet_min is 1; "
            "rollout-0 is the last that is ready: it drains when rollout-1 is, or at once with --now",
            False,
        )
        assert await stage.report("rollout-0") == {"rollout-0": False}
        said, _ = await stage.command(events.Drain("rollout-0", 5.0, True))
        assert said.endswith("it was the last that is ready: requests wait until rollout-1 is")
        assert await stage.report("rollout-0") == {"rollout-0": True}

    play(story, monkeypatch)


def test_nodes_are_drained_by_any_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        await stage.report("rollout-0")
        assert await stage.actor.drain_node("10.0.0.7") == ("there is no node '10.0.0.7': there are 10.0.0.1", True)
        said, is_refused = await stage.actor.drain_node("one", 5.0)
        assert "rollout-0 drains" in said and not is_refused
        assert await stage.actor.add_external("10.0.0.9:8000") == (
            "'10.0.0.9:8000' is no address: give one like http://10.0.0.7:8000",
            True,
        )
        url = "http://10.0.0.9:8000"
        assert await stage.actor.add_external(f"{url}/") == (f"{url} joins as external-0", False)
        assert ("external", "external-0", url) in stage.launcher.did
        assert await stage.actor.add_external(url) == (f"{url} is in this fleet already, as external-0", True)
        beside = "http://ONE:8000"  # on a node of Ray's
        assert await stage.actor.add_external(beside) == ("http://one:8000 joins as external-1", False)
        for other in ("http://one:8000", "HTTP://One:8000/"):
            said = await stage.actor.add_external(other)
            assert said == ("http://one:8000 is in this fleet already, as external-1", True)
        assert "external-0 is stopped" in (await stage.actor.drain_node("10.0.0.9"))[0]
        assert "external-1 is stopped" in (await stage.actor.drain_node("10.0.0.1"))[0]
        stage.launcher.error = "nobody answers there"
        assert await stage.actor.add_external("http://10.0.0.8:8000") == ("nobody answers there", True)

    play(story, monkeypatch)


def test_nobody_at_an_address_is_said_at_once_and_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    knock, answers = fleet_actor.knock, ["HTTP/1.1 503 Service Unavailable\r\n\r\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answers:
            writer.write(answers.pop().encode())
        else:
            await reader.read()  # until the other side hangs up
        writer.close()

    async def story(stage: Stage) -> None:
        monkeypatch.setattr(fleet_actor, "knock", knock)
        await stage.report("rollout-0")
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await stage.actor.add_external(url) == (f"{url} joins as external-0", False)  # whatever it answers
        assert (await stage.actor.add_external(url))[0] == f"{url} is in this fleet already, as external-0"
        await stage.command(events.Drain("external-0", 0.0, True))
        await stage.until(lambda: "external-0" in stage.actor._state.gone)
        monkeypatch.setattr(fleet_actor, "KNOCK_TIMEOUT_S", 0.05)
        silent = await stage.actor.add_external(url)  # it hangs
        monkeypatch.setattr(fleet_actor, "KNOCK_TIMEOUT_S", 20.0)
        server.close()
        dead = await stage.actor.add_external(url)
        for (said, is_refused), why in ((silent, "no answer in 0.05 s"), (dead, "Connection refused")):
            assert is_refused and said == (
                f"no server answers at {url} from Ray's head node ({why}), and nothing was added: start the server "
                "there first, or correct the address"
            )
        assert [one.name for one in (await stage.actor.view()).members] == ["rollout-0"]
        assert [did for did in stage.launcher.did if did[0] == "external"] == [("external", "external-0", url)]

    play(story, monkeypatch)


@pytest.mark.parametrize(
    ("url", "is_kept_as"),
    [
        ("http://H:8000/", "http://h:8000"),
        ("HTTPS://h:443", "https://h"),
        ("http://h:443", "http://h:443"),
        ("http://[FD00:0::1]:80", "http://[fd00::1]"),
        *((none, None) for none in ("h:1", "http://", "http://:1", "http://h:0", "http://h:65536", "http://h:x")),
        ("http://\u00fc.eu.:8000", "http://\u00fc.eu.:8000"),
        *((none, None) for none in ("http://10..0.1:80", f"http://{'h' * 64}:80", "http://h\u2028:80")),
        *((none, None) for none in ("http://[::1", "http://u:p@h:1", "http://h:1/v1", "http://h:1?a", "http://a b", 7)),
    ],
)
def test_one_server_has_one_address(url: Any, is_kept_as: str | None) -> None:
    if is_kept_as is not None:
        assert address_of(url) == is_kept_as
        return
    with pytest.raises(UsageError, match="is no address: give one like http://10.0.0.7:8000"):
        address_of(url)


def test_the_list_is_a_table() -> None:
    members = (
        Member("rollout-0", "first", "ready", 12, 3, "10.0.0.1", 42.4, ""),
        Member("external-0", "external", "starting", 0, 0, "http://10.0.0.9:8000", 900.0, ""),
    )
    gone = (Member("rollout-1", "joined", "gone", 9, 0, "10.0.0.2", 5.0, "its node 10.0.0.2 is lost"),)
    view = View(members, gone, target=2, minimum=1, maximum=4, slots=1, waiting=7, policy="queue_length:16")
    assert commands.text(view).splitlines() == [
        "NAME        KIND      STATE     VERSION  IN FLIGHT  NODE                  SINCE   WHY",
        "rollout-0   first     ready     12       3          10.0.0.1              42 s",
        "external-0  external  starting  -        0          http://10.0.0.9:8000  15 min",
        "rollout-1   joined    gone      9        0          10.0.0.2              5 s     its node 10.0.0.2 is lost",
        "target 2, set by queue_length:16, 1 ready; fleet_min 1, fleet_max 4; room for 1 more; 7 requests wait",
    ]


def test_the_list_shows_spares_and_counts_them_nowhere() -> None:
    members = (Member("r0", "first", "ready", 12, 3, "a", 1.0, ""), Member("r1", "spare", "spare", 0, 0, "b", 2.0, ""))
    view = View((*members, Member("r2", "spare", "starting", 0, 0, "", 3.0, "")), (), 1, 1, 4, 0, 0, "", spares=2)
    *_, row, _, said = commands.text(view).splitlines()
    assert row.split() == ["r1", "spare", "spare", "-", "0", "b", "2", "s"]
    assert said == "target 1, 1 ready, 1 of 2 spares; fleet_min 1, fleet_max 4; room for 0 more; 0 requests wait"
    assert view.count("ready", "starting", "spare") == 1


def test_a_spare_is_started_told_to_join_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, float]] = []
    monkeypatch.setattr(fleet_actor.Gauges, "set", lambda self, figures: shown.append(figures))
    monkeypatch.setattr(fleet_actor.placement, "is_wanted", lambda: False)

    async def story(stage: Stage) -> None:
        def waits(name: str) -> Seen:
            return Seen(name, f"handle of {name}", "n1", spare=True)

        await stage.report("rollout-0")
        await stage.until(lambda: ("start a spare", "rollout-1") in stage.launcher.did)
        await stage.until(lambda: stage.actor._state.members["rollout-1"].handle)
        first = Seen("rollout-0", "handle of rollout-0", "n1", ready=True, version=1)
        roster = opened(await stage.actor.report(sealed([first, waits("rollout-1")])))
        assert [(entry.name, entry.kind) for entry in roster] == [("rollout-0", "first"), ("rollout-1", "spare")]
        await stage.until(lambda: shown and shown[-1] == {"tensorhub/replicas/spare": 1.0})
        said, _ = await stage.command(events.Add(1))
        assert said == "the target is 2, it was 1; rollout-1 joins, a spare"
        await stage.until(lambda: ("join", "rollout-1", "handle of rollout-1") in stage.launcher.did)
        await stage.until(lambda: shown[-1] == {"tensorhub/replicas/spare": 0.0})
        # The fleet's actor is killed, and what it was told meanwhile is not lost.
        stage.actor = stage.new_actor()
        await stage.actor.report(sealed([first, waits("rollout-1")]))
        await stage.until(lambda: stage.launcher.did.count(("join", "rollout-1", "handle of rollout-1")) == 2)

    play(story, monkeypatch, fleet_spares=1)
    shown.clear()

    async def without(stage: Stage) -> None:
        await stage.report("rollout-0")
        await stage.until(lambda: stage.actor._state.slots)

    play(without, monkeypatch)
    assert not shown


def test_the_list_says_what_versions_are_once_a_trainer_has_started_again() -> None:
    members = tuple(
        Member(f"rollout-{number}", "first", "ready", version, 0, "10.0.0.1", 1.0, "")
        for number, version in enumerate((12, version_of(2, 5)))
    )
    *rows, _, said = commands.text(View(members, (), 2, 1, 4, 0, 0, "")).splitlines()
    assert [row.split()[3] for row in rows] == ["VERSION", "12", "2/5"]
    assert said == "the trainer is in attempt 2: VERSION is attempt/step, of attempt 0 a step"


CALLS: list[View] = []


def capricious(view: View) -> Any:
    CALLS.append(view)
    if len(CALLS) < 4:
        raise RuntimeError("no idea")
    return 3 if len(CALLS) > 8 else "many"


def test_a_policy_that_fails_is_said_once_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(policy.SHIPPED, "capricious", capricious)
    CALLS.clear()

    async def story(stage: Stage) -> None:
        await stage.report("rollout-0")
        await stage.until(lambda: len(CALLS) > 7)
        assert stage.actor._state.wanted == 1
        await stage.until(lambda: len(stage.actor._state.members) == 3)

    with caplog.at_level(logging.WARNING):
        play(story, monkeypatch, fleet_policy="capricious")
    said = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert said == [
        "fleet: policy capricious is ignored: no idea",
        "fleet: policy capricious is ignored: it returned 'many', which is no whole number",
    ]


def test_a_policy_that_blocks_is_said_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All threads of the actor were waiting for it after a while: no deadline was kept, and nothing was started."""
    may_answer, calls = threading.Event(), []

    def blocks(view: View) -> int:
        calls.append(view)
        may_answer.wait(30)
        return 2

    monkeypatch.setitem(policy.SHIPPED, "blocks", blocks)
    monkeypatch.setattr(fleet_actor, "POLICY_TIMEOUT_S", 0.01)

    async def story(stage: Stage) -> None:
        try:
            await stage.report("rollout-0")
            await stage.until(lambda: "within 0.01 s" in caplog.text)
            assert len(calls) == 1
            stage.launcher.room = 5
            await stage.until(lambda: stage.actor._state.slots == 5)  # it goes on looking
        finally:
            may_answer.set()
        await stage.until(lambda: "rollout-1" in stage.actor._state.members)  # late is better than never

    with caplog.at_level(logging.WARNING):
        play(story, monkeypatch, fleet_policy="blocks")


def leaves(view: View) -> int:
    CALLS.append(view)
    raise SystemExit("enough")


def test_a_policy_cannot_end_the_fleet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(policy.SHIPPED, "leaves", leaves)
    CALLS.clear()

    async def story(stage: Stage) -> None:
        await stage.report("rollout-0")
        await stage.until(lambda: len(CALLS) > 2)
        assert "policy leaves is ignored: enough" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(story, monkeypatch, fleet_policy="leaves")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20", 20.0), ("0\n", 0.0), ("-3", 0.0), ("", 25.0), ("soon", 25.0), ("nan", 25.0), ("1763900000", 25.0)],
)
def test_a_notice_may_say_how_long_there_is(tmp_path: Path, text: str, seconds: float) -> None:
    assert preemption.notice(tmp_path / "notice") is None
    (tmp_path / "notice").write_text(text)
    assert preemption.notice(tmp_path / "notice") == seconds


@pytest.mark.parametrize("kind", ["pipe", "binary", "folder"])
def test_a_notice_that_cannot_be_read_is_one_without_a_time(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notice"
    make = {"pipe": lambda: os.mkfifo(path), "binary": lambda: path.write_bytes(b"\xff\xfe"), "folder": path.mkdir}
    make[kind]()
    assert preemption.notice(path) == preemption.NOTICE_S
    assert preemption.notice(path.parent / "other") is None  # the control
    (path.parent / "file").touch()
    assert preemption.notice(path.parent / "file" / "notice") is None


async def test_a_notice_is_told_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    monkeypatch.setenv(preemption.VARIABLE, str(path))
    monkeypatch.setattr(preemption, "LOOK_INTERVAL_S", 0.01)
    told: list[float] = []
    answers = [False, True, True]  # the fleet does not answer at first

    async def tell(worker: str, timeout_s: float) -> bool:
        told.append(timeout_s)
        return answers.pop(0)

    monkeypatch.setattr(preemption, "_tell", tell)

    watching = asyncio.create_task(preemption.watch("rollout-0/0"))
    await asyncio.sleep(0.05)
    assert told == []
    path.write_text("7")
    while len(told) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert told == [7.0, 7.0]
    path.unlink()
    await asyncio.sleep(0.05)
    path.write_text("5")
    while len(told) < 3:
        await asyncio.sleep(0.01)
    watching.cancel()
