"""A member that is drained by its name does not leave requests without an engine, unless it shall go at once."""

from __future__ import annotations

import copy
from typing import Any

from fleet_stories import NODES, deeds, fleet, says, seen, states

from tensorhub_plugins.vllm.ray.fleet import events
from tensorhub_plugins.vllm.ray.fleet.state import FleetState


def test_the_last_places_are_filled_again_before_one_leaves() -> None:
    state = fleet(minimum=2)
    effects = state.handle(events.Drain("rollout-1", 5.0), 0.0)
    assert says(effects) == (
        "another one is started in its place: fleet_min is 2; "
        "rollout-1 is one of 2 that are ready, and fleet_min is 2: it drains when rollout-2 is, or at once with --now"
    )
    assert deeds(effects) == [events.Start("rollout-2", 2, frozenset())]
    state.handle(events.Started("rollout-2", "actor"), 1.0)
    here = (seen("rollout-0"), seen("rollout-1"))
    state.handle(events.Reported((*here, seen("rollout-2", ready=False))), 2.0)
    assert states(state) == {"rollout-0": "ready", "rollout-1": "ready", "rollout-2": "starting"}
    state.handle(events.Reported((*here, seen("rollout-2"))), 3.0)
    assert states(state) == {"rollout-0": "ready", "rollout-1": "draining", "rollout-2": "ready"}
    assert state.members["rollout-1"].deadline == 8.0  # its time begins when it drains


def last_ready(**options: Any) -> FleetState:
    """rollout-1 is ready, and rollout-0 is not."""
    return fleet(events.Reported((seen("rollout-0", ready=False), seen("rollout-1", in_flight=49))), **options)


def test_the_last_that_is_ready_drains_when_another_one_is() -> None:
    state = last_ready()
    effects = state.handle(events.Drain("rollout-1", 5.0), 1.0)
    assert deeds(effects) == [] and says(effects) == (
        "the target is 1, it was 2; rollout-1 is the last that is ready: it drains when rollout-0 is, or at once with "
        "--now"
    )
    assert not state.roster()[1].draining  # it gets requests
    for at in range(2, 9):
        state.handle(events.Reported((seen("rollout-0", ready=False), seen("rollout-1", in_flight=49))), float(at))
        assert states(state)["rollout-1"] == "ready"
    assert state.view(9.0).members[1].why == "drained by name, and waits until others are ready"
    assert state.wanted == 1
    state.handle(events.Drain("rollout-1", 7.0), 9.0)  # said again, with another time
    assert state.wanted == 1
    state.handle(events.Reported((seen("rollout-0"), seen("rollout-1", in_flight=49))), 10.0)
    assert states(state) == {"rollout-0": "ready", "rollout-1": "draining"} and state.roster()[1].draining
    assert state.members["rollout-1"].deadline == 17.0 and state.view(10.0).members[1].why == "drained by name"


def test_the_last_that_is_ready_drains_at_once_where_that_is_asked_for() -> None:
    for before in ((), (events.Drain("rollout-1", 5.0),)):  # also if it was waiting
        state = last_ready()
        for event in before:
            state.handle(event, 1.0)
        effects = state.handle(events.Drain("rollout-1", 5.0, now=True), 1.0)
        assert states(state)["rollout-1"] == "draining" and state.wanted == 1
        assert says(effects).removeprefix("the target is 1, it was 2; ") == (
            "rollout-1 drains: 49 requests may take 5 s; "
            "it was the last that is ready: requests wait until rollout-0 is"
        )
    # A node goes away, whoever is on it; what is said of one that is not the last is as before.
    state = last_ready()
    said = says(state.handle(events.DrainNodes(frozenset({"a"}), 9.0), 1.0))
    assert said.endswith("it was the last that is ready: requests wait until rollout-2 or rollout-3 is")
    assert says(fleet().handle(events.Drain("rollout-1", 5.0), 1.0)) == (
        "the target is 1, it was 2; rollout-1 drains: 0 requests may take 5 s"
    )


def test_one_that_waits_for_its_successor_leaves_with_its_weights_or_its_node() -> None:
    alone = FleetState()
    alone.handle(events.Cluster(NODES, 0), 0.0)
    alone.handle(events.Reported((seen("rollout-0"),)), 0.0)
    assert says(alone.handle(events.Drain("rollout-0"), 1.0)).endswith(
        "it drains when another one is (there is no room now), or at once with --now"
    )
    assert deeds(alone.handle(events.Cluster(NODES, 1), 2.0)) == [events.Start("rollout-1", 1, frozenset())]
    lost = copy.deepcopy(alone)
    effects = lost.handle(events.Reported((seen("rollout-0", ready=False, lost="restarting"),)), 3.0)
    assert deeds(effects) == [events.Stop("rollout-0", "handle of rollout-0")]  # it serves nobody
    assert states(lost) == {"rollout-0": "stopping", "rollout-1": "starting"}
    # A server that was started by hand serves as well as any other.
    alone.handle(events.AddExternal("http://h:8000"), 3.0)
    alone.handle(events.Started("external-0", "actor"), 3.0)
    alone.handle(events.Reported((seen("rollout-0"), seen("external-0", ""))), 4.0)
    assert states(alone)["rollout-0"] == "draining"
