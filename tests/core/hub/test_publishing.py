"""Rules 1, 2 and 4 as stories: when a version becomes visible, and how a copy is given up or retained."""

from __future__ import annotations

from typing import Any

import pytest
from hub_scenarios import RUNTIME, Scenario

from tensorhub_plugins.core.cli import status_text
from tensorhub_plugins.core.hub import state
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


# --- rule 2: atomic visibility, one version for a group ---


def test_a_version_is_visible_once_every_shard_of_one_replica_holds_it(scenario: Scenario) -> None:
    scenario.join("trainer/0", 2)
    scenario.join("trainer/1", 2)
    scenario.join("rollout/0")
    scenario.say("rollout/0", m.Wait, version=0, newer_than=0, timeout_s=60.0)
    scenario.publish("trainer/0", 1)
    assert scenario.heard("rollout/0") == []
    scenario.publish("trainer/1", 1)
    assert scenario.heard("rollout/0") == ["visible 1"]


def test_shards_of_two_replicas_do_not_make_a_version_visible(scenario: Scenario) -> None:
    scenario.join("a/0", 2)
    scenario.join("b/1", 2)
    scenario.join("rollout/0")
    scenario.publish("a/0", 1)
    scenario.publish("b/1", 1)
    scenario.say("rollout/0", m.Wait, version=0, newer_than=0, timeout_s=5.0)
    scenario.wait(6)
    assert scenario.heard("rollout/0") == ["refused NotPublished"]


def test_an_incomplete_shard_does_not_make_a_version_visible(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1, complete=False)
    assert not scenario.hub.registry.histories["run", "actor"].versions[1].visible
    scenario.publish("trainer/0", 1)
    assert scenario.hub.registry.histories["run", "actor"].versions[1].visible


def test_a_reading_group_agrees_on_latest_though_a_newer_version_appears_in_between(scenario: Scenario) -> None:
    for name in ("trainer", "rollout"):
        scenario.join(f"{name}/0", 2)
        scenario.join(f"{name}/1", 2)
    for shard in (0, 1):
        scenario.publish(f"trainer/{shard}", 1, RUNTIME)
    scenario.acquire("rollout/0", layouts=(RUNTIME,))
    for shard in (0, 1):
        scenario.publish(f"trainer/{shard}", 2, RUNTIME)
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    assert scenario.heard("rollout/0") == [f"read 1 {RUNTIME} 0<-trainer/0"]
    assert scenario.heard("rollout/1") == [f"read 1 {RUNTIME} 1<-trainer/1"]
    scenario.acquire("rollout/1", layouts=(RUNTIME,))  # the next round
    scenario.acquire("rollout/0", layouts=(RUNTIME,))
    assert scenario.heard("rollout/1") == [f"read 2 {RUNTIME} 1<-trainer/1"]
    assert scenario.heard("rollout/0") == [f"read 2 {RUNTIME} 0<-trainer/0"]


def test_the_shards_of_an_engine_that_starts_again_agree_though_one_comes_later(scenario: Scenario) -> None:
    """Its former processes are not taken for dead yet, and a version appears between the first answer and the last."""
    scenario.join_all("trainer/0")
    scenario.join_all("rollout/0", "rollout/1", shard_count=2)
    scenario.publish("trainer/0", 1)
    for shard in (0, 1):
        scenario.acquire(f"rollout/{shard}")
        scenario.heard(f"rollout/{shard}")
    for again in (b"2", b"3"):  # twice
        for shard in (0, 1):
            scenario.sessions[f"rollout/{shard}"] = again * 15 + bytes([shard])
            scenario.join(f"rollout/{shard}", 2)
            scenario.acquire(f"rollout/{shard}")
            scenario.publish("trainer/0", 2 * int(again) + shard)
        versions = {line.split()[1] for shard in (0, 1) for line in scenario.heard(f"rollout/{shard}")}
        assert len(versions) == 1


def test_they_agree_though_one_of_the_former_left_in_order(scenario: Scenario) -> None:
    """The one that follows it takes nobody's place, and the replica's new start begins with it nevertheless."""
    scenario.join_all("trainer/0")
    for again in (b"1", b"2"):
        for shard in (0, 1):
            scenario.sessions[f"rollout/{shard}"] = again * 15 + bytes([shard])
            scenario.join(f"rollout/{shard}", 2)
            scenario.publish("trainer/0", 2 * int(again) + shard)
            scenario.acquire(f"rollout/{shard}")
        (versions,) = {line.split()[1] for shard in (0, 1) for line in scenario.heard(f"rollout/{shard}")}
        assert versions == ("2" if again == b"1" else "4")
        scenario.tell("rollout/0", m.Bye())


def test_where_one_shard_is_refused_no_other_gets_a_newer_version_than_the_first(scenario: Scenario) -> None:
    scenario.join_all("trainer/0")
    scenario.join_all("rollout/0", "rollout/1", "rollout/2", shard_count=3)
    scenario.publish("trainer/0", 1)
    scenario.acquire("rollout/0")
    scenario.publish("trainer/0", 2)
    scenario.acquire("rollout/1", at_least=2)
    scenario.acquire("rollout/2")
    heard = [scenario.heard(f"rollout/{shard}")[0].split()[:2] for shard in range(3)]
    assert heard == [["read", "1"], ["refused", "VersionGone"], ["read", "1"]]
    for shard in (1, 0, 2):  # all read again
        scenario.acquire(f"rollout/{shard}", at_least=2 * (shard == 1))
        assert scenario.heard(f"rollout/{shard}")[0].startswith("read 2")


def test_a_shard_that_was_cut_off_for_long_is_no_start_of_its_replica(scenario: Scenario) -> None:
    scenario.join_all("trainer/0")
    scenario.join_all("rollout/0", "rollout/1", shard_count=2)
    scenario.publish("trainer/0", 1)
    scenario.acquire("rollout/0")
    scenario.silent = ("rollout/0",)
    scenario.wait(2 * HubLimits().session_timeout_s)
    scenario.publish("trainer/0", 2)
    hub = scenario.hub.session
    scenario.join("rollout/0", 2, hub=hub, welcomed=hub, request_id=1, generation=1, resolved=1)
    scenario.acquire("rollout/1")
    assert scenario.heard("rollout/1") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]


def test_a_shard_that_was_taken_for_gone_while_it_waited_has_the_version_of_the_others() -> None:
    """It has not given up: it thinks the hub's clock earlier than that is, and asks again."""
    scenario = Scenario(limits=HubLimits(readers_per_source_max=1))
    for name in ("trainer", "rollout", "other"):
        scenario.join_all(f"{name}/0", f"{name}/1", shard_count=2)
    for shard in (0, 1):
        scenario.publish(f"trainer/{shard}", 1, RUNTIME)
    read = scenario.acquire("other/0", 1, layouts=(RUNTIME,), serve=False)  # nobody else has room
    until = m.Until(scenario.hub.session, scenario.now + 2.0)
    number = scenario.acquire("rollout/0", layouts=(RUNTIME,), until=until)
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    assert scenario.heard("rollout/1") == [f"read 1 {RUNTIME} 1<-trainer/1"] and scenario.heard("rollout/0") == []
    for shard in (0, 1):
        scenario.publish(f"trainer/{shard}", 2, RUNTIME)
    scenario.now += 3.0
    scenario.tell("other/0", m.Release(read))
    assert scenario.heard("rollout/0") == []
    scenario.tell("rollout/0", m.Acquire(number, 0, 0, (RUNTIME,), 9.0))
    assert scenario.heard("rollout/0") == [f"read 1 {RUNTIME} 0<-trainer/0"]


def test_latest_never_goes_backwards_for_a_reader(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join("old/0")
    scenario.join("rollout/0")
    scenario.publish("old/0", 1)
    scenario.publish("trainer/0", 2)
    scenario.acquire("rollout/0")
    scenario.tell("trainer/0", m.Bye())
    scenario.heard("rollout/0")
    scenario.acquire("rollout/0", timeout_s=5.0)
    scenario.join("fresh/0")
    scenario.acquire("fresh/0")
    scenario.wait(6)
    assert scenario.heard("rollout/0") == ["refused NotPublished"]  # it has seen 2
    assert scenario.heard("fresh/0") == [f"read 1 {CHECKPOINT} 0<-old/0"]


def test_other_bytes_under_a_published_version_are_refused(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join("twin/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("twin/0", 1, root=b"something else..")
    assert scenario.heard("twin/0") == ["refused UsageError"]
    scenario.publish("twin/0", 1)  # the same bytes are welcome
    assert scenario.heard("twin/0") == []


# --- rule 1: leases and unpublish ---


def test_unpublish_waits_for_its_reader_and_grants_nothing_new(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join("peer/0")
    scenario.join("rollout/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("trainer/0", 2)
    lease = scenario.acquire("rollout/0", version=1)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0") == []
    scenario.acquire("peer/0", version=1, timeout_s=1.0)
    scenario.wait(2)
    assert scenario.heard("peer/0") == ["refused VersionGone"]
    scenario.tell("rollout/0", m.Release(lease))
    assert scenario.heard("trainer/0") == ["unpublished"]


def test_a_publish_that_its_own_unpublish_has_overtaken_brings_nothing_back(scenario: Scenario) -> None:
    scenario.join("a/0")
    scenario.join("b/0")
    for name in ("a/0", "b/0"):
        scenario.publish(name, 1)
    held = scenario.hub.workers[scenario.sessions["a/0"]].holdings[ShardKey(1, CHECKPOINT)]
    late = m.Publish(scenario.requests["a/0"] + 1, m.Holding(held.key, held.root, held.size_bytes))
    scenario.requests["a/0"] += 1
    scenario.unpublish("a/0", 1)
    scenario.tell("a/0", late)
    assert scenario.heard("a/0") == ["unpublished"] and not scenario.hub.workers[scenario.sessions["a/0"]].holdings
    scenario.publish("a/0", 1)  # asked after it: this one is meant
    assert scenario.hub.workers[scenario.sessions["a/0"]].holdings


def test_the_last_checkpoint_stays_though_an_engine_has_the_version_in_its_own_layout(scenario: Scenario) -> None:
    """Another engine could not read that. On a node that may be taken away nothing else would keep it."""
    scenario.join("trainer/0", preemptible=True)
    scenario.join("rollout/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("rollout/0", 1, RUNTIME)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0") == ["keep it"]
    scenario.unpublish("rollout/0", 1, RUNTIME)
    assert scenario.heard("rollout/0") == ["unpublished"]


@pytest.mark.parametrize(("again", "left"), [(True, [1, 2]), (False, [2])])
def test_an_unpublish_that_comes_late_does_not_mean_what_is_offered_since(
    scenario: Scenario, again: bool, left: list[int]
) -> None:
    scenario.join("a/0")
    scenario.join("b/0")
    scenario.publish("a/0", 1)
    for version in (1, 2):
        scenario.publish("b/0", version)
    scenario.requests["a/0"] += 1  # asked twice; the first one takes longer on the way
    scenario.unpublish("a/0", 1)
    if again:
        scenario.publish("a/0", 1)
    late = m.Unpublish(scenario.requests["a/0"] - 1 - again, (ShardKey(1, CHECKPOINT),), 30.0)
    scenario.tell("b/0", m.Unpublish(9, (ShardKey(1, CHECKPOINT),), 30.0))
    scenario.tell("a/0", late)
    assert scenario.heard("a/0") == ["unpublished", "unpublished"]
    versions = scenario.hub.registry.histories["run", "actor"].versions
    assert [number for number, version in versions.items() if version.visible] == left


def test_unpublish_ends_at_its_deadline_and_names_who_was_cut_off(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join("rollout/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("trainer/0", 2)
    scenario.acquire("rollout/0", version=1)
    scenario.unpublish("trainer/0", 1, timeout_s=5.0)
    scenario.wait(4.5)
    assert scenario.heard("trainer/0") == []
    scenario.wait(1)
    assert scenario.heard("trainer/0") == ["unpublished cut off rollout/0"]
    assert not scenario.hub.workers[scenario.sessions["rollout/0"]].leases
    assert not scenario.hub.workers[scenario.sessions["trainer/0"]].readers


def test_a_lost_reader_or_an_expired_lease_does_not_hold_unpublish_up(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join_all("dies/0", "sleeps/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("trainer/0", 2)
    scenario.acquire("dies/0", version=1)
    scenario.acquire("sleeps/0", version=1, timeout_s=3.0)
    scenario.unpublish("trainer/0", 1)
    scenario.wait(4)
    scenario.tell("dies/0", m.Bye())
    assert scenario.heard("trainer/0") == ["unpublished"]


def test_a_heartbeat_that_does_not_name_a_lease_ends_it(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join("rollout/0")
    scenario.publish("trainer/0", 1)
    lease = scenario.acquire("rollout/0", version=1)
    scenario.tell("rollout/0", m.Heartbeat(scenario.hub.session, last_request_id=lease, leases={lease: 1}))
    assert report(scenario.hub.registry, scenario.now)["models"][0]["leases"]
    scenario.tell(
        "rollout/0", m.Heartbeat(scenario.hub.session, last_request_id=lease - 1)
    )  # sent before: says nothing of it
    assert report(scenario.hub.registry, scenario.now)["models"][0]["leases"]
    scenario.tell("rollout/0", m.Heartbeat(scenario.hub.session, last_request_id=lease))  # its Release was lost
    assert not report(scenario.hub.registry, scenario.now)["models"][0]["leases"]


# --- rule 4: retention ---


def test_the_last_copy_of_the_newest_version_is_kept_until_a_newer_one_is_visible(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0") == ["keep it"]
    scenario.join("rollout/0")
    scenario.acquire("rollout/0")
    assert scenario.heard("rollout/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]
    scenario.tell("trainer/0", m.Heartbeat(scenario.hub.session))
    assert scenario.heard("trainer/0") == ["Alive"]
    scenario.publish("trainer/0", 2)
    scenario.tell("trainer/0", m.Heartbeat(scenario.hub.session))
    assert scenario.heard("trainer/0") == ["Alive", "may release 1"]


def test_the_last_checkpoint_copy_is_kept_even_when_a_runtime_copy_is_left(scenario: Scenario) -> None:
    """Only the checkpoint layout can be read by an engine of another build."""
    scenario.join("trainer/0")
    scenario.join("a/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("a/0", 1, RUNTIME)
    scenario.unpublish("a/0", 1, RUNTIME)
    assert scenario.heard("a/0") == ["unpublished"]
    scenario.publish("a/0", 1, RUNTIME)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0") == ["keep it"]


def test_a_copy_that_another_holds_too_is_not_kept(scenario: Scenario) -> None:
    for name in ("trainer/0", "a/0"):
        scenario.join(name)
        scenario.publish(name, 1)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0") == ["unpublished"]


def test_retain_counts_versions(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.say("trainer/0", m.Retain, newest=2)
    for version in (1, 2, 3):
        scenario.publish("trainer/0", version)
    for version in (1, 2, 3):
        scenario.unpublish("trainer/0", version)
    assert scenario.heard("trainer/0") == ["unpublished", "keep it", "keep it"]


# --- rule 4: failure domains, and workers that may be taken away ---


def place(host: str, rack: str = "") -> Location:
    return Location("dc", rack, host)


def kept(scenario: Scenario, worker: str) -> bool:
    scenario.unpublish(worker, 1)
    (answer,) = scenario.heard(worker)
    assert answer in ("keep it", "unpublished")
    return answer == "keep it"


@pytest.mark.parametrize(
    ("domains", "across", "stays"), [(1, "host", 1), (2, "host", 2), (2, "rack", 1), (16, "host", 2)]
)
def test_copies_stay_in_as_many_failure_domains_as_are_wanted(
    scenario: Scenario, domains: int, across: str, stays: int
) -> None:
    """The first row is the control: the last copy only. On two hosts of one rack, one of them with two workers."""
    workers = {"trainer/0": place("a", "r"), "x/0": place("b", "r"), "y/0": place("b", "r")}
    for worker, location in workers.items():
        scenario.join(worker, location=location)
        scenario.publish(worker, 1, origin="published" if worker == "trainer/0" else "replicated")
    scenario.say("trainer/0", m.Retain, newest=1, domains=domains, across=across)
    assert [kept(scenario, worker) for worker in workers].count(True) == stays
    left = {h.worker.hello.location for w in scenario.hub.workers.values() for h in w.holdings.values()}
    assert len(left) == stays


def test_a_copy_is_let_go_when_its_domain_has_another(scenario: Scenario) -> None:
    for worker, host in (("trainer/0", "a"), ("x/0", "b"), ("y/0", "a")):
        scenario.join(worker, location=place(host))
    scenario.say("trainer/0", m.Retain, newest=1, domains=2)
    scenario.publish("trainer/0", 1)
    scenario.publish("x/0", 1, origin="replicated")
    assert kept(scenario, "trainer/0")
    beat = m.Heartbeat(scenario.hub.session, scenario.requests["trainer/0"])
    scenario.tell("trainer/0", beat)
    assert scenario.heard("trainer/0") == ["Alive"]
    scenario.publish("y/0", 1, origin="replicated")
    scenario.tell("trainer/0", beat)
    assert scenario.heard("trainer/0") == ["Alive", "may release 1"]


@pytest.mark.parametrize("preemptible", [True, False])
def test_a_copy_that_may_be_taken_away_is_none(scenario: Scenario, preemptible: bool) -> None:
    scenario.join("trainer/0", location=place("a"))
    scenario.join("spot/0", location=place("b"), preemptible=preemptible)
    scenario.publish("trainer/0", 1)
    scenario.publish("spot/0", 1, origin="replicated")
    assert kept(scenario, "trainer/0") is preemptible
    assert kept(scenario, "spot/0") is not preemptible  # the control: it is the last one


def test_one_more_version_is_retained_beside_the_newest(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    for version in (1, 2, 3):
        scenario.publish("trainer/0", version)
    (history,) = scenario.hub.registry.histories.values()
    assert history.retained() == {3}
    scenario.say("trainer/0", m.Retain, newest=1, also=1)
    assert history.retained() == {1, 3}
    assert kept(scenario, "trainer/0")
    scenario.unpublish("trainer/0", 2)
    assert scenario.heard("trainer/0") == ["unpublished"]
    scenario.say("trainer/0", m.Retain, newest=1, also=9)  # which is not there yet
    assert history.retained() == {3}


def test_what_is_to_be_kept_outlives_the_hub() -> None:
    scenario = Scenario(recovering=True)
    scenario.join("trainer/0", retain_newest=3, retain_domains=2, retain_across="rack")
    model = report(scenario.hub.registry, scenario.now)["models"][0]
    assert [model[name] for name in ("retain_newest", "retain_domains", "retain_across")] == [3, 2, "rack"]


def kept_by(scenario: Scenario) -> list[object]:
    model = report(scenario.hub.registry, scenario.now)["models"][0]
    return [model[name] for name in ("retain_newest", "retain_domains", "retain_across")]


def test_who_says_hello_again_takes_back_nothing_that_others_have_asked_for_since(scenario: Scenario) -> None:
    """A worker that was away says what it wanted retained; the control: it asks anew."""
    scenario.join("trainer/0")
    scenario.join("operator/0")
    scenario.say("trainer/0", m.Retain, newest=1)
    scenario.say("operator/0", m.Retain, newest=3, domains=2, across="rack")
    assert [reply.serial for who in ("trainer/0", "operator/0") for reply in scenario.inbox[who][-1:]] == [1, 2]
    scenario.join("trainer/0", retain_newest=1, retain_serial=1, request_id=9)
    assert kept_by(scenario) == [3, 2, "rack"]
    scenario.requests["trainer/0"] = 9
    scenario.say("trainer/0", m.Retain, newest=1)
    assert kept_by(scenario) == [1, 1, "host"]


@pytest.mark.parametrize("last", ["trainer/0", "operator/0"])
def test_a_hub_that_was_restarted_believes_the_last_word_whoever_says_it_first(last: str) -> None:
    scenario = Scenario(recovering=True)
    said = {"trainer/0": (1, 1, "host", 1), "operator/0": (3, 2, "rack", 2)}
    names = ("retain_newest", "retain_domains", "retain_across", "retain_serial")
    for worker in sorted(said, key=lambda worker: worker == last):
        scenario.join(worker, **dict(zip(names, said[worker], strict=True)))
    assert kept_by(scenario) == [3, 2, "rack"]


# --- what is published has a budget ---


def test_who_holds_too_much_is_named_in_the_log_and_the_status() -> None:
    scenario = Scenario(limits=HubLimits(published_bytes_max=250))
    scenario.join_all("trainer/0", "small/0", "reader/0")
    scenario.say("trainer/0", m.Retain, newest=9)

    def said() -> list[str]:
        return [line for line in scenario.logged if "above the budget" in line]

    def model() -> dict[str, Any]:
        return report(scenario.hub.registry, scenario.now)["models"][0]

    scenario.publish("small/0", 1)
    scenario.publish("trainer/0", 2)
    scenario.publish("reader/0", 2, origin="replicated")  # what was read is its reader's
    assert not said() and model()["over_budget"] == [] and model()["bytes_published"] == 200
    for version in (3, 4):
        scenario.publish("trainer/0", version)
    (line,) = said()  # once
    assert "run/actor: its trainers hold 0.0 MB published" in line and "trainer/0 0.0 MB of 2 versions, small/0" in line
    assert model()["over_budget"] == [
        {"worker": "trainer/0", "bytes": 300, "versions": 3},
        {"worker": "small/0", "bytes": 100, "versions": 1},
    ]
    scenario.unpublish("trainer/0", 4)
    assert model()["bytes_retained"] == 100 and model()["bytes_published"] == 400
    assert "small/0 0.0 MB of 1 versions" in status_text({**report(scenario.hub.registry, 0.0)})
    scenario.tell("trainer/0", m.Bye())
    scenario.publish("small/0", 5)
    assert model()["over_budget"] == [] and model()["bytes_published"] == 200
    scenario.publish("small/0", 6)
    assert len(said()) == 2  # it was kept meanwhile


# --- a number means the same bytes for good ---


@pytest.mark.parametrize("layout", [CHECKPOINT, RUNTIME])
def test_who_starts_again_publishes_no_other_bytes_under_a_number_that_was_visible(layout: str) -> None:
    """Also when nobody holds that version any more: who has read it has other bytes of that name."""
    scenario = Scenario()
    scenario.join_all("trainer/0", "rollout/0")
    scenario.publish("trainer/0", 1, layout)
    scenario.publish("trainer/0", 2, layout)
    scenario.unpublish("trainer/0", 1, layout)
    history = scenario.hub.registry.histories["run", "actor"]
    assert list(history.versions) == [2] and history.roots_count == len(history.roots[1]) == 1
    scenario.tell("trainer/0", m.Bye())
    scenario.sessions["trainer/0"] = b"again".ljust(16)  # and begins no attempt
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1, layout, root=b"others".ljust(16))
    answer = scenario.inbox["trainer/0"][-1]
    assert isinstance(answer, m.Refused) and "other bytes are already published" in answer.message
    scenario.publish("trainer/0", 1, layout)  # the same
    assert isinstance(scenario.inbox["trainer/0"][-1], m.Done) and history.is_visible(1)
    scenario.unpublish("trainer/0", 1, layout)
    scenario.publish("trainer/0", 2, layout)
    scenario.unpublish("trainer/0", 1, layout)
    assert history.roots_count == sum(map(len, history.roots.values()))


@pytest.mark.parametrize("held", [True, False], ids=["held", "forgotten"])
def test_who_starts_again_with_other_ranks_publishes_nothing_under_a_number_that_was_visible(held: bool) -> None:
    """Nobody can compare what is cut in another way. The controls: a version that nobody has seen, what is read and
    passed on, and a layout of an engine's own."""
    scenario = Scenario()
    for worker, count in (("trainer/0", 1), ("rollout/0", 1), ("next/0", 2), ("next/1", 2)):
        scenario.join(worker, count)
    scenario.publish("trainer/0", 1)
    if held:
        scenario.publish("rollout/0", 1, origin="replicated")
    scenario.publish("trainer/0", 2)
    scenario.unpublish("trainer/0", 1)
    assert (1 in scenario.hub.registry.histories["run", "actor"].versions) is held
    scenario.publish("next/0", 1)
    answer = scenario.inbox["next/0"][-1]
    assert isinstance(answer, m.Refused) and "version 1 was published in 1 shards" in answer.message
    for version, layout, origin in (
        (1, RUNTIME, "published"),
        (1, CHECKPOINT, "replicated"),
        (3, CHECKPOINT, "published"),
    ):
        scenario.publish("next/1", version, layout, origin=origin)
        assert isinstance(scenario.inbox["next/1"][-1], m.Done)


def test_a_number_that_nobody_has_seen_is_free_when_its_last_holder_has_taken_it_back() -> None:
    """One shard of two: never visible, so that nobody can have read it."""
    scenario = Scenario()
    for shard in (0, 1):
        scenario.join(f"trainer/{shard}", 2)
    scenario.publish("trainer/0", 1)
    scenario.publish("trainer/0", 1, root=b"others".ljust(16))
    assert scenario.heard("trainer/0") == ["refused UsageError"]
    scenario.say("trainer/0", m.Unpublish, keys=(ShardKey(1, CHECKPOINT, 0, 2),), timeout_s=0.0, gone=True)
    scenario.publish("trainer/0", 1, root=b"others".ljust(16))
    scenario.publish("trainer/1", 1)
    assert scenario.heard("trainer/0") == ["unpublished"]
    assert scenario.hub.registry.histories["run", "actor"].is_visible(1)


def test_no_more_roots_are_kept_than_there_is_room_for() -> None:
    history, shards = state.History("run", "actor"), state.ROOTS_KEPT_MAX // 2
    for number in (1, 2, 3):
        version = history.version(number, 0.0)
        version.was_visible = True
        version.contents.update({(CHECKPOINT, shards, shard): (b"r" * 16, 100) for shard in range(shards)})
        history.forget_version(number)
    assert list(history.roots) == [2, 3] and history.roots_count == 2 * shards


def test_who_holds_a_version_brings_its_root_back_to_a_restarted_hub() -> None:
    scenario = Scenario()
    scenario.join("rollout/0", holdings=(m.Holding(ShardKey(1, CHECKPOINT), b"1" * 16, 100, True, "replicated"),))
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1, root=b"others".ljust(16))
    assert scenario.heard("trainer/0") == ["refused UsageError"]


@pytest.mark.parametrize(("number", "role"), [(1, "publisher"), (1, "reader"), (2, "publisher")])
@pytest.mark.parametrize("holder", ["with other bytes", "with the same bytes", "never heard"])
def test_what_somebody_has_seen_is_not_published_anew_before_its_holder_was_heard(number, role, holder):
    """After a restart of the hub; by a trainer that does not begin. The controls: what nobody has seen is, at once, or
    a reader alone: it bars no trainer."""
    story = Scenario(recovering=True)
    story.roles["rollout/0"] = role
    story.join("rollout/0", seen=1, hub=story.hub.session)
    story.join("trainer/0")
    story.publish("trainer/0", number, root=b"new".ljust(16, b"!"))
    answers = [type(said) for said in story.inbox.pop("trainer/0") if not isinstance(said, m.Welcome)]
    waits = number == 1 and role == "publisher"
    assert answers == ([] if waits else [m.Done])
    if not waits:
        return
    if holder != "never heard":
        root = b"new".ljust(16, b"!") if "same" in holder else b"old".ljust(16, b"!")
        story.join("old/0", holdings=(m.Holding(ShardKey(1, CHECKPOINT), root, 100),), hub=story.hub.session)
    else:
        story.wait(story.hub.limits.grace_s + 0.5)
    story.beat("trainer/0", pending=(1,))
    resent = [said.resend for said in story.inbox.pop("trainer/0") if isinstance(said, m.Alive) and said.resend]
    assert resent == [(1,)]
    story.requests["trainer/0"] = 0
    story.publish("trainer/0", 1, root=b"new".ljust(16, b"!"))
    assert story.heard("trainer/0") == (["refused UsageError"] if "other" in holder else [])
    assert story.hub.registry.histories["run", "actor"].is_visible(1)
