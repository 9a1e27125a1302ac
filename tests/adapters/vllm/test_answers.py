"""Calls to several workers, of which some fail: the next call gets its own answers."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tensorhub_plugins.vllm.worker_replies import all_fetched


class Executor:
    """As vLLM's: one queue of answers per worker, read in turn up to the first error."""

    def __init__(self, workers: int) -> None:
        self.queues = [Queue() for _ in range(workers)]
        self.response_mqs: Any = self.queues
        self.fails = False

    def collective_rpc(self, method: str, timeout: Any = None, unique_reply_rank: Any = None, **rest: Any) -> Any:
        if self.fails:
            raise RuntimeError("Executor failed.")
        asked = (
            self.response_mqs
            if unique_reply_rank is None
            else self.response_mqs[unique_reply_rank : unique_reply_rank + 1]
        )
        real = self.queues if unique_reply_rank is None else self.queues[unique_reply_rank : unique_reply_rank + 1]
        for queue in real:
            queue.answers.append(f"{method}: {queue.error}" if queue.error else method)
        found = []
        for queue in asked:
            answer = queue.dequeue(timeout=timeout)
            if ":" in answer:
                raise TimeoutError(answer) if "late" in answer else RuntimeError(answer)
            found.append(answer)
        return found


class Queue:
    def __init__(self) -> None:
        self.answers: deque[str] = deque()
        self.error = ""

    def dequeue(self, timeout: Any = None) -> str:
        return self.answers.popleft()


def failed(executor: Executor, *workers: int, error: str = "refused", **options: Any) -> None:
    for worker in workers:
        executor.queues[worker].error = error
    with pytest.raises((RuntimeError, TimeoutError), match=error):
        call(executor, "tensorhub_first", **options)
    for queue in executor.queues:
        queue.error = ""


def call(executor: Executor, method: str, ours: bool = False, **options: Any) -> Any:
    return all_fetched(lambda asked: ours, Executor.collective_rpc, executor, method, **options)


@pytest.mark.parametrize("workers", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_the_next_call_gets_its_own_answers(workers: tuple[int, ...]) -> None:
    executor = Executor(3)
    failed(executor, *workers)
    assert executor.response_mqs is executor.queues
    assert call(executor, "tensorhub_second") == ["tensorhub_second"] * 3


def test_vllm_alone_mixes_them_up() -> None:
    """The control, and what is left to vLLM."""
    executor = Executor(2)
    executor.queues[0].error = "refused"
    with pytest.raises(RuntimeError, match="refused"):
        call(executor, "update_weights")
    executor.queues[0].error = ""
    assert call(executor, "update_weights") == ["update_weights", "update_weights"]
    assert len(executor.queues[1].answers) == 1
    ours = Executor(2)
    ours.queues[0].error = "refused"
    with pytest.raises(RuntimeError, match="refused"):
        call(ours, "update_weights", ours=True)
    assert not ours.queues[1].answers


def test_nobody_waits_for_answers_that_do_not_come() -> None:
    executor = Executor(2)
    executor.fails = True  # before anybody was asked
    with pytest.raises(RuntimeError, match="Executor failed"):
        call(executor, "tensorhub_poll")
    executor.fails = False
    failed(executor, 0, unique_reply_rank=0)  # the other one was not asked
    failed(executor, 1)
    executor.queues[0].error = "late"  # its answer is not waited for, nor are the others'
    with pytest.raises(TimeoutError):
        call(executor, "tensorhub_poll", timeout=1)
    assert len(executor.queues[1].answers) == 1 and executor.response_mqs is executor.queues


def test_a_worker_that_is_gone_is_said_to_be(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(2)
    executor.queues[0].error = "refused"

    def dequeue(timeout: Any = None) -> str:
        assert timeout is not None
        raise TimeoutError

    monkeypatch.setattr(executor.queues[1], "dequeue", dequeue)
    with pytest.raises(RuntimeError, match="refused"):
        call(executor, "tensorhub_poll")
    assert "has not answered tensorhub_poll: restart the engine" in caplog.text
