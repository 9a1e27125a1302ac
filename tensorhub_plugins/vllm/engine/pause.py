"""Stop an engine as fast as vLLM can: every millisecond here is one that all its requests stand still."""

from __future__ import annotations

from typing import Any


async def pause(engine: Any, *, mode: str, clear_cache: bool) -> None:
    """`AsyncLLM.pause_generation` without the 20 ms that it sleeps at its end for the order of events.

    Count tokens of requests after one more answer of the engine, which comes behind its last tokens.
    """
    core: Any = getattr(engine, "engine_core", None)
    if not hasattr(core, "pause_scheduler_async"):  # another version of vLLM
        await engine.pause_generation(mode=mode, clear_cache=clear_cache)
        return
    if clear_cache:
        await engine.renderer.clear_mm_cache_async()
    await core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
