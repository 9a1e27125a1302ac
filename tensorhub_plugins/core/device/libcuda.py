"""Facts about device memory that only CUDA's driver has, by ctypes. For drivers.py, which makes sure that the calling
thread has a context."""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libcuda.so.1"
CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1  # cuda.h


def allocation(address: int) -> tuple[int, int]:
    """Return the first address and the one after the last of the allocation around this one. Raise OSError."""
    start, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    _ask("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size_bytes), ctypes.c_uint64(address))
    return start.value, start.value + size_bytes.value


def export_dma_buf(start: int, size_bytes: int) -> int:
    """Return a descriptor of whole pages. Raise OSError."""
    fd = ctypes.c_int(-1)
    where = ctypes.c_uint64(start), ctypes.c_size_t(size_bytes)
    kind = ctypes.c_int(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
    _ask("cuMemGetHandleForAddressRange", ctypes.byref(fd), *where, kind, ctypes.c_uint64(0))
    return fd.value


def _ask(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(LIBRARY)
    code = getattr(library, name)(*arguments)
    if code:
        reason = ctypes.c_char_p()
        library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(reason))
        raise OSError(f"CUDA's {name}: {(reason.value or b'no reason').decode()}")
