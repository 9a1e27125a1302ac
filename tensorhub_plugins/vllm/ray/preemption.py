"""A node that will be taken away (a spot notice) drains: its replicas leave in time, and come back elsewhere.

Three ways to say so:
- a file: TENSORHUB_PREEMPTION_FILE names a path on every node; when it appears, the engines there tell the fleet. It
  may hold the seconds that are left, less what ending takes. The cloud's hook, or a sidecar, makes the file.
- a signal: `tensorhub fleet guard` runs on a node and drains it at SIGTERM or SIGUSR1, e.g. beside the raylet of a pod.
- a call: `tensorhub fleet drain --node ADDRESS`, from any node.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import ray

from tensorhub_plugins.core import files
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.ray import fleet
from tensorhub_plugins.vllm.ray.fleet.actor import sentence
from tensorhub_plugins.vllm.ray.fleet.events import DRAIN_TIMEOUT_MAX_S

logger = get_logger(__name__)

VARIABLE = "TENSORHUB_PREEMPTION_FILE"
LOOK_INTERVAL_S = 1.0
NOTICE_S = 25.0  # where the file does not say: the shortest notice of the large clouds is 30 s
WHY = "spot notice"


async def watch(worker: str) -> None:
    """Drain this node when the file appears; for an engine's actor. Never return, and end nothing."""
    path = os.environ.get(VARIABLE)
    is_told = False
    while path:
        timeout_s = notice(Path(path))
        if timeout_s is None:
            is_told = False
        elif not is_told:
            is_told = await _tell(worker, timeout_s)
        await asyncio.sleep(LOOK_INTERVAL_S)


async def _tell(worker: str, timeout_s: float) -> bool:
    try:
        actor = await asyncio.to_thread(fleet.of_this_job)
        if actor is None:
            logger.warning("%s: a spot notice, but this run has no fleet that could drain the node", worker)
            return True
        said, _ = await actor.drain_node.remote(ray.get_runtime_context().get_node_id(), timeout_s, WHY)
        logger.warning("%s: a spot notice, %.0f s are left: %s", worker, timeout_s, said)
        return True
    except Exception as error:  # the fleet's actor is being started again
        logger.warning("%s: a spot notice that the fleet has not heard yet: %s", worker, sentence(error))
        return False


def notice(path: Path) -> float | None:
    """Return how many seconds are left; None while there is no notice."""
    try:
        with files.opened(path) as file:
            seconds = float(file.read(64).split()[0])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, IndexError, ValueError):
        return NOTICE_S
    return max(0.0, seconds) if seconds <= DRAIN_TIMEOUT_MAX_S else NOTICE_S  # maybe an instant, or nan
