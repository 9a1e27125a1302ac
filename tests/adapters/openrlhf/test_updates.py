"""OpenRLHF repeats an update, skips one, asks for none at first, restarts, resumes, ends in between: in all modes.

OpenRLHF's own trainers and generators, and our engines, over a real hub, see tests/support/openrlhf_updates.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

from openrlhf_updates import ENGINES, MODES, TIMEOUT_S, Engine, Life, play_ray  # noqa: E402

from tensorhub_plugins.core import (  # noqa: E402
    DeadlineExceeded,
    HubLimits,
    UsageError,
    VersionRefused,
    start_server,
    step_of,
    version_of,
)
from tensorhub_plugins.core.client.publisher import Publisher  # noqa: E402
from tensorhub_plugins.openrlhf import generation, targets  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine

KEYS = {
    f"tensorhub/{name}"
    for name in (
        *("version", "publish/seconds", "publish/gather_seconds", "publish/bytes"),
        *("replicas/ready", "replicas/lost", "replicas/refused", "version_lag/max", "version_lag/mean"),
        *("last_pull_age_s", "pull/seconds_max", "pull/share_from_peers", "pause/seconds_max"),
        *(f"pull/bytes_{name}" for name in ("same_host", "near", "far", "rdma", "wire")),
        *("staleness_mean", "staleness_max", "samples_of_several_versions", "validation_wait/seconds"),
    )
}


class Story:
    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.disk: dict[str, Any] = {}
        self.engines: list[Engine] = []
        self.open: list[Any] = []

    def start_engines(self, mode: str, refuses: Callable[[int], bool] = lambda version: False) -> None:
        for one in self.engines:
            self.close(one)
        self.engines = [Engine(self.address, number, mode, refuses) for number in range(ENGINES)]
        self.open += self.engines

    def life(self, mode: str, batches: int, **how: Any) -> Life:
        life = Life(self.address, mode, self.engines, self.disk, self.folder, batches=batches, **how)
        self.open.append(life)
        return life

    def close(self, one: Any) -> None:
        self.open.remove(one)
        one.close()

    def have(self) -> set[float]:
        return {one.store.trained for one in self.engines}


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Story]:
    play_ray(monkeypatch)
    with start_server(limits=HubLimits(grace_s=0.05)) as server:
        told = Story(server.address, tmp_path)
        try:
            yield told
        finally:
            for one in reversed(list(told.open)):
                told.close(one)


def expected(mode: str, first: int, count: int, base: float) -> list[tuple[int, set[float]]]:
    """Each step and the weights that answered its batch: in turns those before it, else those before that, if any."""
    late = 0 if mode == "sync" else 1
    return [(first + n, {base + max(0, n - late)}) for n in range(count)]


@pytest.mark.parametrize(("updates", "eval_steps"), [(1, float("inf")), (2, 2), (1, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_from_its_first_update_to_its_end(story: Story, mode: str, updates: int, eval_steps: float) -> None:
    """No update comes before the first batch; some runs repeat each one, some evaluate at steps that divide the last
    one, or do not."""
    story.start_engines(mode)
    life = story.life(mode, 4, updates=updates, eval_steps=eval_steps)
    life.run()
    assert life.policy.trained == 4 and story.have() == {4.0}
    if mode == "sync" or eval_steps == float("inf"):
        assert life.batches == expected(mode, 1, 4, 0.0)
    assert [step for step, _ in life.batches] == [1, 2, 3, 4] == list(life.log.steps)
    for step, told in life.log.steps.items():  # in the log of every mode
        assert told.keys() >= KEYS, f"step {step} lacks {sorted(KEYS - told.keys())}"
        assert told["tensorhub/version"] == step and told["tensorhub/publish/bytes"] == 128.0
        late = 1 if mode == "sync" else step  # where another engine has answered, of a busy machine
        assert told["tensorhub/version_lag/max"] <= late
        assert told["tensorhub/replicas/refused"] == 0.0
        assert told["tensorhub/replicas/ready"] == ENGINES
    if mode == "sync" and eval_steps != float("inf"):
        assert {step: told["eval_d_pass1"] for step, told in life.log.evaluations.items()} == (
            {2: 2.0, 4: 4.0} if eval_steps == 2 else {3: 3.0}
        )
    for told in life.log.evaluations.values():
        assert told["eval_d_pass1"] in {1.0, 2.0, 3.0, 4.0}  # of one version
    assert bool(life.log.evaluations) == (eval_steps != float("inf"))


@pytest.mark.parametrize("mode", MODES)
def test_an_actor_that_is_frozen_at_first_publishes_what_it_has(story: Story, mode: str) -> None:
    """OpenRLHF trains the critic alone then, and updates the engines all the same."""
    story.start_engines(mode)
    life = story.life(mode, 4, freezing_steps=1)
    life.run()
    trained = [0.0, 0.0, 0.0, 1.0] if mode == "sync" else [0.0, 0.0, 0.0, 0.0]
    assert life.batches == [(step, {one}) for step, one in enumerate(trained, 1)]
    assert life.policy.trained == 2 and story.have() == {2.0}
    assert all(told.keys() >= KEYS for told in life.log.steps.values())


@pytest.mark.parametrize("are_new", [False, True], ids=["the same engines", "new engines"])
@pytest.mark.parametrize("saved", [True, False], ids=["resumes", "restarts"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_ends_between_two_checkpoints_and_starts_again(
    story: Story, mode: str, saved: bool, are_new: bool
) -> None:
    """From its checkpoint, or from none: what its former life has published since is over."""
    story.start_engines(mode)
    first = story.life(mode, 3, save_steps=2 if saved else float("inf"))
    first.run()
    assert story.have() == {3.0}
    story.close(first)
    if are_new:
        story.start_engines(mode)
        for one in story.engines:
            one.store.trained = 0.5  # the model on their disk is that of the second life
    second = story.life(mode, 2, resumes=saved, mark=0.5)
    second.run()
    begun = 2 if saved else 0
    assert second.batches == expected(mode, begun + 1, 2, begun + 0.5)
    assert story.have() == {begun + 2.5} and list(second.log.steps) == [begun + 1, begun + 2]
    assert all(told.keys() >= KEYS for told in second.log.steps.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_resumes_is_answered_from_its_checkpoint_also_where_it_publishes_in_the_background(
    story: Story, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """As trainers with devices do: a version comes after the generator has looked, unless it is waited for."""
    story.start_engines(mode)
    first = story.life(mode, 3, save_steps=2)
    first.run()
    story.close(first)
    story.start_engines(mode)
    for one in story.engines:
        one.store.trained = 0.5
    comes, seen = threading.Event(), list[int]()
    settle, offer, look = Publisher.settle, Publisher._offer, targets.Target.instead_of

    def settles(self: Publisher) -> None:
        if self._coming is not None:
            comes.set()
        settle(self)

    def offers(self: Publisher, *given: Any) -> dict[str, float]:
        assert comes.wait(TIMEOUT_S)
        return offer(self, *given)

    def looks(self: targets.Target, version: int) -> int:
        seen.append(look(self, version))
        comes.set()
        return seen[-1]

    monkeypatch.setattr(Publisher, "settle", settles)
    monkeypatch.setattr(Publisher, "_offer", offers)
    monkeypatch.setattr(targets.Target, "instead_of", looks)
    need = Engine.need
    monkeypatch.setattr(Engine, "need", lambda *_: None)  # it is no part of OpenRLHF's update
    second = story.life(mode, 2, resumes=True, mark=0.5, in_background=True)
    second.run()
    for one in story.engines:
        need(one, version_of(second.controller.tensorhub_attempt, 4))
    assert step_of(seen[0]) == 2 and second.batches == expected(mode, 3, 2, 2.5) and story.have() == {4.5}


@pytest.mark.parametrize("mode", ["async", "partial"])  # in turns the trainer says which version comes
def test_a_run_that_resumes_is_answered_from_its_checkpoint_also_over_a_restart_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """It is away when the generator looks, and the engines still have the model of their disk."""
    play_ray(monkeypatch)
    servers = [start_server(limits=HubLimits(grace_s=0.05))]
    story = Story(servers[0].address, tmp_path)
    is_asked, dispatch = threading.Event(), generation.SamplesGenerator._dispatch_prompts_to_vllm

    def restart() -> None:
        servers.append(start_server(story.address, limits=HubLimits(grace_s=0.05)))

    def looks(target: Callable[..., int], *given: Any, timeout_s: float, **more: Any) -> int:
        if len(servers) > 1 or not more["pins"]:  # that is for the log
            return target(*given, timeout_s=timeout_s, **more)
        servers[0].close()
        if timeout_s:
            restart()
        try:
            return target(*given, timeout_s=timeout_s, **more)
        finally:
            if not timeout_s:  # who does not wait misses it
                restart()

    def dispatches(self: generation.SamplesGenerator, *given: Any, **more: Any) -> Any:
        answer = dispatch(self, *given, **more)
        is_asked.set()
        return answer

    try:
        story.start_engines(mode)
        first = story.life(mode, 3, save_steps=2)
        first.run()
        story.close(first)
        story.start_engines(mode, refuses=lambda version: not is_asked.wait(TIMEOUT_S))
        for one in story.engines:
            one.store.trained = 0.5
        monkeypatch.setattr(generation.SamplesGenerator, "_dispatch_prompts_to_vllm", dispatches)
        need = Engine.need
        monkeypatch.setattr(Engine, "need", lambda *_: None)  # it is no part of OpenRLHF's update
        second = story.life(mode, 2, resumes=True, mark=0.5)
        second.generator.target.client.target = functools.partial(looks, second.generator.target.client.target)
        second.run()
        for one in story.engines:
            need(one, version_of(second.controller.tensorhub_attempt, 4))
        assert second.batches == expected(mode, 3, 2, 2.5) and story.have() == {4.5}
    finally:
        for one in reversed(list(story.open)):
            story.close(one)
        servers[-1].close()


def test_in_turns_a_version_that_is_not_published_ends_the_run(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the background: what comes next are prompts, which would wait for it."""

    def fails(self: Publisher, *given: Any) -> dict[str, float]:
        raise DeadlineExceeded("the hub is away")

    story.start_engines("sync")
    monkeypatch.setattr(Publisher, "_offer", fails)
    with pytest.raises(DeadlineExceeded, match="the hub is away"):
        story.life("sync", 2, in_background=True).run()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_ended_in_its_first_save_says_so_when_it_resumes(story: Story, mode: str) -> None:
    story.start_engines(mode)
    with pytest.raises(UsageError, match="nothing could be loaded from --ckpt.path: have its _actor/latest"):
        story.life(mode, 2, resumes=True).run()
    assert story.have() == {0.0}, "something was published"


SENTENCE = (
    r"cannot be installed in any of 2 replicas, and .* no other one to go on with: rollout-0/0: .*mlp' is unknown"
)


@pytest.mark.parametrize("mode", MODES)
def test_a_first_version_that_all_engines_refuse_ends_the_run_with_the_reason(story: Story, mode: str) -> None:
    story.start_engines(mode, refuses=lambda version: True)
    life = story.life(mode, 8)
    with pytest.raises(VersionRefused, match=rf"version 1 {SENTENCE}"):
        life.run()
    assert life.policy.trained <= 2 and not story.have() - {0.0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_later_one_ends_a_run_that_is_to_answer_from_it(story: Story, mode: str) -> None:
    story.start_engines(mode, refuses=lambda version: version >= 3)
    life = story.life(mode, 8)
    with pytest.raises(VersionRefused, match=rf"version 3 {SENTENCE}"):
        life.run()
    assert story.have() == {2.0}


def test_in_partial_rollout_engines_go_on_and_the_log_says_how_far_they_are_behind(story: Story) -> None:
    story.start_engines("partial", refuses=lambda version: version >= 3)
    life = story.life("partial", 8)
    life.run()
    assert story.have() == {2.0} and life.policy.trained == 8
    assert life.batches[-1] == (8, {2.0})
    assert [told["tensorhub/replicas/refused"] for told in life.log.steps.values()] == 4 * [0.0] + 4 * [2.0]
    lags = [told["tensorhub/version_lag/max"] for told in life.log.steps.values()]
    assert lags == [told["tensorhub/version_lag/mean"] for told in life.log.steps.values()]
    assert lags == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_alone_refuses_a_version_costs_its_answers(story: Story, mode: str) -> None:
    story.start_engines(mode)
    story.engines[1].store.refuses = lambda version: version == 2
    life = story.life(mode, 4)
    life.run()
    assert [step for step, _ in life.batches] == [1, 2, 3, 4] and story.have() == {4.0}
    if mode != "partial":  # where answers may be of the version before
        assert life.batches == expected(mode, 1, 4, 0.0)
