"""Other processes of a test: forked by a server that has imported torch once, as each would need seconds for that.

The server is started by the first of them, and has no threads: what is forked from it has no lock that somebody holds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

ANSWER_S = 60.0  # for a process to answer: only a broken one takes so long


def forkserver() -> ForkServerContext:
    """The context of such processes; where one is frozen, `wait_until_stopped` says when."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "xxhash", "zmq", "tensorhub_plugins.core"])  # as far as there
    return context


class Another:
    """Another process, which answers what it is asked (`answering`), and can be frozen and killed."""

    answer_s = ANSWER_S

    def __init__(self, context: Any, main: Callable[..., None], *arguments: object) -> None:
        """Start main(pipe, *arguments) in a process of this context."""
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """Return the answer; raise the error that it has come to there."""
        self._pipe.send(question)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(self.answer_s), "the process does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def alive(self) -> bool:
        """Return whether it still runs."""
        return bool(self._process.is_alive())

    def freeze(self) -> None:
        """Send SIGSTOP; return when none of its threads runs any more."""
        self.signal(signal.SIGSTOP)
        wait_until_stopped(self._process.pid)

    def thaw(self) -> None:
        """Let it go on after it was frozen."""
        if self.alive():
            self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send this, and wait for nothing."""
        assert self._process.pid is not None and self.alive()
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL; return when it is dead, and check that the signal was the cause."""
        alive = self.alive()
        self._process.kill()
        self._process.join(self.answer_s)
        code = self._process.exitcode
        assert code == -signal.SIGKILL or not alive, f"the process ended with {code}, not by our SIGKILL"

    def close(self) -> None:
        """Whatever state it is in, it is gone afterwards."""
        if self.alive():
            self.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def answering(pipe: Connection, answer: Callable[..., Any]) -> None:
    """Answer questions until the other end is closed."""
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(answer(*question))
        except Exception as error:
            pipe.send(error)


def wait_until_stopped(pid: int | None) -> None:
    """Return when no thread of a process that was sent SIGSTOP runs any more. It need not be a child of ours."""
    deadline = time.monotonic() + ANSWER_S
    while not all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "the process does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
