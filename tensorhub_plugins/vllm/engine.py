"""What the store adds to vLLM's engine core, the process with the scheduler: only there can weights and caches be one.

`attach` is called (see plugin.py) for engines with `--load-format tensorhub` or the weight transfer backend
`tensorhub`, before the first request.

    Weights and caches change as one    After every update_weights of our back end the prefix, encoder and multi-modal
                                        caches are forgotten and running requests are computed anew, whoever has
                                        paused the engine, in whatever mode, or not at all.
    Broken weights are not resumed      resume fails, the engine stays paused and alive: update again.
    "follow"                            The engine switches to every new version by itself, see follower.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import wraps
from typing import Any

from tensorhub_plugins.core.errors import UsageError

logger = logging.getLogger("vllm.tensorhub")  # vLLM's logging configuration only knows names below "vllm"


def attach(core: Any, vllm_config: Any) -> None:
    """Add what this engine's configuration asks for; UsageError if it cannot have it."""
    from tensorhub_plugins.vllm.plugin import NAME

    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if getattr(transfer, "backend", None) == NAME:
        core.collective_rpc = _forget_after_updates(core, core.collective_rpc)
    core.resume_scheduler = _only_if_whole(core, core.resume_scheduler)
    if vllm_config.load_config.load_format == NAME:
        _follow(core, vllm_config)


def _forget_after_updates(core: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(method, *args, **kwargs)
        if method == "update_weights":
            core._reset_caches(reset_running_requests=True)
        return result

    return collective_rpc


def _only_if_whole(core: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def resume_scheduler(*args: Any, **kwargs: Any) -> Any:
        core.model_executor.collective_rpc("tensorhub_guard")
        return original(*args, **kwargs)

    return resume_scheduler


# --- following ---


def _follow(core: Any, vllm_config: Any) -> None:
    from tensorhub_plugins.vllm.follower import Follower
    from tensorhub_plugins.vllm.loader import parse

    start, joining = parse(vllm_config.load_config.model_loader_extra_config, vllm_config)
    if start.follow is None:
        return
    assert joining is not None
    if not hasattr(core, "input_queue"):
        raise UsageError(
            'this engine runs in the process of its caller and steps only when told to, so it cannot "follow": '
            "set VLLM_ENABLE_V1_MULTIPROCESSING=1, or update it by tensorhub_begin_fetch and tensorhub_install"
        )
    follower = Follower(Core(core), joining, when=start.follow, patience_s=start.follow_patience_s)
    original = core.shutdown

    @wraps(original)
    def shutdown() -> Any:
        follower.close()
        return original()

    core.shutdown = shutdown
    follower.start()


class Core:
    """An engine core, as a thread beside it may use it: every call runs in the core's own loop, between two steps."""

    def __init__(self, core: Any) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._core, self._wake_up = core, EngineCoreRequestType.WAKEUP
        original = core._handle_client_request

        @wraps(original)
        def handle_client_request(request_type: Any, request: Any) -> None:
            if request_type == self._wake_up and callable(request):
                request()  # ours; vLLM's own carries nothing
            else:
                original(request_type, request)

        core._handle_client_request = handle_client_request

    def call(self, action: Callable[[], Any], deadline_s: float) -> Any:
        """Run this in the loop and return what it returns."""
        done: Future[Any] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except Exception as error:
                    done.set_exception(error)

        self._core.input_queue.put_nowait((self._wake_up, run))
        try:
            return done.result(timeout=deadline_s)
        except FutureTimeout:
            done.cancel()
            raise

    def workers(self, method: str, *args: Any) -> list[Any]:
        """In the loop: what all workers answer."""
        return list(self._core.model_executor.collective_rpc(method, args=args))

    @property
    def available(self) -> bool:
        """In the loop: nobody else has paused it or put it to sleep."""
        return not (self._core.is_scheduler_paused() or self._core.model_executor.is_sleeping)

    @property
    def idle(self) -> bool:
        """In the loop: no request is waiting or running."""
        return not (self._core.scheduler.has_unfinished_requests() or self._core.batch_queue)

    def paused(self) -> Future[None]:
        """In the loop: keep all requests and forget all caches; done, in the loop, when nothing runs any more."""
        done: Future[None] = Future()
        pausing = self._core.pause_scheduler("keep", True)
        if pausing is None:
            done.set_result(None)
        else:
            pausing.add_done_callback(lambda _: done.set_result(None))
        return done

    def resume(self, version: int) -> None:
        """In the loop: go on, as this version."""
        if hasattr(self._core, "set_weight_version"):
            self._core.set_weight_version(str(version))
        self._core.resume_scheduler()
