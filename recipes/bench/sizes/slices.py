"""What each worker of a tensor parallel engine would read of a checkpoint: from a configuration alone, without memory.

    for share in shares(folder, shapes, (1, 2, 4, 8)): ...

vLLM's class is made on the meta device for each rank, and its own loaders run over tensors of these shapes, as a worker
plans its fetch (worker/plan.py). The plan is not validated here: a layer that this machine packs after loading it is
reloaded all the same, and only an engine detects that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.bench.sizes.ranks import Rank, made
from tensorhub_plugins.core import TensorSpec, TensorTable, common_box, segment_size_for, slices_of
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.worker import checkpoint_contract
from tensorhub_plugins.vllm.worker.plan import Plan, Region, Shapes, contiguous_strides, specs_of, whole_region


@dataclass(frozen=True)
class Share:
    """The share of one rank, in bytes. needed: what the plan names. read: the segments that hold a byte of it, from a
    trainer that publishes everything in one shard, slice by slice (`Publisher(slices=)`, the size of the group).
    read_of_whole: the same from one that publishes whole matrices. process: layers that plain copies cannot fill."""

    rank: Rank
    checkpoint: int
    needed: int
    read: int
    read_of_whole: int
    process: tuple[str, ...]


def shares(folder: Path, shapes: Shapes, ranks: Iterable[Rank], **options: Any) -> Iterator[Share]:
    """Yield the shares of these ranks of the model of this folder's config.json, for a checkpoint of these shapes.

    options: of vLLM's engine. VersionRefused for a checkpoint that would not fill the model. Call it in a process of
    its own: it starts torch.distributed.
    """
    for rank in ranks:
        with made(folder, rank, **options) as (model, vllm_config):
            plan = planned(model, vllm_config, shapes)
            ep = vllm_config.parallel_config.enable_expert_parallel
        read, of_whole = (read_bytes(plan, slices, experts=not ep) for slices in (rank.tp_size, 1))
        yield Share(rank, plan.checkpoint_bytes, plan.needed_bytes, read, of_whole, tuple(sorted(plan.process)))


def planned(model: torch.nn.Module, vllm_config: Any, shapes: Shapes) -> Plan:
    plan = checkpoint_contract.rehearse(model, vllm_config, checkpoint_contract.without_memory(shapes)).plan
    assert plan is not None  # these are contiguous
    return plan


def read_bytes(plan: Plan, slices: int, *, experts: bool) -> int:
    """Return the bytes of all segments that hold a needed byte."""
    wholes = (
        spec
        for name, (dtype, shape) in plan.shapes.items()
        for spec in specs_of(name, dtype, shape, [whole_region(shape)])
    )
    return read_of(
        plan, TensorTable.of(piece.spec for whole in wholes for piece in slices_of(whole, slices, experts=experts))
    )


def read_of(plan: Plan, table: TensorTable) -> int:
    """Return the bytes of all segments of a shard with this table that hold a needed byte."""
    size = segment_size_for(table.size_bytes)
    read: set[int] = set()
    for spec, start in zip(table, table.offsets, strict=True):
        for region in plan.needed.get(spec.tensor, ()) if spec.size_bytes else ():
            for first, last in _stretches(
                _within(region, spec), plan.shapes[spec.tensor][0], spec.shape, gap_bytes=size
            ):
                read.update(range((start + first) // size, (start + last - 1) // size + 1))
    return sum(min(size, table.size_bytes - segment * size) for segment in read)


def _within(region: Region, spec: TensorSpec) -> Region | None:
    """Return the intersection, as a region of the latter."""
    here = Region(spec.part.start, spec.shape) if spec.part is not None else whole_region(spec.shape)
    common = common_box(region.box, here.box)
    if common is None:
        return None
    start = tuple(low - at for (low, _), at in zip(common, here.start, strict=True))
    return Region(start, tuple(high - low for low, high in common))


def _stretches(
    region: Region | None, dtype: torch.dtype, whole: tuple[int, ...], *, gap_bytes: int
) -> Iterator[tuple[int, int]]:
    """Byte ranges of the whole that hold the region; gaps that are shorter than a segment do not count."""
    if region is None:
        return
    element, steps = dtype.itemsize, contiguous_strides(whole)
    corner = sum(start * step for start, step in zip(region.start, steps, strict=True))
    length = sum((size - 1) * step for size, step in zip(region.shape, steps, strict=True)) + 1
    outer = next((axis for axis, size in enumerate(region.shape) if size > 1), None)
    if outer is not None and outer + 1 < len(steps):
        inner = length - (region.shape[outer] - 1) * steps[outer]
        if (steps[outer] - inner) * element >= gap_bytes:  # rows that are far from each other, each by itself
            rest = Region((0,) * (len(whole) - outer - 1), region.shape[outer + 1 :])
            for row in range(region.shape[outer]):
                for first, last in _stretches(rest, dtype, whole[outer + 1 :], gap_bytes=gap_bytes):
                    base = (corner + row * steps[outer]) * element
                    yield base + first, base + last
            return
    yield corner * element, (corner + length) * element


def shapes_of_config(config: Any) -> Mapping[str, tuple[torch.dtype, torch.Size]]:
    """Return the shapes of the checkpoint that transformers' class of this configuration saves, in bfloat16."""
    import transformers

    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = kind(config)
    return {
        name: (torch.bfloat16 if dtype.is_floating_point else dtype, shape)
        for step in checkpoint_names.steps(model)
        for name, (dtype, shape) in step.targets.items()
    }
