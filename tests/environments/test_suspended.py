"""A machine that is suspended, with all that runs on it: its hub hears its workers before it gives any of them up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub_plugins.core.cli import fetch_status

SILENCE_S = 2.0  # after which this hub gives a worker up
STOPPED_S = 2 * SILENCE_S
SOON_S = 30.0

pytestmark = pytest.mark.heavy

WORKER = """
import sys, threading, torch
from tensorhub_plugins.core import Client
client = Client(sys.argv[1], run="r", model="m", replica="trainer", transports=["tcp"])
client.publish(3, {"w": torch.ones(3)})
print("published", flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def started(*command: str, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and its first line."""
    with open(log, "w") as file:
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def visible(address: str) -> list[int]:
    report = fetch_status(address, timeout_s=SOON_S)
    return [v["version"] for model in report["models"] for v in model["versions"] if v["visible"]]


@pytest.mark.parametrize("stops", ["all", "hub", "control: worker"])
def test_after_a_suspension_nothing_is_lost(tmp_path: Path, stops: str) -> None:
    limits = ("--session-timeout-s", str(SILENCE_S), "--heartbeat-s", "0.2", "--grace-s", "0")
    server = ("-m", "tensorhub_plugins.core.cli", "server", "--address", "tcp://127.0.0.1:0", *limits)
    with started(*server, log=tmp_path / "hub") as (hub, line):
        address = re.sub(r"tensorhub server at (\S+)\n", r"\1", line)
        with started("-c", WORKER, address, log=tmp_path / "worker") as (worker, said):
            assert said == "published\n", (tmp_path / "worker").read_text()
            assert visible(address) == [3]
            stopped = {"all": [worker.pid, hub.pid], "hub": [hub.pid], "control: worker": [worker.pid]}[stops]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)  # what is tried
            for pid in reversed(stopped):  # the hub first, which is the harder case
                os.kill(pid, signal.SIGCONT)
            end = time.monotonic() + SOON_S
            while visible(address) != [3]:
                assert time.monotonic() < end
            time.sleep(2 * SILENCE_S if stops != "control: worker" else 0)  # or it might be given up only now
            assert visible(address) == [3]
        log = (tmp_path / "hub").read_text()
        assert ("not heard for" in log.partition("trainer/0 left")[0]) == (stops == "control: worker"), log
        assert ("is lost with its last holder" in log) == (stops == "control: worker"), log
        assert (": it stood still, or" in log) == (stops != "control: worker"), log
