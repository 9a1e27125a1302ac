"""Host memory whose pages are made and pinned in the background, so that no copy and no transfer waits for them.

Until it is registered it is ordinary memory, and usable. A block is registered in pieces: while one is, CUDA's driver
keeps other processes of the host waiting, and some kernels refuse large ones. Pieces end at a page between two tensors
(`TensorTable.block_borders`): CUDA refuses a copy that spans two registrations ("invalid argument"), and others copy
from our tensors; our own copies are cut there (`Device`). Its pages are allocated before, on the device's node. (Huge
pages are requested where a block is mapped. Those of a pool, MFD_HUGETLB, are not used: any process that maps such a
file, or a part of it, must know the size of its pages.)
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import mmap
import os
import platform
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import torch

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.device.devices import Device, here
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import PIECE_SIZE_BYTES
from tensorhub_plugins.core.memory.block import Block
from tensorhub_plugins.core.options import gigabytes
from tensorhub_plugins.core.threads import Thread

logger = logging.getLogger(__name__)

POPULATE_SIZE_BYTES = 256 << 20  # a tenth of a second: how soon a closed block is released
PINNED_AT_ONCE_BYTES = 1 << 30  # a tenth of a second in which other processes wait for the driver
YIELD_S = 0.01  # after each
END_S = 30.0  # at the interpreter's exit, for the piece that a thread is at, on a busy machine
POPULATE_THREADS_MAX = 4  # one writes zeros at a few GB/s
MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; Python has no name for it


class Pinned:
    """Host memory that is registered with a device in the background; `release` it before it is unmapped. done: it is
    registered, or never will be; then `reason` says what is not, and why. Without a device only its pages are made."""

    piece_size_bytes = POPULATE_SIZE_BYTES

    def __init__(
        self, memory: torch.Tensor, device: Device | None, *, borders: Sequence[int] = (), is_lent: bool = False
    ) -> None:
        """Prepare the registration. borders: where it may be cut; the last one is its end. is_lent: another process
        owns the memory, and only that one writes to it."""
        self._is_lent = is_lent
        self.done = threading.Event()
        self.reason = ""
        self.device = device
        self._memory, self._pid = memory, os.getpid()
        is_cut = borders and not memory.data_ptr() % mmap.PAGESIZE  # private memory begins anywhere
        self._borders = [*(borders[:-1] if is_cut else [0]), memory.numel()]  # to the end of the last page
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._registered: list[torch.Tensor] = []

    def run(self) -> None:
        """Allocate the pages near the device, and register them. Called in the background, or at once."""
        if self.device is None:
            self._make_all_pages(self._memory)
        else:
            self._register(self.device)
        self.done.set()

    def _register(self, device: Device) -> None:
        if not self._is_lent:
            self._prefer_node(device)
        borders, at, lacking, why = self._borders, 0, 0, ""
        size_bytes_max = PINNED_AT_ONCE_BYTES
        while at < len(borders) - 1 and not self._released.is_set():
            last = max(bisect_right(borders, borders[at] + size_bytes_max) - 1, at + 1)
            piece = self._memory[borders[at] : borders[last]]
            reason = self._pin(piece, device)
            if reason and last > at + 1:
                size_bytes_max = piece.numel() // 2
                continue
            if reason and piece.numel() <= PIECE_SIZE_BYTES:  # no smaller one would do
                lacking, why = lacking + borders[-1] - borders[at], reason
                break
            if reason:
                lacking, why = lacking + piece.numel(), reason
            at = last
            self._released.wait(YIELD_S if at < len(borders) - 1 else 0)
        if self._released.is_set():
            self.reason = "it was released before"
        elif lacking:
            self.reason = f"{gigabytes(lacking)} of {gigabytes(self._memory.numel())}: {why}"

    def _pin(self, piece: torch.Tensor, device: Device) -> str:
        if not self._is_lent:
            self._make_all_pages(piece)
        with self._lock:
            if self._released.is_set():
                return ""
            reason = device.register(piece, read_only=self._is_lent)
            if not reason:
                self._registered.append(piece)
            return reason

    def _prefer_node(self, device: Device) -> None:
        node, memory = device.numa_node(), self._memory
        if node is not None and (reason := prefer(memory.data_ptr(), memory.numel(), node)):
            logger.info("%s: its memory is not made on node %d: %s", device.name, node, reason)

    def _make_all_pages(self, memory: torch.Tensor) -> None:
        pieces, started = list(torch.split(memory, self.piece_size_bytes)), list[Thread]()
        with suppress(RuntimeError):  # no thread is left: those that there are make them all
            for _ in range(min(POPULATE_THREADS_MAX, cores(), len(pieces))):
                thread = Thread(target=self._make_pages, args=[pieces], name="tensorhub-pages")  # a daemon, too
                thread.start()
                started.append(thread)
        if not started:
            self._make_pages(pieces)
        for thread in started:
            thread.join()

    def _make_pages(self, pieces: list[torch.Tensor]) -> None:
        """Allocate the pages of these pieces, while there are any that no other thread has taken."""
        while not (self._released.is_set() or _ending.is_set()):
            try:
                piece = pieces.pop()
            except IndexError:
                return
            _populate(piece)

    def release(self) -> None:
        """Unregister it in the background: it stays mapped until then. Idempotent; a forked child does nothing."""
        if self._pid == os.getpid() and not self._released.is_set():
            self._released.set()
            _in_background(self._unregister, "tensorhub-unpin")

    def _unregister(self) -> None:
        with self._lock:
            while self._registered and self.device is not None:
                self.device.unregister(self._registered.pop())
        self._memory = self._memory[:0]


def pin_block(
    block: Block, device: Device | None = None, *, required: bool = False, ahead: bool = False
) -> Pinned | None:
    """Register a block with this device (None: the calling thread's), in the background. Return None without a device.

    required: register at once, or close the block and raise UsageError. ahead: nothing is written to it yet, and even
    without a device its pages are made in the background."""
    device = here(begins=required) if device is None else device
    if device is None and not (required or ahead):
        return None
    try:
        return _pin(block, device, required=required)
    except BaseException:
        block.close()
        raise


def pin_lent(memory: torch.Tensor, device: Device, borders: Sequence[int]) -> Pinned:
    """Register memory that belongs to another process of this host, and that is only read here, in the background."""
    pinned = Pinned(memory, device, borders=borders, is_lent=True)
    _in_background(lambda: _pin_quietly(pinned))
    return pinned


def _pin(block: Block, device: Device | None, *, required: bool) -> Pinned:
    if device is None and required:
        raise UsageError("pin=True, but torch finds no CUDA device")
    pinned = Pinned(block.memory, device, borders=block.borders)
    if device is None or not required:
        _in_background(lambda: _pin_quietly(pinned))
        return pinned
    pinned.run()
    if pinned.reason:
        pinned.release()
        raise UsageError(f"{device.name} cannot pin {pinned.reason}")
    return pinned


def _pin_quietly(pinned: Pinned) -> None:
    pinned.run()
    if pinned.device is not None and pinned.reason and not pinned._released.is_set():
        _warn_once(
            f"{pinned.device.name} cannot pin {pinned.reason}. Copies go through pinned pieces: about half as fast"
        )


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _populate(memory: torch.Tensor) -> None:
    """Allocate its pages now, without the GIL. Concurrent writes to them are kept. Does nothing on older kernels."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size_bytes = memory.data_ptr() + memory.numel() - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), MADV_POPULATE_WRITE)


# By name: the process's id, what is to be done, and the thread that does it.
_background: dict[str, tuple[int, queue.SimpleQueue[Callable[[], None]], Thread]] = {}
_starting, _ending = threading.Lock(), threading.Event()


def _in_background(call: Callable[[], None], thread: str = "tensorhub-pin") -> None:
    """Run the call in a background thread, in order. It is a daemon: a process that exits does not wait for pages."""
    with _starting:
        if thread not in _background or _background[thread][0] != os.getpid():
            calls = queue.SimpleQueue[Callable[[], None]]()
            started = Thread(target=_work, args=(calls,), name=thread)
            started.start()
            _background[thread] = os.getpid(), calls, started
            _watch_exit()
        _background[thread][1].put(call)


@cache
def _watch_exit() -> None:
    atexit.register(_end)


def _end() -> None:
    """End the threads before the interpreter does: it would abort the process if one of them were in torch's code."""
    _ending.set()
    for pid, calls, thread in list(_background.values()):
        if pid == os.getpid():
            calls.put(lambda: None)
            thread.join(END_S)


def wait_for_background(timeout_s: float) -> bool:
    """Wait until everything requested so far is pinned, or released. Return False after the timeout."""
    deadline, all_done = Deadline.after(timeout_s), True
    for thread in ("tensorhub-pin", "tensorhub-unpin"):
        done = threading.Event()
        _in_background(done.set, thread)
        all_done &= done.wait(deadline.remaining())
    return all_done


def _work(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        call = calls.get()
        if _ending.is_set():
            return
        try:
            call()
        except Exception:
            logger.exception("memory was not pinned, or not released")
        del call  # or the last one's memory would stay until there is another


# --- the NUMA node of pages: a device copies at full speed only to memory near it -------------------------------------

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
