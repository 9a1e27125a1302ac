"""A runtime copy that is made over the one before: what it leaves for its readers, and what it ends in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from client_stage import RUNTIME
from delta_stage import HERE, SIZE, converter_and_peer, equal, follow, versions

from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.deltas import codec
from tensorhub_plugins.core.errors import DeadlineExceeded
from tensorhub_plugins.core.types import ShardKey

pytestmark = pytest.mark.usefixtures("compiled_first")


def converted(live: dict[str, torch.Tensor], version: dict[str, torch.Tensor]) -> None:
    """Change an engine's live weights, as an install does."""
    for name, tensor in live.items():
        tensor.view(torch.uint8).copy_(version[name].view(torch.uint8))


@pytest.mark.parametrize("delta", ["auto", "off"])
def test_a_copy_that_is_overwritten_leaves_deltas_of_its_layout(stage, delta, as_on_a_link):
    """An engine that converts each version publishes a copy of its live weights over the one before, for its peers."""
    engine, peer = converter_and_peer(stage, delta=delta)
    made = versions(4)
    live = {name: tensor.clone() for name, tensor in made[0].items()}
    memory = set()
    for version, tensors in enumerate(made, 1):
        converted(live, tensors)
        if version > 1:
            engine.unpublish(version - 1)  # so that its memory is free
        engine.publish(version, live, RUNTIME)
        memory.add(engine.find(ShardKey(version, RUNTIME)).slab)
        fetched = follow(peer, version, layouts=(RUNTIME,))
        assert equal(fetched.tensors(), tensors) and engine.recheck(version) == () and peer.recheck(version) == ()
        fetched.release()
        if delta == "off" or version == 1:
            assert fetched.report.delta_size_bytes == 0 and not engine.changes.deltas.size_bytes
        else:
            assert fetched.report.delta_size_bytes == sum(fetched.report.sources.values()) > SIZE // 2
            assert fetched.report.wire_size_bytes < SIZE // 30
    assert len(memory) == 1


def test_nothing_is_made_of_a_copy_that_no_reader_elsewhere_takes(stage):
    engine = stage.client("converter", location=HERE)
    for version, tensors in enumerate(versions(2), 1):
        engine.publish(version, tensors, RUNTIME)
        engine.unpublish(version) if version == 1 else None
    assert not engine.changes.deltas.size_bytes and engine.recheck(2) == ()


@pytest.mark.parametrize("way", ["written to", "other tensors", "strided", "late"])
def test_a_copy_over_other_bytes_ends_in_right_ones(stage, way, monkeypatch):
    """Whatever the memory held, or when no deltas can be made of it."""
    engine, peer = converter_and_peer(stage)
    v1, v2 = versions(2)
    engine.publish(1, v1, RUNTIME)
    follow(peer, 1, layouts=(RUNTIME,)).release()
    slab = engine.find(ShardKey(1, RUNTIME)).slab
    views = list(slab.tensors().values())
    engine.unpublish(1)
    if way == "written to":
        for tensor in views:
            tensor.view(torch.uint8)[::1000] ^= 1  # in every segment
    elif way == "other tensors":
        v2 = {"new": torch.ones(SIZE // 4), **v2}
    elif way == "strided":
        v2 = {**v2, "bf16": v2["bf16"].view(2, -1).expand(2, 2, -1)[0]}
        v2["bf16"] = torch.stack([v2["bf16"], v2["bf16"]], -1)[..., 0]
    else:
        monkeypatch.setattr(codec, "encode", _out_of_time)
        with pytest.raises(DeadlineExceeded):
            engine.publish(2, v2, RUNTIME)
        monkeypatch.undo()
    engine.publish(2, v2, RUNTIME)
    fetched = follow(peer, 2, layouts=(RUNTIME,))
    got = fetched.tensors()
    assert all(torch.equal(got[name].float(), tensor.float()) for name, tensor in v2.items())
    assert engine.recheck(2) == () and fetched.report.losses == ()


def _out_of_time(*_: Any) -> None:
    raise DeadlineExceeded("out of time")


def test_a_copy_ends_where_its_caller_is_interrupted(stage, monkeypatch):
    """At the next segment, so that the next call has its memory."""
    engine, peer = converter_and_peer(stage)
    v1, v2 = versions(2)
    engine.publish(1, v1, RUNTIME)
    follow(peer, 1, layouts=(RUNTIME,)).release()
    slab = engine.find(ShardKey(1, RUNTIME)).slab
    engine.unpublish(1)
    encode, segments = codec.encode, []

    def interrupting(old: Any, *arguments: Any) -> Any:
        segments.append(old)
        calls._mine.call.abandon()
        return encode(old, *arguments)

    monkeypatch.setattr(codec, "encode", interrupting)
    with pytest.raises(calls.Interrupted):
        engine.publish(2, v2, RUNTIME)
    assert len(segments) == 1
    monkeypatch.undo()
    engine.publish(2, v2, RUNTIME)
    assert engine.find(ShardKey(2, RUNTIME)).slab is slab and engine.recheck(2) == ()
    assert equal(follow(peer, 2, layouts=(RUNTIME,)).tensors(), v2)
