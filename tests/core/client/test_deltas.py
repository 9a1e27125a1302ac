"""Deltas between real clients: what has changed crosses the network; whatever is wrong ends in whole segments."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from client_stage import RUNTIME
from delta_stage import ELSEWHERE, HERE, SIZE, THERE, converter_and_peer, equal, follow, stepped, versions, weights

from tensorhub_plugins.core import CHECKPOINT, Client, Location, Part, TensorSpec, version_of
from tensorhub_plugins.core.client.changes import Changes, spans_of
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.deltas import codec
from tensorhub_plugins.core.deltas.pace import Pace
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.stream.source import ReaderConnection
from tensorhub_plugins.core.types import ShardKey

pytestmark = pytest.mark.usefixtures("compiled_first")


def test_a_version_costs_what_has_changed_and_is_passed_on(stage):
    """The trainer has forgotten the older version: its deltas were made before."""
    trainer, one, two = (
        stage.client(name, location=where) for name, where in (("trainer", HERE), ("one", THERE), ("two", ELSEWHERE))
    )
    v1, v2 = versions(2)
    trainer.publish(1, v1)
    held = [follow(client, 1) for client in (one, two)]
    trainer.publish(2, v2)
    assert trainer.changes.make_ahead(1, CHECKPOINT) > 0
    trainer.unpublish(1)
    first = follow(one, 2)
    assert equal(first.tensors(), v2)
    report = first.report
    assert report.delta_size_bytes == sum(report.sources.values()) > SIZE // 2  # as bytes of the version
    assert report.wire_size_bytes < SIZE // 30  # and as bytes of the wire
    trainer.unpublish(2)
    second = follow(two, 2)
    assert equal(second.tensors(), v2) and set(second.report.sources) == {"one/0"}
    assert second.report.wire_size_bytes == report.wire_size_bytes  # what one had received
    for fetched in (*held, first, second):
        fetched.release()


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_with_delta_off_at_either_end_all_of_it_is_read(stage, side):
    trainer, rollout = (
        stage.client(name, location=where, delta="off" if name == side else "auto")
        for name, where in (("trainer", HERE), ("rollout", THERE))
    )
    v1, v2 = versions(2)
    trainer.publish(1, v1)
    follow(rollout, 1)
    trainer.publish(2, v2)
    fetched = follow(rollout, 2)
    assert equal(fetched.tensors(), v2)
    assert fetched.report.delta_size_bytes == 0 and fetched.report.wire_size_bytes == sum(
        fetched.report.sources.values()
    )


def test_on_the_same_host_whole_segments_are_faster(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    v1, v2 = versions(2)
    trainer.publish(1, v1)
    follow(rollout, 1)
    trainer.publish(2, v2)
    assert follow(rollout, 2).report.delta_size_bytes == 0


@pytest.mark.parametrize("takes", [True, False])
def test_nothing_is_made_for_readers_that_take_whole_segments(stage, monkeypatch, takes):
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    monkeypatch.setattr(Pace, "takes_deltas", lambda self: takes)
    for version, tensors in enumerate(versions(4), 1):
        trainer.publish(version, tensors)
        if version == 2:  # at the first read nobody knew what is faster
            assert trainer.changes.make_ahead(1, CHECKPOINT) > 0
        if version == 4:
            assert (trainer.changes.make_ahead(3, CHECKPOINT) > 0) == takes
        follow(rollout, version)
        trainer.changes._ahead = trainer.changes._ahead if version != 2 else 0


def test_in_place_the_memory_itself_is_the_base(stage):
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    v1, v2 = versions(2)
    trainer.publish(1, v1)
    mine = {name: torch.zeros_like(tensor) for name, tensor in v1.items()}
    rollout.replicate(mine, 1)
    rollout.unpublish(1)
    trainer.publish(2, v2)
    trainer.changes.make_ahead(1, CHECKPOINT)
    report = rollout.replicate(mine, 2)
    assert equal(mine, v2) and report.wire_size_bytes < SIZE // 30 and rollout.recheck(2) == ()


def missed_up_to(stage: Any, last: int, made: list[dict[str, torch.Tensor]]) -> tuple[Any, Any]:
    """Return a trainer that has this version and the deltas up to it, and a rollout that stayed at version 1."""
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    trainer.publish(1, made[0])
    follow(rollout, 1)
    for version in range(2, last + 1):
        trainer.publish(version, made[version - 1])
        trainer.changes.make_ahead(version - 1, CHECKPOINT)
        trainer.unpublish(version - 1)
    return trainer, rollout


def test_a_reader_that_missed_versions_gets_a_chain(stage):
    made = versions(4)
    _, rollout = missed_up_to(stage, 4, made)
    fetched = follow(rollout, 4)
    assert equal(fetched.tensors(), made[3])
    assert 0 < fetched.report.wire_size_bytes < SIZE // 10 and fetched.report.delta_size_bytes > SIZE // 2


def test_the_last_delta_of_a_chain_is_made_when_it_is_asked_for(stage, as_on_a_link):
    """The source forgot the reader's version, has deltas up to the one before, and that one itself."""
    made = versions(4)
    trainer, rollout = missed_up_to(stage, 3, made)
    trainer.publish(4, made[3])
    before = trainer.changes.deltas.size_bytes
    fetched = follow(rollout, 4)
    assert equal(fetched.tensors(), made[3]) and trainer.changes.deltas.size_bytes > before
    assert 0 < fetched.report.wire_size_bytes < SIZE // 10 and fetched.report.delta_size_bytes > SIZE // 2


def test_where_nearly_everything_has_changed_it_is_read_whole(stage):
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    trainer.publish(1, weights(1))
    follow(rollout, 1)
    trainer.publish(2, weights(2))
    fetched = follow(rollout, 2)
    assert equal(fetched.tensors(), weights(2)) and fetched.report.wire_size_bytes <= SIZE * 1.01


def of_other_bytes(
    old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], manifest: Manifest, segment: int
) -> bytes:
    """A delta without a flaw, of a segment that nobody has published."""
    start, stop = manifest.segment_range(segment)
    before, after = (
        np.concatenate([np.frombuffer(view, np.uint8) for view in Slab.adopt(each).readable(start, stop)])
        for each in (old, new)
    )
    after[7] ^= 1
    made = codec.encode(before, after, spans_of(manifest, segment), codec.NUMPY)
    assert made is not None
    return made


def test_a_poisoned_delta_two_hops_away_ends_in_the_whole_segment(stage):
    """What `one` keeps of what it received is damaged; `two` repairs itself over the same link, and blames nobody."""
    trainer, one, two = (
        stage.client(name, location=where) for name, where in (("trainer", HERE), ("one", THERE), ("two", ELSEWHERE))
    )
    v1, v2 = versions(2)
    trainer.publish(1, v1)
    for client in (one, two):
        follow(client, 1)
    trainer.publish(2, v2)
    trainer.changes.make_ahead(1, CHECKPOINT)
    follow(one, 2)
    trainer.close()
    kept = one._serving.changes.deltas._kept
    assert len(kept) > 8
    manifest = one.find(ShardKey(2, CHECKPOINT)).manifest
    segments = {manifest.digest(segment): segment for segment in range(manifest.segment_count)}
    for number, (key, delta) in enumerate(list(kept.items())):
        damaged = bytearray(delta)
        damaged[-1 - number % 40] ^= 1 + number % 255
        other = of_other_bytes(v1, v2, manifest, segments[key[1]])
        kept[key] = [bytes(damaged), b"", delta[: len(delta) // 2], other][number % 4]
    first, second = list(kept)[:2]
    kept[first], kept[second] = kept[second], kept[first]
    fetched = follow(two, 2)
    assert equal(fetched.tensors(), v2) and fetched.report.losses == ()
    assert set(fetched.report.sources) == {"one/0"}


def test_a_wrong_base_ends_in_the_whole_segment(stage):
    """The reader's own memory is not what it takes it for."""
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    v1, v2 = versions(2)
    trainer.publish(1, v1)
    first = rollout.fetch(1)
    for tensor in first.tensors().values():
        tensor.view(torch.uint8)[::1000] ^= 1  # in every segment
    first.release()
    trainer.publish(2, v2)
    fetched = rollout.fetch(2)
    assert equal(fetched.tensors(), v2) and fetched.report.delta_size_bytes == 0
    assert rollout._serving.changes.deltas.size_bytes == 0  # nothing wrong is passed on


def test_segments_that_another_version_here_has_are_copied(stage):
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    v1 = weights()
    v2 = {**v1, "fp32": v1["fp32"] + 1}
    trainer.publish(1, v1)
    follow(rollout, 1)
    trainer.publish(2, v2)
    fetched = rollout.fetch(2)
    assert equal(fetched.tensors(), v2) and sum(fetched.report.sources.values()) < SIZE // 2


def test_a_runtime_layout_takes_deltas_too(stage):
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    v1, v2 = versions(2)
    trainer.publish(1, v1, RUNTIME)
    trainer.publish(1, v1)
    follow(rollout, 1, layouts=(RUNTIME,))
    trainer.publish(2, v2, RUNTIME)
    trainer.publish(2, v2)
    assert trainer.changes.make_ahead(1, RUNTIME) > 0
    fetched = follow(rollout, 2, layouts=(RUNTIME,))
    assert equal(fetched.tensors(), v2) and fetched.report.wire_size_bytes < SIZE // 30


@pytest.mark.slow
def test_a_run_with_a_hub_that_restarts_a_joiner_and_an_attempt_that_is_resumed(stage, monkeypatch):
    """Every rollout has the published bytes at every version, and takes what has changed where it holds something."""
    monkeypatch.setattr(Pace, "takes_deltas", lambda self: True)  # as on a link, which this host has not
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer, steady, misses = (
        stage.client(name, location=where)
        for name, where in (("trainer", HERE), ("steady", THERE), ("misses", ELSEWHERE))
    )
    trainer.begin(0)
    made = versions(6)
    wire: dict[tuple[str, int], int] = {}

    def publish(version: int, tensors: dict[str, torch.Tensor], before: int = 0) -> None:
        trainer.publish(version, tensors)
        if before:
            trainer.changes.make_ahead(before, CHECKPOINT)
            trainer.unpublish(before)

    def read(client: Client, version: int, truth: dict[str, torch.Tensor]) -> None:
        fetched = follow(client, version)
        assert equal(fetched.tensors(), truth) and client.recheck(version) == ()
        wire[client.replica, version] = fetched.report.wire_size_bytes
        fetched.release()

    publish(1, made[0])
    for client in (steady, misses):
        read(client, 1, made[0])
    for version in (2, 3, 4):
        publish(version, made[version - 1], version - 1)
        read(steady, version, made[version - 1])
    read(misses, 4, made[3])  # three at once
    hub.kill()
    stage.hub(stage.address)
    joins = stage.client("joins", location=Location(host="d"))
    publish(5, made[4], 4)
    for client in (steady, misses, joins):
        read(client, 5, made[4])
    again = version_of(trainer.begin(4), 5)  # from step 4: other weights than those of version 5, which is dropped
    resumed = [stepped(made[3], 98), stepped(stepped(made[3], 98), 99)]
    for number, tensors in enumerate(resumed):
        publish(again + number, tensors, number and again)
        for client in (steady, misses, joins):
            read(client, again + number, tensors)
    whole = {where for where, size in wire.items() if size > SIZE // 2}
    joined = {("steady", 1), ("misses", 1), ("joins", 5)}
    assert whole <= {*joined, *((client.replica, again) for client in (steady, misses, joins))} and whole >= joined
    assert 0 < wire["misses", 4] < SIZE // 5 and all(wire.values())


def test_what_is_offered_no_more_is_freed_without_a_garbage_collection(stage):
    """A training loop may switch the collector off; a version that waits for it costs the memory of another one."""
    trainer, rollout = stage.client("trainer", location=HERE), stage.client("rollout", location=THERE)
    left = []

    def fresh(value: int) -> dict[str, torch.Tensor]:
        array = np.full(SIZE // 4, value, np.int16)
        left.append(weakref.ref(array))
        return {"a": torch.from_numpy(array)}

    gc.disable()
    try:
        for version in (1, 2, 3):
            trainer.publish(version, fresh(version), copy=False)
            rollout.replicate(fresh(0), version)
        for client in (trainer, rollout):
            client.unpublish(1)
            client.unpublish(2)
        soon = time.monotonic() + 10.0
        while any(each() is not None for each in left[:4]) and time.monotonic() < soon:
            time.sleep(0.01)  # threads of reads that have ended
        assert [each() is None for each in left] == [True] * 4 + [False] * 2
    finally:
        gc.enable()


def test_deltas_that_are_being_made_keep_no_memory_from_the_next_version(stage, monkeypatch):
    began = threading.Event()

    def make_ahead(self: Changes, version: int, layout: str, is_over: Callable[[], bool]) -> int:
        began.set()
        while not is_over():
            time.sleep(0.001)
        time.sleep(0.05)  # the segment that it is at
        return 0

    monkeypatch.setattr(Changes, "make_ahead", make_ahead)
    tensors = {"a": torch.zeros(SIZE // 4)}
    trainer = stage.client("trainer", memory_budget_bytes=2 * SIZE, over_budget="refuse")
    publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10)
    for step in (1, 2, 3, 4):
        publisher.publish(step, tensors.items())
        tensors["a"] += 1
        assert step == 1 or began.wait(10)
        began.clear()
    assert len(trainer._serving.pool._handed_out) == 2
    publisher.close()


def test_what_is_over_has_time_for_deltas_as_soon_as_the_next_one_is_there(stage):
    noted = []

    class Noted(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, version: Any) -> None:  # type: ignore[override]
            noted.append(publisher._is_publishing)
            super().put(version)

    publisher = Publisher(stage.client("trainer"), rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10)
    publisher._retired = Noted()
    for step in (1, 2):
        publisher.publish(step, weights().items())
    assert noted == [False]
    publisher.close()


ROWS, COLUMNS = 1024, 512  # of bf16: 1 MiB, in 16 segments


def part_of(name: str, start: tuple[int, int], shape: tuple[int, int]) -> TensorSpec:
    return TensorSpec(name, "bfloat16", shape, 2 * shape[0] * shape[1], None, Part((ROWS, COLUMNS), start))


def matrices(count: int) -> list[dict[str, torch.Tensor]]:
    """Versions of two matrices, of which only the first one changes."""
    make = torch.Generator().manual_seed(3)
    first, same = (torch.randn(ROWS, COLUMNS, generator=make).to(torch.bfloat16) for _ in range(2))
    made = [{"a": first, "b": same}]
    while len(made) < count:
        made.append({**stepped({"a": made[-1]["a"]}, len(made)), "b": same})
    return made


@pytest.mark.usefixtures("as_on_a_link")
def test_a_reader_of_a_part_gets_deltas_of_the_segments_that_it_wants_whole(stage):
    """Its memory is the base, and serves nobody. Of columns no segment is wanted whole: the control."""
    trainer, reader = stage.client("trainer", location=HERE), stage.client("reader", location=THERE)
    made = matrices(3)
    wanted = [part_of("a", (100, 0), (700, COLUMNS)), part_of("b", (0, 0), (ROWS // 2, COLUMNS))]
    columns = [part_of("a", (0, 0), (ROWS, 8))]
    for version, tensors in enumerate(made, 1):
        trainer.publish(version, tensors)
        trainer.changes.make_ahead(version - 1, CHECKPOINT)
        fetched = reader.fetch(version, wanted=wanted)
        assert torch.equal(fetched.tensors()["a"], tensors["a"][100:800])
        assert torch.equal(fetched.tensors()["b"], tensors["b"][: ROWS // 2])
        report, segment = fetched.report, trainer.find(ShardKey(version, CHECKPOINT)).manifest.segment_size_bytes
        fetched.release()
        if version > 1:
            ends = 2 * segment  # each holds rows that are not wanted
            assert report.delta_size_bytes == sum(report.sources.values()) - ends > SIZE // 2
            assert ends < report.wire_size_bytes < ends + SIZE // 30  # nothing of b, which has not changed
        fetched = reader.fetch(version, wanted=columns)
        assert fetched.report.delta_size_bytes == 0 and torch.equal(fetched.tensors()["a"], tensors["a"][:, :8])
        fetched.release()


@pytest.mark.usefixtures("as_on_a_link")
def test_a_part_that_was_written_to_meanwhile_comes_whole(stage):
    trainer, reader = stage.client("trainer", location=HERE), stage.client("reader", location=THERE)
    made = matrices(2)
    wanted = [part_of(name, (0, 0), (ROWS // 2, COLUMNS)) for name in "ab"]
    trainer.publish(1, made[0])
    fetched = reader.fetch(1, wanted=wanted)
    for tensor in fetched.tensors().values():
        tensor.zero_()
    fetched.release()
    trainer.publish(2, made[1])
    assert trainer.changes.make_ahead(1, CHECKPOINT) > 0
    fetched = reader.fetch(2, wanted=wanted)
    assert all(torch.equal(fetched.tensors()[name], made[1][name][: ROWS // 2]) for name in "ab")
    assert fetched.report.delta_size_bytes == 0 and fetched.report.losses == ()


@pytest.mark.usefixtures("as_on_a_link")
@pytest.mark.parametrize("into", ["memory of its own", "tensors in place"])
def test_shards_of_parts_come_as_deltas(stage, into):
    """As FSDP ranks publish them: each has rows of every matrix."""
    ranks = [stage.client("trainer", shard=rank, shard_count=2, location=HERE) for rank in range(2)]
    reader = stage.client("reader", location=THERE)
    mine = {name: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16) for name in "ab"}
    half = ROWS // 2
    for version, tensors in enumerate(matrices(3), 1):
        for rank, trainer in enumerate(ranks):
            rows = {name: tensor[rank * half : (rank + 1) * half] for name, tensor in tensors.items()}
            parts = {name: Part((ROWS, COLUMNS), (rank * half, 0)) for name in rows}
            trainer.publish(version, rows, parts=parts)
            trainer.changes.make_ahead(version - 1, CHECKPOINT)
        if into == "tensors in place":
            report = reader.replicate(mine, version, parts={name: Part((ROWS, COLUMNS), (0, 0)) for name in mine})
            assert equal(mine, tensors)
        else:
            fetched = follow(reader, version)
            assert equal(fetched.tensors(), tensors)
            report = fetched.report
        if version > 1:
            assert report.delta_size_bytes >= 2 * ROWS * COLUMNS and report.wire_size_bytes < SIZE // 30


@pytest.mark.usefixtures("as_on_a_link")
def test_slices_come_as_deltas_to_the_worker_that_takes_them(stage):
    """As a tensor parallel engine reads them, one worker's rows of one matrix and columns of another."""
    trainer, reader = stage.client("trainer", location=HERE), stage.client("reader", location=THERE)
    half = COLUMNS // 2
    for version, tensors in enumerate(matrices(3), 1):
        sliced = {f"{k:03}/a": tensors["a"][:, k * half : (k + 1) * half].contiguous() for k in range(2)}
        parts = {f"{k:03}/a": Part((ROWS, COLUMNS), (0, k * half), "a") for k in range(2)}
        trainer.publish(version, sliced, parts=parts)
        trainer.changes.make_ahead(version - 1, CHECKPOINT)
        fetched = reader.fetch(version, wanted=[part_of("a", (0, half), (ROWS, half))])
        assert torch.equal(fetched.tensors()["a"], tensors["a"][:, half:])
        report = fetched.report
        fetched.release()
        if version > 1:
            assert report.delta_size_bytes == sum(report.sources.values()) and report.wire_size_bytes < SIZE // 30


def test_a_source_that_dies_in_the_middle_of_its_deltas_costs_what_was_on_its_way(stage, monkeypatch):
    """The rest comes from another, as deltas, too; what had come is not asked for again."""
    engine, peer = converter_and_peer(stage)
    other = stage.client("other", location=ELSEWHERE)
    v1, v2 = versions(2)
    for client in (engine, other):
        client.publish(1, v1, RUNTIME)
    follow(peer, 1, layouts=(RUNTIME,)).release()
    for client in (engine, other):
        client.changes.wanted()
        client.publish(2, v2, RUNTIME)
        client.changes.make_ahead(1, RUNTIME)
    frames, lock, send = 0, threading.Lock(), ReaderConnection._send

    def dying(self: ReaderConnection, *arguments: Any) -> int:
        nonlocal frames
        with lock:
            frames += 1
            dies = frames == 4
        if dies:
            self._channel.send([b"\5\0\0\0\0"], time.monotonic() + 5)  # a part of the next header
            self._channel.cut()
        return send(self, *arguments)

    monkeypatch.setattr(ReaderConnection, "_send", dying)
    fetched = follow(peer, 2, layouts=(RUNTIME,))
    assert equal(fetched.tensors(), v2) and len(fetched.report.losses) == 1
    assert fetched.report.delta_size_bytes == sum(fetched.report.sources.values()) and len(fetched.report.sources) == 2


def test_no_delta_starts_from_an_older_version_than_the_one_that_is_still_here(stage, as_on_a_link):
    """The memory that is overwritten has the last but one; a delta from that would be taken for being there."""
    trainer, reader = converter_and_peer(stage)
    for version, tensors in enumerate(versions(4), 1):
        trainer.publish(version, tensors)
        if version > 2:
            assert not any(
                made == trainer.find(ShardKey(version, CHECKPOINT)).manifest.digest(0) for _, made in kept(trainer)
            )
        follow(reader, version).release()
        if version > 1:
            trainer.unpublish(version - 1)


def kept(client: Any) -> list[tuple[bytes, bytes]]:
    return list(client.changes.deltas._kept)
