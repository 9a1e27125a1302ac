"""The device that is measured, or its stand-in; and the tensors."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable

import torch

from tensorhub_plugins.core.device.devices import Device, here
from tensorhub_plugins.core.device.drivers import Plain


def shapes_of(layers: int, *, is_small: bool) -> list[tuple[int, ...]]:
    """Return the shapes of Qwen2.5-7B's tensors; small: of a model of the same structure with some megabytes."""
    hidden, narrow, wide, vocabulary = (128, 32, 512, 1000) if is_small else (3584, 512, 18944, 152064)
    layer = [(hidden, hidden), (hidden,), (narrow, hidden), (narrow,), (narrow, hidden), (narrow,), (hidden, hidden)]
    layer += [(wide, hidden), (wide, hidden), (hidden, wide), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * layers, (hidden,), (vocabulary, hidden)]


class Machine:
    """One GPU, or the CPU in its place."""

    def __init__(self, kind: str) -> None:
        self.is_gpu = kind == "cuda"
        self.torch_device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        if self.is_gpu:
            torch.cuda.set_device(self.torch_device)
            torch.zeros(1, device=self.torch_device)
        self.name = torch.cuda.get_device_name(0) if self.is_gpu else f"the CPU ({platform.machine()})"

    @property
    def device(self) -> Device:
        """Return the store's device."""
        device = here() if self.is_gpu else Device("cpu", Plain())
        assert device is not None
        return device

    def tensors(self, shapes: list[tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
        """Return bfloat16 tensors of random bytes on the device."""
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        return {f"t{at:04d}": self._random(2 * math.prod(shape), generator).view(torch.bfloat16).view(shape)
                for at, shape in enumerate(shapes)}  # fmt: skip

    def block(self, size_bytes: int, seed: int = 0) -> torch.Tensor:
        """Return uint8 of random bytes on the device."""
        return self._random(size_bytes, torch.Generator(self.torch_device).manual_seed(seed))

    def host_block(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 in touched host memory that copies are fast from and to."""
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=self.is_gpu)

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object], times: int) -> float:
        """Return the seconds until the device is idle again: the median of these times, after one to warm up."""
        taken = []
        for _ in range(times + 1):
            self.settle()
            began = time.perf_counter()
            call()
            self.settle()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def used_bytes(self) -> int:
        """Return how much of the device all processes use."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def release(self) -> None:
        """Release the freed memory that torch keeps."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def _random(self, size_bytes: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=self.torch_device, generator=generator)
