"""One replica follows by itself: stories with an engine made of plain coroutines, and a hub's answers in a list."""

import asyncio

import pytest

from tensorhub_plugins.core import HubUnreachable, NotPublished
from tensorhub_plugins.vllm import follower as module
from tensorhub_plugins.vllm.follower import Follower, UpdateFailed


class Engine:
    """Two workers. `fails` maps a method and worker to what goes wrong there."""

    def __init__(self, *, fails=None, running=()):
        self.calls = []
        self.fails = dict(fails or {})
        self.requests = dict(running)
        self.version = 0
        self.is_paused = False
        self.fetching = 0

    async def rpc(self, method, *args):
        self.calls.append(method.removeprefix("tensorhub_"))
        return [getattr(self, f"_{method.removeprefix('tensorhub_')}")(worker, *args) for worker in (0, 1)]

    def _begin_fetch(self, worker, version, deadline_s):
        self.fetching = 1  # worker 1 has it at the first poll, worker 0 at the second

    def _poll(self, worker):
        self.fetching -= worker
        failure = self.fails.get(("fetch", worker))
        state = "fetching" if self.fetching > 0 else "failed" if failure else "ready"
        return {"state": state, "error": failure if state == "failed" else None}

    def _prepare_install(self, worker, deadline_s):
        pass

    def _discard(self, worker):
        pass

    def _install(self, worker, version, deadline_s):
        assert self.is_paused, "weights change only while the engine stands still"
        failure = self.fails.get(("install", worker))
        broken = self.fails.get(("broken", worker))
        return {"installed": not (failure or broken), "error": failure or broken, "broken": broken}

    async def pause(self):
        self.calls.append("pause")
        self.is_paused = True

    async def resume(self):
        self.calls.append("resume")
        self.is_paused = False

    def running(self):
        return dict(self.requests)

    def switch(self, version, running):
        assert self.is_paused, "samples change their number only while the engine stands still"
        self.calls.append(f"switch {version}")
        self.version = version


class Done(Exception):
    """The hub has nothing more to say: the story is over."""


def follow(engine, answers, **options):
    """Let a follower hear these answers: versions, or errors."""
    heard = iter(answers)
    newer_than = []

    def wait(version, *, newer_than: int, deadline_s):
        asked.append(newer_than)
        answer = next(heard, Done())
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked = newer_than

    async def no_sleep(seconds):
        await asyncio.sleep(0)

    follower = Follower(engine, wait, worker="rollout-0/0", deadline_s=1, sleep=no_sleep, **options)
    with pytest.raises(Done):
        asyncio.run(asyncio.wait_for(follower.follow(), 20))
    return follower, asked


UPDATE = ["begin_fetch", "poll", "poll", "prepare_install", "pause", "install", "switch {}", "resume"]


def update(version):
    return [call.format(version) for call in UPDATE]


def test_it_fetches_while_generating_and_stops_only_to_install():
    engine = Engine()
    follower, asked = follow(engine, [3, 5])
    assert engine.calls == update(3) + update(5)
    assert asked == [0, 3, 5]
    assert (follower.version, engine.version, engine.is_paused) == (5, 5, False)


def test_nothing_new_and_no_hub_change_nothing():
    engine = Engine()
    follower, asked = follow(engine, [3, NotPublished("nothing newer"), HubUnreachable("gone"), 4])
    assert engine.calls == update(3) + update(4)
    assert asked == [0, 3, 3, 3, 4]


def test_a_version_that_does_not_arrive_stops_nobody():
    engine = Engine(fails={("fetch", 1): "VersionGone: superseded"})
    follower, asked = follow(engine, [3])
    assert engine.calls == ["begin_fetch", "poll", "poll", "discard"]  # the other worker had it
    assert follower.version == 0 and not engine.is_paused
    assert asked == [0, 0]


def test_an_install_that_never_began_goes_on_with_the_old_version():
    engine = Engine(fails={("install", 0): "not ready"})
    follower, _ = follow(engine, [3])
    assert engine.calls == ["begin_fetch", "poll", "poll", "prepare_install", "pause", "install", "resume"]
    assert follower.version == 0 and not follower.is_broken


def test_mixed_weights_never_answer_until_they_are_repaired():
    engine = Engine(fails={("broken", 1): "half of it is new"})
    follower, asked = follow(engine, [3])
    assert engine.calls[-1] == "install" and engine.is_paused
    assert follower.is_broken and follower.version == 0

    engine.fails.clear()
    follower.wait = lambda *a, **k: 3
    engine.calls.clear()
    asyncio.run(follower.update(asyncio.run(follower.next_version())))
    assert engine.calls == ["begin_fetch", "poll", "poll", "prepare_install", "install", "switch 3", "resume"]
    assert (follower.is_broken, engine.is_paused) == (False, False)


def test_the_same_version_repairs():
    follower, asked = follow(Engine(), [3])
    follower.is_broken = True
    follower.wait = lambda version, *, newer_than, deadline_s: 3 if newer_than == 2 else pytest.fail("asked for newer")
    assert asyncio.run(follower.next_version()) == 3


def test_workers_that_never_finish_are_given_up(monkeypatch):
    monkeypatch.setattr(module, "POLL_GRACE_S", -10)
    engine = Engine()
    engine._poll = lambda worker: {"state": "fetching", "error": None}
    follower, _ = follow(engine, [3])
    assert "pause" not in engine.calls
    with pytest.raises(UpdateFailed, match="not fetched in time"):
        asyncio.run(follower.fetch(3))


def test_it_stops_following_where_it_is_told_to():
    engine = Engine()
    heard = iter([2, 4])
    follower = Follower(engine, lambda *a, **k: next(heard), worker="w", deadline_s=1, until=4)
    asyncio.run(asyncio.wait_for(follower.follow(), 20))
    assert follower.version == 4


def test_requests_in_flight_are_counted(monkeypatch):
    told = []
    monkeypatch.setattr(module, "record", lambda event, **fields: told.append((event, fields)))
    engine = Engine(running={"a": 3, "b": 0, "c": 1})

    def switch(version, running):
        assert running == {"a": 3, "b": 0, "c": 1}
        del engine.requests["c"]  # its client went away meanwhile

    engine.switch = switch
    follow(engine, [3])
    assert [event for event, _ in told] == ["pause", "resume"]
    assert told[0][1]["in_flight"] == 3
    assert (told[1][1]["in_flight"], told[1][1]["lost"]) == (2, 1)
