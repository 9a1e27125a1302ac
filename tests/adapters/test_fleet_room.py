"""How many replicas fit on nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import GetTimeoutError  # noqa: E402

from tensorhub_plugins.core import DeadlineExceeded  # noqa: E402
from tensorhub_plugins.vllm.ray import room  # noqa: E402
from tensorhub_plugins.vllm.ray.room import SLOTS_MAX, count  # noqa: E402

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


def test_a_place_is_reserved_on_other_nodes_and_not_waited_for_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def placement_group(bundles: Any, **how: Any) -> Any:
        asked.append((bundles, how))
        return SimpleNamespace(ready=lambda: "ready")

    monkeypatch.setattr(room, "placement_group", placement_group)
    monkeypatch.setattr(room.ray, "get", lambda ready, timeout: None)
    room.reserve("mine", [GPU, GPU], avoid=("b", "a"))
    elsewhere = [{"ray.io/node-id": "!in(a, b)"}] * 2
    assert asked == [([GPU, GPU], {"strategy": "PACK", "name": "mine", "bundle_label_selector": elsewhere})]
    room.reserve("mine", [GPU])
    assert asked[1][1]["bundle_label_selector"] is None

    def taken(ready: Any, timeout: float) -> None:
        raise GetTimeoutError("not ready")

    monkeypatch.setattr(room.ray, "get", taken)
    with pytest.raises(DeadlineExceeded, match="for mine, somebody else took them"):
        room.reserve("mine", [GPU])
