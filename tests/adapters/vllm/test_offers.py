"""What a worker does for others, and for how long it is waited for: with the real store and a toy model."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
from vllm_toys import LAYOUT, Engines, conversion, engines, toy_checkpoint, update, value, wait_until

from tensorhub_plugins.core import CHECKPOINT, Client, work
from tensorhub_plugins.vllm.worker.loader_calls import Asked
from tensorhub_plugins.vllm.worker.updater import TIMEOUT_S

__all__ = ["conversion", "engines"]  # fixtures
pytestmark = pytest.mark.usefixtures("conversion")


@pytest.mark.parametrize("grows", [True, False])
def test_the_background_is_waited_for_as_long_as_it_works(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow link that is for more than ten times as long. The control: strict seconds."""
    asked, fetching, looks = Asked(), Future[None](), []

    def works() -> float:
        looks.append(time.monotonic())
        if len(looks) == 25:
            fetching.set_result(None)
        return looks[-1]

    monkeypatch.setattr(work, "last_at", works)
    answer = asked.ask(lambda: 7)
    if grows:
        asked.see_to(fetching, 0.01, grows=True)
    else:
        with pytest.raises(FutureTimeout):
            asked.see_to(fetching, 0.01, grows=False)
    assert answer.result() == 7 and len(looks) == (25 if grows else 0)


@pytest.mark.parametrize("given", [None, 30.0])
@pytest.mark.parametrize("shards", [1, 2])
def test_an_update_without_a_timeout_takes_as_long_as_it_advances(
    engines: Engines, given: float | None, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N2: 70B over 25 Gbit/s takes 74 s. What is given is kept. Of two workers the first read is of tables alone."""
    asked: list[tuple[bool, bool]] = []
    fetch = Client.fetch

    def noted(client: Client, *named: Any, **how: Any) -> Any:
        asked.append((how["grows"], how["timeout_s"] <= (given or TIMEOUT_S)))
        return fetch(client, *named, **how)

    monkeypatch.setattr(Client, "fetch", noted)
    engine = engines("first", shards=shards)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        assert engine.update(1, given)["installed"]
    assert asked and set(asked) == {(given is None, True)} and len(asked) >= shards


def test_nothing_is_copied_for_peers_that_are_not_there(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """B5. The first version is offered, as others may be about to start; and all are again as soon as one has asked."""
    copied: list[int] = []
    publish = Client.publish

    def noted(client: Client, version: int, *given: Any, **how: Any) -> Any:
        if client.replica == "first" and given[1] == LAYOUT and how["copy"]:
            copied.append(version)
        return publish(client, version, *given, **how)

    monkeypatch.setattr(Client, "publish", noted)
    first = engines("first")
    with engines.trainer() as trainer:
        for version in (1, 2, 3):
            trainer.publish(version, toy_checkpoint(float(version)))
            update(first, version)
            assert value(first) == version
            serves = {1} if copied == [version] else set()
            wait_until(lambda serves=serves: {key.version for key in first._client.serving()} == serves)
        assert copied == [1] and first.poll()["served_version"] is None
        second = engines("second")
        assert update(second, 3)["layout"] == CHECKPOINT  # nobody has what it would rather read
        for version in (4, 5):
            trainer.publish(version, toy_checkpoint(float(version)))
            update(first, version)
            assert update(second, version)["layout"] == LAYOUT and value(second) == version
        assert copied == [1, 4, 5] and first.poll()["served_version"] == 5
