"""Trainer side: every rank keeps a snapshot of its share of each version and offers it to whoever wants to read.

OpenRLHF's own update sends one remote call to every engine for every parameter and waits for the slowest. Here the
parameters are gathered in the same order, each is written into host memory by the one rank that owns it, and the
optimizer goes on as soon as the hub knows. Old versions are withdrawn in the background: a slow reader holds up
memory, never the training.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tensorhub_plugins.core import CHECKPOINT, TensorSpec
from tensorhub_plugins.core.errors import TensorHubError
from tensorhub_plugins.core.events import enabled, record

log = logging.getLogger(__name__)

UNPUBLISH_S = 30.0  # what a reader of an old version gets to finish before it is cut off


def shares(specs: Sequence[TensorSpec], ranks: int) -> list[int]:
    """PURE: the rank that owns each tensor: the one with the fewest bytes so far, the lowest of equals. All ranks see
    the same tensors in the same order, so all take the same decision without a word."""
    held = [0] * ranks
    owners = []
    for spec in specs:
        owner = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[owner] += spec.size_bytes
        owners.append(owner)
    return owners


class Publisher:
    """One rank. `client` is its core Client (shard = rank, shard_count = ranks); specs are those of the whole model,
    in the order in which it will be gathered."""

    def __init__(
        self, client: Any, specs: Sequence[TensorSpec], *, rank: int, ranks: int, keep: int, deadline_s: float
    ) -> None:
        self.client = client
        self.keep, self.deadline_s = keep, deadline_s
        self.worker = f"trainer/{rank}"
        owners = shares(specs, ranks)
        self.mine = {spec.name: spec for spec, owner in zip(specs, owners, strict=True) if owner == rank}
        self._digest_key = "root" if ranks == 1 else f"root of shard {rank}/{ranks}"
        self._published: deque[int] = deque()
        self._retired: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._retiring = threading.Thread(target=self._retire, name="tensorhub-unpublish", daemon=True)
        self._retiring.start()

    def publish(self, version: int, gathered: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Take all of `gathered` (each step of it is a collective of all ranks), keep this rank's share, publish it.

        Returns metrics in seconds and bytes."""
        started = time.monotonic()
        slab = self.client.allocate(self.mine.values())
        for name, tensor in gathered:
            if name in self.mine:
                slab.write(name, tensor)
        copied = time.monotonic()
        report = self.client.publish(version, slab, CHECKPOINT, deadline_s=self.deadline_s)
        ended = time.monotonic()
        record(
            "publish",
            worker=self.worker,
            version=version,
            layout=CHECKPOINT,
            bytes=slab.size_bytes,
            seconds=ended - started,
        )
        if enabled():  # the digests are in the manifest anyway
            digests = {self._digest_key: report.manifest.root().hex()}
            record("digests", worker=self.worker, version=version, layout=CHECKPOINT, digests=digests)
        self._published.append(version)
        while len(self._published) > self.keep:
            self._retired.put(self._published.popleft())
        return {
            "tensorhub/publish_seconds": ended - started,
            "tensorhub/publish_copy_seconds": copied - started,
            "tensorhub/publish_bytes": float(slab.size_bytes),
        }

    def _retire(self) -> None:
        while (version := self._retired.get()) is not None:
            try:
                self.client.unpublish(version, CHECKPOINT, deadline_s=UNPUBLISH_S)
            except TensorHubError as error:
                log.warning("%s: version %d was not withdrawn: %s", self.worker, version, error)

    def close(self) -> None:
        self._retired.put(None)
        self._retiring.join(timeout=1.0)
        self.client.close()
