"""Checkpoint tensors of which only some regions are here, for loaders that want whole ones.

Nothing is made of such a tensor but views, until an operation reads one: then it gets the same view of the region, on
the device where the loaders write. So no full tensor takes memory, nothing is copied only to lie in one, and a loader
that reads what is not here is told so (NotEnough) instead of getting other numbers. It cannot get around that: there is
no memory behind the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tensorhub_plugins.core import copy_all
from tensorhub_plugins.vllm.worker import plan


class NotEnough(Exception):
    """More of a checkpoint is needed than what is here; the weights are mixed."""


def whole(given: plan.Given, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the published shapes for loaders that write on this device, also those of which nothing is here.
    Each one's memory there lives only as long as its user holds it."""
    for name in names:
        dtype, shape = given.shapes[name]
        held = given.held.get(name, ())
        if held and held[0].region.shape == tuple(shape):
            yield name, held[0].tensor
        else:
            yield name, Partial.of(held, dtype, shape, device)


class Partial(torch.Tensor):
    """A view of a tensor whose regions are held. `meta`: the same view of one without memory."""

    _held: Sequence[plan.Held]
    _whole: tuple[torch.dtype, torch.Size]
    _meta: torch.Tensor

    @staticmethod
    def of(held: Sequence[plan.Held], dtype: torch.dtype, shape: torch.Size, device: torch.device) -> Partial:
        """Make the whole one, for loaders that write on this device."""
        return Partial._make(held, (dtype, shape), torch.empty(shape, dtype=dtype, device="meta"), device)

    @staticmethod
    def _make(held: Sequence[plan.Held], whole: Any, meta: torch.Tensor, device: torch.device) -> Partial:
        made: Partial = torch.Tensor._make_wrapper_subclass(
            Partial, meta.shape, meta.stride(), int(meta.storage_offset()), dtype=meta.dtype, device=device
        )
        made._held, made._whole, made._meta = held, whole, meta
        return made

    def _here(self) -> torch.Tensor:
        """Return the numbers, on the device that this tensor says it is on."""
        dtype, shape = self._whole
        box = int(self._meta.storage_offset()), tuple(self._meta.shape), tuple(self._meta.stride())
        try:
            if self._meta.dtype == dtype:
                found = plan.view_in(self._held, shape, box)
            else:  # its bytes as other numbers
                found = plan.view_in(self._held, shape, plan.whole_region(shape).box_in(shape))
                found = plan.view(found.reshape(-1).view(self._meta.dtype), box)
        except (ValueError, IndexError) as error:
            raise NotEnough(f"loaders read more of a tensor {list(shape)} than what was seen: {error}") from error
        if found.device == self.device:
            return found
        here = torch.empty(found.shape, dtype=found.dtype, device=self.device)
        copy_all([(here, found)])
        return here

    def there(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Partial:
        """Return the same with what it may read on its device; `copies` gets the targets, and sources, of copies that
        are to be made before."""
        dtype, shape = self._whole
        if self._meta.dtype != dtype:
            return self
        box = int(self._meta.storage_offset()), tuple(self._meta.shape), tuple(self._meta.stride())
        held = []
        for region, source in plan.within(self._held, shape, box):
            held.append(plan.Held(region, torch.empty(source.shape, dtype=dtype, device=self.device)))
            copies.append((held[-1].tensor, source))
        return self._make(held, self._whole, self._meta, self.device)

    def data_ptr(self) -> int:
        """Raise NotEnough: there is no memory to read."""
        raise NotEnough("loaders ask for the address of what they are given")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if plan.is_view(func) and isinstance(args[0], Partial):
            one = args[0]
            made = func(one._meta, *args[1:], **kwargs)
            return tree_map_only(torch.Tensor, lambda m: cls._make(one._held, one._whole, m, one.device), made)
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            return args[0]  # vLLM counts elements first
        writes = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        if any(isinstance(value, Partial) and write for value, write in zip(args, writes, strict=False)):
            raise NotEnough("loaders write into what they are given")
        args, kwargs = tree_map_only(Partial, Partial._here, (args, kwargs))
        return func(*args, **kwargs)
