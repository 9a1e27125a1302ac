"""A version that is to be published: its memory, and its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec
import torch

from tensorhub_plugins.core.client import arguments, calls
from tensorhub_plugins.core.client.serving import Serving
from tensorhub_plugins.core.client.shelf import Published
from tensorhub_plugins.core.deadline import until
from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest, Part, TensorTable
from tensorhub_plugins.core.memory.claims import claimed
from tensorhub_plugins.core.memory.downloads import Downloads
from tensorhub_plugins.core.memory.moves import difference, with_parts
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import check_tensors, copied_spec
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey


def slab_of(
    serving: Serving,
    tensors: Mapping[str, torch.Tensor] | Slab,
    version: int,
    parts: object,
    deadline: float,
    *,
    copy: bool,
) -> Slab:
    """Return the tensors as a slab: themselves, or a copy. Raise DeadlineExceeded, which leaves nothing behind."""
    if isinstance(tensors, Slab):
        arguments.check_written(tensors, version)
        serving.pool.reclaim(tensors)
        return tensors
    if not copy:
        return Slab.adopt(tensors, deadline=deadline)
    check_tensors(tensors, deadline)
    cut = parts if isinstance(parts, Mapping) else {}
    specs = (copied_spec(name, t, is_part=name in cut) for name, t in until(deadline, tensors.items()))
    slab = serving.take(specs, deadline)
    try:
        what = f"{serving.worker} publishes, as version {version},"
        with claimed(tensors, what, deadline), Downloads() as downloads:
            for name, tensor in devices.settled(serving.changes.overwrite(slab, tensors, deadline)):
                calls.check()
                slab.write_later(name, tensor, downloads, stays=True, deadline=deadline)
    except BaseException:
        serving.recycle(slab)
        raise
    return slab


def describe(
    serving: Serving,
    key: ShardKey,
    slab: Slab,
    parts: Mapping[str, Part] | None,
    deadline: float,
    *,
    algorithm: str,
    strict: bool,
) -> tuple[Manifest, str]:
    """Return the manifest, and how the tensors differ from those of the last version; empty: they do not."""
    described = slab.specs if parts is None else with_parts(slab.specs, parts, partial(until, deadline))
    last, changed = serving.published(key.layout), ""
    if last is not None and last.manifest.tensors != described:
        changed = _changed(key, last, described, strict=strict)
    return msgspec.structs.replace(slab.manifest(algorithm=algorithm, deadline=deadline), tensors=described), changed


def _changed(key: ShardKey, last: Published, described: TensorTable, *, strict: bool) -> str:
    may_move = key.layout == CHECKPOINT and key.shard_count > 1
    changed = difference(last.manifest.tensors, described, may_move=may_move)
    if not changed:
        return ""
    changed = f"the tensors of layout {key.layout} are not those published here before: {changed}"
    if strict:
        raise UsageError(
            f"{changed}. Nothing was published: publish what version {last.version} consisted of. If the "
            "change is meant, take a new run or model name, or pass strict=False",
            version=key.version,
        )
    return changed
