"""What `vllm serve --load-format tensorhub` tells over HTTP, beside vLLM's own routes.

GET /tensorhub                      which hub it follows, which version it has, and what model it is; 404: not ours
GET /ready                          503 with "behind" while it is; requests may wait for a version, too (admission.py)
GET /tensorhub/starts/REQUEST       of a request that was named by `spans.PREFIX`: "answers", which are {"prompt": which
                                    of its prompts, "sample": which of n, "starts": [[version, first token], ...]}, and
                                    "starts": of its only answer; null: it has several, or it is not known (any more;
                                    or of beam search, or two requests had this name). Version 0 is none of the store's.
                                    ?forget=true: the last question about it, which makes room for others
POST /v1/tensorhub/hold             stay with ?version= (0: with the one that it has) for ?for_s= seconds, or until
                                    release: {"version": which}. Of a server with "may_be_held" in its configuration.
                                    A hold that waits for its version ends when its client has left.
POST /v1/tensorhub/release          go on. Both need the server's API key, if it has one.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse

from tensorhub_plugins.vllm.admission import BEHIND_S, WAIT_S, Admission, furthest_behind, readiness
from tensorhub_plugins.vllm.config import start_of
from tensorhub_plugins.vllm.engine.core_follower import of_all_cores, of_core, starts_in
from tensorhub_plugins.vllm.model_facts import facts_of
from tensorhub_plugins.vllm.names import NAME

HOLD_MAX_S = 600.0  # the client may be gone
LEFT_POLL_S = 1.0  # how often a hold that waits looks whether its client is there

router = APIRouter()


@router.get("/tensorhub")
async def status(request: Request) -> dict[str, Any]:
    engine = _engine(request)
    config = engine.vllm_config
    return {
        "following": furthest_behind(await of_all_cores(engine.engine_core, "tensorhub_status")),
        "facts": facts_of(config.model_config.hf_config),
        "max_model_len": config.model_config.max_model_len,
        "logprobs_mode": str(getattr(config.model_config.logprobs_mode, "value", config.model_config.logprobs_mode)),
        "engines": config.parallel_config.data_parallel_size,
        "by_hand": config.weight_transfer_config is not None,
    }


@router.get("/ready")
async def ready(request: Request, max_behind_s: float = BEHIND_S) -> JSONResponse:
    asked = of_all_cores(_engine(request).engine_core, "tensorhub_status")
    try:
        code, body = readiness(furthest_behind(await asyncio.wait_for(asked, WAIT_S)), max_behind_s)
    except asyncio.TimeoutError:
        code, body = 503, {"ready": False, "why": "its engine does not answer, as long as it installs a version"}
    return JSONResponse(body, code)


@router.get("/tensorhub/starts/{name}")
async def starts(name: str, request: Request, forget: bool = False) -> dict[str, Any]:
    found = await starts_in(_engine(request).engine_core, name, forget=forget)
    answers = [{"prompt": prompt, "sample": sample, "starts": starts} for (prompt, sample), starts in found]
    return {"starts": answers[0]["starts"] if len(answers) == 1 else None, "answers": answers}


@router.post("/v1/tensorhub/hold")  # below /v1, where vLLM asks for the API key
async def hold(
    request: Request, version: Annotated[int, Query(ge=0)] = 0, for_s: Annotated[float, Query(gt=0, le=HOLD_MAX_S)] = 60
) -> dict[str, Any]:
    asked = asyncio.ensure_future(_asked(request, "hold", version, for_s))
    while not (await asyncio.wait({asked}, timeout=LEFT_POLL_S))[0]:  # it waits for its version
        if await request.is_disconnected():
            await _asked(request, "abandon")
    return {"version": await asked}


@router.post("/v1/tensorhub/release")
async def release(request: Request) -> dict[str, Any]:
    await _asked(request, "release")
    return {}


async def _asked(request: Request, question: str, *given: Any) -> Any:
    """Return what the engine's follower answers to a question of `Follower.answer`."""
    config = (engine := _engine(request)).vllm_config
    if not start_of(config.load_config.model_loader_extra_config).may_be_held:
        raise HTTPException(403, "set may_be_held to true, beside follow, in this server's --model-loader-extra-config")
    if config.parallel_config.data_parallel_size > 1:
        raise HTTPException(403, "several engines answer at this address: start one")
    (kind, message, _), answer = await of_core(engine.engine_core, "tensorhub_ask", question, given)
    if kind:
        raise HTTPException(409, message)
    return answer


def _engine(request: Request) -> Any:
    engine = request.app.state.engine_client
    if engine.vllm_config.load_config.load_format != NAME:
        raise HTTPException(status_code=404, detail=f"this server was started without --load-format {NAME}")
    return engine


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.add_middleware(Admission, state=app.state)
