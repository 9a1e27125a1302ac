"""For how many more replicas there is room on Ray's nodes.

An answer of now: somebody else may take it, and a launcher looks again before it waits for a placement group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import ray

SLOTS_MAX = 64  # what lies beyond is not counted: more are never started at once


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
