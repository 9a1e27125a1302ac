"""What verl's trainers do around an update, changed where the store needs it otherwise. Twice is fine.

- A trainer that resumes begins an attempt at the step of its checkpoint, before any rollout asks for weights. verl
  tells a back end the step with the weights only, when the rollouts ask as well. Its manager knows it earlier, so the
  manager's `update_weights` is wrapped, and tells it to what prepares that update
  (`TensorHubCheckpointEngine.build_topology`).
- one_step_off makes no update while `trainer.critic_warmup` lasts, and its engines are to generate from what they have
  read from disk. Engines that pull have nothing before the first version, so the first update is made all the same.
- fully_async drops what an update returns for the log, so it is logged here.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from typing import Any

from tensorhub_plugins.verl.config import BACKEND
from tensorhub_plugins.vllm.plugin import wrap

SEPARATE_TRAINER = "verl.experimental.separation.ray_trainer"  # imported where it is needed, and nowhere else

_step: ContextVar[int] = ContextVar("the step of the update that verl's manager prepares", default=0)
_fully_async: list[Any] = []  # what this process logs to, if it is verl's fully_async trainer


def of_update() -> int:
    """Return the step of the update that is being prepared here; 0 outside of one."""
    return _step.get()


def watch() -> None:
    """Have verl's managers say from now on which step an update is of, and its trainers do the rest of the above."""
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.ray_utils import auto_await
    from verl.utils.tracking import Tracking

    original = CheckpointEngineManager.update_weights
    if hasattr(original, "tensorhub"):
        return

    @auto_await  # as verl's: it looks at its caller, which may await it or not
    @functools.wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        token = _step.set(global_steps or 0)
        try:
            metrics = await original(self, global_steps)
        finally:
            _step.reset(token)
        self.tensorhub_is_updated = True
        for tracking in _fully_async if metrics and self.backend == BACKEND else ():
            tracking.log(data=metrics, step=global_steps or 0)
        return metrics

    update_weights.tensorhub = True
    CheckpointEngineManager.update_weights = update_weights
    wrap(CheckpointEngineManager, "__init__", _made)
    wrap(Tracking, "__init__", _begun)


def _made(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    original(manager, *args, **kwargs)
    _update_first()


def _begun(original: Any, tracking: Any, *args: Any, **kwargs: Any) -> None:
    original(tracking, *args, **kwargs)
    config = args[3] if len(args) > 3 else kwargs.get("config")
    if config and config.get("async_training") is not None:
        _fully_async[:] = [tracking]


def _update_first() -> None:
    """Have one_step_off's trainer, if this process has it, make its first update whatever the warm-up says."""
    module = sys.modules.get(SEPARATE_TRAINER)
    trainer = getattr(module, "SeparateRayPPOTrainer", None)
    if trainer is None:
        return

    def fit_update_weights(original: Any, self: Any) -> None:
        manager, is_skipped = self.checkpoint_manager, self.config.trainer.critic_warmup > self.global_steps
        if is_skipped and manager.backend == BACKEND and not getattr(manager, "tensorhub_is_updated", False):
            manager.update_weights(self.global_steps)
        else:
            original(self)

    wrap(trainer, "_fit_update_weights", fit_update_weights)
