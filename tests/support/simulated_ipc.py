"""Simulated device memory that other processes can open, for cuda_ipc: a shared file stands for the GPU's memory.

    with SharedSimulation(seed=1) as simulation:
        slab = simulation.adopt_in_place(tensors)               # they lie in the file from now on
        transport = CudaIpcTransport(ipc=SimulatedIpc(simulation))

It has CUDA's rules, and breaking one is a fault that `check` names: a handle is of a whole allocation; a process opens
none of its own, and no other twice; it is closed when nothing copies from the memory any more. What was freed cannot be
opened, and memory that `put` made has no handle, as that of expandable segments. Of what was closed one reads POISON.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

import torch
from simulated import DEFAULT, POISON, Simulation

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.memory.runs import memory_at
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.cuda_ipc.driver import HANDLE_SIZE_BYTES, Allocation, NotShareable, process_name

DEVICE_SIZE_BYTES = 8 << 30  # of the file, which takes as much memory as is written to
SMALL_SIZE_BYTES = 1 << 20  # smaller tensors share an allocation, as torch has it
_HANDLE = struct.Struct("<IIQQ")  # process, file, offset, size


class SharedSimulation(Simulation):
    """A `Simulation` whose devices' memory lies in one file."""

    def __init__(self, seed: int, **options: int) -> None:
        super().__init__(seed, **options)
        self._fd = os.memfd_create("simulated device", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, DEVICE_SIZE_BYTES)
        self._file = mmap.mmap(self._fd, DEVICE_SIZE_BYTES)
        self._base = torch.frombuffer(self._file, dtype=torch.uint8)
        self._end = 0
        self._allocated: dict[int, int] = {}  # offset in the file -> size
        self.opened: Counter[tuple[str, bytes]] = Counter()  # how often ever, by process and handle
        self._open: dict[int, tuple[str, bytes]] = {}  # by where it lies

    def __exit__(self, *_: object) -> None:
        super().__exit__(*_)
        os.close(self._fd)

    def adopt_in_place(self, tensors: dict[str, torch.Tensor], *, device: int = 0) -> Slab:
        """Do as `Simulation` does; the tensors are moved into the file."""
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            if storage.nbytes() and not self._offset(storage.data_ptr()) >= 0:
                by_storage.setdefault(storage.data_ptr(), []).append(tensor)
        groups = sorted(by_storage.values(), key=lambda some: some[0].untyped_storage().nbytes())
        sizes = [some[0].untyped_storage().nbytes() for some in groups]
        small = sum(size < SMALL_SIZE_BYTES for size in sizes)
        places = self._allocate(sizes[:small])
        for size in sizes[small:]:
            places += self._allocate([size])
        for some, offset in zip(groups, places, strict=True):
            _move(some, self._base[offset:])
        return super().adopt_in_place(tensors, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Free the whole allocation that a tensor lies in: it cannot be opened any more."""
        del self._allocated[self._allocation_at(tensor.data_ptr())]

    def handle_of(self, address: int) -> tuple[int, int, bytes]:
        """Return address, size and handle of the allocation at this address. Raise NotShareable."""
        offset = self._allocation_at(address)
        size_bytes = self._allocated[offset]
        handle = _HANDLE.pack(os.getpid(), self._fd, offset, size_bytes).ljust(HANDLE_SIZE_BYTES, b"\0")
        return self._base.data_ptr() + offset, size_bytes, handle

    def add_open(self, memory: mmap.mmap, device: int, process: str, handle: bytes) -> torch.Tensor:
        """Return another process's memory, as device memory of this one."""
        if (process, handle) in self._open.values():
            self.faults.append(f"{process} opens a handle that it has open")
        opened = torch.frombuffer(memory, dtype=torch.uint8)
        visible = self._protected(device, "opened memory", opened, self.stream_of(device, DEFAULT))
        self._open[visible.data_ptr()] = process, handle
        self.opened[process, handle] += 1
        return visible

    def close_opened(self, opened: torch.Tensor) -> None:
        """Close it: nothing may copy from it any more, or later."""
        self.touch(opened, "to close its handle", writes=True)
        del self._open[opened.data_ptr()]
        region = self._region(opened.data_ptr())
        assert region is not None
        region.true = torch.full_like(region.true, POISON)

    def _allocate(self, sizes: Iterable[int]) -> list[int]:
        """Make one allocation; return where in the file each part of it lies."""
        with self._lock:
            begin, places = self._end, []
            for size in sizes:
                places.append(self._end)
                self._end += -(-size // 512) * 512
            self._end = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            if places:
                self._allocated[begin] = self._end - begin
            return places

    def _offset(self, address: int) -> int:
        offset = address - self._base.data_ptr()
        return offset if 0 <= offset < self._end else -1

    def _allocation_at(self, address: int) -> int:
        offset, begins = self._offset(address), sorted(self._allocated)
        at = bisect_right(begins, offset) - 1
        if offset < 0 or at < 0 or offset >= begins[at] + self._allocated[begins[at]]:
            raise NotShareable("its memory has no handle: it is of expandable segments, or of a pool")
        return begins[at]


class SimulatedIpc:
    """The `Ipc` of one process, or (process) of what is to count as one of its own."""

    def __init__(self, simulation: SharedSimulation, process: str = "") -> None:
        self._simulation = simulation
        self._process = process

    @property
    def process(self) -> str:
        return self._process or process_name()

    def device_id(self, device: Device) -> str:
        return device.name

    def export(self, device: Device, address: int) -> Allocation:
        self._call("ipc_export")
        return Allocation(*self._simulation.handle_of(address))

    def own(self, device: Device, allocation: Allocation) -> torch.Tensor:
        return torch.frombuffer(memory_at(allocation.base, allocation.size_bytes), dtype=torch.uint8)

    def open(self, device: Device, allocation: Allocation) -> torch.Tensor:
        self._call("ipc_open")
        pid, fd, offset, size_bytes = _HANDLE.unpack_from(allocation.handle)
        simulation = self._simulation
        if pid == os.getpid() and (not self._process or offset not in simulation._allocated):
            raise NotShareable("it is memory of this very process, or was freed")
        if size_bytes != allocation.size_bytes:
            raise NotShareable(f"it has {size_bytes} bytes, the source says {allocation.size_bytes}")
        try:
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        except OSError as error:
            raise NotShareable(f"invalid handle: {error}") from error
        try:
            memory = mmap.mmap(file, size_bytes, access=mmap.ACCESS_COPY, offset=offset)
        finally:
            os.close(file)
        return simulation.add_open(memory, simulation.devices.index(device), self.process, allocation.handle)

    def close(self, device: Device, opened: torch.Tensor) -> None:
        self._call("ipc_close")
        self._simulation.close_opened(opened)

    def _call(self, name: str) -> None:
        try:
            self._simulation.called(name)
        except torch.OutOfMemoryError as error:
            raise NotShareable(str(error)) from error


def _move(tensors: list[torch.Tensor], memory: torch.Tensor) -> None:
    """Have these tensors, which share a storage, in this memory."""
    storage = tensors[0].untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    memory[: flat.numel()].copy_(flat)
    start = memory.storage_offset()
    for tensor in tensors:
        at = start + tensor.storage_offset() * tensor.element_size()
        tensor.set_(memory.untyped_storage(), at // tensor.element_size(), tensor.shape, tensor.stride())
