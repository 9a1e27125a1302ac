"""How long a trainer that resumes waits for its weights: from its checkpoint, and from a worker that holds them.

    python -m recipes.bench.recovery                  # 512 MB, five rounds
    python -m recipes.bench.recovery --mb 1024 --disk /mnt/checkpoints
    python -m recipes.bench.recovery --link 1000 10000   # the checkpoint on another host, see link.py

The checkpoint is a file of torch.save, as verl's of one rank, read with torch.load and copied into the
parameters: from a disk after its pages were dropped, from the page cache, from tmpfs. The store is all that
`Recovery.resume` does: it searches the version, reads it with all digests, copies it into the parameters, and compares
these. The holder is another process of this host, read by shared memory, or by TCP over loopback as from another host.
The ways take turns. Each start of a trainer has a client of its own, which is connected before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from recipes.bench.recovery import link
from recipes.bench.recovery.trainer import TIMEOUT_S, copy, load, made, recovery
from recipes.bench.results import save
from tensorhub_plugins.core import Client, start_server

TMPFS = "/dev/shm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="a folder on the disk (default: this one)")
    parser.add_argument("--link", type=float, nargs="+", help="Mbit/s between trainer and checkpoint, in turns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.link:
        save(options.json, {"mb": options.mb, "link": {mbit: link.measure(mbit, options) for mbit in options.link}})
        return
    weights = made(options.mb)
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    target = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        tempfile.TemporaryDirectory(dir=TMPFS) as memory,
        start_server() as server,
        contextlib.ExitStack() as started,
    ):
        files = {place: Path(place, "model.pt") for place in (disk, memory)}
        for file in files.values():
            torch.save(weights, file)
        _publish(server.address, weights, Path(disk))
        with _holder(server.address):
            ways: dict[str, Callable[[], object]] = {
                "one copy": lambda: copy(weights, target),
                "disk, cold": lambda: load(files[disk], parameters),
                "disk, in the page cache": lambda: load(files[disk], parameters),
                "tmpfs": lambda: load(files[memory], parameters),
            }
            for _ in range(options.rounds):
                for name in ("shm", "tcp"):
                    client = started.enter_context(_client(server.address, name))
                    ways[f"store, {name}"] = partial(recovery(client, parameters).resume, disk, TIMEOUT_S)
                for way, call in ways.items():
                    for tensor in parameters.values():
                        tensor.zero_()
                    if way == "disk, cold":
                        _drop(files[disk])
                    began = time.perf_counter()
                    assert call() is not False
                    seconds.setdefault(way, []).append(time.perf_counter() - began)
                    assert way == "one copy" or all(torch.equal(parameters[name], weights[name]) for name in weights)
    best = statistics.median(seconds["store, shm"])
    for way, taken in seconds.items():
        median = statistics.median(taken)
        print(
            f"{way:25} {median:6.2f} s ({min(taken):.2f} to {max(taken):.2f})  {median / best:5.2f} x the store by shm"
        )
    save(options.json, {"mb": options.mb, "seconds": seconds})


def _publish(address: str, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Publish version 1, and leave its note."""
    client = Client(address, run="r", model="m", replica="publisher")
    client.publish(1, weights)
    recovery(client, weights).note(folder)


def _holder(address: str) -> subprocess.Popen[str]:
    program = (
        "import sys; from tensorhub_plugins.core import Client\n"
        f"client = Client({address!r}, run='r', model='m', replica='holder')\n"
        "client.fetch(1, serve=True); print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def _client(address: str, transport: str) -> Client:
    return Client(address, run="r", model="m", replica=f"trainer-{time.monotonic_ns()}", transports=[transport])


def _drop(file: Path) -> None:
    """Have the next read come from the disk."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
