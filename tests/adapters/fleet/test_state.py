"""What a fleet does next, without Ray: stories, every event in every state, random programs, and broken machines."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from fleet_stories import NODES, deeds, fleet, says, seen, states
from fleet_world import MAY_BECOME, OPS, program, run
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.ray.fleet import events as ev
from tensorhub_plugins.vllm.ray.fleet import state as fleet_state
from tensorhub_plugins.vllm.ray.fleet.state import FleetState, _Member
from tensorhub_plugins.vllm.ray.fleet.types import Entry, Seen
from tensorhub_plugins.vllm.ray.placement import RESERVE_TIMEOUT_S

# --- stories ----------------------------------------------------------------------------------------------------------


def test_one_joins_is_drained_and_gone() -> None:
    state = fleet()
    effects = state.handle(ev.Add(1), 1.0)
    assert deeds(effects) == [ev.Start("rollout-2", 2, frozenset())]
    assert says(effects) == "the target is 3, it was 2; starting rollout-2"
    assert [entry.name for entry in state.roster()] == ["rollout-0", "rollout-1"]
    assert deeds(state.handle(ev.Started("rollout-2", "actor"), 2.0)) == []
    assert state.roster()[-1] == Entry("rollout-2", "actor", "joined")
    firsts = (seen("rollout-0"), seen("rollout-1"))
    assert deeds(state.handle(ev.Reported((*firsts, seen("rollout-2", "b", ready=False))), 3.0)) == []
    assert states(state)["rollout-2"] == "starting"
    state.handle(ev.Reported((*firsts, seen("rollout-2", "b", in_flight=4))), 4.0)
    assert states(state)["rollout-2"] == "ready"
    effects = state.handle(ev.Drain("rollout-2", 30.0), 5.0)
    assert deeds(effects) == [] and "rollout-2 drains: 4 requests may take 30 s" in says(effects)
    assert state.roster()[-1].draining and state.wanted == 2
    # It is empty, but the dispatcher did not know yet that it drains: it may have given it something meanwhile.
    assert deeds(state.handle(ev.Reported((*firsts, seen("rollout-2", "b", in_flight=0))), 6.0)) == []
    done = ev.Reported((*firsts, seen("rollout-2", "b", draining=True)))
    assert deeds(state.handle(done, 7.0)) == [ev.Stop("rollout-2", "actor")]
    assert [entry.name for entry in state.roster()] == ["rollout-0", "rollout-1"]
    assert deeds(state.handle(done, 7.5)) == []  # a report that was on its way
    state.handle(ev.Stopped("rollout-2"), 8.0)
    assert state.view(8.0).gone[0].name == "rollout-2" and "rollout-2" not in states(state)
    assert deeds(state.handle(done, 9.0)) == [] and "rollout-2" not in states(state)


def test_requests_that_do_not_end_are_given_back() -> None:
    state = fleet(ev.Drain("rollout-1", 30.0))
    busy = ev.Reported((seen("rollout-0"), seen("rollout-1", draining=True, in_flight=2)))
    state.handle(busy, 29.0)
    assert deeds(state.handle(ev.Tick(), 29.9)) == []
    assert deeds(state.handle(ev.Tick(), 30.0)) == [ev.Abort("rollout-1", "handle of rollout-1")]
    assert deeds(state.handle(ev.Tick(), 31.0)) == []
    at_once = copy.deepcopy(state)
    assert deeds(at_once.handle(ev.Reported((seen("rollout-0"), seen("rollout-1", draining=True))), 32.0)) == [
        ev.Stop("rollout-1", "handle of rollout-1")
    ]
    state.handle(busy, 39.0)
    assert deeds(state.handle(ev.Tick(), 40.0)) == [ev.Stop("rollout-1", "handle of rollout-1")]
    assert "2 requests were under way to the end" in state.view(40.0).members[1].why


def test_nothing_is_started_before_all_that_is_there_has_reported() -> None:
    state = FleetState(target=4)
    state.handle(ev.Cluster(NODES, 9), 0.0)
    assert deeds(state.handle(ev.Reported((seen("rollout-0"),), unnamed=1), 0.0)) == []
    assert "have not all reported yet" in says(state.handle(ev.Add(1), 0.0))
    effects = state.handle(ev.Reported((seen("rollout-0"), seen("rollout-1"))), 1.0)
    assert [effect.name for effect in deeds(effects) if isinstance(effect, ev.Start)] == [
        f"rollout-{n}" for n in (2, 3, 4)
    ]


def test_what_ray_starts_again_is_not_replaced_and_what_is_gone_is_when_there_is_room() -> None:
    state = fleet()
    lost = seen("rollout-1", ready=False, lost="restarting")
    assert deeds(state.handle(ev.Reported((seen("rollout-0"), lost)), 1.0)) == []
    assert states(state)["rollout-1"] == "lost" and state.roster()[1].name == "rollout-1"
    state.handle(ev.Cluster(NODES, 0), 2.0)
    gone = seen("rollout-1", ready=False, lost="gone")
    effects = state.handle(ev.Reported((seen("rollout-0"), gone)), 3.0)
    assert deeds(effects) == [ev.Stop("rollout-1", "handle of rollout-1")]
    assert deeds(state.handle(ev.Stopped("rollout-1"), 4.0)) == []
    assert deeds(state.handle(ev.Cluster(NODES, 1), 5.0)) == [ev.Start("rollout-2", 2, frozenset())]
    assert deeds(state.handle(ev.Cluster(NODES, 1), 6.0)) == []


def test_one_whose_node_is_lost_is_replaced_at_once_if_the_fleet_has_started_it() -> None:
    state = fleet(ev.Add(1), ev.Started("rollout-2", "actor"))
    firsts = (seen("rollout-0"), seen("rollout-1", "b"))
    state.handle(ev.Reported((*firsts, seen("rollout-2", "b"))), 1.0)
    state.handle(ev.Cluster(NODES, 1), 2.0)
    effects = deeds(state.handle(ev.Cluster({"a": "10.0.0.1"}, 1), 3.0))
    assert effects == [ev.Stop("rollout-2", "actor"), ev.Start("rollout-3", 3, frozenset())]
    shown = {member.name: member for member in state.view(3.0).members}
    assert shown["rollout-2"].why == "its node 10.0.0.2 is lost"
    assert shown["rollout-1"].state == "lost"  # its framework may have Ray start it elsewhere
    assert deeds(state.handle(ev.Cluster({}, 0), 4.0)) == []  # no answer of Ray's head is no loss


def test_a_drained_node_gets_nothing_and_its_members_come_back_elsewhere() -> None:
    state = fleet()
    state.handle(ev.Reported((seen("rollout-0"), seen("rollout-1", "b"))), 1.0)
    effects = state.handle(ev.DrainNodes(frozenset({"b"}), 20.0, "spot notice"), 2.0)
    assert deeds(effects) == [ev.Start("rollout-2", 2, frozenset({"b"}))]
    assert states(state) == {"rollout-0": "ready", "rollout-1": "draining", "rollout-2": "starting"}
    assert state.wanted == 2
    # Ray has put it there all the same.
    state.handle(ev.Started("rollout-2", "actor"), 3.0)
    there = seen("rollout-2", "b", ready=False)
    assert ev.Stop("rollout-2", "actor") in deeds(state.handle(ev.Reported((seen("rollout-0"), there)), 4.0))
    state.handle(ev.Cluster({"a": "10.0.0.1"}, 1), 5.0)
    assert not state.avoided  # Ray's ids are never used again


def test_a_node_that_stays_after_all_is_used_again() -> None:
    state = fleet()
    state.handle(ev.Reported((seen("rollout-0"), seen("rollout-1", "b"))), 1.0)
    with pytest.raises(UsageError, match="node 10.0.0.2 is not drained"):
        state.handle(ev.UndrainNodes(frozenset({"b"}), "10.0.0.2"), 1.0)
    with pytest.raises(UsageError, match="there is no node 'nowhere': there are 10.0.0.1, 10.0.0.2"):
        state.handle(ev.UndrainNodes(frozenset(), "nowhere"), 1.0)
    state.handle(ev.DrainNodes(frozenset({"b"}), 20.0, "spot notice"), 2.0)
    state.handle(ev.StartFailed("rollout-2", "no room"), 3.0)  # on another node
    effects = state.handle(ev.UndrainNodes(frozenset({"b"}), "10.0.0.2"), 9.0)
    assert "replicas may be started on 10.0.0.2 again" in says(effects)
    assert ev.Start("rollout-3", 3, frozenset()) in deeds(effects)
    assert states(state)["rollout-1"] == "draining"  # nobody comes back from draining


def test_failing_starts_are_tried_again_later_and_later() -> None:
    state = fleet(ev.Add(1))
    now, delays = 0.0, []
    for _ in range(9):
        name = list(state.members)[-1]
        effects = state.handle(ev.StartFailed(name, "no GPU is free"), now)
        assert ev.Stop(name, None) in effects and "did not start" in says(effects) and "no GPU is free" in says(effects)
        state.handle(ev.Stopped(name), now)
        start, began = [], now
        while not start:
            now += 1.0
            start = deeds(state.handle(ev.Cluster(NODES, 1), now))
        delays.append(now - began)
    assert delays == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert "the last start failed" not in says(state.handle(ev.SetTarget(3), now))
    name = list(state.members)[-1]
    state.handle(ev.Started(name, "actor"), now)
    state.handle(ev.Reported((seen(name),)), now)
    assert state.failures["joined"] == 0


def test_what_a_start_is_about_to_take_is_nobody_elses() -> None:
    """As long as a launcher may take to reserve it; then it has, or has failed."""
    state = fleet(ev.Cluster(NODES, 1), ev.Add(2))
    assert states(state)["rollout-2"] == "starting"
    assert deeds(state.handle(ev.Cluster(NODES, 1), RESERVE_TIMEOUT_S - 1)) == []
    (next_one,) = deeds(state.handle(ev.Cluster(NODES, 1), RESERVE_TIMEOUT_S))
    assert next_one == ev.Start("rollout-3", 3, frozenset())


def test_a_start_that_does_not_end_is_given_up() -> None:
    state = fleet(ev.Add(1))
    assert deeds(state.handle(ev.Tick(), fleet_state.START_TIMEOUT_S - 1)) == []
    assert deeds(state.handle(ev.Tick(), fleet_state.START_TIMEOUT_S)) == [ev.Stop("rollout-2", None)]
    state = fleet(ev.Add(1), ev.Started("rollout-2", "actor"))
    state.handle(ev.Reported((seen("rollout-0"), seen("rollout-1"))), fleet_state.START_TIMEOUT_S)
    effects = deeds(state.handle(ev.Tick(), fleet_state.START_TIMEOUT_S))
    assert effects == [ev.Stop("rollout-2", "actor")]


@pytest.mark.parametrize("works", [True, False])
def test_a_start_whose_engine_works_is_waited_for_ten_times_as_long(works: bool) -> None:
    """N2: a first version may take hours, on a slow link. The control: one that does nothing."""
    state, idle_s = fleet(ev.Add(1), ev.Started("rollout-2", "actor")), 10.0 if works else math.inf
    stopped, each_s = [], fleet_state.START_TIMEOUT_S / 4
    for number in range(1, 100):
        now = number * each_s
        starting = seen("rollout-2", ready=False, idle_s=idle_s)
        state.handle(ev.Reported((seen("rollout-0"), seen("rollout-1"), starting)), now)
        if ev.Stop("rollout-2", "actor") in deeds(state.handle(ev.Tick(), now)):
            stopped.append(number)
            break
    assert stopped == [4 * fleet_state.START_TIMES_MAX if works else 4]


def test_those_that_run_are_left_alone_while_nobody_reports() -> None:
    restarting = ev.Reported((seen("rollout-0"), seen("rollout-1", ready=False, lost="restarting")))
    state = fleet(restarting, ev.Add(1), ev.Started("rollout-2", "actor"))
    for hour in range(1, 10):
        assert deeds(state.handle(ev.Tick(), 3600.0 * hour)) == []
        assert states(state) == {"rollout-0": "ready", "rollout-1": "lost", "rollout-2": "starting"}
    state.handle(restarting, 36_000.0)  # it was lost all the time
    assert deeds(state.handle(ev.Tick(), 36_000.0))[0] == ev.Stop("rollout-1", "handle of rollout-1")


def test_one_that_is_not_named_is_not_in_use() -> None:
    state = fleet()
    for second in range(1, 12):
        state.handle(ev.Reported((seen("rollout-0"),)), float(second))
        state.handle(ev.Tick(), float(second))
    assert states(state) == {"rollout-0": "ready", "rollout-1": "lost"}
    assert state.view(12.0).members[1].why == "the dispatcher does not report it"


def test_what_could_not_be_given_back_stays_in_the_list_and_is_tried_again() -> None:
    state = fleet(ev.Drain("rollout-1"))
    state.handle(ev.Reported((seen("rollout-1", draining=True),)), 1.0)
    effects = state.handle(ev.StopFailed("rollout-1", "Ray does not answer"), 2.0)
    assert "rollout-1 has not given back what it used, the next try is in 5 s" in says(effects)
    assert deeds(state.handle(ev.Tick(), 6.9)) == [] and states(state)["rollout-1"] == "stopping"
    assert deeds(state.handle(ev.Tick(), 7.0)) == [ev.Stop("rollout-1", "handle of rollout-1")]
    assert deeds(state.handle(ev.Tick(), 70.0)) == []  # it is under way
    state.handle(ev.StopFailed("rollout-1", "Ray does not answer"), 70.0)
    assert deeds(state.handle(ev.Tick(), 79.9)) == [] and deeds(state.handle(ev.Tick(), 80.0)) != []


def test_one_that_is_not_ready_says_why_itself() -> None:
    state, why = fleet(), "it has not heard of the hub for 40 s"
    state.handle(ev.Reported((seen("rollout-0", ready=False, why=why), seen("rollout-1", ready=False))), 1.0)
    assert [(one.state, one.why) for one in state.view(1.0).members] == [
        ("lost", why),
        ("lost", "it has no current weights or does not answer"),
    ]
    state.handle(
        ev.Reported((seen("rollout-0", ready=False, why=why, lost="restarting"), seen("rollout-1"))),
        2.0,
    )
    assert [one.why for one in state.view(2.0).members] == ["Ray is starting it again", ""]


def test_too_many_leave_the_newest_first_and_those_that_serve_nobody_before_them() -> None:
    state = fleet(ev.Add(3), ev.Started("rollout-2", "x"), ev.Started("rollout-3", "y"))
    here = tuple(seen(f"rollout-{number}") for number in range(4))
    state.handle(ev.Reported(here), 1.0)
    effects = state.handle(ev.SetTarget(1), 2.0)
    assert deeds(effects) == [ev.Stop("rollout-4", None)]
    assert "the target is 1, it was 5" in says(effects) and "draining rollout-3, rollout-2, rollout-1" in says(effects)
    assert [name for name, at in states(state).items() if at == "ready"] == ["rollout-0"]


def test_people_and_a_policy() -> None:
    state = fleet(policy="queue_length", maximum=4)
    assert state.view(0.0).policy == "queue_length"
    effects = state.handle(ev.PolicySaid(9), 1.0)
    assert ev.Targeted(4, "queue_length") in effects and len(deeds(effects)) == 2
    assert state.handle(ev.PolicySaid(9), 2.0) == []
    assert "queue_length no longer sets the target" in says(state.handle(ev.SetTarget(3), 3.0))
    assert state.handle(ev.PolicySaid(4), 4.0) == [] and state.wanted == 3 and state.view(4.0).policy == ""
    state.handle(ev.SetTarget(None), 5.0)
    state.handle(ev.PolicySaid(4), 6.0)
    assert state.wanted == 4


def test_an_external_server_joins_and_leaves_and_does_not_count() -> None:
    state = fleet()
    effects = state.handle(ev.AddExternal("http://h:8000"), 0.0)
    assert deeds(effects) == [ev.StartExternal("external-0", "http://h:8000")] and "joins as external-0" in says(
        effects
    )
    state.handle(ev.Started("external-0", "actor"), 1.0)
    here = (seen("rollout-0"), seen("rollout-1"), seen("external-0", ""))
    assert deeds(state.handle(ev.Reported(here), 2.0)) == []
    assert state.wanted == 2 and state.view(2.0).members[-1].node == "http://h:8000"
    state.handle(ev.Drain("external-0", 1.0), 3.0)
    assert state.wanted == 2 and states(state)["external-0"] == "draining"
    # It has no node of Ray's, and leaves with the host in its address; whatever case that is in, and with IPv6.
    for url, host in (("http://H:8000", "h"), ("https://[fd00::7]:8000", "fd00::7"), ("http://h", "h")):
        hosted = fleet(ev.AddExternal(url), ev.Started("external-0", "actor"))
        hosted.handle(ev.Reported((*here[:2], seen("external-0", ""))), 0.0)
        with pytest.raises(UsageError, match=f"there is no node 'g': there are 10.0.0.1, 10.0.0.2, {host}"):
            hosted.handle(ev.DrainNodes(frozenset(), hosts=frozenset({"g"})), 1.0)
        effects = hosted.handle(ev.DrainNodes(frozenset(), 9.0, hosts=frozenset({host})), 1.0)
        assert says(effects) == "external-0 drains: 0 requests may take 9 s"
        assert states(hosted) == {"rollout-0": "ready", "rollout-1": "ready", "external-0": "draining"}
    failed = fleet(ev.AddExternal("http://h:8000"))
    effects = failed.handle(ev.StartFailed("external-0", "nobody answers there"), 1.0)
    assert "http://h:8000 did not start: nobody answers there" in says(effects)
    assert deeds(failed.handle(ev.Cluster(NODES, 3), 1.0)) == []  # nobody else is delayed, and it is not tried again


@pytest.mark.parametrize(
    ("events", "event", "words"),
    [
        ((), ev.Add(0), "add 0: give the number of replicas to add"),
        ((), ev.Add(7), "the target is 2, and 7 more are above fleet_max, 8"),
        ((), ev.SetTarget(0), "target 0: fleet_min and fleet_max allow 1 to 8"),
        ((), ev.SetTarget(9), "target 9: fleet_min and fleet_max allow 1 to 8"),
        ((), ev.SetTarget(None), "this run has no policy"),
        # As from an API, after a division: every later event would fail on half a replica.
        ((), ev.SetTarget(2.5), "target 2.5: give a whole number of replicas"),  # type: ignore[arg-type]
        ((), ev.SetTarget(True), "target True: give a whole number"),
        ((), ev.Add(1.5), "add 1.5: give the number of replicas"),  # type: ignore[arg-type]
        ((), ev.Add("2"), "add '2': give the number of replicas"),  # type: ignore[arg-type]
        # A deadline that never comes, and one that has passed.
        ((), ev.Drain("rollout-1", math.nan), "a timeout of nan: give the seconds that requests may take, 0 to 86400"),
        ((), ev.Drain("rollout-1", math.inf), "a timeout of inf"),
        ((), ev.Drain("rollout-1", -1.0), "a timeout of -1.0"),
        ((), ev.Drain("rollout-1", "30"), "a timeout of '30'"),  # type: ignore[arg-type]
        ((), ev.DrainNodes(frozenset({"a"}), math.nan), "a timeout of nan"),
        ((), ev.Drain("rollout-7"), "no member is called 'rollout-7': there are rollout-0, rollout-1"),
        (
            (ev.AddExternal("http://h:1"),),
            ev.AddExternal("http://h:1"),
            "http://h:1 is in this fleet already, as external-0",
        ),
        ((ev.Add(1), ev.Drain("rollout-2")), ev.Drain("rollout-2"), "rollout-2 has left already: drained by name"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    events: tuple[ev.Event, ...], event: ev.Event, words: str
) -> None:
    state = fleet(*events, maximum=8)
    before = repr(state.view(0.0)) + repr(state.roster())
    with pytest.raises(UsageError, match=words):
        state.handle(event, 0.0)
    assert repr(state.view(0.0)) + repr(state.roster()) == before


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: fleet(ev.Cluster(NODES, 0)), "1 more will be started later: there is no room now"),
        (
            lambda: fleet(ev.Add(1), ev.StartFailed("rollout-2", "x")),
            "1 more will be started later: the last start failed",
        ),
        (lambda: fleet(ev.Cluster(NODES, 50), ev.Add(8)), "1 more will be started later: 8 start at a time"),
    ],
)
def test_what_is_not_started_at_once_is_said(state: Callable[[], FleetState], words: str) -> None:
    made = state()
    effects = made.handle(ev.SetTarget(made.wanted + 1 if not made.failures["joined"] else made.wanted), 0.0)
    assert words in says(effects)


# --- every event in every state ---------------------------------------------------------------------------------------

JOINING = (ev.Add(1),)
MADE = (*JOINING, ev.Started("rollout-2", "handle of rollout-2"))
READY = (*MADE, ev.Reported((seen("rollout-0"), seen("rollout-1"), seen("rollout-2", "b"))))
DRAINING = (*READY, ev.Drain("rollout-2", 0.0))
SPARE = (
    *(ev.SetTarget(2), ev.Started("rollout-2", "handle of rollout-2")),
    ev.Reported((seen("rollout-0"), seen("rollout-1"), seen("rollout-2", "b", version=0, ready=False, spare=True))),
)
LEAVING = (*DRAINING, ev.Reported((seen("rollout-2", "b", draining=True),)))
STATES: dict[str, tuple[ev.Event, ...]] = {
    "unknown": (),
    "launching": JOINING,
    "starting": MADE,
    "spare": SPARE,
    "ready": READY,
    "leaving": (
        *READY,
        ev.Reported((seen("rollout-0", ready=False), seen("rollout-1", ready=False))),
        ev.Drain("rollout-2", 9.0),
    ),
    "lost": (*READY, ev.Reported((seen("rollout-2", "b", ready=False, lost="restarting"),))),
    "draining": DRAINING,
    "aborted": (*DRAINING, ev.Tick()),
    "stopping": LEAVING,
    "stop failed": (*LEAVING, ev.StopFailed("rollout-2", "why")),
    "gone": (*LEAVING, ev.Stopped("rollout-2")),
}
EVENTS: list[ev.Event] = [
    *(
        ev.Reported((seen("rollout-2", "b", ready=ready, lost=lost, in_flight=in_flight, draining=draining),))
        for ready in (True, False)
        for lost in ("", "restarting", "gone")
        for in_flight in (0, 2)
        for draining in (True, False)
    ),
    ev.Reported((seen("rollout-2", "b", ready=False, spare=True),)),
    ev.Reported(()),
    *(ev.Cluster(nodes, slots) for nodes in (NODES, {"a": "10.0.0.1"}, {}) for slots in (0, 2)),
    ev.Started("rollout-2", "handle of rollout-2"),
    ev.StartFailed("rollout-2", "why"),
    ev.Stopped("rollout-2"),
    ev.StopFailed("rollout-2", "why"),
    ev.Add(1),
    ev.AddExternal("http://h:1"),
    ev.Drain("rollout-2"),
    ev.Drain("rollout-2", now=True),
    ev.DrainNodes(frozenset({"b"})),
    ev.DrainNodes(frozenset({"nowhere"})),
    ev.SetTarget(1),
    ev.SetTarget(2),
    ev.SetTarget(None),
    ev.PolicySaid(1),
    ev.PolicySaid(5),
    ev.Tick(),
]


def of_rollout_2(state: FleetState) -> str:
    member = state.members.get("rollout-2") or state.gone.get("rollout-2")
    return member.state if member else "unknown"


@pytest.mark.parametrize("at", STATES)
@pytest.mark.parametrize("late", [False, True])
def test_every_event_in_every_state(at: str, late: bool) -> None:
    for event in EVENTS:
        state = fleet(*STATES[at], policy="mine", spares=int(at == "spare"))
        before, held = of_rollout_2(state), copy.deepcopy(vars(state))
        now = 1e6 if late else 1.0
        try:
            effects = state.handle(event, now)
        except UsageError:
            assert {k: v for k, v in vars(state).items() if k != "_effects"} == {
                k: v for k, v in held.items() if k != "_effects"
            }
            continue
        after = of_rollout_2(state)
        if before == "unknown":
            assert after in ("unknown", "starting", "ready", "stopping")  # it may be reported, or be started by this
        else:
            reachable = {before, *MAY_BECOME[before]} | {b for a in MAY_BECOME[before] for b in MAY_BECOME[a]}
            assert after in reachable, (event, before, after)
        stops = [effect for effect in effects if isinstance(effect, ev.Stop) and effect.name == "rollout-2"]
        assert len(stops) <= 1
        if after == "stopping" and before != "stopping":
            assert len(stops) == 1, event
        if before == "gone" or (before == "stopping" and at != "stop failed"):
            assert not stops, event
        told = [
            effect.member for effect in effects if isinstance(effect, ev.Changed) and effect.member.name == "rollout-2"
        ]
        assert (told[-1].state if told else before) == after, event
        in_roster = "rollout-2" in [entry.name for entry in state.roster()]
        member = state.members.get("rollout-2")
        assert in_roster == (member is not None and member.handle is not None and member.state != "stopping")


# --- random programs, and broken machines -----------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200)
@given(
    steps=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 7)), max_size=60),
    firsts=st.integers(1, 3),
    minimum=st.integers(1, 2),
    maximum=st.integers(2, 6),
    policy=st.sampled_from(["", "mine"]),
    spares=st.integers(0, 2),
)
def test_the_rules_hold_in_every_program(steps: Any, **options: Any) -> None:
    run(steps, **options)


@pytest.mark.slow
def test_the_rules_hold_in_long_programs() -> None:
    for seed in range(60):
        run(program(seed, 200), maximum=6, policy="mine" if seed % 2 else "", spares=seed % 3)


def _forgets_to_stop(self: FleetState, member: _Member, why: str, now: float) -> None:
    self._move(member, "stopping", why, now)


def _brings_back(self: FleetState, member: _Member, seen: Seen, now: float) -> None:
    if member.state == "draining" and seen.ready:
        self._move(member, "ready", "", now)
    heard(self, member, seen, now)


def _does_not_wait(self: FleetState, member: _Member, seen: Seen, now: float) -> None:
    if member.state == "draining" and not seen.draining:
        self._stop(member, "empty", now)
    heard(self, member, seen, now)


def _replaces_the_lost(self: FleetState) -> list[_Member]:
    return [member for member in own(self) if member.state != "lost"]


def _takes_more_than_there_is(self: FleetState, now: float) -> None:
    self.slots += 1
    reconcile(self, now)


def _is_impatient(self: FleetState, now: float) -> None:
    self.start_again_at["joined"] = 0.0
    reconcile(self, now)


def _uses_ranks_again(self: FleetState, name: str, now: float) -> None:
    stopped(self, name, now)
    self.next_rank = len([member for member in self.members.values() if member.kind != "external"])


def _loses_sight(self: FleetState, name: str, why: str, now: float) -> None:
    self.members.pop(name, None)


def _forgets_what_was_under_way(self: FleetState, now: float) -> list[ev.Effect]:
    return []


def _drains_late(self: FleetState, member: _Member, timeout_s: float, why: str, now: float) -> None:
    self._stop(member, why, now)


def _leaves_nobody(self: FleetState, now: float) -> None:
    for member in [one for one in self.members.values() if one.leaves_within_s is not None]:
        self._drain(member, member.leaves_within_s, "drained by name", now)


def _lets_failures_block(self: FleetState, member: _Member, why: str, now: float) -> None:
    fail(self, member, why, now)
    self.start_again_at["joined"] = 1e12


def _counts_spares(self: FleetState) -> list[_Member]:
    return [*own(self), *self._spares()]


def _keeps_its_spares(self: FleetState, spare: _Member, now: float) -> None:
    """Start others in their place."""


def _tells_spares_once(self: FleetState, member: _Member, seen: Seen, now: float) -> None:
    heard(self, member, seen, now)
    self._effects = [effect for effect in self._effects if not isinstance(effect, ev.Join)]


def _starts_spares_at_any_time(self: FleetState, now: float) -> None:
    self._start("spare", self.spares - len(self._spares()), now)


def _has_replicas_wait_for_spares(self: FleetState, member: _Member, why: str, now: float) -> None:
    fail(self, member, why, now)
    self.start_again_at["joined"] = max(self.start_again_at.values())


heard, own, reconcile = FleetState._heard, FleetState._own, FleetState._reconcile
stopped, fail = FleetState._stopped, FleetState._fail
BROKEN = {
    "_stop": _forgets_to_stop,
    "_heard": _brings_back,
    "_heard ": _does_not_wait,
    "_own": _replaces_the_lost,
    "_reconcile": _takes_more_than_there_is,
    "_reconcile ": _is_impatient,
    "_stopped": _uses_ranks_again,
    "_stop_failed": _loses_sight,
    "resume": _forgets_what_was_under_way,
    "_drain": _drains_late,
    "_let_leave": _leaves_nobody,
    "_fail": _lets_failures_block,
    "_own ": _counts_spares,
    "_take": _keeps_its_spares,
    "_heard  ": _tells_spares_once,
    "_keep_spares": _starts_spares_at_any_time,
    "_keep_spares ": lambda self, now: None,
    "_fail ": _has_replicas_wait_for_spares,
    "wanted": property(lambda self: self.firsts if self.target is None else self.target + 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_machine_that_breaks_a_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetState, name.strip(), BROKEN[name])
    with pytest.raises(AssertionError):
        for seed in range(60):
            run(program(seed, 200), maximum=6, policy="mine" if seed % 2 else "", spares=seed % 3)
