"""A model put back as it was: its tensors, attributes and loaders, whatever a rehearsal or a failed reload changed; and
its bytes, which no rehearsal changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub_plugins.core import Manifest
from tensorhub_plugins.vllm.worker.reachable_tensors import walk
from tensorhub_plugins.vllm.worker.weights import as_bytes

REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set")  # the registries that a module changes in place

Buffers = Sequence[tuple[torch.Tensor, torch.Tensor]]  # of a model, and what was in each


@contextmanager
def preserved(model: torch.nn.Module, *, always: bool = False) -> Iterator[None]:
    """Put every module, and what computes for it, back as it was when the block fails (or always).

    This restores the same tensors, attributes and loaders; not the bytes."""
    from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, get_layerwise_info

    owners: list[Any] = list(model.modules())
    owners += [m.quant_method for m in model.modules() if hasattr(getattr(m, "quant_method", None), "__dict__")]
    kept = [(owner, dict(vars(owner))) for owner in owners]
    registries = [(vars(owner)[name], vars(owner)[name].copy()) for owner in model.modules() for name in REGISTRIES]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or always:
            for owner, attributes in kept:
                vars(owner).clear()
                vars(owner).update(attributes)
            for registry, entries in registries:
                registry.clear()
                registry.update(entries)
            for layer in model.modules():
                get_layerwise_info(layer).reset()
            LOADING_LAYERS.clear()


class Untouched(TorchDispatchMode):
    """Skips what would write into memory of a model while its parameters are replaced by others: what loaders derive
    and keep beside them (DeepSeek-V4's sums) is of the version that answers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        tensors = (value for _, value in walk(model) if isinstance(value, torch.Tensor))
        self._live = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[place] if place < len(args) else kwargs.get(argument.name)
                if isinstance(target, torch.Tensor) and self._is_live(target):
                    return target
                if isinstance(target, (list, tuple)) and any(map(self._is_live, target)):  # torch._foreach_*
                    others = [k for k, each in enumerate(target) if not self._is_live(each)]
                    if others:
                        args = [[each[k] for k in others] if isinstance(each, (list, tuple)) else each for each in args]
                        func(*args, **kwargs)
                    return None
        return func(*args, **kwargs)

    def _is_live(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._live


def copied_buffers(model: torch.nn.Module) -> Buffers:
    """Return its buffers, and copies. No checkpoint fills them, as rotary tables, or not every one, as scales of KV."""
    return [(buffer, buffer.clone()) for buffer in map(as_bytes, model.buffers()) if not buffer.is_meta]


@dataclass
class ExternalCall:
    """A call of another client's that may change the weights, while it runs. is_certain: it does."""

    is_certain: bool
    before: Manifest | None = None  # of them, then; None: they were asleep
    buffers: Buffers = ()
    failure: str = ""  # of a part of it
