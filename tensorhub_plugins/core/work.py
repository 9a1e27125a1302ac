"""Signs of work: what shows whether a process that does not answer works slowly, or stands still.

    work.done()      called for each piece of a large task: a tensor that was loaded, bytes that have arrived
    work.count()     how many pieces this process has done; heartbeats carry it to the hub, which waits for converters
    work.last_at()   when this process did the last one, or any other one that shares its signs
    work.until(...)  until when to wait for what works

The processes of one engine (an actor, vLLM's core, its workers) share them: the one that calls `share` before it starts
the others reads what those do, though none of them may answer for minutes. It costs one store into shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "TENSORHUB_WORK"  # process, descriptor and name of the shared memory; set by `share`
# Longer than any piece of work, and than the waits in which nothing is done: readers are drained for up to 120 s.
STILL_S = 150.0
TIMES_MAX = 10  # as long a wait may be at most while there is work: what fails and begins anew works, too, for ever

_INSTANT = struct.Struct("d")
_count = 0
_last_at = 0.0
_memory: mmap.mmap | None = None
_opened = ""  # the value of VARIABLE that `_memory` is of


def done() -> None:
    """Note that a piece of work was done."""
    global _count, _last_at
    _count, _last_at = _count + 1, time.monotonic()
    if (memory := _shared()) is not None:
        _INSTANT.pack_into(memory, 0, _last_at)


def counted(items: Iterable[T]) -> Iterator[T]:
    """Yield these; the use of each is a piece of work."""
    for item in items:
        yield item
        done()


def count() -> int:
    """Return how many pieces of work this process has done."""
    return _count


def last_at() -> float:
    """Return when the last piece of work was done here or in a process that shares its signs, in seconds of
    time.monotonic(); 0.0: none ever was."""
    memory = _shared()
    return _last_at if memory is None else max(_last_at, float(_INSTANT.unpack_from(memory, 0)[0]))


def until(began: float, worked_at: float, timeout_s: float) -> float:
    """Return until when to wait for a result: for `timeout_s` from the beginning, or from the last piece of work, which
    was done at `worked_at`; at most for TIMES_MAX as long."""
    return min(max(began, worked_at) + timeout_s, began + TIMES_MAX * timeout_s)


def share() -> None:
    """Share the signs with the processes that this one starts from now on; a system without memfd has none to share."""
    with contextlib.suppress(OSError, AttributeError):
        name = f"tensorhub-work-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)  # open as long as this process runs: the others open it through /proc
        os.ftruncate(descriptor, mmap.PAGESIZE)
        os.environ[VARIABLE] = f"{os.getpid()}/{descriptor}/{name}"


def _shared() -> mmap.mmap | None:
    """Return the shared memory; None: there is none, as on another host, where the process is another one."""
    global _memory, _opened
    told = os.environ.get(VARIABLE, "")
    if told != _opened:
        _memory, _opened = None, told
        with contextlib.suppress(OSError, ValueError):
            process, descriptor, name = told.split("/")
            path = f"/proc/{int(process)}/fd/{int(descriptor)}"
            if os.readlink(path).startswith(f"/memfd:{name} "):
                with open(path, "r+b") as file:
                    _memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    return _memory
