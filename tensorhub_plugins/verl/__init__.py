"""The weight store for verl 0.9.1. Importing this module registers it with verl; nothing else happens.

Drop-in, under verl's own manager:
    actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tensorhub_plugins.verl
Pull mode, where every rollout replica follows the newest version by itself, with these two more:
    actor_rollout_ref.model.external_lib=tensorhub_plugins.verl
    actor_rollout_ref.rollout.name=vllm_tensorhub
verl's separate_async reads external_lib where it makes the replicas. fully_async and one_step_off do not: for pull mode
there, also set VERL_USE_EXTERNAL_MODULES=tensorhub_plugins.verl in the environment of all processes.
Options: config.py.
"""

from __future__ import annotations

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl.config import TESTED_VERL
from tensorhub_plugins.verl.install import register

try:
    register()
except ImportError as error:
    raise UsageError(
        f"the installed verl has other plug-in points than {' and '.join(TESTED_VERL)}, with which this adapter was "
        f"tested: pip install verl=={TESTED_VERL[-1]} ({error})"
    ) from error
