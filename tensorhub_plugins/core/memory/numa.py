"""The NUMA node on which pages are allocated: a device copies at full speed only to memory near it."""

from __future__ import annotations

import ctypes
import os
import platform

MPOL_PREFERRED = 1  # linux/mempolicy.h: another node where this one is full
NODES_MAX = 1024
_MBIND = {"x86_64": 237, "aarch64": 235}


def prefer(address: int, size_bytes: int, node: int) -> str:
    """Have pages that do not exist yet, from this page on, allocated on this node. Return why that failed, else ""."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < NODES_MAX:
        return f"not known how, for node {node} of {platform.machine()}"
    mask = (ctypes.c_ulong * (NODES_MAX // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    call = [ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), ctypes.c_ulong(MPOL_PREFERRED)]
    if libc.syscall(*call, mask, ctypes.c_ulong(NODES_MAX + 1), ctypes.c_ulong(0)):
        return os.strerror(ctypes.get_errno())
    return ""
