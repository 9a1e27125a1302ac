"""The trainer on a host of its own: the weights, new ones on request, and the two ways to distribute them."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from recipes.bench.delta.material import stepped
from recipes.bench.network import now
from recipes.bench.workers import Stream
from recipes.bench.workloads.collective import Collective
from recipes.bench.workloads.engine import PORTS
from tensorhub_plugins.core import Client, Location, Publisher
from tensorhub_plugins.vllm.worker import weights

TIMEOUT_S = 120.0
COPIES = 7


class Trainer(Stream):
    """The interface that the benchmark calls."""

    def __init__(self, model: Path, address: str, data_center: str) -> None:
        torch.set_num_threads(1)
        self.tensors = load_file(model / "model.safetensors")
        self._model, self._address, self._data_center = model, address, data_center

    def train(self, step: int, percent: float | None = None) -> None:
        """Change the weights, in the same way on every path. percent: of the elements, as a small learning rate does,
        and the first of each tensor; None: all of them."""
        torch.manual_seed(step)
        random = np.random.default_rng(step)
        for tensor in self.tensors.values():
            if percent is None:
                tensor.add_(0.01 * torch.randn(tensor.shape).to(tensor.dtype))
            else:
                elements = tensor.view(-1).view(torch.int16).numpy().view(np.uint16)
                first = elements[0] ^ 1  # at least one of each tensor changes
                elements[:] = stepped(random, elements, percent)
                elements[0] = first

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def memcpy_s(self) -> float:
        """Return the limit of a stall: the seconds of one copy of the weights in memory."""
        targets = [torch.zeros_like(tensor) for tensor in self.tensors.values()]
        times = []
        for _ in range(COPIES):
            began = now()
            for target, tensor in zip(targets, self.tensors.values(), strict=True):
                target.copy_(tensor)
            times.append(now() - began)
        return statistics.median(times)

    def save(self) -> Path:
        """Save a checkpoint in a folder next to the model's."""
        folder = self._model.with_name(f"{self._model.name}-saved")
        folder.mkdir(exist_ok=True)
        save_file(self.tensors, folder / "model.safetensors")
        return folder

    def digests(self) -> dict[str, str]:
        return {name: weights.digest(tensor) for name, tensor in self.tensors.items()}

    # --- the store ---

    def connect(self, hub: str) -> None:
        client = Client(
            hub,
            run="bench",
            model="actor",
            replica="trainer",
            location=Location(self._data_center, "", "trainer"),
            transports=PORTS,
            advertise_host=self._address,
        )
        self._publisher = Publisher(client, rank=0, ranks=1, worker="trainer", keep=2, timeout_s=TIMEOUT_S)

    def publish(self, version: int) -> tuple[float, float]:
        """Publish this version, and return when that began and ended."""
        began = now()
        self._publisher.publish(version, self.tensors.items())
        return began, now()

    # --- stock ---

    def lead(self) -> tuple[str, int]:
        """Return the address where the others find it, to make a group."""
        self._collective = Collective(self._address)
        return self._address, self._collective.store.port

    def join(self, world_size: int) -> None:
        self._collective.join(0, world_size, (self._address, 0))

    def broadcast(self) -> None:
        self._collective.send(self.tensors.items())

    def close(self) -> None:
        """Do nothing: the process ends now."""


class Receiver(Stream):
    """The other end of the bare stream, with memory that has been touched."""

    def __init__(self, size_bytes: int) -> None:
        self.tensors = {"all": torch.ones(size_bytes, dtype=torch.uint8)}

    def close(self) -> None:
        """Do nothing: the process ends now."""
