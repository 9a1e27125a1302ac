"""A stream in device memory, at both ends: the source's description of it, and what a reader has opened."""

from __future__ import annotations

import logging
import os
import threading
import uuid
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.memory.runs import Extents, Runs
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.process_lifetime import Descriptor
from tensorhub_plugins.core.transports.cuda_ipc.driver import Allocation, Ipc, NotShareable
from tensorhub_plugins.core.transports.read_plan import parts_in
from tensorhub_plugins.core.transports.stream.messages import Text

_log = logging.getLogger(__name__)


# --- the source's ---


class Exported:
    """The description of one slab's memory, and a pipe that hangs up when it is not needed any more."""

    def __init__(self, memory: SourceMemory) -> None:
        self.memory = memory
        self.owner_liveness_fd, alive = os.pipe()
        self._alive = Descriptor(alive)  # a forked child would keep it open after this process has died
        weakref.finalize(self, self._alive.close).atexit = False
        weakref.finalize(self, os.close, self.owner_liveness_fd).atexit = False


class Exports:
    """The descriptions by location: one version's tensors lie where those of the one before lay. Thread-safe."""

    def __init__(self, ipc: Ipc) -> None:
        self._ipc = ipc
        self._lock = threading.Lock()
        self._known: weakref.WeakKeyDictionary[Runs, Exported] = weakref.WeakKeyDictionary()

    def of(self, slab: Slab) -> Exported:
        """Return the description of this slab. Raise NotShareable with the reason."""
        device, runs = slab.device, slab.runs
        if device is None and slab.size_bytes:
            raise NotShareable("its tensors lie in host memory, which shm serves")
        with self._lock:
            if runs not in self._known:
                self._known[runs] = Exported(self._describe(device, runs))
            return self._known[runs]

    def _describe(self, device: Device | None, runs: Runs) -> SourceMemory:
        ipc = self._ipc
        if device is None:  # no tensor has any bytes
            return SourceMemory(ipc.process, uuid.uuid4().bytes, "", [], b"")
        found: list[Allocation] = []  # by address
        bases: list[int] = []
        with device.calling():
            for run in runs.all:
                at = bisect_right(bases, run.address) - 1
                if at < 0 or run.address >= bases[at] + found[at].size_bytes:
                    allocation = ipc.export(device, run.address)
                    at = bisect_left(bases, allocation.base)
                    bases.insert(at, allocation.base)
                    found.insert(at, allocation)
                if run.address + run.size_bytes > bases[at] + found[at].size_bytes:
                    raise NotShareable("a tensor of it lies in several allocations")
            if len(found) > ALLOCATIONS_MAX:
                raise NotShareable(f"it lies in {len(found)} allocations, at most {ALLOCATIONS_MAX} are told")
            device_id = ipc.device_id(device)
        extents = [
            (at, run.address - bases[at], run.size_bytes)
            for run in runs.all
            for at in [bisect_right(bases, run.address) - 1]
        ]
        packed = np.array(extents, "<u8").reshape(-1, EXTENT_WORDS).tobytes()
        return SourceMemory(ipc.process, uuid.uuid4().bytes, device_id, found, packed)


# --- the reader's ---


class OpenMemory:
    """A source's stream in memory that is open here for as long as this object lives."""

    def __init__(self, ipc: Ipc, device: Device, memory: SourceMemory) -> None:
        """Open the memory. NotShareable when that fails; ProtocolError if the source's description is inconsistent."""
        self._extents = _extents_of(memory)
        self._starts = [0, *np.cumsum(self._extents[:, 2], dtype=np.uint64).tolist()][:-1]
        self._blocks: list[torch.Tensor] = []
        is_own = memory.process == ipc.process  # CUDA lets no process open its own
        try:
            with device.calling():
                for allocation in memory.allocations:
                    self._blocks.append(ipc.own(device, allocation) if is_own else ipc.open(device, allocation))
        except BaseException:
            if not is_own:
                _close(ipc, device, self._blocks)
            raise
        if not is_own:
            weakref.finalize(self, _close, ipc, device, self._blocks).atexit = False

    def flats(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the memory of a range of the stream, in order, as uint8 tensors."""
        found = []
        for index, skip, size_bytes in parts_in(self._starts, start, stop):
            block, offset, _ = map(int, self._extents[index])
            found.append(self._blocks[block][offset + skip : offset + skip + size_bytes])
        return found


def check_memory(memory: SourceMemory, size_bytes: int) -> None:
    """Raise ProtocolError unless it is a stream of this size."""
    if int(_extents_of(memory)[:, 2].sum(dtype=np.uint64)) != size_bytes:
        raise ProtocolError(f"the source's memory is not {size_bytes} bytes, as its manifest says")


def _extents_of(memory: SourceMemory) -> Extents:
    if len(memory.extents) % (8 * EXTENT_WORDS):
        raise ProtocolError("the source says in a way that cannot be read where its memory lies")
    extents = np.frombuffer(memory.extents, "<u8").astype(np.uint64).reshape(-1, EXTENT_WORDS)
    sizes = np.array([each.size_bytes for each in memory.allocations], np.uint64)
    for block, offset, size_bytes in extents.tolist():
        if block >= len(sizes) or not size_bytes or offset + size_bytes > int(sizes[block]):
            raise ProtocolError(f"{size_bytes} bytes at {offset} of allocation {block} are in none of the source's")
    return extents


def _close(ipc: Ipc, device: Device, blocks: Sequence[torch.Tensor]) -> None:
    with device.calling():
        for block in blocks:
            try:
                ipc.close(device, block)
            except NotShareable as error:
                _log.warning("cuda_ipc: memory of another process stays open: %s", error)


# --- the source's description of its memory, sent after StreamOpened and followed by its liveness pipe's end ----------

ALLOCATIONS_MAX = 1 << 16  # torch makes one of 20 MB for small tensors, and one for each large one
EXTENT_WORDS = 3  # number of the allocation, offset in it, size; 8 bytes each


class SourceMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The location of the source's stream."""

    process: Text
    runs: Annotated[bytes, msgspec.Meta(max_length=16)]  # names this memory while it stays there; never reused
    device_id: Text
    allocations: Annotated[list[Allocation], msgspec.Meta(max_length=ALLOCATIONS_MAX)]
    extents: bytes  # uint64[n, 3], in the stream's order


# Made here and not by decode(type=...): two threads that do so for the first time at once crash msgspec 0.21.
memory_decoder = msgspec.msgpack.Decoder[SourceMemory](SourceMemory)
