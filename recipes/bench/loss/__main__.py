"""The busiest source, or several at once, die in the middle: what it costs in time and in bytes.

    python -m recipes.bench.loss                    # needs root

One trainer more than are killed hold the same version (so that it survives them), six hosts read it at once on links of
the same rate. A round is run undisturbed, and then with a kill -9 of the workers that have sent most, once half of the
bytes of a reader have come. Every round has fresh workers. Bytes are what all hosts received, by their devices, headers
included.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from recipes.bench import network
from recipes.bench.results import save
from recipes.bench.workers import HubWorker, Worker

READERS = 6
GOALS = {"seconds": 1.3, "bytes": 1.1}
VERSION = 1
LOOK_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=400.0, help="of every link, each way")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sources", type=int, default=1, help="that die at once")
    parser.add_argument("--freeze", action="store_true", help="stop the source instead of killing it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    network.require()
    pairs = []
    for number in range(options.rounds):
        calm, disturbed = (_round(number, options, disturb=disturb) for disturb in (False, True))
        readers_left = READERS - sum(victim.startswith("reader") for victim in disturbed["victims"])
        pairs.append(
            {
                "calm": calm,
                "disturbed": disturbed,
                "seconds": disturbed["seconds"] / calm["seconds"],
                "bytes": disturbed["bytes"] / calm["bytes"],
                # The same without what the dead had received: what the others moved beyond their need.
                "others_bytes": disturbed["others_bytes"] / (calm["bytes"] * readers_left / READERS),
            }
        )
        print(
            f"round {number}: {', '.join(disturbed['victims'])} {'frozen' if options.freeze else 'killed'} at "
            f"{disturbed['killed_at']:.0%}: {pairs[-1]['seconds']:.3f} x the time ({calm['seconds']:.2f} s), "
            f"{pairs[-1]['bytes']:.3f} x the bytes, {pairs[-1]['others_bytes']:.3f} x what those who are left need",
            flush=True,
        )
    row = {what: statistics.median(pair[what] for pair in pairs) for what in ("seconds", "bytes", "others_bytes")}
    print(
        f"median {row['seconds']:.3f} x the time (goal {GOALS['seconds']}), {row['bytes']:.3f} x the bytes (goal "
        f"{GOALS['bytes']}), {row['others_bytes']:.3f} x what those who are left need  load {os.getloadavg()[0]:.1f}"
    )
    save(options.json, {"goals": GOALS, **row, "rounds": pairs})


def _round(number: int, options: argparse.Namespace, *, disturb: bool) -> dict[str, Any]:
    size_bytes = options.mib << 20
    with network.Network() as fabric:
        fabric.site("east")
        hub = fabric.host("east", None)
        trainers = [fabric.host("east", options.mbit) for _ in range(options.sources + 1)]
        readers = [fabric.host("east", options.mbit) for _ in range(READERS)]
        hosts = {f"trainer-{index}": host for index, host in enumerate(trainers)}
        hosts |= {f"reader-{index}": host for index, host in enumerate(readers)}
        with network.stopping(*readers, *trainers, hub):
            hub.start(partial(HubWorker, hub.address))
            address = hub.call("address")
            for name, host in hosts.items():
                host.start(partial(Worker, address, name, host.address, size_bytes))
            truth = [trainer.call("fill", number) for trainer in trainers][0]
            for trainer in trainers:
                trainer.call("publish", VERSION)
            before = {name: fabric.traffic_bytes(host) for name, host in hosts.items()}
            for reader in readers:
                reader.tell("read", VERSION)
            began = network.now()
            victims, killed_at = list[str](), 0.0
            if disturb:
                victims, killed_at = _kill_busiest(fabric, hosts, before, size_bytes, options)
            left = [name for name in hosts if name not in victims]
            reports = {name: hosts[name].answer() for name in left if name.startswith("reader")}
            moved = {name: fabric.traffic_bytes(host)[0] - before[name][0] for name, host in hosts.items()}
            for name in reports:
                if hosts[name].call("digest") != truth:
                    raise RuntimeError(f"{name} has other bytes than were published")
            for victim in victims:  # frozen ones
                os.kill(hosts[victim].process.pid, signal.SIGKILL)
    return {
        "seconds": max(r["ended"] for r in reports.values()) - began,
        "bytes": sum(moved.values()),
        "others_bytes": sum(moved[name] for name in left),
        "victims": victims,
        "killed_at": killed_at,
        "losses": {name: r["losses"] for name, r in reports.items()},
        "sources": {name: r["sources"] for name, r in reports.items()},
    }


def _kill_busiest(
    fabric: network.Network,
    hosts: dict[str, network.Host],
    before: dict[str, tuple[int, int]],
    size_bytes: int,
    options: argparse.Namespace,
) -> tuple[list[str], float]:
    """Kill the busiest sources once the first reader has half. Return their names, and how much that reader had."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        traffic = {name: fabric.traffic_bytes(host) for name, host in hosts.items()}
        share = max(traffic[name][0] - before[name][0] for name in hosts if name.startswith("reader")) / size_bytes
        if share >= 0.5:
            sent = {name: traffic[name][1] - before[name][1] for name in hosts}
            victims = sorted(sent, key=lambda name: sent[name])[-options.sources :]
            for victim in victims:
                os.kill(hosts[victim].process.pid, signal.SIGSTOP if options.freeze else signal.SIGKILL)
            return victims, share
        time.sleep(LOOK_S)
    raise TimeoutError("no reader came to its half")


if __name__ == "__main__":
    main()
