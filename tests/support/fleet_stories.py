"""A small fleet at time 0, and what is said of it: for stories of a FleetState."""

from __future__ import annotations

from typing import Any

from tensorhub_plugins.vllm.ray.fleet.events import Changed, Cluster, Effect, Event, Reported, Say, Targeted
from tensorhub_plugins.vllm.ray.fleet.state import FleetState
from tensorhub_plugins.vllm.ray.fleet.types import Seen

NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}


def seen(name: str, node: str = "a", **more: Any) -> Seen:
    return Seen(name, f"handle of {name}", node, **{"ready": True, "version": 3, **more})


def fleet(*events: Event, **options: Any) -> FleetState:
    """Make two replicas from the start, on node a, at time 0, with capacity for three more."""
    state = FleetState(**options)
    state.handle(Cluster(NODES, 3), 0.0)
    state.handle(Reported((seen("rollout-0"), seen("rollout-1"))), 0.0)
    for event in events:
        state.handle(event, 0.0)
    return state


def deeds(effects: list[Effect]) -> list[Effect]:
    """Return the effects without reports to operators and the log."""
    return [effect for effect in effects if not isinstance(effect, (Changed, Targeted, Say))]


def says(effects: list[Effect]) -> str:
    return "; ".join(effect.text for effect in effects if isinstance(effect, Say))


def states(state: FleetState) -> dict[str, str]:
    return {member.name: member.state for member in state.view(0.0).members}
