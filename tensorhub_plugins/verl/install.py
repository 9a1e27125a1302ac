"""Puts the store where verl looks for back ends and for rollouts."""

from __future__ import annotations

from tensorhub_plugins.verl import driver, routing, steps
from tensorhub_plugins.verl.config import ROLLOUT


def register() -> None:
    """ImportError where verl has other plug-in points. Twice is fine."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    import tensorhub_plugins.verl.trainer  # noqa: F401  registers the back end

    RolloutReplicaRegistry.register(ROLLOUT, _replica)
    _ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "verl.workers.rollout.vllm_rollout.ServerAdapter"
    driver.look_at_configuration()
    steps.watch()
    routing.watch_client()


def _replica() -> type:
    from tensorhub_plugins.verl.replica import TensorHubReplica  # imports vLLM

    return TensorHubReplica
