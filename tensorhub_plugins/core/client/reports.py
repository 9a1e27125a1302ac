"""The reports that the calls of a client return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.errors import UsageError, VersionRefused
from tensorhub_plugins.core.manifest import Manifest, TensorTable
from tensorhub_plugins.core.memory.assembly import has_parts, view_of
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import same_bytes
from tensorhub_plugins.core.process_lifetime import OfThisProcess
from tensorhub_plugins.core.transfer.report import ReplicateReport
from tensorhub_plugins.core.transfer.runner import Outcome
from tensorhub_plugins.core.types import CHECKPOINT


@dataclass(frozen=True)
class PublishReport:
    """The result of `publish`. seconds by phase: "copy" (into the slab), "digest", "announce" (until the hub knew)."""

    version: int
    layout: str
    size_bytes: int
    seconds: dict[str, float]
    manifest: Manifest = field(repr=False)  # all digests


@dataclass(frozen=True)
class UnpublishReport:
    """The result of `unpublish`, and the seconds it took.

    cut_off: "replica/shard" of the readers that had not finished by the deadline. kept: it was the last copy of a
    retained version, or may have been, and is still served, from memory of the store's own. damaged: tensors that were
    written to while they were published in place, as far as a sample of their digests shows."""

    version: int
    seconds: float
    cut_off: tuple[str, ...] = ()
    kept: bool = False
    damaged: tuple[str, ...] = ()


@dataclass
class Fetched(OfThisProcess):
    """One version in memory of its own. slabs and manifests are by source shard; tensors of which several shards hold
    parts are whole in slabs of their own, under negative numbers.

    converts: no worker had the preferred layout, and this one is expected to publish it, or to `abandon` it. wanted:
    only these tensors, or parts of them, were read; None: all. The manifests are of all that is published."""

    version: int
    layout: str
    slabs: dict[int, Slab]
    manifests: dict[int, Manifest]
    report: ReplicateReport
    converts: str | None = None
    wanted: TensorTable | None = None
    _release: Callable[[], None] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        slabs: dict[int, Slab],
        preferred: str,
        wanted: TensorTable | None,
        releaser: Callable[[Iterable[Slab]], Callable[[], None]],
    ) -> Fetched:
        """Return what was read in this layout, or in the preferred one; wanted counts for a checkpoint only."""
        report = outcome.report
        converts = preferred if outcome.claimed is not None and report.layout != preferred else None
        wanted = wanted if report.layout == CHECKPOINT else None
        release = releaser(slabs.values())
        return cls(report.version, report.layout, slabs, outcome.manifests, report, converts, wanted, release)

    @property
    def unpinned(self) -> str | None:
        """Return what of its memory a device copies at half its rate, and why, as text for users; None: nothing."""
        return next((slab.unpinned for slab in self.slabs.values() if slab.unpinned), None)

    @property
    def slab(self) -> Slab:
        """Return the only slab. Raise UsageError when the source had several shards."""
        if len(self.slabs) != 1:
            raise UsageError(f"version {self.version} came in {len(self.slabs)} shards: use .slabs or .tensors()")
        return next(iter(self.slabs.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, sharing the slabs' memory.

        Raise VersionRefused when two source shards have published one name with different bytes."""
        found: dict[str, torch.Tensor] = {}
        shard_of: dict[str, int] = {}
        for shard, slab in sorted(self.slabs.items()):  # in the order of shards, whichever came first
            nothing = frozenset(slab.unwritten)  # memory for parts that did not come this time
            for name, tensor in slab.tensors().items():
                if name in nothing:
                    continue
                if name in found and not same_bytes(found[name], tensor):
                    raise VersionRefused(
                        f"tensor {name!r} is published by {_text(shard_of[name])} and by {_text(shard)}, with "
                        "different bytes: publish it in one of them",
                        version=self.version,
                    )
                found[name], shard_of[name] = tensor, shard
        return found

    def roots(self) -> dict[int, str]:
        """Return the roots of the bytes in memory now, in hex, by source shard (`report.roots`: as published).

        It takes a pass over all bytes. What came in parts is read in the whole tensors. Raise UsageError where only
        some of the bytes were `wanted`: a root is over all of them."""
        if self.wanted is not None:
            raise UsageError(f"only parts of version {self.version} were fetched, and a root is over all of its bytes")
        whole = [slab for number, slab in self.slabs.items() if number < 0]
        found = {}
        for shard, manifest in self.manifests.items():
            blocks = [self.slabs[shard], *whole] if shard in self.slabs else whole
            slab = view_of(manifest.tensors, blocks) if has_parts(manifest.tensors) else blocks[0]
            described = slab.manifest(manifest.segment_size_bytes, algorithm=manifest.digest_algorithm)
            found[shard] = described.root().hex()
        return found

    @calls.public
    def release(self) -> None:
        """Return the memory to the client for the next fetch; what is published stays until its unpublish. Until it is
        released it keeps its bytes, whatever is unpublished."""
        if self._release is not None:
            self._release()
        if self.wanted is not None:  # perhaps for hundreds of shards, whose tables the client keeps for the next fetch
            for manifest in self.manifests.values():
                manifest.tensors.forget_specs()
        self._release, self.slabs = None, {}


def _text(shard: int) -> str:
    return f"shard {shard}" if shard >= 0 else "several shards in parts"
