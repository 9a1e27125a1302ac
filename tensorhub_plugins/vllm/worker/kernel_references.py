"""Kernels that keep references to tensors of their layer, and a reload that replaces those.

vLLM's layerwise reload loads and packs a layer in new memory, copies the result into the layer's own tensors, and puts
these back. Objects that its quantization method has made in between, such as the scales in an experts' quantization
config or in their kernel, keep pointing into the new memory: right until the layer's own tensors are written, as by a
raw copy from a peer. (Captured graphs point to the layer's own, so only eager steps would be wrong.)

`rebound_references` points them back to the layer's own tensors, layer by layer. The new memory can then be freed, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from tensorhub_plugins.vllm.plugin import replaced

DEPTH_MAX = 8  # of objects in objects: method -> kernel -> experts -> config -> description -> tensor
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)


def rebound_references(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Rebind references in all layers that vLLM's reload processes within this block."""
    from vllm.model_executor.model_loader.reload import layerwise

    modules = {id(module) for module in model.modules()}
    original = layerwise._copy_and_restore_kernel_tensors

    def copy_and_restore(layer: torch.nn.Module, info: Any) -> None:
        new = {**layer._parameters, **layer._buffers}
        original(layer, info)
        own = {**layer._parameters, **layer._buffers}
        pairs = [(tensor, own.get(name)) for name, tensor in new.items()]
        moved = [(one, other) for one, other in pairs if one is not None and other is not None]
        rebind(getattr(layer, "quant_method", None), moved, skip=modules)

    return replaced(layerwise, _copy_and_restore_kernel_tensors=copy_and_restore)


def rebind(root: Any, moved: list[tuple[torch.Tensor, torch.Tensor]], *, skip: set[int]) -> int:
    """Replace each tensor in an old one's memory, wherever `root` refers to it, by the same view of the new one.

    moved: pairs (old, new) of equal shape and strides. skip: ids of objects that are not entered. Returns how many."""
    places = {
        old.untyped_storage().data_ptr(): (old, new)
        for old, new in moved
        if old.numel() and old.data_ptr() != new.data_ptr() and _alike(old, new)
    }
    return _rebind(root, places, set(skip), DEPTH_MAX) if places else 0


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _rebind(owner: Any, places: dict[int, tuple[torch.Tensor, torch.Tensor]], seen: set[int], depth: int) -> int:
    if depth == 0 or id(owner) in seen or isinstance(owner, (*PLAIN, torch.Tensor)):
        return 0
    seen.add(id(owner))
    count = 0
    for key, value in _members(owner):
        if isinstance(value, torch.Tensor):
            new = _same_view(value, places)
            if new is not None:
                _set(owner, key, new)
                count += 1
        elif isinstance(value, tuple) and any(isinstance(each, torch.Tensor) for each in value):
            views = [_same_view(each, places) if isinstance(each, torch.Tensor) else None for each in value]
            if any(view is not None for view in views):
                both = [each if view is None else view for each, view in zip(value, views, strict=True)]
                _set(owner, key, type(value)(*both) if hasattr(value, "_fields") else type(value)(both))
                count += 1
        else:
            count += _rebind(value, places, seen, depth - 1)
    return count


def _members(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return list(owner.items())
    if isinstance(owner, (list, tuple)):
        return list(enumerate(owner))
    slots = [name for cls in type(owner).__mro__ for name in getattr(cls, "__slots__", ())]
    named = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return list({**named, **getattr(owner, "__dict__", {})}.items())


def _set(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, (dict, list)):
        owner[key] = value
    elif isinstance(getattr(owner, "__dict__", None), dict) and key in vars(owner):
        vars(owner)[key] = value  # works for a frozen dataclass, too
    else:
        object.__setattr__(owner, key, value)


def _same_view(tensor: torch.Tensor, places: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
    pair = places.get(tensor.untyped_storage().data_ptr())
    if pair is None:
        return None
    old, new = pair
    if tensor is old:
        return new
    moved_bytes = new.storage_offset() * new.element_size() - old.storage_offset() * old.element_size()
    offset = tensor.storage_offset() + moved_bytes // tensor.element_size()
    view = torch.empty(0, dtype=tensor.dtype, device=new.device)
    return view.set_(new.untyped_storage(), offset, tensor.shape, tensor.stride())
