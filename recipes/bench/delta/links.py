"""A trainer and a reader on two hosts joined by one link: the second version, with deltas and without."""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

from recipes.bench import network
from recipes.bench.delta.material import stepped, version
from recipes.bench.network import now
from recipes.bench.workers import TIMEOUT_S, HubWorker, Worker

TENSOR_ELEMENTS = 4 << 20


class Following(Worker):
    """A trainer that keeps two versions in host memory, or a reader that follows it."""

    def step(self, percent: float, elements: int) -> None:
        """Make the next version, in which that share of the elements has changed; the first one is new."""
        self.random = getattr(self, "random", np.random.default_rng(1))
        before = getattr(self, "weights", None)
        self.weights = version(self.random, elements) if before is None else stepped(self.random, before, percent)

    def offer(self, number: int) -> float:
        """Publish what was made last; return when that began."""
        tensors = {
            f"w{at}": torch.from_numpy(self.weights[at : at + TENSOR_ELEMENTS].view(np.int16)).view(torch.bfloat16)
            for at in range(0, self.weights.size, TENSOR_ELEMENTS)
        }
        began = now()
        self.client.publish(number, tensors)
        return began

    def follow(self, number: int) -> dict[str, Any]:
        """Read a version, and let the one before go; ended and seconds are those of the read."""
        began = now()
        fetched = self.client.fetch(number, timeout_s=TIMEOUT_S, serve=True)
        ended = now()
        for key in self.client.serving():
            if key.version < number:
                self.client.unpublish(key.version)
        digest = fetched.report.roots[0]
        if next(iter(fetched.roots().values())) != digest:
            raise RuntimeError("other bytes than were published")
        fetched.release()
        report = fetched.report
        wire, by_delta = report.wire_size_bytes, report.delta_size_bytes
        sizes = {"wire_bytes": wire, "delta_bytes": by_delta, "sources": report.sources, "losses": list(report.losses)}
        return {"seconds": ended - began, "ended": ended, **sizes}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    network.require()
    rows = []
    for link in options.link:
        mbit, _, rtt_ms = link.partition("/")
        reason = network.cannot_delay() if float(rtt_ms or 0) else None
        if reason is not None:
            print(f"{link}: not run: {reason}")
            continue
        whole = _pulls(None if link == "free" else float(mbit), float(rtt_ms or 0), "off", options)
        deltas = _pulls(None if link == "free" else float(mbit), float(rtt_ms or 0), "auto", options)
        for percent, off, auto in zip(options.percent, whole, deltas, strict=True):
            rows.append(_row(link, percent, off, auto, options.mib << 20))
    return rows


def _row(link: str, percent: float, off: list[dict[str, Any]], auto: list[dict[str, Any]], size: int) -> dict[str, Any]:
    seconds = [statistics.median(each["seconds"] for each in pulls) for pulls in (off, auto)]
    crossed = [statistics.median(each["crossed"] for each in pulls) for pulls in (off, auto)]
    row = {"link": link, "percent": percent, "whole_s": seconds[0], "delta_s": seconds[1], "whole": off, "deltas": auto}
    print(
        f"{link:8} {percent:6g} %  {seconds[0]:.3f} s -> {seconds[1]:.3f} s ({seconds[0] / seconds[1]:.1f} times)  "
        f"{crossed[0] / size:.3f} -> {crossed[1] / size:.4f} copies  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return row


def _pulls(mbit: float | None, rtt_ms: float, delta: str, options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Return the pulls of each density, of versions that each differ so much from the one before."""
    size_bytes = options.mib << 20
    found: list[list[dict[str, Any]]] = []
    with network.Network() as wires:
        wires.site("east")
        wires.site("west")
        wires.join("east", "west", mbit or 100_000, rtt_ms)
        hub, source, reader = (wires.host(site, None) for site in ("east", "east", "west"))
        with network.stopping(source, reader, hub):
            hub.start(partial(HubWorker, hub.address))
            address = hub.call("address")
            for host, name in ((source, "trainer"), (reader, "reader")):
                host.start(partial(Following, address, name, host.address, 1 << 20, delta=delta))
            source.call("retain", 0)
            source.call("step", 0.0, size_bytes // 2)
            source.call("offer", 1)
            reader.call("follow", 1)
            number = 1
            for percent in options.percent:
                pulls = []
                for _ in range(options.rounds):
                    source.call("step", percent, size_bytes // 2)
                    source.call("offer", number + 1)
                    before = wires.crossed_bytes("west")
                    pulls.append(reader.call("follow", number + 1))
                    pulls[-1]["crossed"] = wires.crossed_bytes("west") - before
                    source.call("unpublish", number)
                    number += 1
                found.append(pulls)
    return found
