"""Pull mode for verl's stock manager: `rollout.name=vllm_tensorhub`.

verl's manager moves weights by stopping all replicas, calling all their workers, and starting all again. To it, this
replica has nothing to stop (abort, release and resume do nothing) and one worker that is done at once (`NullWorker`),
so an update ends when the trainer has published. The servers follow by themselves (engine.py).
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import config as configuration
from tensorhub_plugins.verl.engine import TensorHubServer

NULL_WORKER = "tensorhub_null_worker"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class NullWorker:
    """Stands where verl's manager expects the workers of the replicas."""

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def update_weights(self, global_steps: int | None = None) -> None:
        return None


class TensorHubReplica(vLLMReplica):
    workers: list[Any]

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        self._placeholders: list[Any] = []
        if self.is_reward_model or self.is_teacher_model:
            return  # their weights do not change: verl's own server
        engine = self.config.checkpoint_engine
        if engine.backend != configuration.BACKEND:
            raise UsageError(
                f"rollout.name={configuration.ROLLOUT} follows the store, but "
                f"rollout.checkpoint_engine.backend is {engine.backend!r}: set it to {configuration.BACKEND!r} and "
                "rollout.checkpoint_engine.custom_backend_module to tensorhub_plugins.verl"
            )
        options = configuration.parse(engine.engine_kwargs.get(configuration.BACKEND))
        configuration.check_verl(options)
        configuration.check_vllm(options)
        self._check_supported()
        has_router = configuration.use_our_router(config)
        spans = configuration.spans_of(options.spans, config) if has_router else "oldest"
        # self.config is this replica's own copy, and what its servers are made with.
        given = engine.engine_kwargs.get(configuration.BACKEND) or {}
        engine.engine_kwargs[configuration.BACKEND] = {**given, "spans": spans}
        # The servers of a replica that spans nodes start together or not at all.
        restarts = options.restarts if self.nnodes == 1 else 0
        self.server_class = ray.remote(max_restarts=restarts)(TensorHubServer)

    def _check_supported(self) -> None:
        if self.config.data_parallel_size > 1:
            raise UsageError(
                f"rollout.data_parallel_size is {self.config.data_parallel_size}: with {configuration.ROLLOUT} every "
                "engine is a replica of its own, so set it to 1; verl then starts as many replicas as the GPUs allow"
            )
        lora = self.model_config.get("lora", None) or {}
        if (self.model_config.get("lora_rank", 0) or lora.get("rank", 0)) and not lora.get("merge", False):
            raise UsageError(
                "the store moves whole weights: set actor_rollout_ref.model.lora.merge=true so that the trainer merges "
                "the adapter before it publishes"
            )

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
            null_worker: Any = NullWorker
            self.workers = [null_worker.options(name=NULL_WORKER, get_if_exists=True).remote()]

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
