"""What an engine's workers wait for before they start: device memory that a killed engine had."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorhub_plugins.vllm.worker import memory_need


class Snapshot:
    """As vLLM's: of a device whose driver frees memory while time passes."""

    def __init__(self, frees: list[int]) -> None:
        self.total_memory, self.now, self._frees = 100, 0.0, frees
        self.measured = 0
        self.measure()

    def measure(self) -> None:
        self.free_memory = self._frees.pop(0) if len(self._frees) > 1 else self._frees[0]
        self.measured += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def requested(snapshot: Snapshot) -> int:
    """Return what vLLM would find."""
    config = SimpleNamespace(gpu_memory_utilization=0.9)
    return memory_need.request_memory(
        lambda given, _: int(given.free_memory), snapshot, config, lambda: snapshot.now, snapshot.sleep
    )


@pytest.mark.parametrize(
    ("frees", "found", "waits_s"),
    [
        ([95], 95, 0.0),
        ([10, 10, 40, 40, 90], 90, 4 * memory_need.FREED_INTERVAL_S),
        (
            [10, *[10] * 30, 50, *[50] * 30, 91],
            91,
            62 * memory_need.FREED_INTERVAL_S,
        ),  # it goes on
        ([10], 10, memory_need.FREED_S),  # the control: another process has it, and vLLM says so
        ([50, 20, 50, 50], 50, memory_need.FREED_S),  # what comes back is no more
    ],
)
def test_a_start_waits_for_memory_that_is_being_freed_and_for_no_other(
    frees: list[int], found: int, waits_s: float
) -> None:
    snapshot = Snapshot(frees)
    assert (requested(snapshot), snapshot.now) == (found, waits_s)


def test_vllms_own_check_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("some_worker")
    module.request_memory = original = lambda snapshot, config: 7
    monkeypatch.setitem(sys.modules, "some_worker", module)
    worker = type("Worker", (), {"__module__": "some_worker"})
    for _ in range(2):
        memory_need.wait_for_the_last(worker)
    assert module.request_memory.__wrapped__ is original
    del module.request_memory
    memory_need.wait_for_the_last(worker)
    memory_need.wait_for_the_last(type("Made", (), {"__module__": "nowhere"}))
    assert not hasattr(module, "request_memory")
