"""Ranks of a trainer: a test's own file, started as so many processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorhub_plugins.core import Client, HubUnreachable, NotPublished

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 5


def free_port() -> int:
    """On loopback, for the ranks to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(file: str, count: int, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """`python file RANK arguments...` for each rank; what a rank reads from its stdin is the test's word."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, file, str(rank), *map(str, arguments)], env=environment, stdin=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def await_version(reader: Client, version: int, ranks: Sequence[subprocess.Popen[str]], timeout_s: int) -> int:
    """Within the deadline, and only while no rank has ended."""
    for _ in range(timeout_s // WAIT_S):
        assert [rank.poll() for rank in ranks] == [None] * len(ranks), "a rank has ended"
        with contextlib.suppress(NotPublished, HubUnreachable):
            return reader.wait(version, timeout_s=WAIT_S)
    raise AssertionError(f"version {version} was not published in {timeout_s} s")
