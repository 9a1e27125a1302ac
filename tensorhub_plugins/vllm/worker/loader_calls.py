"""What a worker's background asks of vLLM's own thread: to run the model's loaders, between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from tensorhub_plugins.core import Deadline, work

T = TypeVar("T")


class Asked:
    """Questions that wait for their answers."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Return what will have the answer. In the background."""
        future: Future[T] = Future()
        self._questions.put((future, question))
        return future

    def answer_all(self) -> None:
        """Answer what has been asked so far."""
        while not self._questions.empty():
            self._answer(self._questions.get())

    def see_to(self, waited_for: Future[None], timeout_s: float, *, grows: bool) -> None:
        """Wait for the background, and answer its questions. Raise FutureTimeout. grows: while it works, it goes on:
        its reads end by themselves, as each piece has its time."""
        began = time.monotonic()

        def until() -> Deadline:
            return Deadline((max(began, work.last_at()) if grows else began) + timeout_s)

        waited_for.add_done_callback(lambda _: self._questions.put(None))
        while not waited_for.done():
            try:
                self._answer(self._questions.get(timeout=until().remaining()))
            except queue.Empty:
                if until().expired:
                    raise FutureTimeout from None
        waited_for.result()

    def _answer(self, asked: tuple[Future[Any], Callable[[], Any]] | None) -> None:
        if asked is None or not asked[0].set_running_or_notify_cancel():
            return
        future, question = asked
        try:
            future.set_result(question())
        except BaseException as error:
            future.set_exception(error)
