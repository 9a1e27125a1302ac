"""Notifies verl's sender when vLLM cannot load what it receives, in drop-in mode.

verl's rollout worker waits for vLLM's word after each bucket. A vLLM that has raised says none, and verl looks at its
answer to the call only afterwards, so the job would stand still. The sender looks while it waits. Twice is fine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import ray

from tensorhub_plugins.core import VersionRefused
from tensorhub_plugins.vllm.plugin import wrap

ADAPTER = "verl.workers.rollout.vllm_rollout.vllm_rollout"  # imported, with vLLM, where it is needed
LOOK_INTERVAL_S = 1.0  # how long the sender waits before it looks at vLLM's answer

_answer: ContextVar[Any] = ContextVar("of vLLM, to the call that loads what is sent now", default=None)


def watch() -> None:
    """Have the senders of this process do so from now on, if it is one of verl's vLLM rollout workers."""
    module: Any = sys.modules.get(ADAPTER)
    if module is None:
        return

    async def execute(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await original(self, *args, **kwargs)
        _answer.set(answer if kwargs.get("non_block") else None)
        return answer

    def connect(original: Any, self: Any) -> None:
        original(self)
        self.socket.recv = functools.partial(hear, self.socket.recv, self.socket.poll, _answer.get())

    wrap(module.ServerAdapter, "_execute_method", execute)
    wrap(module.BucketedWeightSender, "_init_socket", connect)


def hear(recv: Callable[[], Any], poll: Callable[[float], int], answer: Any) -> Any:
    """Return vLLM's answer, or raise VersionRefused. answer: Ray's reference to that of vLLM; None: another rank
    receives it."""
    while not poll(1000 * LOOK_INTERVAL_S):
        if answer is not None and ray.wait([answer], timeout=0)[0]:
            try:
                ray.get(answer)
            except Exception as error:
                cause = getattr(error, "cause", error)
                what = f"{type(cause).__name__}: {cause}"
                raise VersionRefused(f"vLLM cannot load what the trainer has sent: {what}") from error
    return recv()
