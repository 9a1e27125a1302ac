"""Trainer ranks in processes of their own that gather together; importable, as they are spawned."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from processes import forkserver

TIMEOUT_S = 120.0


def value_of(version: int, number: int) -> int:
    """What every byte of a tensor is."""
    return (version * 7 + number) % 251


def serve(pipe: Any, meets: Any, place: str, address: str, rank: int, ranks: int, count: int, size_bytes: int) -> None:
    """Publish a version whenever one is asked for; answer the seconds until it is there for readers."""
    import gpu_place

    from tensorhub_plugins.core import Client, Publisher, contiguous_spec

    with gpu_place.place_named(place) as there, contextlib.ExitStack() as closing:
        model = [contiguous_spec(f"w{number}", torch.uint8, [size_bytes]) for number in range(count)]
        client = Client(address, run="gpu", model="actor", replica="trainer", shard=rank, shard_count=ranks)
        publisher = Publisher(
            client, rank=rank, ranks=ranks, worker=f"trainer/{rank}", keep=1, timeout_s=TIMEOUT_S, model=model
        )
        closing.callback(publisher.close)
        memory = there.put(torch.zeros(size_bytes, dtype=torch.uint8), "gathered")

        def gathered(version: int) -> Iterator[tuple[str, torch.Tensor]]:
            """Each into the same memory, when all ranks are there: a collective, as far as its order goes."""
            for number in range(count):
                meets.wait(TIMEOUT_S)
                there.fill_late(memory, value_of(version, number), "default", ms=0.0)
                yield f"w{number}", memory

        with contextlib.suppress(EOFError):
            while True:
                version = pipe.recv()
                began = time.perf_counter()
                publisher.publish(version, gathered(version))
                pipe.send(time.perf_counter() - began)
                there.check()


@contextlib.contextmanager
def trainer(place: str, address: str, *, ranks: int, count: int, size_bytes: int) -> Iterator[Any]:
    """publish(version) -> seconds of the slowest rank; each keeps its share of `count` tensors."""
    context: Any = forkserver()
    meets = context.Barrier(ranks)
    pipes, processes = [], []
    for rank in range(ranks):
        pipe, child = context.Pipe()
        arguments = (child, meets, place, address, rank, ranks, count, size_bytes)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        child.close()
        pipes.append(pipe)

    def publish(version: int) -> float:
        for pipe in pipes:
            pipe.send(version)
        return max(pipe.recv() for pipe in pipes)

    try:
        yield publish
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(60)
            process.kill()
