"""The weight store for verl 0.9.1. Importing this module registers it with verl; nothing else happens.

verl imports it in all its processes where the package is installed (entry point group `verl.plugins`). Then
    actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub
is the drop-in, under verl's own manager, and with this one more every replica follows the newest version by itself:
    actor_rollout_ref.rollout.name=vllm_tensorhub
Where it is only on Python's path: VERL_USE_EXTERNAL_MODULES=tensorhub_plugins.verl in the environment of all processes.
The trainer must be one whose engines have GPUs of their own (checks.py). Options: config.py.
"""

from __future__ import annotations

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import driver, routing, trainer_hooks
from tensorhub_plugins.verl.config import ROLLOUT, TESTED_VERL


def register() -> None:
    """ImportError where verl has other plug-in points. Twice is fine."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    import tensorhub_plugins.verl.trainer  # noqa: F401  registers the back end

    RolloutReplicaRegistry.register(ROLLOUT, _replica)
    _ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "verl.workers.rollout.vllm_rollout.ServerAdapter"
    driver.look_at_configuration()
    trainer_hooks.watch()
    routing.watch_client()


def _replica() -> type:
    from tensorhub_plugins.verl.replica import TensorHubReplica  # imports vLLM

    return TensorHubReplica


try:
    register()
except ImportError as error:
    raise UsageError(
        f"the installed verl has other plug-in points than {' and '.join(TESTED_VERL)}, with which this adapter was "
        f"tested: pip install verl=={TESTED_VERL[-1]} ({error})"
    ) from error
