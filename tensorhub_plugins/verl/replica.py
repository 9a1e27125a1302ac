"""Pull mode for verl's stock manager: `rollout.name=vllm_tensorhub`.

verl's manager moves weights by stopping all replicas, calling all their workers, and starting all again. To it, this
replica has nothing to stop (abort, release and resume do nothing) and one worker that has nothing to do
(worker_stub.py), so an update ends when the trainer has published. The servers follow by themselves (engine.py).
"""

from __future__ import annotations

from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from tensorhub_plugins.verl import checks, gpu_reservation, worker_stub
from tensorhub_plugins.verl import config as configuration
from tensorhub_plugins.verl.engine import SpareServer, TensorHubServer
from tensorhub_plugins.verl.launcher import COLOCATED, VerlLauncher
from tensorhub_plugins.verl.versions import check_pieces, reported_as
from tensorhub_plugins.vllm.ray import fleet


class TensorHubReplica(vLLMReplica):
    workers: list[Any]

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        *args: Any,
        groups: Any | None = None,
        spare: bool = False,
        **kwargs: Any,
    ) -> None:
        """Make a replica. groups: placement groups, one a node, of a replica that the fleet adds to a run; spare: one
        that follows when it is told to (launcher.py)."""
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        self._placeholders: list[Any] = []
        if self.is_reward_model or self.is_teacher_model:
            return  # their weights do not change: verl's own server
        checks.check_backend(config)
        engine = self.config.checkpoint_engine
        options = configuration.parse(engine.engine_kwargs.get(configuration.BACKEND))
        configuration.check_verl(options)
        configuration.check_vllm(options)
        checks.check_parallel(config)
        checks.check_fleet(options, config)
        check_pieces(options, config)
        self._root, self._options, self._groups = config._get_root(), options, groups
        if checks.check_adapter(self._root, options) and self.config.load_format == "dummy":
            self.config.load_format = "auto"  # no version holds them
        self._has_router = configuration.use_our_router(config)
        spans = reported_as(options.spans, config) if self._has_router else "oldest"
        # self.config is this replica's own copy, and what its servers are made with.
        given = engine.engine_kwargs.get(configuration.BACKEND) or {}
        engine.engine_kwargs[configuration.BACKEND] = {**given, "spans": spans}
        # The servers of a replica that spans nodes start together or not at all.
        restarts = options.restarts if self.nnodes == 1 else 0
        self.server_class = ray.remote(max_restarts=restarts)(SpareServer if spare else TensorHubServer)

    async def init_hybrid(self, worker_group: Any) -> None:
        """Start on the trainer's GPUs, where verl hands the weights over itself."""
        if not (self.is_reward_model or self.is_teacher_model):
            checks.check_mode(self._root)
        await super().init_hybrid(worker_group)

    async def init_standalone(self) -> None:
        """Start as verl's does, in placement groups that are there already where the fleet has made them."""
        if self.is_reward_model or self.is_teacher_model or self._groups is None:
            await super().init_standalone()
            return
        self.rollout_mode = RolloutMode.STANDALONE
        sizes = [self.gpus_per_replica_node] * self.nnodes
        self.resource_pool = RayResourcePool(sizes, use_gpu=True, max_colocate_count=COLOCATED)
        self.resource_pool.pgs = self._groups
        places = [(group, index) for group in self._groups for index in range(self.gpus_per_replica_node)]
        self.workers = [
            gpu_reservation.start(self.replica_rank, number, group, index)
            for number, (group, index) in enumerate(places)
        ]
        await self.launch_servers()

    @property
    def follows(self) -> bool:
        """Hybrid replicas share the trainer's GPUs: verl puts them to sleep and gives them weights in its own way."""
        frozen = self.is_reward_model or self.is_teacher_model
        return self.rollout_mode == RolloutMode.STANDALONE and not frozen

    def _get_server_name_prefix(self) -> str:
        return f"{self.config.name}_"

    async def launch_servers(self) -> None:
        await super().launch_servers()
        if self.follows:
            # These workers hold the placement group's GPUs, and are never asked to move weights.
            self._placeholders = self.workers
            self.workers = [worker_stub.start(self._root, self._options.timeout_s, has_router=self._has_router)]
            if self._has_router and self._groups is None:
                self._start_fleet()

    def _start_fleet(self) -> None:
        """Start the fleet where verl's manager lives, as long as the run. Of all first replicas one starts it."""
        is_fully_async = self._root.get("async_training") is not None
        rollouter = ray.get_runtime_context().current_actor if is_fully_async else None
        fleet.start(VerlLauncher(self._root, self._options, rollouter), self._options)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        if self.follows:
            return {"aborted_count": 0, "request_ids": [], "server_results": []}
        return dict(await super().abort_all_requests(reject_request=reject_request))

    async def release_kv_cache(self) -> None:
        if not self.follows:
            await super().release_kv_cache()

    async def resume_kv_cache(self) -> None:
        if not self.follows:
            await super().resume_kv_cache()

    async def resume_generation(self) -> None:
        if not self.follows:
            await super().resume_generation()

    async def sleep(self) -> None:
        if not self.follows:  # waits for the engine, and a standalone replica never sleeps
            await super().sleep()
