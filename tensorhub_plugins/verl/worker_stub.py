"""Stands where verl's manager expects the workers of the pull-mode replicas, which have nothing to do in an update.

So an update is over when the trainer has published. Where validation comes next that is too early: verl starts it at
once, and logs it as of this step. Then this worker is done when the replicas in rotation have the version. After the
first update it is done when one of them has it, or with an error if none can install it: then nothing would ever be
generated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from tensorhub_plugins.core import attempt_of, version_of, version_text
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl.checks import get
from tensorhub_plugins.verl.versions import version_of_step

logger = get_logger(__name__)

NAME = "tensorhub_null_worker"
MEET_TIMEOUT_S = 15.0  # for a router to say that it is there, which it does each second


@dataclass(frozen=True)
class Validation:
    """PURE: when verl validates, by its configuration."""

    before_train: bool
    every_steps: int  # 0: never
    last_step: int | None  # None: not known

    def follows(self, step: int, *, is_first: bool) -> bool:
        """Return whether validation comes right after the update of this step. is_first: of this run."""
        if is_first and self.before_train:
            return True
        is_last = self.last_step is not None and step >= self.last_step
        return self.every_steps > 0 and (is_last or step % self.every_steps == 0)


def validation_of(root: Any) -> Validation:
    """Return the validation. root: verl's whole configuration, once the trainer has read its data."""
    trainer = root.get("trainer") or {}
    last = trainer.get("total_training_steps")
    if root.get("async_training") is not None:  # fully_async ends with its samples, whatever that says
        last = None
    elif last is None:  # the trainer has counted the prompts, and told the optimizer
        updates = get(root, "actor_rollout_ref", "actor", "optim", "total_training_steps") or 0
        per_step = 1
        if trainer.get("use_v1", True):
            mode = get(trainer, "v1", "trainer_mode") or ""
            per_step = get(trainer, "v1", mode, "parameter_sync_step") or 1
        last = updates // per_step if updates > 0 else None
    return Validation(bool(trainer.get("val_before_train", True)), max(0, trainer.get("test_freq") or 0), last)


class NullWorker:
    """An asyncio actor, one for all replicas of a run. verl calls the first two. Started again by Ray, it knows no
    routers, and of which attempt the trainer is: it waits for one that tells."""

    def __init__(self, validation: Validation, timeout_s: float, *, has_router: bool = False) -> None:
        self._validation, self._timeout_s = validation, timeout_s
        self._met = asyncio.Event()
        if not has_router:  # verl's own never comes
            self._met.set()
        self._is_first = True
        self._attempt = 0  # of the trainer
        self._waited_s = 0.0  # for the replicas, at the last update
        self._routers: dict[Any, Any] = {}

    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Wait beside the trainer's own part, `send_weights`. Raise VersionRefused where no replica can run what it
        sends."""
        step = global_steps or 0
        await asyncio.wait({asyncio.create_task(self._met.wait())}, timeout=MEET_TIMEOUT_S)
        self._met.set()  # it is waited for once
        is_first, self._is_first = self._is_first, False
        version, started = version_of(self._attempt, version_of_step(step)), time.monotonic()
        validates = self._validation.follows(step, is_first=is_first)
        for router in list(self._routers.values()):
            if validates:
                self._tell_behind(step, version, await router.wait_for_version.remote(version, self._timeout_s))
            elif not await router.wait_for_any.remote(version, self._timeout_s if is_first else 0.0) and is_first:
                logger.warning("no replica has version %s after %.0f s", version_text(version), self._timeout_s)
        self._waited_s = time.monotonic() - started if validates else 0.0

    def _tell_behind(self, step: int, version: int, behind: Sequence[str]) -> None:
        if behind:
            logger.warning(
                "validation of step %d is answered in part by older weights: after %.0f s %s, and not version %s; "
                "raise tensorhub.timeout_s, or look in the logs of these replicas for what keeps them",
                *(step, self._timeout_s, ", ".join(behind), version_text(version)),
            )

    async def began(self, attempt: int) -> None:
        """Note that the trainer has started again: the next weights are of this attempt."""
        self._attempt = attempt

    async def meet(self, router: Any, published: int = 0) -> None:
        """Register a router, which says that it is there. published: the newest version that it knows of."""
        self._routers[getattr(router, "_ray_actor_id", id(router))] = router
        self._attempt = max(self._attempt, attempt_of(published))
        self._met.set()

    async def figures(self, published: int = 0) -> dict[str, float]:
        """Return how the replicas do, for the trainer's log. published: its newest version."""
        total = {"tensorhub/validation_wait/seconds": self._waited_s}
        for router in list(self._routers.values()):
            told = await router.figures.remote(published)
            total |= {name: max(value, total.get(name, 0.0)) for name, value in told.items()}
        return total


def start(root: Any, timeout_s: float, *, has_router: bool = True) -> Any:
    """Return the run's one, made by the first replica that needs it. has_router: of ours."""
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(NullWorker)
    return actor.options(name=NAME, get_if_exists=True).remote(validation_of(root), timeout_s, has_router=has_router)
