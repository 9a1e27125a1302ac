"""What an engine's decoding notices of a version that comes to its host: python -m recipes.bench.beside [--json FILE]

One process decodes: steps of Python and of small torch operations, which need the interpreter's lock hundreds of times
each, as an engine's do. Meanwhile a version comes in one of these ways, by turns, every round in another order:

    idle      nothing comes: what the machine itself does to a step
    tcp       this process fetches it over TCP, as the first engine of a host does
    shm       this process copies it out of another one's shared memory
    borrow    this process uses another one's memory where it lies, and sums up its digests
    beside    another process fetches it over TCP: what a store process of the host would cost
    lend      nothing, but another process borrows this one's memory

A process of its own keeps nothing off the processors and the memory, only off the interpreter's lock: what tcp costs
more than beside is what the lock costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from recipes.bench.beside.processes import ask, drop, fetch, process, worker_of
from recipes.bench.results import save
from tensorhub_plugins.core import Client, Fetched

LAYERS, REQUESTS = 500, 1000  # of a step, which then takes some milliseconds
IDLE_S = 0.5
WAYS = ("idle", "tcp", "shm", "borrow", "beside", "lend")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        hub = ask(stack.enter_context(process("hub")), "address")
        peers = {name: stack.enter_context(process(name, hub)) for name in ("trainer", "first", "other")}
        engine = stack.enter_context(worker_of(hub, "engine"))
        for round_ in range(given.rounds + 1):
            for way in random.Random(round_).sample(WAYS, len(WAYS)):
                measured = measure(way, engine, peers)
                if round_:  # the first one takes fresh memory
                    found[way].append(measured)
    save(given.json, table(found))


def table(found: dict[str, list[Measured]]) -> dict[str, dict[str, float]]:
    """Print a table of all rounds' steps together, against those of idle, and return its figures. lost: how much less
    was decoded while one version arrived."""
    print("| way | comes in ms | lost ms | p50 ms | p90 ms | p99 ms | longest ms | p50, times idle | p90 | p99 |")
    print("|", " | ".join(["---"] * 10), "|")
    figures: dict[str, dict[str, float]] = {}
    for way in WAYS:
        steps = [step for measured in found[way] for step in measured.steps]
        cuts = statistics.quantiles(steps, n=100)
        row = {f"p{at}": cuts[at - 1] for at in (50, 90, 99)} | {"longest": max(steps)}
        row["comes"] = statistics.median(measured.comes for measured in found[way])
        figures[way] = row
        usual = figures["idle"]["p50"]
        row["lost"] = statistics.median(sum(each.steps) - len(each.steps) * usual for each in found[way])
        times = [f"{row[name] / figures['idle'][name]:.2f}" for name in ("p50", "p90", "p99")]
        taken = [f"{1000 * row[name]:.1f}" for name in ("p50", "p90", "p99", "longest")]
        whole = [f"{1000 * row[name]:.0f}" for name in ("comes", "lost")]
        print("|", " | ".join([way, *whole, *taken, *times]), "|")
    return figures


# --- one measurement ---


class Measured(NamedTuple):
    """The seconds until the version had arrived, and of each decode step meanwhile."""

    comes: float
    steps: list[float]


def measure(way: str, engine: Client, peers: dict[str, Connection]) -> Measured:
    version = ask(peers["trainer"], "publish", way)
    kept: list[Fetched] = []
    if way in ("shm", "borrow"):
        ask(peers["first"], "fetch", version, "tcp", False)
    if way == "lend":
        kept.append(fetch(engine, version, "tcp", False))
    if way in ("shm", "borrow", "lend"):
        ask(peers["trainer"], "drop", version)  # a trainer lends nothing
    comes: dict[str, Callable[[], object]] = {
        "idle": lambda: time.sleep(IDLE_S),
        "tcp": lambda: kept.append(fetch(engine, version, "tcp", False)),
        "shm": lambda: kept.append(fetch(engine, version, "shm", False)),
        "borrow": lambda: kept.append(fetch(engine, version, "shm", True)),
        "beside": lambda: ask(peers["other"], "fetch", version, "tcp", False),
        "lend": lambda: ask(peers["other"], "fetch", version, "shm", True),
    }
    took: list[float] = []

    def come() -> None:
        began = time.perf_counter()
        comes[way]()
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=come)
    thread.start()
    steps = decode(thread.is_alive)
    thread.join()
    drop(engine, version, kept)
    for name in ("other", "first", "trainer"):
        ask(peers[name], "drop", version)
    return Measured(took[0], steps)


def decode(goes_on: Callable[[], bool]) -> list[float]:
    """Decode while `goes_on`, and return the seconds of each step."""
    weights, hidden = [torch.randn(64, 64) for _ in range(LAYERS)], torch.randn(4, 64)
    taken: list[float] = []
    while goes_on():
        began = time.perf_counter()
        requests = {number: [number] * 8 for number in range(REQUESTS)}  # what a scheduler does
        for request in requests.values():
            request.append(sum(request) % 97)
        for weight in weights:  # what a model runner does: each call lets go of the lock and wants it again
            hidden = torch.tanh(hidden @ weight)
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
