"""Slabs of every kind, and what their streams must be, computed without any code that is tested."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Plain
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of


def raw(tensor: torch.Tensor) -> bytes:
    """Return a dense tensor's bytes in memory order, by its address alone."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def stream(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the stream by its definition: the bytes in the order of the names."""
    return b"".join(raw(tensors[name]) for name in sorted(tensors))


def allocated(tensors: Mapping[str, torch.Tensor]) -> Slab:
    slab = Slab.allocate(spec_of(name, tensor) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        slab.write(name, tensor)
    return slab


def through_host(tensors: Mapping[str, torch.Tensor]) -> Slab:
    """Make a slab that is treated as device memory, on the CPU: through host buffers, committed at the end."""
    slab = Slab.adopt(tensors)
    slab._copy_through_host(Device("cpu", Plain()))
    return slab


KINDS: dict[str, Callable[[Mapping[str, torch.Tensor]], Slab]] = {
    "adopted": Slab.adopt,
    "allocated": allocated,
    "through host": through_host,
}
