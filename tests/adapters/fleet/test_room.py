"""How many replicas fit on nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError  # noqa: E402

from tensorhub_plugins.core import DeadlineExceeded  # noqa: E402
from tensorhub_plugins.vllm.ray import placement  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.events import RESERVE_TIMEOUT_S  # noqa: E402
from tensorhub_plugins.vllm.ray.placement import PART_TIMEOUT_S, SLOTS_MAX, count, needs_a_place, verdict  # noqa: E402

GPU = {"GPU": 1.0, "CPU": 1.0}


@pytest.mark.parametrize(
    ("free", "bundles", "same_node", "fit"),
    [
        ([], [GPU], True, 0),
        ([{"GPU": 2.0, "CPU": 8.0}], [GPU], True, 2),
        ([{"GPU": 2.0, "CPU": 1.0}], [GPU], True, 1),  # processors are short
        ([{"GPU": 0.5, "CPU": 1.0}] * 2, [GPU], True, 0),  # halves of two nodes are no whole
        ([{"GPU": 3.0, "CPU": 9.0}] * 2, [GPU, GPU], True, 2),  # one is left over on each
        ([{"GPU": 3.0, "CPU": 9.0}] * 2, [GPU, GPU], False, 3),
        ([{"CPU": 9.0}], [{"CPU": 1.0, "GPU": 0.0}], True, 9),  # none is asked for
        ([{"CPU": 1000.0}], [{"CPU": 1.0}], True, SLOTS_MAX),
    ],
)
def test_replicas_fit_where_all_their_bundles_do(
    free: list[dict[str, float]], bundles: list[dict[str, float]], same_node: bool, fit: int
) -> None:
    assert count(free, bundles, same_node=same_node) == fit
    assert all("GPU" not in node or node["GPU"] >= 0 for node in free)  # what was given is as it was


class Cluster:
    """Ray's placement groups, of nodes that take one each; who asks first is given first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.now = free, 0.0
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.groups: list[Any] = []  # that wait or hold a node
        self.meanwhile: list[Any] = []  # called between two looks, while there are any
        monkeypatch.setattr(placement, "placement_group", self.ask)
        monkeypatch.setattr(placement, "remove_placement_group", self.remove)
        monkeypatch.setattr(placement, "placement_group_table", self.look)
        monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def ask(self, bundles: Any, **how: Any) -> Any:
        self.asked.append((bundles, how))
        group = SimpleNamespace(name=how["name"])
        self.groups.append(group)
        return group

    def remove(self, group: Any) -> None:
        self.groups = [other for other in self.groups if other is not group]

    def held(self) -> list[str]:
        return [group.name for group in self.groups[: self.free]]

    def look(self, group: Any) -> dict[str, str]:
        if group not in self.groups:
            return {"state": "REMOVED"}
        return {"state": "CREATED" if group in self.groups[: self.free] else "PENDING"}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.meanwhile:
            self.meanwhile.pop(0)()


def test_a_place_is_reserved_on_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, free=2)
    placement.reserve("mine", [GPU, GPU], avoid=("b", "a"))
    elsewhere = [{"ray.io/node-id": "!in(a, b)"}] * 2
    assert cluster.asked == [([GPU, GPU], {"strategy": "PACK", "name": "mine", "bundle_label_selector": elsewhere})]
    placement.reserve("mine too", [GPU])
    assert cluster.asked[1][1]["bundle_label_selector"] is None and cluster.held() == ["mine", "mine too"]


def test_a_place_is_not_waited_for_without_limit_and_not_left_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, free=0)
    with pytest.raises(DeadlineExceeded, match="for mine, which others took"):
        placement.reserve("mine", [GPU])
    assert cluster.now == pytest.approx(RESERVE_TIMEOUT_S, abs=1.0) and cluster.groups == []


def test_two_that_hold_a_part_each_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two joiners of two nodes each, of different jobs, on a cluster of two nodes: their requests come in turns."""
    cluster = Cluster(monkeypatch, free=2)
    theirs = []

    def ask(bundles: Any, **how: Any) -> Any:
        if len(cluster.asked) == 1:  # the other one's come after our first
            theirs.extend(cluster.ask(bundles, name=f"theirs:{node}") for node in range(2))
        return cluster.ask(bundles, **how)

    monkeypatch.setattr(placement, "placement_group", ask)
    with pytest.raises(DeadlineExceeded):
        placement.reserve_all(["ours:0", "ours:1"], [GPU])
    assert cluster.now < RESERVE_TIMEOUT_S  # it did not sit on its half for as long as it may wait
    assert cluster.held() == ["theirs:0", "theirs:1"]  # who has both now


def test_a_part_is_kept_for_as_long_as_the_rest_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, free=1)
    cluster.meanwhile = [lambda: None, lambda: setattr(cluster, "free", 2)]  # a second later
    assert [group.name for group in placement.reserve_all(["ours:0", "ours:1"], [GPU])] == cluster.held()


def test_whatever_ends_the_wait_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, free=1)
    cluster.meanwhile = [lambda: (_ for _ in ()).throw(RayError("the head node is lost"))]
    with pytest.raises(RayError):
        placement.reserve_all(["ours:0", "ours:1"], [GPU])
    assert cluster.groups == []


def test_what_is_removed_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, free=1)
    cluster.meanwhile = [lambda: cluster.remove(cluster.groups[1])]  # as the fleet does when nobody wants it
    with pytest.raises(DeadlineExceeded):
        placement.reserve_all(["ours:0", "ours:1"], [GPU])
    assert cluster.now < PART_TIMEOUT_S and cluster.groups == []


@pytest.mark.parametrize(
    ("request_", "is_wanted"),
    [
        ({"GPU": 1.0, "CPU": 1.0}, True),
        ({"GPU": 0.5}, True),
        ({"CPU": 1.0}, False),  # tasks queue for these all the time
        ({"CPU": 1.0, "GPU": 0.0, "memory": 1e9}, False),
        ({"GPU": 9.0}, False),  # no node has so many
        ({"CPU": 1.0, "node:10.0.0.1": 0.001}, False),  # it waits for a CPU, on one node
        ({"GPU": 1.0, "node:10.0.0.1": 0.001}, True),
        ({"GPU_group_0123": 1.0}, False),  # its placement group waits, and is counted itself
        ({}, False),
    ],
)
def test_a_spare_is_in_the_way_of_what_waits_for_an_accelerator(request_: dict[str, float], is_wanted: bool) -> None:
    assert needs_a_place(request_, [{"CPU": 4.0}, {"GPU": 8.0, "CPU": 4.0, "node:10.0.0.1": 1.0}]) is is_wanted


@pytest.mark.parametrize(
    ("ready", "wanted", "waited_s", "partly_s", "then"),
    [
        (0, 2, 0.0, 0.0, "wait"),
        (0, 2, RESERVE_TIMEOUT_S - 1, 0.0, "wait"),  # who holds nothing keeps nobody out
        (0, 2, RESERVE_TIMEOUT_S, 0.0, "give back"),
        (1, 2, PART_TIMEOUT_S - 1, PART_TIMEOUT_S - 1, "wait"),
        (1, 2, PART_TIMEOUT_S, PART_TIMEOUT_S, "give back"),
        (2, 2, RESERVE_TIMEOUT_S, PART_TIMEOUT_S, "take"),
        (1, 1, 0.0, 0.0, "take"),
    ],
)
def test_a_part_of_the_places_is_given_back(
    ready: int, wanted: int, waited_s: float, partly_s: float, then: str
) -> None:
    assert verdict(ready, wanted, waited_s, partly_s) == then
