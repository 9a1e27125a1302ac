"""Engines that come and go under OpenRLHF's generator. Ray is played by a few lines; OpenRLHF is the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

from openrlhf_fakes import EVERY_PROMPT, PROMPTS, FakeEngine, FakeHub, FakeRay, Ref, make, play_ray, prompts_of  # noqa: E402
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError  # noqa: E402

from tensorhub_plugins.core import VersionGone, VersionRefused, version_of  # noqa: E402
from tensorhub_plugins.openrlhf import health, routing  # noqa: E402
from tensorhub_plugins.openrlhf.versions import FIRST, figures_of  # noqa: E402
from tensorhub_plugins.vllm.ray import rotation  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return play_ray(monkeypatch)


def test_all_prompts_are_answered_and_spread(ray: FakeRay) -> None:
    engines = [FakeEngine(), FakeEngine()]
    samples, _, consumed, exhausted = make(engines).generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and consumed == 6 and not exhausted
    assert [len(engine.asked) for engine in engines] == [3, 3]


def test_a_batch_asks_for_the_newest_version_there_is(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHub, "visible", 4)
    engine = FakeEngine()
    samples, *_ = make([engine]).generate_samples()
    assert {asked["min_version"] for asked in engine.asked} == {4}
    assert {int(sample.info[FIRST]) for sample in samples} == {4}


@pytest.mark.parametrize(("is_sync", "asked_for"), [(False, 2), (True, 4)])
def test_a_batch_asks_for_what_is_pinned_except_in_sync_training(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, is_sync: bool, asked_for: int
) -> None:
    monkeypatch.setattr(FakeHub, "visible", 4)
    engine = FakeEngine()
    generator = make([engine], is_sync=is_sync, batches=2)
    generator.generate_samples()
    monkeypatch.setattr(FakeHub, "pinned", 2)
    generator.generate_samples()
    assert {asked["min_version"] for asked in engine.asked[:6]} == {4}
    assert {asked["min_version"] for asked in engine.asked[6:]} == {asked_for}


def test_with_nothing_to_be_run_a_batch_asks_for_no_version(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(version=4)
    generator = make([engine])
    generator.target.newest = 4

    def gone(*_: Any, **__: Any) -> int:
        raise VersionGone("version 4 was withdrawn, and no other is held")

    monkeypatch.setattr(FakeHub, "target", gone)
    generator.generate_samples()
    assert {asked["min_version"] for asked in engine.asked} == {0}


BYTES = {"same_host": 10.0, "near": 5.0, "far": 25.0, "rdma": 5.0, "wire": 20.0}


def test_the_samples_carry_how_the_engines_did(ray: FakeRay) -> None:
    """To the trainer's log: OpenRLHF gives it nothing else of the process that generates."""
    behind, ahead = FakeEngine(version=version_of(1, 2)), FakeEngine(version=version_of(1, 5))
    ahead.do_tensorhub_heartbeat = lambda: {  # type: ignore[method-assign]
        **FakeEngine.do_tensorhub_heartbeat(ahead),
        "pull_s": 0.5,
        "pause_s": 0.25,
        "sources": {"trainer/0": 30, "rollout-0/0": 10},
        "ways": {"same_host shm": 10, "same_rack rdma": 5, "other_data_center tls": 25, "wire": 20},
    }
    samples, *_ = make([behind, ahead]).generate_samples()
    told = figures_of(samples)
    assert {**told, "tensorhub/last_pull_age_s": 0.0, "tensorhub/validation_wait/seconds": 0.0} == {
        "tensorhub/replicas/ready": 2.0,
        "tensorhub/replicas/lost": 0.0,
        "tensorhub/replicas/refused": 0.0,
        "tensorhub/version_lag/max": 3.0,
        "tensorhub/version_lag/mean": 1.5,
        "tensorhub/last_pull_age_s": 0.0,
        "tensorhub/validation_wait/seconds": 0.0,
        "tensorhub/pull/seconds_max": 0.5,
        "tensorhub/pause/seconds_max": 0.25,
        "tensorhub/pull/share_from_peers": 0.25,
        **{f"tensorhub/pull/bytes_{name}": size for name, size in BYTES.items()},
    }
    level, *_ = make([FakeEngine(version=5), FakeEngine(version=5)]).generate_samples()
    assert figures_of(level)["tensorhub/version_lag/max"] == 0.0  # the control
    former, *_ = make([FakeEngine(version=9), FakeEngine(version=version_of(1, 5))]).generate_samples()
    assert figures_of(former)["tensorhub/version_lag/max"] == 1.0  # of a former attempt: one at least


def test_engines_that_all_stand_still_are_behind_what_was_published(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In partial rollout, where no answer needs the newest version; else it would wait for that."""
    engines = [FakeEngine(version=5), FakeEngine(version=5)]
    monkeypatch.setattr(FakeHub, "visible", 5)
    ray.now = 1.0
    generator = make(engines, is_partial=True, batches=2)
    level, *_ = generator.generate_samples()
    monkeypatch.setattr(FakeHub, "visible", 9)
    ray.now += 60.0
    behind, *_ = generator.generate_samples()
    lags = [figures_of(samples)["tensorhub/version_lag/max"] for samples in (level, behind)]
    assert lags == [0.0, 4.0] and figures_of(behind)["tensorhub/last_pull_age_s"] >= 60.0


def refusing(self: FakeEngine, version: int) -> None:
    """It cannot install this version, and says so when it is asked for it."""
    heartbeat, answer = self.do_tensorhub_heartbeat, self.do_generate_responses

    def refuse(*, min_version: int, **given: Any) -> Any:
        if min_version > self.version:
            return VersionRefused("tensor 'x' is unknown", version=version)
        return answer(min_version=min_version, **given)

    self.do_tensorhub_heartbeat = lambda: {**heartbeat(), "refusal": (version, "tensor 'x' is unknown")}  # type: ignore[method-assign]
    self.do_generate_responses = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize("is_known", [False, True], ids=["found out by asking", "known by heartbeats"])
def test_a_version_that_all_engines_refuse_is_an_error_with_their_reason(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(FakeHub, "visible", 4)
    engines = [FakeEngine(version=3), FakeEngine(version=3)]
    generator = make(engines)
    generator.engines.live()
    for engine in engines:
        refusing(engine, 4)
    if is_known:
        generator.engines.check()
    else:
        monkeypatch.setattr(generator.engines, "check", lambda **_: None)
    with pytest.raises(
        VersionRefused, match="version 4 cannot be installed in any of 2 replicas.*rollout-0/0: tensor 'x'"
    ):
        generator.generate_samples()
    assert ray.now < 60.0 and bool(engines[0].asked) is not is_known
    assert generator.engines.members[0].epoch == 0  # it is well


def test_operators_may_have_another_one_run_instead(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(version=3)
    monkeypatch.setattr(FakeHub, "visible", 4)
    generator = make([engine])
    refusing(engine, 4)
    generator.engines.live()
    target = FakeHub.target

    def pin(self: FakeHub, installed: int, **how: Any) -> int:
        if installed == 4 and how["pins"]:  # it is asked whether it is still to be run
            monkeypatch.setattr(FakeHub, "pinned", 3)
        return target(self, installed, **how)

    generator.target.look()
    monkeypatch.setattr(FakeHub, "target", pin)
    generator.target.look = lambda: None  # type: ignore[method-assign]
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and {asked["min_version"] for asked in engine.asked} == {3}


def test_an_engine_that_was_not_heard_yet_may_take_it(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHub, "visible", 4)
    refuses, restarting = FakeEngine(version=3), FakeEngine(version=4)
    generator = make([refuses, restarting])
    generator.engines.live()
    refusing(refuses, 4)
    restarting.state = "lost"
    generator.engines.check()
    sleep = ray.sleep

    def come_back(seconds: float) -> None:
        sleep(seconds)
        restarting.state = "well"

    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: ray.now, sleep=come_back))
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and len(restarting.asked) == 6


def test_a_step_logs_the_worst_that_its_samples_say() -> None:
    told = [{"tensorhub/replicas/ready": 3, "tensorhub/version_lag/max": 0}, {"tensorhub/replicas/ready": 2}, {}]
    samples = [
        SimpleNamespace(info={name: torch.tensor([float(value)]) for name, value in info.items()}) for info in told
    ]
    samples[1].info |= {"tensorhub/version_lag/max": torch.tensor([4.0]), FIRST: torch.tensor([7.0])}
    assert figures_of(samples) == {"tensorhub/replicas/ready": 2.0, "tensorhub/version_lag/max": 4.0}


def asked_in_turn(monkeypatch: pytest.MonkeyPatch, *hubs: dict[str, int]) -> list[int]:
    """What an engine is asked for in partial rollout, batch by batch, while the hub says this."""
    engine, asked = FakeEngine(), []
    generator = make([engine], is_partial=True, batches=len(hubs))
    for said in hubs:
        for name, version in said.items():
            monkeypatch.setattr(FakeHub, name, version)
        engine.asked.clear()
        generator.generate_samples()
        (version,) = {one["min_version"] for one in engine.asked}
        asked.append(version)
    return asked


def test_partial_rollout_asks_for_what_the_run_began_with(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes has published by then, and engines may still have weights of its former life."""
    resumed = version_of(1, 4)
    assert asked_in_turn(monkeypatch, {"visible": resumed}, {"visible": resumed + 3}) == [resumed, resumed]


def test_partial_rollout_that_begins_with_nothing_asks_for_no_version(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked_in_turn(monkeypatch, {"visible": 0}, {"visible": 4}) == [0, 0]


def test_partial_rollout_asks_for_less_only_when_operators_do(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_in_turn(monkeypatch, {"visible": 6}, {"pinned": 5}, {"pinned": 0}) == [6, 5, 5]


def test_prompts_of_a_killed_engine_are_asked_elsewhere(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.engines.live()
    other.state = "silent"
    other.do_get_num_unfinished_requests = lambda: 0
    call = FakeEngine._call

    def lose_in_the_middle(self: FakeEngine, name: str, *args: Any, **kwargs: Any) -> Ref:
        if self is other and name in ("get_num_unfinished_requests", "tensorhub_heartbeat") and self.state == "silent":
            return Ref(0 if name.startswith("get") else {"version": 0, "silent_s": 0.0})
        ref = call(self, name, *args, **kwargs)
        if self is well and len(self.asked) == 3 and other.state == "silent" and len(other.asked) == 3:
            other.lose()
        return ref

    monkeypatch.setattr(FakeEngine, "_call", lose_in_the_middle)
    samples, *_ = generator.generate_samples()
    assert len(other.asked) == 3, "the kill did not hit in the middle"
    assert len(well.asked) == 6
    assert prompts_of(samples) == EVERY_PROMPT
    assert [member.answers for member in generator.engines.members] == [True, False]


def test_an_engine_that_is_about_to_end_is_not_asked_again(ray: FakeRay) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.engines.live()  # both have answered, and the next heartbeat comes later
    other.state = "ending"
    generator._dispatch_prompts_to_vllm(["p0", "p1"], ["", ""])
    generator.router.hand_out()
    assert len(other.asked) == 1, "it was not asked while it seemed well"
    while generator.router.work:
        generator.router.answers()
        generator.router.hand_out()
    assert (len(well.asked), len(other.asked)) == (2, 1)
    assert not ray.killed  # it ends by itself, and Ray starts it again


def test_a_silent_engine_is_ended_and_its_prompts_are_asked_elsewhere(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.engines.live()
    call = FakeEngine._call

    def freeze_when_asked(self: FakeEngine, name: str, *args: Any, **kwargs: Any) -> Ref:
        if self is other and name == "generate_responses" and self.state == "well":
            self.state = "silent"
        return call(self, name, *args, **kwargs)

    monkeypatch.setattr(FakeEngine, "_call", freeze_when_asked)
    samples, *_ = generator.generate_samples()
    assert ray.killed == [other]
    assert prompts_of(samples) == EVERY_PROMPT
    assert ray.now >= 10  # not before its time


def test_a_silent_server_of_others_is_not_ended_and_may_come_back(ray: FakeRay) -> None:
    well, theirs = FakeEngine(), FakeEngine()
    generator = make([well, theirs])
    engines = generator.engines
    engines.live()
    engines.members[1].kind = "external"
    beat = theirs.do_tensorhub_heartbeat
    theirs.do_tensorhub_heartbeat = lambda: {**beat(), "silent_s": 99.0}  # type: ignore[method-assign]
    engines.check()
    assert not ray.killed and [one.answers for one in engines.members] == [True, False]
    theirs.do_tensorhub_heartbeat = beat  # type: ignore[method-assign]
    engines.check()
    assert engines.members[1].answers
    engines.members[1].kind = "first"  # control: one of ours
    theirs.do_tensorhub_heartbeat = lambda: {**beat(), "silent_s": 99.0}  # type: ignore[method-assign]
    engines.check()
    assert ray.killed == [theirs]


@pytest.mark.parametrize("comes", [True, False], ids=["its answer comes", "the control"])
def test_an_answer_that_came_while_we_stood_still_is_waited_for(
    comes: bool, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, other = FakeEngine(), FakeEngine()
    engines = make([well, other]).engines
    engines.live()
    other.state = "silent"
    engines.check(wait_s=0.0)
    (probe,) = other.working
    wait = ray.wait

    def arrives(refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> object:
        if comes and timeout:
            probe.answer = other.do_tensorhub_heartbeat()
        return wait(refs, num_returns=num_returns, timeout=timeout)

    monkeypatch.setattr(ray, "wait", arrives)
    ray.now += 60.0
    engines.check(wait_s=0.0)
    assert ray.killed == ([] if comes else [other])


def test_an_engine_that_is_loading_is_not_taken_for_silent(ray: FakeRay) -> None:
    well, loading = FakeEngine(), FakeEngine()
    loading.state = "silent"
    generator = make([well, loading])
    for _ in range(100):
        generator.engines.check()
    assert ray.now >= 10 and not ray.killed
    for ref in loading.working:
        ref.answer = loading.do_tensorhub_heartbeat()
    loading.state = "well"
    assert len(generator.engines.live()) == 2


def stale(self: FakeEngine) -> None:
    """It is cut off from the hub for longer than staleness_s."""
    beat = self.do_tensorhub_heartbeat
    self.do_tensorhub_heartbeat = lambda: {**beat(), "ready": False, "why": "it is cut off"}  # type: ignore[method-assign]


def test_a_stale_engine_gets_no_prompts_and_is_neither_lost_nor_restarting(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(rotation, "record", lambda event, **_: events.append(event))
    well, cut_off = FakeEngine(), FakeEngine()
    generator = make([well, cut_off])
    generator.engines.live()
    stale(cut_off)
    generator.engines.check()
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and not cut_off.asked and not ray.killed
    seen = [(one.ready, one.lost, one.why) for one in generator.engines.seen().seen]
    assert seen == [(True, "", ""), (False, "", "it is cut off")]
    assert generator.engines.members[1].epoch == 0 and events.count("replica_lost") == 0
    del cut_off.do_tensorhub_heartbeat
    assert len(generator.engines.live()) == 2
    cut_off.lose()  # the control
    generator.engines.check()
    assert generator.engines.seen().seen[1].lost == "restarting" and events.count("replica_lost") == 1


def test_the_only_engine_hangs_and_is_ended_and_asked_when_it_is_back(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    generator = make([engine])
    generator.engines.live()
    engine.state = "silent"
    kill = ray.kill

    def start_again(handle: FakeEngine, no_restart: bool) -> None:
        kill(handle, no_restart)
        assert ray.now > 10 and generator.engines.seen().seen[0].ready
        sleep = ray.sleep

        def come_back(seconds: float) -> None:
            sleep(seconds)
            engine.state = "well" if ray.now > 20 else engine.state

        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: ray.now, sleep=come_back))

    monkeypatch.setattr(ray, "kill", start_again)
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and ray.killed == [engine]


def test_what_an_engine_has_that_drains_and_hangs_is_asked_elsewhere(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, leaver = FakeEngine(), FakeEngine()
    generator = make([well, leaver])
    generator.engines.live()
    call = FakeEngine._call

    def hang_when_asked(self: FakeEngine, name: str, *args: Any, **kwargs: Any) -> Ref:
        if self is leaver and name == "generate_responses":
            self.state, generator.engines.members[1].is_draining = "silent", True
        return call(self, name, *args, **kwargs)

    monkeypatch.setattr(FakeEngine, "_call", hang_when_asked)
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and ray.now >= 10
    assert not ray.killed, "the fleet ends it"
    assert generator.engines.seen().seen[1].in_flight == 0


def test_an_engine_that_is_back_has_caught_up_before_it_is_asked(ray: FakeRay) -> None:
    engines = [FakeEngine(version=4), FakeEngine(version=4)]
    generator = make(engines, is_partial=True, batches=2)
    generator.engines.live()
    engines[1].state = "lost"
    generator.engines.check()
    engines[1].state, engines[1].version = "well", 3  # what it was started again with
    generator.engines.check()
    generator.generate_samples()
    assert not engines[1].asked
    engines[1].version = 4
    generator.engines.check()
    generator.generate_samples()
    assert len(engines[1].asked) == 3


def test_an_engine_that_came_back_is_asked_again(ray: FakeRay) -> None:
    engines = [FakeEngine(), FakeEngine()]
    generator = make(engines, batches=2)
    generator.engines.live()
    engines[1].state = "lost"
    generator.generate_samples()
    assert not engines[1].asked
    engines[1].state = "well"
    generator.generate_samples()
    assert len(engines[1].asked) == 3


def test_a_prompt_that_loses_every_engine_is_an_error_in_the_end(ray: FakeRay) -> None:
    engine = FakeEngine()
    generator = make([engine])
    engine.do_generate_responses = lambda **_: RayActorError()  # type: ignore[method-assign]
    with pytest.raises(RayActorError):
        generator.generate_samples()
    assert len(engine.asked) >= routing.LOSSES_MAX


def test_an_engine_that_cannot_start_ends_the_run_at_once(ray: FakeRay) -> None:
    well, other = FakeEngine(), FakeEngine()
    other.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    with pytest.raises(ActorDiedError):
        make([well, other]).generate_samples()
    assert ray.now < 10


@pytest.mark.parametrize(
    "error", [ActorDiedError(), OutOfMemoryError("its node is short of it")], ids=["died", "out of memory"]
)
def test_a_dead_engine_is_done_without_while_others_live(error: Exception, ray: FakeRay) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.engines.live()
    beat = other.do_tensorhub_heartbeat
    other.do_generate_responses = lambda **_: error  # type: ignore[method-assign]
    other.do_tensorhub_heartbeat = lambda: error if other.asked else beat()  # type: ignore[method-assign]
    samples, *_ = generator.generate_samples()
    assert prompts_of(samples) == EVERY_PROMPT and other.asked
    for _ in range(10):
        assert [member.name for member in generator.engines.live()] == ["rollout-0"]
    well.do_tensorhub_heartbeat = other.do_tensorhub_heartbeat  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        generator.engines.live()


def test_an_evaluation_sees_one_version(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHub, "visible", 2)
    engines = [FakeEngine(version=1), FakeEngine(version=3)]  # one has got a version that came after we asked
    generator = make(engines, evaluation=PROMPTS)
    held: list[bool] = []
    answer = FakeEngine.do_generate_responses

    def note(self: FakeEngine, **kwargs: Any) -> Any:
        held.append(self.is_held)
        return answer(self, **kwargs)

    monkeypatch.setattr(FakeEngine, "do_generate_responses", note)
    samples = generator.generate_eval_samples()
    assert prompts_of(samples) == EVERY_PROMPT
    assert {int(sample.info[FIRST]) for sample in samples} == {3}
    assert held and all(held)
    assert not any(engine.is_held for engine in engines)


def test_in_an_evaluation_an_engine_that_was_lost_is_not_asked_again(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back with whatever is the newest version then."""
    well, other = FakeEngine(version=3), FakeEngine(version=3)
    generator = make([well, other], evaluation=2 * PROMPTS)
    monkeypatch.setattr(FakeHub, "visible", 3)
    answer = FakeEngine.do_generate_responses

    def come_and_go(self: FakeEngine, **kwargs: Any) -> Any:
        if self is other:
            assert self.version == 3, "asked when it had come back with another version"
            self.version, self.state = 5, "lost"
            return RayActorError()
        if len(well.asked) > 3:  # it is asked for what the other one has lost
            other.state = "well"
            generator.engines.check()
        return answer(self, **kwargs)

    monkeypatch.setattr(FakeEngine, "do_generate_responses", come_and_go)
    samples = generator.generate_eval_samples()
    assert generator.engines.members[1].answers and len(other.asked) == 1
    assert {int(sample.info[FIRST]) for sample in samples} == {3}
    assert prompts_of(samples) == sorted(2 * EVERY_PROMPT)


# --- handing out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_engine", "shares"), [(1, [5, 1]), (2, [4, 2]), (None, [3, 3])])
def test_a_slow_engine_holds_up_no_more_than_it_was_given(
    ray: FakeRay, per_engine: int | None, shares: list[int]
) -> None:
    """None is the control: everything is handed out at once, as OpenRLHF does."""
    quick, slow = FakeEngine(), FakeEngine()
    generator = make([quick, slow], per_engine=per_engine)
    generator.engines.live()
    answer, left = quick.do_generate_responses, []

    def answer_late(**kwargs: Any) -> Any:
        left.append(kwargs)
        return None  # not there yet

    slow.do_generate_responses = answer_late  # type: ignore[method-assign]
    call = slow._call
    refs: list[Ref] = []

    def keep(name: str, *args: Any, **kwargs: Any) -> Ref:
        ref = call(name, *args, **kwargs)
        if name == "generate_responses":
            refs.append(ref)
        return ref

    slow._call = keep  # type: ignore[method-assign]
    wait = ray.wait

    def when_all_else_is_done(given: list[Ref], **kwargs: Any) -> Any:
        if len(quick.asked) == shares[0] and all(ref.answer is None for ref in given):
            for ref, kwargs_of in zip(refs, left, strict=True):
                ref.answer = answer(**kwargs_of)
        return wait(given, **kwargs)

    ray.wait = when_all_else_is_done  # type: ignore[method-assign]
    samples, *_ = generator.generate_samples()
    assert [len(quick.asked), len(slow.asked)] == shares
    assert prompts_of(samples) == EVERY_PROMPT


def test_an_engine_that_comes_in_the_middle_of_a_batch_gets_work_at_once(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, late = FakeEngine(), FakeEngine()
    generator = make([here, late], per_engine=1)
    generator.engines.live()
    late.state = "lost"
    generator.engines.check()
    answer = FakeEngine.do_generate_responses

    def come_back(self: FakeEngine, **kwargs: Any) -> Any:
        if len(here.asked) == 3:
            late.state = "well"
        ray.now += health.CHECK_INTERVAL_S  # a long answer
        return answer(self, **kwargs)

    monkeypatch.setattr(FakeEngine, "do_generate_responses", come_back)
    samples, *_ = generator.generate_samples()
    assert len(late.asked) >= 1 and len(here.asked) + len(late.asked) == 6
    assert prompts_of(samples) == EVERY_PROMPT


def test_with_few_samples_a_prompt_an_engine_gets_more_prompts(ray: FakeRay) -> None:
    engine = FakeEngine()
    engine.do_tensorhub_heartbeat = lambda: {"version": 0, "silent_s": 0.0, "requests_max": 2}  # type: ignore[method-assign]
    generator = make([engine])  # two samples a prompt: one prompt fills it, another one waits in vLLM
    generator.engines.live()
    engine.do_generate_responses = lambda **_: None  # type: ignore[assignment,method-assign,return-value]
    generator._dispatch_prompts_to_vllm([f"p{i}" for i in range(6)], 6 * [""])
    generator.router.hand_out()
    assert len(engine.asked) == 2 and len(generator.router.work.waiting) == 4


def test_dynamic_filtering_replaces_prompts_as_before(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [FakeEngine(), FakeEngine()]
    generator = make(engines, per_engine=1, filtering=True, batches=2)
    answer = FakeEngine.do_generate_responses

    def score(self: FakeEngine, **kwargs: Any) -> Any:
        responses = answer(self, **kwargs)
        worth = torch.tensor(1.0 if kwargs["prompt"] in ("p0", "p3") else 0.5)
        return [{**response, "scores": worth} for response in responses]

    monkeypatch.setattr(FakeEngine, "do_generate_responses", score)
    samples, _, consumed, _ = generator.generate_samples()
    # p0 and p3 are replaced by the next two of the data, p0 and p1; p0 again by p2.
    assert consumed == 9
    assert prompts_of(samples) == sorted(2 * ["p1", "p2", "p4", "p5", "p1", "p2"])
