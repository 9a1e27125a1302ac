"""Two data centres joined by one thin link: a trainer and three readers in one, four readers in the other (--hosts 4).

    python -m recipes.bench.two_sites               # without and with 50 ms of round-trip time; needs root

All readers want the new version at once: first one that has nothing to do with the last, then one in which
--percent of the elements has changed, by deltas from the last, which all of them hold. The limit, measured in the same
round, is one bare TCP stream of as many bytes over the link, from the trainer's host; what crosses the link is counted
by its device, headers included, for the stream and for the store. The round-trip time is made by a small forwarder
(delay.c, built with `cc`) between two TAP devices, because netem is missing in many kernels; it needs /dev/net/tun.
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from recipes.bench import network
from recipes.bench.delta.links import Following
from recipes.bench.results import save
from recipes.bench.workers import HubWorker, Worker, bare_stream, check_and_withdraw, read_at_once

WHOLE, BY_DELTAS = ("read", "publish"), ("follow", "offer")  # of a reader and of the trainer
COPIES_BY_DELTAS = 0.01
GOALS = {"seconds": 1.10, "copies": 1.02, "copies by deltas at 1 %": COPIES_BY_DELTAS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=400.0, help="of every host's link, each way")
    parser.add_argument("--wan-mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 50.0])
    parser.add_argument("--hosts", type=int, default=4, help="of each site, the trainer's included")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--percent", type=float, default=1.0, help="changed, of what is read by deltas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    network.require()
    rows = []
    for rtt_ms in options.rtt_ms:
        reason = network.cannot_delay() if rtt_ms else None
        if reason is not None:
            print(f"{rtt_ms:g} ms: not run: {reason}")
        else:
            rows += [measure(rtt_ms, options, None), measure(rtt_ms, options, options.percent)]
    save(options.json, {"goals": GOALS, "rows": rows})


def measure(rtt_ms: float, options: argparse.Namespace, percent: float | None) -> dict[str, Any]:
    """Measure one link. percent: changed since the last version; None: whole versions."""
    make = Worker if percent is None else Following
    size_bytes = options.mib << 20
    with network.Network() as wires:
        wires.site("east")
        wires.site("west")
        wires.join("east", "west", options.wan_mbit, rtt_ms)
        hub = wires.host("east", options.mbit)
        east = [wires.host("east", options.mbit) for _ in range(options.hosts)]
        west = [wires.host("west", options.mbit) for _ in range(options.hosts)]
        source = east[0]
        with network.stopping(*east, *west, hub):
            hub.start(partial(HubWorker, hub.address))
            address = hub.call("address")
            for place, hosts in (("east", east), ("west", west)):
                for index, host in enumerate(hosts):
                    name = "trainer" if host is source else f"{place}-{index}"
                    host.start(partial(make, address, name, host.address, size_bytes, data_center=place))
            source.call("retain", 0)
            numbers = range(1, options.rounds + 2)
            rounds = [_round(v, wires, source, east[1:], west, size_bytes, percent) for v in numbers][1:]
    ratios = [r["west_s"] / r["limit_s"] for r in rounds]
    copies = [r["wan_bytes"] / r["limit_bytes"] for r in rounds]
    row = {
        "rtt_ms": rtt_ms,
        "percent": percent,
        "wan_mbit": options.wan_mbit,
        "mib": options.mib,
        "hosts": options.hosts,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "copies": statistics.median(copies),
        "payload_copies": statistics.median(r["payload_bytes"] / size_bytes for r in rounds),
        "rounds": rounds,
        "load": os.getloadavg()[0],
    }
    what = "whole" if percent is None else f"{percent:g} % changed"
    goals = f"goals {GOALS['seconds']}, {GOALS['copies']}" if percent is None else f"goal at 1 % {COPIES_BY_DELTAS}"
    print(
        f"{rtt_ms:3.0f} ms  {what}: {row['ratio']:.3f} x one bare stream ({', '.join(f'{r:.3f}' for r in ratios)}), "
        f"{row['copies']:.4f} copies over the link ({goals}); {row['payload_copies']:.3f} of the weights from there  "
        f"limit {statistics.median(r['limit_s'] for r in rounds):.2f} s  load {row['load']:.1f}",
        flush=True,
    )
    return row


def _round(
    version: int,
    wires: network.Network,
    source: network.Host,
    east: list[network.Host],
    west: list[network.Host],
    size_bytes: int,
    percent: float | None,
) -> dict[str, Any]:
    truth = source.call("fill", version)  # which the bare stream carries, too
    if percent is not None:
        source.call("step", percent, size_bytes // 2)
    before = wires.crossed_bytes("west")
    limit_s = bare_stream(source, west[0])
    between = wires.crossed_bytes("west")
    readers = [*east, *west]
    began, reports = read_at_once(version, source, readers, *(WHOLE if percent is None else BY_DELTAS))
    after = wires.crossed_bytes("west")
    if percent is None:
        check_and_withdraw(version, truth, source, readers)
    elif version > 1:
        source.call("unpublish", version - 1)
    far = reports[len(east) :]
    return {
        "limit_s": limit_s,
        "limit_bytes": between - before,
        "wan_bytes": after - between,
        "payload_bytes": sum(n for r in far for name, n in r["sources"].items() if not name.startswith("west")),
        "west_s": max(r["ended"] for r in far) - began,
        "east_s": max(r["ended"] for r in reports[: len(east)]) - began,
        "losses": [loss for r in reports for loss in r["losses"]],
        "sources": [r["sources"] for r in reports],
    }


if __name__ == "__main__":
    main()
