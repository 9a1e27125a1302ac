"""Pull mode for verl's stock manager: `rollout.name=vllm_tensorhub`.

verl's manager moves weights by stopping all replicas, calling all their workers, and starting all again. To it, this
replica has nothing to stop (abort, release and resume do nothing) and one worker that has nothing to do
(null_worker.py), so an update ends when the trainer has published. The servers follow by themselves (engine.py).
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from tensorhub_plugins.verl import checks, null_worker
from tensorhub_plugins.verl import config as configuration
from tensorhub_plugins.verl.engine import TensorHubServer


class TensorHubReplica(vLLMReplica):
    workers: list[Any]

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
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
        checks.check_model(model_config)
        self._root, self._timeout_s = config._get_root(), options.timeout_s
        has_router = configuration.use_our_router(config)
        spans = configuration.spans_of(options.spans, config) if has_router else "oldest"
        # self.config is this replica's own copy, and what its servers are made with.
        given = engine.engine_kwargs.get(configuration.BACKEND) or {}
        engine.engine_kwargs[configuration.BACKEND] = {**given, "spans": spans}
        # The servers of a replica that spans nodes start together or not at all.
        restarts = options.restarts if self.nnodes == 1 else 0
        self.server_class = ray.remote(max_restarts=restarts)(TensorHubServer)

    async def init_hybrid(self, worker_group: Any) -> None:
        """On the trainer's GPUs, where verl hands the weights over itself."""
        if not (self.is_reward_model or self.is_teacher_model):
            checks.check_mode(self._root)
        await super().init_hybrid(worker_group)

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
            # verl's own workers hold the placement group, and are never asked to move weights.
            self._placeholders = self.workers
            self.workers = [null_worker.start(self._root, self._timeout_s)]

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
