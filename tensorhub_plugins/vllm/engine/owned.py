"""An engine as the actor updates it that owns it (verl's, OpenRLHF's): what `Follower` asks of it, over AsyncLLM."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tensorhub_plugins.vllm.engine.caches import StaleCaches
from tensorhub_plugins.vllm.engine.core_follower import starts_in
from tensorhub_plugins.vllm.engine.departures import Departures
from tensorhub_plugins.vllm.engine.spans import Span, spans_of


class OwnedEngine:
    """Stops as fast as vLLM can: every millisecond of a pause is one that all requests stand still."""

    def __init__(
        self,
        engine: Any,
        rpc: Callable[..., Coroutine[Any, Any, list[Any]]],
        *,
        mode: str = "keep",
        recompute: bool = True,
    ) -> None:
        """engine: AsyncLLM. rpc: see `Lifeline`. mode: vLLM's, of pauses. recompute: what was computed with other
        weights is forgotten."""
        self._engine, self.rpc = engine, rpc
        self._mode, self._recompute = mode, recompute
        self._departures = Departures(engine.output_processor, self.running)

    async def pause(self) -> None:
        """Do as `AsyncLLM.pause_generation` without the 20 ms that it sleeps at its end for the order of events. Where
        it cannot forget it goes on, with StaleCaches: a pause that is to do both ends vLLM's core there."""
        core: Any = getattr(self._engine, "engine_core", None)
        if hasattr(core, "pause_scheduler_async"):
            await core.pause_scheduler_async(mode=self._mode, clear_cache=False)
        else:  # another version of vLLM
            await self._engine.pause_generation(mode=self._mode, clear_cache=False)
        try:
            await self.forget()
        except StaleCaches:
            await self._engine.resume_generation()
            raise
        self._departures.begin()

    async def forget(self) -> None:
        """Forget what was computed with other weights, of an engine that stands still; StaleCaches."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if not self._recompute:
            return
        try:
            done = await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            await self._engine.reset_encoder_cache()
        except EngineDeadError:
            raise
        except Exception as error:  # the core's answer
            raise StaleCaches(f"vLLM keeps what it has computed: {error}") from error
        if done is False:
            raise StaleCaches("vLLM keeps what it has computed, and does not say why: end all requests")

    async def resume(self) -> None:
        await self._engine.resume_generation()
        self._departures.end()

    def running(self) -> list[str]:
        return list(self._engine.output_processor.request_states)

    def departed(self) -> list[str]:
        return self._departures.take()

    async def spans(self, request: str, tokens: int) -> tuple[Span, ...]:
        """Return the versions of this request's only answer, of which `tokens` have come; (): they are not known. Ask
        once, of every request that has a name of ours (spans.py)."""
        found = await starts_in(self._engine.engine_core, request, forget=True)
        return spans_of(found[0][1], tokens) if len(found) == 1 else ()
