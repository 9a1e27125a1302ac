"""An engine that does not hear of the hub: it says so once, and takes work again when it does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tensorhub_plugins.vllm.engine import staleness
from tensorhub_plugins.vllm.engine.staleness import Staleness


async def test_it_is_said_once_each_way(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "LOOK_INTERVAL_S", 0.0)
    silences = [0.0]
    engine = Staleness(lambda: silences[-1], 5.0, worker="rollout-1/0")
    said: list[list[str]] = []
    watching = asyncio.create_task(engine.watch())
    caplog.set_level("INFO", "vllm.tensorhub_plugins")
    for silent_s in (1.0, 5.0, 6.0, 7.0, 0.5, 1.0):
        silences.append(silent_s)
        caplog.clear()
        for _ in range(3):
            await asyncio.sleep(0)
        said.append([record.getMessage() for record in caplog.records])
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 1, 0]
    assert said[2] == [
        "no more work is taken until the hub is heard again: rollout-1/0 has not heard of the hub for 6 s "
        "(staleness_s is 5)"
    ]
    assert said[4] == ["rollout-1/0 hears the hub again, and takes work"]


def test_without_a_limit_it_goes_on_for_ever() -> None:
    assert not Staleness(lambda: 1e9, None, worker="w").is_cut_off
    assert Staleness(lambda: 5.1, 5.0, worker="w").is_cut_off and not Staleness(lambda: 5.0, 5.0, worker="w").why_not()
