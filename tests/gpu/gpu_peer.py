"""A source in another process, whose tensors lie on the GPU or on what stands for it; importable, as it is spawned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import torch
from processes import forkserver

KINDS = ("gpu", "expandable", "stand-in", "pool")  # the second and the fourth have memory without a handle
SEGMENT_SIZE_BYTES = 4 << 20


def serve(pipe: Any, kind: str, size_bytes: int, transport: str) -> None:
    """Offer uint8[size_bytes] of version 1; then withdraw and overwrite it, offer it again, or free it, as it is asked,
    until the pipe closes."""
    if kind == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # its name in newer releases
    import gpu_place
    import ipc_devices
    from transport_suite import SimpleShelf

    from tensorhub_plugins.core.memory.slab import Slab
    from tensorhub_plugins.core.transports import Offer, create
    from tensorhub_plugins.core.types import ShardKey

    weights = {"w": content(size_bytes)}
    if kind in ("stand-in", "pool"):
        served = ipc_devices.apart() if transport == "cuda_ipc" else create(transport)
        if kind == "pool":
            slab = Slab.adopt({"w": ipc_devices.simulation().put(weights["w"])})
        else:
            slab = ipc_devices.adopt(weights)
    else:
        served, slab = create(transport), gpu_place.adopt_on_gpu(weights)
    offer = Offer(ShardKey(1, "checkpoint"), slab.manifest(SEGMENT_SIZE_BYTES), slab)
    offer.mark_all_ready()
    shelf = SimpleShelf(offer)
    pipe.send(served.serve(shelf))
    with contextlib.suppress(EOFError):
        while True:
            what = pipe.recv()
            if what == "withdraw":
                offer.withdraw()
                weights["w"].fill_(255)  # the owner goes on at once
            elif what == "offer":
                weights["w"].copy_(content(size_bytes))
                offer = Offer(ShardKey(1, "checkpoint"), slab.manifest(SEGMENT_SIZE_BYTES), slab)
                offer.mark_all_ready()
                shelf.put(offer)
            elif what == "free":
                served.close()
                offer.withdraw()  # else its slab stays open
                slab.close()
                offer, slab, shelf = None, None, None
                weights.clear()
                if kind in ("gpu", "expandable"):
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
            pipe.send(what)


def content(size_bytes: int) -> torch.Tensor:
    """What is offered, the same in every process."""
    period = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    return period.repeat(-(-size_bytes // len(period)))[:size_bytes].contiguous()


def cuda_reader() -> Any:
    """A transport of this process."""
    from tensorhub_plugins.core.transports import create

    return create("cuda_ipc")


class Source:
    """Such a process, and its endpoint."""

    def __init__(self, kind: str, size_bytes: int, transport: str = "cuda_ipc") -> None:
        # Its environment is set before torch is imported, which takes five seconds.
        context: Any = multiprocessing.get_context("spawn") if kind == "expandable" else forkserver()
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, kind, size_bytes, transport), daemon=True)
        self.process.start()
        child.close()
        self.endpoint: str = self._pipe.recv()

    def ask(self, what: str, *, waits: bool = True) -> None:
        """ "withdraw", "offer" or "free"."""
        self._pipe.send(what)
        if waits:
            self.hear()

    def hear(self) -> None:
        """Wait until what was asked is done."""
        self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)
        self._pipe.close()


@contextlib.contextmanager
def source(kind: str, size_bytes: int, transport: str = "cuda_ipc") -> Iterator[Source]:
    """Killed at the end."""
    made = Source(kind, size_bytes, transport)
    try:
        yield made
    finally:
        made.kill()
