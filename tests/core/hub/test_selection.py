"""Which source: near before far, chains over the network, stars within a host; and a question changes nothing."""

from __future__ import annotations

from hub_scenarios import Scenario

from tensorhub_plugins.core.hub.candidates import HOPS_PER_READER, Candidate, Choice, Sources, Verdict
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.selection import Question, UplinkBudget, choose
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, DATA_CENTER, HOST, Location, ShardKey, distance, domain


def at(host: str, *, rack: str = "", data_center: str = "dc", machine: str = "") -> Location:
    return Location(data_center, rack, host, machine)


def sources(**candidates: tuple[Location, int, int, bool]) -> Sources:
    """name -> location, depth, readers, whether it published."""
    made = Sources()
    for name, candidate in candidates.items():
        *facts, published = candidate
        made.put(name.encode(), Candidate(*facts, "published" if published else "replicated"))
    return made


def best(of: Sources, reader: Location, **verdicts: Verdict) -> str | None:
    found = of.best(reader, lambda session, far: verdicts.get(session.decode(), Verdict.GOOD)).session
    return found and found.decode()


def test_readers_form_a_chain_and_the_publisher_serves_one() -> None:
    of = sources(trainer=(at("t"), 0, 1, True))
    for number in range(5):
        before = best(of, at(f"h{number}"))
        assert before == (f"r{number - 1}" if number else "trainer")
        if number:
            of.put(before.encode(), Candidate(at(f"h{number - 1}"), number, 1, "replicated"))
        of.put(f"r{number}".encode(), Candidate(at(f"h{number}"), number + 1, 0, "replicated"))


def test_a_chain_that_is_long_enough_gets_a_second_branch() -> None:
    tail = (at("tail"), HOPS_PER_READER + 2, 0, False)
    assert best(sources(head=(at("head"), 1, 1, False), tail=tail), at("new")) == "head"
    assert best(sources(head=(at("head"), 1, 2, False), tail=tail), at("new")) == "tail"


def test_a_rack_tips_the_scales_but_does_not_double_a_sources_load() -> None:
    same, other = at("a", rack="r1"), at("b", rack="r2")
    assert best(sources(same=(same, 3, 0, False), other=(other, 1, 0, False)), at("x", rack="r1")) == "same"
    assert best(sources(same=(same, 1, 1, False), other=(other, 3, 0, False)), at("x", rack="r1")) == "other"


def test_within_a_host_it_is_a_star_around_who_has_all_of_it() -> None:
    of = sources(whole=(at("h"), 0, 7, False), arriving=(at("h"), 1, 0, False), idle=(at("elsewhere"), 0, 0, False))
    assert best(of, at("h")) == "whole"


def test_pods_of_one_machine_are_one_host_and_machines_of_one_name_are_two() -> None:
    """As retain(across="host") has it, where nobody has named the hosts; the control is a host that was named."""
    pod, other_pod, same_name = at("a", machine="m1"), at("b", machine="m1"), at("b", machine="m2")
    assert (distance(pod, other_pod), distance(other_pod, same_name)) == (HOST, DATA_CENTER)
    assert distance(at("a"), pod) == DATA_CENTER and distance(at("a"), at("a")) == HOST
    assert domain(pod, "host") == domain(other_pod, "host") != domain(same_name, "host")
    assert domain(pod, "rack") == domain(same_name, "rack")
    of = sources(near=(other_pod, 0, 7, False), named=(same_name, 0, 0, False))
    assert best(of, pod) == "near" and best(of, same_name) == "named" and best(of, at("b")) == "named"


def test_unknown_hosts_are_not_one_host() -> None:
    of = sources(a=(at(""), 0, 3, False), b=(at("b"), 0, 0, False))
    assert best(of, at("")) == "b"


def test_a_full_source_in_the_data_centre_is_waited_for_and_a_bad_one_is_the_last_resort() -> None:
    of = sources(near=(at("n"), 0, 9, False), far=(at("f", data_center="x"), 0, 0, False))
    assert best(of, at("h")) == "near"
    assert best(of, at("h"), near=Verdict.FULL) is None
    assert best(of, at("h"), near=Verdict.NEVER) == "far"
    assert best(of, at("h"), near=Verdict.LAST_RESORT) == "far"
    assert best(of, at("h"), near=Verdict.LAST_RESORT, far=Verdict.NEVER) == "near"
    assert best(of, at("h"), near=Verdict.NEVER, far=Verdict.NEVER) is None


def test_what_is_known_of_a_candidate_changes_and_ends() -> None:
    of = sources(a=(at("a"), 0, 0, False), b=(at("b"), 0, 1, False))
    for readers in range(200):  # dead heap entries are thrown away
        of.put(b"a", Candidate(at("a"), 0, readers, "replicated"))
    assert best(of, at("h")) == "b"
    assert best(of, at("h")) == "b", "to ask changes nothing"
    assert sum(map(len, of._heaps.values())) < 300
    of.remove(b"b")
    assert best(of, at("h")) == "a" and len(of) == 1
    of.remove(b"a")
    assert best(of, at("h")) is None


# --- what crosses between data centres ---

ONE, TWO = ("run", "one"), ("run", "two")


def test_to_ask_for_room_on_an_uplink_changes_nothing() -> None:
    budget = UplinkBudget(2)
    budget.reserve("far", ONE)
    budget.reserve("far", ONE)
    for _ in range(3):
        assert not budget.has_room("far", TWO) and not budget.has_room("far", ONE)
    assert budget.release("far", ONE) == []  # nobody was recorded as waiting
    assert budget.has_room("far", ONE)


def test_models_that_wait_for_an_uplink_get_their_share() -> None:
    budget = UplinkBudget(2)
    budget.reserve("far", ONE)
    budget.reserve("far", ONE)
    budget.wait("far", TWO)
    assert not budget.has_room("far", TWO) and budget.has_room("other", TWO)
    assert budget.release("far", ONE) == [TWO]  # it is to try again
    assert budget.has_room("far", TWO)
    budget.wait("far", TWO)
    assert not budget.has_room("far", ONE)  # it has its share
    assert budget.total() == 1
    budget.validate()


def test_a_question_about_sources_changes_nothing() -> None:
    """Until a lease is granted, all that was considered is as before."""
    scenario = Scenario(limits=HubLimits(uplink_readers_max=1))
    for name, data_center in (("trainer/0", "home"), ("x/0", "far"), ("y/0", "far")):
        scenario.join(name, location=Location(data_center, "", name))
    scenario.publish("trainer/0", 1)
    scenario.acquire("x/0", version=1)
    registry = scenario.hub.registry
    key = ShardKey(1, CHECKPOINT)
    question = Question(
        reader=registry.workers[scenario.sessions["y/0"]],
        acquire=m.Acquire(9, 1, 0, (CHECKPOINT,), 60.0),
        key=key,
        workers=registry.workers,
        uplink=registry.uplink,
        readers_per_source_max=16,
    )
    before = report(registry, scenario.now)
    version = registry.histories["run", "actor"].versions[1]
    assert [choose(question, version) for _ in range(3)] == [Choice(None, uplink_full=True)] * 3
    assert report(registry, scenario.now) == before
    assert registry.uplink.release("far", ("run", "actor")) == []  # nor is it recorded as waiting
