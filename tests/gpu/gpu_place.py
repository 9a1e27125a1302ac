"""Where a test of this folder runs: on the GPU, or on what stands for it where there is none.

The stand-in runs the same lines, at a small size, on the simulated device: it finds what is misspelt or unordered, and
says nothing about CUDA or speed.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from ipc_devices import simulated

from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import flat_bytes

CYCLES_A_MS = 1_500_000  # of torch.cuda._sleep, about
NO_GPU = "torch finds no CUDA device here: `make test-gpu` on a machine that has one"


def values(content: bytes) -> set[int]:
    """Return which bytes there are: of a gigabyte in a second, where a set of them takes ten."""
    return set(np.unique(np.frombuffer(content, np.uint8)).tolist())


class Gpu:
    """The first CUDA device."""

    is_gpu = True

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name(0)
        self.torch_device = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch_device)
        torch.zeros(1, device=self.torch_device)  # this process uses it from now on
        self._streams: dict[str, Any] = {}

    @property
    def device(self) -> devices.Device:
        found = devices.here()
        assert found is not None
        return found

    def size(self, on_gpu: int, stand_in: int) -> int:
        """How large, how many, how often."""
        return on_gpu

    def put(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """A copy of a host tensor on the device."""
        return tensor.to(self.torch_device)

    def random(self, size_bytes: int, seed: int) -> torch.Tensor:
        """uint8 on the device."""
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=self.torch_device, generator=generator)

    def content(self, tensor: torch.Tensor) -> bytes:
        """All bytes, when the device is idle."""
        torch.cuda.synchronize()
        return flat_bytes(tensor).cpu().numpy().tobytes()

    def fill_late(self, tensor: torch.Tensor, value: int, stream: str = "optimizer", ms: float = 50.0) -> None:
        """Queue work of so many milliseconds and then a write of this byte; returns at once."""
        with self.on(stream):
            torch.cuda._sleep(int(ms * CYCLES_A_MS))
            flat_bytes(tensor).fill_(value)

    def offload_late(self, size_bytes: int, value: int, ms: float = 50.0) -> torch.Tensor:
        """Pinned host memory that a queued copy will fill with this byte, as a framework offloads; returns at once."""
        host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
        made = torch.zeros(size_bytes, dtype=torch.uint8, device=self.torch_device)
        torch.cuda.synchronize()
        self.fill_late(made, value, "offload", ms)
        with self.on("offload"):
            host.copy_(made, non_blocking=True)
            made.record_stream(torch.cuda.current_stream())
        return host

    def read_late(self, tensor: torch.Tensor, stream: str = "forward", ms: float = 50.0) -> Callable[[], bytes]:
        """Queue work and then a read; what it has read can be asked for later."""
        found = torch.empty_like(flat_bytes(tensor))
        with self.on(stream):
            torch.cuda._sleep(int(ms * CYCLES_A_MS))
            found.copy_(flat_bytes(tensor))
        return lambda: self.content(found)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """This thread's calls go to a stream of this name; "default" is the default one."""
        if stream != "default" and stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream()
        with torch.cuda.stream(self._streams.get(stream, torch.cuda.default_stream())):
            yield

    def timed(self, call: Callable[[], object], times: int = 5) -> float:
        """Seconds of the fastest of some calls, each until the device is idle."""
        best = float("inf")
        for _ in range(times):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    def judge(self, is_fast: bool, what: str) -> None:
        """AssertionError with these words unless it is."""
        assert is_fast, what

    def check(self) -> None:
        """That nothing was unordered is seen in the bytes, and by TORCH_CUDA_SANITIZER=1."""


class StandIn:
    """The simulated device."""

    is_gpu = False
    name = "simulated"
    torch_device = torch.device("cpu")

    def __init__(self, simulation: Any) -> None:
        self.simulation = simulation
        self.device = simulation.devices[0]

    def size(self, on_gpu: int, stand_in: int) -> int:
        return stand_in

    def put(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        put: torch.Tensor = self.simulation.put(tensor, name)
        return put

    def random(self, size_bytes: int, seed: int) -> torch.Tensor:
        content = bytearray(random.Random(seed).randbytes(size_bytes))
        return self.put(torch.frombuffer(content, dtype=torch.uint8), f"random {seed}")

    def content(self, tensor: torch.Tensor) -> bytes:
        self.device.synchronize()
        content: bytes = self.simulation.content(tensor)
        return content

    def fill_late(self, tensor: torch.Tensor, value: int, stream: str = "optimizer", ms: float = 0.0) -> None:
        self.simulation.kernel(tensor, value, stream)

    def offload_late(self, size_bytes: int, value: int, ms: float = 0.0) -> torch.Tensor:
        host = torch.zeros(size_bytes, dtype=torch.uint8)
        self.simulation.offload(host, value)
        return host

    def read_late(self, tensor: torch.Tensor, stream: str = "forward", ms: float = 0.0) -> Callable[[], bytes]:
        found = self.simulation.reading_kernel(tensor, stream)

        def content() -> bytes:
            self.device.synchronize()
            return bytes(found[0])

        return content

    def on(self, stream: str) -> Any:
        return self.simulation.stream(stream)

    def timed(self, call: Callable[[], object], times: int = 1) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def judge(self, is_fast: bool, what: str) -> None:
        """A stand-in is never judged by its speed."""

    def check(self) -> None:
        self.simulation.check()


Place = Gpu | StandIn


@contextlib.contextmanager
def place_named(name: str) -> Iterator[Place]:
    """ "gpu" or "stand-in"."""
    if name == "gpu":
        yield Gpu()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    else:
        with simulated() as simulation:
            yield StandIn(simulation)


def adopt_on_gpu(tensors: dict[str, torch.Tensor]) -> Slab:
    """A slab of these tensors, which are on the GPU from now on."""
    for tensor in tensors.values():
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.to("cuda")
    torch.cuda.synchronize()
    return Slab.adopt(tensors)


def free_bytes() -> int:
    """Of the GPU, by all processes."""
    return int(torch.cuda.mem_get_info()[0])


def host_free_bytes() -> int:
    """Of this machine, as it may be had."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
