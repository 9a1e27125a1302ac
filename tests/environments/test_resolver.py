"""The system's own resolver, which asks a name server that never answers: in a mount and a network of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S, LATE_S = 1.0, 5.0  # of each call; beyond it, on a busy machine
RESOLVER_S = 30  # before it gives up

pytestmark = pytest.mark.heavy

INSIDE = """
import json, socket, sys, threading, time
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.9", 53))  # takes every question
ended = threading.Event()

def ask():
    try:
        socket.getaddrinfo("hub", 7070)
    except OSError:
        pass
    ended.set()

threading.Thread(target=ask, daemon=True).start()
from tensorhub_plugins.core import Client, TensorHubError, start_server
from tensorhub_plugins.core.cli import main
TIMEOUT_S, HUB = float(sys.argv[1]), "tcp://hub:7070"

def make(address=HUB, **options):
    Client(address, run="r", model="m", replica="a", connect_timeout_s=TIMEOUT_S, **options)

def command(*arguments):
    assert main([*arguments, "--hub", HUB, "--timeout", str(TIMEOUT_S)]) == (2 if arguments[0] == "status" else 1)
    raise TensorHubError("as it has said")

def tried(*arguments):
    assert main([*arguments, "--timeout", str(TIMEOUT_S)]) == 1
    raise TensorHubError("as it has said")

hub = start_server()
calls = {
    "Client": make,
    "Client, advertise_host": lambda: make(transports=["tcp"], advertise_host="127.0.0.1"),
    "Client, several": lambda: make(HUB + ",tcp://other:7070", transports=["tcp"]),
    "Client, a name to advertise": lambda: make(hub.address, transports=["tcp"], advertise_host="me"),
    "Server": lambda: start_server("tcp://hub:0", insecure=True),
    "status": lambda: command("status"),
    "pin": lambda: command("pin", "1", "--model", "m"),
    "unpin": lambda: command("unpin", "--model", "m"),
    "withdraw": lambda: command("withdraw", "1", "--model", "m"),
    "bench": lambda: tried("bench", "hub:1"),
    "doctor machine": lambda: tried("doctor", "machine", "--hub", hub.address, "--with", "hub:1"),
}
seconds = {}
for name, call in calls.items():
    began = time.monotonic()
    try:
        call()
    except TensorHubError as error:
        seconds[name] = time.monotonic() - began, str(error)
print(json.dumps({"seconds": seconds, "the resolver has ended": ended.is_set()}))
"""


def test_no_call_and_no_command_waits_for_the_resolver(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-mn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount and a network of its own need root, or user namespaces")
    (tmp_path / "resolv.conf").write_text(f"nameserver 127.0.0.9\noptions timeout:{RESOLVER_S} attempts:1\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = "".join(f"mount --bind {tmp_path}/{name} /etc/{name} && " for name in ("resolv.conf", "nsswitch.conf"))
    arguments = [unshare, "-mn", "sh", "-c", f'{mounts} ip link set lo up && exec "$@"', "sh"]
    command = [*arguments, sys.executable, "-c", INSIDE, str(TIMEOUT_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["seconds"]) == 11
    for name, (seconds, error) in found["seconds"].items():
        assert seconds < (5.0 if name == "Server" else TIMEOUT_S) + LATE_S, (name, error)
    total_s = sum(seconds for seconds, _ in found["seconds"].values())
    # The control: the system itself would have kept each of them as long.
    assert total_s > RESOLVER_S or not found["the resolver has ended"]
