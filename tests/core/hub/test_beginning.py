"""Trainers that start again, their former lives, and what readers make of it, as stories."""

from __future__ import annotations

import pytest
from hub_scenarios import LIMITS, Scenario
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core.hub.following import MARKS_REFUSED_MAX
from tensorhub_plugins.core.hub.hub import Tick
from tensorhub_plugins.core.hub.permissions import believed, refusal
from tensorhub_plugins.core.hub.registry import MISSED_HEARTBEATS
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.state import check_of
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive
from tensorhub_plugins.core.protocol.lineage import (
    ATTEMPTS_KEPT_MAX,
    Attempt,
    Lineage,
    conflicts,
    is_superseded,
    merged,
)
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey, version_of

OLD, NEW = "trainer/0", "again/0"


@pytest.fixture
def scenario() -> Scenario:
    """A trainer of attempt 0 that has published 1 to 7, of which it holds three, and a rollout that has seen them."""
    scenario = Scenario()
    scenario.join_all(OLD, "rollout/0")
    begin(scenario, OLD)
    scenario.say(OLD, m.Retain, newest=3)
    for version in (5, 6, 7):
        scenario.publish(OLD, version)
    scenario.tell("rollout/0", m.Release(scenario.acquire("rollout/0")))
    scenario.inbox.clear()
    return scenario


def begin(scenario: Scenario, worker: str, step: int = 0, **more: object) -> list[str]:
    """What it is answered at once."""
    fields: dict[str, object] = {"timeout_s": 60.0, "waits": True, **more}
    scenario.say(worker, m.Begin, step=step, **fields)
    return answers(scenario, worker)


def answers(scenario: Scenario, worker: str) -> list[str]:
    return [text for text in scenario.heard(worker) if text != "Alive"]


def silence(scenario: Scenario, *workers: str) -> None:
    """They are not heard any more."""
    scenario.silent = (*scenario.silent, *workers)


def dies(scenario: Scenario, *workers: str) -> None:
    """They are silent until they are given up."""
    silence(scenario, *workers)
    scenario.wait(LIMITS.session_timeout_s + 1.0)
    scenario.inbox.clear()


def resumes(scenario: Scenario, step: int = 5) -> None:
    """The old trainer dies, and a new one begins."""
    dies(scenario, OLD)
    scenario.join(NEW)
    assert begin(scenario, NEW, step) == [f"attempt 1 at {step}"]


def test_the_first_attempt_of_all_has_plain_steps_for_versions(scenario: Scenario) -> None:
    fresh = Scenario()
    fresh.join(OLD)
    assert begin(fresh, OLD, 5) == ["attempt 0 at 5"]  # resumed, and nobody here remembers what was before
    assert report(fresh.hub.registry, fresh.now)["models"][0]["attempt"] == 0
    resumes(scenario)
    assert report(scenario.hub.registry, scenario.now)["models"][0]["attempt"] == 1


def test_what_the_former_attempt_made_above_the_step_is_superseded(scenario: Scenario) -> None:
    scenario.join("copy/0")
    for version in (5, 7):
        scenario.publish("copy/0", version, origin="replicated")
    assert report(scenario.hub.registry, scenario.now)["models"][0]["newest"] == 7
    resumes(scenario)
    scenario.acquire("rollout/0", version=7, timeout_s=0.0)
    scenario.acquire("rollout/0", at_least=7, timeout_s=0.0)  # it has seen 7, which is forgotten
    assert answers(scenario, "rollout/0") == ["refused VersionGone", f"read 5 {CHECKPOINT} 0<-copy/0"]


def test_a_lower_step_of_the_new_attempt_is_newer_than_all_before(scenario: Scenario) -> None:
    resumes(scenario)
    scenario.say("rollout/0", m.Wait, version=0, newer_than=7, timeout_s=60.0)
    scenario.say("rollout/0", m.Target, installed=7, timeout_s=60.0)
    new = version_of(1, 6)
    scenario.publish(NEW, new)
    scenario.acquire("rollout/0", at_least=7)
    assert answers(scenario, "rollout/0") == [f"visible {new}", f"visible {new}", f"read {new} {CHECKPOINT} 0<-{NEW}"]
    scenario.join("late/0")
    scenario.publish("late/0", 7, origin="replicated")  # the last word of a reader that has just read it
    scenario.acquire("rollout/0", version=7)
    assert answers(scenario, "rollout/0") == ["refused VersionGone"]


def test_who_waits_for_a_superseded_version_hears_at_once(scenario: Scenario) -> None:
    scenario.say("rollout/0", m.Wait, version=8, newer_than=0, timeout_s=600.0)
    scenario.acquire("rollout/0", version=9, timeout_s=600.0)
    resumes(scenario)
    assert answers(scenario, "rollout/0") == ["refused VersionGone"] * 2


def test_a_follower_waits_when_there_is_nothing_on_its_lineage_yet(scenario: Scenario) -> None:
    resumes(scenario)
    scenario.say("rollout/0", m.Target, installed=7, timeout_s=2.0)
    scenario.wait(3.0)
    assert answers(scenario, "rollout/0") == ["refused NotPublished"]


def test_a_pin_of_what_is_superseded_ends(scenario: Scenario) -> None:
    scenario.say("rollout/0", m.Pin, version=7, timeout_s=5.0)
    resumes(scenario)
    assert scenario.hub.registry.histories["run", "actor"].directive.pin == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda scenario: scenario.publish(OLD, 8),
        lambda scenario: scenario.publish(OLD, version_of(1, 8)),
        lambda scenario: scenario.unpublish(OLD, 5),
        lambda scenario: scenario.say(OLD, m.Retain, newest=9),
        lambda scenario: scenario.say(OLD, m.Pin, version=5, timeout_s=5.0),
        lambda scenario: scenario.say(OLD, m.Withdraw, version=5, timeout_s=5.0),
    ],
    ids=["publish", "publish into the new one", "unpublish", "retain", "pin", "withdraw"],
)
def test_a_zombie_changes_nothing(scenario: Scenario, change: object) -> None:
    mark = scenario.hub.registry.workers[scenario.sessions[OLD]].mark
    resumes(scenario)
    scenario.join(OLD, mark=mark)  # it was only cut off
    before = report(scenario.hub.registry, scenario.now)
    change(scenario)  # type: ignore[operator]
    assert answers(scenario, OLD) == ["refused Superseded"]
    assert report(scenario.hub.registry, scenario.now) == before
    scenario.publish(NEW, version_of(1, 8))
    scenario.acquire(OLD)  # it may read
    assert answers(scenario, OLD) == [f"read {version_of(1, 8)} {CHECKPOINT} 0<-{NEW}"]


def test_a_zombies_hello_changes_nothing_either(scenario: Scenario) -> None:
    mark = scenario.hub.registry.workers[scenario.sessions[OLD]].mark
    resumes(scenario)
    held = m.Holding(ShardKey(7, CHECKPOINT), b"r" * 16, 1)
    scenario.join(OLD, holdings=(held,), retain_newest=9, mark=mark)
    history = scenario.hub.registry.histories["run", "actor"]
    assert (history.visible(), history.retain_newest) == ([], 3)


def test_a_loop_that_never_begins_is_told_when_another_one_has(scenario: Scenario) -> None:
    plain = Scenario()
    plain.join(OLD)
    plain.publish(OLD, 7)
    dies(plain, OLD)
    plain.join("reader/0")
    plain.publish("reader/0", 5, origin="replicated")
    plain.join(NEW)
    assert begin(plain, NEW, 5) == ["attempt 1 at 5"]
    plain.join(OLD)
    for version in (4, 7, 8):
        plain.publish(OLD, version)
    assert answers(plain, OLD) == ["refused Superseded"] * 3
    plain.publish(OLD, 5, root=b"5checkpoint0----")  # the very bytes that count still
    assert answers(plain, OLD) == []


def test_a_second_trainer_is_refused_while_the_first_one_lives(scenario: Scenario) -> None:
    scenario.join(NEW)
    assert begin(scenario, NEW, 5) == []
    scenario.wait(1.5)
    scenario.tell(OLD, m.Heartbeat(scenario.hub.session, 99))
    assert answers(scenario, NEW) == ["refused UsageError"]
    assert scenario.hub.registry.histories["run", "actor"].visible() == [7, 6, 5]


def test_a_restart_waits_until_its_former_life_is_given_up(scenario: Scenario) -> None:
    scenario.join(NEW)
    silence(scenario, OLD)
    assert begin(scenario, NEW, 5) == []
    scenario.wait(LIMITS.session_timeout_s - 2.0)
    assert answers(scenario, NEW) == []
    scenario.wait(3.0)
    assert answers(scenario, NEW) == ["attempt 1 at 5"]


def test_it_is_told_who_may_live_and_need_not_wait_for_what_it_has_seen_to_be_gone(scenario: Scenario) -> None:
    scenario.join("other/0", process="here 7 70")
    scenario.publish("other/0", 7, root=b"7checkpoint0----")
    scenario.tell(OLD, m.Bye())
    scenario.join(NEW, process="here 8 80")
    assert begin(scenario, NEW, 5, waits=False) == ["rivals other/0"]
    assert begin(scenario, NEW, 5, gone=("here 9 90",)) == []  # another one
    assert begin(scenario, NEW, 5, gone=("here 7 70",)) == []
    assert answers(scenario, "rollout/0") == [] and scenario.heard("other/0") == ["Alive"]
    scenario.tell("other/0", m.Bye())  # as the server says, when its connection has ended
    assert answers(scenario, NEW) == ["attempt 1 at 5"] * 2
    assert "rollout/0" in [w.name for w in scenario.hub.registry.workers.values()]


@pytest.mark.parametrize("lives", [True, False], ids=["lives", "control: silent"])
def test_a_trainer_that_is_heard_lives_whatever_a_copy_of_its_machine_shows(scenario: Scenario, lives: bool) -> None:
    """A snapshot copies boot, namespaces and numbers of processes: one that has ended there may live here."""
    scenario.join("other/0", process="here 7 70")
    scenario.publish("other/0", 7, root=b"7checkpoint0----")
    scenario.tell(OLD, m.Bye())
    scenario.join(NEW, process="here 8 80")
    if not lives:
        silence(scenario, "other/0")
    assert begin(scenario, NEW, 5, gone=("here 7 70",)) == []
    scenario.wait(MISSED_HEARTBEATS * LIMITS.heartbeat_s + 1.0)
    if lives:
        scenario.beat("other/0")
    assert answers(scenario, NEW) == (["refused UsageError"] if lives else ["attempt 1 at 5"])
    assert ("other/0" in [w.name for w in scenario.hub.registry.workers.values()]) == lives
    assert scenario.hub.registry.histories["run", "actor"].is_over(7) != lives


def test_a_trainer_begins_anew_in_the_same_process(scenario: Scenario) -> None:
    assert begin(scenario, OLD, 6) == ["attempt 1 at 6"]
    scenario.publish(OLD, version_of(1, 7))
    assert scenario.hub.registry.histories["run", "actor"].visible() == [version_of(1, 7), 6, 5]
    assert not answers(scenario, OLD)


def test_a_trainer_that_was_given_up_before_it_heard_its_answer_is_told_the_same(scenario: Scenario) -> None:
    """It was frozen. The first answer may still be on its way: an attempt more, and the one it heard of is over."""
    resumes(scenario)
    dies(scenario, NEW)
    asked = scenario.requests[NEW]
    scenario.join(NEW, request_id=asked + 1, pending=(asked,))
    scenario.tell(NEW, m.Begin(asked, 5, 60.0, waits=True))
    assert answers(scenario, NEW) == ["attempt 1 at 5"]
    scenario.publish(NEW, version_of(1, 6))
    assert answers(scenario, NEW) == []
    scenario.requests[NEW] = asked + 2
    assert begin(scenario, NEW, 5) == ["attempt 2 at 5"]  # the control: it begins anew
    scenario.tell(NEW, m.Bye())
    scenario.join(NEW, request_id=asked + 4, pending=(asked,))
    scenario.tell(NEW, m.Begin(asked, 5, 60.0, waits=True))
    assert answers(scenario, NEW) == ["attempt 3 at 5"]  # and what is over does not come back


def ranks(scenario: Scenario, replica: str, **hello: object) -> list[str]:
    names = [f"{replica}/{shard}" for shard in (0, 1)]
    for name in names:
        scenario.join(name, 2, **hello)
    return names


def test_ranks_begin_together_and_are_told_the_same() -> None:
    scenario = Scenario()
    first, second = ranks(scenario, "trainer")
    assert begin(scenario, first, 3, launch_id="w") == []
    assert begin(scenario, second, 3, launch_id="w") == ["attempt 0 at 3"]
    assert answers(scenario, first) == ["attempt 0 at 3"]


def test_whoever_begins_is_told_by_which_hub() -> None:
    """The rank that asks last, the one that has waited, and one that joins: they take no answer of a former hub."""
    scenario = Scenario()
    names = ranks(scenario, "trainer")
    for name in names:
        scenario.say(name, m.Begin, step=3, timeout_s=60.0, launch_id="w")
    scenario.sessions["trainer/1"] = b"another".ljust(16)
    scenario.join("trainer/1", 2)
    scenario.say("trainer/1", m.Begin, step=3, timeout_s=60.0, launch_id="w")
    begun = [each for name in names for each in scenario.inbox[name] if isinstance(each, m.Begun)]
    assert [each.hub for each in begun] == [scenario.hub.session] * 3


@pytest.mark.parametrize("other", [{"step": 4}, {"step": 3, "launch_id": "another"}])
def test_a_rank_that_begins_something_else_is_refused(other: dict[str, object]) -> None:
    scenario = Scenario()
    first, second = ranks(scenario, "trainer")
    begin(scenario, first, 3, launch_id="w")
    assert begin(scenario, second, **{"launch_id": "w", **other}) == []
    scenario.wait(1.5)
    scenario.tell(first, m.Heartbeat(scenario.hub.session, 9, (1,)))
    assert answers(scenario, second) == ["refused UsageError"]
    assert answers(scenario, first) == []  # it waits for the right one


def test_a_rank_that_is_missing_is_named_in_time() -> None:
    scenario = Scenario()
    first, _ = ranks(scenario, "trainer")
    begin(scenario, first, 3, timeout_s=5.0)
    scenario.wait(6.0)
    (refused,) = [each for each in scenario.inbox[first] if isinstance(each, m.Refused)]
    assert refused.error == "DeadlineExceeded" and "shards [1] have not begun it" in refused.message


def test_a_rank_whose_answer_was_lost_with_the_hub_joins_the_others() -> None:
    scenario = Scenario()
    attempt = Attempt(2, 3, b"m" * 12 + check_of("w"))
    scenario.join("trainer/0", 2, mark=attempt.mark, directive=Directive(attempts=(attempt,)))
    scenario.join("trainer/1", 2)
    for step, word in ((2, "w"), (3, "another")):
        assert begin(scenario, "trainer/1", step, launch_id=word) == []  # the controls: it is of another start
    assert begin(scenario, "trainer/1", 3, launch_id="w") == ["attempt 2 at 3"]
    scenario.publish("trainer/0", version_of(2, 4))
    assert begin(scenario, "trainer/1", 3, launch_id="w", timeout_s=0.0) == [
        "refused DeadlineExceeded"
    ]  # it is at work


def test_a_replaced_process_does_not_begin() -> None:
    scenario = Scenario()
    scenario.join("trainer/0")
    scenario.sessions["former"] = scenario.sessions.pop("trainer/0")
    scenario.sessions["trainer/0"] = b"another".ljust(16)
    scenario.join("trainer/0")
    assert begin(scenario, "former") == ["refused Superseded"]
    assert begin(scenario, "trainer/0") == ["attempt 0 at 0"]


def test_a_restarted_hub_says_nothing_before_it_knows_who_lives() -> None:
    scenario = Scenario(recovering=True)
    scenario.join(NEW)
    assert begin(scenario, NEW, 5) == []
    scenario.join("reader/0", directive=Directive(attempts=(Attempt(4, 2, b"m" * 16),)))
    scenario.wait(LIMITS.grace_s + 1.0)
    assert answers(scenario, NEW) == []  # the trainer of attempt 4 may be late
    scenario.wait(LIMITS.session_timeout_s)
    assert answers(scenario, NEW) == ["attempt 5 at 5"]


@pytest.mark.parametrize("notices", [True, False], ids=["it notices", "the control"])
def test_a_hub_that_stood_still_at_its_start_waits_for_who_knows_of_an_attempt(notices: bool) -> None:
    """SIGSTOP, or an interpreter that is held by one long call: its clock went on, and it has heard nobody."""
    scenario = Scenario(recovering=True)
    scenario.now = LIMITS.grace_s + 2.0
    scenario._deliver(Tick(scenario.now if notices else 0.0))
    scenario.join(NEW)
    assert begin(scenario, NEW, 5) == ([] if notices else ["attempt 0 at 5"])
    scenario.join("reader/0", directive=Directive(attempts=(Attempt(0, 0, b"m" * 16),)))
    scenario.wait(LIMITS.grace_s - 0.5)
    assert answers(scenario, NEW) == []
    scenario.now += LIMITS.session_timeout_s  # once more, before the trainer of that attempt has said Hello
    scenario._deliver(Tick(LIMITS.session_timeout_s if notices else 0.0))
    assert answers(scenario, NEW) == []
    scenario.wait(LIMITS.session_timeout_s)
    assert answers(scenario, NEW) == (["attempt 1 at 5"] if notices else [])


def test_a_restarted_hub_waits_for_the_trainer_that_others_have_told_it_of() -> None:
    """What one asked of the hub before, in a former life, ends no attempt that has begun since."""
    newest = (Attempt(1, 2, b"1" * 16),)
    for is_late in (True, False):
        scenario = Scenario(recovering=True)
        scenario.join("reader/0", directive=Directive(attempts=newest))
        scenario.join(NEW)
        scenario.wait(LIMITS.grace_s + 1.0)
        assert begin(scenario, NEW, 5, timeout_s=LIMITS.session_timeout_s) == []
        if is_late:
            announce(scenario, OLD, *newest)
        scenario.wait(LIMITS.session_timeout_s)
        assert answers(scenario, NEW) == ["refused UsageError" if is_late else "attempt 2 at 5"]
        if is_late:
            scenario.publish(OLD, version_of(1, 6))
            assert answers(scenario, OLD) == []


def test_a_readers_key_begins_nothing_and_passes_on_no_attempt() -> None:
    hello = m.Hello(
        "r", "m", "a", 0, 1, Location(), {}, directive=Directive(attempts=(Attempt(4, 2, b"m"),)), mark=b"m"
    )
    passed_on = believed("reader", hello)
    assert passed_on.directive == NO_DIRECTIVE and passed_on.mark == b""
    assert refusal("publisher", m.Begin(1, 0, 1.0), None) is None
    for role in ("reader", "observer"):
        assert "Begin was sent with" in (refusal(role, m.Begin(1, 0, 1.0), None) or "")


def announce(scenario: Scenario, worker: str, *attempts: Attempt) -> None:
    mark = attempts[-1].mark
    scenario.join(worker, mark=mark if worker == OLD else b"", directive=Directive(attempts=attempts))


def test_two_trainers_of_one_attempt_are_named_once() -> None:
    """Of two hubs that did not know of each other; the larger mark counts, whoever is heard first."""
    scenario = Scenario()
    small, large = Attempt(2, 5, b"\x0a" * 16), Attempt(2, 3, b"\x0b" * 16)
    announce(scenario, "a/0", small)
    announce(scenario, "b/0", small)
    announce(scenario, "c/0", Attempt(1, 2, b"\x0c" * 16), small)
    assert scenario.warned == []  # the control: the same attempt, and another number
    announce(scenario, OLD, large)
    (said,) = scenario.warned
    assert "two trainers have begun attempt 2" in said
    assert f"mark {'0b' * 16} at step 3 and mark {'0a' * 16} at step 5" in said
    assert f"The one of mark {'0b' * 16} counts" in said
    announce(scenario, "d/0", small)  # it has not heard yet
    assert scenario.warned == [said]
    announce(scenario, "e/0", Attempt(2, 3, b"\x01" * 16))
    assert len(scenario.warned) == 2 and f"mark {'01' * 16} at step 3" in scenario.warned[1]


def test_no_number_of_false_marks_fills_the_hub() -> None:
    scenario = Scenario()
    announce(scenario, "a/0", Attempt(2, 3, b"\xff" * 16))
    for number in range(2 * MARKS_REFUSED_MAX):
        announce(scenario, f"w{number}/0", Attempt(2, 3, number.to_bytes(16, "big")))
    (history,) = scenario.hub.registry.histories.values()
    assert len(scenario.warned) == 2 * MARKS_REFUSED_MAX and len(history.marks_refused) == MARKS_REFUSED_MAX


attempts = st.builds(Attempt, st.integers(0, 5), st.integers(0, 5), st.sampled_from([b"a", b"b"]))
lineages = st.lists(attempts, max_size=6).map(merged)


@given(lineages, lineages, lineages)
def test_lineages_are_merged_in_any_order(a: Lineage, b: Lineage, c: Lineage) -> None:
    assert merged(a, b) == merged(b, a)
    assert merged(a, a) == a
    for version in (version_of(number, step) for number in range(6) for step in range(1, 7)):
        ended = any(is_superseded(version, lineage) for lineage in (a, b, c))
        assert ended <= is_superseded(version, merged(merged(a, b), c))


@given(lineages, lineages)
def test_of_two_attempts_with_one_number_the_larger_mark_counts(a: Lineage, b: Lineage) -> None:
    both = {each.number: each for each in merged(a, b)}
    for counts, other in conflicts(a, b):
        assert counts.number == other.number and counts.mark > other.mark
        assert both.get(counts.number, counts).mark == counts.mark
    assert conflicts(a, a) == [] and conflicts(a, b) == conflicts(b, a)
    numbers = {each.number for each in a if any(each.number == two.number and each.mark != two.mark for two in b)}
    assert [counts.number for counts, _ in conflicts(a, b)] == sorted(numbers)


def test_what_is_remembered_of_attempts_is_bounded() -> None:
    many = merged(Attempt(number, number, b"") for number in range(200))
    assert len(many) == ATTEMPTS_KEPT_MAX and many[-1].number == 199
    assert is_superseded(version_of(198, 200), many) and not is_superseded(version_of(198, 199), many)


def test_who_has_begun_nothing_adds_nothing_to_the_newest_attempt(scenario: Scenario) -> None:
    """Not even to the first one, whose versions are plain steps. What it has of this attempt already it may say again,
    and pass on; engines publish what they have converted; operators decide."""
    scenario.join("stranger/0")
    scenario.publish("stranger/0", 8)
    assert answers(scenario, "stranger/0") == ["refused Superseded"]
    scenario.publish(OLD, 8)
    scenario.publish("stranger/0", 8)  # the same bytes of what is visible
    scenario.publish("rollout/0", 8, "runtime:f")
    scenario.say("stranger/0", m.Pin, version=7, timeout_s=5.0)
    assert answers(scenario, "stranger/0") == answers(scenario, "rollout/0") == answers(scenario, OLD) == []


def test_the_control_nobody_has_begun_and_anybody_publishes() -> None:
    scenario = Scenario()
    scenario.join_all(OLD, "stranger/0")
    scenario.publish(OLD, 1)
    scenario.publish("stranger/0", 2)
    assert answers(scenario, "stranger/0") == []
