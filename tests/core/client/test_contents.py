"""What is in place already is not asked for: a read that is resumed, or segments that have not changed."""

from __future__ import annotations

import pytest
import torch
from client_processes import SEGMENT, SIZE, hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import HELD

from tensorhub_plugins.core import DeadlineExceeded


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, but for one byte."""
    tensors["rest"][SEGMENT] ^= 1
    return tensors


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_read_that_failed_half_way_is_resumed(stage, progress, transport, in_place):
    trainer, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "rollout"))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    mine = zeros_like(tensors_of(1))
    with pytest.raises(DeadlineExceeded):
        rollout.replicate(mine, 1, timeout_s=1.0) if in_place else rollout.fetch(1, timeout_s=1.0)
    let_go(trainer, 1)
    if in_place:
        report = rollout.replicate(mine, 1)
        assert same_bytes(mine, tensors_of(1))
    else:
        fetched = rollout.fetch(1)
        report = fetched.report
        assert same_bytes(fetched.tensors(), tensors_of(1))
    assert report.sources == {"trainer/0": SIZE - HELD * SEGMENT}


def test_of_a_version_in_which_little_has_changed_only_that_is_read(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    trainer.publish(2, changed(tensors_of(1)))
    trainer.publish(3, changed(tensors_of(1)))
    mine = zeros_like(tensors_of(1))
    rollout.replicate(mine, 1)
    rollout.unpublish(1)
    assert rollout.replicate(mine, 2).sources == {"trainer/0": SEGMENT}
    assert same_bytes(mine, changed(tensors_of(1)))
    rollout.unpublish(2)
    assert rollout.replicate(mine, 3).sources == {} and rollout.recheck(3) == ()  # served, and read from nobody


def test_memory_that_its_user_wrote_to_is_read_again(stage):
    """What is known of it is a hint: the bytes decide."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    first = rollout.fetch(1)
    first.tensors()["rest"][SEGMENT] ^= 1
    first.release()
    again = rollout.fetch(1)
    assert again.report.sources == {"trainer/0": SEGMENT} and same_bytes(again.tensors(), tensors_of(1))
    again.release()
    assert rollout.fetch(1).report.sources == {}  # the control


def test_without_digests_everything_is_read(stage):
    trainer, rollout = stage.client("trainer", verify=False), stage.client("rollout", verify=False)
    trainer.publish(1, tensors_of(1))
    for _ in range(2):
        fetched = rollout.fetch(1)
        assert fetched.report.sources == {"trainer/0": SIZE}
        fetched.release()
