"""The memory of another process of this host, read by address: one copy, from its tensors straight into ours.

process_vm_readv needs the right to trace that process: the same user, and no security module that forbids it. With Yama
(kernel.yama.ptrace_scope=1, the default of several distributions) a process has to permit it: `let_others_read`. Where
it is forbidden altogether, `ProcessMemory.probe` detects that, and another way is taken.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.memory.runs import Extents, cut_extents
from tensorhub_plugins.core.transports.stream.channel import IOV_MAX

YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = -1


class ProcessMemory:
    """A stream of bytes that lies in pieces in the memory of process `pid`."""

    def __init__(self, pid: int, extents: bytes, size_bytes: int) -> None:
        """Parse the extents, as `pack` made them. Raise ProtocolError unless they are `size_bytes` long in total."""
        self._pid = pid
        if len(extents) % 16:
            raise ProtocolError("the source says in a way that cannot be read where its memory lies")
        self._extents = np.frombuffer(extents, "<u8").astype(np.uint64).reshape(-1, 2)
        ends = self._extents[:, 1].cumsum(dtype=np.uint64)
        if (int(ends[-1]) if len(ends) else 0) != size_bytes or int(self._extents[:, 1].max(initial=0)) > size_bytes:
            raise ProtocolError(f"the source's memory is not {size_bytes} bytes, as its manifest says")
        self._starts = ends - self._extents[:, 1]

    def probe(self) -> None:
        """Read one byte at either end. Raise OSError if that fails: PermissionError when it can never be read."""
        byte = memoryview(bytearray(1))
        for address, size_bytes in self._extents[[0, -1]] if len(self._extents) else ():
            if size_bytes:
                _read(self._pid, np.array([[address, 1]], np.uint64), extents_of([byte]))

    def read(self, start: int, stop: int, mine: Extents) -> None:
        """Copy the stream's bytes [start, stop) to these places. OSError when the process, or its memory, is gone."""
        if start == stop:
            return
        first = int(self._starts.searchsorted(start, "right")) - 1
        last = int(self._starts.searchsorted(stop, "left"))
        skip, take = start - int(self._starts[first]), stop - int(self._starts[last - 1])
        theirs = cut_extents(self._extents, first, last, skip, take)
        missing = stop - start
        while True:
            count = _read(self._pid, theirs[:IOV_MAX], mine[:IOV_MAX])
            missing -= count
            if not missing:  # nearly always at once
                return
            theirs, mine = _after(theirs, count), _after(mine, count)

    def close(self) -> None:
        """Do nothing: for callers that treat it like a file."""


def pack(extents: Extents | Sequence[tuple[int, int]]) -> bytes:
    """Encode the extents for the wire."""
    return np.asarray(extents, "<u8").tobytes()


def available() -> bool:
    """Return whether this system has the call at all."""
    return hasattr(_libc(), "process_vm_readv")


def let_others_read(yama_scope: Path = YAMA_SCOPE) -> None:
    """Allow processes of this user to read this one's memory, where Yama would not: as torch does for its own."""
    try:
        guarded = yama_scope.read_text().strip() == "1"
    except OSError:
        return
    if guarded:
        _libc().prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)


def _read(pid: int, theirs: Extents, mine: Extents) -> int:
    """Return how many bytes were copied: as many as the shorter side has, or fewer where memory ends."""
    count = _libc().process_vm_readv(
        ctypes.c_int(pid),
        ctypes.c_void_p(mine.ctypes.data),
        ctypes.c_ulong(len(mine)),
        ctypes.c_void_p(theirs.ctypes.data),
        ctypes.c_ulong(len(theirs)),
        ctypes.c_ulong(0),
    )
    if count <= 0:
        error = ctypes.get_errno() if count else 0
        raise OSError(error, os.strerror(error) if error else "nothing could be read")
    return int(count)


def extents_of(views: Sequence[memoryview]) -> Extents:
    """Return the addresses of these views in this process; the views must outlive their use."""
    places = [(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view)) for view in views if len(view)]
    return np.array(places, np.uint64).reshape(-1, 2)


def _after(extents: Extents, count: int) -> Extents:
    """Return what is left of the extents after their first `count` bytes."""
    ends = extents[:, 1].cumsum(dtype=np.uint64)
    done = int(ends.searchsorted(count, "right"))
    if done == len(extents):
        return extents[:0]
    skip = count - (int(ends[done - 1]) if done else 0)
    return cut_extents(extents, done, len(extents), skip, int(extents[-1, 1]))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "process_vm_readv"):
        libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc
