"""What a framework does today: the trainer's first rank and all engines in one process group, in lock-step.

verl's nccl engine rewritten on gloo (recipes/cpu/stand_ins/recipe_cpu_gloo.py): the same buckets in the same order.
gloo's own broadcast is a tree, in which the trainer sends several copies; NCCL's is a ring, in which every host sends
and receives one. So the bytes go round a ring here: the better one for the side that we compare with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed import TCPStore

from recipes.cpu.stand_ins.recipe_cpu_gloo import TIMEOUT, GlooCheckpointEngine

BUCKET_SIZE_BYTES = 16 << 20  # as in recipes/verl_grpo; more in one bucket would overlap less
SLICE_SIZE_BYTES = 1 << 20  # what a host passes on before it has all of a bucket


class Collective(GlooCheckpointEngine):
    def __init__(self, host: str | None = None) -> None:
        """Make one end. host: this is the trainer's first rank, and others find it under this address."""
        super().__init__(BUCKET_SIZE_BYTES)
        if host is not None:
            self.host = host
            self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    def join(self, rank: int, world_size: int, master: tuple[str, int]) -> None:
        """Join a group of this size, kept if there is one; return when all have joined."""
        self.init_process_group(rank, world_size, master)
        if not isinstance(self.group, Ring):
            self.group = Ring(self.group, rank, world_size)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.prepare()
        asyncio.run(self.send_weights(weights))
        self.finalize()

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors; use each before the next is requested. The next bucket arrives meanwhile."""
        self.prepare()
        with asyncio.Runner() as runner:
            coming = aiter(self.receive_weights())
            while True:
                try:
                    yield runner.run(_next(coming))
                except StopAsyncIteration:
                    break
        self.finalize()


async def _next(coming: Any) -> Any:
    return await anext(coming)


class Ring:
    """A broadcast in NCCL's way: every rank forwards what it has to the next one, slice by slice."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ring:
        slices = list(tensor.split(SLICE_SIZE_BYTES))
        arriving = []
        if self._rank != root:  # all are asked for at once, or every slice would wait for a round trip
            arriving = [self._group.recv([part], self._rank - 1, number) for number, part in enumerate(slices)]
        leaving = []
        for number, part in enumerate(slices):
            if arriving:
                arriving[number].wait()
            if self._rank + 1 < self._size:
                leaving.append(self._group.send([part], self._rank + 1, number))
        for work in leaving:
            work.wait()
        return self

    def wait(self) -> None:
        """Do nothing: it has ended already."""
