"""The codec's loops in C, for a process whose machine has a compiler; the same bytes as by numpy, several times faster.

There is nothing to install: the source is part of the package, and is compiled in the background, in a second, into
memory of this process. Until that is done, and where there is no compiler, numpy does the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorhub_plugins.core.deltas.codec import NUMPY, Elements, Kernel, Streams
from tensorhub_plugins.core.threads import Thread

SOURCE = Path(__file__).with_name("kernel.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-shared", "-fPIC")  # and for no special processor: a container may move
COMPILE_S_MAX = 60.0

_log = logging.getLogger(__name__)
_begun: set[int] = set()  # the processes that have: a fork has none of its parent's threads
_kernel: Kernel = NUMPY


class NativeKernel:
    """The loops of a compiled library. They run without the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def difference(self, old: Elements, new: Elements, *, bitmap: bool) -> Streams:
        count, size = old.size, old.dtype.itemsize
        positions = np.empty(-(-count // 8) if bitmap else count + count // 255 + 1, np.uint8)
        steps, large, sizes = np.empty(count // 2 + 1, np.uint8), np.empty(count, old.dtype), np.zeros(3, np.int64)
        function = getattr(self._library, f"difference_b{size}")  # by a key it is another one, and a cycle, each time
        function(*_addresses(old, new), _long(count), int(bitmap), *_addresses(positions, steps, large, sizes))
        taken = sizes.tolist()
        return Streams(positions[: taken[0]], steps[: taken[1]], large[: taken[2]])

    def apply(self, target: Elements, streams: Streams, *, bitmap: bool) -> None:
        sized = [each for stream in streams for each in (*_addresses(stream), _long(stream.size))]
        function = getattr(self._library, f"apply_b{target.dtype.itemsize}")
        if function(*_addresses(target), _long(target.size), int(bitmap), *sized):
            raise ValueError("positions and steps that are of no such array")


def kernel() -> Kernel:
    """Return the fastest kernel that there is by now."""
    return _kernel


def begin() -> None:
    """Begin to compile the native kernel, in the background; once in a process, when deltas are first in sight."""
    if _kernel is NUMPY and os.getpid() not in _begun:
        _begun.add(os.getpid())
        with contextlib.suppress(RuntimeError):  # the system has no thread left
            Thread(target=_compile_quietly, name="tensorhub-compile").start()


def compiled(compilers: Sequence[str] = COMPILERS) -> Kernel:
    """Return the native kernel, compiled now. Raise OSError, or subprocess's errors, where that is not possible."""
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"there is none of {', '.join(compilers)}")
    with os.fdopen(os.memfd_create("tensorhub-kernel"), "rb") as made:  # a killed process leaves no file behind
        path = f"/proc/self/fd/{made.fileno()}"
        command = [compiler, *FLAGS, "-o", path, str(SOURCE)]
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "timeout": COMPILE_S_MAX, "pass_fds": [made.fileno()]}
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", **how)
        return NativeKernel(ctypes.CDLL(path))


def _compile_quietly(compile_: Callable[[], Kernel] = compiled) -> None:
    global _kernel
    try:
        _kernel = compile_()
    except (OSError, AttributeError, subprocess.SubprocessError, RuntimeError) as error:
        said = getattr(error, "stderr", None) or ""
        _log.info("deltas are made by numpy, which is slower: %s %.500s", error, said)


def _addresses(*arrays: Elements) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def _long(number: int) -> ctypes.c_long:
    return ctypes.c_long(number)
