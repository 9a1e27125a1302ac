"""An engine's processes end when their server is killed, of which vLLM's engine process itself takes no notice."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")
if not hasattr(os, "pidfd_open"):
    pytest.skip("needs Linux 5.3 or newer", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]

# server -> engine -> worker, as verl and vLLM start them. The worker watches the server (argument "watch") or not.
PROCESS = textwrap.dedent(
    """
    import os, subprocess, sys, time
    role, watch = sys.argv[1:]
    if role == "server":
        os.environ["TENSORHUB_SERVER_PID"] = str(os.getpid())
    if role != "worker":
        child = {"server": "engine", "engine": "worker"}[role]
        subprocess.Popen([sys.executable, "-c", os.environ["PROCESS"], child, watch])
    elif watch == "watch":
        from tensorhub_plugins.verl.processes import end_with_server
        end_with_server()
    print(role, os.getpid(), flush=True)
    time.sleep(600)
    """
)


def start(watch):
    environment = {**os.environ, "PROCESS": PROCESS, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "server", watch], env=environment, stdout=subprocess.PIPE, text=True
    )
    pids = dict(server.stdout.readline().split() for _ in range(3))
    return server, {role: int(pid) for role, pid in pids.items()}


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("watch", ["watch", "do not"])
def test_an_engine_ends_with_its_server(watch):
    server, pids = start(watch)
    try:
        server.kill()
        server.wait()
        deadline = time.monotonic() + (20 if watch == "watch" else 1)
        while time.monotonic() < deadline and (lives(pids["engine"]) or lives(pids["worker"])):
            time.sleep(0.02)
        ended = not lives(pids["engine"]) and not lives(pids["worker"])
        assert ended == (watch == "watch")  # without the watch they stay: the negative control
    finally:
        for role in ("engine", "worker"):
            if lives(pids[role]):
                os.kill(pids[role], signal.SIGKILL)
