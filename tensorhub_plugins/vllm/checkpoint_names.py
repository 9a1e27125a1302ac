"""A trainer's tensors under the names of a saved checkpoint, which are the names that vLLM loads.

transformers 5 renames and fuses what it loads. The experts of a Mixtral layer, for example:
    in the checkpoint   model.layers.0.block_sparse_moe.experts.0.w1.weight and experts.0.w3.weight, experts.1.w1. ...
    in the model        model.layers.0.mlp.experts.gate_up_proj
`save_pretrained` takes that back, and so does this, in memory and with the functions of transformers that it calls:

    trainer.publish(step, checkpoint_tensors(model))

That is for a model whose tensors are whole in this process. Of a sharded one, `steps` says which tensors have to be
gathered together, and `convert` names them: memory for one step is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tensorhub_plugins.core import UsageError, settle_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]

CONTAINED = ("_orig_mod", "_fsdp_wrapped_module", "module")  # what torch.compile, FSDP, and DDP and others call it


def checkpoint_tensors(model: torch.nn.Module, state_dict: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` would write, by name, in its dtypes. Tied weights come once, as there.

    Nearly all of them are the model's own memory or views of it (only where a checkpoint concatenates what the model
    holds apart there are copies): publish with `copy=True`, the default, and training may go on.

    model: of transformers 5 or newer; torch.compile, DDP or DeepSpeed (ZeRO 1 and 2) may be around it. state_dict:
    whole tensors under the model's own names, where `model.state_dict()` has none: gathered from shards
    (`get_model_state_dict` with `full_state_dict=True`), or with adapters merged.

    Raise UsageError for what is not supported, and say what to do: a model that is sharded (FSDP, ZeRO 3, tensor
    parallel), offloaded, quantized, or has adapters (PEFT)."""
    whole, inner = state_dict, pretrained(model)
    if whole is None:
        check_whole(model)
        whole = inner.state_dict()
    kept = _kept(inner, whole)
    for name in kept:
        _check_tensor(name, whole[name])
    return convert(inner, {name: whole[name].detach() for name in kept})


@dataclass(frozen=True)
class Step:
    """sources: names of the model's own tensors. targets: what becomes of them, in the checkpoint."""

    sources: tuple[str, ...]
    targets: Mapping[str, tuple[torch.dtype, torch.Size]]


def steps(model: torch.nn.Module, shape: Callable[[torch.Tensor], Iterable[int]] = lambda t: t.shape) -> list[Step]:
    """Yield the steps to the checkpoint, in the same order on every rank; most steps are of one tensor.

    shape: of a whole tensor, given what the model has of it. Nothing is gathered and no memory is used."""
    inner = pretrained(model)
    _check_adapters(inner)
    own = inner.state_dict(keep_vars=True)
    traced = {name: _Traced.of(name, own[name], shape) for name in _kept(inner, own)}
    found: dict[str, tuple[set[str], dict[str, tuple[torch.dtype, torch.Size]]]] = {}  # by source; some share one
    for target, tensor in convert(inner, traced).items():
        assert isinstance(tensor, _Traced), f"{target} comes from no tensor of the model"
        sources, targets = set(tensor.sources), {target: (tensor.dtype, tensor.shape)}
        for known_sources, known_targets in [found[source] for source in tensor.sources if source in found]:
            sources |= known_sources
            targets = {**known_targets, **targets}
        found.update(dict.fromkeys(sources, (sources, targets)))
    ordered: list[Step] = []
    for name in traced:
        if name in found:
            sources, targets = found[name]
            ordered.append(Step(tuple(n for n in traced if n in sources), targets))
            for source in sources:
                del found[source]
    return ordered


def convert(model: torch.nn.Module, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Whole tensors of one step, or of several, under the names and in the shapes of the checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    inner = pretrained(model)
    settle_host(tensors.values())  # some become others, and are read
    try:
        with _NoCopies():
            return dict(revert_weight_conversion(inner, dict(tensors)))
    except RuntimeError:  # some operation does need its input in one piece
        return dict(revert_weight_conversion(inner, dict(tensors)))


class _NoCopies(TorchFunctionMode):
    """Lets views stay views: some versions of transformers copy each half of all experts, where a view would do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.contiguous:
            return args[0]
        return function(*args, **(kwargs or {}))


# --- what there is to save ---


def _kept(model: PreTrainedModel, tensors: Tensors) -> list[str]:
    """Return the names that are saved: of tied tensors only the one that `from_pretrained` expects."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r} is no tensor but {type(tensor).__name__}: give a state_dict without it")
    ignored = model._keys_to_ignore_on_save or ()
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    tied = getattr(model, "all_tied_weights_keys", {})

    def memory(name: str) -> Any:
        if name not in own and tied.get(name) in tensors:
            name = tied[name]  # FSDP1 hides it, and gathers each name into memory of its own
        return _identity(own.get(name, tensors[name]))

    # transformers looks at addresses. These stand for the tensors, which may be sharded, or be parts of one buffer.
    stand_ins: dict[Any, torch.Tensor] = {}
    names = {
        name: stand_ins.setdefault(memory(name), torch.empty(1, device="cpu"))
        for name in tensors
        if name not in ignored
    }
    try:
        return list(remove_tied_weights_from_state_dict(names, model))
    except RuntimeError as error:
        raise UsageError(f"save_pretrained would refuse this model: {error}") from error


def _identity(tensor: torch.Tensor) -> Any:
    """Return the same for tensors that are the same memory."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.numel():
        return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return id(tensor)


class _Traced(torch.Tensor):
    """A tensor without memory that knows of which tensors of the model it is made."""

    sources: frozenset[str]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, shape: Callable[[torch.Tensor], Iterable[int]]) -> _Traced:
        traced = torch.empty(tuple(shape(tensor)), dtype=tensor.dtype, device="meta").as_subclass(cls)
        traced.sources = frozenset([name])
        return traced

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Traced)]
        for made in tree_leaves(result):
            if isinstance(made, _Traced):
                made.sources = frozenset[str]().union(*(leaf.sources for leaf in given))
        return result


# --- what is not supported ---


def pretrained(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model in its containers."""
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
        from transformers.modeling_utils import remove_tied_weights_from_state_dict  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the names of a checkpoint come from transformers 5 or newer ({error}). Before version 5 transformers did "
            "not fuse tensors: publish model.state_dict(), and compare its names with those of a saved checkpoint if "
            "the model has parts for images or sound"
        ) from error
    inner: Any = model
    while not isinstance(inner, transformers.PreTrainedModel):
        around = inner
        children = {**vars(around), **around._modules}
        inner = next((children[name] for name in CONTAINED if name in children), None)
        if inner is None:
            hint = ": merge its adapters, or give merged tensors as state_dict" if hasattr(model, "peft_config") else ""
            raise UsageError(
                f"{type(around).__name__} is not a transformers model, so its checkpoint's names are unknown{hint}"
            )
    if getattr(inner, "hf_quantizer", None) is not None:
        raise UsageError("the model is quantized: publish the weights of a model that is not")
    return inner


def check_whole(model: torch.nn.Module) -> None:
    remedy = "publish checkpoint_tensors(model, state_dict) with a full state dict"
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UsageError(f"the model is sharded by FSDP: {remedy}")
    if any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
        raise UsageError(f"the model is sharded by DeepSpeed's ZeRO 3: {remedy}")
    if getattr(pretrained(model), "_tp_size", None) is not None:
        raise UsageError(f"the model is split by tensor parallelism: {remedy}")
    _check_adapters(pretrained(model))


def _check_adapters(model: PreTrainedModel) -> None:
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise UsageError("the model has adapters (PEFT): merge them, or give merged tensors as state_dict")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "full_tensor"):
        raise UsageError(f"{name!r} is sharded (a DTensor): give a full state_dict, or use transfer.CheckpointSource")
    if tensor.is_meta:
        raise UsageError(f"{name!r} is offloaded (on the meta device): load the model without device_map")
