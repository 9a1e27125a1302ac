"""Trainers in processes of their own that are killed, frozen and started again, and readers that go on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from client_processes import hold_back, let_go, same_bytes, tensors_of
from client_stage import HELD, SOON_S, until

from tensorhub_plugins.core import Client, Superseded, UsageError, VersionGone, process_lifetime, step_of, version_of
from tensorhub_plugins.core.client import history

AT_ONCE_S = 10.0  # below the 15 s after which a silent worker is given up


def test_a_loop_that_starts_again_goes_on_from_its_checkpoint(stage):
    """The whole story: killed at step 7, resumed from 5, without a wait; the readers go on with step 6."""
    former, rollout = stage.worker("trainer"), stage.client("rollout")
    assert former.call("begin", 0) == 0
    for step in (5, 6, 7):
        former.call("publish", step, step)
    assert rollout.fetch(5, serve=True).version == 5
    assert rollout.fetch(serve=True).version == 7
    former.kill()
    trainer = stage.client("trainer")
    attempt = trainer.begin(5, timeout_s=AT_ONCE_S)
    assert attempt == until(lambda: rollout.attempt) == 1
    until(lambda: [key.version for key in rollout.serving()] == [5])  # it has dropped what is superseded
    assert stage.client("late").fetch().version == rollout.target(7) == 5
    new = version_of(attempt, 6)
    trainer.publish(new, tensors_of(60))
    assert rollout.target(7) == rollout.wait(newer_than=7) == new and step_of(new) == 6
    fetched = rollout.fetch()
    assert fetched.version == new and same_bytes(fetched.tensors(), tensors_of(60))
    with pytest.raises(VersionGone, match="version 7 is superseded: attempt 1 has begun at step 5"):
        rollout.fetch(7)


def test_a_former_life_that_thaws_changes_nothing(stage, monkeypatch):
    former = stage.worker("trainer")
    former.call("begin", 0)
    for step in (6, 7):
        former.call("publish", step, step)
    former.freeze()
    trainer = stage.client("trainer")
    monkeypatch.setattr(history, "is_gone", lambda process: True)  # as if it had died; it will prove otherwise
    assert trainer.begin(6, timeout_s=AT_ONCE_S) == 1
    trainer.publish(version_of(1, 7), tensors_of(70))
    former.thaw()
    for call in (("publish", 8, 8), ("unpublish", 6), ("direct", "retain", 5), ("direct", "pin", 6)):
        with pytest.raises(RuntimeError, match="Superseded: "):
            former.call(*call)
    reader = stage.client("reader")
    assert reader.fetch().version == version_of(1, 7)
    assert former.call("follow", SOON_S)[0] == version_of(1, 7)  # it may read


def test_a_live_trainer_is_believed_not_the_copy_of_its_machine(stage, monkeypatch):
    trainer = stage.worker("trainer")
    trainer.call("begin", 0)
    trainer.call("publish", 7, 7)
    monkeypatch.setattr(history, "is_gone", lambda process: True)  # as on a machine that is a copy of the trainer's
    with pytest.raises(UsageError, match="trainer/0 is the trainer of .* and still sends heartbeats"):
        stage.client("trainer").begin(6)
    trainer.call("publish", 8, 8)
    assert stage.client("reader").fetch().version == 8


def test_a_second_trainer_is_refused_while_the_first_one_lives(stage):
    stage.worker("trainer").call("begin", 0)
    with pytest.raises(UsageError, match="trainer/0 is the trainer of .* and still sends heartbeats"):
        stage.client("trainer").begin(0)


def test_a_loop_begins_anew_in_its_own_process(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    for step in (1, 2, 3):
        trainer.publish(step, tensors_of(step))
    assert trainer.begin(1) == 1
    until(lambda: [key.version for key in trainer.serving()] == [1])
    trainer.publish(version_of(1, 2), tensors_of(20))
    assert same_bytes(rollout.fetch().tensors(), tensors_of(20))
    with pytest.raises(Superseded, match="version 4 cannot be published: attempt 1"):
        rollout.publish(4, tensors_of(4))
    with pytest.raises(UsageError, match="a step is below"):
        trainer.begin(-1)


@pytest.mark.parametrize("told", [True, False], ids=["told", "control"])
def test_an_attempt_begins_in_the_middle_of_a_transfer(stage, progress, monkeypatch, told):
    """The reader is told and stops. One that is not, as in the control, reads on to its end."""
    if not told:
        monkeypatch.setattr(Client, "_directed", lambda self, directive: None)
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    for step in (1, 2):
        trainer.publish(step, tensors_of(step))
    hold_back(trainer, 2, HELD)
    reading = stage.begin(rollout.fetch, serve=True)
    progress.wait("rollout", HELD)
    trainer.begin(1)
    if told:
        with pytest.raises(VersionGone, match="superseded by a newer attempt while it was read"):
            reading.result(SOON_S)
        assert until(lambda: rollout.serving() == [])
    else:
        let_go(trainer, 2)
        assert reading.result(SOON_S).version == 2


def test_a_process_is_told_from_a_later_one_with_its_number():
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tensorhub_plugins.core.process_lifetime import identity; print(identity(), end='')",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    here, _, started, word = process_lifetime.identity().rsplit(" ", 3)
    assert process_lifetime.is_gone(ended) and not ended.endswith(word)
    assert process_lifetime.is_gone(f"{here} {os.getpid()} {int(started) - 1} {word}")
    for lives in (
        process_lifetime.identity(),
        "",
        "x",
        f"another boot pid:[1] {os.getpid()} 7 {word}",
        f"{here} x 7 {word}",
    ):
        assert not process_lifetime.is_gone(lives), lives


def test_a_process_that_has_ended_and_was_not_waited_for_is_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = process_lifetime._started(child.pid)
    here = process_lifetime.identity().rsplit(" ", 3)[0]
    assert started and not process_lifetime.is_gone(f"{here} {child.pid} {started} word")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_lifetime.is_gone(f"{here} {child.pid} {started} word")
    child.wait()
