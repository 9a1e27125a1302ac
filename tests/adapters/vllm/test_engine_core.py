"""Following, with the real store, a toy model and an engine core made of one thread: no engine, so it is cheap."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from client_processes import hold_back, let_go
from recorded_engine import RecordedEngine
from vllm_engines import wait_until

from tensorhub_plugins.core import Client, HubLimits, NotPublished, Server, UsageError, VersionRefused, start_server
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.vllm.config import FollowConfig, WorkerConfig
from tensorhub_plugins.vllm.engine import core_follower, follower
from tensorhub_plugins.vllm.engine.core_follower import CoreFollower
from tensorhub_plugins.vllm.worker import checkpoint_contract, reload
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import ShardPosition

TIMEOUT_S = 20.0


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 1000))


class Core(RecordedEngine):
    """As engine.Core: what is asked of it runs in its loop."""

    def __init__(self, updater: Updater) -> None:
        super().__init__()
        self.updater = updater
        self.idle, self._available, self.asked, self.version = True, True, 0, 0
        self.looks, self.holder, self.asks, self.is_paused_by_another = 0, "", 0, False
        self.status: Callable[[], dict[str, Any]] = dict
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._loop = threading.Thread(target=self._run)
        self._loop.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    @property
    def available(self) -> bool:
        self.asked += not self._available
        return self._available

    @available.setter
    def available(self, available: bool) -> None:
        self._available = available

    async def ask(self, action: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(action())
            except Exception as error:
                done.set_exception(error)

        self._tasks.put(run)
        return await asyncio.wrap_future(done)

    async def is_available(self) -> bool:
        return bool(await self.ask(lambda: self.available))

    async def is_idle(self) -> bool:
        return bool(await self.ask(lambda: self.idle))

    async def look(self) -> tuple[int, bool]:
        self.looks += 1
        polled = self.updater.poll()
        return polled["version"], not self.available and bool(polled["broken"])

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        name = method.removeprefix("tensorhub_")
        if name not in ("poll", "prepare_install"):
            self.log.append((name, *args[:1]))
        return [await self.ask(lambda: getattr(self.updater, name)(*args))]

    async def held_by(self) -> str:
        self.asks += 1
        return self.holder

    def settle(self, version: int) -> None:
        pass

    def close(self) -> None:
        self._tasks.put(None)
        self._loop.join()


@pytest.fixture
def following(hub: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Core]]:
    monkeypatch.setattr(reload, "reload_checkpoint", lambda model, config, named, **_: _fill(model, named))
    monkeypatch.setattr(checkpoint_contract, "rehearse", _rehearsed)
    ends: list[Callable[[], Any]] = []

    def start(when: str, **options: Any) -> Core:
        config = WorkerConfig.parse({"hub": hub.address, "run": "r", "model": "m", "replica": "engine"})
        updater = Updater(config, Toy(), SimpleNamespace(), ShardPosition(0, 1, "runtime:toy"), lambda vote: [vote])
        core = Core(updater)
        how: Any = {"when": when, "patience_s": options.get("patience_s", TIMEOUT_S), "until": options.get("until")}
        one = CoreFollower(cast(Any, core), config, FollowConfig(**how))
        one.start()
        core.one, core.status = one, one.status
        ends.extend([one.close, one._thread.join, core.close, updater.close])
        return core

    yield start
    for end in ends:
        end()


def _rehearsed(model: Any, vllm_config: Any, tensors: Any) -> checkpoint_contract.Rehearsal:
    return checkpoint_contract.Rehearsal(checkpoint_contract.shapes_of(tensors), frozenset(tensors))


def _fill(model: Toy, named: Any) -> None:
    with torch.no_grad():
        model.weight.copy_(dict(named)["weight"])


def test_a_follower_that_never_hears_the_hub_is_cut_off_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link broke between the first weights and its first question: it passed for one that hears the hub."""
    config = WorkerConfig.parse({"hub": "tcp://127.0.0.1:9", "run": "r", "model": "m", "replica": "engine"})
    core: Any = SimpleNamespace(version=3, is_paused_by_another=False)
    now = 1000.0
    monkeypatch.setattr(core_follower, "time", SimpleNamespace(monotonic=lambda: now))
    one = CoreFollower(core, config, FollowConfig(when="now", patience_s=1.0))
    assert one.status()["hub_silent_s"] == 0.0
    now += 60.0
    assert one.status()["hub_silent_s"] == 60.0


def test_one_that_has_left_says_so(following: Any) -> None:
    """Its loop has ended: what was asked there stayed without an answer."""
    core = following("now")
    core.one.close()
    core.one._thread.join(TIMEOUT_S)
    for question in ("news", "hold", "enter"):
        assert core.one.ask(question, ()).result(TIMEOUT_S) == (("UpdateFailed", "engine has left the store", 0), None)


def test_an_engine_has_one_owner() -> None:
    core = SimpleNamespace(tensorhub_ask=None)
    (kind, message, _), _ = core_follower._follow_owner(core, cast(Any, None), {}, {}, None)
    assert kind == "UsageError" and "follows already" in message


def publish(hub: Server, *versions: int) -> None:
    with Client(hub.address, run="r", model="m", replica=f"trainer-{versions[0]}") as trainer:
        for version in versions:
            trainer.publish(version, {"weight": torch.full((4, 1000), float(version))})
        wait_until(lambda: len(trainer.versions()[-1].layouts) == 2, "somebody has converted it")


def switches(version: int) -> list[Any]:
    return ["pause", ("install", version), "forget", "resume"]


def test_now_means_at_once_also_when_requests_run(following: Any, hub: Server) -> None:
    core = following("now")
    core.idle = False
    publish(hub, 1)
    wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
    assert core.log == [("start_fetch", 1), *switches(1)]
    assert core.updater.model.weight.unique().tolist() == [1.0]


def test_idle_waits_for_its_moment_and_takes_what_is_newest_then(following: Any, hub: Server) -> None:
    core = following("idle")
    core.idle = False
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        for version in (1, 2):
            trainer.publish(version, {"weight": torch.full((4, 1000), float(version))})
            wait_until(lambda version=version: ("start_fetch", version) in core.log, "fetched")
        assert core.log == [("start_fetch", 1), ("start_fetch", 2)]
        core.idle = True
        wait_until(lambda: core.log[-3:] == [("install", 2), "forget", "resume"], "switched")
        assert core.log == [("start_fetch", 1), ("start_fetch", 2), *switches(2)]


def peer(hub: Server) -> Client:
    """Return another worker of the run, which may ask for what the engine computes with."""
    return Client(hub.address, run="r", model="m", replica="other")


@pytest.mark.parametrize("in_time", [True, False], ids=["served", "withdrawn before it was served"])
def test_it_returns_from_a_version_that_is_withdrawn_and_serves_what_it_returned_to(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    offer = Updater._offer

    def offer_if_in_time(self: Updater, staged: Any) -> None:
        if staged.version == 2 and not in_time:
            raise UsageError("version 2 was withdrawn")
        offer(self, staged)

    monkeypatch.setattr(Updater, "_offer", offer_if_in_time)
    core = following("now")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer, peer(hub) as other:
        trainer.retain(newest=2)
        for version in (1, 2):
            trainer.publish(version, {"weight": torch.full((4, 1000), float(version))})
            wait_until(lambda version=version: core.log[-3:] == [("install", version), "forget", "resume"], "switched")
            served = version if in_time else 1
            wait_until(lambda served=served: core.updater.poll()["served_version"] == served, "served")
            other.fetch(served, ("runtime:toy",)).release()  # else the next one would be offered to nobody
        began = len(core.log)
        trainer.withdraw(2)
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"] and len(core.log) > began, "returned")
        assert core.log[began:] == [("start_fetch", 1), *switches(1)]
        assert core.updater.model.weight.unique().tolist() == [1.0]
        wait_until(lambda: not core.updater.poll()["serving"], "it serves again")
        assert core.updater.poll()["served_version"] == 1
        layouts = {info.version: info.layouts for info in trainer.versions() if info.visible}
        assert layouts == {1: {"checkpoint": ("trainer/0",), "runtime:toy": ("engine/0",)}}
        trainer.publish(3, {"weight": torch.full((4, 1000), 3.0)})
        wait_until(lambda: core.log[-3:] == [("install", 3), "forget", "resume"], "it follows on")


@pytest.mark.parametrize(("until", "newer"), [(None, False), (1, False), (1, True), (None, True)])
@pytest.mark.parametrize("how", ["replaced", "lost"])
def test_what_another_client_makes_of_the_weights_is_mended(
    following: Any, hub: Server, how: str, until: int | None, newer: bool
) -> None:
    """It went on as this version; and where they were lost, nobody could resume it, and no later version came in. Also
    of the last version that is followed, where the hub names a newer one; and by a hold there, of one that is held."""
    core = following("now", until=until)
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
        wait_until(lambda: core.updater.poll()["served_version"] == 1, "served")
        began, hold = len(core.log), lambda: core.one.ask("hold", [1, 60.0]).result(TIMEOUT_S)
        assert not (held := newer and not until) or hold() == (("", "", 0), 1)
        if newer:
            trainer.publish(2, {"weight": torch.full((4, 1000), 2.0)})
        if how == "replaced":
            core.updater.mark_unversioned()
        else:
            core.updater.mark_broken("sleep(level=2) threw the weights away")
            core.available = False
        with torch.no_grad():
            core.updater.model.weight.fill_(9.0)
        assert not held or hold() == (("", "", 0), 1)
        wait_until(lambda: len(core.log) > began and core.log[-1] == "resume", "mended")
        assert core.log[began:] == [("start_fetch", 1), *switches(1)[how == "lost" :]]
        assert core.updater.model.weight.unique().tolist() == [1.0]
        wait_until(lambda: core.status()["wanted"] == 1 + held, "it is said what is to be run")


def test_a_failure_is_over_when_nothing_else_is_to_be_run(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was shown for as long as no later version came."""
    for name in ("RETRY_DELAY_S", "HUB_TIMEOUT_S"):
        monkeypatch.setattr(core_follower, name, 0.1)
    core = following("now")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
        with monkeypatch.context() as patched:
            patched.delattr(type(core), "look")
            wait_until(lambda: "look" in core.status()["failure"], "it fails")
        wait_until(lambda: not core.status()["failure"], "it is well again")


@pytest.mark.parametrize("when", ["now", "idle"])
def test_weights_that_are_lost_while_it_waits_for_its_moment_are_mended(following: Any, hub: Server, when: str) -> None:
    """For whoever had paused it could not resume it any more, and it waited for that: for ever, or for its patience."""
    core = following(when, patience_s=3600.0)
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
        core.idle = False
        core.available = when == "idle"
        trainer.publish(2, {"weight": torch.full((4, 1000), 2.0)})
        waits = {"now": lambda: core.asked > 3, "idle": lambda: ("start_fetch", 2) in core.log}
        wait_until(waits[when], "it waits")
        core.available = False
        core.updater.mark_broken("reload_weights failed half way")
        wait_until(lambda: core.log[-1] == "resume" and ("install", 2) in core.log, "mended")
        assert core.updater.model.weight.unique().tolist() == [2.0]


@pytest.mark.parametrize("is_lost", [True, False])
def test_it_looks_at_the_weights_while_a_version_arrives(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """That takes minutes for a large model; so long other data parallel ranks answered with a lost rank's experts."""
    monkeypatch.setattr(core_follower, "HUB_TIMEOUT_S", 0.05)
    core = following("now")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
        core.available = False  # so that nothing is read yet
        trainer.publish(2, {"weight": torch.full((4, 1000), 2.0)})
        hold_back(trainer, 2, 0)
        core.available = True
        wait_until(lambda: core.log[-1:] == [("start_fetch", 2)], "it is fetched")
        if is_lost:
            core.available = False
            core.updater.mark_broken("reload_weights failed half way")
            wait_until(lambda: core.status()["broken"], "it has seen that")
        else:
            looks = core.looks
            wait_until(lambda: core.looks > looks + 1, "it looks")
        let_go(trainer, 2)
        wait_until(lambda: core.log[-3:] == [("install", 2), "forget", "resume"], "switched")
    assert core.log[-4:-3] == ([("start_fetch", 2)] if is_lost else ["pause"])  # it stands still already


def test_a_version_that_is_lost_is_no_reason_to_go_back(following: Any, hub: Server) -> None:
    """The control of the test above: everything is the same, but no operator has said a word."""
    core = following("now")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        with peer(hub) as other:
            wait_until(lambda: core.updater.poll()["served_version"] == 1, "served")
            other.fetch(1, ("runtime:toy",)).release()
            other.publish(2, {"weight": torch.full((4, 1000), 2.0)})
            wait_until(lambda: core.log[-3:] == [("install", 2), "forget", "resume"], "switched")
            wait_until(lambda: core.updater.poll()["served_version"] == 2, "served")
        core.updater._client.unpublish(2, "runtime:toy")
        core.updater._client.retain(newest=0)
        core.updater._client.unpublish(2)
        wait_until(lambda: [info.version for info in trainer.versions() if info.visible] == [1], "2 is lost")
        trainer.wait(1)
        with pytest.raises(NotPublished):
            trainer.target(2, timeout_s=1.5)  # longer than one question of the follower
        assert core.log[-3:] == [("install", 2), "forget", "resume"]


def test_what_is_withdrawn_before_the_idle_moment_is_never_installed(following: Any, hub: Server) -> None:
    core = following("idle")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.retain(newest=2)
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
        core.idle = False
        trainer.publish(2, {"weight": torch.full((4, 1000), 2.0)})
        wait_until(lambda: core.updater.poll()["state"] == "ready", "fetched")
        trainer.withdraw(2)
        wait_until(lambda: core.log[-1] == ("discard",), "dropped")
        core.idle = True
        trainer.publish(3, {"weight": torch.full((4, 1000), 3.0)})
        wait_until(lambda: core.log[-3:] == [("install", 3), "forget", "resume"], "switched")
        assert ("install", 2) not in core.log


def test_a_version_that_the_worker_refuses_is_fetched_once(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = Updater._acquire

    def refuse(self: Updater, version: int, *more: Any) -> Any:
        if version == 2:
            raise VersionRefused("a tensor is missing", version=version)
        return acquire(self, version, *more)

    monkeypatch.setattr(Updater, "_acquire", refuse)
    core = following("now")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.retain(3)
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
        trainer.publish(2, {"weight": torch.full((4, 1000), 2.0)})
        wait_until(lambda: ("start_fetch", 2) in core.log, "tried")
        wait_until(lambda: _shown(hub) == ["it cannot install version 2: a tensor is missing"], "shown to people")
        assert core.status()["refusal"] == (2, "a tensor is missing [version=2]")
        trainer.publish(3, {"weight": torch.full((4, 1000), 3.0)})
        wait_until(lambda: core.log[-3:] == [("install", 3), "forget", "resume"], "switched")
        wait_until(lambda: _shown(hub) == [], "it has a newer one")
        assert core.status()["refusal"] == (0, "")
        assert core.log.count(("start_fetch", 2)) == 1
        trainer.pin(2)
        wait_until(lambda: core.log.count(("start_fetch", 2)) == 2, "tried again, because it was pinned")


def _shown(hub: Server) -> list[str]:
    """What `tensorhub status` says of refusals."""
    lines = status_text(fetch_status(hub.address)).splitlines()
    return [line.strip().partition(" [")[0] for line in lines if "it cannot install" in line]


def test_patience_ends(following: Any, hub: Server) -> None:
    core = following("idle", patience_s=0.1)
    core.idle = False
    publish(hub, 1)
    wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")


def test_patience_ends_for_versions_that_come_faster(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had its own: an engine that is always busy then stays with its first version. Once it has what is to be run,
    the next one has patience of its own."""
    now = 1000.0
    monkeypatch.setattr(core_follower, "time", SimpleNamespace(monotonic=lambda: now))
    core = following("idle", patience_s=10.0)
    busy: list[Any] = []  # what it has fetched, when it looks for an idle moment

    async def is_idle() -> bool:
        busy.append(core.log[-1])
        return False

    core.is_idle = is_idle
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.retain(newest=4)
        for version in (1, 2, 3):
            trainer.publish(version, {"weight": torch.full((4, 1000), float(version))})
            wait_until(lambda version=version: ("start_fetch", version) in busy, "it waits for an idle moment")
            now += 4.0
        wait_until(lambda: core.log[-3:] == [("install", 3), "forget", "resume"], "switched")
        trainer.publish(4, {"weight": torch.full((4, 1000), 4.0)})
        wait_until(lambda: ("start_fetch", 4) in busy, "it is patient again")
        trainer.withdraw(4)
        wait_until(lambda: core.log[-1] == ("discard",), "dropped")
        wait_until(lambda: core.status()["wanted"] == 3, "it has what is to be run")
        now += 20.0
        trainer.publish(5, {"weight": torch.full((4, 1000), 5.0)})
        wait_until(lambda: ("start_fetch", 5) in busy, "and again")
    assert ("install", 4) not in core.log and ("install", 5) not in core.log


def test_an_install_under_way_is_no_broken_engine(following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, for the moment of each install: a router that asked then sent its requests elsewhere."""
    seen: list[bool] = []
    core = following("now")
    rpc = core.rpc

    async def watched(method: str, *args: Any) -> list[Any]:
        if method == "tensorhub_install":
            seen.append(core.status()["broken"])
        return list(await rpc(method, *args))

    monkeypatch.setattr(core, "rpc", watched)
    monkeypatch.setattr(reload, "reload_checkpoint", lambda model, config, named, **_: 1 / 0)
    monkeypatch.setattr(follower, "RETRY_DELAY_S", 0.01)
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: len(seen) > 1, "it has tried to repair what has failed half way")
    assert seen[:2] == [False, True]


def test_what_somebody_else_has_paused_stays_as_it_is(following: Any, hub: Server) -> None:
    core = following("now", patience_s=0.0)
    core.available = False
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        trainer.wait(1, timeout_s=TIMEOUT_S)
        wait_until(lambda: core.asked > 3, "it has asked whether it may")
        assert core.log == []
        core.available = True
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")


@pytest.mark.slow
def test_a_hold_at_a_version_that_does_not_come_ends_with_its_release(following: Any, hub: Server) -> None:
    """It was fetched until the deadline, ten minutes, and what came meanwhile was not. The control: one that comes."""
    core = following("now")
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.one.version == 1, "the first one")
        held = core.one.ask("hold", [3, 60.0])
        wait_until(lambda: core.one.is_held and core.one._one_update.locked(), "it waits for that one")
        trainer.publish(2, {"weight": torch.ones(4, 1000)})
        core.one.ask("release", []).result(TIMEOUT_S)
        assert "was released before it was held" in held.result(TIMEOUT_S)[0][1]
        wait_until(lambda: core.one.version == 2, "it follows on")
        assert ("start_fetch", 3) not in core.log
        held = core.one.ask("hold", [3, 60.0])
        trainer.publish(3, {"weight": torch.ones(4, 1000)})
        trainer.publish(4, {"weight": torch.ones(4, 1000)})
        assert held.result(TIMEOUT_S) == (("", "", 0), 3)
        core.one.ask("release", []).result(TIMEOUT_S)
        wait_until(lambda: core.one.version == 4, "it follows on")
        waits = core.one.ask("hold", [9, 60.0])
        wait_until(lambda: core.one._holds_waiting, "it waits for that one")
        core.one.ask("release", [])
        held = core.one.ask("hold", [0, 60.0])  # before the first one looks again
        assert "was released before it was held" in waits.result(TIMEOUT_S)[0][1]
        assert held.result(TIMEOUT_S) == (("", "", 0), 4)
        core.one.ask("abandon", []).result(TIMEOUT_S)
        assert core.one.is_held, "a client of a hold that waits has left, not this one's"
        waits = core.one.ask("hold", [9, 60.0])
        wait_until(lambda: core.one._holds_waiting, "it waits for that one")
        core.one.ask("abandon", []).result(TIMEOUT_S)
        assert "was released before it was held" in waits.result(TIMEOUT_S)[0][1] and not core.one.is_held
        seen: list[bool] = []
        is_visible = core.one.is_visible

        async def look(version: int) -> bool:
            seen.append(await is_visible(version))
            return seen[-1]

        core.one.is_visible = look
        held = core.one.ask("hold", [5, 60.0])
        hub.close()  # it is started again while the engine waits
        seen.clear()
        wait_until(lambda: len(seen) > 1, "it has looked while the hub was away")
        with start_server(hub.address, limits=HubLimits(grace_s=0.1)):
            trainer.publish(5, {"weight": torch.ones(4, 1000)})
            assert held.result(TIMEOUT_S) == (("", "", 0), 5)


@pytest.mark.parametrize("patience_s", [0.0, 3600.0])
def test_what_somebody_else_keeps_paused_says_so(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """For `tensorhub status`; a moment's pause, as trainers make around their updates, is none."""
    monkeypatch.setattr(core_follower, "PAUSED_S", patience_s)
    core = following("now")
    core.available = False

    def said() -> str:
        return "".join(worker["fails"] for model in fetch_status(hub.address)["models"] for worker in model["workers"])

    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.asked > 10, "it has asked whether it may")
        if not patience_s:
            wait_until(lambda: said() == core_follower.PAUSED, "the hub has been told")
            assert core.status()["failure"] == core_follower.PAUSED
            trainer.publish(2, {"weight": torch.ones(4, 1000)})
            wait_until(lambda: core.status()["wanted"] == 2, "it has heard of the next one, too")
        else:
            assert said() == core.status()["failure"] == ""
        core.available = True
        wait_until(lambda: core.log[-1:] == ["resume"], "switched")
        wait_until(lambda: said() == core.status()["failure"] == "", "and that it is over")


@pytest.mark.slow
def test_after_an_install_that_failed_half_way_it_stays_paused_until_one_succeeds(
    following: Any, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("injected"), RuntimeError("injected")]

    def load_all(model: Toy, config: Any, named: Any) -> None:
        if failures:
            raise failures.pop()
        _fill(model, named)

    core = following("idle")
    monkeypatch.setattr(reload, "reload_checkpoint", load_all)
    monkeypatch.setattr(checkpoint_contract, "rehearse", _rehearsed)
    core.idle = True
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.log[-3:] == [("install", 1), "forget", "resume"], "switched")
    attempt = [("start_fetch", 1), ("install", 1)]  # paused once, and then until one succeeds
    assert core.log == [attempt[0], "pause", attempt[1], *attempt, *attempt, "forget", "resume"]


def test_after_a_pause_of_others_only_the_newest_version_is_installed(following: Any, hub: Server) -> None:
    """It installed the one it had heard of before the pause, and then the newest: two pauses."""
    core = following("now")
    core.available = False
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.asked > 3, "it has heard of version 1, and asked whether it may")
        trainer.publish(2, {"weight": torch.full((4, 1000), 2.0)})
        core.available = True
        wait_until(lambda: core.log[-1:] == ["resume"], "switched")
    assert core.log == [("start_fetch", 2), *switches(2)]


@pytest.mark.slow
def test_the_status_says_for_how_long_it_is_behind_what(following: Any, hub: Server) -> None:
    core = following("now")
    assert core.status()["behind_s"] == 0.0
    core.available = False
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.status()["behind_s"] > 0.0, "it has heard of version 1")
        assert (core.status()["wanted"], core.status()["version"]) == (1, 0)
        core.available = True
        wait_until(lambda: core.log[-1:] == ["resume"], "switched")
        core.version = 1  # as the engine's tokens are
        assert (core.status()["wanted"], core.status()["behind_s"]) == (1, 0.0)
        assert core.status()["last"]["pull_s"] > 0.0
        trainer.publish(2, {"bias": torch.ones(1)})
        wait_until(lambda: core.status()["refusal"][0] == 2, "it refuses version 2")
        wait_until(lambda: core.status()["behind_s"] > 0.0, "and stays behind it")
        trainer.withdraw(2)
        wait_until(lambda: core.status()["wanted"] == 1, "nothing else is to be run")


def test_what_keeps_kv_is_named_once_and_nobody_is_paused_for_it(
    following: Any, hub: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(follower, "RETRY_DELAY_MAX_S", 0.01)
    core = following("now")
    core.holder = "1 requests (x) wait for KV of another engine: abort them", 0
    with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        trainer.publish(1, {"weight": torch.ones(4, 1000)})
        wait_until(lambda: core.asks > 5, "it was asked again and again")
        assert core.log == []
        core.holder = ""
        wait_until(lambda: core.log[-1:] == ["resume"], "switched")
    assert core.log == [("start_fetch", 1), *switches(1)]
    assert caplog.text.count("wait for KV of another engine: abort them") == 1
