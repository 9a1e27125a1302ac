"""OpenRLHF's actors on the training side: the policy ranks publish, the controllers only say which version it is.

The version is OpenRLHF's global step, in the attempt of this start: version N are the weights after N steps. What the
engines start with, the model before training, has no version (samples from it say 0).

Every class here is a subclass of what OpenRLHF decorated with @ray.remote, and is sent by its name, so that each
process has one copy of it. Ray sends inherited methods by value all the same, and in those of OpenRLHF super() would
mean a class of the sender's process: what uses super() there is overridden here, if only to call it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import deepspeed
import ray
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import ppo_actor

from tensorhub_plugins.core import (
    AllHeld,
    Held,
    Recovery,
    TensorSpec,
    UsageError,
    contiguous_spec,
    of_all_ranks,
    release_cached_memory,
    version_of,
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config, parts, recovery
from tensorhub_plugins.openrlhf.routing import SamplesGenerator
from tensorhub_plugins.openrlhf.versions import figures_of, staleness
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.checkpoint_names import Step
from tensorhub_plugins.vllm.ray.config import connect, publisher_of

log = get_logger(__name__)

SECONDS = ("tensorhub/publish/seconds", "tensorhub/publish/gather_seconds")  # of a publish, in OpenRLHF's log
GATHER_SIZE_BYTES = 64 << 20  # of parameters gathered together with ZeRO-3: fewer collectives, bounded memory


def _decorated(actor_class: Any) -> Any:
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


_Policy: Any = _decorated(ppo_actor.PolicyModelActor)
_Sync: Any = _decorated(ppo_trainer.PPOTrainer)
_AsyncTraining: Any = _decorated(ppo_trainer_async.TrainingActor)
_AsyncGenerating: Any = _decorated(ppo_trainer_async.GenerateSamplesActor)


class PolicyModelActor(_Policy):
    """One rank of the policy."""

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: Any = None
    ) -> None:
        options = config.parse(strategy.args.vllm.sync_backend)
        if options.recover_weights != "off":  # it is loaded as soon as there is a model, in the middle of the next call
            strategy.load_ckpt = partial(self._load, strategy.load_ckpt, options)
        # Without engines OpenRLHF makes no process group with them.
        super().init_model_from_pretrained(strategy, pretrain, max_steps, None)
        if not hasattr(self, "_publisher"):
            self._connect(options)

    def _connect(self, options: config.Options) -> None:
        """Make this rank's publisher of the model, which is there."""
        strategy = self.strategy
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        client = connect(options, replica=config.TRAINER, shard=rank, shard_count=ranks, is_known=True)
        self._is_sharded = strategy.args.ds.zero_stage == 3
        module = self.actor.model.module
        self._is_adapter = strategy.args.ds.lora.rank > 0  # all that is published, and by parts
        self._steps = [] if self._is_adapter else checkpoint_names.steps(module, parts.shape_of)
        self._by_parts = self._is_adapter
        if self._is_sharded and not self._is_adapter:
            why = parts.why_gathered(module, self._steps, ranks) if options.parts else "parts=false"
            self._by_parts = not why
            if why and options.recover_weights != "off":
                raise UsageError(f"recover_weights takes back what each rank holds, and {why}: leave it out")
            if why and rank == 0:
                log.info("whole tensors are gathered to every trainer rank: %s", why)
        self._publisher = publisher_of(
            client,
            options,
            # Of a model that is gathered, the ranks' shares are known before the first version.
            model=[] if self._by_parts else [spec for step in self._steps for spec in _specs(step)],
            slices=1 if self._is_adapter else max(1, int(strategy.args.vllm.tensor_parallel_size)),
            slices_experts=True,  # OpenRLHF's engines are not expert parallel
        )
        self._recovery = Recovery(
            self._publisher,
            options.recover_weights,
            weights=self._held if self._by_parts else self._gathered,
            held=self._all_held,
            by_parts=self._by_parts,
            gather=of_all_ranks,
        )

    def _load(self, load_ckpt: Any, options: config.Options, engine: Any, path: str) -> Any:
        """Stand for OpenRLHF's way to load a checkpoint, once: the weights come from the store if they can."""
        self.strategy.load_ckpt = load_ckpt
        self._connect(options)
        if not self._recovery.resume(recovery.folder_of(path), options.timeout_s, grows=options.timeout_grows):
            return load_ckpt(engine, path)
        if self._is_sharded:
            load = partial(load_ckpt, engine, path)
            return recovery.load_below(load, engine.optimizer, self._all_held) if self._recovery.is_mixed else load()
        return recovery.load_rest(engine, path, self._steps, is_mixed=self._recovery.is_mixed)

    def save_checkpoint(self, tag: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(tag, *args, **kwargs)
        if not self.disable_ds_ckpt:
            self._recovery.note(os.path.join(self.strategy.args.ckpt.path, "_actor", tag))

    def tensorhub_begin(self, step: int) -> int:
        """Begin an attempt on every rank, before anything is generated. Return the attempt."""
        self._publisher.begin(step)
        if self._by_parts:
            self._publisher.prepare(self._held())
        return self._publisher.attempt or 0

    def tensorhub_publish(self, step: int, *, settles: bool = False) -> dict[str, float]:
        """Publish on every rank. Return metrics, and the attempt, as soon as the hub knows, or, in the background, when
        the training may go on, unless this settles; no rank waits for an engine."""
        if not self._publisher.in_background:  # it would wait for the device
            release_cached_memory()
        if self._by_parts:
            metrics = self._publisher.publish_parts(step, self._held())
        else:
            metrics = self._publisher.publish(step, self._gathered())
        if settles:
            self._publisher.settle()
        return {**metrics, "attempt": float(self._publisher.attempt or 0)}

    def _held(self) -> Iterator[Held]:
        module = self.actor.model.module
        return parts.adapter_by_rank(module) if self._is_adapter else parts.held_by_rank(module, self._steps)

    def _all_held(self) -> Iterator[Held]:
        module = self.actor.model.module
        if self._is_sharded:
            return parts.held_by_rank(module, self._steps, AllHeld)
        return recovery.held_whole(module, self._steps)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, under the names of a checkpoint. With ZeRO-3 each step is a collective of all ranks."""
        own = self.actor.model.module.state_dict(keep_vars=True)
        group: list[Step] = []
        size_bytes = 0
        for step in self._steps:
            group.append(step)
            size_bytes += sum(spec.size_bytes for spec in _specs(step))
            if size_bytes >= GATHER_SIZE_BYTES:
                yield from self._whole(group, own)
                group, size_bytes = [], 0
        yield from self._whole(group, own)

    def _whole(self, group: list[Step], own: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        sources = [own[name] for step in group for name in step.sources]
        parameters = [tensor for tensor in sources if isinstance(tensor, torch.nn.Parameter)]
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._is_sharded):
            for step in group:
                tensors = {name: own[name].data.detach() for name in step.sources}
                converted = checkpoint_names.convert(self.actor.model.module, tensors)
                for name in step.targets:
                    yield name, converted[name]


def _specs(step: Step) -> list[TensorSpec]:
    return [contiguous_spec(name, dtype, shape) for name, (dtype, shape) in step.targets.items()]


class _Publishes:
    """A controller whose update of the engines ends when every rank has published."""

    args: Any
    actor_model_group: Any
    tensorhub_version = 0  # as a step; `tensorhub_attempt` says of which attempt
    tensorhub_attempt = 0
    _published: Mapping[str, float] = {}

    def init_checkpoint_states(self) -> dict[str, Any]:
        states: dict[str, Any] = super().init_checkpoint_states()  # type: ignore[misc]
        if not states:  # DeepSpeed found none, as after a run that was ended in its first save
            why = "nothing could be loaded from --ckpt.path"
            raise UsageError(f"{why}: have its _actor/latest name a whole checkpoint, or remove _actor to begin anew")
        self.tensorhub_version = states["global_step"]  # resuming: OpenRLHF sends the loaded weights first
        # From that step on what a former incarnation of this run has published is over, before anything is generated.
        step = max(0, self.tensorhub_version - 1)
        ranks = ray.get(self.actor_model_group.async_run_method(method_name="tensorhub_begin", step=step))
        self.tensorhub_attempt = ranks[0]
        if self.tensorhub_attempt and not self.tensorhub_version:
            self.broadcast_to_vllm()  # without a checkpoint OpenRLHF sends nothing, and engines may have others
        return states

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        self.tensorhub_version = global_step + 1
        stale, replicas = staleness(rollout_samples, global_step), figures_of(rollout_samples)
        status, global_step = super().train_step(rollout_samples, global_step)  # type: ignore[misc]
        status.update(self._published, **stale, **replicas)
        return status, global_step

    def broadcast_to_vllm(self) -> None:
        """Publish without a lock or a pause: publishing touches no engine."""
        # In turns, and when a run begins, prompts are handed out next, to be answered from this one.
        how = {"step": self.tensorhub_version, "settles": not (self.args.train.async_enable and self._published)}
        ranks = ray.get(self.actor_model_group.async_run_method(method_name="tensorhub_publish", **how))
        self.tensorhub_attempt = int(ranks[0]["attempt"])
        if not any(name in ranks[0] for name in SECONDS):  # it was published before
            return
        slowest = {name: max(rank.get(name, 0.0) for rank in ranks) for name in SECONDS}
        self._published = {
            "tensorhub/version": self.tensorhub_version,
            **slowest,
            "tensorhub/publish/bytes": sum(rank.get("tensorhub/publish/bytes", 0.0) for rank in ranks),
        }


def _generator(strategy: Any, given: Any) -> SamplesGenerator:
    """Return ours, over the same engines and prompts as the one OpenRLHF made."""
    return SamplesGenerator(
        options=config.parse(strategy.args.vllm.sync_backend),
        is_partial=bool(getattr(strategy.args.train, "partial_rollout_enable", False)),
        is_sync=not strategy.args.train.async_enable,
        strategy=strategy,
        prompts_dataloader=given.prompts_dataloader,
        eval_dataloader=given.eval_dataloader,
        tokenizer=given.tokenizer,
        vllm_engines=given.vllm_engines,
    )


class PPOTrainer(_Publishes, _Sync):
    """Generates and trains in turns."""

    samples_generator: Any

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.samples_generator = _generator(strategy, self.samples_generator)

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()
        newest = version_of(self.tensorhub_attempt, self.tensorhub_version)
        self.samples_generator.newest = newest  # on policy, also when the hub does not answer


class TrainingActor(_Publishes, _AsyncTraining):
    """Trains on what the other one has generated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # not redundant: see the top of this file


class GenerateSamplesActor(_AsyncGenerating):
    """Generates while the other one trains."""

    samples_generator: Any

    def __init__(self, pretrain: str, strategy: Any, vllm_engines: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, vllm_engines, **kwargs)
        self.samples_generator = _generator(strategy, self.samples_generator)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.samples_generator.resumes = True
