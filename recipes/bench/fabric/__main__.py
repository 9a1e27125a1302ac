"""One data centre: a trainer and K hosts that all want the new version at once, on links of the same rate.

    python -m recipes.bench.fabric                  # K = 1, 2, 4, 8; needs root

Every host is a network namespace with one link, shaped in both directions. Time runs from the trainer's publish (with
its digests) until the last host has all bytes, verified. The limit, measured between two of the same hosts in the same
round, is one bare TCP stream of the same bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from recipes.bench import network
from recipes.bench.results import save
from recipes.bench.workers import HubWorker, Worker, bare_stream, check_and_withdraw, read_at_once

GOALS = {1: 1.05, 2: 1.05, 4: 1.15, 8: 1.15}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8], help="that read")
    parser.add_argument("--mbit", type=float, default=400.0, help="of every link, each way")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    network.require()
    rows = [measure(count, options) for count in options.hosts]
    save(options.json, {"goals": GOALS, "rows": rows})


def measure(count: int, options: argparse.Namespace) -> dict[str, Any]:
    size_bytes = options.mib << 20
    with network.Network() as fabric:
        fabric.site("east")
        hub, source, *readers = (fabric.host("east", options.mbit) for _ in range(count + 2))
        with network.stopping(*readers, source, hub):
            hub.start(partial(HubWorker, hub.address))
            address = hub.call("address")
            source.start(partial(Worker, address, "trainer", source.address, size_bytes))
            for index, reader in enumerate(readers):
                reader.start(partial(Worker, address, f"reader-{index}", reader.address, size_bytes))
            source.call("retain", 0)
            # The first is one to warm up.
            rounds = [_round(version, source, readers) for version in range(1, options.rounds + 2)][1:]
    ratios = [r["seconds"] / r["limit_s"] for r in rounds]
    row = {
        "hosts": count,
        "mib": options.mib,
        "mbit": options.mbit,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": [r["seconds"] for r in rounds],
        "limit_s": [r["limit_s"] for r in rounds],
        "chains": [r["chain"] for r in rounds],
        "load": os.getloadavg()[0],
    }
    print(
        f"K={count}  {row['ratio']:.3f} x one bare stream ({', '.join(f'{r:.3f}' for r in ratios)}; goal "
        f"{GOALS.get(count, '-')})  limit {statistics.median(row['limit_s']):.3f} s  load {row['load']:.1f}",
        flush=True,
    )
    return row


def _round(version: int, source: network.Host, readers: list[network.Host]) -> dict[str, Any]:
    truth = source.call("fill", version)
    limit_s = bare_stream(source, readers[0])
    began, reports = read_at_once(version, source, readers)
    check_and_withdraw(version, truth, source, readers)
    return {
        "limit_s": limit_s,
        "seconds": max(r["ended"] for r in reports) - began,
        "chain": {f"reader-{i}": r["sources"] for i, r in enumerate(reports)},
        "losses": [loss for r in reports for loss in r["losses"]],
    }


if __name__ == "__main__":
    main()
