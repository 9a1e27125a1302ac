"""Which way the weights come from verl's engine: as the parts that each rank holds, or as whole tensors.

verl's worker calls `engine.get_per_tensor_param()` and passes what that returns to our `send_weights`: a generator that
gathers every tensor on every rank. Nothing leads from there back to the engine. So that method of FSDPEngine is wrapped
(`watch`), and what it returns to the worker knows the engine: `Weights`, which gathers as before where it is iterated,
and otherwise nothing. Why this, of all roads:
- it is in place when our own engine is made, in the process where it is needed, whichever way we were loaded. A
  subclass in verl's registry of engines comes too late where only `custom_backend_module` names us, and one of the
  worker has to be repeated for each of verl's trainers;
- engines that export in another way (VeOmni, Megatron, torchtitan, Automodel) have that method as their own, and are
  left alone; so is every call with arguments, by which verl updates engines on the trainer's own GPUs.

All ranks take the same way: it is chosen by what is the same on all of them, or some would wait for a gather that the
others never join.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorhub_plugins.core import (
    Held,
    TensorSpec,
    Turns,
    fsdp1_parts,
    fsdp1_problem,
    fsdp2_parts,
    fsdp2_problem,
    held_split,
    is_fsdp1,
)

# vLLM keeps these in fp32 where the checkpoint has them so, and a router that is rounded chooses other experts.
EXACT = (
    "A_log",
    "gate.weight",
    "router.weight",
    "classifier.weight",
    "weights_proj.weight",
    "shared_expert_gate.weight",
)

LORA = "the adapter is merged into whole tensors"
QAT = "quantization-aware training quantizes whole tensors"
MOE_CUT = "the experts of a layer are one tensor that is not cut between experts"


def keeps_dtype(spec: TensorSpec) -> bool:
    """Whether this tensor of the model is published as the trainer has it, though another dtype is asked for.

    What vLLM or transformers keep in fp32 in some model is small: norms, biases, decays of state-space layers, mostly
    of one dimension, and routers. In fp32 they are right for every engine, which casts them where it wants less.
    """
    return len(spec.shape) < 2 or spec.name.endswith(("bias", *(f".{name}" for name in EXACT)))


class Weights:
    """What `get_per_tensor_param()` returns to verl's worker: iterated, it gathers."""

    def __init__(self, engine: Any, gather: Callable[[Any], tuple[Any, Any]]) -> None:
        self.engine = engine
        self._gather = gather

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights, _ = self._gather(self.engine)
        yield from weights


def watch() -> None:
    """From now on verl's FSDP engines return `Weights`. Twice is fine."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    original = FSDPEngine.get_per_tensor_param
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or why_gathered(self):
            return original(self, *args, **kwargs)
        return Weights(self, original), None

    FSDPEngine.get_per_tensor_param = get_per_tensor_param


def why_gathered(engine: Any) -> str:
    """Why whole tensors are needed of this engine; "" where each rank can publish its parts. The same on all ranks."""
    module = engine.module
    if hasattr(getattr(module, "_fsdp_wrapped_module", module), "peft_config"):
        return LORA
    if getattr(engine, "_qat_enabled", False):
        return QAT
    if is_fsdp1(module):
        return fsdp1_problem(module, torch.distributed.get_world_size())
    state = module.state_dict()
    problem: str = fsdp2_problem(state, torch.distributed.get_world_size())
    model_type = engine.model_config.hf_config.model_type
    cut_inside = [
        name for name, tensor in state.items() if _is_fused(name, tensor.shape, model_type) and _inner(tensor)
    ]
    return problem or (MOE_CUT if cut_inside else "")


def held_by_rank(engine: Any) -> Iterator[Held]:
    """This rank's parts, under the names of `get_per_tensor_param()`. `why_gathered` has nothing against it."""
    from verl.utils.model import convert_weight_keys

    module = engine.module
    turns = Turns(torch.distributed.get_rank(), torch.distributed.get_world_size())
    found = fsdp1_parts(module, turns) if is_fsdp1(module) else fsdp2_parts(module.state_dict(), turns)
    named = {held.whole.name: held for held in found}
    named = convert_weight_keys(named, getattr(module, "_fsdp_wrapped_module", module))
    for name, held in named.items():
        yield from _unfused(name, held, engine.model_config.hf_config.model_type)


def _is_fused(name: str, shape: tuple[int, ...], model_type: str) -> bool:
    """Whether verl's `unfuse_moe_params` makes a tensor for each expert of this one."""
    if len(shape) != 3 or (model_type == "gpt_oss" and ".mlp.experts." in name):
        return False
    return name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))


def _inner(tensor: torch.Tensor) -> bool:
    """Whether it is cut along another dimension than the first."""
    return isinstance(tensor, DTensor) and any(getattr(placement, "dim", 0) for placement in tensor.placements)


def _unfused(name: str, held: Held, model_type: str) -> Iterator[Held]:
    """As `unfuse_moe_params` of verl, of parts."""
    if not _is_fused(name, held.whole.shape, model_type):
        yield held.named(name)
        return
    experts, rows, columns = held.whole.shape
    base, _, last = name.rpartition(".")
    if last == "down_proj":
        names = [("down_proj", 0, rows)]
    else:  # torch.chunk: the first half is the larger one
        half = -(-rows // 2)
        names = [("gate_proj", 0, half), ("up_proj", half, rows - half)]
    pieces = [
        (f"{base}.{expert}.{projection}.weight", (expert * rows + first) * columns, (count, columns))
        for expert in range(experts)
        for projection, first, count in names
    ]
    yield from held_split(held, pieces)
