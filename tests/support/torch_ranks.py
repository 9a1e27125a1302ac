"""Ranks of a trainer: a test's own file, started as so many processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NoReturn

import recipes.ranks
from tensorhub_plugins.core import Client, HubUnreachable, NotPublished

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 5


def started(file: str, count: int, *arguments: object) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """Run `python file RANK arguments...` for each rank; the test writes to the ranks' stdin."""
    return recipes.ranks.started([file], count, *arguments, environment={})


def leave() -> NoReturn:
    """End this rank, whose work is done. Gloo's threads outlive a destroyed group that a module refers to, and an
    interpreter that is torn down beside them may be aborted ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def await_version(reader: Client, version: int, ranks: Sequence[subprocess.Popen[str]], timeout_s: int) -> int:
    """Wait for the version within the deadline, and only while no rank has ended."""
    for _ in range(timeout_s // WAIT_S):
        assert [rank.poll() for rank in ranks] == [None] * len(ranks), "a rank has ended"
        with suppress(NotPublished, HubUnreachable):
            return reader.wait(version, timeout_s=WAIT_S)
    raise AssertionError(f"version {version} was not published in {timeout_s} s")
