"""Every way in which a run stands still is a problem, in words; a run that goes on has none."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hub_scenarios import Scenario

from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.operations import problems
from tensorhub_plugins.core.operations.problems import Problem, ago
from tensorhub_plugins.core.operations.status import status_text
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operate.md"


def found(story: Scenario, **options: object) -> dict[str, Problem]:
    """What is wrong now, by its kind."""
    return {each.kind: each for each in problems.find(report(story.hub.registry, story.now), **options)}


def follows(story: Scenario, name: str, installed: int, **more: object) -> None:
    story.say(name, m.Target, installed=installed, timeout_s=30.0, **more)


def publish(story: Scenario, *versions: int, every_s: float = 10.0) -> None:
    for version in versions:
        story.wait(every_s)
        story.publish("trainer/0", version)


@pytest.fixture
def run() -> Scenario:
    """A trainer at version 9, one every ten seconds, and two followers that run it."""
    story = Scenario()
    for name in ("trainer/0", "a/0", "b/0"):
        story.join(name)
    publish(story, 6, 7, 8, 9)
    for name in ("a/0", "b/0"):
        follows(story, name, 9)
    return story


def test_a_run_that_goes_on_has_none(run: Scenario) -> None:
    assert found(run) == {}
    text = status_text({**report(run.hub.registry, run.now)})
    assert "1 models, nothing is wrong\n" in text and "runs 9\n" in text


def test_followers_that_stand_still(run: Scenario) -> None:
    publish(run, 10, 11)
    assert found(run) == {}  # a pull takes its time
    publish(run, 12, 13, 14, 15, 16)
    follows(run, "b/0", 16)
    run.wait(1.0)
    (late,) = found(run).values()
    assert late.what == "1 of 2 followers install nothing newer: a/0, up to 7 steps behind, for 61 s"
    assert "runs 9 (7 steps behind, for 6" in status_text({**report(run.hub.registry, run.now)})
    assert found(run, late_s=100.0) == {}
    follows(run, "a/0", 9, failure="the fetch needs 7 GB of memory, and 2 are free")
    assert found(run)["late"].what.endswith("; it says: the fetch needs 7 GB of memory, and 2 are free")
    follows(run, "a/0", 16)
    assert found(run) == {}


def test_who_waits_for_what_another_engine_converts_says_so(run: Scenario) -> None:
    runtime = {"layouts": ("runtime:f", CHECKPOINT), "claim": True, "timeout_s": 200.0}
    publish(run, 10)
    follows(run, "a/0", 10)
    for name in ("c/0", "d/0"):
        run.join(name, location=Location(host=f"node-{name[0]}"))
    run.acquire("c/0", 10, **runtime)
    run.beat("c/0", worked=7)
    run.acquire("d/0", 10, **runtime)
    follows(run, "d/0", 9)
    run.wait(65.0)
    told = "has waited 65 s for version 10 from c/0 on node-c, which converts it (last piece of work 65 s ago)"
    text = status_text({**report(run.hub.registry, run.now)})
    assert f"    it {told}" in text and text.count("has waited") == 2  # the problem, and the worker
    assert found(run)["late"].what.endswith(f"; d/0 {told}")
    assert found(run)["late"].to_do == "see the log of c/0"
    run.publish("c/0", 10, "runtime:f")
    assert "has waited" not in status_text({**report(run.hub.registry, run.now)})  # it reads


def test_who_waits_for_a_version_that_is_not_there_says_so(run: Scenario) -> None:
    run.acquire("a/0", 11)
    run.wait(5.0)
    assert "    it has waited 5 s for a source of version 11" in status_text({**report(run.hub.registry, run.now)})
    run.acquire("b/0", 9)  # which has one
    assert status_text({**report(run.hub.registry, run.now)}).count("has waited") == 1


def test_one_that_always_gets_the_last_but_one_is_not_late(run: Scenario) -> None:
    """It installs all the time, each too late to be the newest."""
    for version in range(10, 30):
        publish(run, version)
        follows(run, "a/0", version - 1)
        follows(run, "b/0", version)
        assert found(run) == {}


def test_a_version_that_is_refused(run: Scenario) -> None:
    publish(run, 10)
    for name in ("a/0", "b/0"):
        follows(run, name, 9, refused=(10,), why="tensor 'w' has another shape")
    (refused,) = found(run, hub="tcp://h:1").values()
    assert refused.what == "a/0, b/0 cannot install version 10: tensor 'w' has another shape"
    run.say("trainer/0", m.Withdraw, version=10, timeout_s=1.0)
    assert found(run) == {}  # that has helped
    assert "bad: `tensorhub withdraw 10 --run=run --model=actor --hub tcp://h:1`" in refused.to_do


def test_a_pin_and_one_that_nobody_holds(run: Scenario) -> None:
    run.say("trainer/0", m.Pin, version=9, timeout_s=1.0)
    assert found(run) == {}
    publish(run, *range(10, 20))
    (pinned,) = found(run).values()  # and nobody is late
    assert pinned.what == "version 9 is pinned, and the newest is 19"
    run.unpublish("trainer/0", 9)
    run.hub.registry.histories["run", "actor"].versions[9].visible = False
    assert "pin_lost" in found(run)


def test_one_that_runs_what_was_withdrawn(run: Scenario) -> None:
    run.say("trainer/0", m.Withdraw, version=9, timeout_s=1.0)
    assert found(run)["withdrawn"].what == "a/0, b/0 runs a version that was withdrawn"


def test_a_frozen_worker_then_a_lost_one(run: Scenario) -> None:
    run.silent = ("b/0",)
    run.wait(6.0)
    assert found(run)["silent"].what == "b/0 not heard for 6 s"
    run.wait(60.0)
    lost = found(run)["lost"]
    assert lost.what.startswith("b/0 lost, ") and "silent" not in found(run)
    run.silent = ()
    run.join("b/0")
    assert "lost" not in found(run)


def test_one_that_left_is_not_lost_and_a_lost_one_is_not_for_ever(run: Scenario) -> None:
    run.tell("b/0", m.Bye())
    run.wait(60.0)
    assert "lost" not in found(run)
    run.silent = ("a/0",)
    run.wait(60.0)
    assert "lost" in found(run)
    run.wait(600.0)
    assert "lost" not in found(run)


def test_a_trainer_that_is_late_and_one_that_is_gone(run: Scenario) -> None:
    run.wait(45.0)
    assert found(run) == {}
    run.wait(30.0)
    assert (
        found(run)["trainer_late"].what
        == "the trainer has published nothing for 75 s; each version before took at most 10 s"
    )
    run.publish("a/0", 9, "runtime:f")  # as the engine that has converted it does
    run.tell("trainer/0", m.Bye())
    assert list(found(run)) == ["no_trainer"]


def test_a_rank_that_publishes_nothing(run: Scenario) -> None:
    """Of the first version, whose pace is not known, and of later ones."""
    story = Scenario()
    story.join_all("trainer/0", "trainer/1", "trainer/2", shard_count=3)
    story.publish("trainer/1", 1)
    story.wait(59.0)
    assert found(story) == {}
    story.wait(2.0)
    part = found(story)["unfinished"]
    assert part.what == "version 1 is not whole for 61 s: without trainer/0, trainer/2"
    assert "see the log of that rank" in part.to_do
    story.publish("trainer/0", 1)
    assert found(story)["unfinished"].what.endswith(": without trainer/2")
    story.publish("trainer/2", 1)
    assert found(story) == {}


def test_after_a_restart_of_the_hub_nobody_knows_how_long_a_version_takes() -> None:
    story = Scenario(recovering=True)
    story.join("trainer/0")
    for version in (7, 8, 9):
        story.publish("trainer/0", version)
    story.wait(HubLimits().grace_s + 1000.0)
    assert "trainer_late" not in found(story)


def test_sources_that_send_other_bytes_or_are_not_reached(run: Scenario) -> None:
    run.hub.registry.workers[run.sessions["trainer/0"]].corrupt_segments = 3
    run.hub.registry.workers[run.sessions["a/0"]].unreached = {run.sessions["trainer/0"]: run.now}
    assert found(run)["corrupt"].what == "readers got 3 corrupt segments from trainer/0"
    assert "a/0" in found(run)["unreached"].what


def test_followers_that_are_late_as_their_link_is_slow(run: Scenario) -> None:
    run.publish("trainer/0", 10)
    request = run.acquire("b/0", 10)
    for count in (0, 10**6, 3 * 10**6, *range(4 * 10**6, 68 * 10**6, 10**6)):
        run.now += 1.0
        beat = m.Heartbeat(run.hub.session, request, leases={request: 1}, progress={request: count})
        run.tell("b/0", beat)
        run.tell("a/0", m.Heartbeat(run.hub.session, run.requests["a/0"]))
        run.tell("trainer/0", m.Heartbeat(run.hub.session, run.requests["trainer/0"]))
    late = found(run)["late"]
    assert "b/0 reads from trainer/0 at 1 MB/s" in late.what and "tensorhub bench" in late.to_do


def test_a_hub_that_was_started_again_under_a_run_says_so_for_a_while(run: Scenario) -> None:
    assert "restarted" not in found(run)  # of its first workers
    story = Scenario()
    story.join("a/0", welcomed=story.hub.session)
    assert "restarted" not in found(story)
    story.join("b/0", welcomed=b"x" * 16)
    assert found(story)["restarted"].what.startswith("it was started again 4 s ago")
    assert "times" not in found(story)["restarted"].what
    story.join("c/0", welcomed=b"x" * 16, restarts=9)
    assert found(story)["restarted"].what.endswith("they are again: 10 times in ten minutes, at least")
    story.wait(600.0)
    assert "restarted" not in found(story)


def test_what_a_workers_process_lacks_is_said_with_its_host(run: Scenario) -> None:
    run.join("c/0", location=Location(host="node-c"))
    assert found(run) == {}
    run.beat("c/0", lacks="the system refuses memory: this process may have 1 GB")
    (lacks,) = found(run).values()
    assert lacks.what == "c/0 on node-c: the system refuses memory: this process may have 1 GB"
    assert "doctor machine" in lacks.to_do
    run.silent = ("c/0",)
    run.wait(6.0)
    assert found(run)["silent"].what == "c/0 on node-c not heard for 6 s"


def test_a_lost_worker_is_named_with_its_host(run: Scenario) -> None:
    run.join("c/0", location=Location(host="node-c"))
    follows(run, "c/0", 9)
    run.silent = ("c/0",)
    run.wait(60.0)
    assert found(run)["lost"].what.startswith("c/0 on node-c lost, ")


def test_hosts_whose_handshakes_are_refused() -> None:
    hosts = [{"host": f"10.0.0.{number}", "count": 7, "seconds_ago": 2.0} for number in range(9)]
    told = problems.find({"models": [], "refused_hosts": hosts})
    assert len(told) == problems.NAMES_MAX and "TENSORHUB_SECRET_FILE" in told[0].to_do
    assert told[0].what.startswith("it has refused 7 handshakes of 10.0.0.0, the last one 2 s ago: another secret")
    assert told[0].what.endswith("as 6 other hosts were")


def test_a_hub_that_is_full_and_a_report_of_an_older_one() -> None:
    (full,) = problems.find({"models": [], "connections_left": 3})
    assert full.what == "room for 3 more connections"
    worker = {"worker": "t/0", "location": {"host": ""}, "bytes_published": 1, "last_heard_s": 99.0}
    model = {"run": "r", "model": "m", "newest": 1, "versions": [], "workers": [worker], "leases": []}
    assert problems.find({"models": [model]}) == []


@pytest.mark.parametrize("name", ["x; rm -rf /", "$(reboot)", "it's", "-f", "`id`"])
def test_a_command_is_safe_to_paste_whatever_a_run_is_called(name: str) -> None:
    words = shlex.split(problems.command("unpin", {"run": name, "model": "m"}, "tcp://h:1").strip("`"))
    assert words == ["tensorhub", "unpin", f"--run={name}", "--model=m", "--hub", "tcp://h:1"]


def test_the_page_has_every_kind_and_no_other() -> None:
    source = Path(problems.__file__).read_text()
    kinds = set(re.findall(r'(?:yield |Problem\(HUB, )"(\w+)"', source))
    told = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    assert len(kinds) > 10 and told == kinds


def test_times_as_people_say_them() -> None:
    assert [ago(s) for s in (0.4, 99.0, 100.0, 600.0, 7200.0)] == ["0 s", "99 s", "2 min", "10 min", "2.0 h"]


def test_what_engines_compile_has_no_trainer_that_could_be_late_or_gone(run: Scenario) -> None:
    def kinds(name: str) -> list[str]:
        shown = report(run.hub.registry, run.now)
        return [each.kind for each in problems.find({**shown, "models": [{**shown["models"][0], "model": name}]})]

    run.wait(75.0)
    assert (kinds("actor.compiled-0123456789abcdef"), kinds("actor")) == ([], ["trainer_late"])
    run.publish("a/0", 9, "runtime:f")  # as the engine that has converted it does
    run.tell("trainer/0", m.Bye())
    assert (kinds("actor.compiled-0123456789abcdef"), kinds("actor")) == ([], ["no_trainer"])
