"""Processes beside a test's own, and what they do there; importable, as they are spawned."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from gpu_place import place_named
from processes import forkserver

from tensorhub_plugins.core import Slab, TensorSpec, copy_all
from tensorhub_plugins.core.memory import pinning


@contextlib.contextmanager
def beside(target: Any, *given: Any) -> Any:
    """Another process, which has begun, and the pipe to it."""
    context: Any = forkserver()
    pipe, child = context.Pipe()
    process = context.Process(target=target, args=(child, *given), daemon=True)
    process.start()
    child.close()
    try:
        assert pipe.recv() == "ready"
        yield process, pipe
    finally:
        process.kill()
        process.join(60)


def pin(pipe: Any, kind: str, size_bytes: int) -> None:
    """Pin so much memory when it is asked for, and tell the seconds."""
    with place_named(kind) as place:
        slab = Slab.allocate([TensorSpec("w", "uint8", (size_bytes,), size_bytes)], pin=False)
        pipe.send("ready")
        pipe.recv()
        began = time.perf_counter()
        slab.close()
        slab = Slab.allocate(
            [TensorSpec("w", "uint8", (size_bytes,), size_bytes)],
            pin=True if place.is_gpu else None,
            device=place.device,
        )
        pinning.wait_for_background(120)
        pipe.send(time.perf_counter() - began)
        slab.close()


def fill(pipe: Any, share: float) -> None:
    """Hold so much of the device until it is killed."""
    size_bytes = int(share * torch.cuda.mem_get_info()[1])
    held = [torch.ones(size_bytes // 16, dtype=torch.uint8, device="cuda") for _ in range(16)]
    torch.cuda.synchronize()
    pipe.send("ready")
    pipe.recv()
    del held


def borrow(pipe: Any, address: str, size_bytes: int) -> None:
    """Borrow the version of a neighbour and install it on the device; tell why it is not pinned, and the seconds."""
    from tensorhub_plugins.core import Client

    live = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    pipe.send("ready")
    with Client(address, run="gpu", model="actor", replica="borrower", transports=("shm", "tcp")) as client:
        fetched = client.fetch(1, borrow=True)
        assert pinning.wait_for_background(60)
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            copy_all([(live, fetched.tensors()["w"])])
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        pipe.send((fetched.unpinned, min(taken), int(live[::4099].sum())))
