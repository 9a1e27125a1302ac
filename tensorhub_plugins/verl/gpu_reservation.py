"""What holds a GPU for the engine of a replica that joins. verl asks its workers where they are, and nothing else.

verl's own worker imports verl and torch for that (10 s of a core and 530 MB each), and the engine is started only after
it has answered. This one is sent by value and imports nothing.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tensorhub_plugins.verl.config import ROLLOUT

SHARE = 0.5  # of the GPU, as verl's own worker takes: Ray tells it then which one it is


class Place:
    """Stands in for a worker's handle as verl 0.9.1 uses it. It is pickled as the actor's handle."""

    def __init__(self, actor: Any, resource: str) -> None:
        self._actor, self._resource = actor, resource

    @property
    def __ray_call__(self) -> Place:
        return self

    def remote(self, question: Any) -> Any:
        """Return the node and the number of the GPU. verl's own way to ask, a function of its own, would import verl
        there."""
        del question
        return self._actor.where.remote(self._resource)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._actor,)


def _itself(actor: Any) -> Any:
    return actor


def prefix(rank: int | str) -> str:
    return f"{ROLLOUT}_place_{rank}_"


def start(rank: int, number: int, group: Any, index: int) -> Place:
    """Hold the GPU of this bundle of a placement group, until its actor is killed."""
    from verl.plugin.platform import get_platform

    platform = get_platform()
    actor = (
        ray.remote(_class())
        .options(
            name=f"{prefix(rank)}{number}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            num_cpus=1,
            **platform.ray_resource_options(SHARE),
        )
        .remote()
    )
    return Place(actor, platform.ray_resource_name())


def _class() -> type:
    # Made here, so that Ray sends it by value: our package imports verl.
    class Placeholder:
        def where(self, resource: str) -> tuple[str, str]:
            import ray

            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()[resource][0]

    return Placeholder
