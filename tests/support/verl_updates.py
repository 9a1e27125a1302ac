"""verl's own trainers and manager, as far as updates go, over our engines and a real hub: no Ray, no vLLM, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.checkpoint_engine import base
from verl.utils.tracking import Tracking

from tensorhub_plugins.core import Client, VersionRefused
from tensorhub_plugins.verl import trainer as checkpoint_engine
from tensorhub_plugins.verl.worker_stub import NullWorker, validation_of
from tensorhub_plugins.vllm.plugin import replaced

RUN = "r"
TIMEOUT_S = 30.0


class Policy:
    """A policy whose weights are the number of its optimizer steps."""

    def __init__(self, trained: int = 0) -> None:
        self.trained = trained

    def train(self) -> None:
        self.trained += 1

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer", torch.full((8, 4), float(self.trained))


class Workers:
    """A worker group of verl's, in threads. send: what each does in an update."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines, self.world_size = engines, len(engines)
        self._threads = ThreadPoolExecutor(max(1, len(engines)))

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Future[Any]]:
        def call(number: int) -> Any:
            given = {name: values[number] for name, values in arguments.items()}
            return self.engines[number].execute(method[number], **given)

        return [self._threads.submit(call, number) for number in range(self.world_size)]

    def update_weights(self, global_steps: int, mode: str = "") -> list[Future[Any]]:
        return [self._threads.submit(asyncio.run, engine.update(global_steps)) for engine in self.engines]


class Trainer:
    """One trainer rank's worker."""

    def __init__(self, policy: Policy, address: str) -> None:
        self.policy = policy
        self.engine = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=True, hub=address, run=RUN)

    def execute(self, method: str, **arguments: Any) -> Any:
        return getattr(self.engine, method)(**arguments)

    async def update(self, step: int) -> Any:
        return await self.engine.send_weights(self.policy.weights(), global_steps=step)

    def close(self) -> None:
        self.engine._client.close()


REFUSAL = "There is no module or parameter named 'layers.0.mlp'"


class DropIn:
    """A rollout worker under verl's manager. trained: the steps of its weights."""

    trained: float | None = None
    refuses = False  # to load what comes, as `loading.hear` says it for vLLM

    def __init__(self, address: str) -> None:
        self.engine = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, hub=address, run=RUN)

    def execute(self, method: str, **arguments: Any) -> Any:
        return getattr(self.engine, method)(**arguments)

    async def update(self, step: int) -> None:
        async for _, tensor in self.engine.receive_weights(global_steps=step):
            if self.refuses:
                raise VersionRefused(REFUSAL)
            self.trained = float(tensor[0, 0])

    def look(self) -> float | None:
        return self.trained

    def close(self) -> None:
        self.engine._client.close()


class Pulls:
    """A stand-in for a replica that pulls, and the replica, which pulls when it is asked."""

    trained: float | None = None
    version = 0
    refuses = False  # to install what comes, as the router says it for all replicas

    def __init__(self, address: str, root: Any) -> None:
        self.null = NullWorker(validation_of(root), TIMEOUT_S)
        self.client = Client(address, run=RUN, model="actor", replica="rollout-0")

    def execute(self, method: str, **_: Any) -> dict[str, Any]:
        return {"options": None} if method == "prepare" else {}

    async def update(self, step: int) -> None:
        if self.refuses:
            await self.null.meet(SimpleNamespace(wait_for_any=SimpleNamespace(remote=self._refuse)))
        await self.null.update_weights(step)

    async def _refuse(self, version: int, timeout_s: float) -> bool:
        raise VersionRefused(REFUSAL)

    def look(self) -> float | None:
        newest = max((info.version for info in self.client.versions()), default=0)
        if newest != self.version:
            fetched = self.client.fetch(serve=True, timeout_s=TIMEOUT_S)
            if self.version:
                self.client.unpublish(self.version)
            self.version, self.trained = fetched.version, float(fetched.tensors()["layer"][0, 0])
        return self.trained

    def close(self) -> None:
        self.client.close()


class Replica:
    """A stand-in for verl's replica, of which only the workers matter here."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def nothing(self, **_: Any) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


class Log:
    """A back end of verl's Tracking."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int, **_: Any) -> None:
        self.lines.append((step, dict(data)))

    def steps_with(self, key: str) -> list[int]:
        return [step for step, data in self.lines if key in data]


class Run:
    """One incarnation of a trainer over the replicas of a job, some of which may be older."""

    def __init__(self, address: str, root: Any, replicas: list[Any], policy: Policy, step: int = 0) -> None:
        """Start a trainer. step: the step from which it resumes."""
        self.policy, self.replicas, self.config, self.step = policy, replicas, root, step
        self.worker = Trainer(policy, address)
        self.saved: list[int] = []
        self.log = Log()

    def make_manager(self) -> Any:
        """Make verl's manager."""
        config = SimpleNamespace(backend="tensorhub", custom_backend_module=None)
        return base.CheckpointEngineManager(config, Workers([self.worker]), [Replica(one) for one in self.replicas])

    def tracking(self) -> Any:
        """Make the tracking as verl's trainers do, with a back end of ours."""
        made = Tracking("project", "experiment", [], OmegaConf.to_container(self.config))
        made.logger["test"] = self.log
        return made

    def generate(self) -> None:
        """Check that every replica answers with some weights of this incarnation's past."""
        assert self.have() <= {float(trained) for trained in range(self.policy.trained + 1)}, "without weights"

    def have(self) -> set[float | None]:
        return {one.look() for one in self.replicas}


def _results(calls: list[Future[Any]]) -> list[Any]:
    return [call.result(TIMEOUT_S) for call in calls]


def without_ray(monkeypatch: Any, names: Callable[[], str]) -> None:
    """Have verl's manager call workers in threads."""
    from tensorhub_plugins.verl import hub

    monkeypatch.setattr(checkpoint_engine, "_actor_name", names)
    monkeypatch.setattr(hub, "ensure", lambda options: options.hub)
    monkeypatch.setattr(base, "ray", SimpleNamespace(get=_results))
    monkeypatch.setattr(base, "RayWorkerGroup", lambda worker_handles, **_: Workers(worker_handles))
    monkeypatch.setattr(base, "RayClassWithInitArgs", lambda **_: None)


# --- verl's trainers: what they do around an update is their own ---


class Asked(Future[Any]):
    """An answer of an actor that is there."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.set_result(answer)

    def remote(self, *_: Any) -> Asked:
        return self

    def future(self) -> Asked:
        return self


def fully_async(run: Run, batches: int) -> int:
    """Train this many batches from start to end, and return the last step."""
    from verl.experimental.fully_async_policy import fully_async_trainer as theirs
    from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator

    real: Any = theirs.FullyAsyncTrainer.__ray_metadata__.modified_class

    class Short(real):  # type: ignore[misc]
        async def fit_step(self, batch_dict: Any = None) -> None:
            self.metrics, self.timing_raw = {}, {}
            if self.global_steps > batches:
                raise theirs.TrainingStopException("no more batches")
            run.generate()
            run.policy.train()
            self._fit_update_local_step()
            timing = await self._fit_update_weights()
            await self._fit_validate()
            self._fit_save_checkpoint()
            if timing is not None:
                self._fit_log_aggregated_training_metrics(timing)
            self.global_steps += 1

        async def _fit_validate(self, val_before_train: bool = False) -> None: ...

        def _save_checkpoint(self) -> None:
            run.saved.append(self.current_param_version)

    trainer = Short.__new__(Short)
    trainer.__dict__.update(
        config=run.config,
        message_queue_client=object(),
        rollouter=SimpleNamespace(
            reset_staleness=Asked({"timing": 1.0}),
            get_total_produced_samples=Asked(0),
            get_completed_steps=Asked(0),
        ),
        checkpoint_manager=run.make_manager(),
        metrics_aggregator=MetricsAggregator(total_gpus=2, hybrid_gpus=1, standalone_gpus=1),
        logger=run.tracking(),
        progress_bar=SimpleNamespace(close=lambda: None, update=lambda count: None),
        dynamic_schedule_ctx=SimpleNamespace(step_required_samples=1),
        dynamic_schedule_enabled=False,
        only_hybrid=False,
        staleness_threshold=1,
        trigger_parameter_sync_step=run.config.async_training.trigger_parameter_sync_step,
        current_param_version=run.step,
        local_trigger_step=1,
        last_ckpt_version=0,
        global_steps=0,
        metrics={},
        timing_raw={},
        max_steps_duration=0,
        _step_wait_times=[],
        _step_wait_samples=[],
    )
    with replaced(theirs, ray=SimpleNamespace(get=_results)):
        asyncio.run(trainer._fit_update_weights())  # as verl's main does before it calls `fit`
        asyncio.run(trainer.fit())
    return int(trainer.current_param_version)


def one_step_off(run: Run, batches: int) -> int:
    """Do the same with each batch generated while the one before is trained."""
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    trainer = OneStepOffRayTrainer.__new__(OneStepOffRayTrainer)
    trainer.__dict__.update(config=run.config, timing_raw={}, metrics={}, global_steps=run.step)
    trainer.checkpoint_manager = run.make_manager()
    trainer._fit_update_weights()
    for _ in range(batches):
        run.generate()
        trainer.global_steps += 1
        trainer._fit_update_weights()
        run.policy.train()
        run.log.log(trainer.metrics, trainer.global_steps)
    return int(trainer.global_steps)


def separate_async(run: Run, batches: int) -> int:
    """Do the same with verl's main_ppo."""
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    trainer = PPOTrainerSeparateAsync.__new__(PPOTrainerSeparateAsync)
    trainer.__dict__.update(
        config=run.config,
        timing_raw={},
        global_steps=run.step,
        prev_step_profile=False,
        hybrid_rollout_config=SimpleNamespace(enable_switch=False),
        _enable_hybrid_replicas=False,
        standalone_checkpoint_manager=run.make_manager(),
    )
    trainer.on_init_end()
    for _ in range(batches):
        run.generate()
        run.policy.train()
        trainer.global_steps += 1
        trainer.on_step_end()
        run.log.log(trainer._pending_sync_metrics, trainer.global_steps)
    return int(trainer.global_steps)


MODES = {"fully_async": fully_async, "one_step_off": one_step_off, "separate_async": separate_async}
