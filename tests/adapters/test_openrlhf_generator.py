"""Engines that come and go under OpenRLHF's generator. Ray is played by a few lines; OpenRLHF is the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError  # noqa: E402

from tensorhub_plugins.core import NotPublished, VersionGone  # noqa: E402
from tensorhub_plugins.openrlhf import health, routing  # noqa: E402
from tensorhub_plugins.openrlhf.config import Options  # noqa: E402
from tensorhub_plugins.openrlhf.versions import FIRST  # noqa: E402
from tensorhub_plugins.vllm.ray.health import EngineLost  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine


class Ref:
    """What .remote() returns. answer: a value, an error to raise, or None: not there yet."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer


class FakeRay:
    """ray.wait, ray.get and ray.kill over `Ref`s. Time passes when nothing is ready."""

    def __init__(self) -> None:
        self.now = 0.0
        self.killed: list[Any] = []

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.answer is not None][:num_returns]
        if len(ready) < num_returns:
            self.now += timeout
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref, timeout) for ref in refs]
        if refs.answer is None:
            raise GetTimeoutError("not there yet")
        if isinstance(refs.answer, Exception):
            raise refs.answer
        return refs.answer

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def kill(self, handle: FakeEngine, no_restart: bool) -> None:
        assert not no_restart
        self.killed.append(handle)
        handle.lose()


class FakeEngine:
    """Answers at once, unless told otherwise."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        # "silent": answers nothing; "lost": every call fails; "ending": its vLLM is dead, the actor not yet
        self.state = "well"
        self.asked: list[dict[str, Any]] = []
        self.working: list[Ref] = []
        self.is_held = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._call(name, *args, **kwargs))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Ref:
        ref = Ref()
        if self.state == "lost":
            ref.answer = RayActorError()
            return ref
        if name == "generate_responses":
            self.asked.append(kwargs)
        if self.state == "ending" and name in ("generate_responses", "tensorhub_heartbeat"):
            ref.answer = EngineLost("its vLLM is dead")
            return ref
        if self.state == "silent":
            self.working.append(ref)
            return ref
        ref.answer = getattr(self, f"do_{name}")(*args, **kwargs)
        return ref

    def do_tensorhub_heartbeat(self) -> dict[str, Any]:
        return {"version": self.version, "silent_s": 0.0}

    def do_get_num_unfinished_requests(self) -> int:
        return 0

    def do_tensorhub_hold(self, version: int) -> int:
        self.is_held, self.version = True, max(version, self.version)
        return self.version

    def do_tensorhub_release(self) -> bool:
        self.is_held = False
        return True

    def do_generate_responses(self, prompt: str, num_samples: int, min_version: int, **_: Any) -> list[dict[str, Any]]:
        sample = {
            "prompt": prompt,
            "label": "",
            "observation_tokens": [1, 2, 3],
            "action_ranges": [(1, 3)],
            "rollout_log_probs": None,
            "reward": torch.tensor(0.5),
            "scores": torch.tensor(0.5),
            "extra_logs": {FIRST: max(self.version, min_version)},
        }
        return [sample] * num_samples

    def lose(self) -> None:
        self.state = "lost"
        for ref in self.working:
            ref.answer = RayActorError()
        self.working = []


class FakeHub:
    visible = 0
    pinned = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def target(self, installed: int, *, pins: bool, timeout_s: float) -> int:
        assert timeout_s == 0.0, "nobody waits for the hub"
        version = self.pinned if self.pinned and pins else max(self.visible, installed)
        if version == installed:
            raise NotPublished("nothing else")
        return version


class FakeProgress:
    def update(self) -> None: ...

    def set_postfix(self, _: dict[str, int]) -> None: ...


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(health, "ray", fake)
    monkeypatch.setattr(routing, "ray", fake)
    monkeypatch.setattr(routing.samples_generator, "ray", fake)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: fake.now, sleep=fake.sleep))
    monkeypatch.setattr(routing, "connect", FakeHub)
    monkeypatch.setattr(routing.samples_generator, "tqdm", lambda *_, **__: FakeProgress())
    monkeypatch.setattr(FakeHub, "visible", 0)
    monkeypatch.setattr(FakeHub, "pinned", 0)
    return fake


PROMPTS = [(["d"], [f"p{i}"], [""], [None]) for i in range(6)]


def make(
    engines: list[FakeEngine],
    *,
    is_partial: bool = False,
    is_sync: bool = False,
    evaluation: Any = None,
    batches: int = 1,
) -> routing.SamplesGenerator:
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=2, batch_size=6, vllm_generate_batch_size=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(is_correction_level="off"),
            dynamic_filtering_enable=False,
            dynamic_filtering_range=(0.0, 1.0),
        ),
        vllm=SimpleNamespace(enable_sleep=False),
    )
    return routing.SamplesGenerator(
        options=Options(hub="tcp://h:1", run="r", engine_timeout_s=10),
        is_partial=is_partial,
        is_sync=is_sync,
        strategy=SimpleNamespace(args=args),
        prompts_dataloader=batches * PROMPTS,
        eval_dataloader=evaluation,
        tokenizer=None,
        vllm_engines=engines,
    )


def prompts_of(samples: list[Any]) -> list[str]:
    return sorted(sample.prompts[0] for sample in samples)


EVERY_PROMPT = sorted(2 * [f"p{i}" for i in range(6)])


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
    generator.newest = 4

    def gone(*_: Any, **__: Any) -> int:
        raise VersionGone("version 4 was withdrawn, and no other is held")

    monkeypatch.setattr(FakeHub, "target", gone)
    generator.generate_samples()
    assert {asked["min_version"] for asked in engine.asked} == {0}


def test_partial_rollout_asks_for_no_version(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHub, "visible", 4)
    engine = FakeEngine()
    make([engine], is_partial=True).generate_samples()
    assert {asked["min_version"] for asked in engine.asked} == {0}


def test_prompts_of_a_killed_engine_are_asked_elsewhere(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.fleet.live()
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
    assert [member.is_live for member in generator.fleet.members] == [True, False]


def test_an_engine_that_is_about_to_end_is_not_asked_again(ray: FakeRay) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.fleet.live()  # both have answered, and the next heartbeat comes later
    other.state = "ending"
    generator.fleet.check = lambda: None  # type: ignore[method-assign]
    generator._dispatch_prompts_to_vllm(["p0", "p1"], ["", ""])
    del generator.fleet.check
    assert len(other.asked) == 1, "it was not asked while it seemed well"
    (asked,) = [asked for ref, asked in generator._asked.items() if isinstance(ref.answer, EngineLost)]
    generator._ask_again(asked, EngineLost("its vLLM is dead"))
    assert (len(well.asked), len(other.asked)) == (2, 1)
    assert not ray.killed  # it ends by itself, and Ray starts it again


def test_a_silent_engine_is_ended_and_its_prompts_are_asked_elsewhere(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.fleet.live()
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


def test_an_engine_that_is_loading_is_not_taken_for_silent(ray: FakeRay) -> None:
    well, loading = FakeEngine(), FakeEngine()
    loading.state = "silent"
    generator = make([well, loading])
    for _ in range(100):
        generator.fleet.check()
    assert ray.now >= 10 and not ray.killed
    for ref in loading.working:
        ref.answer = loading.do_tensorhub_heartbeat()
    loading.state = "well"
    assert len(generator.fleet.live()) == 2


def test_an_engine_that_came_back_is_asked_again(ray: FakeRay) -> None:
    engines = [FakeEngine(), FakeEngine()]
    generator = make(engines, batches=2)
    generator.fleet.live()
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
    assert len(engine.asked) >= routing.ASKED_AGAIN_MAX


def test_an_engine_that_cannot_start_ends_the_run_at_once(ray: FakeRay) -> None:
    well, other = FakeEngine(), FakeEngine()
    other.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    with pytest.raises(ActorDiedError):
        make([well, other]).generate_samples()
    assert ray.now < 10


def test_a_dead_engine_is_done_without_while_others_live(ray: FakeRay) -> None:
    well, other = FakeEngine(), FakeEngine()
    generator = make([well, other])
    generator.fleet.live()
    other.do_tensorhub_heartbeat = lambda: ActorDiedError()  # type: ignore[method-assign]
    for _ in range(10):
        assert [member.name for member in generator.fleet.live()] == ["rollout-0"]
    well.do_tensorhub_heartbeat = other.do_tensorhub_heartbeat  # type: ignore[method-assign]
    with pytest.raises(ActorDiedError):
        generator.fleet.live()


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
