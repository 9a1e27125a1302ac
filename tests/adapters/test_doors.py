"""One story for every door: the framework repeats an update, skips one, starts again, resumes, ends between two;
rollouts die and join. verl and OpenRLHF have it in all their modes, with their own trainers (verl/test_updates.py).

A trainer's weights are the number of its optimizer steps, everywhere. Rollouts are processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import doors
from doors import DOORS, OwnLoop, rollout
from processes import Another, forkserver

from tensorhub_plugins.core import NotPublished, Server

pytestmark = pytest.mark.slow


@pytest.fixture
def story(hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("TENSORHUB_HUB", hub.address)
    with ExitStack() as stack:
        names = iter(range(100))

        def begun(kind: str, door: str, trained: int = 0) -> Any:
            name = f"{kind}{next(names)}"
            if kind == "rollout":
                started = Another(forkserver(), rollout, hub.address, name, door, tmp_path / name, doors.TIMEOUT_S)
                stack.callback(started.close)
                return started
            life = DOORS[door](hub.address, tmp_path / name, trained)
            stack.callback(life.leave)
            return life

        yield begun


@pytest.mark.parametrize("door", DOORS)
def test_the_story_of_a_run(story: Callable[..., Any], door: str) -> None:
    life, one, two = story("trainer", door), story("rollout", door), story("rollout", door)
    life.train()
    life.update()
    assert one.ask(1) == two.ask(1) == {1.0}
    life.update()  # it is asked for the same one again
    life.train()
    life.update()
    assert one.ask(2) == {2.0}
    life.train(3)  # steps without an update
    life.update()
    assert one.ask(5) == two.ask(5) == {5.0}
    two.kill()
    life.train()
    life.update()
    assert one.ask(6) == {6.0}
    three = story("rollout", door)
    assert three.ask(6) == {6.0}
    life.train()  # it ends between two updates, and what it published lives on
    life.leave()
    four = story("rollout", door)
    assert four.ask(6) == {6.0}
    again = story("trainer", door, trained=4)  # from a checkpoint
    again.train()
    again.update()
    assert one.ask(5) == four.ask(5) == {5.0}
    again.train()
    again.update()
    assert one.ask(6) == {6.0}


def test_the_story_sees_a_door_that_publishes_nothing(story: Callable[..., Any], monkeypatch: Any) -> None:
    """The control."""
    monkeypatch.setattr(doors, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(OwnLoop, "update", lambda self: None)
    life, one = story("trainer", "own loop"), story("rollout", "own loop")
    life.train()
    life.update()
    with pytest.raises(NotPublished):
        one.ask(1)
