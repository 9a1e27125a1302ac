"""What is gathered over several steps, or several requests, while the weights change: of one version, and whole."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("requests")

import requests
from vllm_engines import Engine, checkpoint, wait_until
from vllm_servers import make_two_models, serving

from recipes.verl_grpo.make_model import make_tokenizer
from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.vllm.engine import pooling
from tensorhub_plugins.vllm.engine.caches import Caches, WeightsMove, epoch
from tensorhub_plugins.vllm.engine.spans import PREFIX, Spans
from tensorhub_plugins.vllm.worker import progress

TIMEOUT_S = 60.0
CHUNK = 32  # tokens of a step
LENGTHS = (150, 77, 20)
PROMPTS = [[random.Random(length).randrange(2, 500) for _ in range(length)] for length in LENGTHS]
POOLING = {
    **{"runner": "pooling", "convert": "embed", "pooler_config": {"task": "token_embed"}},
    "skip_tokenizer_init": False,  # vLLM prepares to score texts with it
}


class State:
    def __init__(self) -> None:
        self.cleaned = 0
        self.pooling_states: State | None = None
        self.in_progress_prompt_logprobs_cpu: Any = "half"

    def clean(self) -> None:
        self.cleaned += 1


def test_only_what_is_begun_again_is_forgotten() -> None:
    requests = {name: State() for name in "abc"}
    for state in requests.values():
        state.pooling_states = State()
    runner = SimpleNamespace(requests=requests)
    progress.begin_again(runner, {"b", "unknown"})
    assert [state.in_progress_prompt_logprobs_cpu for state in requests.values()] == ["half", None, "half"]
    assert [state.pooling_states and state.pooling_states.cleaned for state in requests.values()] == [0, 1, 0]


def test_log_probabilities_of_a_prompt_are_made_again_where_their_step_was_dropped() -> None:
    """A function of others had changed the weights under that step: the answer came without them."""
    wanted = {"a": 2, "b": -1, "has a token": 1, "goes on": 1, "wants none": None}
    requests = {name: SimpleNamespace(sampling_params=SimpleNamespace(prompt_logprobs=k)) for name, k in wanted.items()}
    requests["is pooled"] = SimpleNamespace(sampling_params=None)
    runner = SimpleNamespace(
        requests=requests, num_prompt_logprobs={"b": 500}, input_batch=SimpleNamespace(vocab_size=500)
    )
    scheduled = SimpleNamespace(
        req_ids=list(requests),
        num_output_tokens=[int(name == "has a token") for name in requests],
        resumed_req_ids=set(requests) - {"goes on"},
    )
    progress.ask_again(runner, scheduled)
    assert runner.num_prompt_logprobs == {"a": 2, "b": 500}
    progress.ask_again(SimpleNamespace(), scheduled)  # vLLM's second runner gets them as new ones


def test_an_install_forgets_what_either_runner_of_vllms_has() -> None:
    forgotten: list[str] = []
    states, chunks = {7: State()}, {"a": [1, 2]}
    second = SimpleNamespace(
        pooling_runner=SimpleNamespace(pooling_states=states),
        prompt_logprobs_worker=SimpleNamespace(in_progress_prompt_logprobs=chunks),
        reset_encoder_cache=lambda: forgotten.append("encoder"),
    )
    progress.begin_again(second)
    assert (states[7].cleaned, chunks, forgotten) == (1, {"a": []}, ["encoder"])
    progress.begin_again(SimpleNamespace(pooling_runner=None, reset_mm_cache=lambda: forgotten.append("inputs")))
    assert forgotten == ["encoder", "inputs"]


def test_a_vllm_that_keeps_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.pool import metadata

    progress.check()
    monkeypatch.setattr(metadata, "PoolingStates", lambda: SimpleNamespace(hidden_states_cache=[], scores_so_far=[]))
    with pytest.raises(UsageError, match="keeps scores_so_far of each request"):
        progress.check()


# --- what the API server makes of several requests ---


class Serving:
    """Speaks as vLLM's: each collection is of the version that the engine has then, and it may change meanwhile."""

    def __init__(self, changes: int, inputs: int = 2) -> None:
        self.core = SimpleNamespace(
            scheduler=SimpleNamespace(), reset_prefix_cache=lambda *_: True, reset_encoder_cache=lambda: None
        )
        self.caches = Caches(self.core)
        self.engine_client = SimpleNamespace(vllm_config="ours", engine_core=self)
        self.changes, self.prepared, self.inputs = changes, 1, inputs

    async def call_utility_async(self, method: str) -> int:
        assert method == "tensorhub_epoch"
        return epoch(self.core)

    async def _prepare_generators(self, ctx: Any) -> None:
        self.prepared += 1

    async def _compute(self, request: Any) -> list[int]:
        ctx = SimpleNamespace()
        await Serving._collect_batch(self, ctx)
        return [*ctx.final, request]

    async def beam_search(self, request: Any, **_: Any) -> AsyncIterator[int]:
        for version in await self._compute(request):
            yield version

    async def create_generative_scoring(self, request: Any) -> list[int]:
        return await self._compute(request)

    async def _collect_batch(self, ctx: Any) -> None:
        ctx.final = [epoch(self.core)]
        if self.changes:
            self.changes -= 1
            self.caches.forget()
        ctx.final += [epoch(self.core)] * (self.inputs - 1)


def collect(serving: Serving, *, wrapped: bool = True) -> list[int]:
    if wrapped:
        serving.__class__ = type("Wrapped", (type(serving),), {})
        pooling.of_one_version(type(serving), lambda config: config == "ours")
    ctx = SimpleNamespace(engine_inputs=[None] * serving.inputs, final=[])
    asyncio.run(serving._collect_batch(ctx))
    return list(ctx.final)


def test_an_answer_of_several_requests_is_of_one_version() -> None:
    assert collect(Serving(1), wrapped=False) == [0, 1]  # the control
    serving = Serving(1)
    assert (collect(serving), serving.prepared) == ([1, 1], 2)
    serving = Serving(0)
    assert (collect(serving), serving.prepared) == ([0, 0], 1)
    serving = Serving(1, inputs=1)
    assert (collect(serving), serving.prepared) == ([0], 1)  # a request is of one version by itself


class Labelled(Serving):
    """Keeps the versions of its requests, as an engine core does under their names."""

    spans, name = Spans(), f"{PREFIX}{7:032x}"

    async def call_utility_async(self, method: str, *given: Any) -> Any:
        if method == "tensorhub_starts":
            return self.spans.pop(given[0])
        return await super().call_utility_async(method)

    async def _collect_batch(self, ctx: Any) -> None:
        for place in range(self.inputs):
            self.spans.added(f"embd-{self.name}-{place}-{self.prepared:08x}")
        await super()._collect_batch(ctx)
        self.spans.switched(epoch(self.core), {})


def test_an_answer_that_is_computed_again_has_its_versions() -> None:
    """One of seven scores had none while versions came: the engine took the requests of each try for strangers."""
    for name, known in ((Labelled.name, [(1, 0)]), ("", [])):  # the second: the control
        Labelled.spans = Spans()
        pooling.answer_name.set(name)
        assert collect(Labelled(1)) == [1, 1]
        assert Labelled.spans.pop(Labelled.name) == [((place, 0), known) for place in (0, 1)]


WAYS = ["beam search", "generative scoring"]


def computed(serving: Serving, way: str, *, ours: bool = True) -> list[int]:
    class Wrapped(Serving):
        pass

    pooling.beams_of_one_version(Wrapped, lambda _: ours)
    pooling.generative_scores_of_one_version(Wrapped, lambda _: ours)
    serving.__class__ = Wrapped

    async def searched() -> list[int]:
        return [version async for version in serving.beam_search(7)]

    asked = searched() if way == "beam search" else serving.create_generative_scoring(7)
    return asyncio.run(asked)


@pytest.mark.parametrize("way", WAYS)
def test_what_generates_in_several_requests_answers_from_one_version(way: str) -> None:
    assert computed(Serving(1), way, ours=False) == [0, 1, 7]  # the control
    assert computed(Serving(1), way) == [1, 1, 7]
    assert computed(Serving(0), way) == [0, 0, 7]


class Speech(Serving):
    """Speaks as vLLM's: the pieces of a stream are computed while it is sent."""

    async def _preprocess_speech_to_text(self, audio: Any) -> tuple[list[Any], float]:
        return [None] * self.inputs, 1.0

    async def _create_speech_to_text(self, audio: Any, *, stream: bool) -> Any:
        pieces, _ = await self._preprocess_speech_to_text(audio)
        said = self._pieces(len(pieces))
        return said if stream else [piece async for piece in said]

    async def _pieces(self, count: int) -> AsyncIterator[int]:
        for piece in range(count):
            yield epoch(self.core)
            if self.changes and not piece:
                self.changes -= 1
                self.caches.forget()


def transcript(serving: Speech, *, stream: bool, ours: bool = True) -> list[int]:
    class Wrapped(Speech):
        pass

    pooling.transcripts_of_one_version(Wrapped, lambda _: ours)
    serving.__class__ = Wrapped

    async def transcribe() -> list[int]:
        answer = await serving._create_speech_to_text("audio", stream=stream)
        return [piece async for piece in answer] if stream else answer

    return asyncio.run(transcribe())


@pytest.mark.parametrize("stream", [False, True])
def test_a_recording_in_pieces_is_transcribed_by_one_version(stream: bool) -> None:
    from fastapi import HTTPException

    assert transcript(Speech(1, 3), stream=stream, ours=False) == [0, 1, 1]  # the control
    assert transcript(Speech(1, 3), stream=stream) == [1, 1, 1]
    assert transcript(Speech(0, 3), stream=stream) == [0, 0, 0]
    assert transcript(Speech(pooling.ATTEMPTS_MAX, 1), stream=stream) == [0]  # a request of its own, asked once
    with pytest.raises(HTTPException, match="ask again"):
        transcript(Speech(pooling.ATTEMPTS_MAX, 2), stream=stream)


@pytest.mark.parametrize("way", ["pooling", *WAYS])
def test_weights_that_never_rest_are_said(way: str) -> None:
    from fastapi import HTTPException

    with pytest.raises(HTTPException, match="ask again") as refused:
        serving = Serving(pooling.ATTEMPTS_MAX)
        collect(serving) if way == "pooling" else computed(serving, way)
    assert refused.value.status_code == 503


class Offline:
    """Speaks as vLLM's `LLM`: what it computes is of the epochs of its first and its last request."""

    def __init__(self, changes: int, *, pooling_task: str = "embed", config: str = "ours") -> None:
        self.core = SimpleNamespace(
            scheduler=SimpleNamespace(), reset_prefix_cache=lambda *_: True, reset_encoder_cache=lambda: None
        )
        self.caches, self.changes, self.pooling_task = Caches(self.core), changes, pooling_task
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(engine_core=self.core))

    def in_a_process(self) -> Offline:
        self.llm_engine.engine_core = SimpleNamespace(call_utility=lambda method: getattr(self.core, method)())
        return self

    def _compute(self) -> list[int]:
        before = epoch(self.core)
        if self.changes:
            self.changes -= 1
            self.caches.forget()
        return [before, epoch(self.core)]

    def beam_search(self, prompts: Any, params: Any) -> list[int]:
        return self._compute()

    def score(self, query: str, documents: list[str]) -> list[int]:
        return self._compute()

    def encode(self, prompts: Any, *, pooling_task: str | None = None) -> list[int]:
        return self._compute()


class Wrapped(Offline):
    pass


pooling.offline_beams_of_one_version(Wrapped, lambda config: config == "ours")
pooling.offline_pooling_of_one_version(Wrapped, lambda config: config == "ours")
OFFLINE = {
    "beam search": lambda llm: llm.beam_search(["a"], "params"),
    "score": lambda llm: llm.score("a", ["b", "c"]),
    "plugin": lambda llm: llm.encode({"data": 1}, pooling_task="plugin"),
}


@pytest.mark.parametrize("way", OFFLINE)
def test_what_an_offline_engine_makes_of_several_requests_is_of_one_version(way: str) -> None:
    ask = OFFLINE[way]
    assert ask(Offline(1)) == [0, 1]  # the control
    assert ask(Wrapped(1, config="another")) == [0, 1]
    assert ask(Wrapped(0)) == [0, 0]
    assert ask(Wrapped(2)) == [2, 2]
    assert ask(Wrapped(1).in_a_process()) == [1, 1]
    with pytest.raises(WeightsMove, match="ask again"):
        ask(Wrapped(pooling.ATTEMPTS_MAX))


def test_answers_that_are_requests_of_their_own_are_not_computed_again() -> None:
    """However many of them there are in one call."""
    llm = Wrapped(1, pooling_task="classify")
    assert llm.score("a", ["b"]) == [0, 1]  # a cross-encoder's
    assert Wrapped(1).encode(["a", "b"], pooling_task="embed") == [0, 1]


def test_late_interaction_leaves_nothing_in_workers() -> None:
    class Scores:
        def __init__(self, engine: Any, *, enable_flash_late_interaction: bool = True) -> None:
            self.in_workers = enable_flash_late_interaction

    pooling.scored_here(Scores, lambda config: config == "ours")
    assert not Scores(SimpleNamespace(vllm_config="ours")).in_workers
    assert not Scores(SimpleNamespace(vllm_config="ours"), enable_flash_late_interaction=True).in_workers
    assert Scores(SimpleNamespace(vllm_config="another")).in_workers


def test_vllm_has_what_is_wrapped() -> None:
    from vllm import LLM
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    from tensorhub_plugins.vllm.plugin import GATHERED, register

    def of(name: str) -> Any:
        module, (_, *classes) = importlib.import_module(name), GATHERED[name]
        return next(getattr(module, each) for each in classes if hasattr(module, each))

    register()
    register()
    pools, speaks_in = of("vllm.entrypoints.pooling.base.serving"), of("vllm.entrypoints.speech_to_text.base.serving")
    generates = (BeamSearchOnlineMixin.beam_search, ServingGenerativeScoring.create_generative_scoring)
    speaks = (speaks_in._preprocess_speech_to_text, speaks_in._create_speech_to_text)
    offline = (LLM.beam_search, LLM.score, LLM.encode)
    for function in (pools._collect_batch, ServingScores.__init__, *generates, *speaks, *offline):
        assert not hasattr(function.__wrapped__, "__wrapped__")  # once
    assert ServingScores._collect_batch is pools._collect_batch
    assert callable(pools._prepare_generators)


# --- engines ---


@pytest.mark.heavy
@pytest.mark.parametrize("task", ["token_embed", "prompt"])
def test_what_steps_gather_is_of_one_version(task: str, models: Any, hub: Server) -> None:
    """Three prompts, of which one has begun, one has ended and one waits when the new weights come."""
    options: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "enable_chunked_prefill": True}
    if task != "prompt":
        options |= POOLING
        for seed in (1, 2):
            make_tokenizer().save_pretrained(models("llama", seed))
    joining = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout"}
    with Client(hub.address, run="test", model="actor", replica="trainer") as trainer:
        whole = []
        for seed in (1, 2):
            with Engine(models("llama", seed), **options) as fresh:
                whole.append(fresh.ask("gather", PROMPTS, task, -1, []))
        old, new = whole
        rows = [length - (task == "prompt") for length in LENGTHS]
        assert [len(each) for each in old] == [len(each) for each in new] == rows
        assert all(before != after for before, after in zip(old, new, strict=True))
        with Engine(models("llama", 1), extension="vllm_faults.FaultyExtension", **options) as engine:
            engine.call("tensorhub_connect", joining)
            trainer.publish(1, checkpoint(models("llama", 2)))
            trainer.publish(2, checkpoint(models("llama", 1)))
            trainer.publish(3, checkpoint(models("llama", 2)))

            def gather(version: int, steps: int) -> list[Any]:
                engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
                wait_until(lambda: engine.call("tensorhub_poll")["state"] == "ready", "fetched", TIMEOUT_S)
                found = list(engine.ask("gather", PROMPTS, task, steps, [("tensorhub_install", (version, TIMEOUT_S))]))
                assert engine.call("tensorhub_poll")["version"] == version
                return found

            assert gather(1, 3) == new
            if task == "token_embed":
                engine.call("tensorhub_test_keep_progress")
                assert [len(each) for each in gather(3, 3)] != rows  # the control: more rows than tokens


@pytest.mark.heavy
def test_an_offline_beam_search_is_of_one_version(models: Any, hub: Server) -> None:
    """The new weights come between two of its steps."""
    joining = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout"}
    options = {"skip_tokenizer_init": False}
    prompt, tokens, steps = [5, 6, 7], 8, 4
    for seed in (1, 2):
        make_tokenizer().save_pretrained(models("llama", seed))
    with Client(hub.address, run="test", model="actor", replica="trainer") as trainer:
        whole = []
        for seed in (1, 2):
            with Engine(models("llama", seed), **options) as fresh:
                whole.append(fresh.ask("beams", prompt, tokens, -1, [], True))
        old, new = whole
        assert old[0][: len(prompt) + steps] != new[0][: len(prompt) + steps]
        trainer.publish(1, checkpoint(models("llama", 2)))
        trainer.publish(2, checkpoint(models("llama", 1)))
        trainer.publish(3, checkpoint(models("llama", 2)))
        with Engine(models("llama", 1), **options) as engine:
            engine.call("tensorhub_connect", joining)

            def search(version: int, *, wrapped: bool = True) -> Any:
                engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
                wait_until(lambda: engine.call("tensorhub_poll")["state"] == "ready", "fetched", TIMEOUT_S)
                calls = [("tensorhub_install", (version, TIMEOUT_S))]
                return engine.ask("beams", prompt, tokens, steps, calls, wrapped)

            assert search(1) == new
            assert search(2) == old
            assert search(3, wrapped=False) not in (old, new)  # the control


VERSIONS = 8
SCORED = {"text_1": "1+2=" * 20, "text_2": ["3*4=12" * length for length in (5, 20, 30)]}
SERVED = ["--runner", "pooling", "--convert", "embed", "--pooler-config", '{"task": "token_embed"}']


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_server_says_while_versions_come_is_of_one_of_them(hub: Server, tmp_path: Path) -> None:
    """Token-wise embeddings of a long prompt, and scores by late interaction, without a pause between requests."""
    folders = make_two_models(tmp_path / "models")
    extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "server", "follow": "now"}
    prompt = [random.Random(0).randrange(5, 20) for _ in range(900)]
    options = [*SERVED, "--max-model-len", "1024", "--max-num-batched-tokens", "64", "--enable-chunked-prefill"]
    with (
        Client(hub.address, run="r", model="actor", replica="trainer") as trainer,
        ThreadPoolExecutor(4) as clients,
    ):
        trainer.publish(1, checkpoint(folders[0]))
        with serving(folders[0], tmp_path, extra, *options) as server:

            def embed() -> list[Any]:
                reply = server.post("pooling", {"model": "actor", "input": prompt})
                reply.raise_for_status()
                rows = reply.json()["data"][0]["data"]
                assert len(rows) == len(prompt)
                return [number for row in rows[:: len(rows) - 1] for number in row]  # of its first chunk, and its last

            def score() -> list[Any]:
                reply = server.post("score", {"model": "actor", **SCORED})
                reply.raise_for_status()
                return [each["score"] for each in reply.json()["data"]]

            def follow(version: int) -> list[list[Any]]:
                wait_until(lambda: has(version), f"version {version}", TIMEOUT_S)
                return [embed(), score()]

            def has(version: int) -> bool:
                said = requests.get(f"{server.url}/tensorhub", timeout=30).json()["following"]
                return bool(said["version"] == version)

            right = [follow(1)]
            trainer.publish(2, checkpoint(folders[1]))
            right.append(follow(2))
            assert all(not alike(old, new) for old, new in zip(*right, strict=True))
            going = True

            def keep(ask: Any, which: int) -> int:
                count = 0
                while going:
                    said = ask()
                    assert any(alike(said, each[which]) for each in right), said
                    count += 1
                return count

            asked = [
                clients.submit(keep, ask, which) for which, ask in ((0, embed), (1, score), (0, embed), (1, score))
            ]
            try:
                for version in range(3, VERSIONS + 1):
                    trainer.publish(version, checkpoint(folders[(version - 1) % 2]))
                    wait_until(lambda version=version: has(version), f"version {version}", TIMEOUT_S)
                    trainer.unpublish(version - 1)
            finally:
                going = False
            assert min(future.result(TIMEOUT_S) for future in asked) > 0
            assert server.healthy()


def alike(one: list[float], other: list[float]) -> bool:
    """The same but for what batches of another size round otherwise."""
    return all(abs(mine - theirs) <= 0.02 * max(1, abs(theirs)) for mine, theirs in zip(one, other, strict=True))
