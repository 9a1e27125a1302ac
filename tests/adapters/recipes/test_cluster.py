"""A Ray cluster on this machine whose nodes are at two sites: namespaces, addresses and labels are as they are told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("psutil")

from recipes.bench import network

ROOT = Path(__file__).resolve().parents[3]
START_S = 240

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(2 * START_S + 60),
    pytest.mark.skipif(bool(network.missing()), reason=network.missing() or ""),
]

# In the east: where a process on every node is, as the store has it.
LOOK = """
import json, os, ray, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)

def look():
    from tensorhub_plugins.core.options import TrainingOptions
    from tensorhub_plugins.vllm.ray.config import location_of, node_address
    return location_of(TrainingOptions()).data_center, node_address()

while len(ray.nodes()) < 2:  # its raylet runs, and has not said so to the head yet
    time.sleep(0.1)
there = [On(node["NodeID"], soft=False) for node in ray.nodes()]
asked = [ray.remote(look).options(num_cpus=0, scheduling_strategy=where).remote() for where in there]
print(json.dumps(sorted(ray.get(asked))))
"""


def test_nodes_are_at_their_sites() -> None:
    folder = Path(tempfile.mkdtemp(prefix="th"))  # short, for Ray's sockets
    environment = dict(os.environ)
    with network.Network() as wires:
        hosts = {}
        for site in ("east", "west"):
            wires.site(site)
            hosts[site] = wires.host(site, 1000)
        wires.join("east", "west", 100)
        sites = [f"{site}:{host.name}:{host.address}" for site, host in hosts.items()]
        inside = ["ip", "netns", "exec", hosts["east"].name, sys.executable]
        command = [*inside, "-m", "recipes.cluster", "--temp-dir", folder, "--run", folder, "--gpus", "1", "1"]
        (folder / "join").touch()
        cluster = subprocess.Popen([*map(str, command), "--sites", *sites], env=environment, cwd=ROOT)
        try:
            deadline = time.monotonic() + START_S
            while len((nodes := _read(folder / "nodes.json")).get("nodes", ())) < 2:
                assert cluster.poll() is None and time.monotonic() < deadline, "no cluster"
                time.sleep(0.2)
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": nodes["token_path"]}
            environment.update({"RAY_ADDRESS": nodes["address"], **token})
            done = subprocess.run(
                [*inside, "-c", LOOK], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=START_S
            )
            assert done.returncode == 0, done.stderr[-2000:]
            found = json.loads(done.stdout.splitlines()[-1])
            assert found == [[site, host.address] for site, host in hosts.items()]
        finally:
            cluster.send_signal(signal.SIGTERM)
            cluster.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


def _read(file: Path) -> dict[str, str]:
    return dict(json.loads(file.read_text())) if file.exists() else {}
