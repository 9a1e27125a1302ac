"""Retained versions that are in too few failure domains: who is asked to hold a copy, and when nobody can."""

from __future__ import annotations

import pytest
from hub_scenarios import LIMITS, RUNTIME, Scenario

from tensorhub_plugins.core.cli import status_text
from tensorhub_plugins.core.hub.failure_domains import AGAIN_S, BEGIN_S, COPY_S, PATIENCE_S, TRIED_MAX
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location

ROOM = 1 << 30


class Fleet(Scenario):
    """Workers that say at every heartbeat for how much they have room."""

    def __init__(self, *, domains: int = 2, across: str = "host", limits: HubLimits = LIMITS, **hosts: str) -> None:
        super().__init__(limits=limits)
        self.every_s = min(0.5, limits.heartbeat_s)
        self.room: dict[str, int] = {}
        self.leaving: set[str] = set()
        for name, host in {"trainer": "a", **hosts}.items():
            self.come(f"{name}/0", host)
        self.say("trainer/0", m.Retain, newest=1, domains=domains, across=across)

    def come(self, worker: str, host: str, *, room: int = ROOM, machine: str = "", **hello: object) -> None:
        self.join(worker, location=Location("dc", "rack", host, machine), **hello)
        self.room[worker] = room

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            super().wait(self.every_s)
            for worker in self.room:
                if self.sessions[worker] in self.hub.workers:
                    self.beat(worker, room_bytes=self.room[worker], leaving=worker in self.leaving)

    def asked(self, worker: str) -> list[str]:
        return list(dict.fromkeys(line for line in self.heard(worker) if line.startswith("hold")))

    def hold(self, worker: str, version: int) -> None:
        """It reads what it was asked for, and gives it up at once."""
        self.acquire(worker, version, for_others=True)
        self.publish(worker, version, origin="replicated")
        self.tell(worker, m.Release(self.requests[worker] - 1))
        self.unpublish(worker, version)
        assert "keep it" in self.heard(worker)

    @property
    def missing(self) -> list[str]:
        return [each["why"] for each in report(self.hub.registry, self.now)["models"][0]["missing_copies"]]


@pytest.mark.parametrize("domains", [1, 2])
def test_a_worker_on_another_host_is_asked_for_the_copy_that_lacks(domains: int) -> None:
    """The control: one domain is where it is."""
    fleet = Fleet(domains=domains, beside="a", other="b")
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S - 1)
    assert fleet.asked("other/0") == []
    fleet.wait(3)
    assert fleet.asked("other/0") == (["hold 1"] if domains == 2 else [])
    assert fleet.asked("beside/0") == fleet.asked("trainer/0") == []
    if domains == 1:
        return
    fleet.hold("other/0", 1)
    fleet.wait(AGAIN_S)
    assert fleet.asked("other/0") == [] and fleet.missing == []
    fleet.publish("trainer/0", 2)  # only the newest is retained
    fleet.wait(1)
    assert "may release 1" in fleet.heard("other/0")


def test_pods_of_one_machine_are_one_host_and_machines_of_one_name_are_several() -> None:
    """Where nobody has chosen the host's name; the control is a worker whose host was named."""
    fleet = Fleet()
    for name, host, machine in (("pod", "b", "m1"), ("same", "a", "m2"), ("named", "c", "")):
        fleet.come(f"{name}/0", host, machine=machine)
    fleet.come("first/0", "a", machine="m1")
    fleet.say("first/0", m.Retain, newest=1, domains=3, across="host")
    fleet.publish("first/0", 1)
    fleet.room["trainer/0"] = 0
    fleet.wait(PATIENCE_S + 3)
    asked = {name: fleet.asked(f"{name}/0") for name in ("pod", "same", "named")}
    assert asked == {"pod": [], "same": ["hold 1"], "named": ["hold 1"]}
    for name in ("same", "named"):
        fleet.hold(f"{name}/0", 1)
    fleet.wait(1)
    assert fleet.missing == []


def test_each_domain_gets_one_and_the_one_with_the_most_room_is_asked() -> None:
    fleet = Fleet(domains=3, x="b", y="b", z="c")
    fleet.room["y/0"] = 2 * ROOM
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S + 3)
    assert [fleet.asked(worker) for worker in ("x/0", "y/0", "z/0")] == [[], ["hold 1"], ["hold 1"]]


def test_readers_that_come_anyway_are_not_asked() -> None:
    fleet = Fleet(other="b", third="c")
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S - 1)
    fleet.publish("other/0", 1, origin="replicated")
    fleet.wait(AGAIN_S)
    assert fleet.asked("third/0") == fleet.asked("other/0") == []
    fleet.tell("other/0", m.Bye())  # the control
    fleet.wait(PATIENCE_S + 2)
    assert fleet.asked("third/0") == ["hold 1"]


def test_the_word_is_repeated_and_then_another_is_asked() -> None:
    fleet = Fleet(deaf="b", other="c")
    fleet.room["deaf/0"] = 2 * ROOM
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S + 4)
    assert fleet.heard("deaf/0").count("hold 1") > 2 and fleet.asked("other/0") == []
    fleet.wait(BEGIN_S)
    assert fleet.asked("other/0") == ["hold 1"]
    fleet.acquire("other/0", 1, for_others=True)
    fleet.heard("deaf/0")
    fleet.wait(3 * BEGIN_S)  # it reads for that long, and nobody else is asked
    assert not fleet.asked("deaf/0")


def test_who_is_preemptible_or_has_no_room_is_not_asked_and_that_is_said_once() -> None:
    fleet = Fleet()
    fleet.come("spot/0", "b", preemptible=True)
    fleet.come("full/0", "c", room=99)
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S + 20)
    assert not fleet.asked("spot/0") and not fleet.asked("full/0")
    (why,) = fleet.missing
    assert "1 of 2 hosts (held by trainer/0)" in why
    assert "spot/0 is preemptible; full/0 has room for 0.0 MB" in why
    assert f"version 1 {why}" in status_text({**report(fleet.hub.registry, 0.0)})
    fleet.publish("trainer/0", 2)
    fleet.wait(PATIENCE_S + 20)
    assert [line for line in fleet.warned if "no other worker can" in line] == [f"run/actor: version 1: {why}"]
    fleet.room["full/0"] = 100  # the control: exactly as much as is needed
    fleet.wait(2)
    assert fleet.asked("full/0") == ["hold 2"] and fleet.missing == []


def test_a_copy_on_a_spot_node_is_made_again_elsewhere() -> None:
    fleet = Fleet(other="c")
    fleet.come("spot/0", "b", preemptible=True)
    fleet.publish("trainer/0", 1)
    fleet.publish("spot/0", 1, origin="replicated")
    fleet.wait(PATIENCE_S + 2)
    assert fleet.asked("other/0") == ["hold 1"]


def test_nobody_is_in_another_rack() -> None:
    fleet = Fleet(across="rack", other="b")
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S + 2)
    assert "1 of 2 racks" in fleet.missing[0] and "there is no worker in further racks" in fleet.missing[0]


def test_what_is_left_in_an_engines_layout_only_cannot_be_copied() -> None:
    fleet = Fleet(other="b")
    fleet.publish("trainer/0", 1, RUNTIME)
    fleet.wait(PATIENCE_S + 2)
    assert fleet.missing == ["no worker holds its checkpoint layout any more, and no other is copied"]


@pytest.mark.parametrize("leaves", [True, False])
def test_who_leaves_has_its_last_copy_made_elsewhere(leaves: bool) -> None:
    """As `hand_over` does, with one domain; the control: a copy that is only kept is nobody else's business."""
    fleet = Fleet(domains=1, other="a", idle="a")
    fleet.publish("trainer/0", 1)
    fleet.leaving |= {"trainer/0"} if leaves else set()
    fleet.unpublish("trainer/0", 1)
    assert fleet.heard("trainer/0") == ["keep it"]
    fleet.wait(2)
    asked = [worker for worker in ("trainer/0", "other/0", "idle/0") if fleet.asked(worker)]
    if not leaves:
        assert asked == []
        return
    (taker,) = asked
    fleet.hold(taker, 1) if taker != "trainer/0" else pytest.fail("who leaves was asked")
    fleet.wait(1)
    assert "may release 1" in fleet.heard("trainer/0")


def test_a_shard_in_too_few_domains_counts() -> None:
    """Shard 0 is on two hosts, shard 1 on one: who has only shard 0 is asked for all."""
    fleet = Fleet()
    for name, host in (("pair/0", "b"), ("pair/1", "c"), ("half/0", "d")):
        fleet.join(name, 2, location=Location("dc", "rack", host))
        fleet.room[name] = ROOM * (2 if name == "half/0" else 0)
        fleet.publish(name, 1, origin="published" if name != "half/0" else "replicated")
    fleet.wait(PATIENCE_S + 2)
    assert fleet.asked("half/0") == ["hold 1"]


def test_who_alone_has_a_shard_cannot_read_it_from_another() -> None:
    fleet = Fleet()
    for shard, host in ((0, "b"), (1, "c")):
        fleet.join(f"pair/{shard}", 2, location=Location("dc", "rack", host))
        fleet.room[f"pair/{shard}"] = ROOM
        fleet.publish(f"pair/{shard}", 1)
    fleet.room["trainer/0"] = 0
    fleet.wait(PATIENCE_S + 2)
    assert not fleet.asked("pair/0") and "pair/0 alone has a shard of it; pair/1 alone" in fleet.missing[0]


def test_what_is_read_for_others_says_nothing_of_what_its_replica_reads() -> None:
    """The control: a read of its own raises the floor below which "latest" does not go."""
    for for_others, floor in ((True, 0), (False, 1)):
        fleet = Fleet(other="b")
        fleet.publish("trainer/0", 1)
        fleet.acquire("other/0", 1, for_others=for_others)
        assert fleet.hub.workers[fleet.sessions["other/0"]].seen_version == floor


def test_a_shard_that_reads_for_others_still_agrees_with_its_replica() -> None:
    """Rule 2: shard 0 was given 1 as the latest, and 2 has come since; shard 1 held a copy of 1 meanwhile."""
    for for_others, second in ((True, "1"), (False, "2")):
        fleet = Fleet()
        for shard in (0, 1):
            fleet.join(f"pair/{shard}", 2, location=Location("dc", "rack", "b"))
        fleet.publish("trainer/0", 1)
        fleet.acquire("pair/0")
        fleet.acquire("pair/1", 1, for_others=for_others)
        fleet.publish("trainer/0", 2)
        fleet.heard("pair/1")
        fleet.acquire("pair/1")
        (line,) = fleet.heard("pair/1")
        assert line.startswith(f"read {second} {CHECKPOINT}")


def test_who_reads_for_ever_keeps_nobody_else_from_making_the_copy() -> None:
    """It says at every heartbeat that its read goes on, and its lease lasts."""
    fleet = Fleet(liar="b", other="c")
    fleet.room["liar/0"] = 2 * ROOM
    fleet.publish("trainer/0", 1)
    fleet.wait(PATIENCE_S + 2)
    assert fleet.asked("liar/0") == ["hold 1"]
    number = fleet.acquire("liar/0", 1, for_others=True, timeout_s=1e6)
    seconds = 0
    while not fleet.asked("other/0"):
        assert number in fleet.hub.workers[fleet.sessions["liar/0"]].leases and seconds < 2 * COPY_S
        seconds += 30
        fleet.wait(30)
        goes_on = {"progress": {number: seconds}, "room_bytes": ROOM}
        fleet.tell("liar/0", m.Heartbeat(fleet.hub.session, number, leases={number: 1}, **goes_on))
    assert COPY_S - BEGIN_S <= seconds <= COPY_S + 30


def test_of_many_versions_each_has_its_turn_the_newest_first() -> None:
    fleet = Fleet(other="b")
    fleet.say("trainer/0", m.Retain, newest=3 * TRIED_MAX, domains=2)
    fleet.room["other/0"] = 0
    for version in range(1, 3 * TRIED_MAX + 1):
        fleet.publish("trainer/0", version)
    fleet.wait(PATIENCE_S + 2)
    assert 0 < sum(map(bool, fleet.missing)) < 3 * TRIED_MAX
    fleet.wait(3)
    assert all("other/0 has room for 0.0 MB" in why for why in fleet.missing)
    fleet.room["other/0"] = 250  # for two
    fleet.wait(4)
    assert len(fleet.asked("other/0")) == 2


def test_who_was_asked_for_much_is_not_asked_for_more_than_it_has_room_for() -> None:
    """Within one look, too."""
    fleet = Fleet(domains=2, other="b")
    fleet.say("trainer/0", m.Retain, newest=3, domains=2)
    fleet.room["other/0"] = 250
    for version in (1, 2, 3):
        fleet.publish("trainer/0", version)
    fleet.wait(PATIENCE_S + 2)
    assert fleet.asked("other/0") == ["hold 3", "hold 2"]
    (why,) = filter(None, fleet.missing)
    assert "other/0 has room for 0.0 MB" in why


def test_where_workers_report_often_a_copy_is_asked_for_after_as_many_heartbeats() -> None:
    """The other tests are of heartbeats of a second, or more: three seconds then."""
    fleet = Fleet(limits=HubLimits(heartbeat_s=0.1), other="b")
    fleet.publish("trainer/0", 1)
    fleet.wait(0.2)
    assert fleet.asked("other/0") == []
    fleet.wait(0.3)
    assert fleet.asked("other/0") == ["hold 1"]
