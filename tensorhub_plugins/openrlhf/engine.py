"""OpenRLHF's vLLM actor that follows the store by itself.

One that was started again fetches the version to run, and only then answers; one that joins a run starts from a peer's
weights. Prompts it was working on are asked elsewhere meanwhile (routing.py). One that has to leave gives them back, in
partial rollout with all tokens there are (partial_answers.py).
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from openrlhf.trainer.ray import vllm_engine
from vllm.v1.engine.exceptions import EngineDeadError

from tensorhub_plugins.core import run_log
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config, partial_answers
from tensorhub_plugins.openrlhf.partial_answers import Call, GivenBack, Journal, Journals, Leaving
from tensorhub_plugins.openrlhf.versions import Versioned, came_from
from tensorhub_plugins.vllm.config import FollowConfig
from tensorhub_plugins.vllm.engine import compiled
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.lora import engine_arguments, for_adapter
from tensorhub_plugins.vllm.ray import secret
from tensorhub_plugins.vllm.ray.config import worker_config
from tensorhub_plugins.vllm.ray.health import EngineLost, own_engines
from tensorhub_plugins.vllm.ray.members import Heartbeat
from tensorhub_plugins.vllm.ray.owned import OwnedEngine

logger = get_logger(__name__)

LEAVING_TIMEOUT_S = 5.0  # for samples that are in their environment and not in vLLM when the engine has to leave

EXTENSION = "tensorhub_plugins.vllm.ray.health.OwnedWorkerExtension"

# The class that OpenRLHF decorated. Ray sends it by its name here, so that each process has one copy of it.
_Stock: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__


class TensorHubEngine(_Stock):
    """`tensorhub`: {"backend": the flag's value, "engine": number, "partial": requests outlive an update, "sync": the
    trainer waits for the samples of its newest version, "lora": the rank of the adapter that it follows over weights
    from disk; 0: it follows weights,
    "joins": it starts from a peer's weights if one has any, "spare": or from none, and follows when it is told to}."""

    executor: Any
    is_spare = _was_spare = False

    async def __init__(self, *args: Any, tensorhub: dict[str, Any], **kwargs: Any) -> None:  # type: ignore[misc]
        self.options, name = config.parse(tensorhub["backend"]), f"rollout-{tensorhub['engine']}"
        kwargs["worker_extension_cls"] = EXTENSION
        rank = tensorhub["lora"]
        self.is_spare = self._was_spare = tensorhub.get("spare", False)
        worker = worker_config(self.options, replica=name, adapter=rank > 0)
        if rank:
            kwargs |= engine_arguments(rank)
        elif self.is_spare:
            kwargs["load_format"] = "dummy"
        elif tensorhub["joins"]:
            kwargs["load_format"] = config.NAME
            kwargs["model_loader_extra_config"] = {**worker, "disk": "fallback"}
        own_engines()
        known = await asyncio.to_thread(secret.learn)  # vLLM's processes inherit it
        with compiled.announced(worker):
            await _Stock.__init__(self, *args, **kwargs)
        if rank:  # before its first version the weights alone are what is trained
            self.llm.generate = for_adapter(self.llm.generate, self.options.model, lambda: self.owned.has_version)
        self.llm.generate = named(self.llm.generate)
        self.worker = f"{name}/0"
        self.executor = Versioned(self.executor)
        self.owned = OwnedEngine(self.llm, self.worker)
        self.is_leaving, self.is_partial = False, tensorhub["partial"]
        how = FollowConfig(
            worker=self.worker,
            timeout_s=self.options.timeout_s,
            grows=self.options.timeout_grows,
            until=self.options.pull_until,
            pins=not tensorhub["sync"],
            whole_prompts=not self.is_partial,
            catches_up=True,
            staleness_s=self.options.staleness_s,
        )
        self.owned.keep()
        self._follow = functools.partial(self.owned.follow, worker, known, how)
        if self.is_spare:
            await self.owned.warm_up()
            return
        await self._follow()
        self.owned.keep(self.owned.watch())
        await self.owned.caught_up()

    async def _join(self) -> None:
        await self._follow()
        await self.owned.watch()

    # --- what OpenRLHF asks for ---------------------------------------------------------------------------------------

    async def generate_responses(
        self, *, num_samples: int = 1, min_version: int = 0, journals: list[Journal] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]] | GivenBack:
        """Answer as OpenRLHF's engine, from this version or a later one; without partial rollout from one version only.

        journals: what another engine has given back of these samples."""
        if self.is_leaving:
            return GivenBack(journals)
        if self._why_not():
            raise EngineLost(self._why_not())
        kept = Journals(journals, num_samples) if self.is_partial else None
        async with self.owned.answering(min_version):
            return await self._samples(kept, num_samples, **kwargs)

    async def _samples(self, kept: Journals | None, count: int, **kwargs: Any) -> list[dict[str, Any]] | GivenBack:
        """Return the samples, or what there is of them. kept: where that is noted for the engine that may go on."""
        partial_answers.of_prompt.set(kept)
        tasks = [asyncio.ensure_future(self.executor.execute(llm_engine=self, **kwargs)) for _ in range(count)]
        try:
            return list(await asyncio.gather(*tasks))
        except Leaving:
            _, late = await asyncio.wait(tasks, timeout=LEAVING_TIMEOUT_S)
            for task in late:
                task.cancel()
            return GivenBack(None if kept is None else kept.all)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        own = partial_answers.of_sample()
        before = None if own is None else own.find(prompt_token_ids)
        rest = None if before is None or before.is_whole else partial_answers.rest_of(sampling_params, before)
        if before is not None and rest is None:
            assert own is not None
            came_from(*before.versions)
            if not before.is_whole:
                own.note(replace(before, is_whole=True))
            return SimpleNamespace(outputs=[before.output])
        if before is None:
            call, is_whole = await self._ask(prompt_token_ids, sampling_params, multi_modal_data)
        else:
            came_from(*before.versions)
            asked = [*prompt_token_ids, *before.output.token_ids]
            call, is_whole = await self._ask(asked, rest, multi_modal_data)
            versions = (*before.versions, *call.versions)
            call = Call(before.prompt, partial_answers.joined(before, call.output), versions, is_whole)
        if own is not None:
            own.note(call)
        if not is_whole:
            raise Leaving(f"{self.worker} has to leave")
        return SimpleNamespace(outputs=[call.output])

    async def _ask(self, prompt: Any, params: Any, multi_modal_data: Any) -> tuple[Call, bool]:
        """Return one answer of vLLM, and whether it is whole: one that was broken off has the tokens up to then."""
        started = time.monotonic()
        if self.is_leaving:
            raise Leaving(f"{self.worker} has to leave")
        try:
            answer = await _Stock.generate(self, prompt, params, multi_modal_data)
            (output,) = answer.outputs
            spans = await self.owned.spans(answer.request_id, len(output.token_ids))
        except EngineDeadError as error:
            run_log.record_request(self.worker, started, "error")
            self.owned.lifeline.die(error)
            raise EngineLost(f"{self.worker}: {error}") from error
        if not spans and output.token_ids:
            raise EngineLost(f"{self.worker} cannot tell the version of an answer")
        versions = tuple(version for version, _ in spans) or (self.owned.status.version,)
        is_whole = not (self.is_leaving and output.finish_reason == "abort")
        came_from(*versions)
        outcome = str(output.finish_reason) if is_whole else "given back"
        run_log.record_request(self.worker, started, outcome, versions, len(output.token_ids))
        return Call(tuple(prompt), output, versions, is_whole), is_whole

    # --- what our generator asks for ----------------------------------------------------------------------------------

    async def tensorhub_heartbeat(self) -> Heartbeat:
        """Answer our generator, which asks all the time; EngineLost when this actor is about to end."""
        if self.owned.lifeline.is_dying:
            raise EngineLost(f"{self.worker}: its vLLM is dead")
        why, requests_max = self._why_not(), self.llm.vllm_config.scheduler_config.max_num_seqs
        return self.owned.heartbeat(ready=not why, why=why, requests_max=requests_max, spare=self.is_spare)

    def _why_not(self) -> str:
        """Return why it takes no new work; "": it does."""
        status = self.owned.status
        if self._was_spare and not (status.version and status.has_caught_up):
            return f"{self.worker} has no weights yet"
        return status.why_not

    async def tensorhub_hold(self, version: int) -> int:
        return await self.owned.hold(version)

    async def tensorhub_release(self) -> None:
        await self.owned.release()

    # --- what the fleet asks for --------------------------------------------------------------------------------------

    async def tensorhub_join(self) -> None:
        if self.is_spare:
            self.is_spare = False
            self.owned.keep(self._join())

    async def tensorhub_give_back(self) -> None:
        self.is_leaving = True
        await self.llm.abort(list(self.llm.output_processor.request_states), internal=True)

    async def tensorhub_leave(self) -> None:
        """Leave the store, so that the hub forgets this engine at once. It answers nothing afterwards."""
        self.is_leaving = True
        await self.owned.leave()


def named(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `generate` under names by which its core knows which version each token came from (spans.py)."""

    def under_our_name(prompt: Any, params: Any, request_id: str) -> Any:
        return generate(prompt, params, request_id=f"{PREFIX}{uuid.uuid4().hex}")

    return under_our_name
