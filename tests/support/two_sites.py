"""Engines of two sites, one process each: the real follower and the real updater, with a toy for a model."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from tensorhub_plugins.core import Client, Location
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.engine.follower import Follower
from tensorhub_plugins.vllm.engine.staleness import Staleness
from tensorhub_plugins.vllm.worker import checkpoint_contract, reload
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import ShardPosition

RUN = {"run": "r", "model": "m"}
NUMBERS = 1 << 20  # of the toy, four bytes each
STEP_S = 0.01


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(NUMBERS))


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Return weights that cannot be compressed, different for each version."""
    noise = torch.Generator().manual_seed(version)
    return {"weight": torch.rand(NUMBERS, generator=noise)}


class Engine:
    """An engine that makes a step every STEP_S, unless it is paused."""

    def __init__(self, hub: str, name: str, host: str, data_center: str, staleness_s: float | None = None) -> None:
        torch.set_num_threads(1)
        checkpoint_contract.rehearse = lambda model, config, tensors: checkpoint_contract.Rehearsal(  # type: ignore[assignment,misc]
            checkpoint_contract.shapes_of(tensors), frozenset(tensors)
        )
        reload.reload_checkpoint = lambda model, config, named, **_: _fill(model, named)  # type: ignore[assignment,misc]
        place = {"data_center": data_center, "rack": "", "host": name}
        given = {"hub": hub, **RUN, "replica": name, "location": place, "advertise_host": host, "transports": ("tcp",)}
        self.config = WorkerConfig.parse(given)
        self.model = Toy()
        self.updater = Updater(self.config, self.model, SimpleNamespace(), ShardPosition(0, 1, "runtime:toy"), _alone)
        self.client = self.config.connect(replica=f"{name}-follow")
        self.steps, self.log = 0, []  # type: ignore[var-annotated]
        self.notes: list[str] = []
        logging.getLogger("vllm").addHandler(_Notes(self.notes))
        self._generates = threading.Event()
        self._generates.set()
        self.staleness = Staleness(lambda: self.client.hub_silent_s, staleness_s, worker=name)
        self.follower = _Logged(self, self.client.target, worker=name, timeout_s=60.0)
        threading.Thread(target=self._generate, daemon=True).start()
        threading.Thread(target=lambda: asyncio.run(self._follow()), daemon=True).start()

    async def _follow(self) -> None:
        await asyncio.gather(self.follower.follow(), self.staleness.watch())

    def _generate(self) -> None:
        while self._generates.wait():
            self.steps += 1
            time.sleep(STEP_S)

    # --- what the follower asks for ---

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        answer = await asyncio.to_thread(getattr(self.updater, method.removeprefix("tensorhub_")), *args)
        if method == "tensorhub_install":
            self.log[-1].update(sources=answer["report"]["sources"], installed=answer["installed"])
        return [answer]

    async def pause(self) -> None:
        self._generates.clear()

    async def forget(self) -> None:
        assert not self._generates.is_set()

    async def resume(self) -> None:
        self._generates.set()

    async def at_once(self, steps: Any) -> Any:
        return await steps()

    def running(self) -> list[str]:
        return []

    def departed(self) -> list[str]:
        return []

    # --- what the test asks for ---

    def status(self) -> dict[str, Any]:
        return {
            "version": self.follower.version,
            "steps": self.steps,
            "is_cut_off": self.staleness.is_cut_off,
            "state": self.updater.poll()["state"],
            "log": [dict(entry) for entry in self.log],
            "notes": list(self.notes),
        }

    def first_numbers(self) -> list[float]:
        return [float(number) for number in self.model.weight.detach()[:8]]

    def close(self) -> None:
        self.updater.close()
        self.client.close()


class _Logged(Follower):
    """A record of what each update took."""

    async def fetch(self, version: int) -> None:
        engine: Any = self.engine
        entry = {"version": version, "began": time.monotonic(), "steps": -engine.steps}
        engine.log.append(entry)
        await super().fetch(version)
        entry["fetch_s"] = time.monotonic() - entry["began"]
        entry["steps"] += engine.steps

    async def install(self, version: int) -> None:
        engine: Any = self.engine
        began = time.monotonic()
        await super().install(version)
        engine.log[-1]["pause_s"] = time.monotonic() - began


class Trainer:
    def __init__(self, hub: str, host: str) -> None:
        place = Location("east", "", "trainer")
        self.client = Client(hub, **RUN, replica="trainer", location=place, advertise_host=host, transports=("tcp",))
        self.client.retain(2)
        self._hub = hub
        self._published: list[int] = []

    def publish(self, version: int) -> list[float]:
        tensors = weights_of(version)
        self.client.publish(version, tensors)
        self._published.append(version)
        while len(self._published) > 2:
            self.client.unpublish(self._published.pop(0))
        return [float(number) for number in tensors["weight"][:8]]

    def close(self) -> None:
        self.client.close()

    def seeds(self, site: str) -> list[str]:
        """Return the readers into this site from outside, as the hub knows them."""
        leases = [lease for model in fetch_status(self._hub)["models"] for lease in model["leases"]]
        return [
            str(lease["reader"])
            for lease in leases
            if str(lease["reader"]).startswith(site)
            and not all(source.startswith(site) for source in lease["sources"].values())
        ]


class _Notes(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.INFO)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())


def _alone(vote: Any) -> list[Any]:
    return [vote]


def _fill(model: Toy, named: Any) -> None:
    with torch.no_grad():
        model.weight.copy_(dict(named)["weight"])
