"""A worker whose clocks are others than the hub's: a container that was moved from another machine has its time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest
import torch

from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.process_lifetime import is_gone

SOON_S, AHEAD_S = 30.0, 10_000_000

pytestmark = pytest.mark.heavy

WORKER = """
import sys, time, torch
from tensorhub_plugins.core import Client
from tensorhub_plugins.core.process_lifetime import identity
client = Client(sys.argv[1], run="r", model="m", replica="trainer")
client.publish(1, {"w": torch.arange(1000)})
print(time.monotonic(), identity(), flush=True)
sys.stdin.read()
"""


def unshare(*options: str) -> list[str]:
    command = [shutil.which("unshare") or "", "--fork", "--kill-child", *options]
    if not command[0] or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a namespace of clocks needs root, Linux 5.6 and unshare of util-linux")
    return command


def test_a_worker_with_clocks_of_its_own_is_read_and_not_taken_for_dead() -> None:
    """When its process was started is counted from another boot there: it does not prove that this one has ended."""
    ahead = ("--time", "--monotonic", str(AHEAD_S), "--boottime", str(AHEAD_S))
    with start_server() as hub:
        command = [*unshare(*ahead), sys.executable, "-c", WORKER, hub.address]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None
            now, _, identity = worker.stdout.readline().strip().partition(" ")
            assert float(now) > time.monotonic() + AHEAD_S / 2
            assert identity and not is_gone(identity)
            with Client(hub.address, run="r", model="m", replica="rollout") as rollout:
                fetched = rollout.fetch(1, timeout_s=SOON_S)
                assert torch.equal(fetched.tensors()["w"], torch.arange(1000))
                fetched.release()
        finally:
            worker.kill()
            worker.communicate()
