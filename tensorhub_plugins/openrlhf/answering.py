"""How OpenRLHF's vLLM actor answers: every sample with the version of each of its tokens.

Without partial rollout an answer is of one version. In partial rollout an engine that has to leave gives back all
tokens there are, and another one goes on from there (partial_answers.py).
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.trainer.ray import vllm_engine
from vllm.v1.engine.exceptions import EngineDeadError

from tensorhub_plugins.core import TensorHubError, run_log
from tensorhub_plugins.openrlhf import partial_answers
from tensorhub_plugins.openrlhf.partial_answers import Call, GivenBack, Journal, Leaving
from tensorhub_plugins.openrlhf.samples import Samples, asking, whole
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.ray.health import EngineLost
from tensorhub_plugins.vllm.ray.owned import OwnedEngine

LEAVING_TIMEOUT_S = 5.0  # for samples that are in their environment and not in vLLM when the engine has to leave

# The class that OpenRLHF decorated. Ray sends it by its name here, so that each process has one copy of it.
Stock: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__


class Answering(Stock):
    """What OpenRLHF asks an engine for."""

    executor: Any
    owned: OwnedEngine
    samples: Samples
    worker: str
    is_leaving: bool
    is_partial: bool  # requests outlive an update
    llm: Any
    tokenizer: Any

    def _why_not(self) -> str:
        """Return why it takes no new work; "": it does."""
        return self.owned.status.why_not

    async def generate_responses(
        self, *, num_samples: int = 1, min_version: int = 0, journals: list[Journal] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]] | GivenBack:
        """Answer as OpenRLHF's engine, from this version or a later one; without partial rollout from one version only.

        journals: what another engine has given back of these samples."""
        if self.is_leaving:
            return GivenBack(journals)
        if why := self._why_not():
            raise EngineLost(why)
        async with self.owned.answering(min_version):
            return await self._samples(journals, num_samples, **kwargs)

    async def tensorhub_give_back(self) -> None:
        self.is_leaving = True
        await self.llm.abort(list(self.llm.output_processor.request_states), internal=True)
        why = Leaving(f"{self.worker} has to leave")
        asyncio.get_running_loop().call_later(LEAVING_TIMEOUT_S, self.samples.break_off, why)

    async def _samples(
        self, given: list[Journal] | None, count: int, **kwargs: Any
    ) -> list[dict[str, Any]] | GivenBack:
        """Return the samples, or what there is of them for the engine that may go on. given: as `journals`."""
        self.tokenizer = kwargs["hf_tokenizer"]  # of all prompts
        kept = (given or [Journal() for _ in range(count)]) if self.is_partial else None
        errors: list[TensorHubError] = []
        make = functools.partial(self.executor.execute, llm_engine=self, **kwargs)
        each: Sequence[Journal | None] = kept or [None] * count
        tasks = [self.samples.begin(make, errors, journal) for journal in each]
        if (samples := await whole(tasks, errors)) is not None:
            return samples
        for error in errors:
            if not isinstance(error, Leaving):
                raise error
        _, late = await asyncio.wait(tasks, timeout=LEAVING_TIMEOUT_S)
        for task in late:
            task.cancel()
        return GivenBack(kept)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        asked = self._answer(prompt_token_ids, sampling_params, multi_modal_data)
        return await self.samples.in_own_loop(asked)

    async def _answer(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any) -> Any:
        sample = asking()
        own = None if sample is None else sample.journal
        beside = "" if own is None else partial_answers.beside(sampling_params, multi_modal_data)
        before = None if own is None else own.find(prompt_token_ids, beside)
        if before is not None and before.is_whole:
            self.samples.came_from(*before.versions)
            return before.answer
        rest = None if before is None else partial_answers.rest_of(sampling_params, before, self.tokenizer)
        if before is None or rest is None:
            call = replace(await self._ask(prompt_token_ids, sampling_params, multi_modal_data), beside=beside)
        else:
            self.samples.came_from(*before.versions)
            more = await self._ask([*prompt_token_ids, *before.output.token_ids], rest, multi_modal_data)
            output, versions = partial_answers.joined(before, more.output), (*before.versions, *more.versions)
            call = replace(before, output=output, versions=versions, is_whole=more.is_whole)
        if own is not None:
            own.note(call, before)
        if not call.is_whole:
            raise self.samples.note(Leaving(f"{self.worker} has to leave"))
        return call.answer

    async def _ask(self, prompt: Any, params: Any, multi_modal_data: Any) -> Call:
        """Return one answer of vLLM. One that was broken off has the tokens up to then."""
        started = time.monotonic()
        if self.is_leaving:
            raise self.samples.note(Leaving(f"{self.worker} has to leave"))
        try:
            answer = await Stock.generate(self, prompt, params, multi_modal_data)
            (output,) = answer.outputs
            spans = await self.owned.spans(answer.request_id, len(output.token_ids))
        except EngineDeadError as error:
            run_log.record_request(self.worker, started, "error")
            self.owned.lifeline.die(error)
            raise self.samples.note(EngineLost(f"{self.worker}: {error}")) from error
        if not spans and output.token_ids:
            raise self.samples.note(EngineLost(f"{self.worker} cannot tell the version of an answer"))
        versions = tuple(version for version, _ in spans) or (self.owned.status.version,)
        is_whole = not (self.is_leaving and output.finish_reason == "abort")
        self.samples.came_from(*versions)
        outcome = str(output.finish_reason) if is_whole else "given back"
        run_log.record_request(self.worker, started, outcome, versions, len(output.token_ids))
        told = {name: value for name, value in vars(answer).items() if name != "outputs"}
        return Call(tuple(prompt), output, versions if is_whole or output.token_ids else (), is_whole, told=told)


def named(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `generate` under names by which its core knows which version each token came from (spans.py)."""

    def under_our_name(prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> Any:
        return generate(prompt, sampling_params, request_id=f"{PREFIX}{uuid.uuid4().hex}", **more)

    return under_our_name
