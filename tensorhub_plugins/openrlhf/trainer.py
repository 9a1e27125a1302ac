"""OpenRLHF's controllers: they say which version it is when the policy's ranks (policy_ranks.py) publish.

The version is OpenRLHF's global step, in the attempt of this start: version N are the weights after N steps. What the
engines start with, the model before training, has no version (samples from it say 0).

Every class here is a subclass of what OpenRLHF decorated with @ray.remote, and is sent by its name, so that each
process has one copy of it. Ray sends inherited methods by value all the same, and in those of OpenRLHF super() would
mean a class of the sender's process: what uses super() there is overridden here, if only to call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async

from tensorhub_plugins.core import UsageError, version_of
from tensorhub_plugins.openrlhf.generation import SamplesGenerator
from tensorhub_plugins.openrlhf.versions import figures_of, staleness

SECONDS = ("tensorhub/publish/seconds", "tensorhub/publish/gather_seconds")  # of a publish, in OpenRLHF's log


def _decorated(actor_class: Any) -> Any:
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


_Sync: Any = _decorated(ppo_trainer.PPOTrainer)
_AsyncTraining: Any = _decorated(ppo_trainer_async.TrainingActor)
_AsyncGenerating: Any = _decorated(ppo_trainer_async.GenerateSamplesActor)


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


class PPOTrainer(_Publishes, _Sync):
    """Generates and trains in turns."""

    samples_generator: Any

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.samples_generator = SamplesGenerator.in_place_of(self.samples_generator, strategy)

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()
        newest = version_of(self.tensorhub_attempt, self.tensorhub_version)
        self.samples_generator.target.newest = newest  # on policy, also when the hub does not answer


class TrainingActor(_Publishes, _AsyncTraining):
    """Trains on what the other one has generated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # not redundant: see the top of this file


class GenerateSamplesActor(_AsyncGenerating):
    """Generates while the other one trains."""

    samples_generator: Any

    def __init__(self, pretrain: str, strategy: Any, vllm_engines: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, vllm_engines, **kwargs)
        self.samples_generator = SamplesGenerator.in_place_of(self.samples_generator, strategy)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.samples_generator.target.resumes = True
