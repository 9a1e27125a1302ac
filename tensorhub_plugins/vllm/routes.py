"""What `vllm serve --load-format tensorhub` tells over HTTP, beside vLLM's own routes. Reading only.

GET /tensorhub                      whom it follows, which version it has, and what model it is; 404: not ours
GET /tensorhub/starts/REQUEST       [[version, first token], ...] of a request that was named by `spans.PREFIX`
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

from tensorhub_plugins.vllm.model_facts import facts_of
from tensorhub_plugins.vllm.names import NAME

router = APIRouter()


@router.get("/tensorhub")
async def status(request: Request) -> dict[str, Any]:
    engine = _engine(request)
    config = engine.vllm_config
    following = await engine.engine_core.call_utility_async("tensorhub_status")
    return {
        "following": following,
        "facts": facts_of(config.model_config.hf_config),
        "max_model_len": config.model_config.max_model_len,
        "logprobs_mode": str(getattr(config.model_config.logprobs_mode, "value", config.model_config.logprobs_mode)),
        "engines": config.parallel_config.data_parallel_size,
        "by_hand": config.weight_transfer_config is not None,
    }


@router.get("/tensorhub/starts/{name}")
async def starts(name: str, request: Request) -> dict[str, Any]:
    return {"starts": await _engine(request).engine_core.call_utility_async("tensorhub_starts", name)}


def _engine(request: Request) -> Any:
    engine = request.app.state.engine_client
    if engine.vllm_config.load_config.load_format != NAME:
        raise HTTPException(status_code=404, detail=f"this server was started without --load-format {NAME}")
    return engine


def attach(app: FastAPI) -> None:
    app.include_router(router)
