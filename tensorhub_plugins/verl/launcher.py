"""How the fleet makes one more replica of a running verl job, and gives one back (../vllm/ray/fleet/ asks for it).

A replica of verl is whole in itself: a placement group, workers that hold the GPUs, a server actor. It is made as
verl's own manager makes it, under a rank that no other had, except that nothing is read from a disk: its first weights
come from the nearest peer. What it is made of is found again by name, also after a start that failed half way.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Collection
from typing import Any

import msgspec
import omegaconf
import ray
from ray.exceptions import RayError

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl import checks, external, gpu_reservation, hub
from tensorhub_plugins.verl.config import BACKEND, ROLLOUT, Options
from tensorhub_plugins.verl.trainer import replica_name
from tensorhub_plugins.verl.versions import reported_as
from tensorhub_plugins.vllm import drafts
from tensorhub_plugins.vllm.ray import placement

logger = get_logger(__name__)

LEAVE_TIMEOUT_S = 15.0  # for a replica to say that it goes; one that does not is forgotten after its session's timeout
GIVE_BACK_TIMEOUT_S = 60.0  # verl itself waits so long for requests that are just being handed to vLLM
COLOCATED = 2  # worker groups that verl's init_standalone makes room for, with a CPU each


class VerlLauncher:
    """Sent by value to the actor that owns what the fleet starts."""

    def __init__(self, root: Any, options: Options, rollouter: Any | None = None) -> None:
        """Make a launcher. root: verl's whole configuration. rollouter: fully_async's actor, which limits what is under
        way."""
        self._root, self._options, self._rollouter = root, options, rollouter
        self._replicas: dict[str, Any] = {}  # Ray ends an actor when its last handle is gone
        self._unwanted: set[str] = set()
        self._joined: set[str] = set()  # by this object, external servers among them, and no spares
        self._left: set[str] = set()  # of these, and of verl's own
        self._settled: frozenset[str] | None = None  # all that were there when this object began; None: not yet known
        self._reserving = asyncio.Lock()  # replicas of several nodes, begun together, do not take a part each

    async def start(self, name: str, rank: int, avoid: Collection[str], spare: bool = False) -> Any:
        """Start a replica; return its server actor, once the engine runs."""
        if not await asyncio.to_thread(self.slots, avoid):
            raise UsageError(f"no node has room for another replica, which takes {self._bundles()} on one node")
        async with self._reserving:
            groups = await asyncio.to_thread(self._reserve, name, rank, avoid)
        replica = await self._replica(rank, groups, spare)
        self._replicas[name] = replica
        try:
            await asyncio.to_thread(self._init, name, replica)
        except Exception as error:
            raise TensorHubError(f"the engine did not start: {_last_line(error)}") from error
        if not spare:
            await self._count(name)
        return replica.servers[0]

    async def join(self, name: str, handle: Any) -> None:
        await handle.tensorhub_join.remote()
        await self._count(name)

    async def _count(self, name: str) -> None:
        self._joined.add(name)
        await self._limit()

    def _reserve(self, name: str, rank: int, avoid: Collection[str]) -> list[Any]:
        """Reserve one placement group a node, called as verl calls it; all or none."""
        bundles, nodes = self._bundles(), self._nodes()
        prefix = f"{_pool(rank)}verl_group_{'_'.join([str(len(bundles))] * nodes)}"
        try:
            names = [f"{prefix}:{node}" for node in range(nodes)]
            return placement.reserve_all(names, bundles, avoid=avoid, strategy="STRICT_PACK")
        finally:
            if name in self._unwanted:  # meanwhile: what this returns is not used
                give_back(name)

    async def _replica(self, rank: int, groups: list[Any], spare: bool) -> Any:
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        root = copy.deepcopy(self._root)
        rollout = root.actor_rollout_ref.rollout
        options = await self._known()
        with omegaconf.open_dict(root):
            kwargs = rollout.checkpoint_engine.engine_kwargs
            kwargs[BACKEND] = {**(kwargs.get(BACKEND) or {}), "hub": options.hub, "run": options.run}
            if not drafts.has_weights(checks.draft_of(rollout)):  # which no peer has
                rollout.load_format = "dummy"
            memory = rollout.get("standalone_gpu_memory_utilization")  # fully_async's, for those without a trainer
            if memory is not None:
                rollout.gpu_memory_utilization = memory
        replica_class: Any = RolloutReplicaRegistry.get(ROLLOUT)
        gpus = rollout.n_gpus_per_node
        return replica_class(rank, rollout, root.actor_rollout_ref.model, gpus, groups=groups, spare=spare)

    async def _known(self) -> Options:
        """Return the options with the hub and the run's name, which the first replicas have found for themselves."""
        options = self._options
        return msgspec.structs.replace(options, hub=await hub.find(options), run=hub.run_name(options))

    def _init(self, name: str, replica: Any) -> None:
        """Start the engine. verl blocks here, and cannot be told to stop."""
        try:
            asyncio.run(replica.init_standalone())
        finally:
            if name in self._unwanted:
                give_back(name)

    async def start_external(self, name: str, url: str) -> Any:
        """Return an actor that stands for the server; see external.py."""
        options = await self._known()
        rollout, expected = await asyncio.to_thread(self._expected)
        spans = reported_as(options.spans, self._root.actor_rollout_ref.rollout)
        options = msgspec.structs.replace(options, spans=spans)
        handle = await external.ExternalServer.start(name, url, options, rollout, expected)
        await self._count(name)
        return handle

    def _expected(self) -> Any:
        from verl.utils.config import omega_conf_to_dataclass

        configuration = self._root.actor_rollout_ref
        return external.rollout_of(configuration.rollout, omega_conf_to_dataclass(configuration.model))

    async def abort(self, name: str, handle: Any) -> None:
        """Abort what is under way: verl's client goes on elsewhere with the tokens it has, or begins again where it
        cannot."""
        await asyncio.wait_for(handle.tensorhub_give_back.remote(), GIVE_BACK_TIMEOUT_S)

    async def stop(self, name: str, handle: Any | None) -> None:
        """End a replica, also one that verl has started. What is not there any more is no error."""
        self._unwanted.add(name)
        if handle is not None:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                await asyncio.wait_for(handle.tensorhub_leave.remote(), LEAVE_TIMEOUT_S)
            ray.kill(handle)
        if not is_external(name):
            await asyncio.to_thread(give_back, name)
        self._replicas.pop(name, None)
        self._left.add(name)
        await self._limit()

    def settle(self, names: Collection[str]) -> None:
        """Learn which of verl's own have left before. What a replica holds is found by its name."""
        self._settled = frozenset(names)

    def slots(self, avoid: Collection[str]) -> int:
        return placement.slots(self._bundles(), avoid=avoid) // self._nodes()

    def _nodes(self) -> int:
        rollout = self._root.actor_rollout_ref.rollout
        return -(-checks.gpus_of_engine(rollout) // int(rollout.n_gpus_per_node))

    def _bundles(self) -> list[dict[str, float]]:
        from verl.plugin.platform import get_platform

        rollout = self._root.actor_rollout_ref.rollout
        gpu = get_platform().ray_resource_name()
        return [{"CPU": COLOCATED, gpu: 1}] * min(checks.gpus_of_engine(rollout), rollout.n_gpus_per_node)

    async def _limit(self) -> None:
        """Limit the samples under way, which in fully_async grow with the fleet; in other trainers verl's options bound
        them."""
        if self._rollouter is None:
            return
        joined = len(self._joined - self._left)
        try:
            await self._rollouter.__ray_call__.remote(set_concurrency, joined, frozenset(self._left), self._settled)
        except RayError as error:
            logger.warning("verl's rollouter was not told how many replicas there are: %s", _last_line(error))


def set_concurrency(rollouter: Any, joined: int, left: Collection[str], known: Collection[str] | None = None) -> None:
    """Set the limit of verl's FullyAsyncRollouter, which counts the replicas of its own manager alone, now and whenever
    it counts them anew: it moves those on the trainer's GPUs in and out. Runs in its process. left, known: names of
    replicas, also of others; None: all of its own were there."""

    def update() -> None:
        if rollouter.max_required_samples is None:
            return  # it has not begun, and will count for itself
        replicas = rollouter.llm_server_manager.get_replicas()
        own = {f"rollout-{one.replica_rank}" for one in replicas if one.follows}
        there = own if known is None else own.intersection(known)
        count = len(replicas) - len(own) + len(there.difference(left)) + joined
        samples = max(1, count) * rollouter.concurrent_samples_per_replica
        rollouter.max_concurrent_samples = min(samples, rollouter.max_required_samples)
        rollouter._record_active_count()

    rollouter._update_max_concurrent_samples = update
    update()


def is_external(name: str) -> bool:
    """Return whether the fleet gives this name to a server that no framework has started."""
    return name.startswith("external-")


def give_back(name: str) -> None:
    """End all actors of this replica, and return what they held. Of none it is no error."""
    for actor in ray.util.list_named_actors():
        if is_actor_of(name, actor):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(actor))
    for group in ray.util.placement_group_table().values():
        if is_group_of(name, group["name"]) and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))


def is_actor_of(name: str, actor: str) -> bool:
    """Return whether verl gives this name to a server or a worker of this replica, or we to what holds its GPUs."""
    is_ours = actor.startswith((f"{ROLLOUT}_server_{_rank(name)}_", gpu_reservation.prefix(_rank(name))))
    return is_ours or replica_name(actor).startswith(f"{name}.")


def is_group_of(name: str, group: str) -> bool:
    """Return whether verl gives this name to the replica's placement group."""
    return group.startswith(f"{_pool(_rank(name))}verl_group")


def _pool(rank: int | str) -> str:
    return f"rollout_pool_{rank}"


def _rank(name: str) -> str:
    return name.rpartition("-")[2]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
