"""A small real HTTP server that speaks as `vllm serve --load-format tensorhub` does. Tests set its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

FACTS = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 16}


def status(**changes: Any) -> dict[str, Any]:
    following: dict[str, Any] = {
        "run": "r",
        "model": "m",
        "replica": "server",
        "follow": "now",
        "version": 3,
        "broken": False,
        "hub_silent_s": 0.5,
        "why_not": "",
        "refusal": [0, ""],
    }
    said: dict[str, Any] = {
        "following": following,
        "facts": {**FACTS, "num_hidden_layers": 2},
        "max_model_len": 100,
        "logprobs_mode": "processed_logprobs",
        "engines": 1,
        "by_hand": False,
    }
    for name, value in changes.items():
        (following if name in following else said)[name] = value
    return said


class Fake:
    """A server that speaks as vLLM 0.29: one event for each step. Token n of an answer is n, its log-probability -n."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = status()
        self.starts: Any = [[3, 0]]
        self.tokens = 4
        self.stop_after: int | None = None  # the stream stands still there until `go`
        self.break_after: int | None = None
        self.silent = False
        self.redirect = 302  # what /old/... says
        self.refuses: int | None = None  # every request, with this status
        self.used: set[Any] = set()  # connections: a second request on one finds that it was closed meanwhile
        self.on_request: Callable[[], None] | None = None
        self.holds: list[tuple[str, int]] | None = []  # what it was told; None: it may not be held
        self.odd_hold = ""  # what it answers then
        self.go = asyncio.Event()
        self.reached = asyncio.Event()
        self.asked: list[dict[str, Any]] = []
        self.disconnected = asyncio.Event()

    @web.middleware
    async def closes_kept(self, request: web.Request, handler: Any) -> web.StreamResponse:
        transport = request.transport
        if transport is not None and transport in self.used:
            transport.abort()
        self.used.add(transport)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def tell(self, request: web.Request) -> web.Response:
        if self.silent:
            await self.go.wait()
        return web.json_response(self.status)

    async def tell_starts(self, request: web.Request) -> web.Response:
        assert request.match_info["name"] in [asked["request_id"] for asked in self.asked]
        assert request.query["forget"] == "true", "requests that are not forgotten push out those that run"
        return web.json_response({"starts": self.starts})

    async def take_hold(self, request: web.Request) -> web.Response:
        if self.holds is None:
            text = "set may_be_held to true"
            return web.json_response({"error": {"message": text}}, status=403)
        action, version = request.match_info["action"], int(request.query.get("version", 0))
        assert action == "release" or 0 < float(request.query["for_s"]) < 600.0
        self.holds.append((action, version))
        if self.odd_hold:
            return web.Response(text=self.odd_hold, content_type="application/json")
        return web.json_response({"version": version or self.status["following"]["version"]})

    async def sends_elsewhere(self, request: web.Request) -> web.Response:
        there = f"http://{request.host}/{request.match_info['rest']}"
        return web.Response(status=self.redirect, headers={"Location": there})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.refuses is not None:
            return web.Response(status=self.refuses, headers={"Location": str(request.url)})
        body = await request.json()
        self.asked.append(body)
        params = body["sampling_params"]
        if self.on_request is not None:
            self.on_request()
        if len(body["token_ids"]) > 100:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            for token in range(self.tokens):
                if token == self.break_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return reply
                if token == self.stop_after:
                    self.reached.set()
                    await self.go.wait()
                last = token == self.tokens - 1
                content = [{"token": f"token_id:{token}", "logprob": -float(token)}]
                choice = {"index": 0, "token_ids": [token], "finish_reason": "length" if last else None}
                choice["logprobs"] = None if params["logprobs"] is None else {"content": content}
                await reply.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await reply.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.disconnected.set()
            raise
        return reply


@asynccontextmanager
async def answering(fake: Fake) -> AsyncIterator[str]:
    """Run the server, and yield its address."""
    app = web.Application(middlewares=[fake.closes_kept])
    app.add_routes(
        [
            web.get("/tensorhub", fake.tell),
            web.get("/tensorhub/starts/{name}", fake.tell_starts),
            web.post("/inference/v1/generate", fake.generate),
            web.post("/v1/tensorhub/{action}", fake.take_hold),
            web.route("*", "/old/{rest:.*}", fake.sends_elsewhere),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        fake.go.set()
        await runner.cleanup()
