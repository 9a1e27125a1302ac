"""A reader whose bytes are mixed or damaged reads only those again, from any holder, and serves nothing meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from client_processes import SEGMENT, SEGMENTS, SIZE, hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import FAR, HELD, RUNTIME, holders, until

from tensorhub_plugins.core import CHECKPOINT, CorruptBytes, DeadlineExceeded, ShardKey

KEY = ShardKey(1, CHECKPOINT)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["rest"].view(torch.uint8)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_read_that_failed_half_way_is_finished_and_not_begun_again(stage, progress, transport):
    trainer, other, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "other", "rollout"))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    mine = zeros_like(tensors_of(1))
    with pytest.raises(DeadlineExceeded):
        rollout.replicate(mine, 1, timeout_s=1.0)
    assert rollout.serving() == [] and holders(trainer, 1) == ("trainer/0",)  # nothing in between
    assert len(progress.of("rollout")) == HELD
    let_go(trainer, 1)
    other.fetch(serve=True)
    trainer.close()  # any holder will do
    report = rollout.replicate(mine, 1, repair=True)
    assert same_bytes(mine, tensors_of(1))
    assert report.sources == {"other/0": SIZE - HELD * SEGMENT} and report.size_bytes == SIZE
    assert until(lambda: holders(other, 1) == ("other/0", "rollout/0"))
    third = stage.client("third", transports=(transport,))
    other.unpublish(1)
    assert same_bytes(third.fetch(1).tensors(), tensors_of(1))  # it serves what it never read, too


def test_without_repair_all_of_it_is_read(stage):
    """The control."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    mine = tensors_of(1)
    assert rollout.replicate(mine).sources == {"trainer/0": SIZE}
    rollout.unpublish(1)
    assert rollout.replicate(mine, repair=True).sources == {}  # all of it is there


def test_only_damaged_segments_are_read_again(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    mine = zeros_like(tensors_of(1))
    rollout.replicate(mine)
    flat(mine)[SEGMENT] ^= 1
    assert rollout.recheck(1) == ("rest",)
    assert rollout.serving() == []
    report = rollout.replicate(mine, repair=True)
    assert report.sources == {"trainer/0": SEGMENT} and same_bytes(mine, tensors_of(1))
    assert rollout.serving() == [KEY] and rollout.recheck(1) == ()


def test_a_version_after_the_one_that_failed_is_read_whole(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    mine = tensors_of(1)
    trainer.publish(2, tensors_of(2))
    report = rollout.replicate(mine, repair=True)
    assert same_bytes(mine, tensors_of(2)) and report.sources["trainer/0"] >= (SEGMENTS - 1) * SEGMENT


@pytest.mark.parametrize("how", ["no digests", "part of it", "into host memory"])
def test_what_cannot_be_compared_is_read(stage, how):
    options: dict[str, Any] = {"verify": how != "no digests"}
    trainer, rollout = stage.client("trainer", **options), stage.client("rollout", **options)
    trainer.publish(1, tensors_of(1))
    if how == "into host memory":
        fetched = rollout.fetch(1, (RUNTIME, CHECKPOINT), into=tensors_of(1), repair=True, converts=False)
        assert same_bytes(fetched.tensors(), tensors_of(1))
        return
    mine = zeros_like(tensors_of(1))
    if how == "part of it":
        del mine["embed"]
    assert rollout.replicate(mine, repair=True).sources["trainer/0"] > 0
    assert same_bytes(mine, {name: tensors_of(1)[name] for name in mine})


def test_a_repair_from_a_damaged_source_goes_elsewhere_or_fails(stage):
    near, rollout = stage.client("near"), stage.client("rollout")
    live, mine = tensors_of(1), tensors_of(1)
    near.publish(1, live, copy=False)
    flat(live)[SEGMENT] ^= 1
    flat(mine)[SEGMENT] ^= 3
    with pytest.raises(CorruptBytes):
        rollout.replicate(mine, 1, repair=True)
    far = stage.client("far", location=FAR)
    far.publish(1, tensors_of(1))
    assert rollout.replicate(mine, 1, repair=True).sources == {"far/0": SEGMENT} and same_bytes(mine, tensors_of(1))
