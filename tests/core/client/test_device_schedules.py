"""Seeded schedules of publish, read, compute, damage and failure on a simulated device, whose every order is checked.

Each version fills all tensors with bytes of its own. A trainer's optimizer writes them on one stream, a rollout's
forward passes read its weights on another; both go on while versions come and go. Whatever is interrupted: nobody is
given bytes of two versions, no forward pass sees two, and no operation is unordered with one that it meets.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core import TensorHubError
from tensorhub_plugins.core.device.devices import Device

SEEDS = 10
STEPS = 14
SIZES = {"a": 70_001, "b": 3, "c": 16, "d": 30_000, "e": 4096}
FAILING = ("copy", "scratch", "buffer", "launch")


def value_of(version: int) -> int:
    return 7 * version % 251


class Story:
    """One trainer, two rollouts, and what each of them must hold."""

    def __init__(self, stage, simulation: Simulation, seed: int) -> None:
        self.simulation, self.random = simulation, random.Random(seed)
        self.clients = {name: stage.client(name) for name in ("trainer", "one", "other")}
        self.weights = {name: self._tensors(name) for name in self.clients}
        self.version, self.published = 100 * seed, False  # versions of one run only grow
        self.holds: dict[str, int | None] = {"one": 0, "other": 0}  # None: mixed
        self.passes: list[tuple[int, list[bytes]]] = []
        self.happened: Counter[str] = Counter()
        self.timeout_s = 60.0

    def _tensors(self, owner: str) -> dict[str, torch.Tensor]:
        return {
            name: self.simulation.put(torch.zeros(size, dtype=torch.uint8), f"{owner}.{name}")
            for name, size in SIZES.items()
        }

    def run(self) -> None:
        for _ in range(STEPS):
            act = self.random.choice([self.step, self.step, self.read, self.read, self.read, self.compute, self.damage])
            failing = self.random.choice(FAILING) if self.random.random() < 0.25 else ""
            if failing:
                self.simulation.fail(failing, self.random.choice([1, 2, 50]))
            self.timeout_s = 2.0 if failing else 60.0
            with suppress(torch.OutOfMemoryError, *([TensorHubError] if failing else [])):
                act()
                self.happened[act.__name__] += 1
            self.happened["failed"] += bool(failing) and self.simulation._fails[failing] == 0
            self.simulation._fails.clear()
            self.check()
        self.simulation.check()

    def step(self) -> None:
        """The optimizer writes the next version, which is published from a copy or in place."""
        trainer, weights = self.clients["trainer"], self.weights["trainer"]
        if self.published:
            trainer.unpublish(self.version)
        self.published = False
        self.version += 1
        for tensor in weights.values():
            self.simulation.kernel(tensor, value_of(self.version), "optimizer")
        trainer.publish(self.version, weights, copy=self.random.random() < 0.5)
        self.published = True

    def read(self) -> None:
        """A rollout reads the newest version, over its live weights or into host memory, and serves it on."""
        name = self.random.choice(list(self.holds))
        client, live = self.clients[name], self.weights[name]
        if not self.published or self.holds[name] == self.version:
            return
        if self.random.random() < 0.3:
            fetched = client.fetch(self.version, timeout_s=self.timeout_s)
            assert {bytes([value_of(self.version)])} == {bytes(set(t.tolist())) for t in fetched.tensors().values()}
            fetched.release()
            return
        mixed = self.holds[name] is None
        self.holds[name] = None
        client.unpublish(self.version)
        for key in client.serving():
            client.unpublish(key.version)
        client.replicate(live, self.version, timeout_s=self.timeout_s, repair=mixed)
        self.holds[name] = self.version

    def compute(self) -> None:
        """A forward pass is queued, and not waited for."""
        name = self.random.choice(list(self.holds))
        version = self.holds[name]
        if version:
            for tensor in self.weights[name].values():
                self.passes.append((version, self.simulation.reading_kernel(tensor, f"{name}'s engine")))

    def damage(self) -> None:
        """Somebody overwrites a byte of what a rollout serves; its next read mends it."""
        name = self.random.choice(list(self.holds))
        version = self.holds[name]
        if version:
            self.simulation.devices[0].synchronize()
            self.simulation.kernel(self.weights[name]["d"][17:18], 0xFF, "stranger")
            self.simulation.devices[0].synchronize()
            self.holds[name] = None
            assert "d" in self.clients[name].recheck(version)

    def check(self) -> None:
        for name, version in self.holds.items():
            if version:
                found = {self.simulation.content(tensor)[:1] for tensor in self.weights[name].values()}
                whole = {bytes(set(self.simulation.content(tensor))) for tensor in self.weights[name].values()}
                assert found == whole == {bytes([value_of(version)])}, name
        for version, seen in self.passes:
            assert all(set(each) == {value_of(version)} for each in seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_happens_nothing_is_mixed_and_all_is_ordered(stage, small_segments) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        with Simulation(seed, piece_size_bytes=50_000) as simulation:
            story = Story(stage, simulation, seed)
            print(f"seed {seed}")  # shown with a failure
            story.run()
            for client in story.clients.values():
                client.close()
            happened += story.happened
    assert min(happened[name] for name in ("step", "read", "compute", "damage", "failed")) > SEEDS / 2, happened


@pytest.mark.parametrize("broken", ["synchronize", "wait"])
def test_a_device_that_is_not_waited_for_is_found(stage, small_segments, monkeypatch, broken: str) -> None:
    """The control."""
    if broken == "synchronize":
        monkeypatch.setattr(Device, "synchronize", lambda self: None)
    with Simulation(1, piece_size_bytes=50_000) as simulation:
        if broken == "wait":
            simulation.devices[0]._driver.wait = lambda event: None
        with pytest.raises((AssertionError, TensorHubError)):
            Story(stage, simulation, 1).run()
