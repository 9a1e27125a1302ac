"""Processes for the cases, forked before there is any thread: in the guest it takes a minute to import torch once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from processes import Another, answering
from transport_suite.peers import Peer


class Member(Another):
    """Another process that calls functions of the cases, one at a time, and keeps what they put into `kept`."""

    answer_s = 120.0  # of a guest that is emulated, on a host that is busy

    def __init__(self) -> None:
        super().__init__(multiprocessing.get_context("fork"), _serve)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Callable[..., Any], *arguments: object) -> None:
        """Begin a call; `result` waits for it."""
        self._pipe.send((function.__name__, *arguments))

    def result(self) -> Any:
        return self._answer()

    def ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        self.start(function, *arguments)
        return self.result()

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        with open(f"/proc/{self.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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

    def call(name: str, *arguments: object) -> Any:
        try:
            return getattr(cases, name)(*arguments)
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            raise AssertionError(f"in process {os.getpid()}: {type(error).__name__}: {error}") from None

    answering(pipe, call)
