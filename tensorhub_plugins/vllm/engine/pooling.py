"""Answers of `vllm serve` that the API server makes of several requests: the score of a query and a document, whose
embeddings are requests of their own, or the embedding of a text in chunks. Each is of one version, or asked for again.

A request by itself is of one version by what workers forget of it at an install (worker/progress.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

ATTEMPTS_MAX = 5  # an install takes a moment, and versions are seconds apart


def of_one_version(serving: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's PoolingBaseServing. What was computed while the weights changed is computed again; HTTP 503 after
    ATTEMPTS_MAX changes."""
    original = serving._collect_batch

    @wraps(original)
    async def collect_batch(self: Any, ctx: Any) -> None:
        if not is_ours(self.engine_client.vllm_config) or len(ctx.engine_inputs or ()) < 2:
            await original(self, ctx)
            return
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await self._prepare_generators(ctx)
            before = await _epochs(self.engine_client)
            await original(self, ctx)
            if await _epochs(self.engine_client) == before:
                return
        from fastapi import HTTPException

        raise HTTPException(503, f"the weights changed {ATTEMPTS_MAX} times while this was computed: ask again")

    serving._collect_batch = collect_batch


async def _epochs(engine: Any) -> list[int]:
    from tensorhub_plugins.vllm.engine.core_follower import of_all_cores

    return await of_all_cores(engine.engine_core, "tensorhub_epoch")


def scored_here(scores: Any, is_ours: Callable[[Any], bool]) -> None:
    """Wrap vLLM's ServingScores: late interaction in the API server. Workers would keep embeddings of queries from one
    request for another, and end the engine when a document comes whose query has been forgotten."""
    original = scores.__init__

    @wraps(original)
    def init(self: Any, engine_client: Any, *args: Any, **options: Any) -> None:
        if is_ours(engine_client.vllm_config):
            options["enable_flash_late_interaction"] = False
        original(self, engine_client, *args, **options)

    scores.__init__ = init
