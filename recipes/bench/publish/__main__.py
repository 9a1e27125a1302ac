"""How long a trainer waits for `publish`, beside one copy of the same bytes to memory that was written before.

    python -m recipes.bench.publish                 # 256 MB in 8 tensors, five rounds
    python -m recipes.bench.publish --mb 1024 --rounds 9

One rank publishes from host memory what it holds, version after version, as both frameworks do: with its layout
announced before (`Publisher.prepare`) or not, and returning when others can read it, or in the background, when the
training may change the weights. Between two versions the rank waits until the older one is withdrawn, as it computes
for longer than that takes. The rounds take turns, and each begins with new memory. `copy` is one pass of memcpy by one
thread into memory that was written before, `cold` into new memory of the kind that a version lies in.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from recipes.bench.results import save
from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.client.parts import Held
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.manifest import TensorSpec
from tensorhub_plugins.core.memory.pinning import wait_for_background
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of

TENSORS = 8
VERSIONS = 4
SETTLE_S = 30.0
GOAL = 1.3  # copies, where the layout was announced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.mb * 1_000_000 // TENSORS // 4
    weights = {f"w{number}": torch.rand(count) for number in range(TENSORS)}
    ways = {
        f"{'announced' if announced else 'not announced'}, {'in the background' if later else 'at once'}": (
            announced,
            later,
        )
        for later in (False, True)
        for announced in (False, True)
    }
    copies: list[float] = []
    colds: list[float] = []
    waits: dict[str, list[list[float]]] = {way: [] for way in ways}
    with start_server() as server:
        warm = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
        for number in range(options.rounds):
            copies.append(min(_timed(lambda: _copy(weights, warm)) for _ in range(2)))
            with Slab.allocate([spec_of(name, tensor) for name, tensor in weights.items()]) as fresh:
                colds.append(_timed(lambda: _copy(weights, fresh.tensors())))
            for way, (announced, later) in ways.items():
                run = f"{number}-{announced}-{later}"
                waits[way].append(_waits(server.address, run, weights, announced=announced, later=later))
    copy_s = statistics.median(copies)
    print(f"copy {copy_s * 1e3:.0f} ms, cold {statistics.median(colds) / copy_s:.2f} copies; in copies, by version:")
    rows = {"copy_s": copies, "cold_s": colds, "waits_s": waits}
    for way, rounds in waits.items():
        medians = [statistics.median(each) / copy_s for each in zip(*rounds, strict=True)]
        print(f"{way:35} {'  '.join(f'{each:5.2f}' for each in medians)}")
    save(options.json, {"goals": {"copies": GOAL}, "rows": rows})


def _waits(address: str, run: str, weights: dict[str, torch.Tensor], *, announced: bool, later: bool) -> list[float]:
    """Return the seconds that the caller of `publish_parts` waits for each version."""
    held = [
        Held(TensorSpec(name, "float32", tuple(tensor.shape), tensor.nbytes), tensor, None)
        for name, tensor in weights.items()
    ]
    client = Client(address, run=run, model="m", replica="trainer")
    publisher = Publisher(client, rank=0, ranks=1, worker="trainer", keep=1, timeout_s=60.0, in_background=later)
    waits = []
    try:
        if announced:
            publisher.prepare(held)
            wait_for_background(SETTLE_S)
        for version in range(1, VERSIONS + 1):
            waits.append(_timed(lambda version=version: publisher.publish_parts(version, held)))
            publisher.settle()
            until = time.monotonic() + SETTLE_S
            while [key.version for key in client.serving()] != [version] and time.monotonic() < until:
                time.sleep(0.01)
            wait_for_background(SETTLE_S)
    finally:
        publisher.close()
    return waits


def _copy(weights: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        into[name].copy_(tensor)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
