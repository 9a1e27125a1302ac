"""The worker's side of an update with the real store and a toy model: no engine, so every order of events is cheap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core import Client, Server, copy_all
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.worker import checkpoint_contract, reload
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import ShardPosition

LAYOUT = "runtime:toy"
TIMEOUT_S = 20.0


class Toy(torch.nn.Module):
    """A model whose runtime layout is one fused tensor of the checkpoint's two."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.full((6, 1000), value))


def toy_checkpoint(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 1000), value), "b": torch.full((4, 1000), value)}


def rehearsed(model: Any, vllm_config: Any, tensors: Any) -> checkpoint_contract.Rehearsal:
    """Replace a rehearsal of vLLM's loaders by one that takes everything."""
    return checkpoint_contract.Rehearsal(checkpoint_contract.shapes_of(tensors), frozenset(tensors))


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace vLLM's layerwise reload."""

    def load_all(model: Toy, vllm_config: Any, weights: Any, **_: Any) -> None:
        named = dict(weights)
        with torch.no_grad():
            copy_all([(model.fused, torch.cat([named["a"], named["b"]]))])
            if hasattr(model, "kernel"):
                model.kernel["scale"] = model.fused.sum(1)

    monkeypatch.setattr(reload, "reload_checkpoint", load_all)
    monkeypatch.setattr(checkpoint_contract, "rehearse", rehearsed)


class Party:
    """An all-gather between threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.votes = [b""] * size

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(vote: bytes) -> list[bytes]:
            self.votes[rank] = vote
            self.barrier.wait()
            votes = list(self.votes)
            self.barrier.wait()
            return votes

        return gather


class Engines:
    """A factory that makes updaters, and closes them."""

    def __init__(self, hub: Server, simulation: Simulation | None = None) -> None:
        self.hub, self.simulation = hub, simulation
        self.made: list[Updater] = []

    def __call__(
        self,
        replica: str,
        *,
        shard: int = 0,
        gather: Any = lambda vote: [vote],
        shards: int = 1,
        **options: Any,
    ) -> Updater:
        config = {"hub": self.hub.address, "run": "r", "model": "m", "replica": replica, **options}
        model = Toy()
        if self.simulation is not None:
            self.simulation.take(model.fused, replica)
        updater = Updater(
            WorkerConfig.parse(config), model, SimpleNamespace(), ShardPosition(shard, shards, LAYOUT), gather
        )
        self.made.append(updater)
        return updater

    def trainer(self, name: str = "trainer") -> Client:
        return Client(self.hub.address, run="r", model="m", replica=name)


@pytest.fixture(params=["host", "device"])
def engines(hub: Server, request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Yield engines on the host, and on a simulated device, whose copies and kernels must all be ordered."""
    with ExitStack() as stack:
        simulation = stack.enter_context(Simulation(0)) if request.param == "device" else None
        made = Engines(hub, simulation)
        yield made
        for updater in made.made:
            updater.close()
        if simulation is not None:
            simulation.check()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def fetch(updater: Updater, version: int) -> str:
    updater.start_fetch(version, TIMEOUT_S)
    wait_until(lambda: updater.poll()["state"] != "fetching")
    return updater.poll()["state"]


def update(updater: Updater, version: int) -> dict[str, Any]:
    assert fetch(updater, version) == "ready", updater.poll()["error"]
    result = updater.install(version, TIMEOUT_S)
    assert result["installed"], result["error"]
    wait_until(lambda: not updater.poll()["serving"])
    return result


def value(updater: Updater) -> float:
    """Return the value that fills the whole model."""
    (found,) = updater.model.fused.unique().tolist()
    return found
