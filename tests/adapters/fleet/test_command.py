"""`tensorhub fleet` against fleets on a real Ray cluster, in processes of its own."""

from __future__ import annotations

import contextlib
import http.server
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from fleet_run import Run, command, wait  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(600)]


def test_the_command(one_node: Any, tmp_path: Path) -> None:
    assert command("list")[1].startswith("tensorhub: no run on this Ray cluster has a fleet: one is there once")
    run = Run(1, str(tmp_path / "failures"), fleet_max=4)
    run.until(rollout_0="ready")
    assert command("add", "1", "--job", run.fleet.job) == (0, "the target is 2, it was 1; starting rollout-1\n")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    status, said = command("add", "--url", dead)
    assert status == 1 and said.startswith(f"tensorhub: no server answers at {dead}")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert command("add", "--url", f"{url}/")[1] == f"{url} joins as external-0\n"
        server.shutdown()
    assert command("add", "--url", "127.0.0.1:8000")[0] == 1
    run.until(rollout_0="ready", rollout_1="ready", external_0="ready")
    status, shown = command("list")
    first, *rows, last = shown.splitlines()
    assert status == 0 and first.split()[:4] == ["NAME", "KIND", "STATE", "VERSION"]
    assert [row.split()[:4] for row in rows] == [
        ["rollout-0", "first", "ready", "1"],
        ["rollout-1", "joined", "ready", "1"],
        ["external-0", "external", "ready", "1"],
    ]
    assert last == "target 2, 2 ready; fleet_min 1, fleet_max 4; room for 3 more; 0 requests wait"
    assert "rollout-1 drains: 0 requests" in command("drain", "rollout-1", "--timeout", "5")[1]
    assert "external-0 drains" in command("drain", "--node", "127.0.0.1")[1]  # a host that is no node of Ray's
    run.until(rollout_0="ready")
    assert command("target", "9") == (1, "tensorhub: target 9: fleet_min and fleet_max allow 1 to 4\n")
    assert command("target", "many")[0] == 1 and command("target", "policy")[0] == 1
    status, said = command("drain", "--node", "10.9.9.9")
    assert status == 1 and said.startswith("tensorhub: there is no node '10.9.9.9': there are ")
    assert command("target", "3")[1].startswith("the target is 3, it was 1; starting rollout-2, rollout-3")
    run.until(rollout_0="ready", rollout_2="ready", rollout_3="ready")
    # A second job on the same cluster has a fleet of its own.
    with second_job(one_node.address) as other:
        status, said = command("list")
        assert status == 1 and "2 runs on this Ray cluster have a fleet: choose one by its job, " in said
        assert run.fleet.job in said and other in said
        assert command("list", "--job", other)[0] == 0
        assert "job 77 has no fleet" in command("list", "--job", "77")[1]
        # The guard of a node: told by a signal, it drains the node that it is on, for every job.
        call = [sys.executable, "-m", "tensorhub_plugins.core.cli", "fleet", "guard", "--timeout", "20"]
        guard = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
        assert guard.stdout is not None and "SIGTERM or SIGUSR1 drains this node" in guard.stdout.readline()
        guard.send_signal(signal.SIGTERM)
        said, _ = guard.communicate(timeout=60)
        assert guard.returncode == 0 and "rollout-0 drains" in said and "rollout-2 drains" in said
        assert "no member is there; none will be started there" in said  # the other job's
    assert run.states() == {}
    # The node stays after all.
    node = ray.util.get_node_ip_address()
    assert f"replicas may be started on {node} again" in command("undrain", node)[1]
    assert command("undrain", node) == (1, f"tensorhub: node {node} is not drained\n")
    # Under other names: where there was no room, starts have failed meanwhile.
    wait(lambda: [*run.states().values()] == ["ready"] * 3, lambda: f"{run.fleet.list()}")


@contextlib.contextmanager
def second_job(address: str) -> Iterator[str]:
    script = (
        "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)\n"
        "from fleet_run import Launcher, TrainingOptions, fleet\n"
        "actor = fleet.start(Launcher(''), TrainingOptions()); ray.get(actor.view.remote())\n"
        "print(ray.get_runtime_context().get_job_id(), flush=True); sys.stdin.read()"
    )
    call = [sys.executable, "-c", script, address]
    job = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        yield job.stdout.readlines(1)[-1].strip()
    finally:
        job.kill()
        job.communicate()


def test_no_cluster_is_said() -> None:
    status, said = command("list", "--address", "127.0.0.1:9")
    assert status == 1 and said.splitlines()[-1].startswith("tensorhub: no Ray cluster answers at 127.0.0.1:9")
