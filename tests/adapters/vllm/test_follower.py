"""One replica follows by itself: stories with an engine made of plain coroutines, and a hub's answers in a list."""

import asyncio

import pytest

from tensorhub_plugins.core import HubUnreachable, NotPublished, TensorHubError, VersionGone, version_of
from tensorhub_plugins.core.protocol.messages import REFUSED_MAX
from tensorhub_plugins.vllm.engine.caches import StaleCaches
from tensorhub_plugins.vllm.engine.follower import Follower, UpdateFailed


class Engine:
    """Two workers. `fails` maps a method and worker to what goes wrong there."""

    def __init__(self, *, fails=None, running=()):
        self.calls = []
        self.fails = dict(fails or {})
        self.requests = list(running)
        self.is_paused = False
        self.gone = []
        self.fetching = 0
        self.error = None
        self.failures = []

    async def rpc(self, method, *args):
        self.calls.append(method.removeprefix("tensorhub_"))
        return [getattr(self, f"_{method.removeprefix('tensorhub_')}")(worker, *args) for worker in (0, 1)]

    def _start_fetch(self, worker, version, timeout_s, grows):
        self.fetching = 1  # worker 1 has it at the first poll, worker 0 at the second

    def _poll(self, worker):
        self.fetching -= worker
        failure = self.fails.get(("fetch", worker))
        state = "fetching" if self.fetching > 0 else "failed" if failure else "ready"
        error = failure if state == "failed" else self.error
        return {"state": state, "error": error, "error_kind": str(error).partition(":")[0] if error else None}

    def _prepare_install(self, worker, timeout_s):
        self.error = self.fails.get(("prepare", worker))
        if self.error:
            raise RuntimeError(self.error)

    def _discard(self, worker):
        pass

    def _install(self, worker, version, timeout_s):
        assert self.is_paused, "weights change only while the engine stands still"
        failure = self.fails.get(("install", worker))
        broken = self.fails.get(("broken", worker))
        return {"installed": not (failure or broken), "error": failure or broken, "broken": broken}

    async def pause(self):
        self.calls.append("pause")
        self.is_paused = True

    async def forget(self):
        self.calls.append("forget")
        assert self.is_paused
        if self.fails.get("forget"):
            raise StaleCaches(self.fails["forget"].pop())

    async def resume(self):
        self.calls.append("resume")
        self.is_paused = False

    async def at_once(self, steps):
        return await steps()

    def departed(self):
        gone, self.gone = self.gone, []
        return gone

    def running(self):
        return list(self.requests)


class Done(Exception):
    """The hub has nothing more to say: the story is over."""


def follow(engine, answers, **options):
    """Let a follower hear these answers: versions, or errors."""
    heard = iter(answers)
    asked = []

    def target(installed, *, refused, pins, failure, timeout_s):
        engine.failures.append(failure)
        asked.append((installed, tuple(refused)) if refused else installed)
        answer = next(heard, Done())
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def no_sleep(seconds):
        await asyncio.sleep(0)

    follower = Follower(engine, target, worker="rollout-0/0", timeout_s=1, sleep=no_sleep, **options)
    with pytest.raises(Done):
        asyncio.run(asyncio.wait_for(follower.follow(), 20))
    return follower, asked


@pytest.mark.parametrize(
    ("version", "of_hub", "why"),
    [
        (version_of(0, 7), {"attempt": 1}, "has version 7, and waits for the first of attempt 1"),
        (version_of(1, 6), {"attempt": 2}, "has version 6 of attempt 1, and waits for the first of attempt 2"),
        (version_of(1, 6), {"attempt": 1}, ""),
        (7, {"attempt": 0}, ""),
        (7, {"attempt": 1, "pinned": 7}, ""),  # operators want it
    ],
)
def test_a_version_of_a_former_incarnation_of_the_trainer_takes_no_work(version, of_hub, why):
    follower, _ = follow(Engine(), [version])
    follower.of_hub = lambda: {"why_not": "", **of_hub}
    assert follower.status_now().why_not == (f"rollout-0/0 {why}" if why else "")


UPDATE = ["start_fetch", "poll", "poll", "prepare_install", "pause", "install", "forget", "resume"]


def test_it_fetches_while_generating_and_stops_only_to_install():
    engine = Engine()
    follower, asked = follow(engine, [3, 5])
    assert engine.calls == UPDATE + UPDATE
    assert asked == [0, 3, 5]
    assert (follower.version, engine.is_paused) == (5, False)


def test_nothing_new_and_no_hub_change_nothing():
    engine = Engine()
    follower, asked = follow(engine, [3, NotPublished("nothing newer"), HubUnreachable("gone"), 4])
    assert engine.calls == UPDATE + UPDATE
    assert asked == [0, 3, 3, 3, 4]


def test_a_version_that_does_not_arrive_stops_nobody():
    engine = Engine(fails={("fetch", 1): "VersionGone: superseded"})
    follower, asked = follow(engine, [3])
    assert engine.calls == ["start_fetch", "poll", "poll", "discard"]  # the other worker had it
    assert follower.version == 0 and not engine.is_paused
    assert asked == [0, 0]
    assert engine.failures[0] == "" and "VersionGone: superseded" in engine.failures[1]  # the hub hears of it
    engine.fails.clear()
    follow(engine, [4, 5])
    assert engine.failures[2:] == ["", "", ""]


def test_an_install_that_never_began_goes_on_with_the_old_version():
    engine = Engine(fails={("install", 0): "not ready"})
    follower, _ = follow(engine, [3])
    assert engine.calls == ["start_fetch", "poll", "poll", "prepare_install", "pause", "install", "forget", "resume"]
    assert follower.version == 0 and not follower.is_broken


def test_mixed_weights_never_answer_until_they_are_repaired():
    engine = Engine(fails={("broken", 1): "half of it is new"})
    follower, asked = follow(engine, [3])
    assert engine.calls[-1] == "install" and engine.is_paused
    assert follower.is_broken and follower.version == 0

    engine.fails.clear()
    follower.target = lambda *a, **k: 3
    engine.calls.clear()
    asyncio.run(follower.update(asyncio.run(follower.next_version())))
    assert engine.calls == ["start_fetch", "poll", "poll", "prepare_install", "install", "forget", "resume"]
    assert (follower.is_broken, engine.is_paused) == (False, False)


def test_the_same_version_repairs():
    follower, asked = follow(Engine(), [3])
    follower.is_broken = True
    follower.target = lambda installed, **more: 3 if installed == 0 else pytest.fail("asked for another")
    assert asyncio.run(follower.next_version()) == 3


def test_workers_that_never_finish_are_given_up(monkeypatch):
    monkeypatch.setattr("tensorhub_plugins.vllm.engine.follower.POLL_GRACE_S", -10)
    engine = Engine()
    engine._poll = lambda worker: {"state": "fetching", "error": None, "error_kind": None}
    follower, _ = follow(engine, [3])
    assert "pause" not in engine.calls
    with pytest.raises(UpdateFailed, match="not fetched in time"):
        asyncio.run(follower.fetch(3))


def test_it_stops_following_where_it_is_told_to():
    engine = Engine()
    heard = iter([2, 4])
    follower = Follower(engine, lambda *a, **k: next(heard), worker="w", timeout_s=1, until=4)
    asyncio.run(asyncio.wait_for(follower.follow(), 20))
    assert follower.version == 4


def test_it_goes_back_when_it_is_told_to():
    engine = Engine()
    follower, asked = follow(engine, [3, 5, 3])
    assert engine.calls == UPDATE + UPDATE + UPDATE
    assert asked == [0, 3, 5, 3] and follower.version == 3


def test_with_nothing_to_go_to_it_stays_and_says_so_once(caplog):
    engine = Engine()
    gone, lost = VersionGone("version 3 was withdrawn"), VersionGone("version 4 is pinned and nobody holds it")
    follower, asked = follow(engine, [3, gone, gone, gone, lost, NotPublished("nothing"), lost])
    assert engine.calls == UPDATE and asked == [0] + 7 * [3]
    said = [record.message for record in caplog.records if "staying with version 3" in record.message]
    assert [text.partition("3: ")[2] for text in said] == [gone.message, lost.message, lost.message]


def test_a_hub_that_is_away_is_said_once_each_time(caplog):
    engine, away = Engine(), HubUnreachable("the hub does not answer")
    follow(engine, [3, away, away, away, NotPublished("nothing else"), away, away])
    assert engine.calls == UPDATE
    said = [record.message for record in caplog.records if "staying with version 3" in record.message]
    assert len(said) == 2 and all(away.message in text for text in said)


@pytest.mark.parametrize(
    ("failure", "calls"),
    [
        (("fetch", 1), ["start_fetch", "poll", "poll", "discard"]),
        (("prepare", 0), ["start_fetch", "poll", "poll", "prepare_install", "poll", "discard"]),
    ],
)
def test_a_version_that_is_refused_is_not_taken_again(failure, calls, caplog):
    engine = Engine(fails={failure: "VersionRefused: no such tensor"})
    engine.rpc = answering(engine)
    follower, asked = follow(engine, [4, NotPublished("nothing else")])
    assert engine.calls == calls and not engine.is_paused
    assert asked == [0, (0, (4,)), (0, (4,))] and list(follower.refused) == [4]
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "version 4 cannot be installed in this engine, which goes on with version 0" in said.message
    assert "no such tensor" in said.message


@pytest.mark.parametrize("failure", [("fetch", 1), ("prepare", 0)])
def test_what_fails_otherwise_is_tried_again(failure, caplog):
    """The control of the test above."""
    engine = Engine(fails={failure: "DeadlineExceeded: too slow"})
    engine.rpc = answering(engine)
    follower, asked = follow(engine, [4, 4])
    assert asked == [0, 0, 0] and not follower.refused
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def answering(engine):
    """As over collective_rpc: what a worker raises arrives as an error of this package or of vLLM."""
    rpc = engine.rpc

    async def translate(method, *args):
        try:
            return await rpc(method, *args)
        except RuntimeError as error:
            raise TensorHubError(str(error)) from error

    return translate


def test_a_refused_version_is_tried_once_more_when_it_is_pinned_anew(caplog):
    caplog.set_level("INFO", "vllm.tensorhub_plugins")  # an engine of a test before may have set it for "vllm"
    engine = Engine(fails={("fetch", 0): "VersionRefused: no such tensor"})
    follower, asked = follow(engine, [4, 4, lambda: engine.fails.clear() or 4])
    assert engine.calls[-8:] == UPDATE and follower.version == 4 and not follower.refused
    assert asked == [0, (0, (4,)), (0, (4,)), 4]
    assert caplog.text.count("tried again because it was pinned") == 2


def test_only_so_many_refused_versions_are_remembered():
    engine = Engine(fails={("fetch", 0): "VersionRefused: no such tensor"})
    follower, _ = follow(engine, range(1, REFUSED_MAX + 3))
    assert list(follower.refused) == list(range(3, REFUSED_MAX + 3))


def test_requests_in_flight_are_counted(monkeypatch):
    told = []
    monkeypatch.setattr(
        "tensorhub_plugins.vllm.engine.follower.record", lambda event, **fields: told.append((event, fields))
    )

    class Losing(Engine):
        def _install(self, worker, version, timeout_s):
            self.requests = ["a"]  # nobody knows why c has gone
            self.gone = ["b"]  # its client went away meanwhile
            return super()._install(worker, version, timeout_s)

    follow(Losing(running=["a", "b", "c"]), [3])
    assert [event for event, _ in told] == ["pause", "resume"]
    assert told[0][1]["in_flight"] == 3
    assert (told[1][1]["in_flight"], told[1][1]["lost"]) == (1, 1)


def test_new_weights_answer_nothing_before_the_old_ones_caches_are_forgotten(caplog):
    """The update had failed, and whoever resumed the engine got answers made of both versions."""
    engine = Engine()
    engine.fails["forget"] = ["a session is open", "a session is open", "a session is open"]
    seen = []
    install = engine._install
    engine._install = lambda *asked: seen.append(follower.is_whole) or install(*asked)

    async def story():
        with pytest.raises(StaleCaches):
            await follower.update(3)
        assert (follower.version, follower.is_broken, follower.is_whole) == (3, False, False) and engine.is_paused

    follower = Follower(engine, lambda *a, **k: 0, worker="r/0", timeout_s=5)
    asyncio.run(story())
    assert seen == [True, True]  # two workers
    engine.calls.clear()

    heard = iter([5])
    follower.target = lambda *a, **k: next(heard)
    follower.until = 3  # it goes on even where there is nothing more to follow
    follower.sleep = lambda seconds: asyncio.sleep(0)
    asyncio.run(asyncio.wait_for(follower.follow(), 20))
    assert engine.calls == ["forget", "forget", "forget", "resume"] and not engine.is_paused and follower.is_whole
    said = [record.message for record in caplog.records if "a session is open" in record.message]
    assert said == ["r/0: standing still with version 3: a session is open"]


def test_an_installation_under_way_leaves_the_engine_as_whole_as_it_was():
    """Who takes it for broken meanwhile takes it out of rotation with every version."""

    class Observed(Engine):
        def _install(self, worker, version, timeout_s):
            seen.append(follower.is_whole)
            answer = super()._install(worker, version, timeout_s)
            return {**answer, "report": {"sources": {"trainer/0": 5}}}

    seen = []
    engine = Observed(fails={("broken", 1): "half way"})
    follower = Follower(engine, lambda *a, **k: 0, worker="r/0", timeout_s=5)

    async def story():
        assert follower.is_whole
        with pytest.raises(UpdateFailed):
            await follower.update(1)
        assert not follower.is_whole and "no whole weights" in follower.status_now().why_not
        engine.fails.clear()
        await follower.update(1)

    asyncio.run(story())
    assert seen == [True, True, False, False]  # two workers each; the second time it was broken before
    assert follower.is_whole and follower.last_update.sources == {"trainer/0": 10}
    assert not follower.status_now().why_not


def test_a_long_fetch_is_asked_about_less_and_less():
    """N16: each poll is a step in which all workers of the engine wait for each other."""

    class Slow(Engine):
        def _poll(self, worker):
            return {"state": "fetching" if sum(slept) < 30 else "ready", "error": None, "error_kind": None}

    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    follower = Follower(Slow(), None, worker="rollout-0/0", timeout_s=60, sleep=sleep)
    asyncio.run(follower.fetch(1))
    assert slept[0] < 0.03 and max(slept) == slept[-1] == 0.2 and len(slept) < 200
