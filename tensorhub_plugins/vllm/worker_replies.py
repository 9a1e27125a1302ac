"""Every answer of a call to several workers is fetched, also when one of them is an error.

vLLM's executor for worker processes has one queue of answers per worker. It reads them in turn and stops at the first
error, so the answers of the workers behind that one stay where they are, and each later call reads the answer to the
call before. A version that is refused is an error, so an engine of several workers would install the next one and take
the answer to another question for the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)

OUR_METHODS = "tensorhub_"  # how the names of the worker's methods begin
DRAIN_TIMEOUT_S = 600.0  # for one worker: it may be in the middle of an install
POSITIONAL_MAX = 3  # timeout, args and kwargs; what follows says which worker answers, and vLLM gives it by name


def all_fetched(
    is_ours: Callable[[Any], bool], original: Any, executor: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call `collective_rpc` so that no answer is left behind. is_ours: whether that goes for vLLM's own calls, too."""
    queues = getattr(executor, "response_mqs", None)
    named = isinstance(method, str) and method.startswith(OUR_METHODS)
    everyone_answers = kwargs.get("unique_reply_rank") is None and len(args) <= POSITIONAL_MAX
    if not queues or not (named or is_ours(executor)) or not everyone_answers or kwargs.get("non_block"):
        return original(executor, method, *args, **kwargs)
    answers = [_Queue(queue) for queue in queues]
    executor.response_mqs = answers
    try:
        return original(executor, method, *args, **kwargs)
    except TimeoutError:
        raise  # a call with a deadline does not wait for the others
    except Exception:
        if any(answer.came for answer in answers):  # else no worker was asked
            for answer in answers:
                answer.drain(method)
        raise
    finally:
        if executor.response_mqs is answers:  # it is another list once the executor is shut down
            executor.response_mqs = queues


class _Queue:
    """One worker's queue for the time of one call."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.came = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._queue.dequeue(*args, **kwargs)
        self.came = True
        return answer

    def drain(self, method: Any) -> None:
        if self.came:
            return
        with suppress(Exception):
            self.dequeue(timeout=DRAIN_TIMEOUT_S)
            return
        logger.error("a worker of this engine has not answered %s: restart the engine", method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
