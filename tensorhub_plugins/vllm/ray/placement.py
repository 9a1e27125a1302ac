"""For how many more replicas there is room on Ray's nodes, and how one of them takes its own.

The first is an answer of now: others may take it, and a launcher looks again before it reserves.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from tensorhub_plugins.core import DeadlineExceeded
from tensorhub_plugins.vllm.ray.fleet.events import RESERVE_TIMEOUT_S

SLOTS_MAX = 64  # what lies beyond is not counted: more are never started at once
PART_TIMEOUT_S = 5.0  # Ray gives what is free within a second, also when its head node is busy
LOOK_INTERVAL_S = 0.2
NODE_LABEL = "ray.io/node-id"
COMMON = ("CPU", "memory", "object_store_memory", "node")  # resources for which tasks queue all the time; node:ADDRESS


def slots(bundles: Sequence[Mapping[str, float]], *, avoid: Collection[str] = (), same_node: bool = True) -> int:
    """Return how many times these bundles of resources would fit now.

    avoid: nodes, by Ray's ids; same_node: all bundles of one replica go to one node."""
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(avoid)
    free = ray._private.state.available_resources_per_node()
    return count([free[node] for node in sorted(nodes & free.keys())], bundles, same_node=same_node)


def is_wanted() -> bool:
    """Return whether an actor, a task or a placement group of any job waits for an accelerator that a node has."""
    from ray.autoscaler.v2.sdk import get_cluster_resource_state  # where it is asked for

    state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)
    asked = [one.request for one in state.pending_resource_requests]
    for gang in state.pending_gang_resource_requests:
        choices = getattr(gang, "bundle_selectors", ())  # earlier versions of Ray have `requests` only
        asked += [*gang.requests, *(one for choice in choices for one in choice.resource_requests)]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(needs_a_place(request.resources_bundle, nodes) for request in asked)


def needs_a_place(request: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return whether what waits for these resources needs an accelerator of one of the nodes with these totals. PURE.

    What fits on no node waits for others to come, and no place here helps it."""
    return any(amount and kind.partition(":")[0] not in COMMON for kind, amount in request.items()) and any(
        all(node.get(kind, 0.0) >= amount for kind, amount in request.items()) for node in nodes
    )


def count(
    free: Sequence[Mapping[str, float]], bundles: Sequence[Mapping[str, float]], *, same_node: bool = True
) -> int:
    """Return how many times the bundles fit into what is free on each node, at most SLOTS_MAX."""
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
    """Reserve a placement group of this name on other nodes than these. Errors as of `reserve_all`."""
    return reserve_all([name], bundles, avoid=avoid, strategy=strategy)[0]


def reserve_all(
    names: Sequence[str], bundles: Sequence[Mapping[str, float]], *, avoid: Collection[str] = (), strategy: str = "PACK"
) -> list[Any]:
    """Placement groups of these names, each with these bundles, on other nodes than these: all of them or none.

    Blocks for seconds, at most RESERVE_TIMEOUT_S. DeadlineExceeded: nothing is held; also when a part was there and the
    rest did not come, because what has the rest may wait for just that part."""
    elsewhere = {NODE_LABEL: f"!in({', '.join(sorted(avoid))})"}
    selector = [elsewhere] * len(bundles) if avoid else None
    groups: list[Any] = []
    try:
        for name in names:  # all are asked for before the first is waited for
            asked = [dict(bundle) for bundle in bundles]
            groups.append(placement_group(asked, strategy=strategy, name=name, bundle_label_selector=selector))
        _wait_for_all(groups)
    except BaseException as error:
        for group in groups:
            remove_placement_group(group)
        if not isinstance(error, _NotReserved):
            raise
        raise DeadlineExceeded(
            f"Ray has not reserved {[dict(bundle) for bundle in bundles]} for {', '.join(names)}, which others "
            "took: look at `ray status`",
            timeout_s=round(error.after_s, 1),
        ) from None
    return groups


class _NotReserved(Exception):
    def __init__(self, after_s: float) -> None:
        self.after_s = after_s


def _wait_for_all(groups: Sequence[Any]) -> None:
    """Check the groups' states until all are there: `PlacementGroup.ready` starts a process on each node, which takes
    its time."""
    began, partly_since = time.monotonic(), None
    while True:
        states = [placement_group_table(group).get("state") for group in groups]
        now, ready = time.monotonic(), states.count("CREATED")
        if partly_since is None and ready:
            partly_since = now
        then = verdict(ready, len(groups), now - began, 0.0 if partly_since is None else now - partly_since)
        if then == "take":
            return
        if then == "give back" or "REMOVED" in states:  # they are not wanted any more
            raise _NotReserved(now - began)
        time.sleep(LOOK_INTERVAL_S)


def verdict(ready: int, wanted: int, waited_s: float, partly_s: float) -> Literal["take", "wait", "give back"]:
    """Return what becomes of so many places out of those that were asked for together. PURE.

    partly_s: for how long some were there, and not all. What holds a part returns it soon: two that hold a part each
    would keep each other out."""
    if ready == wanted:
        return "take"
    if waited_s >= RESERVE_TIMEOUT_S or (ready and partly_s >= PART_TIMEOUT_S):
        return "give back"
    return "wait"
