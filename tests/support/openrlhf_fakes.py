"""Engines, Ray and a hub that are played, for OpenRLHF's real generator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from tensorhub_plugins.core import NotPublished
from tensorhub_plugins.openrlhf import engine, generation, health, routing
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.openrlhf.samples import Samples
from tensorhub_plugins.openrlhf.versions import FIRST
from tensorhub_plugins.vllm.engine.follower import Follower, Gate
from tensorhub_plugins.vllm.engine.spans import Spans
from tensorhub_plugins.vllm.ray import rotation
from tensorhub_plugins.vllm.ray.health import EngineLost
from tensorhub_plugins.vllm.ray.owned import OwnedEngine


class Ref:
    """The result of .remote(). answer: a value, an error to raise, or None: not there yet."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer


class FakeRay:
    """A fake of ray.wait, ray.get and ray.kill over `Ref`s. Time passes when nothing is ready."""

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

    def put(self, value: Any) -> Ref:
        return Ref(value)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def kill(self, handle: FakeEngine, no_restart: bool) -> None:
        assert not no_restart
        self.killed.append(handle)
        handle.lose()


class FakeEngine:
    """An engine that answers at once, unless told otherwise."""

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


def play_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Replace Ray, the hub and the fleet."""
    fake = FakeRay()
    monkeypatch.setattr(health, "ray", fake)
    monkeypatch.setattr(rotation, "ray", fake)
    monkeypatch.setattr(routing, "ray", fake)
    monkeypatch.setattr(generation, "ray", fake)
    monkeypatch.setattr(generation.samples_generator, "ray", fake)
    for module in (health, rotation):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: fake.now, sleep=fake.sleep))
    monkeypatch.setattr(generation, "connect", FakeHub)
    monkeypatch.setattr(generation.Reporter, "start", lambda _: None)  # the stories below play its part
    monkeypatch.setattr(generation.samples_generator, "tqdm", lambda *_, **__: FakeProgress())
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
    per_engine: int | None = None,
    filtering: bool = False,
) -> generation.SamplesGenerator:
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=2, batch_size=6, vllm_generate_batch_size=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(is_correction_level="off"),
            dynamic_filtering_enable=filtering,
            dynamic_filtering_range=(0.0, 1.0),
        ),
        vllm=SimpleNamespace(enable_sleep=False),
    )
    return generation.SamplesGenerator(
        options=Options(hub="tcp://h:1", run="r", engine_timeout_s=10, prompts_per_engine=per_engine),
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


# --- an engine of ours, over a vLLM that is played ---


class FakeTokenizer:
    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


class FakeLLM:
    """A fake of vLLM's AsyncLLM and its core, where our follower is: it answers when told to, and accepts every version
    at once, when each request has had one token of the version before."""

    follower: Follower

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[tuple[list[int], Any]] = []
        self.answers = asyncio.Event()
        self.aborted: dict[str, list[int]] = {}  # request: its tokens up to then
        self.errored = False
        self.spans, self.engine_core = Spans(), self
        self.output_processor = SimpleNamespace(request_states={}, abort_requests=lambda names, internal: names)

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        self.calls.append(method)
        if method == "tensorhub_install":
            self.switch(args[0])
        return [{"state": "ready", "error": None, "installed": True, "broken": None}]

    def switch(self, version: int) -> None:
        self.spans.switched(version, dict.fromkeys(self.output_processor.request_states, 1))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == "tensorhub_ask":
            return await self.follower.answer(args[0], *args[1])
        if method == "tensorhub_leave":
            self.calls.append(method)
            return None
        assert method == "tensorhub_starts" and args[1]
        return self.spans.pop(args[0])

    async def pause(self) -> None:
        self.calls += ["pause", "forget"]

    async def forget(self) -> None:
        self.calls.append("forget")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def at_once(self, steps: Any) -> Any:
        return await steps()

    def running(self) -> list[str]:
        return list(self.output_processor.request_states)

    def departed(self) -> list[str]:
        return []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.output_processor.request_states[request_id] = None
        self.spans.added(request_id)
        self.asked.append((list(prompt["prompt_token_ids"]), params))
        await self.answers.wait()
        self.output_processor.request_states.pop(request_id, None)
        if request_id in self.aborted:
            yield SimpleNamespace(outputs=[completion("abort", self.aborted[request_id])], request_id=request_id)
        else:
            yield SimpleNamespace(outputs=[completion("stop", [7, 8])], request_id=request_id)

    async def abort(self, requests: list[str], internal: bool) -> None:
        assert internal, "the keys of request_states are vLLM's own names"
        self.aborted = {request: [5] for request in requests}
        self.answers.set()


def completion(reason: str, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(finish_reason=reason, token_ids=tokens, text="", logprobs=None, cumulative_logprob=None)


def make_engine(executor: Any, *, is_partial: bool, llm: Any = None) -> Any:
    """Make an engine without its __init__, which needs vLLM."""
    one = engine.TensorHubEngine.__new__(engine.TensorHubEngine)
    one.llm, one.worker, one._mm_pad_token_ids = llm or FakeLLM(), "rollout-0/0", None
    one.llm.generate = engine.named(one.llm.generate)
    one.options = Options(hub="tcp://h:1", run="r", timeout_s=5)
    one.executor = executor
    one.is_leaving, one.is_partial, one.samples = False, is_partial, Samples()
    one.owned = OwnedEngine(one.llm, one.worker)
    one.owned._whole_prompts = not is_partial
    gate = None if is_partial else Gate()
    one.llm.follower = Follower(one.llm, lambda *_, **__: 0, worker=one.worker, timeout_s=5, gate=gate)
    return one
