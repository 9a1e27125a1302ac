"""The two smallest parts of the hub: which requests are tried again, and what "latest" means to a replica."""

from __future__ import annotations

import pytest

from tensorhub_plugins.core.hub.state import GroupResolution, History, Pending, Version, Worker
from tensorhub_plugins.core.hub.waiters import ANY_VERSION, Waiters
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location


class Requests:
    """Readers of one history, in which version 1 is visible."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        self.waiters.allow_tries(8)
        self.history = History("run", "actor", versions={1: Version(1, visible=True), 2: Version(2)})
        self.made = 0

    def add(self, message: m.Acquire | m.Wait | m.Unpublish, *, data_center: str = "dc") -> Pending:
        self.made += 1
        hello = m.Hello("run", "actor", f"r{self.made}", 0, 1, Location(data_center), {})
        pending = Pending(Worker(b"%016d" % self.made, hello, self.history, 0.0), message, 60.0)
        self.waiters.add(pending)
        return pending

    def acquire(self, version: int = 1, **options: object) -> m.Acquire:
        return m.Acquire(1, version, 0, (CHECKPOINT,), 60.0, **options)

    def parked(self, message: m.Acquire | m.Wait, **options: str) -> Pending:
        pending = self.add(message, **options)
        self.waiters.pop_ready(self.history, ())
        self.waiters.park(pending)
        return pending

    def queues(self, **changed: bool) -> list[list[Pending]]:
        numbers = {int(name.lstrip("v")): room for name, room in changed.items()}
        return [list(queue.values()) for queue in self.waiters.queues_with_room(self.history, numbers)]


@pytest.fixture
def requests() -> Requests:
    return Requests()


def test_a_new_request_is_tried_once_and_in_the_order_of_arrival(requests: Requests) -> None:
    first, second = requests.add(requests.acquire()), requests.add(m.Wait(1, 0, 0, 60.0))
    assert requests.waiters.pop_dirty() is requests.history and requests.waiters.pop_dirty() is None
    assert requests.waiters.pop_ready(requests.history, ()) == [first, second]
    assert requests.waiters.pop_ready(requests.history, ()) == []


def test_of_more_requests_than_may_be_tried_the_first_are(
    requests: Requests,
) -> None:
    made = [requests.add(requests.acquire()) for _ in range(5)]
    waiters, history = requests.waiters, requests.history
    popped = []
    for most in (2, 0, 2, 2):
        waiters.allow_tries(most)
        assert waiters.pop_dirty() is history
        popped.append(waiters.pop_ready(history, ()))
    assert popped == [made[:2], [], made[2:4], made[4:]]
    assert not waiters.put_off and not history.ready
    waiters.allow_tries(2)
    assert waiters.pop_dirty() is None


def test_an_unpublish_is_tried_before_all_others(requests: Requests) -> None:
    acquire, unpublish = requests.add(requests.acquire()), requests.add(m.Unpublish(1, (), 60.0))
    assert requests.waiters.pop_unpublishes(requests.history) == [unpublish]
    assert requests.waiters.pop_ready(requests.history, ()) == [acquire]


def test_interchangeable_requests_share_a_queue_and_others_do_not(requests: Requests) -> None:
    alike = [requests.parked(requests.acquire()) for _ in range(3)]
    far = requests.parked(requests.acquire(), data_center="far")
    source = (b"s" * 16,)
    picky = [requests.parked(requests.acquire(**{field: source})) for field in ("avoid", "exclude", "beside")]
    assert requests.queues(v1=True) == [alike, [far], *([each] for each in picky)]
    assert requests.queues(v1=False) == requests.queues(v2=True) == []


def test_a_request_for_what_is_not_visible_waits_for_any_version(requests: Requests) -> None:
    pending = requests.parked(requests.acquire(version=2))
    assert pending.queue == (ANY_VERSION, None)
    assert requests.waiters.pop_ready(requests.history, [2]) == []
    assert requests.waiters.pop_ready(requests.history, [ANY_VERSION]) == [pending]
    requests.history.versions[2].visible = True
    requests.waiters.park(pending)
    assert requests.queues(v2=True) == [[pending]]


def test_requests_are_found_again_when_their_version_is_lost(requests: Requests) -> None:
    pending = requests.parked(requests.acquire())
    requests.history.versions[1].visible = False
    assert requests.waiters.pop_ready(requests.history, [1]) == [pending]


def test_nothing_is_left_of_a_request_that_was_answered(requests: Requests) -> None:
    pending = requests.parked(requests.acquire())
    requests.waiters.mark_ready(pending)
    requests.waiters.remove(pending)
    requests.waiters.remove(pending)
    history = requests.history
    assert not requests.waiters.is_waiting(pending)
    assert (history.waiting, history.ready, history.wait_queues, pending.worker.pending) == ({}, {}, {}, {})


def test_room_once_noted_is_not_forgotten(requests: Requests) -> None:
    requests.waiters.mark_changed(requests.history, 1, room=True)
    requests.waiters.mark_changed(requests.history, 1, room=False)
    assert requests.waiters.pop_changed(requests.history) == {1: True}
    assert requests.waiters.pop_changed(requests.history) == {}


def test_a_generation_is_one_version_for_all_shards() -> None:
    group = GroupResolution()
    group.begin(3)
    group.notified_shards |= {0, 1}
    group.begin(4)
    assert (group.generation, group.version, group.notified_shards) == (2, 4, set())


@pytest.mark.parametrize(
    ("generation", "after"),
    [(8, (8, 9, {1})), (7, (7, 3, {0, 1})), (6, (7, 3, {0}))],
    ids=["a later one", "the same", "an earlier one: it never heard the answer"],
)
def test_a_shard_recalls_its_last_generation(generation: int, after: tuple[int, int, set[int]]) -> None:
    group = GroupResolution(7, 3, {0})
    group.recall(1, generation, 9)
    assert (group.generation, group.version, group.notified_shards) == after
