"""Host memory that is pinned in the background, so that no transfer waits for it.

Until it is registered it is ordinary memory, and usable. A block is registered by one call: CUDA refuses a copy that
spans two registrations, or one and memory next to it ("invalid argument"), and others copy from our tensors. The slow
part is the allocation of pages; that is done before, on the device's node, in pieces, between which a block can be
released. (Huge pages are requested where a block is mapped. Those of a pool, MFD_HUGETLB, are not used: any process
that maps such a file, or a part of it, must know the size of its pages.)
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable
from functools import cache

import torch

from tensorhub_plugins.core.device import Device, here
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.memory.block import Block
from tensorhub_plugins.core.memory.numa import prefer

logger = logging.getLogger(__name__)

POPULATE_SIZE_BYTES = 256 << 20  # a tenth of a second: how soon a closed block is released
POPULATE_THREADS_MAX = 4  # one writes zeros at a few GB/s
MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; Python has no name for it


class Pinned:
    """Host memory that is registered with a device in the background; `release` it before it is unmapped. done: it is
    registered, or never will be; then `reason` says why."""

    piece_size_bytes = POPULATE_SIZE_BYTES

    def __init__(self, memory: torch.Tensor, device: Device, *, is_lent: bool = False) -> None:
        """Prepare the registration. is_lent: another process owns the memory, and only that one writes to it."""
        self._is_lent = is_lent
        self.done = threading.Event()
        self.reason = ""
        self.device = device
        self._memory, self._pid = memory, os.getpid()
        self._lock = threading.Lock()
        self._is_registered = self._is_released = False

    def run(self) -> None:
        """Allocate the pages near the device, and register them. Called in the background, or at once."""
        if not self._is_lent:
            self._make_all_pages()
        with self.device.calling() as driver, self._lock:
            if self._is_released:
                self.reason = "it was released before"
            else:
                self.reason = driver.register(self._memory, read_only=self._is_lent)
                self._is_registered = not self.reason
        self.done.set()

    def _make_all_pages(self) -> None:
        node, memory = self.device.numa_node(), self._memory
        if node is not None and (reason := prefer(memory.data_ptr(), memory.numel(), node)):
            logger.info("%s: its memory is not made on node %d: %s", self.device.name, node, reason)
        pieces = list(torch.split(memory, self.piece_size_bytes))
        threads = [  # daemons, too
            threading.Thread(target=self._make_pages, args=[pieces], name="tensorhub-pages", daemon=True)
            for _ in range(min(POPULATE_THREADS_MAX, cores(), len(pieces)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _make_pages(self, pieces: list[torch.Tensor]) -> None:
        """Allocate the pages of these pieces, while there are any that no other thread has taken."""
        while not self._is_released:
            try:
                piece = pieces.pop()
            except IndexError:
                return
            _populate(piece)

    def release(self) -> None:
        """Unregister it in the background: it stays mapped until then. Idempotent; a forked child does nothing."""
        if self._pid == os.getpid() and not self._is_released:
            self._is_released = True
            _in_background(self._unregister)

    def _unregister(self) -> None:
        with self.device.calling() as driver, self._lock:
            if self._is_registered:
                self._is_registered = False
                driver.unregister(self._memory)
        self._memory = self._memory[:0]


def pin_block(block: Block, device: Device | None = None, *, required: bool = False) -> Pinned | None:
    """Register a block with this device (None: the calling thread's), in the background. Return None without a device.

    required: register at once, or close the block and raise UsageError."""
    device = here(begins=required) if device is None else device
    if device is None and not required:
        return None
    try:
        return _pin(block.memory, device, required=required)
    except BaseException:
        block.close()
        raise


def pin_lent(memory: torch.Tensor, device: Device) -> Pinned:
    """Register memory that belongs to another process of this host, and that is only read here, in the background."""
    pinned = Pinned(memory, device, is_lent=True)
    _in_background(lambda: _pin_quietly(pinned))
    return pinned


def _pin(memory: torch.Tensor, device: Device | None, *, required: bool) -> Pinned:
    if device is None:
        raise UsageError("pin=True, but torch finds no CUDA device")
    pinned = Pinned(memory, device)
    if not required:
        _in_background(lambda: _pin_quietly(pinned))
        return pinned
    pinned.run()
    if pinned.reason:
        raise UsageError(f"CUDA cannot pin {memory.numel()} bytes ({pinned.reason}): raise the locked-memory limit")
    return pinned


def _pin_quietly(pinned: Pinned) -> None:
    size_bytes = pinned._memory.numel()
    pinned.run()
    if pinned.reason and not pinned._is_released:
        _warn_once(
            f"{pinned.device.name} cannot pin {size_bytes / 1e9:.2f} GB ({pinned.reason}): copies take about five "
            "times as long (5 GB/s, not 25 or more). Raise the locked-memory limit, or free host memory"
        )


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _populate(memory: torch.Tensor) -> None:
    """Allocate its pages now, without the GIL. Concurrent writes to them are kept. Does nothing on older kernels."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size_bytes = memory.data_ptr() + memory.numel() - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), MADV_POPULATE_WRITE)


_background: tuple[int, queue.SimpleQueue[Callable[[], None]]] | None = None  # with the process's id
_starting = threading.Lock()


def _in_background(call: Callable[[], None]) -> None:
    """Run the call in one background thread, in order. It is a daemon: a process that exits does not wait for pages."""
    global _background
    with _starting:
        if _background is None or _background[0] != os.getpid():
            _background = os.getpid(), queue.SimpleQueue()
            threading.Thread(target=_work, args=(_background[1],), name="tensorhub-pin", daemon=True).start()
        _background[1].put(call)


def wait_for_background(timeout_s: float) -> bool:
    """Wait until everything requested so far is pinned, or released. Return False after the timeout."""
    done = threading.Event()
    _in_background(done.set)
    return done.wait(timeout_s)


def _work(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        call = calls.get()
        try:
            call()
        except Exception:
            logger.exception("memory was not pinned, or not released")
        del call  # or the last one's memory would stay until there is another
