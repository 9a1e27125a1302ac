"""How many replicas a run shall have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.ray.fleet.types import Kind, Member, State, View
from tensorhub_plugins.vllm.ray.policy import checked, load


def view(*states: State, kind: Kind = "joined", in_flight: int = 0, **more: Any) -> View:
    members = tuple(Member(f"m{n}", kind, state, 1, in_flight, "a", 0.0, "") for n, state in enumerate(states))
    given: dict[str, Any] = {"target": 2, "minimum": 1, "maximum": 9, "slots": 0, "waiting": 0, "policy": "p", **more}
    return View(members=members, gone=(), **given)


def test_the_shipped_ones() -> None:
    assert load("constant:4")(view()) == 4
    free = load("free_resources")
    assert free(view("ready", "starting", "lost", "draining", "stopping", slots=2)) == 5
    assert free(view("ready", kind="external", slots=2)) == 2
    # Spares are kept room for, and are neither counted nor made room for at the cost of a replica.
    assert [free(view("ready", slots=slots, spares=2)) for slots in (0, 1, 2, 3)] == [1, 1, 1, 2]
    assert free(view("starting", "spare", "stopping", kind="spare", slots=1, spares=2)) == 1


def test_the_queue_makes_the_fleet_grow_at_once_and_shrink_with_patience() -> None:
    queue = load("queue_length:10,60")
    assert queue(view("ready", "ready", in_flight=10, waiting=1, now=0.0)) == 3
    assert queue(view("ready", target=3, in_flight=20, now=10.0)) == 3  # more than half of them are needed
    assert queue(view("ready", target=3, in_flight=10, now=69.0)) == 3
    assert queue(view("ready", target=3, in_flight=10, now=70.0)) == 1
    assert queue(view("ready", target=3, in_flight=20, now=71.0)) == 3  # it was needed again
    assert queue(view("ready", target=3, in_flight=0, now=130.0)) == 3
    assert load("queue_length")(view(now=1e6)) == 2  # nothing is known of what was before


def policy_of_a_test(view: View, *numbers: float) -> int:
    return int(sum(numbers)) + view.slots


def test_one_of_your_own() -> None:
    own = f"{__name__}.policy_of_a_test"
    import sys

    sys.modules.setdefault(__name__, sys.modules[policy_of_a_test.__module__])
    assert load(own)(view(slots=3)) == 3
    assert load(f"{own}:1,2")(view(slots=3)) == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("constnat:4", "there is no policy 'constnat': choose constant, free_resources, queue_length, or"),
        ("nowhere.at_all", "'nowhere.at_all' cannot be imported"),
        ("math.nothing", "'math.nothing' cannot be imported"),
        ("math.pi", "'math.pi' is no function"),
        ("queue_length:1,2,3", "option fleet_policy 'queue_length:1,2,3'"),
        ("queue_length:0", "0 requests for each replica: give a number above 0"),
        ("constant", "option fleet_policy 'constant': missing a required argument: 'target'"),
        ("constant:1,2", "option fleet_policy 'constant:1,2': too many positional arguments"),
        ("free_resources:3", "option fleet_policy 'free_resources:3': too many positional arguments"),
        ("threading.Event", "option fleet_policy 'threading.Event'"),
        ("this_module_raises.policy", "'this_module_raises.policy' cannot be imported .no GPU here."),
    ],
)
def test_what_is_no_policy_is_refused(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "this_module_raises.py").write_text("raise RuntimeError('no GPU here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=says):
        load(text)


def test_only_whole_numbers_count() -> None:
    assert checked(3) == 3 and checked(4.0) == 4 and checked(np.int64(5)) == 5
    for nonsense in (None, "3", 2.5, True, math.nan, math.inf):
        with pytest.raises(ValueError, match="no whole number"):
            checked(nonsense)
