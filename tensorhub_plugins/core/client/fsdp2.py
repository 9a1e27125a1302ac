"""FSDP2: what a rank holds of a model whose parameters are DTensors. See parts.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensorhub_plugins.core.client.parts import Held, Turns, held_box
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.tensors import contiguous_spec


def fsdp2_parts(tensors: Mapping[str, torch.Tensor], turns: Turns) -> Iterator[Held]:
    """Yield DTensors as they are sharded; a plain tensor, which every rank has, is published by one of them.

    tensors: a state_dict, in the same order on every rank. Raise UsageError where there is an `fsdp2_problem`."""
    problem = fsdp2_problem(tensors, turns.ranks)
    if problem:
        raise UsageError(problem)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            yield _of_dtensor(name, tensor, turns)
        else:
            yield turns.one_of_all(name, tensor)


def fsdp2_problem(tensors: Mapping[str, torch.Tensor], ranks: int) -> str:
    """Return which DTensor's part a rank cannot know: it is partial, sharded with strides, or on a mesh of some ranks
    only. "" for none. The same on every rank."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
            return f"tensor {name!r} is placed {tensor.placements}, so that its ranks hold no boxes of it"
        if tensor.device_mesh.size() != ranks:
            return (
                f"tensor {name!r} is on {tensor.device_mesh.size()} of {ranks} ranks, and other holders are not known"
            )
    return ""


def _of_dtensor(name: str, tensor: DTensor, turns: Turns) -> Held:
    mesh, placements = tensor.device_mesh, tensor.placements
    whole = contiguous_spec(name, tensor.dtype, tensor.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the mesh has all ranks"
    replicas = [dimension for dimension, placement in enumerate(placements) if type(placement) is Replicate]
    mine, count = 0, 1
    for dimension in replicas:
        mine, count = mine * mesh.size(dimension) + coordinate[dimension], count * mesh.size(dimension)
    # One of the ranks that hold the same part publishes it; every group of such ranks decides alike.
    if not turns.is_mine(mine, count, whole.size_bytes):
        return Held(whole)
    shape, start = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    with torch.no_grad():
        local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise UsageError(f"tensor {name!r}: this rank holds {list(local.shape)} where {list(shape)} were expected")
    return held_box(whole, local, tuple(start))
