"""What operators decide and what followers then run, as stories."""

from __future__ import annotations

import pytest
from hub_scenarios import LIMITS, RUNTIME, Scenario

from tensorhub_plugins.core.cli import status_text
from tensorhub_plugins.core.client.arguments import check_target
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, WITHDRAWN_MAX, Directive, directive_checksum
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


def operators_scene(scenario: Scenario, *versions: int) -> None:
    """Versions that the trainer holds, a rollout that has seen the newest, and an operator."""
    scenario.join_all("trainer/0", "rollout/0", "operator/0")
    scenario.say("trainer/0", m.Retain, newest=len(versions))
    for version in versions:
        scenario.publish("trainer/0", version)
    scenario.tell("rollout/0", m.Release(scenario.acquire("rollout/0")))
    scenario.heard("rollout/0")


def direct(scenario: Scenario, kind: type, version: int, by: str = "operator/0") -> list[str]:
    """What the operator is answered; the directive itself left out."""
    scenario.inbox.clear()
    scenario.say(by, kind, version=version, timeout_s=5.0)
    return [text for text in scenario.heard(by) if text != "Alive"]


def directive(scenario: Scenario) -> Directive:
    return scenario.hub.registry.histories["run", "actor"].directive


def targets(scenario: Scenario, installed: int, worker: str = "rollout/0", **more: object) -> list[str]:
    """What a follower hears at once, or by the end of its patience."""
    scenario.inbox.pop(worker, None)
    scenario.say(worker, m.Target, installed=installed, timeout_s=2.0, **more)
    scenario.wait(3.0)
    return [text for text in scenario.heard(worker) if text != "Alive"]


def test_what_a_follower_cannot_install_is_shown_with_why(scenario: Scenario) -> None:
    def shown() -> object:
        said = report(scenario.hub.registry, 0.0)["models"][0]["workers"]  # type: ignore[index]
        return next(worker["refuses"] for worker in said if worker["worker"] == "rollout/0")

    why = "no tensor 'a'\n  worker forged"
    operators_scene(scenario, 1, 2)
    assert targets(scenario, 1) == ["visible 2"] and shown() is None
    assert targets(scenario, 1, refused=(1, 2), why=why) == ["refused NotPublished"]
    assert shown() == {"version": 2, "attempt": 0, "step": 2, "why": why}
    scenario.say("rollout/0", m.Target, installed=2, timeout_s=0.0)  # what else is there, for who is asked for 2
    assert shown() is not None
    text = status_text({**report(scenario.hub.registry, 0.0)})
    assert r"    it cannot install version 2: no tensor 'a'\n  worker forged" in text
    assert targets(scenario, 3, refused=(1, 2), why="no tensor 'a'") == ["refused NotPublished"]
    assert shown() is None and "cannot install" not in status_text({**report(scenario.hub.registry, 0.0)})
    scenario.say("rollout/0", m.Target, installed=3, timeout_s=0.0, refused=(4,))  # of an earlier version of clients
    assert "    it cannot install version 4: its log says why" in status_text({**report(scenario.hub.registry, 0.0)})
    assert targets(scenario, 4) == ["refused NotPublished"] and shown() is None


def test_why_a_version_is_refused_may_be_anything() -> None:
    assert check_target(0, (1, 2), pins=True) == ((1, 2), "")
    assert check_target(0, {}, pins=True) == ((), "")
    assert check_target(0, {2: "newest", 1: "older"}, pins=True) == ((2, 1), "newest")
    assert check_target(0, {1: "no file \udcff"}, pins=True)[1] == "no file ?"
    assert check_target(0, {1: ValueError("x" * 10_000)}, pins=True)[1] == "x" * 1000


def test_latest_is_the_pinned_version_also_for_who_has_seen_a_newer_one(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    scenario.acquire("rollout/0", version=0, at_least=2, timeout_s=0.0)
    assert scenario.heard("rollout/0") == [f"read 2 {CHECKPOINT} 0<-trainer/0"]  # the control
    assert direct(scenario, m.Pin, 1) == []
    scenario.publish("trainer/0", 3)  # visible, and nobody follows it
    scenario.inbox.clear()
    scenario.acquire("rollout/0", version=0, at_least=2, timeout_s=0.0)
    scenario.say("rollout/0", m.Wait, version=0, newer_than=0, timeout_s=0.0)
    scenario.say("rollout/0", m.Wait, version=0, newer_than=1, timeout_s=0.0)
    scenario.say("rollout/0", m.Wait, version=3, newer_than=0, timeout_s=0.0)  # by its number it can be had
    heard = [f"read 1 {CHECKPOINT} 0<-trainer/0", "visible 1", "refused NotPublished", "visible 3"]
    assert scenario.heard("rollout/0") == heard
    assert targets(scenario, 2) == ["visible 1"] and targets(scenario, 1) == ["refused NotPublished"]
    assert targets(scenario, 1, pins=False) == ["visible 3"]
    assert direct(scenario, m.Pin, 0) == []
    scenario.acquire("rollout/0", version=0, timeout_s=0.0)
    assert scenario.heard("rollout/0")[-1] == f"read 3 {CHECKPOINT} 0<-trainer/0"
    assert targets(scenario, 1) == ["visible 3"]


def test_a_reading_group_agrees_though_a_pin_comes_in_between(scenario: Scenario) -> None:
    for name in ("trainer", "rollout"):
        scenario.join(f"{name}/0", 2)
        scenario.join(f"{name}/1", 2)
    scenario.say("trainer/0", m.Retain, newest=2)
    for version in (1, 2):
        for shard in (0, 1):
            scenario.publish(f"trainer/{shard}", version, RUNTIME)
    scenario.acquire("rollout/0", layouts=(RUNTIME,))
    direct(scenario, m.Pin, 1, by="trainer/0")
    scenario.acquire("rollout/1", layouts=(RUNTIME,), at_least=1)
    assert scenario.heard("rollout/1") == ["Alive", f"read 2 {RUNTIME} 1<-trainer/1"]
    scenario.acquire("rollout/1", layouts=(RUNTIME,), at_least=2)  # the next round goes back, in all shards
    scenario.acquire("rollout/0", layouts=(RUNTIME,), at_least=2)
    assert scenario.heard("rollout/1") == [f"read 1 {RUNTIME} 1<-trainer/1"]
    assert scenario.heard("rollout/0")[-1] == f"read 1 {RUNTIME} 0<-trainer/0"


def test_only_a_version_that_is_held_can_be_pinned(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    scenario.publish("trainer/0", 5, complete=False)
    for version in (5, 9):
        assert direct(scenario, m.Pin, version) == ["refused UsageError"]
    assert "version 9 cannot be pinned because no worker holds it; held: [1, 2]" in scenario.logged[-1]
    assert directive(scenario) == NO_DIRECTIVE


def test_the_last_copy_of_a_pinned_version_is_kept(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    scenario.say("trainer/0", m.Retain, newest=1)
    direct(scenario, m.Pin, 1)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0")[-1] == "keep it"
    direct(scenario, m.Pin, 0)
    scenario.tell("trainer/0", m.Heartbeat(scenario.hub.session))
    assert "may release 1" in scenario.heard("trainer/0")  # the control: it was the pin that kept it


def test_a_pinned_version_that_is_lost_moves_nobody_and_says_so(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    scenario.join("old/0")
    scenario.publish("old/0", 3)
    direct(scenario, m.Pin, 3)
    scenario.tell("old/0", m.Bye())
    assert targets(scenario, 2) == ["refused VersionGone"]
    assert direct(scenario, m.Pin, 0) == [] and targets(scenario, 1) == ["visible 2"]
    operators = report(scenario.hub.registry, scenario.now)["models"][0]
    assert (operators["pinned"], operators["withdrawn"]) == (None, [])


def test_a_withdrawn_version_cannot_be_had_and_who_runs_it_returns(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    scenario.join("waiting/0")
    scenario.acquire("waiting/0", layouts=(RUNTIME,), version=2)
    assert direct(scenario, m.Withdraw, 2) == []
    assert scenario.heard("waiting/0") == ["Alive", "refused VersionGone"]
    scenario.inbox.clear()
    scenario.acquire("rollout/0", version=2)
    scenario.say("rollout/0", m.Wait, version=2, newer_than=0, timeout_s=60.0)
    scenario.acquire("rollout/0", at_least=2)
    assert scenario.heard("rollout/0") == ["refused VersionGone"] * 2 + [f"read 1 {CHECKPOINT} 0<-trainer/0"]
    assert targets(scenario, 2) == ["visible 1"] and targets(scenario, 1) == ["refused NotPublished"]
    assert report(scenario.hub.registry, scenario.now)["models"][0]["withdrawn"] == [2]
    scenario.publish("trainer/0", 3)
    assert targets(scenario, 2) == ["visible 3"]


def test_without_a_word_of_an_operator_no_follower_goes_back(scenario: Scenario) -> None:
    """The control of the others: version 2 is lost, which is no reason to leave it."""
    operators_scene(scenario, 1)
    scenario.join("other/0")
    scenario.publish("other/0", 2)
    scenario.tell("other/0", m.Bye())
    assert targets(scenario, 2) == ["refused NotPublished"] and targets(scenario, 0) == ["visible 1"]


def test_with_nothing_to_return_to_a_follower_stays_and_hears_why(scenario: Scenario) -> None:
    operators_scene(scenario, 1)
    direct(scenario, m.Withdraw, 1)
    assert targets(scenario, 1) == ["refused VersionGone"]
    assert targets(scenario, 0) == ["refused NotPublished"]


def test_a_withdrawn_version_is_not_published_again(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    direct(scenario, m.Withdraw, 2)
    scenario.join("twin/0")
    scenario.publish("twin/0", 2)
    assert scenario.heard("twin/0") == ["refused UsageError"] and "publish under a higher number" in scenario.logged[-1]
    scenario.publish("twin/0", 2, origin="replicated")  # it has just finished reading it: the truth, and no more
    assert scenario.heard("twin/0") == [] and not scenario.hub.registry.histories["run", "actor"].versions[2].visible
    scenario.unpublish("trainer/0", 2)
    scenario.unpublish("twin/0", 2)
    assert scenario.heard("twin/0") == ["unpublished"]  # bad versions are not retained
    scenario.publish("trainer/0", 2)
    assert scenario.heard("trainer/0")[-1] == "refused UsageError"


def test_what_is_withdrawn_while_its_shards_come_never_appears(scenario: Scenario) -> None:
    """An operator's no counts for the shards that are on their way; those who publish them did nothing wrong."""
    scenario.join_all("trainer/0", "trainer/1", "twin/1", "operator/0", shard_count=2)
    scenario.publish("trainer/0", 1)
    assert direct(scenario, m.Withdraw, 1) == [] and directive(scenario).withdrawn == (1,)
    scenario.publish("twin/1", 1)
    assert scenario.heard("twin/1")[-1] == "refused UsageError"  # another replica
    scenario.publish("trainer/1", 1)
    assert scenario.heard("trainer/1") == ["Alive"]
    assert not scenario.hub.registry.histories["run", "actor"].versions[1].was_visible
    for rank in ("trainer/0", "trainer/1"):
        scenario.unpublish(rank, 1)
        assert scenario.heard(rank)[-1] == "unpublished"
    scenario.publish("trainer/1", 1)
    assert scenario.heard("trainer/1") == ["refused UsageError"]


def test_the_lease_on_a_withdrawn_version_ends_with_the_readers_word(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    lease = scenario.acquire("rollout/0")
    direct(scenario, m.Withdraw, 2)
    (told,) = [message for message in scenario.inbox["rollout/0"] if isinstance(message, m.Alive)]
    assert told.directive == directive(scenario) and told.directive.withdrawn == (2,)
    scenario.unpublish("trainer/0", 2)
    assert "unpublished" not in scenario.heard("trainer/0")  # it still reads
    scenario.tell("rollout/0", m.Release(lease))
    assert scenario.heard("trainer/0") == ["unpublished"]


def test_a_pin_ends_with_the_withdrawal_of_its_version(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    direct(scenario, m.Pin, 1)
    direct(scenario, m.Withdraw, 1)
    assert (directive(scenario).pin, directive(scenario).withdrawn) == (0, (1,))
    assert direct(scenario, m.Pin, 1) == ["refused UsageError"] and "was withdrawn" in scenario.logged[-1]
    assert targets(scenario, 1) == ["visible 2"]


def test_what_was_never_published_cannot_be_withdrawn(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    assert direct(scenario, m.Withdraw, 3) == ["refused UsageError"] and "never published" in scenario.logged[-1]
    scenario.unpublish("trainer/0", 1)
    assert direct(scenario, m.Withdraw, 1) == []  # gone already, and it shall not come back


def test_the_same_word_twice_changes_nothing_but_a_pin_is_a_new_decision(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    direct(scenario, m.Pin, 0)
    assert directive(scenario).serial == 0
    for kind, version, serial in ((m.Withdraw, 2, 1), (m.Withdraw, 2, 1), (m.Pin, 1, 2), (m.Pin, 1, 3), (m.Pin, 0, 4)):
        assert direct(scenario, kind, version) == []
        assert directive(scenario).serial == serial
    direct(scenario, m.Pin, 0)
    assert directive(scenario) == Directive(4, 0, (2,))


def test_two_operators_pin_at_once_and_the_last_word_counts_for_everybody(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2, 3)
    scenario.join("other/0")
    scenario.say("operator/0", m.Pin, version=1, timeout_s=5.0)
    scenario.say("other/0", m.Pin, version=2, timeout_s=5.0)
    for name in ("operator/0", "other/0", "rollout/0", "trainer/0"):
        known = [message.directive for message in scenario.inbox[name] if isinstance(message, m.Alive)]
        assert known[-1] == directive(scenario) == Directive(2, 2)


def test_a_refused_version_is_passed_over_until_it_is_pinned_again(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2, 3)
    assert targets(scenario, 1, refused=(3,)) == ["visible 2"] and targets(scenario, 1) == ["visible 3"]
    assert targets(scenario, 2, refused=(3,)) == ["refused NotPublished"]
    direct(scenario, m.Withdraw, 2)  # it returns past what it cannot install
    assert targets(scenario, 2, refused=(3,)) == ["visible 1"]
    serial = directive(scenario).serial
    direct(scenario, m.Pin, 3)
    assert targets(scenario, 1, refused=(3,), serial=serial) == ["visible 3"]
    assert targets(scenario, 1, refused=(3,), serial=serial + 1) == ["refused NotPublished"]  # refused under this pin
    direct(scenario, m.Pin, 3)
    assert targets(scenario, 1, refused=(3,), serial=serial + 1) == ["visible 3"]


def test_a_restarted_hub_has_the_directive_with_the_first_hello_and_the_highest_serial_counts() -> None:
    scenario = Scenario(recovering=True)
    here = m.Holding(ShardKey(2, CHECKPOINT), b"r" * 16, 100)
    old = m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 100)
    scenario.join("late/0", directive=Directive(1, 0, (2,)))  # was away when version 1 was pinned
    scenario.join("a/0", holdings=(here, old), directive=Directive(7, 1, ()))
    assert directive(scenario) == Directive(7, 1, (2,))  # and what was withdrawn stays so
    assert "Alive" in scenario.heard("late/0")
    scenario.acquire("late/0")
    assert scenario.heard("late/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]
    scenario.join("b/0", directive=Directive(3, 2, ()))
    assert directive(scenario) == Directive(7, 1, (2,)) and scenario.heard("late/0") == []
    (welcome,) = scenario.inbox["b/0"]
    assert isinstance(welcome, m.Welcome) and welcome.directive == directive(scenario)


def test_a_restarted_hub_takes_directives_when_it_has_heard_everybody() -> None:
    scenario = Scenario(recovering=True)
    scenario.join("operator/0")
    scenario.join("a/0", holdings=(m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 100),))
    scenario.say("operator/0", m.Pin, version=1, timeout_s=60.0)
    scenario.say("operator/0", m.Pin, version=1, timeout_s=0.1)
    scenario.wait(LIMITS.grace_s - 0.5)
    assert scenario.heard("operator/0") == ["refused DeadlineExceeded"] and directive(scenario).pin == 0
    scenario.join("b/0", directive=Directive(5, 0, (3,)))
    scenario.wait(1.0)
    assert directive(scenario) == Directive(6, 1, (3,))  # it came after the one that b had


def test_a_restarted_hub_sends_nobody_back_before_it_has_heard_everybody() -> None:
    scenario = Scenario(recovering=True)
    scenario.join("rollout/0", directive=Directive(1, 0, (7,)))
    scenario.join("old/0", holdings=(m.Holding(ShardKey(5, CHECKPOINT), b"r" * 16, 100),))
    scenario.say("rollout/0", m.Target, installed=7, timeout_s=60.0)
    scenario.wait(1.0)
    assert scenario.heard("rollout/0") == []
    scenario.say("rollout/0", m.Target, installed=7, timeout_s=0.0)
    assert scenario.heard("rollout/0") == ["refused NotPublished"]  # not that there is none
    scenario.join("newer/0", holdings=(m.Holding(ShardKey(6, CHECKPOINT), b"r" * 16, 100),))
    scenario.wait(LIMITS.grace_s)
    assert scenario.heard("rollout/0") == ["visible 6"]


def test_a_restarted_hub_does_not_say_that_there_is_no_version_before_it_has_heard_everybody() -> None:
    scenario = Scenario(recovering=True)
    scenario.join("rollout/0")
    scenario.say("rollout/0", m.Target, installed=0, timeout_s=0.0)
    assert scenario.heard("rollout/0") == ["refused DeadlineExceeded"]  # an engine would go on with what it began with
    scenario.wait(LIMITS.grace_s)
    scenario.say("rollout/0", m.Target, installed=0, timeout_s=0.0)
    assert scenario.heard("rollout/0") == ["refused NotPublished"]


def test_a_heartbeat_makes_up_for_a_directive_that_was_lost(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    direct(scenario, m.Pin, 1)
    for mark, told in (
        (directive_checksum(NO_DIRECTIVE), directive(scenario)),
        (directive_checksum(directive(scenario)), None),
        (0, None),  # a worker that is older than directives
    ):
        scenario.inbox.clear()
        scenario.tell("rollout/0", m.Heartbeat(scenario.hub.session, directive_checksum=mark))
        (alive,) = scenario.inbox["rollout/0"]
        assert isinstance(alive, m.Alive) and alive.directive == told


def test_no_directive_is_given_that_could_not_be_sent(scenario: Scenario) -> None:
    operators_scene(scenario, 1, 2)
    scenario.join("one/0", directive=Directive(0, 0, tuple(range(3, 3 + WITHDRAWN_MAX))))
    assert direct(scenario, m.Withdraw, 1) == ["refused UsageError"] and "no more are remembered" in scenario.logged[-1]
    scenario.hub.registry.histories["run", "actor"].direct(Directive(SERIAL_MAX, 0, ()))
    assert direct(scenario, m.Pin, 1) == ["refused UsageError"] and "another run name" in scenario.logged[-1]


def test_a_claim_ends_with_its_version_and_once() -> None:
    story = Scenario()
    story.join("trainer/0")
    story.publish("trainer/0", 1)
    story.join("rollout/0")
    story.acquire("rollout/0", 1, (RUNTIME, CHECKPOINT), claim=True)
    worker = story.hub.registry.workers[story.sessions["rollout/0"]]
    assert list(worker.claims) == [ShardKey(1, RUNTIME)]
    story.say("trainer/0", m.Withdraw, version=1, timeout_s=1.0)
    assert not worker.claims
    story.tell("rollout/0", m.Bye())
