"""CUDA's handles of device memory, by which another process of this host opens it.

`Ipc` is all that cuda_ipc needs of CUDA besides the copies of device/devices.py. `CudaIpc` calls libcuda by ctypes;
tests/support/simulated_ipc.py simulates one, with which everything else is tested. CUDA requires:

* A handle is for a whole allocation, not for a tensor in it, and only for one of cudaMalloc. Memory of torch's
  expandable segments, of vLLM's sleep mode (both cuMemCreate) and of stream-ordered pools has none.
* The process that made a handle cannot open it.
* Memory must not be freed while others have it open: they close it when its owner releases it, see mapping_cache.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Protocol

import msgspec
import torch

from tensorhub_plugins.core.device.devices import Device

LIBRARY = "libcuda.so.1"
HANDLE_SIZE_BYTES = 64
# cuda.h
LAZY_ENABLE_PEER_ACCESS = 1
IS_LEGACY_IPC_CAPABLE = 10


class NotShareable(Exception):
    """This memory cannot be passed to, or opened by, another process, and why."""


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """One allocation of device memory."""

    base: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # its address in the owner's process
    size_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 48)]
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_SIZE_BYTES, max_length=HANDLE_SIZE_BYTES)]


class Ipc(Protocol):
    """The CUDA IPC calls of one process. Each is made within `device.calling()`; NotShareable where CUDA refuses."""

    @property
    def process(self) -> str:
        """Return a name that is unique among all processes of this host, dead ones included."""

    def device_id(self, device: Device) -> str:
        """Return an id that is the same in all processes."""

    def export(self, device: Device, address: int) -> Allocation:
        """Return the allocation that contains this address of ours."""

    def own(self, device: Device, allocation: Allocation) -> torch.Tensor:
        """Return uint8 over an allocation of this process itself."""

    def open(self, device: Device, allocation: Allocation) -> torch.Tensor:
        """Return uint8 over another process's allocation. NotShareable when it is smaller than announced."""

    def close(self, device: Device, opened: torch.Tensor) -> None:
        """Close what `open` returned, once nothing copies from it any more."""


class CudaIpc:
    """The implementation with CUDA's driver."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library
        self._lock = threading.Lock()
        self._cuda: Any = None
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @staticmethod
    def unavailable(library: str = LIBRARY) -> str | None:
        """Return why CUDA is missing here, as half a sentence, or None."""
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"there is no {library}, which comes with NVIDIA's driver"
        return None

    @property
    def process(self) -> str:
        return process_name()

    def device_id(self, device: Device) -> str:
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._ordinal(device))
        return str(uuid.UUID(bytes=bytes(found)))

    def export(self, device: Device, address: int) -> Allocation:
        with self._context(device):
            is_capable = ctypes.c_int(0)
            self._call(
                "cuPointerGetAttribute",
                ctypes.byref(is_capable),
                ctypes.c_int(IS_LEGACY_IPC_CAPABLE),
                ctypes.c_uint64(address),
            )
            if not is_capable.value:
                raise NotShareable(
                    "its memory has no CUDA handle: it is of expandable segments (PYTORCH_CUDA_ALLOC_CONF), of an "
                    "engine's sleep mode, or of a pool; allocate the weights without"
                )
            base, size_bytes = self._range_of(address)
            handle = (ctypes.c_ubyte * HANDLE_SIZE_BYTES)()
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return Allocation(base, size_bytes, bytes(handle))

    def own(self, device: Device, allocation: Allocation) -> torch.Tensor:
        return _tensor_over(device, allocation.base, allocation.size_bytes)

    def open(self, device: Device, allocation: Allocation) -> torch.Tensor:
        address = ctypes.c_uint64(0)
        with self._context(device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(allocation.handle),
                ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS),
            )
            try:
                base, size_bytes = self._range_of(address.value)
                if base != address.value or size_bytes < allocation.size_bytes:
                    raise NotShareable(f"it has {size_bytes} bytes, the source says {allocation.size_bytes}")
                return _tensor_over(device, address.value, allocation.size_bytes)
            except BaseException:
                self._call("cuIpcCloseMemHandle", address)
                raise

    def close(self, device: Device, opened: torch.Tensor) -> None:
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(opened.data_ptr()))

    def _range_of(self, address: int) -> tuple[int, int]:
        base, size_bytes = ctypes.c_uint64(0), ctypes.c_size_t(0)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size_bytes), ctypes.c_uint64(address))
        return base.value, size_bytes.value

    def _ordinal(self, device: Device) -> ctypes.c_int:
        found = ctypes.c_int(0)
        self._call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(_index_of(device)))
        return found

    @contextlib.contextmanager
    def _context(self, device: Device) -> Iterator[None]:
        """Enter the device's primary context, which is torch's. A thread that only called the runtime may lack one."""
        index = _index_of(device)
        with self._lock:
            if index not in self._contexts:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._ordinal(device))
                self._contexts[index] = context  # kept until the process ends, as torch does
        self._call("cuCtxPushCurrent_v2", self._contexts[index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        if self._cuda is None:
            cuda: Any = ctypes.CDLL(self._name)
            cuda.cuInit(ctypes.c_uint(0))
            self._cuda = cuda
        code = getattr(self._cuda, name)(*arguments)
        if code:
            reason = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(reason))
            raise NotShareable(f"{name}: error {code}, {(reason.value or b'unknown').decode()}")


def _index_of(device: Device) -> int:
    found = torch.device(device.name)
    if found.type != "cuda":  # to CUDA its index would mean another device
        raise NotShareable(f"{device.name} is no CUDA device")
    return found.index


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_SIZE_BYTES),)


class _Memory:
    """An array interface from which torch makes a tensor without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _tensor_over(device: Device, address: int, size_bytes: int) -> torch.Tensor:
    tensor = torch.as_tensor(_Memory(address, size_bytes), device=torch.device(device.name))
    if tensor.data_ptr() != address:  # torch has taken it for another device's, and copied it
        raise NotShareable("torch makes no tensor over memory of another device: a newer torch does")
    return tensor


_named: tuple[int, str] = (0, "")


def process_name() -> str:
    """Return a name for this process, and for no process forked from it."""
    global _named
    if _named[0] != os.getpid():
        _named = os.getpid(), f"{os.getpid()}-{uuid.uuid4().hex}"
    return _named[1]
