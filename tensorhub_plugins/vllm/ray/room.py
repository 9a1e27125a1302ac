"""For how many more replicas there is room on Ray's nodes, and how one of them takes its own.

The first is an answer of now: somebody else may take it, and a launcher looks again before it reserves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util import placement_group

from tensorhub_plugins.core import DeadlineExceeded
from tensorhub_plugins.vllm.ray.fleet_events import RESERVE_TIMEOUT_S

SLOTS_MAX = 64  # what lies beyond is not counted: more are never started at once
NODE_LABEL = "ray.io/node-id"


def slots(bundles: Sequence[Mapping[str, float]], *, avoid: Collection[str] = (), same_node: bool = True) -> int:
    """How many times these bundles of resources would fit now.

    avoid: nodes, by Ray's ids; same_node: all bundles of one replica go to one node.
    """
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(avoid)
    free = ray._private.state.available_resources_per_node()
    return count([free[node] for node in sorted(nodes & free.keys())], bundles, same_node=same_node)


def count(
    free: Sequence[Mapping[str, float]], bundles: Sequence[Mapping[str, float]], *, same_node: bool = True
) -> int:
    """How many times the bundles fit into what is free on each node, at most SLOTS_MAX."""
    left = [dict(node) for node in free]
    for number in range(SLOTS_MAX):
        if not (
            any(_take(left[at : at + 1], bundles) for at in range(len(left))) if same_node else _take(left, bundles)
        ):
            return number
    return SLOTS_MAX


def _take(nodes: list[dict[str, float]], bundles: Sequence[Mapping[str, float]]) -> bool:
    """Take the bundles, each from the first node that has it; nothing if one does not fit."""
    tried = [dict(node) for node in nodes]
    for bundle in bundles:
        for node in tried:
            if all(node.get(kind, 0.0) >= amount for kind, amount in bundle.items() if amount):
                for kind, amount in bundle.items():
                    node[kind] = node.get(kind, 0.0) - amount
                break
        else:
            return False
    for node, after in zip(nodes, tried, strict=True):
        node.update(after)
    return True


def reserve(
    name: str, bundles: Sequence[Mapping[str, float]], *, avoid: Collection[str] = (), strategy: str = "PACK"
) -> Any:
    """A placement group of this name on other nodes than these. Blocks for seconds, at most RESERVE_TIMEOUT_S;
    DeadlineExceeded leaves a group that is still to be removed."""
    elsewhere = {NODE_LABEL: f"!in({', '.join(sorted(avoid))})"}
    group = placement_group(
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        name=name,
        bundle_label_selector=[elsewhere] * len(bundles) if avoid else None,
    )
    try:
        ray.get(group.ready(), timeout=RESERVE_TIMEOUT_S)
    except GetTimeoutError as error:
        raise DeadlineExceeded(
            f"Ray has not reserved {[dict(bundle) for bundle in bundles]} for {name}, somebody else took them: look at "
            "`ray status`",
            timeout_s=RESERVE_TIMEOUT_S,
        ) from error
    return group
