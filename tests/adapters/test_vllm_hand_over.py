"""What a worker that leaves for good does with what others may want of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tensorhub_plugins.core import Client, NotPublished, Server, VersionGone
from tensorhub_plugins.vllm.worker.hand_over import hand_over


@pytest.fixture
def client_of(hub: Server) -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(Client(hub.address, run="r", model="actor", replica=name))


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def test_the_last_copy_goes_to_one_who_wants_it(client_of: Any) -> None:
    trainer, leaver, other = client_of("trainer"), client_of("rollout-0"), client_of("rollout-1")
    trainer.publish(1, tensors(1.0))
    leaver.replicate(tensors(), 1)
    trainer.close()
    done = threading.Thread(target=lambda: outcome.append(hand_over(leaver, 20.0)))
    outcome: list[bool] = []
    done.start()
    taken = tensors()
    other.replicate(taken, 1, timeout_s=20)
    done.join(30)
    assert outcome == [True] and leaver.serving() == []
    leaver.close()
    assert torch.equal(client_of("rollout-2").fetch(1, timeout_s=10).tensors()["w"], tensors(1.0)["w"])


def test_one_of_many_leaves_at_once(client_of: Any) -> None:
    trainer, leaver = client_of("trainer"), client_of("rollout-0")
    trainer.publish(1, tensors(1.0))
    leaver.replicate(tensors(), 1)
    assert hand_over(leaver, 1e6)


def test_what_nobody_takes_is_lost_and_said(client_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The control: without a reader it waits, and no longer than it may."""
    trainer, leaver = client_of("trainer"), client_of("rollout-0")
    trainer.publish(1, tensors(1.0))
    leaver.replicate(tensors(), 1)
    trainer.close()
    assert not hand_over(leaver, 0.3)
    assert "leaving with the last copy of version [1]" in caplog.text
    leaver.close()
    with pytest.raises((VersionGone, NotPublished)):
        client_of("rollout-1").replicate(tensors(), 1, timeout_s=0.5)
