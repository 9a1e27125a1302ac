"""Warm spares of a fleet: when they start, join, give their places up, and fail. See also fleet_world.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fleet_stories import NODES, deeds, fleet, says, seen, states

from tensorhub_plugins.vllm.ray.fleet import events as ev
from tensorhub_plugins.vllm.ray.fleet.state import FleetState

FIRSTS = (seen("rollout-0"), seen("rollout-1"))
WAITS = {"version": 0, "ready": False, "spare": True}


def test_a_spare_is_started_when_all_is_well_and_joins_first() -> None:
    state = fleet(spares=1)
    assert ev.Start("rollout-2", 2, frozenset(), spare=True) in state._effects
    state.handle(ev.Started("rollout-2", "handle of rollout-2"), 1.0)
    spare = seen("rollout-2", "b", **WAITS)
    assert deeds(state.handle(ev.Reported((*FIRSTS, spare)), 2.0)) == []
    assert states(state) == {"rollout-0": "ready", "rollout-1": "ready", "rollout-2": "spare"}
    view = state.view(3.0)
    assert (view.count("ready"), view.target, view.spares, view.members[2].node) == (2, 2, 1, "10.0.0.2")
    effects = state.handle(ev.Add(2), 4.0)
    assert deeds(effects) == [ev.Join("rollout-2", "handle of rollout-2"), ev.Start("rollout-3", 3, frozenset())]
    assert says(effects) == "the target is 4, it was 2; rollout-2 joins, a spare; starting rollout-3"
    joined = seen("rollout-2", "b", ready=False, version=0)
    assert deeds(state.handle(ev.Reported((*FIRSTS, joined)), 5.0)) == []
    assert state.view(5.0).members[2].kind == "joined" and states(state)["rollout-2"] == "starting"
    state.handle(ev.Started("rollout-3", "handle of rollout-3"), 6.0)
    # The next one is started when the last replica is ready, not beside it.
    assert deeds(state.handle(ev.Reported((*FIRSTS, seen("rollout-2", "b"))), 7.0)) == []
    all_four = (*FIRSTS, seen("rollout-2", "b"), seen("rollout-3", "b"))
    assert deeds(state.handle(ev.Reported(all_four), 8.0)) == [ev.Start("rollout-4", 4, frozenset(), spare=True)]


def test_without_the_option_or_weights_or_room_there_is_no_spare() -> None:
    assert all(not effect.spare for effect in fleet()._effects if isinstance(effect, ev.Start))
    for room, version in ((0, 3), (3, 0)):
        state = FleetState(spares=1)
        state.handle(ev.Cluster(NODES, room), 0.0)
        young = (seen("rollout-0", version=version), seen("rollout-1", version=version))
        assert deeds(state.handle(ev.Reported(young), 0.0)) == []


def with_a_spare(**options: Any) -> FleetState:
    state = fleet(spares=1, **options)
    state.handle(ev.Started("rollout-2", "handle of rollout-2"), 1.0)
    state.handle(ev.Reported((*FIRSTS, seen("rollout-2", "b", **WAITS))), 2.0)
    return state


def test_a_spare_takes_the_place_of_one_that_is_lost_or_preempted() -> None:
    joins = ev.Join("rollout-2", "handle of rollout-2")
    effects = with_a_spare().handle(ev.Reported((seen("rollout-0"), seen("rollout-1", ready=False, lost="gone"))), 3.0)
    assert deeds(effects) == [ev.Stop("rollout-1", "handle of rollout-1"), joins]
    assert deeds(with_a_spare().handle(ev.DrainNodes(frozenset({"a"})), 3.0)) == [
        joins,
        *two_starts(avoid="a", count=1),
    ]
    # Not that of one which Ray starts again by itself: it counts as there.
    restarting = seen("rollout-1", ready=False, lost="restarting")
    assert deeds(with_a_spare().handle(ev.Reported((seen("rollout-0"), restarting)), 3.0)) == []


def two_starts(*, avoid: str, count: int) -> list[ev.Effect]:
    return [ev.Start(f"rollout-{number}", number, frozenset({avoid})) for number in range(3, 3 + count)]


def test_one_that_still_starts_joins_as_soon_as_it_runs() -> None:
    state = fleet(spares=1)
    assert deeds(state.handle(ev.Add(1), 1.0)) == []
    assert state.view(1.0).members[2].kind == "joined"
    state.handle(ev.Started("rollout-2", "handle of rollout-2"), 2.0)
    waits = ev.Reported((*FIRSTS, seen("rollout-2", "b", **WAITS)))
    assert deeds(state.handle(waits, 3.0)) == [ev.Join("rollout-2", "handle of rollout-2")]
    # Whoever has not heard it is told again, also one that Ray has started again later: it begins as a spare.
    assert deeds(state.handle(waits, 4.0)) == [ev.Join("rollout-2", "handle of rollout-2")]
    state.handle(ev.Reported((*FIRSTS, seen("rollout-2", "b"))), 5.0)
    again = seen("rollout-2", "b", lost="restarting", **WAITS)
    assert deeds(state.handle(ev.Reported((*FIRSTS, again)), 6.0)) == [ev.Join("rollout-2", "handle of rollout-2")]


def test_a_spare_gives_its_place_up() -> None:
    gone = ev.Stop("rollout-2", "handle of rollout-2")
    assert deeds(with_a_spare().handle(ev.DrainNodes(frozenset({"b"})), 3.0))[0] == gone
    state = with_a_spare()
    effects = state.handle(ev.Drain("rollout-2"), 3.0)
    assert deeds(effects)[0] == gone and state.wanted == 2 and says(effects) == "rollout-2 is stopped"
    state = with_a_spare()
    for second in range(3, 8):
        assert deeds(state.handle(ev.Cluster(NODES, 0, is_wanted=True), float(second))) == []
    assert deeds(state.handle(ev.Cluster(NODES, 0, is_wanted=True), 8.0)) == [gone]
    state.handle(ev.Stopped("rollout-2"), 9.0)
    # It does not come back while others wait, nor soon afterwards.
    assert deeds(state.handle(ev.Cluster(NODES, 3, is_wanted=True), 100.0)) == []
    assert deeds(state.handle(ev.Cluster(NODES, 3), 101.0)) == [ev.Start("rollout-3", 3, frozenset(), spare=True)]
    control = with_a_spare()
    control.handle(ev.Cluster(NODES, 0, is_wanted=True), 3.0)
    control.handle(ev.Cluster(NODES, 0), 7.0)  # what waited has got what it wanted
    assert deeds(control.handle(ev.Cluster(NODES, 0, is_wanted=True), 9.0)) == []


@pytest.mark.parametrize("how", [{"lost": "gone"}, {"lost": "restarting"}, {"spare": False}])
def test_a_spare_that_fails_is_replaced_and_keeps_no_replica_waiting(how: dict[str, Any]) -> None:
    state = with_a_spare()
    failed = ev.Reported((*FIRSTS, seen("rollout-2", "b", **{**WAITS, **how})))
    assert deeds(state.handle(failed, 3.0)) == [ev.Stop("rollout-2", "handle of rollout-2")]
    assert deeds(state.handle(ev.Tick(), 7.0)) == []
    grown = copy.deepcopy(state)
    assert deeds(grown.handle(ev.Add(1), 7.0)) == [ev.Start("rollout-3", 3, frozenset())]
    assert deeds(state.handle(ev.Tick(), 8.0)) == [ev.Start("rollout-3", 3, frozenset(), spare=True)]
    deeds(state.handle(ev.StartFailed("rollout-3", "no"), 9.0))
    assert deeds(state.handle(ev.Tick(), 18.0)) == []  # twice as long
    assert deeds(state.handle(ev.Tick(), 19.0)) == [ev.Start("rollout-4", 4, frozenset(), spare=True)]
