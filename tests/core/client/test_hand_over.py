"""What a worker that leaves for good does with what others may want of it."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from client_processes import hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import HELD, SOON_S, Progress, Stage, until

from tensorhub_plugins.core import (
    Client,
    DeadlineExceeded,
    NotPublished,
    ShardKey,
    UsageError,
    VersionGone,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import hand_over, session


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def test_the_last_copy_goes_to_one_who_wants_it(stage: Stage) -> None:
    trainer, leaver, other = stage.client("trainer"), stage.client("rollout-0"), stage.client("rollout-1")
    trainer.publish(1, tensors(1.0))
    leaver.replicate(tensors(), 1)
    trainer.close()
    done = threading.Thread(target=lambda: outcome.append(leaver.hand_over(20.0)))
    outcome: list[bool] = []
    done.start()
    taken = tensors()
    other.replicate(taken, 1, timeout_s=20)
    done.join(30)
    assert outcome == [True] and leaver.serving() == []
    leaver.close()
    assert torch.equal(stage.client("rollout-2").fetch(1, timeout_s=10).tensors()["w"], tensors(1.0)["w"])


@pytest.mark.parametrize("publishes", [False, True], ids=["it has read it", "control: it has published it"])
def test_who_was_handed_the_last_copy_may_read_it(stage: Stage, publishes: bool) -> None:
    """The only rollout has it for others, at the hub's request, before it comes to read it."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    if publishes:
        rollout.publish(1, tensors(1.0))
        with pytest.raises(DeadlineExceeded, match="held: checkpoint by this worker itself"):
            rollout.fetch(1, timeout_s=0.2)
        return
    trainer.publish(1, tensors(1.0))
    assert trainer.hand_over(20.0)
    trainer.close()
    assert [key.version for key in rollout.serving()] == [1]
    live = tensors()
    for _ in range(2):
        assert rollout.replicate(live, timeout_s=SOON_S, serve=False).version == 1
        assert torch.equal(live["w"], tensors(1.0)["w"]) and rollout.recheck(1) == ()
    assert torch.equal(stage.client("late").fetch(1).tensors()["w"], tensors(1.0)["w"])


def test_one_of_many_leaves_at_once(stage: Stage) -> None:
    trainer, leaver = stage.client("trainer"), stage.client("rollout-0")
    trainer.publish(1, tensors(1.0))
    leaver.replicate(tensors(), 1)
    assert leaver.hand_over(1e6)


def test_what_nobody_takes_is_lost_and_said(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The control: without a reader it waits, and no longer than it may."""
    trainer, leaver = stage.client("trainer"), stage.client("rollout-0")
    trainer.publish(1, tensors(1.0))
    leaver.replicate(tensors(), 1)
    trainer.close()
    assert not leaver.hand_over(0.3)
    assert "leaving with version 1: it is the last copy, and no worker took it" in caplog.text
    leaver.close()
    with pytest.raises((VersionGone, NotPublished)):
        stage.client("rollout-1").replicate(tensors(), 1, timeout_s=0.5)


def test_it_ends_in_time_however_many_versions_an_absent_hub_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked: list[int] = []

    class Worker:
        def serving(self) -> list[ShardKey]:
            return [ShardKey(version, "checkpoint") for version in range(1, 40)]

        def unpublish(self, version: int, layout: str | None = None, *, timeout_s: float) -> None:
            asked.append(version)
            now[0] += timeout_s + session.ANSWER_MARGIN_S

    assert not hand_over.hand_over(Worker(), 2.0)
    assert now[0] < 2.5 and asked == [39]
    assert "leaving with version 38: there was no time left to unpublish it" in caplog.text
    assert not hand_over.hand_over(Worker(), 0.0)  # at least the newest is tried
    assert asked == [39, 39]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_read_that_is_not_over_keeps_no_other_version_here(
    stage: Stage, progress: Progress, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """The control: one that does not end is left, and named."""
    with start_server() as hub:  # at whose next heartbeat, in a second, the other one is asked for a copy
        stage.address = hub.address
        trainer, leaver, other = stage.client("trainer"), stage.client("rollout-0"), stage.client("rollout-1")
        trainer.retain(2)
        trainer.publish(1, tensors_of(1))
        leaver.replicate(zeros_like(tensors_of(1)), 1)
        trainer.unpublish(1)
        trainer.publish(2, tensors_of(2))
        hold_back(trainer, 2, HELD)
        reading = stage.begin(leaver.replicate, zeros_like(tensors_of(2)), 2)
        progress.wait("rollout-0", HELD)
        left = stage.begin(leaver.hand_over, SOON_S if ends else 0.3)
        if ends:
            taken = zeros_like(tensors_of(1))
            other.replicate(taken, 1, timeout_s=SOON_S)
            assert same_bytes(taken, tensors_of(1))
            until(lambda: {key.version for key in leaver.serving()} == {2})
            assert not left.done()
        else:
            assert left.result(SOON_S) is False
            assert "leaving with version 2: it is still being read here" in caplog.text
            assert "leaving with version 1: it is the last copy, and no worker took it" in caplog.text
        let_go(trainer, 2)
        reading.result(SOON_S)
        assert left.result(SOON_S) is ends


@pytest.mark.parametrize("timeout_s", [float("nan"), None, "5"])
def test_a_timeout_that_is_no_number_changes_nothing(stage: Stage, timeout_s: Any) -> None:
    leaver = stage.client("rollout-0")
    leaver.publish(1, tensors(1.0))
    with pytest.raises(UsageError, match="pass a number of seconds"):
        leaver.hand_over(timeout_s)
    assert [key.version for key in leaver.serving()] == [1] and not retained(leaver)


def retained(client: Client) -> bool:
    return any(entry.is_retained for entry in client._serving._shelf.entries.values())


def hellos(stage: Stage) -> dict[str, bool]:
    models = fetch_status(stage.address)["models"]
    return {w["worker"]: w["preemptible"] for each in models if each["run"] == stage.run for w in each["workers"]}


def test_the_environment_says_whether_a_worker_may_be_taken_away(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.client("plain")
    monkeypatch.setenv("TENSORHUB_PREEMPTIBLE", "1")
    stage.client("spot")
    stage.client("told", preemptible=False)
    assert hellos(stage) == {"plain/0": False, "spot/0": True, "told/0": False}
    monkeypatch.setenv("TENSORHUB_PREEMPTIBLE", "yes")
    with pytest.raises(UsageError, match="TENSORHUB_PREEMPTIBLE='yes': 1 on a node"):
        stage.client("unsure")


def test_a_signal_hands_over_what_only_a_spot_worker_has(stage: Stage) -> None:
    """As a plain loop does at a spot notice."""
    leaver = stage.client("rollout-0", preemptible=True)
    leaver.publish(1, tensors(1.0))
    left = threading.Event()

    def leave(*_: object) -> None:
        threading.Thread(target=lambda: leaver.hand_over(20.0) and left.set()).start()

    before = signal.signal(signal.SIGUSR2, leave)
    try:
        signal.raise_signal(signal.SIGUSR2)
        until(lambda: retained(leaver))  # nobody else has it
        assert not left.is_set()
        assert stage.client("rollout-1").fetch(1, serve=True).version == 1
        assert left.wait(SOON_S) and leaver.serving() == []
    finally:
        signal.signal(signal.SIGUSR2, before)
