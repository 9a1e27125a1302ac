"""Actors' handles on their way through the fleet's actor, which has no use for them and does not open them.

Ray's handle of an engine names what its methods take: a process that unpickles one imports vLLM, verl or OpenRLHF with
it. The fleet's actor would so take a framework's memory and, every time that Ray starts it, many seconds. Dispatchers
and the starter, which have the framework anyway, send handles sealed and open what they get.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayActorError

from tensorhub_plugins.core import DeadlineExceeded
from tensorhub_plugins.vllm.ray.fleet.types import Entry, Seen

# Of an actor that Ray will not start again: the second says that the node is lost to which it was pinned, the third
# that it was short of memory.
DEAD = (ActorDiedError, ActorUnschedulableError, OutOfMemoryError)
ENDED = (RayActorError, *DEAD)


def seal(handle: Any) -> bytes:
    """Seal a handle. The sender keeps the actor alive: a sealed handle does not."""
    return cloudpickle.dumps(handle)


def unseal(sealed: bytes) -> Any:
    """Unseal a handle. Only for what comes from the same job: it is unpickled."""
    return cloudpickle.loads(sealed)


def sealed(seen: Iterable[Seen]) -> list[Seen]:
    """Seal the handles for `report`."""
    return [replace(one, handle=seal(one.handle)) for one in seen]


def opened(roster: Iterable[Entry]) -> list[Entry]:
    """Unseal what `report` has returned."""
    return [replace(entry, handle=unseal(entry.handle)) for entry in roster]


def answer(reference: Any, what: str, *, timeout_s: float) -> Any:
    """Return what a call of an actor or a task returns. Raise DeadlineExceeded, which names what Ray has not done."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise DeadlineExceeded(
            f"Ray has not {what}: look whether its nodes are overloaded, and into its logs", timeout_s=timeout_s
        ) from error
