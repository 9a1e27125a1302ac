"""Which way the weights come from verl's engine: as the parts that each rank holds, or as whole tensors.

verl's worker calls `engine.get_per_tensor_param()` and passes what that returns to our `send_weights`: a generator that
gathers every tensor on every rank. Nothing leads from there back to the engine. So that method of FSDPEngine is wrapped
(`watch`), and what it returns to the worker knows the engine: `Weights`, which gathers as before where it is iterated,
and otherwise nothing. Why this, of all roads:
- it is in place when our own engine is made, in the process where it is needed, whichever way we were loaded. A
  subclass in verl's registry of engines comes too late where only `custom_backend_module` names us, and one of the
  worker has to be repeated for each of verl's trainers;
- of a LoRA run verl would send the base weights, without the adapter: the adapter alone is published instead;
- Megatron's engine has that method as its own, which is wrapped, too: see megatron.py for what its ranks hold;
- engines that export in another way (VeOmni, torchtitan, Automodel) are left alone; so is every call with arguments, by
  which verl updates engines on the trainer's own GPUs.

The names are verl's, but for models whose experts transformers 5 fuses and verl publishes under names of no checkpoint:
it makes gate_proj of Mixtral's w1, and leaves those of LFM2 fused. Of these all come under the checkpoint's, which vLLM
loads (`as_saved`).

All ranks take the same way: it is chosen by what is the same on all of them, or some would wait for a gather that the
others never join.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from tensorhub_plugins.core import (
    Held,
    TensorSpec,
    Turns,
    UsageError,
    fsdp1_parts,
    fsdp1_problem,
    fsdp2_parts,
    fsdp2_problem,
    held_split,
    is_fsdp1,
)
from tensorhub_plugins.verl import megatron
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.lora import adapter_parts
from tensorhub_plugins.vllm.plugin import wrap

Gather: TypeAlias = Callable[[Any], tuple[Any, Any]]  # verl's own: of an engine
Piece: TypeAlias = tuple[str, int, tuple[int, ...]]  # name, first element, shape: of a tensor that lies in another

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
    """Return whether this tensor of the model is published as the trainer has it, though another dtype is asked for.

    What vLLM or transformers keep in fp32 in some model is small: norms, biases, decays of state-space layers, mostly
    of one dimension, and routers. In fp32 they are right for every engine, which casts them where it wants less."""
    return len(spec.shape) < 2 or spec.name.endswith(("bias", *(f".{name}" for name in EXACT)))


class Weights:
    """What `get_per_tensor_param()` returns to verl's worker: iterated, it gathers. held: see there."""

    def __init__(self, engine: Any, gather: Gather, held: Callable[[Any], Iterator[Held]]) -> None:
        self.engine = engine
        self._gather, self._held = gather, held

    def held(self) -> Iterator[Held]:
        """Return what this rank holds; nothing is gathered."""
        return self._held(self.engine)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights, _ = self._gather(self.engine)
        yield from weights


def watch() -> None:
    """Have verl's FSDP and Megatron engines return `Weights` from now on. Calling it twice is fine."""
    from verl.workers.engine import fsdp

    wrap(fsdp.FSDPEngine, "get_per_tensor_param", functools.partial(_exported, _of_fsdp))
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        from verl.workers.engine.megatron.transformer_impl import MegatronEngine

        wrap(MegatronEngine, "get_per_tensor_param", functools.partial(_exported, _of_megatron))


def _exported(
    give: Callable[[Any, Gather], tuple[Any, Any]], original: Gather, engine: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    return original(engine, *args, **kwargs) if args or kwargs else give(engine, original)


def _of_fsdp(engine: Any, gather: Gather) -> tuple[Any, Any]:
    def renamed(engine: Any) -> tuple[Any, Any]:
        (weights, adapter), saved = gather(engine), as_saved(engine)
        return (_renamed(weights, saved) if saved else weights), adapter

    why = why_gathered(engine)
    if why == LORA and not engine.model_config.lora.get("merge", False):
        return Weights(engine, renamed, adapter_by_rank), None  # all that changes, see docs/lora.md: never gathered
    return renamed(engine) if why else (Weights(engine, renamed, held_by_rank), None)


def _of_megatron(engine: Any, gather: Gather) -> tuple[Any, Any]:
    from verl.utils.megatron_utils import load_megatron_model_to_gpu

    if engine.peft_cls is not None or engine._qat_enabled:
        return gather(engine)
    load_megatron_model_to_gpu(engine.module, load_grad=False)
    return gather(engine) if megatron.why_gathered(engine) else (Weights(engine, gather, megatron.held_by_rank), None)


def adapter_by_rank(engine: Any) -> Iterator[Held]:
    """Return this rank's parts of the adapter, under the names of PEFT; the base weights are not touched."""
    module, rank = engine.module, torch.distributed.get_rank()
    return adapter_parts(getattr(module, "_fsdp_wrapped_module", module), _held(module), rank)


def why_gathered(engine: Any) -> str:
    """Return why whole tensors are needed of this engine; "" where each rank can publish its parts. The same on all
    ranks."""
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


def held_by_rank(engine: Any, kind: type[Turns] = Turns) -> Iterator[Held]:
    """Return this rank's parts, under the names of `Weights`, whose turn it is. `why_gathered` has nothing against
    it."""
    named = {held.whole.name: held for held in _held(engine.module, kind)}
    saved, model_type = as_saved(engine), engine.model_config.hf_config.model_type
    for name, held in _as_verl_calls_them(named, engine.module).items():
        pieces = _unfused(name, held.whole.shape, model_type)
        if saved:
            pieces = [(new, first + at, shape) for old, first, _ in pieces for new, at, shape in saved[old]]
        if len(pieces) == 1 and pieces[0][2] == held.whole.shape:
            yield held.named(pieces[0][0])
        else:
            yield from held_split(held, pieces)


def _held(module: Any, kind: type[Turns] = Turns) -> Iterator[Held]:
    turns = kind(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return fsdp1_parts(module, turns) if is_fsdp1(module) else fsdp2_parts(module.state_dict(), turns)


def _as_verl_calls_them(tensors: dict[str, Any], module: Any) -> dict[str, Any]:
    from verl.utils.model import convert_weight_keys

    return convert_weight_keys(tensors, getattr(module, "_fsdp_wrapped_module", module))


def as_saved(engine: Any) -> Mapping[str, list[Piece]]:
    """Return what each tensor of verl's is in a checkpoint; {} where verl's names do. The same on all ranks, computed
    once.

    For experts of which a checkpoint has a tensor each, under other names than verl's, in memory as the model has them.
    """
    if not hasattr(engine, "_tensorhub_saved"):
        engine._tensorhub_saved = _as_saved(engine)
    return engine._tensorhub_saved


def _as_saved(engine: Any) -> dict[str, list[Piece]]:
    module, model_type = engine.module, engine.model_config.hf_config.model_type
    if why_gathered(engine) in (LORA, QAT):
        return {}
    if not is_fsdp1(module):
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    elif fsdp1_problem(module, torch.distributed.get_world_size()):
        return {}
    else:
        shapes = {held.whole.name: held.whole.shape for held in _held(module)}
    own = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if not any(".experts." in name and len(shape) == 3 for name, shape in shapes.items()):
        return {}
    # Views of the model's own tensors, where the checkpoint's lie in them.
    lying: dict[int, list[tuple[int, str, torch.Tensor]]] = {}
    try:
        converted = checkpoint_names.convert(module, own)
    except UsageError:  # what it is called in a checkpoint is not known
        return {}
    for name, tensor in converted.items():
        if tensor.is_contiguous():
            lying.setdefault(_memory(tensor), []).append((int(tensor.storage_offset()), name, tensor))
    saved: dict[str, list[Piece]] = {}
    for name, tensor in _as_verl_calls_them(own, module).items():
        for piece, first, shape in _unfused(name, tuple(tensor.shape), model_type):
            end = first + prod(shape)
            saved[piece] = [
                (new, at - first, tuple(part.shape))
                for at, new, part in sorted(lying.get(_memory(tensor), ()))
                if first <= at and at + part.numel() <= end
            ]
            if sum(prod(part) for _, _, part in saved[piece]) != end - first:
                return {}  # a checkpoint has these experts together
    others = any(".experts." in name and [new for new, _, _ in pieces] != [name] for name, pieces in saved.items())
    return saved if others else {}


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _renamed(
    weights: Iterable[tuple[str, torch.Tensor]], saved: Mapping[str, list[Piece]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        for new, first, shape in saved.get(name, [(name, 0, tuple(tensor.shape))]):
            yield new, tensor if tensor.shape == shape else tensor.reshape(-1)[first : first + prod(shape)].view(shape)


def _is_fused(name: str, shape: tuple[int, ...], model_type: str) -> bool:
    """Return whether verl's `unfuse_moe_params` makes a tensor for each expert of this one."""
    if len(shape) != 3 or (model_type == "gpt_oss" and ".mlp.experts." in name):
        return False
    return name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))


def _inner(tensor: torch.Tensor) -> bool:
    """Return whether it is cut along another dimension than the first."""
    return isinstance(tensor, DTensor) and any(getattr(placement, "dim", 0) for placement in tensor.placements)


def _unfused(name: str, shape: tuple[int, ...], model_type: str) -> list[Piece]:
    """Yield the tensors of the single experts, as `unfuse_moe_params` of verl."""
    if not _is_fused(name, shape, model_type):
        return [(name, 0, shape)]
    experts, rows, columns = shape
    base, _, last = name.rpartition(".")
    if last == "down_proj":
        names = [("down_proj", 0, rows)]
    else:  # torch.chunk: the first half is the larger one
        half = -(-rows // 2)
        names = [("gate_proj", 0, half), ("up_proj", half, rows - half)]
    return [
        (f"{base}.{expert}.{projection}.weight", (expert * rows + first) * columns, (count, columns))
        for expert in range(experts)
        for projection, first, count in names
    ]
