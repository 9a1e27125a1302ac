"""vLLM's processes end when the actor that started them is killed, and the actor when they are dead."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_plugins.core import work
from tensorhub_plugins.core.work import STILL_S, TIMES_MAX
from tensorhub_plugins.vllm.engine.follower import UpdateFailed
from tensorhub_plugins.vllm.ray import health
from tensorhub_plugins.vllm.ray.health import EngineLost, Lifeline

WORKER = """
import os, sys, time
from tensorhub_plugins.vllm.ray.health import end_with_owner
end_with_owner()
print("watching", os.getpid(), flush=True)
time.sleep(600)
"""
START = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
CORE = START  # as vLLM's engine core: started by the actor, starts the worker, notices nothing
ACTOR = f"from tensorhub_plugins.vllm.ray.health import own_engines; own_engines(); {START}"
FORGETFUL = START  # an actor that has not said who it is


def start(*command: str) -> subprocess.Popen[str]:
    """A chain of processes, each started by the one before; the last is a worker that watches."""
    process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said, process.worker = process.stdout.readline().split()  # type: ignore[attr-defined]
    assert said == "watching"
    return process


def is_silent_within(process: subprocess.Popen[str], timeout_s: float) -> bool:
    """Whether the last process that could write to the pipe has ended."""
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], timeout_s)[0]) and process.stdout.read() == ""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux 5.3)")
@pytest.mark.parametrize("chain", [(ACTOR, WORKER), (ACTOR, CORE, WORKER)], ids=["one process", "core and worker"])
def test_they_end_with_the_actor(chain: tuple[str, ...]) -> None:
    actor = start(*chain)
    assert actor.stdout is not None
    assert not is_silent_within(actor, 0.2)
    actor.kill()
    actor.wait()
    assert is_silent_within(actor, 60)
    actor.stdout.close()


@pytest.mark.slow
def test_the_check_above_sees_those_who_stay() -> None:
    actor = start(FORGETFUL, WORKER)
    assert actor.stdout is not None
    actor.kill()
    actor.wait()
    assert not is_silent_within(actor, 0.5)
    os.kill(int(actor.worker), signal.SIGKILL)  # type: ignore[attr-defined]
    assert is_silent_within(actor, 60)
    actor.stdout.close()


class PlayedVLLM:
    """AsyncLLM. answers: what the next calls come to, an error or a value; the last one for ever."""

    errored = False
    dead_error = RuntimeError("dead")

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [answer]


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the probe belongs to an actor of Ray")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, for what it raises when it is dead")


def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(health, "EXIT_DELAY_S", 0.0)
    return codes


@needs_vllm
async def test_what_a_worker_raised_is_a_failed_update(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = ended(monkeypatch)

    line = Lifeline(PlayedVLLM(ValueError("no such version"), "fine"), "rollout-0/0")
    with pytest.raises(UpdateFailed, match="start_fetch: no such version"):
        await line.rpc("start_fetch")
    assert await line.rpc("start_fetch") == ["fine"]
    await asyncio.sleep(0.01)
    assert not line.is_dying and codes == []


@needs_ray
@needs_vllm
async def test_a_dead_engine_ends_its_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = ended(monkeypatch)

    engine = PlayedVLLM(ValueError("the process is gone"))
    engine.errored = True
    line = Lifeline(engine, "rollout-0/0")
    with pytest.raises(EngineLost, match="the process is gone"):
        await line.rpc("start_fetch")
    assert line.is_dying
    probe = asyncio.create_task(line.probe())  # finds it too; it ends once
    await asyncio.sleep(0.01)
    assert codes == [1] and not probe.done()
    probe.cancel()


@needs_ray
@needs_vllm
async def test_what_is_on_its_way_out_of_a_dead_engine_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the actor asks its core all the time ends with that, and ended the actor at once."""
    from tensorhub_plugins.vllm.ray.owned import OwnedEngine

    async def call_utility_async(method: str, *args: Any) -> Any:
        await asyncio.sleep(60)

    codes = ended(monkeypatch)
    monkeypatch.setattr(health, "EXIT_DELAY_S", 0.2)
    monkeypatch.setattr("tensorhub_plugins.vllm.engine.core_follower.DEAD_POLL_S", 0.01)
    engine: Any = PlayedVLLM("fine")
    resources = SimpleNamespace(engine_dead=True)
    engine.engine_core = SimpleNamespace(call_utility_async=call_utility_async, resources=resources)
    watching = asyncio.create_task(OwnedEngine(engine, "rollout-0/0").watch())
    watching.add_done_callback(health.exit_on_error)
    await asyncio.wait({watching})
    await asyncio.sleep(0.01)
    assert codes == []
    await asyncio.sleep(0.3)
    assert codes == [1]


@needs_ray
@needs_vllm
async def test_only_answers_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(health, "LOOP_STILL_MAX_S", 60.0)
    monkeypatch.setattr(health.work, "last_at", lambda: 0.0)  # other tests have worked in this process
    now = 0.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)

    engine = PlayedVLLM(TimeoutError(), TimeoutError(), "fine")
    line = Lifeline(engine, "rollout-0/0")
    now = 5.0
    probe = asyncio.create_task(line.probe())
    while len(engine.answers) > 1:
        await asyncio.sleep(0)
        assert line.silent_s() in (0.0, 5.0)
    while line.silent_s():
        await asyncio.sleep(0)
    probe.cancel()
    now = 9.0
    assert line.silent_s() == 4.0
    line.busy_since = 8.0
    line.allow(2.0)
    assert line.silent_s() == 0.0  # an installation has its own deadline
    now = 11.0
    assert line.silent_s() == 3.0


@needs_ray
@needs_vllm
async def test_an_actor_whose_own_loop_stands_still_has_no_silent_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that never awaits keeps it: what vLLM has answered is heard when the loop turns again."""
    monkeypatch.setattr(health, "WATCH_INTERVAL_S", 0.0)
    now = 0.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)
    engine = PlayedVLLM("fine")

    async def never(method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.Event().wait()
        return []

    engine.collective_rpc = never  # type: ignore[method-assign]
    line = Lifeline(engine, "rollout-0/0")
    probe = asyncio.create_task(line.probe())

    async def turn() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    await turn()
    now = 4.0
    await turn()
    assert (line.silent_s(), line.still_since) == (4.0, None)
    line.allow(60.0)
    now = 604.1  # ten times as long: it hangs
    assert line.silent_s() == pytest.approx(600.1)
    now = 100.0
    assert (line.silent_s(), line.still_since) == (0.0, 4.0)  # as another thread asks
    await turn()
    assert (line.silent_s(), line.still_since) == (9.0, None)
    while now < 140.0:  # the control: the loop turns, and vLLM answers nothing
        now += 4.0
        await turn()
    assert line.silent_s() == 49.0
    probe.cancel()


@pytest.mark.parametrize("busy_since", [0.0, 1.0])
def test_an_answer_while_another_thread_asks_for_the_silence_fails_no_heartbeat(busy_since: float) -> None:
    """The heartbeat's TypeError ended OpenRLHF's generator: it came between two looks at what waits."""

    class Answered(Lifeline):
        seen: Any = iter([1.0])
        _waiting_since: Any = property(lambda self: next(self.seen, None), lambda self, value: None)

    line = Answered(None, "rollout-0/0")
    line.busy_since = busy_since
    assert line.silent_s() >= 0.0


@needs_ray
@needs_vllm
@pytest.mark.parametrize("asked", ["ping", "follow"])
async def test_an_engine_that_dies_while_it_is_asked_ends_its_actor(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """vLLM leaves the question pending: the actor asked for ever, and passed for one that lives."""
    from tensorhub_plugins.vllm.config import FollowConfig
    from tensorhub_plugins.vllm.ray.owned import OwnedEngine

    codes, pending = ended(monkeypatch), []
    monkeypatch.setattr(health, "WATCH_INTERVAL_S", 0.0)

    engine = PlayedVLLM("fine")

    async def never(method: str, *_: Any, **__: Any) -> Any:
        pending.append(method)
        await asyncio.Event().wait()

    engine.collective_rpc = never  # type: ignore[method-assign]
    engine.engine_core = SimpleNamespace(call_utility_async=never)  # type: ignore[attr-defined]
    owned = OwnedEngine(engine, "rollout-0/0")
    owned.keep()
    following = asyncio.create_task(owned.follow({}, None, FollowConfig()))
    while f"tensorhub_{asked}" not in pending:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not codes, "the control: it may answer yet"
    engine.errored = True
    while not codes:
        await asyncio.sleep(0)
    assert codes == [1] and not following.done()
    owned.keep(asyncio.sleep(0))
    assert pending.count("tensorhub_ping") == 1, "and it is watched once"
    following.cancel()
    for task in owned._tasks:
        task.cancel()


@needs_vllm
async def test_an_engine_that_loads_a_version_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health.work, "last_at", lambda: 0.0)  # other tests have worked in this process
    now = 0.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)

    engine = PlayedVLLM("fine")
    line, may_answer = Lifeline(engine, "rollout-0/0"), asyncio.Event()

    async def waits(method: str, args: tuple[Any, ...]) -> list[Any]:
        await may_answer.wait()
        raise ValueError("it cannot be installed")

    engine.collective_rpc = waits  # type: ignore[method-assign]
    line.busy_since = 1.0
    line.allow(119.0)
    call = asyncio.create_task(line.rpc("tensorhub_ping"))
    await asyncio.sleep(0)
    now = 119.0
    assert line.silent_s() == 0.0
    now = 121.0
    assert line.silent_s() == 120.0  # this has a deadline of its own
    may_answer.set()
    with pytest.raises(UpdateFailed, match="it cannot be installed"):
        await call
    line.busy_since = 0.0
    assert line.silent_s() == 0.0  # an error is an answer
    may_answer.clear()
    other = asyncio.create_task(line.rpc("tensorhub_ping"))
    await asyncio.sleep(0)
    now = 131.0
    assert line.silent_s() == 10.0  # control: a call that is answered at once
    other.cancel()


@needs_vllm
@pytest.mark.parametrize("works", [True, False])
async def test_an_installation_may_last_as_long_as_it_works(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """One that does a layer a minute is kept beyond its timeout; one that stands still is given up within it."""
    now, worked_at = 1000.0, 0.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)
    monkeypatch.setattr(health.work, "last_at", lambda: worked_at)

    engine = PlayedVLLM("fine")

    async def never(method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.Event().wait()
        raise AssertionError

    engine.collective_rpc = never  # type: ignore[method-assign]
    line = Lifeline(engine, "rollout-0/0")
    line.busy_since = now
    line.allow(400.0)
    asked = asyncio.create_task(line.rpc("tensorhub_ping"))
    await asyncio.sleep(0)
    worked_at = now + 1
    for _ in range(40):
        now += 60
        worked_at = now if works else worked_at
        if now - 1000 > STILL_S + 1:
            assert (line.silent_s() == 0.0) == works
    now = worked_at = 1000 + TIMES_MAX * 400.0
    assert line.silent_s() == TIMES_MAX * 400, "but not for ever: something else works there"
    now = 3400.0
    line.busy_since, worked_at = 0.0, now
    assert line.silent_s() == 2400, "what other threads do is no answer of an engine that installs nothing"
    asked.cancel()


@needs_vllm
@pytest.mark.parametrize(("nodes", "backend", "still_s"), [(1, "mp", STILL_S), (2, "mp", 400.0), (1, "ray", 400.0)])
def test_workers_on_other_hosts_do_not_show_their_work(nodes: int, backend: str, still_s: float) -> None:
    """Those here are done, and wait for theirs."""
    engine = PlayedVLLM("fine")
    parallel = SimpleNamespace(nnodes=nodes, distributed_executor_backend=backend)
    engine.vllm_config = SimpleNamespace(parallel_config=parallel)  # type: ignore[attr-defined]
    line = Lifeline(engine, "rollout-0/0")
    line.allow(400.0)
    assert (line.still_s, line.timeout_s) == (still_s, 400.0)


@needs_vllm
def test_a_process_shows_its_work_to_the_one_that_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(work.VARIABLE, raising=False)
    ask = "import sys; from tensorhub_plugins.core import work; work.done(); print(work.last_at()); sys.stdout.flush()"
    alone = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, check=True)
    before = work.last_at()
    assert before < float(alone.stdout), "the control: nobody hears of it"
    monkeypatch.setenv(work.VARIABLE, "")
    work.share()
    own = os.environ[work.VARIABLE]
    shown = float(subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, check=True).stdout)
    assert work.last_at() == shown
    for wrong in (own + "x", "1/x/y", f"{os.getpid()}/0/{own.rpartition('/')[2]}"):  # another host has other processes
        monkeypatch.setenv(work.VARIABLE, wrong)
        assert work._shared() is None
    os.close(int(own.split("/")[1]))


@pytest.mark.parametrize(("news", "entered"), [(True, 0), (False, 1), (False, 0)])
async def test_a_version_that_is_known_of_stays_so_whatever_an_older_answer_says(news: bool, entered: int) -> None:
    from tensorhub_plugins.vllm.ray.owned import OwnedEngine

    class Asked(OwnedEngine):
        async def _ask(self, question: str, *given: Any) -> Any:
            self.has_version |= news  # comes while the question is under way
            return entered

    owned = Asked(PlayedVLLM("fine"), "rollout-0/0")
    async with owned.answering(1):
        assert owned.has_version == (news or entered > 0)
