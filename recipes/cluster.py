"""A Ray cluster of several nodes on this machine, for runs that gain and lose nodes.

    python -m recipes.cluster --temp-dir RAY --run RUN --gpus 2 2 2   # the head and two more, with pretended GPUs

The head is there at once; the other nodes join when a file RUN/join is made. What a framework itself needs (its
trainer, its agent loops, its rewards) is then on the head, and on the other nodes only what may be lost.

--sites SITE:NAMESPACE:ADDRESS ... puts each node into a network namespace that is there (as root), and labels it with
its site as `ray start --labels tensorhub.io/data-center=SITE` does.

Runs until it is ended, and ends its nodes then. RUN/nodes.json says the cluster's address and, for every node, its
name and the process to kill when it shall be lost. RAY becomes Ray's own folder and must be short (107 characters with
all that Ray adds). Ray admits no process to a cluster without its token: a client sets RAY_AUTH_MODE=token and
RAY_AUTH_TOKEN_PATH=RAY/token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

START_TIMEOUT_S = 300.0  # of one node, on a busy machine
POLL_S = 0.2
IS_UP = "This command will now block forever"  # what `ray start` says then
OBJECTS_BYTES = 200_000_000  # of shared memory, on each node
CORES = 32  # of which Ray believes that each node has them: they are counted, not used
QUIET = {
    "RAY_prestart_worker_first_driver": "0",  # else a node starts a process for each of its cores, wanted or not
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else a node that ends waits half a minute for a head that has ended
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--temp-dir", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", required=True, help="of the head, and of every other node")
    parser.add_argument("--sites", nargs="*", default=[], help="of each node, as SITE:NAMESPACE:ADDRESS")
    options = parser.parse_args()
    if options.sites and len(options.sites) != len(options.gpus):
        parser.error("give as many sites as nodes")
    signal.signal(signal.SIGTERM, _end)
    token = options.temp_dir / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    started: list[subprocess.Popen[bytes]] = []
    try:
        nodes: list[dict[str, Any]] = []
        for rank, gpus in enumerate(options.gpus):
            while rank > 0 and not (options.run / "join").exists():
                if started[0].poll() is not None:
                    return
                time.sleep(POLL_S)
            where = place(*options.sites[rank].split(":")) if options.sites else {}
            nodes.append(start(options.temp_dir, rank, gpus, started, **where))
            _tell(options.run, {"address": _address(options.temp_dir), "token_path": str(token), "nodes": nodes})
        started[0].wait()  # the head: without it there is no cluster
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _end(*_: object) -> None:
    """End once: both the process that ends our group and run.sh signal us, and a second signal would interrupt this."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def place(site: str, namespace: str, address: str) -> dict[str, Any]:
    """Return the arguments of `start` for a node there; its processes find each other by that address, not by name."""
    return {
        "inside": ("ip", "netns", "exec", namespace),
        "arguments": (f"--node-ip-address={address}", f"--labels=tensorhub.io/data-center={site}"),
        "GLOO_SOCKET_IFNAME": "eth0",
        "TENSORHUB_HOST": namespace,  # else all nodes are one host, by its name, and share memory
        "VLLM_HOST_IP": address,
    }


def start(
    folder: Path,
    rank: int,
    gpus: int,
    started: list[subprocess.Popen[bytes]],
    *,
    inside: Sequence[str] = (),
    arguments: Sequence[str] = (),
    **more: str,
) -> dict[str, Any]:
    """Start one node; return its name, the process of its raylet, and how many GPUs it reports.

    inside: the prefix of its command, e.g. to enter a network namespace; arguments: of `ray start`; more: of its
    environment.
    """
    name = "head" if rank == 0 else f"node-{rank}"
    where = (
        ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}"]
        if rank == 0
        else [f"--address={_address(folder)}"]
    )
    command = [
        *(*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(f"--node-name={name}", f"--num-gpus={gpus}", f"--num-cpus={CORES}"),
        *(f"--object-store-memory={OBJECTS_BYTES}", *where, *arguments),
    ]
    log = open(folder / f"{name}.log", "wb")  # noqa: SIM115  the process keeps it
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment = {**os.environ, **QUIET, **token, **more}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    started.append(process)
    deadline = time.monotonic() + START_TIMEOUT_S
    while IS_UP not in (folder / f"{name}.log").read_text(errors="replace"):
        if process.poll() is not None and rank > 0:  # Ray itself waits for half a minute only
            process = started[-1] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        if process.poll() is not None or time.monotonic() > deadline:
            _fail(f"{name} did not start: see {folder / f'{name}.log'}")
        time.sleep(POLL_S)
    return {"name": name, "raylet": _raylets(process.pid)[0], "gpus": gpus}


def _raylets(pid: int) -> list[int]:
    """Return the raylets among the children of `ray start`, some of which end meanwhile."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child.pid] if child.name() == "raylet" else []
    return found


def _tell(run: Path, cluster: dict[str, Any]) -> None:
    partial = run / "nodes.json.partial"
    partial.write_text(json.dumps(cluster))
    partial.rename(run / "nodes.json")


def _address(folder: Path) -> str:
    return (folder / "ray_current_cluster").read_text().strip()


def _fail(sentence: str) -> NoReturn:
    sys.exit(f"recipes.cluster: {sentence}")


if __name__ == "__main__":
    main()
