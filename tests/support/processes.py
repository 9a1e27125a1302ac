"""Other processes of a test: forked by a server that has imported torch once, as each would need seconds for that.

The server is started by the first of them, and has no threads: what is forked from it has no lock that somebody holds.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

ANSWER_S = 60.0  # for a process to answer: only a broken one takes so long


def forkserver() -> ForkServerContext:
    """The context of such processes; where one is frozen, `wait_until_stopped` says when."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "xxhash", "zmq", "tensorhub_plugins.core"])  # as far as there
    return context


def wait_until_stopped(pid: int | None) -> None:
    """Return when no thread of a process that was sent SIGSTOP runs any more. It need not be a child of ours."""
    deadline = time.monotonic() + ANSWER_S
    while not all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "the process does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
