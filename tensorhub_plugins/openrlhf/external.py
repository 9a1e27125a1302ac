"""A `vllm serve` that OpenRLHF has not started, as one of its engines (../vllm/ray/external.py says how it joins).

`ExternalEngine` has the methods of TensorHubEngine that our generator calls. The agent or the reward function of the
run works here, and the server only turns tokens into tokens. Nothing here stops it from going to its next version, but
for an evaluation: without partial rollout, where the samples of a prompt are of one version, they are made again when
they are not.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from openrlhf.trainer.ray import vllm_engine
from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import Logprob
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tensorhub_plugins.core import Deadline, TensorHubError, UsageError, VersionRefused
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.openrlhf.samples import Samples, whole
from tensorhub_plugins.openrlhf.versions import FIRST, LAST
from tensorhub_plugins.vllm.ray import external
from tensorhub_plugins.vllm.ray.external import Answer, Expected, ServerLost

logger = get_logger(__name__)

POLL_INTERVAL_S = 0.05
AGAIN_MAX = 3  # times that the samples of a prompt are made again
OURS = ("output_kind", "skip_clone")  # what vLLM notes in sampling parameters for itself, besides private names


def as_json(params: Any) -> dict[str, Any]:
    """Return vLLM's sampling parameters as its HTTP routes take them: what differs from the defaults."""
    given = msgspec.to_builtins(params)
    found = {name: value for name, value in given.items() if not name.startswith("_") and name not in OURS}
    return {**found, "max_tokens": params.max_tokens, "logprobs": params.logprobs}


def ending_of(answer: Answer, prompt: Sequence[int], params: Any, tokenizer: Any) -> tuple[str, int | str | None]:
    """Return the text of an answer to this prompt, by vLLM's detokenizer: without the token that ended it, or up to a
    stop string; and which of these it was, if it is one of the parameters'."""
    asked: Any = SimpleNamespace(
        request_id="", prompt_token_ids=list(prompt), prompt_embeds=None, sampling_params=params
    )

    def text_of(*, is_ended_by_token: bool) -> tuple[str, str | None]:
        made = IncrementalDetokenizer.from_new_request(tokenizer if params.detokenize else None, asked)
        for token in answer.token_ids[:-1]:
            made.update([token], False)
        stop = made.update(answer.token_ids[-1:], is_ended_by_token)
        return made.get_next_output_text(True, False), stop

    named = [token for token in answer.token_ids[-1:] if token in (params.stop_token_ids or ())]
    text, stop = text_of(is_ended_by_token=False)
    if answer.finish_reason == "stop" and (named or stop is None):
        text, stop = text_of(is_ended_by_token=True)
        return text, stop or next(iter(named), None)
    return text, stop


class ExternalEngine(external.External):
    """Stand for an external server as an OpenRLHF engine. partial: requests may span versions."""

    def __init__(
        self,
        name: str,
        url: str,
        options: Options,
        expected: Expected,
        *,
        partial: bool,
        agent_func_path: str | None = None,
        remote_rm_url: Any = None,
    ) -> None:
        super().__init__(name, url, options, expected, timeout_s=options.engine_timeout_s)
        self._need_s, self._is_partial, self.samples = options.timeout_s, partial, Samples()
        load = vllm_engine._load_agent_executor
        make = vllm_engine.SingleTurnAgentExecutor
        self.executor = load(agent_func_path) if agent_func_path else make(remote_rm_url)

    # --- what OpenRLHF asks for ---------------------------------------------------------------------------------------

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
        min_version: int = 0,
        journals: Any = None,
    ) -> list[dict[str, Any]]:
        """Answer as OpenRLHF's engine, from this version or a later one; without partial rollout from one version only.

        journals: what an engine that had to leave has got of these samples; they are made anew here."""
        if images:
            raise UsageError(f"{self.url} cannot be given images: add engines instead of a server")
        await self._need(min_version)
        self._tokenizer = hf_tokenizer  # of all prompts
        given = {"prompt": prompt, "label": label, "sampling_params": sampling_params, "max_length": max_length}
        for _ in range(1 + AGAIN_MAX):
            responses = await self._samples(num_samples, **given, hf_tokenizer=hf_tokenizer, images=None)
            if self._is_partial or is_of_one_version(responses):
                return responses
        raise ServerLost(f"{self.url} changes its version while it answers one prompt, {1 + AGAIN_MAX} times in a row")

    async def _samples(self, count: int, **given: Any) -> list[dict[str, Any]]:
        """Return the samples. Raise ServerLost where the server has lost one, whatever the agent makes of that."""
        errors: list[TensorHubError] = []
        make = functools.partial(self.executor.execute, llm_engine=self, **given)
        samples = [self.samples.begin(make, errors) for _ in range(count)]
        if (responses := await whole(samples, errors)) is None:
            raise errors[0]
        return responses

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Answer an agent with what it reads of vLLM's RequestOutput."""
        if multi_modal_data:
            raise self.samples.note(ServerLost(f"{self.url} cannot be given images", peer=self.url))
        return await self.samples.in_own_loop(self._answer(prompt_token_ids, sampling_params))

    async def _answer(self, prompt_token_ids: Any, sampling_params: Any) -> Any:
        try:
            answer = await self.ask(prompt_token_ids, as_json(sampling_params))
        except ServerLost as error:
            self.samples.note(error)
            raise
        self.samples.came_from(*(version for version, _ in answer.spans))
        if answer.finish_reason == "abort":  # OpenRLHF would take half an answer for a whole one
            raise self.samples.note(ServerLost(f"{self.url} was told to give its requests back", peer=self.url))
        text, reason = ending_of(answer, prompt_token_ids, sampling_params, self._tokenizer)
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=answer.token_ids,
            cumulative_logprob=None if answer.log_probs is None else sum(answer.log_probs),
            logprobs=None if answer.log_probs is None else _as_vllm(answer),
            finish_reason=answer.finish_reason,
            stop_reason=reason,
        )
        return RequestOutput(uuid.uuid4().hex, None, list(prompt_token_ids), None, [output], finished=True)

    def get_num_unfinished_requests(self) -> int:
        return len(self.running())

    # --- what our generator asks for ----------------------------------------------------------------------------------

    async def _need(self, version: int) -> None:
        deadline = Deadline.after(self._need_s)
        self.check()
        while self.status.version < version:
            refused, why = self.status.refusal
            if refused >= version:
                raise VersionRefused(why, version=refused)
            if deadline.expired:
                raise ServerLost(
                    f"{self.url} has version {self.status.version} and was asked to answer from a later one",
                    version=version,
                    timeout_s=self._need_s,
                )
            await asyncio.sleep(POLL_INTERVAL_S)
            self.check()


def is_of_one_version(responses: list[dict[str, Any]]) -> bool:
    """Return whether all tokens of these samples came from one version."""
    logs: list[Mapping[str, Any]] = [response.get("extra_logs") or {} for response in responses]
    return len({log[name] for log in logs for name in (FIRST, LAST) if name in log}) <= 1


def _as_vllm(answer: Answer) -> list[dict[int, Any]]:
    assert answer.log_probs is not None
    pairs = zip(answer.token_ids, answer.log_probs, strict=True)
    return [{token: Logprob(logprob)} for token, logprob in pairs]
