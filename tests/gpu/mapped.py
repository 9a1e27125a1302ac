"""Device memory of an engine that can sleep: made by cuMemCreate, unmapped and mapped again at the same address, as
vLLM's sleep mode does it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

# cuda.h
LIBRARY = "libcuda.so.1"
PINNED, DEVICE, READ_WRITE = 1, 1, 3


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class OnGpu:
    """uint8 on device 0; `tensor` is at the same address whenever it is mapped."""

    def __init__(self, size_bytes: int) -> None:
        self._cuda: Any = ctypes.CDLL(LIBRARY)
        self._properties = Properties(type=PINNED, location=Location(DEVICE, 0))
        granularity, address = ctypes.c_size_t(), ctypes.c_uint64()
        self._ask("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._size = ctypes.c_size_t(-(-size_bytes // granularity.value) * granularity.value)
        nothing = ctypes.c_uint64(0)
        self._ask("cuMemAddressReserve", ctypes.byref(address), self._size, ctypes.c_size_t(0), nothing, nothing)
        self._address, self._handle = address, ctypes.c_uint64()
        self.map()
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 2,
        }
        self.tensor = torch.as_tensor(self, device="cuda:0")

    def map(self) -> None:
        """With what nobody has written."""
        properties, access = ctypes.byref(self._properties), Access(Location(DEVICE, 0), READ_WRITE)
        nothing = ctypes.c_uint64(0)
        self._ask("cuMemCreate", ctypes.byref(self._handle), self._size, properties, nothing)
        self._ask("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, nothing)
        self._ask("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self) -> None:
        """The memory goes to others, when nobody has a hold on it."""
        torch.cuda.synchronize()
        self._ask("cuMemUnmap", self._address, self._size)
        self._ask("cuMemRelease", self._handle)

    def free(self) -> None:
        """The address, too."""
        self.unmap()
        self._ask("cuMemAddressFree", self._address, self._size)

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        assert not code, f"{name}: error {code}"


class OnStandIn:
    """The same on the simulated device: what copies from it, or to it, while it is unmapped, is a fault."""

    def __init__(self, place: Any, size_bytes: int) -> None:
        self._simulation = place.simulation
        self.tensor = place.random(size_bytes, 77)

    def map(self) -> None:
        """Its bytes are those of others."""

    def unmap(self) -> None:
        self._simulation.touch(self.tensor, "to unmap it", writes=True)
        self._simulation.true(self.tensor).fill_(0x5A)

    def free(self) -> None:
        """It goes with the simulation."""


@contextlib.contextmanager
def mapped(place: Any, size_bytes: int) -> Iterator[OnGpu | OnStandIn]:
    memory = OnGpu(size_bytes) if place.is_gpu else OnStandIn(place, size_bytes)
    try:
        yield memory
    finally:
        memory.free()
