"""How often a transfer looks at all of its sources: of hundreds, that takes as long as what they bring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensorhub_plugins.core.transfer import events, runner

SOURCES, EVENTS = 256, 1000


class Reader:
    """A source that is never silent, and counts how often somebody looks."""

    def __init__(self, looks: list[int]) -> None:
        self.looks = looks

    @property
    def stalls_at(self) -> float:
        self.looks.append(1)
        return 1e9

    def source_waits(self) -> bool:
        return False


@pytest.mark.parametrize("apart_s", [0.0, 1.5 * runner.LOOK_S])
def test_events_that_come_together_are_one_look(monkeypatch, apart_s):
    """The control: events that come one after the other are one look at all sources each."""
    clock = [100.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    machine = SimpleNamespace(next_deadline=lambda: 1e9, limits=None)
    transfer = runner.Transfer(machine, SimpleNamespace(renew=lambda leases: None), {}, SimpleNamespace())
    transfer._next.clear()
    looks: list[int] = []
    transfer._readers = {(shard, b"s"): Reader(looks) for shard in range(SOURCES)}
    for _ in range(EVENTS):
        transfer._events.put((None, events.Tick()))
        assert transfer._next_event() == events.Tick()
        clock[0] += apart_s
    each = 2 * SOURCES  # who stalls by now, and who first
    assert len(looks) == (each * EVENTS if apart_s else each)
