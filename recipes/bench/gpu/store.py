"""The store's figures for the same work: copies, digests, publishes, fetches, installs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipes.bench.gpu.limits import Limits
from recipes.bench.gpu.machine import Machine
from recipes.bench.gpu.source import Source
from tensorhub_plugins.core import (
    Client,
    Publisher,
    Slab,
    TensorSpec,
    contiguous_spec,
    copy_all,
    same_bytes,
    start_server,
)
from tensorhub_plugins.core.digests import NO_DIGESTS
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.transports import unavailable

TIMEOUT_S = 600.0
LIMIT_SIZE_BYTES = 4 << 30


class NotRun(Exception):
    """A figure cannot be measured here, and why."""


@dataclass(frozen=True)
class Figure:
    """One measured figure. seconds: for `size_bytes`; limit: the name of one of `Limits`, to whose speed it is
    compared. goal: the least ratio of the two speeds; goal_s: the most seconds."""

    name: str
    seconds: float = 0.0
    size_bytes: int = 0
    limit: str = ""
    goal: float = 0.0
    goal_s: float = 0.0
    limit_gb_s: float = 0.0
    ratio: float = 0.0
    remark: str = ""
    not_run: str = ""

    def against(self, limits: Limits) -> Figure:
        """Return it with the limit of this run."""
        if self.not_run or not self.limit:
            return self
        limit_gb_s = getattr(limits, self.limit)
        return replace(self, limit_gb_s=limit_gb_s, ratio=self.size_bytes / self.seconds / 1e9 / limit_gb_s)

    def as_text(self) -> str:
        """Format it as one line."""
        start = f"{self.name:44}"
        if self.not_run:
            return f"{start} not run: {self.not_run}"
        text = f"{start} {self.seconds:9.5f} s"
        if self.limit:
            text += f"  {self.size_bytes / self.seconds / 1e9:8.2f} GB/s, {self.ratio:5.2f} of {self.limit}"
        goal = f"  (goal {self.goal:g})" if self.goal else f"  (goal {self.goal_s:g} s)" if self.goal_s else ""
        return f"{text}{goal}{'  ' + self.remark if self.remark else ''}"


@dataclass(frozen=True)
class Setting:
    """The subject of the measurement, and the number of repetitions."""

    machine: Machine
    shapes: list[tuple[int, ...]]
    times: int

    @property
    def size_bytes(self) -> int:
        return sum(2 * math.prod(shape) for shape in self.shapes)

    @property
    def limit_size_bytes(self) -> int:
        """Return the size that limits are measured with."""
        return min(self.size_bytes, LIMIT_SIZE_BYTES)

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the tensors on the device."""
        return self.machine.tensors(self.shapes, seed)


def check_equal(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> None:
    """AssertionError that names what differs in any byte."""
    wrong = [name for name, tensor in expected.items() if not same_bytes(found[name], tensor)]
    assert not wrong, f"{len(wrong)} tensors arrived with other bytes, first {wrong[:3]}"


def copies(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure copies of all tensors of the model, down and up, as transports copy them."""
    machine, size_bytes = setting.machine, setting.size_bytes
    tensors = setting.tensors(1)
    flats = [tensor.view(-1).view(torch.uint8) for tensor in tensors.values()]
    host, device = machine.host_block(size_bytes), machine.device
    down = machine.timed(lambda: device.down(flats, host), setting.times)
    others = [torch.zeros_like(flat) for flat in flats]
    up = machine.timed(lambda: device.up(host, others), setting.times)
    check_equal(dict(enumerate(others)), dict(enumerate(flats)))
    return [
        Figure("D2H of a model's tensors", down, size_bytes, "d2h", goal=0.9),
        Figure("H2D of a model's tensors", up, size_bytes, "h2d", goal=0.9),
    ]


def pins(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure how long a slab is allocated, and pinned in the background."""
    if not setting.machine.is_gpu:
        raise NotRun("nothing is pinned without a GPU")
    size_bytes = setting.limit_size_bytes
    used, began = setting.machine.used_bytes(), time.perf_counter()
    with Slab.allocate([TensorSpec("w", "uint8", (size_bytes,), size_bytes)]):
        pinning.wait_for_background(TIMEOUT_S)
        taken = time.perf_counter() - began
        tables = setting.machine.used_bytes() - used
    return [Figure("pinning host memory", taken, size_bytes, "memcpy", remark=f"{tables >> 20} MiB of page tables")]


def digests(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure the digests of a slab on the device."""
    machine, found = setting.machine, []
    with Slab.adopt(setting.tensors(1)) as slab:
        taken = machine.timed(lambda: slab.manifest(), setting.times)
        found.append(Figure("digests of a slab on the device", taken, setting.size_bytes, "device_copy", goal=0.2))
        bare = machine.timed(lambda: slab.manifest(algorithm=NO_DIGESTS), setting.times)
        found.append(Figure("the same without digests", bare))
    return found


def publishes(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure how long the training step is blocked."""
    tensors, found = setting.tensors(1), []
    with start_server() as server, client_of(server.address, "trainer") as trainer:
        trainer.retain(0)  # what is taken back need not be kept
        version = 0
        for copy, name, limit in ((True, "publish(copy=True)", "d2h"), (False, "publish(copy=False)", "")):
            taken = []
            for _ in range(setting.times + 1):
                version += 1
                setting.machine.settle()
                began = time.perf_counter()
                trainer.publish(version, tensors, copy=copy)
                taken.append(time.perf_counter() - began)
                trainer.unpublish(version)
            median = statistics.median(taken[1:])
            found.append(Figure(f"{name}, the step stands still", median, setting.size_bytes, limit, goal_s=0.02))
    return [*found, _in_background(setting, tensors)]


def _in_background(setting: Setting, tensors: dict[str, torch.Tensor]) -> Figure:
    """Measure a snapshot in device memory, which is copied to the host while the training continues."""
    model = [contiguous_spec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    with start_server() as server:
        trainer = client_of(server.address, "trainer")
        publisher = Publisher(
            trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=TIMEOUT_S, model=model, in_background=True
        )
        stands_still, until_there = [], []
        for version in range(1, setting.times + 3):  # two versions take memory, which later ones use again
            setting.machine.settle()
            began = time.perf_counter()
            publisher.publish(version, tensors.items())
            stands_still.append(time.perf_counter() - began)
            publisher.settle()
            until_there.append(time.perf_counter() - began)
        with client_of(server.address, "rollout") as rollout:
            check_equal(rollout.fetch(version, timeout_s=TIMEOUT_S).tensors(), tensors)
        publisher.close()
    remark = f"{statistics.median(until_there[2:]):.3f} s until it is there for readers"
    name, median = "publish by a device copy, the step stands still", statistics.median(stands_still[2:])
    return Figure(name, median, setting.size_bytes, "device_copy", goal_s=0.02, remark=remark)


def fetches(transport: str, limit: str) -> Callable[[Setting, Limits], list[Figure]]:
    """Return a measurement of fetches from another process's tensors on the device, by one transport."""

    def fetch(setting: Setting, limits: Limits) -> list[Figure]:
        reason = unavailable(transport)
        if reason is not None:
            raise NotRun(reason)
        found = []
        live = setting.tensors(2)
        with (
            start_server() as server,
            Source(server.address, setting, transport) as source,
            client_of(server.address, "rollout", transports=(transport,)) as rollout,
        ):
            for way in ("into live tensors", "into host memory"):
                taken = []
                for _ in range(setting.times + 1):
                    version, expected = source.publish()
                    began = time.perf_counter()
                    if way == "into live tensors":
                        rollout.replicate(live, version, timeout_s=TIMEOUT_S, serve=False)
                        arrived = live
                    else:
                        arrived = rollout.fetch(version, timeout_s=TIMEOUT_S).tensors()
                    taken.append(time.perf_counter() - began)
                    check_equal(arrived, expected)
                    del expected, arrived  # before there are others: a third of the GPU's memory
                    if way != "into live tensors":
                        rollout.unpublish(version)
                goal = 0.2 if (transport, way) == ("cuda_ipc", "into live tensors") else 0.0
                median = statistics.median(taken[1:])
                found.append(Figure(f"{transport}, {way}", median, setting.size_bytes, limit, goal=goal))
        return found

    return fetch


def installs(setting: Setting, limits: Limits) -> list[Figure]:
    """Measure staged installs: the bytes are in a pinned slab of this host, and the engine pauses for the copy."""
    machine = setting.machine
    live, tensors = setting.tensors(1), setting.tensors(2)
    with start_server() as server, client_of(server.address, "trainer") as trainer:
        trainer.publish(1, tensors)
        with client_of(server.address, "rollout", transports=("tcp",)) as rollout:
            arrived = rollout.fetch(1, timeout_s=TIMEOUT_S).tensors()
            pinning.wait_for_background(TIMEOUT_S)
            taken = machine.timed(lambda: copy_all((live[name], arrived[name]) for name in live), setting.times)
            check_equal(live, tensors)
    return [Figure("pause of a staged install", taken, setting.size_bytes, "h2d", goal=1 / 1.1)]


def client_of(address: str, replica: str, **options: Any) -> Client:
    """Make a client of this process."""
    given = {"transports": ("tcp",), **options}
    return Client(address, run="bench", model="actor", replica=replica, **given)


FIGURES: dict[str, Callable[[Setting, Limits], list[Figure]]] = {
    "copies": copies,
    "pins": pins,
    "digests": digests,
    "publishes": publishes,
    "installs": installs,
    "tcp": fetches("tcp", "tcp"),
    "shm": fetches("shm", "memcpy"),
    "cuda_ipc": fetches("cuda_ipc", "device_copy"),
}
