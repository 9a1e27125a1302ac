"""OpenRLHF's policy: each of its ranks publishes what it holds, or, gathered, the tensors of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
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
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config, parts, recovery
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.checkpoint_names import Step
from tensorhub_plugins.vllm.ray.config import connect, publisher_of

log = get_logger(__name__)

GATHER_SIZE_BYTES = 64 << 20  # of parameters gathered together with ZeRO-3: fewer collectives, bounded memory

# The class that OpenRLHF decorated; ours is sent by its name: see trainer.py.
_Policy: Any = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__


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
