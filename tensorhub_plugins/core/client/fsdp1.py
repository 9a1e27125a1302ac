"""FSDP1's flat parameters: what a rank holds of each parameter in them. See parts.py.

FSDP1 keeps this in private attributes of torch; they exist since 2.1, and the tests compare all of it with what FSDP1
itself gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from tensorhub_plugins.core.client.parts import Held, Turns, held_run
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.tensors import contiguous_spec


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Return whether FSDP1 wraps this module, or modules in it."""
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def fsdp1_parts(module: FullyShardedDataParallel, turns: Turns) -> Iterator[Held]:
    """Yield what this rank holds, with the names of module.state_dict(), with or without use_orig_params, for any
    sharding strategy. Shared parameters come under each name, as there; buffers in the dtype before FSDP1's cast.

    Raise UsageError where the flat parameters are not as expected."""
    problem = fsdp1_problem(module, turns.ranks)
    if problem:
        raise UsageError(problem)
    flattened: set[str] = set()
    for prefix, unit in module.named_modules():
        handle: Any = getattr(unit, "_handle", None) if isinstance(unit, FullyShardedDataParallel) else None
        if handle is not None:
            for held in _of_unit(clean_tensor_name(f"{prefix}." if prefix else ""), unit, handle, turns):
                flattened.add(held.whole.name)
                yield held
    dtypes: dict[str, torch.dtype] = getattr(module, "_buffer_name_to_orig_dtype", {})
    for prefix, each in module.named_modules(remove_duplicate=False):
        tensors = {name: tensor for name, tensor in each._parameters.items() if tensor is not None}
        lasting = {name: b for name, b in each._buffers.items() if name not in each._non_persistent_buffers_set}
        for last, tensor in {**tensors, **lasting}.items():
            name = clean_tensor_name(f"{prefix}.{last}" if prefix else last)
            if tensor is None or name in flattened or last == "_flat_param":
                continue
            dtype = dtypes.get(name, tensor.dtype) if last in lasting else tensor.dtype
            flattened.add(name)
            yield turns.one_of_all(name, tensor, dtype)


def fsdp1_problem(module: torch.nn.Module, ranks: int) -> str:
    """Return which flat parameter's other holders a rank cannot know; "" for none. The same on every rank."""
    for unit in module.modules():
        handle: Any = getattr(unit, "_handle", None) if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None or not handle.uses_sharded_strategy:
            continue
        group: Any = getattr(unit, "_inter_node_pg", None)
        count = 1 if group is None else group.size()
        if handle.world_size * count != ranks:
            return (
                f"FSDP1 shards over {handle.world_size} ranks, {count} times, and there are {ranks}: which ranks "
                "have the same parameters is not known"
            )
    return ""


def _of_unit(prefix: str, unit: FullyShardedDataParallel, handle: Any, turns: Turns) -> Iterator[Held]:
    flat = handle.flat_param
    mine, count = _replica(unit, handle, turns)
    if handle.uses_sharded_strategy:
        local = getattr(flat, "_local_shard", flat.data)  # flat itself may be gathered, or cast, at this moment
        if local.dim() != 1 or local.numel() != flat._sharded_size.numel():
            raise UsageError(f"FSDP1 holds {list(local.shape)} of {list(flat._sharded_size)} elements of {prefix!r}")
    else:
        local = flat.data
    local = local.detach()
    held = {}
    for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        whole = contiguous_spec(prefix + fqn, local.dtype, shape)
        held[fqn] = Held(whole)
        if turns.is_mine(mine, count, whole.size_bytes) and info.in_shard:
            elements = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
            held[fqn] = held_run(whole, elements, info.intra_param_start_idx)
    for shared in flat._shared_param_infos:
        fqn = f"{shared.module_name}.{shared.param_name}" if shared.module_name else shared.param_name
        first = (
            f"{shared.prim_module_name}.{shared.prim_param_name}" if shared.prim_module_name else shared.prim_param_name
        )
        whole = contiguous_spec(
            prefix + clean_tensor_name(fqn), local.dtype, held[clean_tensor_name(first)].whole.shape
        )
        held[fqn] = held[clean_tensor_name(first)]._replace(whole=whole)
    yield from held.values()


def _replica(unit: FullyShardedDataParallel, handle: Any, turns: Turns) -> tuple[int, int]:
    """Return the index of this rank among those that hold the same, and how many there are."""
    if not handle.uses_sharded_strategy:
        return turns.rank, turns.ranks
    group: Any = getattr(unit, "_inter_node_pg", None)
    mine, count = (group.rank(), group.size()) if group is not None else (0, 1)
    return mine, count
