"""Which way the weights come out of DeepSpeed's ZeRO-3: as the parts that each rank holds, or as whole tensors.

ZeRO-3 cuts every parameter, as one run of elements, in equal pieces, the last of which may be padded. A rank publishes
its piece as it is, without a collective. Whole tensors are gathered where that is not all there is to it
(`why_gathered`, the same on all ranks): a checkpoint whose tensors are not the model's own; pieces that are quantized,
on disk, or cut among some of the ranks only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import distributed

from tensorhub_plugins.core import Held, Turns, UsageError, contiguous_spec, held_run
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.checkpoint_names import Step
from tensorhub_plugins.vllm.lora import adapter_parts

CONVERTED = "the checkpoint's tensors are not the model's own"


def why_gathered(model: torch.nn.Module, steps: Iterable[Step], ranks: int) -> str:
    """Return why whole tensors are needed; "" where each rank can publish its parts. model: whose tensors the steps
    name."""
    own = model.state_dict(keep_vars=True)
    if not _are_its_own(model, own, steps):
        return CONVERTED
    for step in steps:
        problem = _problem(step.sources[0], own[step.sources[0]], ranks)
        if problem:
            return problem
    return ""


def held_by_rank(model: torch.nn.Module, steps: Iterable[Step], kind: type[Turns] = Turns) -> Iterator[Held]:
    """Yield this rank's parts, under the names of a checkpoint. `why_gathered` has nothing against it."""
    own = model.state_dict(keep_vars=True)
    turns = kind(distributed.get_rank(), distributed.get_world_size())
    for step in steps:
        (name,) = step.targets
        yield _held(name, own[step.sources[0]], turns)


def adapter_by_rank(model: torch.nn.Module) -> Iterator[Held]:
    """Yield this rank's parts of a LoRA adapter, of which every rank has all unless it is cut, under PEFT's names.
    Raise UsageError where the parts are not known."""
    turns = Turns(distributed.get_rank(), distributed.get_world_size())
    own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if ".lora_" in name}
    for name, tensor in own.items():
        if problem := _problem(name, tensor, turns.ranks):
            raise UsageError(f"{problem}: set --ds.zero_stage 2, or train without LoRA")
    return adapter_parts(model, (_held(name, tensor, turns) for name, tensor in own.items()), turns.rank)


def _held(name: str, tensor: Any, turns: Turns) -> Held:
    if not hasattr(tensor, "ds_tensor"):  # a buffer, or not ZeRO-3: every rank has it
        return turns.one_of_all(name, tensor)
    piece = tensor.ds_tensor.detach().view(-1)
    whole = contiguous_spec(name, piece.dtype, tensor.ds_shape)
    elements: int = prod(whole.shape)
    start = min(turns.rank * piece.numel(), elements)
    return held_run(whole, piece[: elements - start], start)


def _are_its_own(model: torch.nn.Module, own: Mapping[str, Any], steps: Iterable[Step]) -> bool:
    """Return whether a checkpoint has the model's tensors as they are, if only under other names."""
    sources = [name for step in steps for name in step.sources]
    given = {name: torch.empty(tuple(shape_of(own[name])), dtype=own[name].dtype, device="meta") for name in sources}
    known = {id(tensor) for tensor in given.values()}
    return all(id(tensor) in known for tensor in checkpoint_names.convert(model, given).values())


def shape_of(tensor: Any) -> Iterable[int]:
    """Return the shape of the whole tensor, which ZeRO-3 leaves empty."""
    return getattr(tensor, "ds_shape", tensor.shape)


def _problem(name: str, tensor: Any, ranks: int) -> str:
    piece = getattr(tensor, "ds_tensor", None)
    if piece is None:
        return ""
    if hasattr(piece, "ds_quant_scale"):
        return f"{name} is quantized where it is kept"
    if piece.device.type == "meta" or getattr(piece.status, "name", "AVAILABLE") != "AVAILABLE":
        return f"{name} is not in memory"
    if piece.numel() != -(-prod(shape_of(tensor)) // ranks):
        return f"{name} is not cut into {ranks} pieces"
    return ""
