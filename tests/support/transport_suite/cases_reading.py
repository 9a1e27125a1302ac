"""Cases of the conformance suite: what is read arrives, in pipelines too; withdrawal; readers that come and go."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import torch

from tensorhub_plugins.core.errors import SourceLost, UsageError, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.transports import NotServable
from tensorhub_plugins.core.types import ShardKey
from transport_suite.bench import Bench
from transport_suite.material import (
    NEAR_S,
    POISON,
    SEGMENT_SIZE_BYTES,
    blank_like,
    far,
    make_tensor,
    moves_to,
    near,
    raises,
    raw,
    read_equal,
    require,
    require_equal,
    sample_tensors,
    waits_since,
)
from transport_suite.peers import Victim

# --- what is read arrives ---


def check_exact_bytes(bench: Bench) -> None:
    """Check every dtype, scalars, nothing at all, tensors far smaller and far bigger than a segment, odd strides."""
    for kind in ("allocated", "adopted"):
        tensors = sample_tensors(seed=1)
        with bench.source() as source:
            offer = source.offer(tensors, kind=kind)
            with bench.link(source) as link:
                try:
                    manifest = bench.open(link, offer.key)
                except NotServable:
                    require(kind != bench.slabs, f"an {kind} slab must be servable")
                    continue
                require(manifest == offer.manifest, "open() must return the manifest as published")
                target = blank_like(tensors)
                bench.read_all(link, manifest, bench.adopt(target))
                require_equal(target, tensors)
                require(link.check(deadline=far()), "check() must be True when nothing changed")


def check_again_on_the_same_link(bench: Bench) -> None:
    """Check that a link reads one version after another, and an unpublished one in between does no harm."""
    with bench.source() as source, bench.link(source) as link:
        for version in (1, 2, 3):
            tensors = sample_tensors(seed=version)
            offer = source.offer(tensors, version=version)
            with raises(VersionGone, "opening what is not offered"):
                bench.open(link, ShardKey(version + 100, "checkpoint"))
            manifest = bench.open(link, offer.key)
            target = blank_like(tensors)
            bench.read_all(link, manifest, bench.adopt(target))
            require(link.check(deadline=far()), "check() must be True when nothing changed")
            require_equal(target, tensors)


def check_only_what_was_asked_for(bench: Bench) -> None:
    """Check some segments, not in order: the rest of the target stays untouched."""
    tensors = {"a": make_tensor("uint8", (40 * SEGMENT_SIZE_BYTES + 5,), seed=3)}
    with bench.reading(tensors) as (offer, _, link):
        asked = [40, 0, 7, 8, 9, 3, 22]
        target = blank_like(tensors)
        got = list(read_equal(link, asked, bench.adopt(target), deadline=far()))
        require(sorted(got) == sorted(asked), f"read({asked}) yielded {got}")
        expected = bytearray([POISON]) * (40 * SEGMENT_SIZE_BYTES + 5)
        for segment in asked:
            start, stop = offer.manifest.segment_range(segment)
            expected[start:stop] = raw(tensors["a"])[start:stop]
        require(
            raw(target["a"]) == bytes(expected),
            "bytes outside the segments asked for were touched, or theirs are wrong",
        )
        require(list(read_equal(link, [], bench.adopt(target), deadline=far())) == [], "read([]) must yield nothing")


def check_several_shards_into_one_target(bench: Bench) -> None:
    """Check two shards whose names interleave, and unwanted tensors of both, which are digested all the same."""
    tensors = sample_tensors(seed=4)
    names = sorted(tensors)
    wanted = {name: tensor for index, (name, tensor) in enumerate(sorted(tensors.items())) if index % 5}
    target = blank_like(wanted)
    with bench.adopt(target) as slab, bench.source() as source:
        offsets = dict(zip((spec.name for spec in slab.specs), slab.manifest(SEGMENT_SIZE_BYTES).offsets, strict=True))
        for shard in range(2):
            part = {name: tensors[name] for name in names[shard::2]}
            offer = source.offer(part, key=ShardKey(1, "checkpoint", shard, 2))
            with bench.link(source) as link:
                manifest = bench.open(link, offer.key)
                moves = moves_to(manifest, [offsets.get(spec.name, -1) for spec in manifest.tensors])
                bench.read_all(link, manifest, slab, moves)
                require(link.check(deadline=far()), "check() must be True when nothing changed")
    require_equal(target, wanted)


def check_nothing_wanted(bench: Bench) -> None:
    """Check that a read of nothing writes nothing."""
    tensors = sample_tensors(seed=5)
    with bench.reading(tensors) as (offer, _, link):
        target = {"other": make_tensor("uint8", (1 << 20,), seed=6)}  # could hold any of them by mistake
        before = raw(target["other"])
        bench.read_all(link, offer.manifest, bench.adopt(target), [])
        require(raw(target["other"]) == before, "unwanted tensors were written into the target")


def check_empty_shard(bench: Bench) -> None:
    """Check a shard without tensors, or without any bytes."""
    for tensors in ({}, {"a": torch.empty(0, 3), "b": torch.empty(0, dtype=torch.int8)}):
        with bench.reading(tensors) as (offer, _, link):
            got = bench.read_all(link, offer.manifest, bench.adopt(blank_like(tensors)))
            require(got == [], "an empty shard has no segments")
            require(link.check(deadline=far()), "check() must be True when nothing changed")


def check_many_tiny_tensors(bench: Bench) -> None:
    """Check more tensors in a segment than one system call takes buffers, in memory of their own."""
    tensors = {f"t{index:05d}": make_tensor("bfloat16", (1 + index % 5,), seed=index) for index in range(5000)}
    with bench.reading(tensors, segment_size_bytes=1 << 20) as (offer, _, link):
        target = blank_like(tensors)
        bench.read_all(link, offer.manifest, bench.adopt(target))
        require_equal(target, tensors)


def check_many_readers(bench: Bench) -> None:
    """Check that several readers at a time get the same bytes."""
    tensors = {"a": make_tensor("uint8", (8 << 20,), seed=7)}
    with bench.source() as source:
        offer = source.offer(tensors, segment_size_bytes=1 << 20)
        problems: list[BaseException] = []

        def read() -> None:
            try:
                with bench.link(source) as link:
                    manifest = bench.open(link, offer.key)
                    target = blank_like(tensors)
                    bench.read_all(link, manifest, bench.adopt(target))
                    require_equal(target, tensors)
                    require(link.check(deadline=far()), "check() must be True when nothing changed")
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=read, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(bench.patience_s)
        require(not any(thread.is_alive() for thread in threads), "eight readers at once did not finish")
        if problems:
            raise problems[0]


def check_changed_bytes_show(bench: Bench) -> None:
    """Check that a broken contract is detected: digest() is computed from what arrived, not copied from the manifest.
    The first byte counts, and the last one of the last segment, which is shorter."""
    tensors = {"a": make_tensor("uint8", (8 * SEGMENT_SIZE_BYTES - 13,), seed=8)}
    with bench.source() as source:
        offer = source.offer(tensors)
        live = offer.slab.tensors()["a"]
        for at in (0, 3 * SEGMENT_SIZE_BYTES + 11, -1):
            live[at] ^= 1  # one bit
        one, other = (slice(i * SEGMENT_SIZE_BYTES, (i + 1) * SEGMENT_SIZE_BYTES) for i in (5, 6))
        live[one], live[other] = live[other].clone(), live[one].clone()  # two whole segments swapped
        with bench.link(source) as link:
            manifest = bench.open(link, offer.key)
            slab = bench.adopt(blank_like(tensors))
            wrong = [
                segment
                for segment in read_equal(link, range(8), slab, deadline=far())
                if link.digest(segment) != manifest.digest(segment)
            ]
            require(sorted(wrong) == [0, 3, 5, 6, 7], f"0, 3, 5, 6 and 7 were changed, digest() says {sorted(wrong)}")


def check_wrong_use(bench: Bench) -> None:
    """UsageError before anything is sent, and the link stays good."""
    tensors = {"a": make_tensor("uint8", (5000,), seed=9)}
    with bench.source() as source, bench.link(source) as link:
        offer = source.offer(tensors)
        slab = bench.adopt(blank_like(tensors))
        with raises(UsageError, "reading before open()"):
            list(read_equal(link, [0], slab, deadline=far()))
        manifest = bench.open(link, offer.key)
        for segments, move, what in (
            ([manifest.segment_count], Move(0, 0, 5000), "a segment that is not there"),
            ([-1], Move(0, 0, 5000), "a negative segment"),
            ([0], Move(1, 0, 5000), "more than the source has"),
            ([0], Move(0, 1, 5000), "a tensor that does not fit into the target"),
        ):
            with raises(UsageError, what):
                list(link.read(segments, slab, [move], deadline=far()))
        bench.read_all(link, manifest, slab)
        require(link.check(deadline=far()), "the link must survive UsageErrors")


# --- pipelined sources ---


def check_pipelined(bench: Bench) -> None:
    """Check that a segment is yielded as soon as it is ready, and not served before."""
    tensors = {"a": make_tensor("uint8", (6 * SEGMENT_SIZE_BYTES,), seed=10)}
    with bench.source() as source:
        offer = source.offer(tensors, ready=False)
        content = raw(tensors["a"])
        live = offer.slab.tensors()["a"]
        live.fill_(POISON)
        with bench.link(source) as link:
            bench.open(link, offer.key)
            target = blank_like(tensors)
            reading = read_equal(link, range(6), bench.adopt(target), deadline=far())
            for segment in range(6):
                start, stop = offer.manifest.segment_range(segment)
                live[start:stop] = torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8)
                offer.mark_ready(segment)
                got = bench.soon(lambda: next(reading), "yield a segment that is ready before the next one is")
                require(got == segment, f"segment {segment} was the only one ready, {got} was yielded")
                require(link.digest(segment) == offer.manifest.digest(segment), "served before it was ready")
            bench.finish(reading)
            require_equal(target, tensors)


def check_late_segment(bench: Bench) -> None:
    """Check a source whose segment does not arrive: ready ones are yielded, then SourceLost at the deadline."""
    tensors = {"a": make_tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=11)}
    with bench.source() as source:
        offer = source.offer(tensors, ready=False)
        offer.mark_ready(0)
        offer.mark_ready(1)
        with bench.link(source) as link:
            bench.open(link, offer.key)
            deadline = time.monotonic() + NEAR_S
            reading = read_equal(link, range(4), bench.adopt(blank_like(tensors)), deadline=deadline)
            got: list[int] = []
            bench.lost_by(deadline, lambda: got.extend(reading), "wait for a segment that never comes")
        bench.no_readers(offer, "a read that ended at its deadline")


def check_waiting_source_says_so(bench: Bench) -> None:
    """Check that a source that waits for bytes itself reports so repeatedly, and names the segments it waited for."""
    tensors = {"a": make_tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=27)}
    with bench.source() as source:
        offer = source.offer(tensors, ready=False)
        offer.mark_ready(0)
        with bench.link(source) as link:
            bench.open(link, offer.key)
            progress = link.progress
            reading = read_equal(link, range(4), bench.adopt(blank_like(tensors)), deadline=far())
            require(next(reading) == 0, "segment 0 was the only one ready")
            require(not progress.delayed_segments, f"segment 0 was ready, {progress.delayed_segments} are delayed")
            got: list[int] = []

            def read_on() -> None:
                with contextlib.suppress(SourceLost):  # what this leaves out is missed below
                    got.extend(reading)

            reader = threading.Thread(target=read_on, daemon=True)
            reader.start()
            for _ in range(2):
                before = time.monotonic()
                bench.until(partial(waits_since, progress, before), lambda: "a source that waits did not say so")
                require(progress.heard_at >= before, "a source that says that it waits was heard of")
            offer.mark_all_ready()
            reader.join(bench.patience_s)
            require(sorted(got) == [1, 2, 3], f"segments 1, 2 and 3 were due, {got} were yielded")
            late = progress.delayed_segments
            require(1 in late, f"segment 1 was waited for, delayed_segments are {late}")
            list(read_equal(link, [0], bench.adopt(blank_like(tensors)), deadline=far()))
            require(not progress.delayed_segments, "delayed_segments are those of this read")


def check_expected_offer(bench: Bench) -> None:
    """Check that a reader waits for an offer which is about to be made; for any other it gets an answer at once."""
    tensors = {"a": make_tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=28)}
    with bench.source() as source, bench.link(source) as link:
        key = ShardKey(1, "checkpoint")
        source.shelf.announce(key)
        opened: list[Manifest | BaseException] = []

        def open_it() -> None:
            try:
                opened.append(bench.open(link, key))
            except BaseException as error:
                opened.append(error)

        opening = threading.Thread(target=open_it, daemon=True)
        opening.start()
        bench.until(lambda: bool(source.shelf.waiting or opened), lambda: "nobody waits for an offer that is expected")
        offer = source.offer(tensors, key=key)
        opening.join(bench.patience_s)
        require(opened == [offer.manifest], f"an offer was about to be made, open() answered {opened}")
        target = blank_like(tensors)
        bench.read_all(link, offer.manifest, bench.adopt(target))
        require_equal(target, tensors)
        with raises(VersionGone, "opening what is not offered"):
            bench.soon(lambda: bench.open(link, ShardKey(2, "checkpoint")), "say that it is not offered")


def check_more_while_reading(bench: Bench) -> None:
    """Check that further segments are requested and read while the first ones still arrive."""
    tensors = {"a": make_tensor("uint8", (6 * SEGMENT_SIZE_BYTES,), seed=29)}
    with bench.reading(tensors) as (offer, _, link):
        later = [[4, 2], [5]]
        target = blank_like(tensors)
        slab = bench.adopt(target)
        got = list(read_equal(link, [0, 1, 3], slab, deadline=far(), more=lambda: later.pop(0) if later else []))
        require(sorted(got) == list(range(6)), f"segments 0 to 5 were asked for one after the other, not {got}")
        require_equal(target, tensors)
        require(link.check(deadline=far()), "check() must be True when nothing changed")


# --- withdrawal ---


def check_withdrawn_in_mid_read(bench: Bench) -> None:
    """Check that withdraw() returns soon although a reader waits, which learns of it long before its deadline."""
    tensors = {"a": make_tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=12)}
    with bench.source() as source:
        offer = source.offer(tensors, ready=False)
        for segment in range(4):
            offer.mark_ready(segment)
        with bench.link(source) as link:
            manifest = bench.open(link, offer.key)
            reading = read_equal(link, range(8), bench.adopt(blank_like(tensors)), deadline=far())
            got = [next(reading) for _ in range(4)]
            require(sorted(got) == [0, 1, 2, 3], f"the first four were ready, {got} were yielded")
            require(offer.active_readers >= 1, f"one link reads the offer, it counts {offer.active_readers}")
            bench.soon(offer.withdraw, "return from withdraw()")
            require(offer.active_readers == 0, "withdraw() returned while a reader was attached")
            offer.slab.tensors()["a"].fill_(POISON)  # the owner goes on
            rest: list[int] = []
            bench.lost_soon(lambda: rest.extend(reading), "go on reading what was withdrawn")
            require(not rest, f"segments {rest} were yielded after they were withdrawn")
            require(all(link.digest(s) == manifest.digest(s) for s in range(4)), "yielded bytes were torn")
            require(not link.check(deadline=near()), "check() must be False once the offer was withdrawn")
        with bench.link(source) as link, raises(VersionGone, "opening what was withdrawn"):
            bench.open(link, offer.key)


def check_withdrawn_before_read(bench: Bench) -> None:
    """Check an offer that is opened and left alone: withdrawing does not wait for that reader, and it does not read."""
    tensors = {"a": make_tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=13)}
    with bench.reading(tensors) as (offer, _, link):
        bench.soon(offer.withdraw, "return from withdraw()")
        offer.slab.tensors()["a"].fill_(POISON)
        slab = bench.adopt(blank_like(tensors))
        bench.lost_soon(lambda: list(read_equal(link, range(8), slab, deadline=far())), "read what was withdrawn")


def check_never_torn(bench: Bench) -> None:
    """Overwrite the owner's memory the moment withdraw() returns, at all stages of a read."""
    size_bytes, count = 16 << 20, 64
    tensors = {"a": make_tensor("uint8", (size_bytes,), seed=14)}
    target = blank_like(tensors)
    with bench.source() as source, bench.adopt(target) as slab:
        for stop_after in (0, 1, 2, 4, 8, 16, 32, 48):
            offer = source.offer(tensors, segment_size_bytes=size_bytes // count, version=stop_after + 1)
            with bench.link(source) as link:
                victim = Victim(link, bench.open(link, offer.key), slab, stop_after)
                require(victim.reached.wait(bench.patience_s), "the read did not get on")
                bench.soon(offer.withdraw, "return from withdraw()")
                offer.slab.tensors()["a"].fill_(POISON)
                victim.thread.join(bench.patience_s)
                require(not victim.thread.is_alive(), "a reader was not cut off")
                require(
                    not victim.torn,
                    f"segments {victim.torn} of {victim.got} have bytes written after the withdrawal",
                )


def check_published_anew(bench: Bench) -> None:
    """Check that check() distinguishes the offer that was read from its successor under the same name."""
    tensors = {"a": make_tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=15)}
    with bench.source() as source, bench.link(source) as link:
        offer = source.offer(tensors)
        manifest = bench.open(link, offer.key)
        bench.read_all(link, manifest, bench.adopt(blank_like(tensors)))
        bench.soon(offer.withdraw, "return from withdraw()")
        source.offer(sample_tensors(seed=16), key=offer.key)
        require(not link.check(deadline=near()), "check() must be False: what was read has been replaced")


# --- readers come and go ---


def check_readers_are_counted(bench: Bench) -> None:
    """Check that the offer counts its readers, and notices when each has left."""
    tensors = {"a": make_tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=17)}
    with bench.source() as source:
        offer = source.offer(tensors)
        with bench.link(source) as one, bench.link(source) as other:
            require(offer.active_readers == 0, "nobody has opened it yet")
            bench.open(one, offer.key)
            bench.open(other, offer.key)
            count = offer.active_readers
            require(count >= 2, f"two links have opened it, it counts {count}")
            require(not offer.wait_no_readers(time.monotonic()), "wait_no_readers() with two readers")
            require(one.check(deadline=far()), "check() must be True when nothing changed")
            other.close()
            bench.no_readers(offer, "one checked and one closed link")


def check_reader_gives_up(bench: Bench) -> None:
    """Check that an iterator dropped in the middle frees the source, and costs only this link."""
    tensors = {"a": make_tensor("uint8", (16 << 20,), seed=18)}
    with bench.source() as source:
        offer = source.offer(tensors, segment_size_bytes=1 << 20)
        with bench.link(source) as link:
            bench.open(link, offer.key)
            slab = bench.adopt(blank_like(tensors))
            reading = read_equal(link, range(16), slab, deadline=far())
            next(reading)
            getattr(reading, "close")()  # noqa: B009  # it is a generator, or has the like
            bench.no_readers(offer, "an abandoned read")
            bench.lost_soon(lambda: link.open(offer.key, 1, deadline=far()), "use a link that was given up")
        with bench.link(source) as link:
            manifest = bench.open(link, offer.key)
            bench.read_all(link, manifest, slab)


def check_slow_reader_stalls_nobody(bench: Bench) -> None:
    """Check that one reader stops with more in flight than any buffer holds, while another one is served."""
    size_bytes = 64 << 20
    tensors = {"a": make_tensor("uint8", (size_bytes,), seed=19)}
    with bench.source() as source:
        offer = source.offer(tensors, segment_size_bytes=4 << 20)
        with bench.link(source) as slow, bench.link(source) as quick:
            manifest = bench.open(slow, offer.key)
            bench.open(quick, offer.key)  # a source does not keep a connection for long that opens nothing
            slow_target, quick_target = blank_like(tensors), blank_like(tensors)
            reading = read_equal(slow, range(16), bench.adopt(slow_target), deadline=far())
            first = next(reading)
            bench.soon(
                lambda: bench.read_all(quick, manifest, bench.adopt(quick_target)),
                "serve a reader while another one is slow",
            )
            require_equal(quick_target, tensors)
            got = [first, *reading]
            require(sorted(got) == list(range(16)), f"the slow reader got segments {got}")
            require_equal(slow_target, tensors)
