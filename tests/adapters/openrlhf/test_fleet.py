"""The fleet's roster under OpenRLHF's generator: engines join, drain and leave. OpenRLHF is the real one."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

from openrlhf_fakes import EVERY_PROMPT, PROMPTS, FakeEngine, FakeHub, FakeRay, Ref, make, play_ray, prompts_of  # noqa: E402
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayActorError  # noqa: E402

from tensorhub_plugins.core import DeadlineExceeded  # noqa: E402
from tensorhub_plugins.openrlhf import health  # noqa: E402
from tensorhub_plugins.openrlhf.partial_answers import GivenBack, Journal  # noqa: E402
from tensorhub_plugins.openrlhf.versions import FIRST  # noqa: E402
from tensorhub_plugins.vllm.ray import reporting, rotation  # noqa: E402
from tensorhub_plugins.vllm.ray.actor_handles import seal  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.types import Entry, Kind, Seen  # noqa: E402
from tensorhub_plugins.vllm.ray.health import EngineLost  # noqa: E402
from tensorhub_plugins.vllm.ray.members import DEATHS_MAX  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return play_ray(monkeypatch)


def test_a_joiner_gets_work_in_the_batch_and_one_that_drains_gets_none(ray: FakeRay) -> None:
    here, joiner = FakeEngine(), FakeEngine()
    generator = make([here], per_engine=1)
    engines = generator.engines
    engines.live()
    first = Entry("rollout-0", here, "first")
    answer = FakeEngine.do_generate_responses
    reports: list[tuple[Seen, ...]] = []

    def roster(*entries: Entry) -> None:
        """One round of the reporter."""
        engines.check(wait_s=0.0)
        reports.append(engines.seen().seen)
        engines.apply(engines.table.all, entries)
        engines.check(wait_s=0.0)

    def join(**kwargs: Any) -> Any:
        if len(here.asked) == 2:
            roster(first, Entry("rollout-1", joiner, "joined"))
        return answer(here, **kwargs)

    def drain(**kwargs: Any) -> Any:
        if len(joiner.asked) == 2:
            roster(first, Entry("rollout-1", joiner, "joined", draining=True))
        return answer(joiner, **kwargs)

    here.do_generate_responses, joiner.do_generate_responses = join, drain  # type: ignore[method-assign]
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT
    assert (len(here.asked), len(joiner.asked)) == (4, 2)
    roster(first, Entry("rollout-1", joiner, "joined", draining=True))
    assert [(one.name, one.ready, one.draining, one.in_flight) for one in reports[-1]] == [
        ("rollout-0", True, False, 0),
        ("rollout-1", True, True, 0),
    ]
    roster(first)
    assert [member.name for member in engines.members] == ["rollout-0"]


def test_a_spare_gets_no_prompt_before_it_has_joined(ray: FakeRay) -> None:
    here, spare = FakeEngine(3), FakeEngine()
    heartbeat: dict[str, Any] = {"version": 0, "silent_s": 0.0, "ready": False, "spare": True}
    spare.do_tensorhub_heartbeat = lambda: heartbeat  # type: ignore[method-assign]
    generator = make([here], batches=2)
    engines = generator.engines
    engines.live()

    def round() -> tuple[Seen, ...]:
        told = engines.seen().seen
        engines.apply(engines.table.all, [Entry("rollout-0", here, "first"), Entry("rollout-1", spare, "spare")])
        engines.check(wait_s=0.0)
        return told

    round()
    assert [(one.name, one.ready, one.spare) for one in round()] == [
        ("rollout-0", True, False),
        ("rollout-1", False, True),
    ]
    generator.generate_samples()
    assert len(here.asked) == 6 and not spare.asked
    heartbeat.update(version=3, ready=True, spare=False)
    round()
    generator.generate_samples()
    assert spare.asked


def test_between_reports_those_are_asked_that_join_and_the_others_silence_does_not_count(ray: FakeRay) -> None:
    here, joiner = FakeEngine(3), FakeEngine()
    beats: list[str] = []
    here.do_tensorhub_heartbeat = lambda: beats.append("here") or {"version": 3}  # type: ignore[assignment,func-returns-value]
    heartbeat: dict[str, Any] = {"version": 0, "ready": False}
    joiner.do_tensorhub_heartbeat = lambda: beats.append("joiner") or heartbeat  # type: ignore[assignment,func-returns-value]
    engines = make([here]).engines
    engines.live()
    engines.apply(engines.table.all, [Entry("rollout-0", here, "first"), Entry("rollout-1", joiner, "joined")])
    beats.clear()
    for _ in range(200):
        ray.now += 0.2
        engines.check(wait_s=0.0, joining=True)
    assert set(beats) == {"joiner"} and engines.table.all["rollout-0"].in_rotation and not ray.killed
    heartbeat.update(version=3, ready=True)
    engines.check(wait_s=0.0, joining=True)
    assert engines.table.all["rollout-1"].in_rotation
    beats.clear()
    engines.check(wait_s=0.0, joining=True)
    assert beats == []  # nobody joins


def test_what_an_engine_has_that_is_no_longer_in_the_fleet_goes_on_elsewhere(ray: FakeRay) -> None:
    here, leaver = FakeEngine(), FakeEngine()
    generator = make([here, leaver], per_engine=3)
    generator.engines.live()
    late: list[Ref] = []
    call = leaver._call

    def never(name: str, *args: Any, **kwargs: Any) -> Ref:
        if name != "generate_responses":
            return call(name, *args, **kwargs)
        late.append(Ref())
        if len(late) == 3:
            generator.engines.apply(generator.engines.table.all, [Entry("rollout-0", here, "first")])
        return late[-1]

    leaver._call = never  # type: ignore[method-assign]
    samples, *_ = generator.generate_samples()
    assert len(late) == 3 and len(here.asked) == 6
    assert prompts_of(samples) == EVERY_PROMPT
    assert not ray.killed and generator.router.work.in_flight.total() == 0


def test_what_is_given_back_goes_on_elsewhere_with_what_it_has(ray: FakeRay) -> None:
    here, leaver = FakeEngine(), FakeEngine()
    generator = make([here, leaver], is_partial=True)
    generator.engines.live()
    journals = [Journal(), Journal()]

    def give_back(**_: Any) -> GivenBack:
        generator.engines.members[1].is_draining = True
        return GivenBack(journals)

    leaver.do_generate_responses = give_back  # type: ignore[method-assign,assignment]
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT
    assert [asked.get("journals") for asked in here.asked] == 3 * [None] + 3 * [journals]
    assert generator.engines.members[1].answers, "it is not lost"


def test_the_fleet_is_told_a_lost_node_from_a_restart(ray: FakeRay) -> None:
    engines = make([FakeEngine(), FakeEngine(), FakeEngine()]).engines
    engines.live()
    restarting, unplaceable, ours = (member.handle for member in engines.members)
    restarting.do_tensorhub_heartbeat = lambda: ActorUnavailableError("away", None)
    unplaceable.do_tensorhub_heartbeat = lambda: ActorUnschedulableError("its node is gone")
    ours.do_tensorhub_heartbeat = lambda: EngineLost("its vLLM is dead")
    for _ in range(DEATHS_MAX):
        engines.check()
    assert [(one.lost, one.ready) for one in engines.seen().seen] == [
        ("restarting", False),
        ("gone", False),
        ("", False),
    ]


def test_one_that_leaves_is_not_lost(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(rotation, "record", lambda event, **more: events.append((event, more["worker"])))
    engines = make([FakeEngine(), FakeEngine(), FakeEngine()]).engines
    engines.live()
    first, leaver, other = (member.handle for member in engines.members)
    here = [Entry("rollout-0", first, "first"), Entry("rollout-2", other, "first")]
    engines.apply(engines.table.all, [*here, Entry("rollout-1", leaver, "first", draining=True)])
    leaver.do_tensorhub_heartbeat = lambda: ActorUnschedulableError("it was ended")
    engines.check()
    assert engines.seen().seen[1].lost and engines.figures()["tensorhub/replicas/lost"] == 0.0 and events == []
    engines.apply(engines.table.all, here)
    assert events == [("replica_left", "rollout-1/0")]
    other.do_tensorhub_heartbeat = lambda: ActorUnschedulableError("its node is gone")
    engines.check()
    assert engines.figures()["tensorhub/replicas/lost"] == 1.0 and events[1:] == [("replica_lost", "rollout-2/0")]


def test_one_that_joins_during_an_evaluation_stays_out_of_it(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    here, joiner = FakeEngine(version=2), FakeEngine(version=3)
    generator = make([here], evaluation=PROMPTS, per_engine=1)
    monkeypatch.setattr(FakeHub, "visible", 2)
    answer = FakeEngine.do_generate_responses

    def join(**kwargs: Any) -> Any:
        generator.engines.apply(
            generator.engines.table.all, [Entry("rollout-0", here, "first"), Entry("rollout-1", joiner, "joined")]
        )
        generator.engines.check()
        return answer(here, **kwargs)

    here.do_generate_responses = join  # type: ignore[method-assign]
    samples = generator.generate_eval_samples()
    assert prompts_of(samples) == EVERY_PROMPT and not joiner.asked
    assert generator.engines.members[1].in_rotation
    generator.generate_samples()
    assert joiner.asked  # the control: it gets prompts of the next batch


def test_an_evaluation_whose_engines_are_all_lost_says_that_others_answer(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only = FakeEngine(version=3)
    generator = make([only], evaluation=2 * PROMPTS, per_engine=1)
    monkeypatch.setattr(FakeHub, "visible", 3)
    answer = FakeEngine.do_generate_responses

    def come_back(self: FakeEngine, **kwargs: Any) -> Any:
        if len(self.asked) != 2:
            return answer(self, **kwargs)
        self.version = 5  # Ray has started it again
        return RayActorError()

    monkeypatch.setattr(FakeEngine, "do_generate_responses", come_back)
    samples = generator.generate_eval_samples()
    assert {int(sample.info[FIRST]) for sample in samples} == {3, 5}
    said = [one.getMessage() for one in caplog.records if "goes on with other versions" in one.getMessage()]
    assert len(said) == 1
    generator.generate_eval_samples()  # the control
    assert len([one for one in caplog.records if "goes on with other versions" in one.getMessage()]) == 1


def test_without_a_fleet_the_generator_goes_on(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    reporter = make([engine]).reporter
    engines = reporter.dispatcher

    def report() -> None:
        asyncio.run(reporter.report())

    monkeypatch.setattr(reporting, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(reporting.fleet, "of_this_job", lambda: None)
    monkeypatch.setattr(reporter._gauges, "set", lambda figures: None)  # Ray would start a cluster for its metrics
    report()
    fleet = SimpleNamespace(report=SimpleNamespace(remote=lambda seen, waiting, unnamed: answered(ActorDiedError())))
    monkeypatch.setattr(reporting.fleet, "of_this_job", lambda: fleet)
    with pytest.raises(ActorDiedError):
        report()  # its thread says so once, and goes on
    assert [member.name for member in engines.members] == ["rollout-0"]
    told: list[Any] = []
    monkeypatch.setattr(engines.members[0], "handle", "an actor")
    engines.check = lambda wait_s: None  # type: ignore[method-assign]

    def answer(seen: list[Seen], waiting: int, unnamed: int) -> Any:
        told.append((seen, waiting, unnamed))
        return answered([Entry("rollout-0", seal("an actor"), "first", draining=True)])

    fleet.report.remote = answer
    report()
    assert told[0][0][0].name == "rollout-0" and told[0][0][0].handle == seal("an actor") and told[0][2] == 0
    assert engines.members[0].is_draining


async def answered(answer: Any) -> Any:
    """What Ray's reference of an answer is waited for."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_the_reporters_thread_goes_on_after_an_error_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "REPORT_INTERVAL_S", 0.001)
    monkeypatch.setattr(reporting, "ray", SimpleNamespace(is_initialized=lambda: True))
    rounds, enough = [], threading.Event()

    def fail() -> None:
        rounds.append(1)
        if len(rounds) == 3:
            enough.set()
        raise RuntimeError("no answer")

    reporter = reporting.Reporter(SimpleNamespace(), fail)  # type: ignore[arg-type]
    reporter.start()
    assert enough.wait(30)
    reporter.stop()
    assert not reporter._thread.is_alive()


def test_a_spare_is_not_waited_for_at_the_beginning(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that resume have weights, and so a spare, before the first prompt."""
    here, late, spare = FakeEngine(3), FakeEngine(3), FakeEngine()
    waits: dict[str, Any] = {"version": 0, "silent_s": 0.0, "ready": False}
    late.do_tensorhub_heartbeat = lambda: waits  # type: ignore[method-assign]
    spare.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    monkeypatch.setattr(health, "START_TIMEOUT_S", 5.0)
    for engine, kind in ((spare, "spare"), (late, "first")):  # the second: the control
        engines = make([here]).engines
        engines.apply(engines.table.all, [Entry("rollout-0", here, "first"), Entry("rollout-1", engine, kind)])
        began = ray.now
        assert [member.name for member in engines.live()] == ["rollout-0"]
        assert (ray.now - began >= 5) == (kind == "first")


def test_what_the_only_engine_had_when_it_was_lost_does_not_take_it_out_again_when_it_is_back(ray: FakeRay) -> None:
    engine = FakeEngine()
    generator = make([engine])
    (member,) = generator.engines.live()
    engine.state = "silent"
    generator._dispatch_prompts_to_vllm(["p0", "p1", "p2"], 3 * [""])
    generator.router.hand_out()
    engine.lose()
    assert not generator.router.answers()  # one at a time
    assert member.is_lost and member.epoch == 1
    engine.state = "well"  # started again
    answered = 0
    while generator.router.work:
        generator.router.hand_out()
        answered += len(generator.router.answers())
        assert member.answers and member.epoch == 1
    assert answered == 3 and len(engine.asked) == 6
    engine.state = "lost"  # the control: the next loss is one
    generator._dispatch_prompts_to_vllm(["p3"], [""])
    generator.router.hand_out()
    generator.router.answers()
    assert member.is_lost and member.epoch == 2


def test_when_all_engines_are_dead_the_fleet_starts_others(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, other = FakeEngine(), FakeEngine()
    engines = make([dead]).engines
    engines.live()
    engines.apply(engines.table.all, [Entry("rollout-0", dead, "first")])
    dead.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    sleep = ray.sleep

    def replace(seconds: float) -> None:
        sleep(seconds)
        if engines.seen().seen[0].lost == "gone" and ray.now > 5:
            engines.apply(engines.table.all, [Entry("rollout-1", other, "joined")])

    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: ray.now, sleep=replace))
    assert [member.name for member in engines.live()] == ["rollout-1"]
    engines.has_fleet = False  # the control: there is nobody else to wait for
    other.do_tensorhub_heartbeat = dead.do_tensorhub_heartbeat  # type: ignore[method-assign]
    with pytest.raises(ActorDiedError):
        engines.live()


def test_engines_that_work_for_ever_without_a_result_are_not_waited_for(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update fails, and is tried again."""
    engine = FakeEngine()
    tells = {"version": 0, "silent_s": 0.0, "ready": False, "idle_s": 0.0}
    engine.do_tensorhub_heartbeat = lambda: tells  # type: ignore[method-assign]
    engines = make([engine], per_engine=1).engines
    monkeypatch.setattr(health, "START_TIMEOUT_S", 5.0)
    began = ray.now
    with pytest.raises(DeadlineExceeded, match="no vLLM engine answers"):
        engines.live()
    waited = ray.now - began
    tells["idle_s"] = 1e6  # the control: it stands still
    began = ray.now
    with pytest.raises(DeadlineExceeded):
        engines.live()
    assert waited >= 50 > 10 > ray.now - began


@pytest.mark.parametrize("replacement", ["none", "starts", "answers"])
def test_an_engine_that_cannot_start_ends_the_run_when_it_was_removed_meanwhile(ray: FakeRay, replacement: str) -> None:
    """The reporter sees the engines while the trainer loads its model, long before the first prompt."""
    other, joins = FakeEngine(), FakeEngine()
    other.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    joins.state = "well" if replacement == "answers" else "silent"
    generator = make([other])
    engines = generator.engines
    for _ in range(DEATHS_MAX):
        engines.check(wait_s=0.0)
    assert engines.seen().seen[0].lost == "gone"
    roster = [] if replacement == "none" else [Entry("rollout-1", joins, "joined")]
    engines.apply(["rollout-0"], roster)
    engines.check(wait_s=0.0)
    with pytest.raises(ActorDiedError):
        generator.generate_samples()
    assert ray.now < 10


@pytest.mark.parametrize(("kind", "ends"), [("joined", False), ("external", False), ("first", True)])
def test_what_the_fleet_adds_and_cannot_start_does_not_end_a_run_that_begins(
    ray: FakeRay, kind: Kind, ends: bool
) -> None:
    well, other = FakeEngine(), FakeEngine()
    other.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    generator = make([well])
    generator.engines.apply([], [Entry("rollout-0", well, "first"), Entry("rollout-1", other, kind)])
    with pytest.raises(ActorDiedError) if ends else nullcontext():
        generator.generate_samples()
    assert len(well.asked) == (0 if ends else 6)


def test_the_fleet_may_replace_one_that_had_started(ray: FakeRay) -> None:
    """The control: it has answered, and is lost before the first prompt."""
    ray.now = 1.0
    other, joins = FakeEngine(), FakeEngine()
    generator = make([other])
    generator.engines.check(wait_s=0.0)
    other.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    for _ in range(DEATHS_MAX):
        generator.engines.check(wait_s=0.0)
    generator.engines.apply(["rollout-0"], [Entry("rollout-1", joins, "joined")])
    generator.generate_samples()
    assert len(joins.asked) == 6
