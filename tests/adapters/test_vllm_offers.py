"""What a worker does for others, and for how long it is waited for: with the real store and a toy model."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
from vllm_toys import LAYOUT, Engines, conversion, engines, toy_checkpoint, update, value, wait_until

from tensorhub_plugins.core import CHECKPOINT, Client, work
from tensorhub_plugins.vllm.worker.asked import Asked

__all__ = ["conversion", "engines"]  # fixtures
pytestmark = pytest.mark.usefixtures("conversion")


@pytest.mark.parametrize("grows", [True, False])
def test_the_background_is_waited_for_as_long_as_it_works(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: strict seconds."""
    asked, fetching, looks = Asked(), Future[None](), []

    def works() -> float:
        looks.append(time.monotonic())
        if len(looks) == 5:
            fetching.set_result(None)
        return looks[-1]

    monkeypatch.setattr(work, "last_at", works)
    answer = asked.ask(lambda: 7)
    if grows:
        asked.see_to(fetching, 0.01, grows=True)
    else:
        with pytest.raises(FutureTimeout):
            asked.see_to(fetching, 0.01, grows=False)
    assert answer.result() == 7 and len(looks) == (5 if grows else 0)


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
