"""Ranks of a trainer as processes of this host, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence


def free_port() -> int:
    """Return a free port on loopback, for the ranks to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    program: Sequence[str],
    count: int,
    *arguments: object,
    environment: Mapping[str, str],
    stdout: int | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `python PROGRAM RANK arguments...` for each rank, killed at the end. `environment` is added to our own.

    The caller writes to the ranks' stdin; with subprocess.PIPE it also reads what they print.
    """
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            command = [sys.executable, *program, str(rank), *map(str, arguments)]
            env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=stdout, text=True))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()
