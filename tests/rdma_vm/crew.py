"""Processes for the cases, forked before there is any thread: in the guest it takes a minute to import torch once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from transport_suite.peers import Peer

ANSWER_S_MAX = 120.0  # of a guest that is emulated, on a host that is busy


class Member:
    """Another process that calls functions of the cases, one at a time, and keeps what they put into `kept`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child,), daemon=True)
        self._process.start()
        child.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Callable[..., Any], *arguments: object) -> None:
        """Begin a call; `result` waits for it."""
        self._pipe.send((function.__name__, arguments))

    def result(self) -> Any:
        if not self._pipe.poll(ANSWER_S_MAX):
            raise AssertionError(f"process {self.pid} did not answer within {ANSWER_S_MAX:g} s")
        good, answer = self._pipe.recv()
        if not good:
            raise AssertionError(f"in process {self.pid}: {answer}")
        return answer

    def ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        self.start(function, *arguments)
        return self.result()

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        with open(f"/proc/{self.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL, self._process.exitcode

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Crew:
    """So many members, and so many peers for check_transport. Make it before anything starts a thread."""

    def __init__(self, members: int, peers: int) -> None:
        self._members = [Member() for _ in range(members)]
        self._peers = [Peer("fork") for _ in range(peers)]

    def take(self) -> Member:
        return self._members.pop()

    def take_peer(self) -> Peer:
        """For the suite, which asks for a new one when it has killed the last."""
        return self._peers.pop()


def _serve(pipe: Any) -> None:
    import cases  # in the child: what it opens is its own

    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(cases, name)(*arguments))
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)
