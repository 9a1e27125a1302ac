"""An engine core as vLLM's, as far as pauses go, for tests of what is asked of it; and how it is asked."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.engine.caches import Caches
from tensorhub_plugins.vllm.engine.core import Core

TIMEOUT_S = 10.0


class EngineCore:
    """As vLLM's, as far as pauses go: whatever is asked of it is done in its loop, one after the other."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.scheduler, self.batch_queue = SimpleNamespace(requests={}, running=[]), None
        self.weights = "none"
        self.forgets = True
        self.model_executor: Any = SimpleNamespace(is_sleeping=False, collective_rpc=self._rpc)
        self.log: list[str] = []
        self.paused, self.broken, self.resumes = False, False, True
        self.loop = threading.Thread(target=self._run)

    def _run(self) -> None:
        while (item := self.input_queue.get()) is not None:
            self._handle_client_request(*item)

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        raise AssertionError("nobody else asks")

    def _rpc(self, method: str, args: Any = ()) -> list[Any]:
        self.log.append(method)
        return [{"installed": not self.broken, "broken": self.broken or None}]

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        return self.model_executor.collective_rpc(method, args)

    def set_weight_version(self, version: str) -> None:
        self.weights = version

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.log.append(f"pause {mode}")
        self.paused = True

    def resume_scheduler(self) -> None:
        self.log.append("resume")
        if not self.resumes:
            raise UsageError("broken")
        self.paused = False

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            self.scheduler.requests.pop(name, None)

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        if not self.forgets:
            raise RuntimeError("the connector is gone")
        return True

    def reset_encoder_cache(self) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture
def engine() -> Iterator[EngineCore]:
    made = EngineCore()
    made.core = Core(made, Caches(made))  # type: ignore[attr-defined]
    made.loop.start()
    yield made
    made.input_queue.put(None)
    made.loop.join()


def ours(engine: Any, *calls: str) -> None:
    for call in calls:
        what = engine.core.rpc("tensorhub_install", 1) if call == "install" else getattr(engine.core, call)()
        asyncio.run(asyncio.wait_for(what, TIMEOUT_S))


def theirs(engine: Any, call: Callable[[], Any]) -> Future[Any]:
    """What another client's call comes to; vLLM waits for a future that it gets, and so does this."""
    answer: Future[Any] = Future()

    async def run() -> None:
        answer.set_result(await engine.core.ask(lambda: _boxed(call)))

    def _boxed(call: Callable[[], Any]) -> Any:
        return [call()]

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    (found,) = answer.result()
    if isinstance(found, Future):
        return found
    done: Future[Any] = Future()
    done.set_result(found)
    return done
