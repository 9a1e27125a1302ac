"""How fast the rdma transport reads, beside ib_read_bw on the same pair of hosts in the same run.

    host A    python -m recipes.bench.rdma source --host 10.0.0.1 --gib 8
    host B    python -m recipes.bench.rdma reader rdma://10.0.0.1:40123 --json out/bench_rdma.json

What is read are whole shards, as the client reads them: into a slab, every segment digested. ib_read_bw (perftest)
reads the same few bytes again and again and looks at none: the limit to compare with, not to reach.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tensorhub_plugins.core import ShardKey, Slab, SourceLost, TensorSpec
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.transports import Offer, Transport
from tensorhub_plugins.core.transports.rdma.transport import RdmaTransport

KEY = ShardKey(1, "checkpoint")
TENSOR_SIZE_BYTES = 64 << 20
PERFTEST_PORT = 18515
PERFTEST_SIZE_BYTES = 1 << 20  # what the transport reads at once
PERFTEST_S_MAX = 120.0
READ_S_MAX = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="as TENSORHUB_RDMA_DEVICES: mlx5_0,mlx5_1")
    roles = parser.add_subparsers(dest="role", required=True)
    source = roles.add_parser("source", help="serve a shard until interrupted")
    source.add_argument("--host", required=True, help="this host's address for the reader")
    source.add_argument("--gib", type=float, default=4.0)
    reader = roles.add_parser("reader", help="read it, and report")
    reader.add_argument("endpoint", help="what the source printed: rdma://HOST:PORT")
    reader.add_argument("--repeats", type=int, default=5)
    reader.add_argument("--json", type=Path)
    options = parser.parse_args()
    devices = options.devices.split(",") if options.devices else None
    if options.role == "source":
        be_source(options.host, int(options.gib * (1 << 30)), devices)
    else:
        report = be_reader(options.endpoint, options.repeats, devices)
        print(as_text(report))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")


# --- the source ---


class OneOffer:
    """A shelf of one shard, for ever."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer

    def find(self, key: ShardKey) -> Offer | None:
        return self.offer if key == self.offer.key else None

    def await_offer(self, key: ShardKey, as_of: int, deadline: float) -> Offer | None:
        return self.find(key)


def be_source(host: str, size_bytes: int, devices: list[str] | None) -> None:
    specs = [TensorSpec(f"t{i:05d}", "uint8", (n,), n) for i, n in enumerate(_sizes(size_bytes))]
    slab = Slab.allocate(specs)
    for index, name in enumerate(slab.tensors()):
        slab.write(name, torch.arange(index, index + specs[index].size_bytes).to(torch.uint8))
    offer = Offer(KEY, slab.manifest(), slab)
    offer.mark_all_ready()
    with contextlib.closing(RdmaTransport(host, devices=devices)) as transport:
        endpoint = transport.serve(OneOffer(offer))
        port = transport.nics[0].port
        arguments = ["-d", port.device, "-i", str(port.number), "-x", str(port.gid_index)]
        threading.Thread(target=_perftest_server, args=(arguments,), daemon=True).start()
        print(
            f"serving {size_bytes / 1e9:.2f} GB from {', '.join(str(nic.port) for nic in transport.nics)}", flush=True
        )
        print(f"python -m recipes.bench.rdma reader {endpoint}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _sizes(size_bytes: int) -> Iterator[int]:
    while size_bytes > 0:
        yield min(size_bytes, TENSOR_SIZE_BYTES)
        size_bytes -= TENSOR_SIZE_BYTES


def _whole(target: Slab) -> list[Move]:
    return [Move(0, 0, target.size_bytes)]


def _perftest_server(arguments: list[str]) -> None:
    """Run one ib_read_bw after the other: each serves one reader."""
    while shutil.which("ib_read_bw") is not None:
        subprocess.run(_perftest(arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.1)  # not to spin where it cannot start


def _perftest(arguments: list[str]) -> list[str]:
    return ["ib_read_bw", *arguments, "-s", str(PERFTEST_SIZE_BYTES), "-p", str(PERFTEST_PORT), "--report_gbits", "-F"]


# --- the reader ---


def be_reader(endpoint: str, repeats: int, devices: list[str] | None) -> dict[str, Any]:
    host = endpoint.removeprefix("rdma://").rpartition(":")[0].strip("[]")
    with contextlib.closing(RdmaTransport(devices=devices)) as transport:
        rails = [str(nic.port) for nic in transport.nics]
        port = transport.nics[0].port
        limit = [perftest_gb_per_s(host, ["-d", port.device, "-i", str(port.number), "-x", str(port.gid_index)])]
        size_bytes, seconds = _read_repeatedly(transport, endpoint, repeats + 1)
        limit.append(perftest_gb_per_s(host, ["-d", port.device, "-i", str(port.number), "-x", str(port.gid_index)]))
    known = [each for each in limit if each is not None]
    rate = size_bytes / 1e9 / statistics.median(seconds[1:])
    return {
        "rails": rails,
        "size_bytes": size_bytes,
        "first_s": seconds[0],  # with connecting and registering
        "later_s": seconds[1:],
        "gb_per_s": rate,
        "ib_read_bw_gb_per_s": limit,  # over one rail, before and after
        "ratio": rate / statistics.mean(known) if known else None,
    }


def _read_repeatedly(transport: Transport, endpoint: str, times: int) -> tuple[int, list[float]]:
    target: Slab | None = None
    seconds = []
    size_bytes = 0
    for _ in range(times):
        deadline = time.monotonic() + READ_S_MAX
        began = time.monotonic()
        with contextlib.closing(transport.connect(endpoint, deadline=deadline)) as link:
            manifest = link.open(KEY, 1, deadline=deadline)
            if target is None:
                allocating = time.monotonic()
                target = Slab.allocate(manifest.tensors)
                began += time.monotonic() - allocating  # which is not what is measured
            for segment in link.read(range(manifest.segment_count), target, _whole(target), deadline=deadline):
                if link.digest(segment) != manifest.digest(segment):
                    raise SystemExit(f"segment {segment} arrived with other bytes")
            if not link.check(deadline=deadline):
                raise SourceLost("the source withdrew what was read", peer=endpoint)
            seconds.append(time.monotonic() - began)
            size_bytes = manifest.size_bytes
    return size_bytes, seconds


def perftest_gb_per_s(host: str, arguments: list[str]) -> float | None:
    """Return ib_read_bw's average in GB/s; None, with the reason on stderr, if it cannot be measured."""
    if shutil.which("ib_read_bw") is None:
        print("ib_read_bw is not installed (perftest): no limit to compare with", file=sys.stderr)
        return None
    try:
        done = subprocess.run([*_perftest(arguments), host], capture_output=True, text=True, timeout=PERFTEST_S_MAX)
    except subprocess.TimeoutExpired:
        print(f"ib_read_bw did not end within {PERFTEST_S_MAX:g} s", file=sys.stderr)
        return None
    rate = parse_perftest(done.stdout)
    if rate is None:
        print(f"ib_read_bw: {(done.stderr or done.stdout).strip()[-500:]}", file=sys.stderr)
    return rate


def parse_perftest(output: str) -> float | None:
    """Return the average column of its table ("#bytes #iterations peak average messages"), from Gb/s to GB/s."""
    rows = re.findall(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", output, re.MULTILINE)
    return float(rows[-1]) / 8 if rows else None


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"rails                {', '.join(report['rails'])}",
        f"shard                {report['size_bytes'] / 1e9:.2f} GB",
        f"first read           {report['first_s']:.3f} s (connects and registers)",
        f"later reads          {', '.join(f'{s:.3f}' for s in report['later_s'])} s",
        f"rdma transport       {report['gb_per_s']:.2f} GB/s (median, digested)",
        "ib_read_bw           "
        + ", ".join("unknown" if each is None else f"{each:.2f} GB/s" for each in report["ib_read_bw_gb_per_s"]),
    ]
    if report["ratio"] is not None:
        lines.append(f"ratio                {report['ratio']:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
