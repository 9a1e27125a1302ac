"""How many replicas a run shall have, decided again every few seconds: option fleet_policy.

A policy is a function of a `View`, or a class whose instances are one: `package.module.name`. Numbers after its name
are given to it: `constant:4` calls `constant(view, 4)`, `queue_length:16,600` makes `QueueLength(16, 600)`. What it
returns is kept within fleet_min and fleet_max. One that raises, or returns no whole number, is reported and ignored.

    def twice_as_many_at_night(view: View) -> int:
        return 8 if 8 <= datetime.now().hour < 20 else 16
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.ray.fleet.types import View

Policy: TypeAlias = Callable[[View], int]

POLICY_INTERVAL_S = 5.0  # an engine takes minutes to start: deciding more often changes nothing


def constant(view: View, target: float) -> int:
    """Return so many. What is lost is replaced when there is room."""
    return int(target)


def free_resources(view: View) -> int:
    """Return as many as Ray has room for beside the spares: those that are there and one for every free slot. None
    leaves for it."""
    lacking = view.spares - sum(one.kind == "spare" and one.state != "stopping" for one in view.members)
    return view.count("starting", "ready", "lost") + max(0, view.slots - max(0, lacking))


class QueueLength:
    """So many that each has at most `per_replica` requests; fewer when half would have been enough for `patience_s`.

    Training steps between batches, in which there are no requests, are shorter than that."""

    def __init__(self, per_replica: float = 16, patience_s: float = 600) -> None:
        if per_replica <= 0:
            raise ValueError(f"{per_replica:g} requests for each replica: give a number above 0")
        self.per_replica, self.patience_s = per_replica, patience_s
        self._busy_at = -math.inf  # when the members were needed last

    def __call__(self, view: View) -> int:
        needed = math.ceil((view.in_flight + view.waiting) / self.per_replica)
        if 2 * needed > view.target or self._busy_at == -math.inf:
            self._busy_at = view.now
        if needed < view.target and view.now - self._busy_at < self.patience_s:
            return view.target
        return needed


SHIPPED: dict[str, Callable[..., Any]] = {
    "constant": constant,
    "free_resources": free_resources,
    "queue_length": QueueLength,
}


def load(text: str) -> Policy:
    """Return the policy that option fleet_policy names. Raise UsageError if there is none."""
    name, _, numbers = text.partition(":")
    arguments = [float(number) for number in numbers.split(",")] if numbers else []
    made = SHIPPED[name] if name in SHIPPED else _found(name)
    try:
        policy = made(*arguments) if isinstance(made, type) else lambda view: made(view, *arguments)
        _check_takes(policy, ()) if isinstance(made, type) else _check_takes(made, arguments)
    except Exception as error:  # a user's class may raise anything
        raise UsageError(f"option fleet_policy {text!r}: {error}") from error
    return policy


def _check_takes(policy: Callable[..., Any], arguments: Sequence[float]) -> None:
    """TypeError for what cannot be called with a View and these."""
    try:
        signature = inspect.signature(policy)
    except ValueError:  # some that are written in C do not tell
        return
    signature.bind(None, *arguments)


def _found(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    ways_out = f"choose {', '.join(SHIPPED)}, or a function of yours as package.module.name"
    if not module:
        raise UsageError(f"option fleet_policy: there is no policy {name!r}: {ways_out}")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # its module may raise anything
        raise UsageError(f"option fleet_policy: {name!r} cannot be imported ({error}): {ways_out}") from error
    if not callable(found):
        raise UsageError(f"option fleet_policy: {name!r} is no function: {ways_out}")
    return found


def ask(policy: Policy, view: View) -> int | str:
    """Return what it says, or in words why that does not count. Raise nothing: SystemExit would end the fleet's
    actor."""
    try:
        return checked(policy(view))
    except BaseException as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]


def checked(answer: Any) -> int:
    """Return what a policy returned. Raise ValueError unless it is a whole number."""
    if isinstance(answer, bool) or not isinstance(answer, (numbers.Integral, float)) or answer != answer or answer % 1:
        raise ValueError(f"it returned {answer!r}, which is no whole number")
    return int(answer)
