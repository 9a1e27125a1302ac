"""How the fleet makes and ends OpenRLHF's engines (../vllm/ray/fleet/types.py `Launcher`).

The first engines stand in one placement group of OpenRLHF's; each further one has its own. Ray cannot give back a part
of a group, so the place of a first engine that has left is kept for the next one that joins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError
from ray.util import get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.vllm.model_facts import facts_of
from tensorhub_plugins.vllm.ray import owned, placement

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0  # for an engine to leave the store; the hub finds out by itself if it does not
GROUP = "tensorhub_"  # and the engine's name: its placement group

Place: TypeAlias = tuple[PlacementGroupSchedulingStrategy, list[int] | None]  # and the bundles of several workers


class EngineLauncher:
    """Sent by value. actor_options, arguments, tensorhub: what OpenRLHF's first engine was made with; places: where
    each of the first engines is, by name."""

    def __init__(
        self,
        actor_options: dict[str, Any],
        arguments: dict[str, Any],
        tensorhub: dict[str, Any],
        places: dict[str, Place],
    ) -> None:
        self.actor_options, self.arguments, self.tensorhub = actor_options, arguments, tensorhub
        self.places = dict(places)
        self.vacant: list[Place] = []

    def settle(self, names: Collection[str]) -> None:
        self.vacant += [self.places.pop(name) for name in self.places.keys() - names]

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return one for each GPU of an engine, as OpenRLHF has it."""
        return [{"GPU": 1, "CPU": 1} for _ in range(int(self.arguments["tensor_parallel_size"]))]

    def slots(self, avoid: Collection[str]) -> int:
        vacant = 0 if avoid else len(self.vacant)  # where they are is not known, see `_place`
        return vacant + placement.slots(self.bundles, avoid=avoid, same_node=False)

    async def start(self, name: str, rank: int, avoid: Collection[str], spare: bool = False) -> Any:
        self.places[name] = strategy, indices = await self._place(name, avoid)  # first: it is counted on
        engine = await asyncio.to_thread(import_module, "tensorhub_plugins.openrlhf.engine")  # imports vLLM: seconds
        arguments = {**self.arguments, "seed": self.arguments["seed"] + rank, "bundle_indices": indices}
        made = owned.actor_class(engine.TensorHubEngine).options(**self.actor_options, scheduling_strategy=strategy)
        own = {"engine": rank, "joins": True, "spare": spare}
        return made.remote(**arguments, tensorhub={**self.tensorhub, **own})

    async def join(self, name: str, handle: Any) -> None:
        await handle.tensorhub_join.remote()

    async def start_external(self, name: str, url: str) -> Any:
        external = await asyncio.to_thread(import_module, "tensorhub_plugins.openrlhf.external")
        options, partial = config.parse(self.tensorhub["backend"]), self.tensorhub["partial"]
        expected = await asyncio.to_thread(self._expected)
        rewards = {option: self.arguments[option] for option in ("agent_func_path", "remote_rm_url")}
        return await external.ExternalEngine.start(name, url, options, expected, partial=partial, **rewards)

    def _expected(self) -> Any:
        """Return what a server must be to answer in the place of an engine. The store's names are filled in later."""
        from transformers import AutoConfig

        from tensorhub_plugins.vllm.ray.external import Expected

        model = AutoConfig.from_pretrained(self.arguments["model"], trust_remote_code=True)
        return Expected(
            "", "", facts_of(model), int(self.arguments["max_model_len"]), self.arguments.get("logprobs_mode")
        )

    async def abort(self, name: str, handle: Any) -> None:
        await handle.tensorhub_give_back.remote()

    async def stop(self, name: str, handle: Any | None) -> None:
        if handle is not None:
            with suppress(RayError, TensorHubError, asyncio.TimeoutError):  # it may be dead, or busy for ever
                await asyncio.wait_for(asyncio.wrap_future(handle.tensorhub_leave.remote().future()), CLOSE_TIMEOUT_S)
            ray.kill(handle, no_restart=True)
        place = self.places.pop(name, None)
        with suppress(ValueError):  # there is none of this name: it is a first engine, or in the place of one
            # By its name, as this object may be newer than the group: Ray has started the fleet's starter again.
            group = await asyncio.to_thread(get_placement_group, f"{GROUP}{name}")
            await asyncio.to_thread(remove_placement_group, group)
            return
        if place is not None:
            self.vacant.append(place)

    async def _place(self, name: str, avoid: Collection[str]) -> Place:
        if self.vacant and not avoid:
            return self.vacant.pop(0)
        if not await asyncio.to_thread(placement.slots, self.bundles, avoid=avoid, same_node=False):
            raise UsageError(f"there is no room: an engine needs {len(self.bundles)} free GPUs, and as many CPUs")
        group = await asyncio.to_thread(placement.reserve, f"{GROUP}{name}", self.bundles, avoid=avoid)
        indices = None
        if len(self.bundles) > 1:
            utils = await asyncio.to_thread(import_module, "openrlhf.trainer.ray.utils")
            indices = await asyncio.to_thread(utils.get_bundle_indices, group, 0, len(self.bundles))
        bundle = indices[0] if indices else 0
        return PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True), indices
