"""verl's router and client without Ray: actors made of plain coroutines."""

import asyncio
from types import SimpleNamespace

from verl.workers.rollout.replica import TokenOutput

from tensorhub_plugins.verl.routing import Handle, TensorHubRouter


class Method:
    def __init__(self, call):
        self.call = call

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def remote(self, *args, **kwargs):
        return asyncio.ensure_future(self.call(*args, **kwargs))


class Actor:
    """Looks like a Ray actor handle: every coroutine method has `.remote`."""

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if asyncio.iscoroutinefunction(value):
            return Method(value)
        return value


class Server(Actor):
    def __init__(self, name, *, version=1, spans=None):
        self.name, self.version, self.spans = name, version, spans
        self.asked, self.dead, self.frozen = 0, None, asyncio.Event()
        self.broken, self.tells, self.given = False, {}, {}
        self.frozen.set()

    async def tensorhub_heartbeat(self):
        await self.frozen.wait()
        if self.dead:
            raise self.dead
        return {
            "worker": f"{self.name}/0",
            "ready": self.version > 0 and not self.broken,
            "version": self.version,
            "silent_s": 0.0,
            "timeout_s": 0.2,
            **self.tells,
        }

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        self.asked, self.given = self.asked + 1, kwargs
        if self.dead:
            raise self.dead
        await self.frozen.wait()
        spans = self.spans or [(3, 2)]
        tokens = list(range(sum(n for _, n in spans)))
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.5 * t for t in tokens],
            stop_reason="completed",
            extra_fields={"global_steps": spans[0][0], "tensorhub_spans": spans, "tensorhub_split": bool(self.spans)},
        )


class Router(Actor):
    """The real class behind actor-like methods."""

    def __init__(self, servers):
        self.real = TensorHubRouter(servers, {})
        self.questions = 0

    async def acquire(self, request_id):  # as with Ray, it goes on where its caller waits no more
        return await asyncio.shield(asyncio.ensure_future(self.real.acquire(request_id)))

    async def losses(self, *args):
        self.questions += 1
        return await self.real.losses(*args)

    async def report_lost(self, *args):
        return await self.real.report_lost(*args)

    async def release_server(self, *args):
        return await self.real.release_server(*args)

    async def handle(self, request_id, priority=0):  # what acquire_server gives to verl's client
        server_id, actor, epoch = await self.real.acquire(request_id)
        return Handle(server_id, actor, epoch, self, request_id, priority)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


class Balancer(Actor):
    """The router as verl's client asks it. As with Ray, who does not wait for an answer any more takes nothing back."""

    def __init__(self, router):
        self.router = router

    async def require_acquire_fields(self):
        return await self.router.real.require_acquire_fields()

    async def require_release_fields(self):
        return await self.router.real.require_release_fields()

    async def acquire_server(self, request_id, priority=0):
        handle = await asyncio.shield(asyncio.ensure_future(self.router.handle(request_id, priority)))
        return handle._at[0], handle

    async def release_server(self, server_id, request_id):
        return await self.router.real.release_server(server_id, request_id)


def client_of(router):
    from verl.workers.rollout import llm_server

    rollout = SimpleNamespace(name="vllm_tensorhub", response_length=16, full_determinism=False)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return llm_server.FullyAsyncLLMServerClient(config=config, load_balancer_handle=Balancer(router))
