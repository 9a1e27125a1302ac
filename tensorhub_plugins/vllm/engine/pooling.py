"""Answers that `vllm serve`, or vLLM's `LLM`, makes of several requests: the score of a query and a document, whose
embeddings are requests of their own, or the embedding of a text in chunks; a beam search, each of whose steps is asked
for by itself; generative scores; the transcript of a recording that is cut into pieces. Each is of one version, or
asked for again.

A request by itself is of one version by what workers forget of it at an install (worker/progress.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from tensorhub_plugins.vllm.plugin import wrap

if TYPE_CHECKING:
    from tensorhub_plugins.vllm.engine.caches import WeightsMove

ATTEMPTS_MAX = 5  # an install takes a moment, and versions are seconds apart
PAIRED = ("embed", "token_embed")  # what a model computes where LLM.score compares two of its answers
PLUGIN = "plugin"  # the pooling task whose answer a user's own code makes of several

T = TypeVar("T")

answer_name: ContextVar[str] = ContextVar("of the request, under which the engine keeps its versions", default="")


def of_one_version(serving: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's PoolingBaseServing."""

    async def collect_batch(original: Any, self: Any, ctx: Any) -> None:
        async def collect(attempt: int) -> None:
            if attempt:
                await self._prepare_generators(ctx)
            await original(self, ctx)

        is_one = len(ctx.engine_inputs or ()) < 2
        await _while_weights_rest(self.engine_client, collect, lambda config: is_ours(config) and not is_one)

    wrap(serving, "_collect_batch", collect_batch)


def beams_of_one_version(mixin: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's BeamSearchOnlineMixin, which says nothing before the last step."""

    async def beam_search(original: Any, self: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        async def search(_: int) -> list[Any]:
            return [answer async for answer in original(self, *args, **options)]

        for answer in await _while_weights_rest(self.engine_client, search, is_ours):
            yield answer

    wrap(mixin, "beam_search", beam_search)


def generative_scores_of_one_version(serving: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's ServingGenerativeScoring."""

    async def create_generative_scoring(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        return await _while_weights_rest(self.engine_client, lambda _: original(self, *args, **options), is_ours)

    wrap(serving, "create_generative_scoring", create_generative_scoring)


_pieces: ContextVar[int] = ContextVar("into which the recording of this request was cut", default=0)


def transcripts_of_one_version(serving: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's SpeechToTextBaseServing. The stream of several pieces comes when all of it is there: what was sent
    cannot be asked for again."""

    async def preprocess(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        prepared = await original(self, *args, **options)
        _pieces.set(len(prepared[0]))
        return prepared

    async def create(original: Any, self: Any, *args: Any, **options: Any) -> Any:
        async def compute(_: int) -> Any:
            answer = await original(self, *args, **options)
            if is_ours(self.engine_client.vllm_config) and hasattr(answer, "__aiter__") and _pieces.get() > 1:
                return _replayed([part async for part in answer])
            return answer

        return await _while_weights_rest(self.engine_client, compute, is_ours, lambda: _pieces.get() > 1)

    wrap(serving, "_preprocess_speech_to_text", preprocess)
    wrap(serving, "_create_speech_to_text", create)


async def _replayed(parts: list[T]) -> AsyncIterator[T]:
    for part in parts:
        yield part


def offline_beams_of_one_version(mixin: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's BeamSearchOfflineMixin, a base of `LLM`."""
    _compute_at_rest(mixin, "beam_search", is_ours, lambda *_, **__: True)


def offline_pooling_of_one_version(mixin: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's PoolingOfflineMixin, a base of `LLM`, where one answer is made of several requests."""
    _compute_at_rest(mixin, "score", is_ours, lambda llm, *_, **__: llm.pooling_task in PAIRED)
    _compute_at_rest(mixin, "encode", is_ours, lambda *_, pooling_task=None, **__: pooling_task == PLUGIN)


def _compute_at_rest(mixin: Any, name: str, is_ours: Callable[[Any], bool], is_of_several: Callable[..., bool]) -> None:
    def compute(original: Any, llm: Any, *args: Any, **options: Any) -> Any:
        engine = llm.llm_engine
        if not (is_ours(engine.vllm_config) and is_of_several(llm, *args, **options)):
            return original(llm, *args, **options)
        for _ in range(ATTEMPTS_MAX):
            before = _epoch_here(engine)
            computed = original(llm, *args, **options)
            if _epoch_here(engine) == before:
                return computed
        raise _weights_move()

    wrap(mixin, name, compute)


def _epoch_here(engine: Any) -> int:
    """Return the epoch of the core of vLLM's LLMEngine, which is a process of its own or lives in this one."""
    client = engine.engine_core
    if hasattr(client, "call_utility"):
        return int(client.call_utility("tensorhub_epoch"))
    return int(client.engine_core.tensorhub_epoch())


async def _while_weights_rest(
    engine: Any,
    compute: Callable[[int], Awaitable[T]],
    is_ours: Callable[[Any], bool],
    is_of_several: Callable[[], bool] = lambda: True,
) -> T:
    """Compute again what an engine of ours computed while the weights changed, if it is of several requests; HTTP 503
    after ATTEMPTS_MAX changes."""
    if not is_ours(engine.vllm_config):
        return await compute(0)
    for attempt in range(ATTEMPTS_MAX):
        if attempt and answer_name.get():
            await _forget_versions(engine, answer_name.get())
        before = await _epochs(engine)
        computed = await compute(attempt)
        if not is_of_several() or await _epochs(engine) == before:
            return computed
    from fastapi import HTTPException

    raise HTTPException(503, _weights_move().message)


def _weights_move() -> WeightsMove:
    from tensorhub_plugins.vllm.engine.caches import WeightsMove  # only here is anything of the store imported

    return WeightsMove(f"the weights changed {ATTEMPTS_MAX} times while this was computed: ask again")


async def _epochs(engine: Any) -> list[int]:
    from tensorhub_plugins.vllm.engine.core_follower import of_all_cores

    return await of_all_cores(engine.engine_core, "tensorhub_epoch")


async def _forget_versions(engine: Any, name: str) -> None:
    """Have what is computed again under this name be no second request of that name, whose versions are not known."""
    from tensorhub_plugins.vllm.engine.core_follower import starts_in

    with suppress(Exception):  # of an engine that keeps none
        await starts_in(engine.engine_core, name, forget=True)


def scored_here(scores: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's ServingScores: late interaction in the API server. Workers would keep embeddings of queries from one
    request for another, and end the engine when a document comes whose query has been forgotten."""

    def init(original: Any, self: Any, engine_client: Any, *args: Any, **options: Any) -> None:
        if is_ours(engine_client.vllm_config):
            options["enable_flash_late_interaction"] = False
        original(self, engine_client, *args, **options)

    wrap(scores, "__init__", init)
