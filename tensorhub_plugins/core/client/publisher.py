"""One trainer rank: keeps a snapshot of its share of each version and offers it to readers.

A version is written straight into an allocated slab while the framework gathers it tensor by tensor, so the next
optimizer step may change the weights at once. Old versions are withdrawn in the background: a slow reader holds up
memory, never the training.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import torch

from tensorhub_plugins.core.client.client import Client
from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.core.manifest import (
    TensorSpec,
    TensorTable,
)
from tensorhub_plugins.core.memory.moves import difference
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import check_tensor, contiguous_spec, spec_of
from tensorhub_plugins.core.run_log import enabled, record
from tensorhub_plugins.core.types import (
    CHECKPOINT,
)

log = logging.getLogger(__name__)

UNPUBLISH_S = 30.0  # what a reader of an old version gets to finish before it is cut off


class Ownership:
    """Which of `ranks` trainer ranks keeps which tensor: the one with the fewest bytes so far, the lowest of equals.

    All ranks see the same tensors in the same order (gathering each is a collective), so all of them decide the same
    without a message.
    """

    def __init__(self, ranks: int) -> None:
        self.bytes = [0] * ranks

    def give(self, size_bytes: int) -> int:
        """The owner of the next tensor."""
        owner = min(range(len(self.bytes)), key=lambda rank: (self.bytes[rank], rank))
        self.bytes[owner] += size_bytes
        return owner


class Publisher:
    """Publishes the share of one trainer rank, version after version.

    client: this rank's (shard = rank, shard_count = ranks). keep: versions on offer. dtype: what floating-point
    tensors are published as, None: as they come.

    model: the tensors of the whole model, in the order in which they will come, where that is known: the first version
    is then no different from the others.

    Every version must consist of the same tensors, by name, dtype and shape; else it is a UsageError that names what is
    missing, new or changed, and nothing is published. All ranks together are compared, which every rank sees pass: a
    tensor that is kept by another rank than before is none the worse.
    """

    def __init__(
        self,
        client: Client,
        *,
        rank: int,
        ranks: int,
        worker: str,
        keep: int,
        timeout_s: float,
        dtype: torch.dtype | None = None,
        model: Sequence[TensorSpec] = (),
    ) -> None:
        self.client = client
        self.rank, self.ranks, self.worker = rank, ranks, worker
        self.keep, self.timeout_s, self.dtype = keep, timeout_s, dtype
        model = [msgspec.structs.replace(spec, stride=None, part=None) for spec in model]  # as they will be published
        ownership = Ownership(ranks)
        # This rank's, of the last version: the next one almost always has the same.
        self._mine = TensorTable.of(spec for spec in model if ownership.give(spec.size_bytes) == rank)
        self._is_fixed = bool(model)
        self._whole = TensorTable.of(model)  # of all ranks, of the last version
        self._published: deque[int] = deque()
        self._root = b""  # of the last version
        self._retired: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._retiring = threading.Thread(target=self._retire, name="tensorhub-unpublish", daemon=True)
        self._retiring.start()

    @property
    def whole_size_bytes(self) -> int:
        """Of the last version: the shares of all ranks together."""
        return sum(spec.size_bytes for spec in self._whole)

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Take all of `weights` (each step of it is a collective of all ranks), keep this rank's share, publish it.

        Returns metrics in seconds and bytes; nothing if this very version is on offer already."""
        started = time.monotonic()
        slab, whole = self._snapshot(version, weights)
        gathered = time.monotonic()
        if self._published and version <= self._published[-1]:
            return self._again(version, slab)
        report = self.client.publish(version, slab, CHECKPOINT, timeout_s=self.timeout_s, strict=True)
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
            digests = {self._digest_key(): report.manifest.root().hex()}
            record("digests", worker=self.worker, version=version, layout=CHECKPOINT, digests=digests)
        self._published.append(version)
        self._root = report.manifest.root()
        self._whole = whole
        while len(self._published) > self.keep:
            self._retired.put(self._published.popleft())
        return {
            "tensorhub/publish/seconds": ended - started,
            "tensorhub/publish/gather_seconds": gathered - started,
            "tensorhub/publish/bytes": float(slab.size_bytes),
        }

    def _again(self, version: int, slab: Slab) -> dict[str, float]:
        """A version that was sent before. Fine if nothing changed; else the readers would keep the old weights."""
        same = version == self._published[-1] and slab.manifest().root() == self._root
        slab.close()
        if same:
            return {}
        raise UsageError(
            "other weights were given for a version that is already published (versions must grow): after a rollback "
            "start a new history under another run name",
            version=version,
        )

    def _digest_key(self) -> str:
        return "root" if self.ranks == 1 else f"root of shard {self.rank}/{self.ranks}"

    def _snapshot(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[Slab, TensorTable]:
        """A slab with this rank's tensors, and what all ranks' are. While the names are unknown until all have passed,
        they are buffered in ordinary memory and copied once more."""
        ownership = Ownership(self.ranks)
        slab = self.client.allocate(self._mine) if self._mine or self._is_fixed else None
        buffered: dict[str, torch.Tensor] = {}
        written: set[str] = set()
        passed: dict[str, TensorSpec] = {}
        for name, tensor in weights:
            check_tensor(name, tensor)
            tensor = self._cast(tensor.detach())
            spec = passed[name] = contiguous_spec(name, tensor.dtype, tensor.shape)
            mine = name in self._mine.positions if self._is_fixed else ownership.give(spec.size_bytes) == self.rank
            if not mine or (self._whole and self._whole.get(name) != spec):  # the latter is refused below
                continue
            if slab is not None and self._mine.get(name) == spec:
                slab.write(name, tensor)
                written.add(name)
            else:
                buffered[name] = tensor.to("cpu", copy=True).contiguous()
        # Only now: each step was a collective, and a rank that leaves early hangs the others.
        whole = TensorTable.of(passed.values())
        if self._whole and whole != self._whole:
            if slab is not None:
                slab.close()
            raise self._not_the_same(version, whole)
        if slab is not None and not buffered and written == self._mine.positions.keys():
            return slab, whole
        return self._reshape(slab, written, buffered), whole

    def _not_the_same(self, version: int, whole: TensorTable) -> UsageError:
        found = difference(self._whole, whole)
        return UsageError(
            f"the weights are not those of {'the version before' if self._published else 'the model'}: {found}. "
            "Nothing was published. If the change is meant, take a new run or model name",
            version=version,
        )

    def _reshape(self, slab: Slab | None, written: set[str], buffered: dict[str, torch.Tensor]) -> Slab:
        """The names or shapes are new: put together a slab of what there is now."""
        tensors = dict(buffered)
        if slab is not None:
            views = slab.tensors()
            tensors.update({name: views[name] for name in written})
        self._mine = TensorTable.of(spec_of(name, tensor) for name, tensor in tensors.items())
        fresh = self.client.allocate(self._mine)
        for name, tensor in tensors.items():
            fresh.write(name, tensor)
        if slab is not None:
            slab.close()
        return fresh

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is None or not tensor.is_floating_point() or tensor.element_size() == 1:
            return tensor  # a one-byte float is a quantized weight: a cast would lose its scale's meaning
        return tensor.to(self.dtype)

    def _retire(self) -> None:
        while (version := self._retired.get()) is not None:
            try:
                self.client.unpublish(version, CHECKPOINT, timeout_s=UNPUBLISH_S)
            except TensorHubError as error:
                log.warning("%s: version %d was not withdrawn: %s", self.worker, version, error)

    def close(self) -> None:
        """Take the published versions back and close the client. Errors are not raised: the run is over."""
        self._retired.put(None)
        self._retiring.join(timeout=1.0)
        with contextlib.suppress(TensorHubError):
            self.client.close()
