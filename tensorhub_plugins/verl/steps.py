"""Which step verl's weights are of, told before they move.

A trainer that resumes begins an attempt at the step of its checkpoint, before any rollout asks for weights. verl tells
a back end the step with the weights only, when the rollouts ask as well. Its manager knows it earlier, so the manager's
`update_weights` is wrapped, and says it to who prepares that update (`TensorHubCheckpointEngine.build_topology`).
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

_step: ContextVar[int] = ContextVar("the step of the update that verl's manager prepares", default=0)


def of_update() -> int:
    """The step of the update that is being prepared here; 0 outside of one."""
    return _step.get()


def watch() -> None:
    """From now on verl's managers say which step an update is of. Twice is fine."""
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.ray_utils import auto_await

    original = CheckpointEngineManager.update_weights
    if hasattr(original, "tensorhub"):
        return

    @auto_await  # as verl's: it looks at its caller, who may await it or not
    @functools.wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        token = _step.set(global_steps or 0)
        try:
            return await original(self, global_steps)
        finally:
            _step.reset(token)

    update_weights.tensorhub = True
    CheckpointEngineManager.update_weights = update_weights
