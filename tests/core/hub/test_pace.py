"""How often workers send heartbeats: the more there are, the less often each does, and it is judged by that."""

from __future__ import annotations

import sys

import pytest
from hub_scenarios import Scenario

from tensorhub_plugins.core.client import session
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.state import drop
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import Location

FEW = HubLimits(heartbeats_per_s_max=2)  # of all workers together
BEFORE = b"B" * 16  # the hub before


def crowd(count: int, limits: HubLimits = FEW) -> Scenario:
    story = Scenario(limits=limits)
    story.join_all(*(f"r{number}/0" for number in range(count)))
    return story


def told(story: Scenario, worker: str) -> list[float]:
    return [each.heartbeat_s for each in story.inbox.pop(worker, []) if isinstance(each, m.Welcome | m.Alive)]


@pytest.mark.parametrize(
    ("workers", "limits", "seconds"),
    [(1, FEW, 1.0), (4, FEW, 2.0), (40, FEW, 15.0), (40, HubLimits(), 1.0)],
)
def test_the_hub_bounds_the_heartbeats_of_all_workers(workers: int, limits: HubLimits, seconds: float) -> None:
    story = crowd(workers, limits)
    assert told(story, f"r{workers - 1}/0") == [seconds]
    told(story, "r0/0")
    story.beat("r0/0")
    assert told(story, "r0/0") == [seconds]  # also who came when there were fewer


@pytest.mark.parametrize(("workers", "lives"), [(4, True), (1, False)], ids=["of many", "of few"])
def test_a_worker_whose_address_refuses_is_given_three_of_its_own_heartbeats(workers: int, lives: bool) -> None:
    story = crowd(workers)
    worker = story.hub.workers[story.sessions[f"r{workers - 1}/0"]]
    story.silent = (f"r{workers - 1}/0",)
    story.hub.registry.refuses(worker)
    story.wait(4.0)  # three heartbeats of one second are over, of two are not
    assert (worker.session in story.hub.workers) == lives
    story.wait(3.0)
    assert worker.session not in story.hub.workers


@pytest.mark.parametrize(("workers", "silent_s"), [(16, 24.0), (4, 15.0)], ids=["of many", "of few"])
def test_a_worker_is_given_up_after_three_of_its_heartbeats_and_its_session_at_least(
    workers: int, silent_s: float
) -> None:
    story = crowd(workers)
    last = f"r{workers - 1}/0"
    story.silent = (last,)
    story.wait(silent_s - 0.5)
    assert story.sessions[last] in story.hub.workers
    story.wait(1.5)
    assert story.sessions[last] not in story.hub.workers


def test_a_worker_that_has_not_heard_of_a_shorter_interval_is_judged_by_the_longer_one() -> None:
    story = crowd(4)
    for leaving in ("r1/0", "r2/0", "r3/0"):
        story.tell(leaving, m.Bye())
    story.beat("r0/0", heartbeat_s=2.0)
    worker = story.hub.workers[story.sessions["r0/0"]]
    assert told(story, "r0/0")[-1] == 1.0 and worker.beat_s == 2.0
    story.beat("r0/0", heartbeat_s=1e6)
    assert worker.beat_s == 15.0  # whatever it says
    story.beat("r0/0", heartbeat_s=1.0)
    assert worker.beat_s == 1.0


@pytest.mark.parametrize(("heartbeat_s", "grace_s"), [(0.0, 3.0), (1.0, 3.0), (4.0, 12.0), (1e6, 45.0)])
def test_a_hub_waits_for_workers_that_seldom_send(heartbeat_s: float, grace_s: float) -> None:
    """Rule 6: those of the hub before learn of this one with their next heartbeat."""
    story = Scenario(recovering=True)
    story.now = 1.0
    story.join("a/0", hub=story.hub.session, welcomed=BEFORE, heartbeat_s=heartbeat_s)
    registry = story.hub.registry
    assert registry.recovering(grace_s - 0.1) and not registry.recovering(grace_s)
    assert registry.next_timer(story.now) <= story.now + 1.0


def test_a_grace_time_that_is_over_does_not_begin_again() -> None:
    story = Scenario()
    story.join("a/0", hub=story.hub.session, welcomed=BEFORE, heartbeat_s=4.0)
    assert not story.hub.registry.recovering(story.now)


def test_a_version_whose_holder_seldom_sends_is_not_lost_meanwhile() -> None:
    """An unpublish waits for all that may hold the version, or read it."""
    for heartbeat_s, answers in ((4.0, []), (1.0, ["unpublished"])):
        story = Scenario(recovering=True)
        key = m.ShardKey(1, "checkpoint")
        held = m.Holding(key, b"r" * 16, 100)
        story.join("a/0", hub=story.hub.session, welcomed=BEFORE, heartbeat_s=heartbeat_s, holdings=(held,))
        story.join("b/0", hub=story.hub.session, welcomed=BEFORE, heartbeat_s=heartbeat_s, holdings=(held,))
        story.unpublish("a/0", 1, timeout_s=60.0)
        story.wait(5.0)
        assert story.heard("a/0") == answers
        story.wait(8.0)
        assert answers or story.heard("a/0") == ["unpublished"]


def test_an_empty_table_takes_no_memory() -> None:
    kept, dropped = {1: 2}, {1: 2}
    assert kept.pop(1) == drop(dropped, 1) == 2
    assert sys.getsizeof(dropped) == sys.getsizeof({}) < sys.getsizeof(kept)
    assert drop(dropped, 1) is None


# --- the worker's side ---


class Client:
    """A session that a hub has welcomed; what it sends, and the other effects."""

    def __init__(self) -> None:
        self.machine = session.Session(m.Hello("run", "actor", "r", 0, 1, Location(), {}), 0.0)
        self.tick(0.0)
        self.hear(m.Welcome(b"H" * 16, 1.0, 15.0, 1))

    def tick(self, now: float) -> list[object]:
        self.now = now
        return self._plain(self.machine.handle(session.Tick(), now))

    def hear(self, message: m.HubMessage) -> list[object]:
        return self._plain(self.machine.handle(session.Heard(message), self.now))

    def _plain(self, effects: list[session.Effect]) -> list[object]:
        return [effect.message if isinstance(effect, session.Send) else effect for effect in effects]


@pytest.mark.parametrize("heartbeat_s", [4.0, 0.0], ids=["seldom", "control"])
def test_a_hub_of_many_workers_is_told_less_often_and_awaited_longer(heartbeat_s: float) -> None:
    one, often = Client(), heartbeat_s or 1.0
    one.hear(m.Alive(heartbeat_s=heartbeat_s))
    (beat,) = (x for x in one.tick(1.0) if isinstance(x, m.Heartbeat))
    assert beat.heartbeat_s == often and one.machine.next_deadline() == 1.0 + often
    silent_s = session.HUB_SILENT_S + 5 * (often - 1.0)
    assert not any(isinstance(x, session.HubAway) for x in one.tick(silent_s))
    assert any(isinstance(x, session.HubAway) for x in one.tick(silent_s + 0.1))
    one.hear(m.Alive(heartbeat_s=0.5))  # many have left
    assert one.machine.next_deadline() <= one.now + 0.5


def test_the_next_hub_is_told_how_often_this_worker_sends() -> None:
    one = Client()
    one.hear(m.Alive(heartbeat_s=4.0))
    (hello,) = one.hear(m.Unknown(b"O" * 16))
    assert hello.heartbeat_s == 4.0
