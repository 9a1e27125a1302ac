"""What a transport has to do to be one, as checks that anybody can run against their own.

    def test_my_transport():
        check_transport(MyTransport)                    # a class or a function without arguments, importable by name

or, one test for each case::

    @pytest.fixture(scope="module")
    def suite():
        with TransportSuite(MyTransport) as suite:
            yield suite

    @pytest.mark.parametrize("case", TransportSuite.CASES)
    def test_my_transport(suite, case):
        if reason := suite.skip_reason(case):
            pytest.skip(reason)
        suite.run(case)

A case that fails raises ConformanceError, an AssertionError that says what was promised. Nothing here sleeps to be
right: a state is awaited up to `patience_s`, and what must not happen is provoked, not hoped for. Peers that are killed
or frozen are real processes, stopped when it is known that they are in the middle of a transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypeVar

import torch

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.transports import Link, LinkProgress, NotServable, Offer, Transport
from tensorhub_plugins.core.types import (
    ShardKey,
)

T = TypeVar("T")
MakeTransport = Callable[[], Transport]

SEGMENT_SIZE_BYTES = 997  # a prime: cuts tensors and elements anywhere
FAR_S = 60.0  # a deadline that must not be needed
NEAR_S = 1.0  # a deadline that must be kept
MIDDLE_S = (2.0, 10.0, 50.0)  # the same, with time for half a transfer before: the first that is enough
POISON = 0xA5
GARBAGE = (
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # a TLS greeting
    b"\xff" * 4096,
    bytes(4096),
)
GROWTH_SIZE_BYTES_MAX = 16 << 20  # what garbage may make a source allocate


class ConformanceError(AssertionError):
    """The transport broke a promise."""


class SimpleShelf:
    """Offers by shard, in a dictionary. The client has its own; this one is for tests and examples."""

    def __init__(self, *offers: Offer) -> None:
        self._offers = {offer.key: offer for offer in offers}
        self._changed = threading.Condition()
        self._expected: set[ShardKey] = set()
        self.waiting = 0  # threads that wait in `expect`

    def put(self, offer: Offer) -> Offer:
        with self._changed:
            self._offers[offer.key] = offer
            self._expected.discard(offer.key)
            self._changed.notify_all()
        return offer

    def announce(self, key: ShardKey) -> None:
        """An offer of this shard is about to be `put`."""
        self._expected.add(key)

    def find(self, key: ShardKey) -> Offer | None:
        offer = self._offers.get(key)
        return None if offer is None or offer.withdrawn else offer

    def expect(self, key: ShardKey, lease: int, deadline: float) -> Offer | None:
        with self._changed:
            self.waiting += 1
            self._changed.wait_for(lambda: key not in self._expected, deadline - time.monotonic())
            self.waiting -= 1
            return self.find(key)


@dataclass(frozen=True)
class Report:
    """What check_transport did. skipped: case -> reason."""

    passed: tuple[str, ...]
    skipped: dict[str, str]


def check_transport(make_transport: MakeTransport, **options: Any) -> Report:
    """Run every case; raise the first ConformanceError. `options` are those of TransportSuite."""
    passed = []
    skipped = {}
    with TransportSuite(make_transport, **options) as suite:
        for case in suite.CASES:
            reason = suite.skip_reason(case)
            if reason is not None:
                skipped[case] = reason
            else:
                suite.run(case)
                passed.append(case)
    return Report(tuple(passed), skipped)


class TransportSuite:
    """make_transport: called for every source and every reader; must be importable, as peers are other processes.

    make_source: another factory for the sources, to test one release's readers against another's sources.
    processes: False for a transport that does not leave its process; cases that need another one are skipped.
    garbage: what strangers send, in addition to what they send everywhere: bytes that look like this transport's own.
    slabs: what sources offer, "allocated" slabs or "adopted" tensors.
    patience_s: how long to wait for what must happen, and for what must be over.
    """

    CASES: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        make_transport: MakeTransport,
        *,
        make_source: MakeTransport | None = None,
        processes: bool = True,
        garbage: Sequence[bytes] = (),
        slabs: str = "allocated",
        patience_s: float = 20.0,
    ) -> None:
        self._make = make_transport
        self._make_source = make_source or make_transport
        self._processes = processes
        self._garbage = (*GARBAGE, *garbage)
        self._slabs = slabs
        self._patience_s = patience_s
        self._peer: _Peer | None = None

    def __enter__(self) -> TransportSuite:
        return self

    def __exit__(self, *_: object) -> None:
        if self._peer is not None:
            self._peer.kill()

    def skip_reason(self, case: str) -> str | None:
        """Why a case cannot run for this transport; None: it can."""
        if case in _NEEDS_PROCESSES and not self._processes:
            return "this transport does not leave its process"
        if case in _NEEDS_SOCKET:
            with self._reading() as (_, source, _link):
                if _address(source.endpoint) is None:
                    return f"do not know how to open a plain connection to {source.endpoint}"
        return None

    def run(self, case: str) -> None:
        """Run one case of CASES."""
        if case not in self.CASES:
            raise UsageError(f"there is no case {case!r}")
        getattr(self, f"_check_{case}")()

    # --- what is read arrives ---

    def _check_exact_bytes(self) -> None:
        """Every dtype, scalars, nothing at all, tensors far smaller and far bigger than a segment, odd strides."""
        for kind in ("allocated", "adopted"):
            tensors = sample_tensors(seed=1)
            with self._source() as source:
                offer = source.offer(tensors, kind=kind)
                with self._link(source) as link:
                    try:
                        manifest = self._open(link, offer.key)
                    except NotServable:
                        _require(kind == "adopted", "an allocated slab must be servable")
                        continue
                    _require(manifest == offer.manifest, "open() must return the manifest as published")
                    target = blank_like(tensors)
                    self._read_all(link, manifest, Slab.adopt(target), manifest.offsets)
                    _require_equal(target, tensors)
                    _require(link.check(deadline=_far()), "check() must be True when nothing changed")

    def _check_again_on_the_same_link(self) -> None:
        """A link reads one version after another, and an unpublished one in between does it no harm."""
        with self._source() as source, self._link(source) as link:
            for version in (1, 2, 3):
                tensors = sample_tensors(seed=version)
                offer = source.offer(tensors, version=version)
                with _raises(VersionGone, "opening what is not offered"):
                    self._open(link, ShardKey(version + 100, "checkpoint"))
                manifest = self._open(link, offer.key)
                target = blank_like(tensors)
                self._read_all(link, manifest, Slab.adopt(target), manifest.offsets)
                _require(link.check(deadline=_far()), "check() must be True when nothing changed")
                _require_equal(target, tensors)

    def _check_only_what_was_asked_for(self) -> None:
        """Some segments, not in order: the rest of the target stays untouched."""
        tensors = {"a": _tensor("uint8", (40 * SEGMENT_SIZE_BYTES + 5,), seed=3)}
        with self._reading(tensors) as (offer, _, link):
            asked = [40, 0, 7, 8, 9, 3, 22]
            target = blank_like(tensors)
            got = list(link.read(asked, Slab.adopt(target), [0], deadline=_far()))
            _require(sorted(got) == sorted(asked), f"read({asked}) yielded {got}")
            expected = bytearray([POISON]) * (40 * SEGMENT_SIZE_BYTES + 5)
            for segment in asked:
                start, stop = offer.manifest.segment_range(segment)
                expected[start:stop] = _raw(tensors["a"])[start:stop]
            _require(
                _raw(target["a"]) == bytes(expected),
                "bytes outside the segments asked for were touched, or theirs are wrong",
            )
            _require(list(link.read([], Slab.adopt(target), [0], deadline=_far())) == [], "read([]) must yield nothing")

    def _check_several_shards_into_one_target(self) -> None:
        """Two shards whose names interleave, and unwanted tensors of both, which are digested all the same."""
        tensors = sample_tensors(seed=4)
        names = sorted(tensors)
        wanted = {name: tensor for index, (name, tensor) in enumerate(sorted(tensors.items())) if index % 5}
        target = blank_like(wanted)
        with Slab.adopt(target) as slab, self._source() as source:
            places = dict(zip((spec.name for spec in slab.specs), _offsets(slab), strict=True))
            for shard in range(2):
                part = {name: tensors[name] for name in names[shard::2]}
                offer = source.offer(part, key=ShardKey(1, "checkpoint", shard, 2))
                with self._link(source) as link:
                    manifest = self._open(link, offer.key)
                    placement = [places.get(spec.name, -1) for spec in manifest.tensors]
                    self._read_all(link, manifest, slab, placement)
                    _require(link.check(deadline=_far()), "check() must be True when nothing changed")
        _require_equal(target, wanted)

    def _check_nothing_wanted(self) -> None:
        tensors = sample_tensors(seed=5)
        with self._reading(tensors) as (offer, _, link):
            target = {"other": _tensor("uint8", (1 << 20,), seed=6)}  # could hold any of them by mistake
            before = _raw(target["other"])
            self._read_all(link, offer.manifest, Slab.adopt(target), [-1] * len(offer.manifest.tensors))
            _require(_raw(target["other"]) == before, "unwanted tensors were written into the target")

    def _check_empty_shard(self) -> None:
        """No tensors, or none with any bytes."""
        for tensors in ({}, {"a": torch.empty(0, 3), "b": torch.empty(0, dtype=torch.int8)}):
            with self._reading(tensors) as (offer, _, link):
                got = self._read_all(link, offer.manifest, Slab.adopt(blank_like(tensors)), offer.manifest.offsets)
                _require(got == [], "an empty shard has no segments")
                _require(link.check(deadline=_far()), "check() must be True when nothing changed")

    def _check_many_tiny_tensors(self) -> None:
        """More in a segment than one system call takes buffers, in memory of their own."""
        tensors = {f"t{index:05d}": _tensor("bfloat16", (1 + index % 5,), seed=index) for index in range(5000)}
        with self._reading(tensors, segment_size_bytes=1 << 20) as (offer, _, link):
            target = blank_like(tensors)
            self._read_all(link, offer.manifest, Slab.adopt(target), offer.manifest.offsets)
            _require_equal(target, tensors)

    def _check_many_readers(self) -> None:
        tensors = {"a": _tensor("uint8", (8 << 20,), seed=7)}
        with self._source() as source:
            offer = source.offer(tensors, segment_size_bytes=1 << 20)
            problems: list[BaseException] = []

            def read() -> None:
                try:
                    with self._link(source) as link:
                        manifest = self._open(link, offer.key)
                        target = blank_like(tensors)
                        self._read_all(link, manifest, Slab.adopt(target), manifest.offsets)
                        _require_equal(target, tensors)
                        _require(link.check(deadline=_far()), "check() must be True when nothing changed")
                except BaseException as error:
                    problems.append(error)

            threads = [threading.Thread(target=read, daemon=True) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(self._patience_s)
            _require(not any(thread.is_alive() for thread in threads), "eight readers at once did not finish")
            if problems:
                raise problems[0]

    def _check_changed_bytes_show(self) -> None:
        """A broken contract is detected: digest() is computed from what arrived, not copied from the manifest."""
        tensors = {"a": _tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=8)}
        with self._source() as source:
            offer = source.offer(tensors)
            live = offer.slab.tensors()["a"]
            live[3 * SEGMENT_SIZE_BYTES + 11] ^= 1  # one bit
            one, other = (slice(i * SEGMENT_SIZE_BYTES, (i + 1) * SEGMENT_SIZE_BYTES) for i in (5, 6))
            live[one], live[other] = live[other].clone(), live[one].clone()  # two whole segments swapped
            with self._link(source) as link:
                manifest = self._open(link, offer.key)
                slab = Slab.adopt(blank_like(tensors))
                wrong = [
                    segment
                    for segment in link.read(range(8), slab, [0], deadline=_far())
                    if link.digest(segment) != manifest.digest(segment)
                ]
                _require(sorted(wrong) == [3, 5, 6], f"segments 3, 5 and 6 were changed, digest() says {sorted(wrong)}")

    def _check_wrong_use(self) -> None:
        """UsageError before anything is sent, and the link stays good."""
        tensors = {"a": _tensor("uint8", (5000,), seed=9)}
        with self._source() as source, self._link(source) as link:
            offer = source.offer(tensors)
            slab = Slab.adopt(blank_like(tensors))
            with _raises(UsageError, "reading before open()"):
                list(link.read([0], slab, [0], deadline=_far()))
            manifest = self._open(link, offer.key)
            for segments, placement, what in (
                ([manifest.segment_count], [0], "a segment that is not there"),
                ([-1], [0], "a negative segment"),
                ([0], [], "fewer placements than tensors"),
                ([0], [1], "a tensor that does not fit into the target"),
            ):
                with _raises(UsageError, what):
                    list(link.read(segments, slab, placement, deadline=_far()))
            self._read_all(link, manifest, slab, manifest.offsets)
            _require(link.check(deadline=_far()), "the link must survive UsageErrors")

    # --- pipelined sources ---

    def _check_pipelined(self) -> None:
        """A segment is yielded as soon as it is ready, and not served before."""
        tensors = {"a": _tensor("uint8", (6 * SEGMENT_SIZE_BYTES,), seed=10)}
        with self._source() as source:
            offer = source.offer(tensors, ready=False)
            content = _raw(tensors["a"])
            live = offer.slab.tensors()["a"]
            live.fill_(POISON)
            with self._link(source) as link:
                self._open(link, offer.key)
                target = blank_like(tensors)
                reading = link.read(range(6), Slab.adopt(target), [0], deadline=_far())
                for segment in range(6):
                    start, stop = offer.manifest.segment_range(segment)
                    live[start:stop] = torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8)
                    offer.mark_ready(segment)
                    got = self._soon(lambda: next(reading), "yield a segment that is ready before the next one is")
                    _require(got == segment, f"segment {segment} was the only one ready, {got} was yielded")
                    _require(link.digest(segment) == offer.manifest.digest(segment), "served before it was ready")
                self._finish(reading)
                _require_equal(target, tensors)

    def _check_late_segment(self) -> None:
        """A source whose segment does not arrive: what is there is yielded, then SourceLost at the deadline."""
        tensors = {"a": _tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=11)}
        with self._source() as source:
            offer = source.offer(tensors, ready=False)
            offer.mark_ready(0)
            offer.mark_ready(1)
            with self._link(source) as link:
                self._open(link, offer.key)
                deadline = time.monotonic() + NEAR_S
                reading = link.read(range(4), Slab.adopt(blank_like(tensors)), [0], deadline=deadline)
                got: list[int] = []
                self._lost_by(deadline, lambda: got.extend(reading), "wait for a segment that never comes")
            self._no_readers(offer, "a read that ended at its deadline")

    def _check_waiting_source_says_so(self) -> None:
        """A source that waits for bytes itself is heard of, again and again, and names the segments it waited for."""
        tensors = {"a": _tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=27)}
        with self._source() as source:
            offer = source.offer(tensors, ready=False)
            offer.mark_ready(0)
            with self._link(source) as link:
                self._open(link, offer.key)
                progress = link.progress
                reading = link.read(range(4), Slab.adopt(blank_like(tensors)), [0], deadline=_far())
                _require(next(reading) == 0, "segment 0 was the only one ready")
                _require(not progress.delayed_segments, f"segment 0 was ready, {progress.delayed_segments} are delayed")
                got: list[int] = []

                def read_on() -> None:
                    with contextlib.suppress(SourceLost):  # what this leaves out is missed below
                        got.extend(reading)

                reader = threading.Thread(target=read_on, daemon=True)
                reader.start()
                for _ in range(2):
                    before = time.monotonic()
                    self._until(partial(_waits_since, progress, before), lambda: "a source that waits did not say so")
                    _require(progress.heard_at >= before, "a source that says that it waits was heard of")
                offer.mark_all_ready()
                reader.join(self._patience_s)
                _require(sorted(got) == [1, 2, 3], f"segments 1, 2 and 3 were due, {got} were yielded")
                late = progress.delayed_segments
                _require(1 in late, f"segment 1 was waited for, delayed_segments are {late}")
                list(link.read([0], Slab.adopt(blank_like(tensors)), [0], deadline=_far()))
                _require(not progress.delayed_segments, "delayed_segments are those of this read")

    def _check_expected_offer(self) -> None:
        """A reader that asks for an offer which is about to be made waits for it; of any other it hears at once."""
        tensors = {"a": _tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=28)}
        with self._source() as source, self._link(source) as link:
            key = ShardKey(1, "checkpoint")
            source.shelf.announce(key)
            opened: list[Manifest | BaseException] = []

            def open_it() -> None:
                try:
                    opened.append(self._open(link, key))
                except BaseException as error:
                    opened.append(error)

            opening = threading.Thread(target=open_it, daemon=True)
            opening.start()
            self._until(
                lambda: bool(source.shelf.waiting or opened), lambda: "nobody waits for an offer that is expected"
            )
            offer = source.offer(tensors, key=key)
            opening.join(self._patience_s)
            _require(opened == [offer.manifest], f"an offer was about to be made, open() answered {opened}")
            target = blank_like(tensors)
            self._read_all(link, offer.manifest, Slab.adopt(target), [0])
            _require_equal(target, tensors)
            with _raises(VersionGone, "opening what is not offered"):
                self._soon(lambda: self._open(link, ShardKey(2, "checkpoint")), "say that it is not offered")

    # --- withdrawal ---

    def _check_withdrawn_in_mid_read(self) -> None:
        """withdraw() returns soon although a reader waits for more, which learns of it long before its deadline."""
        tensors = {"a": _tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=12)}
        with self._source() as source:
            offer = source.offer(tensors, ready=False)
            for segment in range(4):
                offer.mark_ready(segment)
            with self._link(source) as link:
                manifest = self._open(link, offer.key)
                reading = link.read(range(8), Slab.adopt(blank_like(tensors)), [0], deadline=_far())
                got = [next(reading) for _ in range(4)]
                _require(sorted(got) == [0, 1, 2, 3], f"the first four were ready, {got} were yielded")
                _require(offer.active_readers >= 1, f"one link reads the offer, it counts {offer.active_readers}")
                self._soon(offer.withdraw, "return from withdraw()")
                _require(offer.active_readers == 0, "withdraw() returned while a reader was attached")
                offer.slab.tensors()["a"].fill_(POISON)  # the owner goes on
                rest: list[int] = []
                self._lost_soon(lambda: rest.extend(reading), "go on reading what was withdrawn")
                _require(not rest, f"segments {rest} were yielded after they were withdrawn")
                _require(all(link.digest(s) == manifest.digest(s) for s in range(4)), "yielded bytes were torn")
                _require(not link.check(deadline=_near()), "check() must be False once the offer was withdrawn")
            with self._link(source) as link, _raises(VersionGone, "opening what was withdrawn"):
                self._open(link, offer.key)

    def _check_withdrawn_before_read(self) -> None:
        """Opened and left alone: withdrawing does not wait for that reader, and it does not read."""
        tensors = {"a": _tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=13)}
        with self._reading(tensors) as (offer, _, link):
            self._soon(offer.withdraw, "return from withdraw()")
            offer.slab.tensors()["a"].fill_(POISON)
            slab = Slab.adopt(blank_like(tensors))
            self._lost_soon(lambda: list(link.read(range(8), slab, [0], deadline=_far())), "read what was withdrawn")

    def _check_never_torn(self) -> None:
        """The owner overwrites its memory the moment withdraw() returns, at all stages of a read."""
        size_bytes, count = 16 << 20, 64
        tensors = {"a": _tensor("uint8", (size_bytes,), seed=14)}
        target = blank_like(tensors)
        with self._source() as source, Slab.adopt(target) as slab:
            for stop_after in (0, 1, 2, 4, 8, 16, 32, 48):
                offer = source.offer(tensors, segment_size_bytes=size_bytes // count, version=stop_after + 1)
                with self._link(source) as link:
                    victim = _Victim(link, self._open(link, offer.key), slab, stop_after)
                    _require(victim.reached.wait(self._patience_s), "the read did not get on")
                    self._soon(offer.withdraw, "return from withdraw()")
                    offer.slab.tensors()["a"].fill_(POISON)
                    victim.thread.join(self._patience_s)
                    _require(not victim.thread.is_alive(), "a reader was not cut off")
                    _require(
                        not victim.torn,
                        f"segments {victim.torn} of {victim.got} have bytes written after the withdrawal",
                    )

    def _check_published_anew(self) -> None:
        """check() tells the offer that was read from its successor under the same name."""
        tensors = {"a": _tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=15)}
        with self._source() as source, self._link(source) as link:
            offer = source.offer(tensors)
            manifest = self._open(link, offer.key)
            self._read_all(link, manifest, Slab.adopt(blank_like(tensors)), [0])
            self._soon(offer.withdraw, "return from withdraw()")
            source.offer(sample_tensors(seed=16), key=offer.key)
            _require(not link.check(deadline=_near()), "check() must be False: what was read has been replaced")

    # --- readers come and go ---

    def _check_readers_are_counted(self) -> None:
        tensors = {"a": _tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=17)}
        with self._source() as source:
            offer = source.offer(tensors)
            with self._link(source) as one, self._link(source) as other:
                _require(offer.active_readers == 0, "nobody has opened it yet")
                self._open(one, offer.key)
                self._open(other, offer.key)
                count = offer.active_readers
                _require(count >= 2, f"two links have opened it, it counts {count}")
                _require(not offer.wait_no_readers(time.monotonic()), "wait_no_readers() with two readers")
                _require(one.check(deadline=_far()), "check() must be True when nothing changed")
                other.close()
                self._no_readers(offer, "one checked and one closed link")

    def _check_reader_gives_up(self) -> None:
        """An iterator that is dropped in the middle frees the source, and costs only this link."""
        tensors = {"a": _tensor("uint8", (16 << 20,), seed=18)}
        with self._source() as source:
            offer = source.offer(tensors, segment_size_bytes=1 << 20)
            with self._link(source) as link:
                self._open(link, offer.key)
                slab = Slab.adopt(blank_like(tensors))
                reading = link.read(range(16), slab, [0], deadline=_far())
                next(reading)
                getattr(reading, "close")()  # noqa: B009  # it is a generator, or has the like
                self._no_readers(offer, "an abandoned read")
                self._lost_soon(lambda: link.open(offer.key, 1, deadline=_far()), "use a link that was given up")
            with self._link(source) as link:
                manifest = self._open(link, offer.key)
                self._read_all(link, manifest, slab, [0])

    def _check_slow_reader_stalls_nobody(self) -> None:
        """One reader stops with more on its way than any buffer holds; another one is served meanwhile."""
        size_bytes = 64 << 20
        tensors = {"a": _tensor("uint8", (size_bytes,), seed=19)}
        with self._source() as source:
            offer = source.offer(tensors, segment_size_bytes=4 << 20)
            with self._link(source) as slow, self._link(source) as quick:
                manifest = self._open(slow, offer.key)
                slow_target, quick_target = blank_like(tensors), blank_like(tensors)
                reading = slow.read(range(16), Slab.adopt(slow_target), [0], deadline=_far())
                first = next(reading)
                self._open(quick, offer.key)
                self._soon(
                    lambda: self._read_all(quick, manifest, Slab.adopt(quick_target), [0]),
                    "serve a reader while another one is slow",
                )
                _require_equal(quick_target, tensors)
                got = [first, *reading]
                _require(sorted(got) == list(range(16)), f"the slow reader got segments {got}")
                _require_equal(slow_target, tensors)

    # --- the end ---

    def _check_nobody_there(self) -> None:
        """Connecting to a source that is closed, or never was."""
        with self._source() as source:
            endpoint = source.endpoint
        with contextlib.closing(self._make()) as reader:
            deadline = time.monotonic() + NEAR_S
            self._lost_by(deadline, lambda: reader.connect(endpoint, deadline=deadline), "connect to nobody")

    def _check_close_twice(self) -> None:
        tensors = {"a": _tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=20)}
        with self._source() as source:
            offer = source.offer(tensors)
            reader = self._make()
            link = reader.connect(source.endpoint, deadline=_far())
            self._open(link, offer.key)
            for _ in range(2):
                link.close()
            self._no_readers(offer, "a closed link")
            slab = Slab.adopt(blank_like(tensors))
            for what, use in (
                ("open", lambda: link.open(offer.key, 1, deadline=_far())),
                ("read", lambda: list(link.read([0], slab, [0], deadline=_far()))),
            ):
                self._lost_soon(use, f"{what}() on a closed link")
            _require(not link.check(deadline=_far()), "check() on a closed link must be False")
            for _ in range(2):
                reader.close()
            with _raises(UsageError, "connect() of a closed transport"):
                reader.connect(source.endpoint, deadline=_far())
            source.transport.close()  # and again when `source` ends
            with _raises(UsageError, "serve() of a closed transport"):
                source.transport.serve(SimpleShelf())

    def _check_close_while_reading(self) -> None:
        """Closing the link from another thread, the reader's transport, or the source's, ends a read that waits."""
        tensors = {"a": _tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=21)}
        for who in ("link", "reader", "source"):
            with self._source() as source, contextlib.closing(self._make()) as reader:
                offer = source.offer(tensors, ready=False)
                offer.mark_ready(0)
                link = reader.connect(source.endpoint, deadline=_far())
                self._open(link, offer.key)
                reading = link.read(range(4), Slab.adopt(blank_like(tensors)), [0], deadline=_far())
                next(reading)
                close = {"link": link.close, "reader": reader.close, "source": source.transport.close}[who]
                timer = threading.Timer(0.05, close)  # most likely while the next line waits; right in any order
                timer.start()
                self._lost_soon(partial(list, reading), f"wait after {who}.close()")
                timer.join()
                link.close()
                self._no_readers(offer, "a closed link")

    def _check_nothing_leaks(self) -> None:
        """Threads and file descriptors are as many after many lives as before, whatever way they ended."""
        tensors = {"a": _tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=22)}

        def live_once() -> None:
            with self._source() as source:
                offer = source.offer(tensors)
                with self._link(source) as link:
                    manifest = self._open(link, offer.key)
                    slab = Slab.adopt(blank_like(tensors))
                    self._read_all(link, manifest, slab, [0])
                    link.check(deadline=_far())
                with self._link(source) as link:
                    self._open(link, offer.key)
                    next(link.read(range(4), slab, [0], deadline=_far()))
                    offer.withdraw()
                offer.slab.close()

        live_once()  # whatever is made once and kept
        before = _resources()
        for _ in range(5):
            live_once()
        self._until(lambda: _resources() == before, lambda: f"{before} (threads, fds) became {_resources()}")

    # --- other processes (started as few times as possible: the frozen are thawed and used again) ---

    def _check_frozen_source(self) -> None:
        """SIGSTOP when half was read: the deadline holds for reading, for opening and for connecting."""
        with (
            contextlib.closing(self._make()) as reader,
            _Remote(self._process(), self._make_source, self._slabs) as remote,
        ):
            other = reader.connect(remote.endpoint, deadline=_far())
            for seconds in MIDDLE_S:
                link, manifest, tensors = remote.open(reader)
                deadline = time.monotonic() + seconds
                slab = Slab.adopt(blank_like(tensors))
                reading = link.read(range(manifest.segment_count), slab, [0], deadline=deadline)
                half: list[int] = []
                with contextlib.suppress(SourceLost):
                    half += (next(reading) for _ in range(manifest.segment_count // 2))
                    break
                link.close()  # this machine is so busy that the deadline came first
            remote.peer.freeze()
            try:
                _require(len(half) == manifest.segment_count // 2, f"half the segments were ready, {half} were yielded")
                self._lost_by(deadline, lambda: list(reading), "read from a frozen source")
                _require(all(link.digest(s) == manifest.digest(s) for s in half), "bytes yielded before are wrong")
                near = time.monotonic() + NEAR_S
                self._lost_by(near, partial(other.open, remote.key, 1, deadline=near), "open at a frozen source")
                near = time.monotonic() + NEAR_S
                self._lost_by(
                    near, partial(_open_at, reader, remote.endpoint, remote.key, near), "connect to a frozen source"
                )
            finally:
                remote.peer.thaw()
            link.close()
            other.close()
            with contextlib.closing(reader.connect(remote.endpoint, deadline=_far())) as again:
                _require(self._open(again, remote.key) == manifest, "a source that thawed serves as before")

    def _check_frozen_reader(self) -> None:
        """SIGSTOP of a reader with more on its way than buffers hold: withdraw() does not wait for it."""
        tensors = {"a": _tensor("uint8", (64 << 20,), seed=24)}
        with self._source() as source:
            offer = source.offer(tensors, segment_size_bytes=32 << 20)  # the second alone is more than buffers hold
            peer = self._process()
            got = peer.ask("read", self._make, source.endpoint, offer.key, 1)
            _require(len(got) == 1, f"the reader got {got}")
            peer.freeze()
            try:
                self._soon(offer.withdraw, "return from withdraw() although a reader is frozen")
                _require(offer.active_readers == 0, "withdraw() returned while a reader was attached")
            finally:
                peer.thaw()

    def _check_killed_source(self) -> None:
        """SIGKILL when half was read and the other half is awaited."""
        with (
            contextlib.closing(self._make()) as reader,
            _Remote(self._process(), self._make_source, self._slabs) as remote,
        ):
            link, manifest, tensors = remote.open(reader)
            target = blank_like(tensors)
            reading = link.read(range(manifest.segment_count), Slab.adopt(target), [0], deadline=_far())
            half = [next(reading) for _ in range(manifest.segment_count // 2)]
            remote.peer.kill()
            rest: list[int] = []
            error = self._lost_soon(lambda: rest.extend(reading), "wait for a source that was killed")
            _require(sorted(half) == list(range(len(half))), f"the first half was ready, {half} were yielded")
            _require(not rest, f"segments {rest} were yielded, which the source never had")
            _require(
                error.peer is not None and error.phase is not None, f"SourceLost must name peer and phase: {error}"
            )
            _require(all(link.digest(s) == manifest.digest(s) for s in half), "bytes yielded before the kill are wrong")
            link.close()

    def _check_killed_reader(self) -> None:
        """SIGKILL of a reader that waits for more: the source is free of it at once."""
        tensors = {"a": _tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=23)}
        with self._source() as source:
            offer = source.offer(tensors, ready=False)
            for segment in range(4):
                offer.mark_ready(segment)
            peer = self._process()
            got = peer.ask("read", self._make, source.endpoint, offer.key, 4)
            _require(sorted(got) == [0, 1, 2, 3], f"the reader got {got}")
            _require(offer.active_readers >= 1, f"one process reads the offer, it counts {offer.active_readers}")
            peer.kill()
            self._no_readers(offer, "a killed reader")

    # --- strangers ---

    def _check_garbage(self) -> None:
        """Strangers are hung up on, cost little, leave a line in the log, and disturb nobody who is reading."""
        tensors = {"a": _tensor("uint8", (6 * SEGMENT_SIZE_BYTES,), seed=25)}
        with self._source() as source, _log_lines() as lines:
            offer = source.offer(tensors, ready=False)
            offer.mark_ready(0)
            address = _address(source.endpoint)
            assert address is not None
            with self._link(source) as link:
                self._open(link, offer.key)
                target = blank_like(tensors)
                reading = link.read(range(6), Slab.adopt(target), [0], deadline=_far())
                next(reading)
                for garbage in self._garbage:
                    seen = len(lines)
                    with _traced_memory() as growth_size_bytes:
                        self._hung_up_on(address, garbage)
                    _require(
                        growth_size_bytes() < GROWTH_SIZE_BYTES_MAX,
                        f"{garbage[:32]!r}... made the source allocate {growth_size_bytes()} bytes",
                    )
                    if len(garbage) > 8:
                        self._until(partial(_longer_than, lines, seen), lambda: "garbage left no line in the log")
                offer.mark_all_ready()
                _require(sorted(reading) == [1, 2, 3, 4, 5], "a reader was disturbed by strangers")
                _require_equal(target, tensors)

    def _hung_up_on(self, address: _Address, garbage: bytes) -> None:
        with socket.socket(address.family, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(self._patience_s)
            stranger.connect(address.name)
            with contextlib.suppress(ConnectionError):  # hung up on before all was said
                stranger.sendall(garbage)
                if len(garbage) <= 8:
                    stranger.shutdown(socket.SHUT_WR)  # what may be the beginning of something right
                try:
                    while stranger.recv(4096):
                        pass
                except TimeoutError:
                    raise ConformanceError(f"a stranger who sent {garbage[:32]!r} was not hung up on") from None

    def _check_impostor(self) -> None:
        """Who answers at the endpoint is no source: it talks nonsense, says nothing, or hangs up."""
        with self._source() as source:
            address = _address(source.endpoint)
        assert address is not None
        for greeting in (*(g for g in GARBAGE if len(g) > 16), None, b""):
            with socket.socket(address.family, socket.SOCK_STREAM) as listener:
                listener.bind(address.fresh)
                listener.listen()
                listener.settimeout(self._patience_s)
                endpoint = address.endpoint(listener.getsockname())
                with _impostor(listener, greeting), contextlib.closing(self._make()) as reader:
                    deadline = time.monotonic() + NEAR_S
                    self._lost_by(
                        deadline,
                        partial(_open_at, reader, endpoint, ShardKey(1, "checkpoint"), deadline),
                        f"talk to an impostor that says {greeting!r}",
                        (SourceLost, ProtocolError),
                    )

    # --- tools ---

    @contextlib.contextmanager
    def _source(self) -> Iterator[_Source]:
        source = _Source(self._make_source(), self._slabs)
        try:
            yield source
        finally:
            for offer in source.offers:
                offer.withdraw()
            source.transport.close()
            for offer in source.offers:
                offer.slab.close()

    @contextlib.contextmanager
    def _link(self, source: _Source) -> Iterator[Link]:
        with (
            contextlib.closing(self._make()) as reader,
            contextlib.closing(reader.connect(source.endpoint, deadline=_far())) as link,
        ):
            yield link

    @contextlib.contextmanager
    def _reading(
        self, tensors: Mapping[str, torch.Tensor] | None = None, segment_size_bytes: int = SEGMENT_SIZE_BYTES
    ) -> Iterator[tuple[Offer, _Source, Link]]:
        """A source of these tensors and a link that has opened them."""
        with self._source() as source:
            offer = source.offer({} if tensors is None else tensors, segment_size_bytes=segment_size_bytes)
            with self._link(source) as link:
                self._open(link, offer.key)
                yield offer, source, link

    def _process(self) -> _Peer:
        if self._peer is None or not self._peer.alive():
            self._peer = _Peer()
        return self._peer

    def _open(self, link: Link, key: ShardKey) -> Manifest:
        return link.open(key, 1, deadline=_far())

    def _read_all(self, link: Link, manifest: Manifest, target: Slab, placement: Sequence[int]) -> list[int]:
        segments = []
        for segment in link.read(range(manifest.segment_count), target, placement, deadline=_far()):
            _require(link.digest(segment) == manifest.digest(segment), f"digest() of segment {segment} differs")
            segments.append(segment)
        _require(
            sorted(segments) == list(range(manifest.segment_count)),
            f"each of {manifest.segment_count} segments must be yielded once, not {segments}",
        )
        return segments

    def _finish(self, reading: Iterator[int]) -> None:
        rest = self._soon(lambda: list(reading), "end the iteration after the last segment")
        _require(not rest, f"segments {rest} were yielded twice")

    def _soon(self, call: Callable[[], T], what: str) -> T:
        """What must happen within our patience, though its own deadline may be far."""
        outcome: list[T] = []
        problem: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call())
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=run, daemon=True, name="conformance")
        thread.start()
        thread.join(self._patience_s)
        if thread.is_alive():
            raise ConformanceError(f"it did not {what} within {self._patience_s:g} s")
        if problem:
            raise problem[0]
        return outcome[0]

    def _lost_soon(self, call: Callable[[], object], what: str) -> SourceLost:
        """SourceLost well before a far deadline."""
        began = time.monotonic()
        try:
            self._soon(call, f"give up ({what})")
        except SourceLost as error:
            return error
        raise ConformanceError(f"SourceLost was due: {what} ({time.monotonic() - began:.1f} s)")

    def _lost_by(
        self,
        deadline: float,
        call: Callable[[], object],
        what: str,
        expected: tuple[type[TensorHubError], ...] = (SourceLost,),
    ) -> None:
        """SourceLost at the deadline or before, give or take our patience with a busy machine."""
        began = time.monotonic()
        try:
            self._soon_after(deadline, call, what)
        except expected:
            return
        raise ConformanceError(f"{expected[0].__name__} was due: {what} ({time.monotonic() - began:.1f} s)")

    def _soon_after(self, deadline: float, call: Callable[[], object], what: str) -> None:
        patience, self._patience_s = self._patience_s, max(0.0, deadline - time.monotonic()) + self._patience_s
        try:
            self._soon(call, f"keep its deadline ({what})")
        finally:
            self._patience_s = patience

    def _until(self, condition: Callable[[], bool], problem: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise ConformanceError(problem())
            time.sleep(0.005)

    def _no_readers(self, offer: Offer, what: str) -> None:
        gone = offer.wait_no_readers(time.monotonic() + self._patience_s)
        _require(gone, f"the source still counts {offer.active_readers} readers after {what}")


TransportSuite.CASES = tuple(
    name.removeprefix("_check_") for name in vars(TransportSuite) if name.startswith("_check_")
)
_NEEDS_PROCESSES = frozenset({"killed_source", "frozen_source", "killed_reader", "frozen_reader"})
_NEEDS_SOCKET = frozenset({"garbage", "impostor"})


# --- material ---


def sample_tensors(seed: int) -> dict[str, torch.Tensor]:
    """One of every dtype torch has and can hold plainly, of odd sizes, some strided, some empty, one big."""
    dtypes = sorted(
        {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    )
    tensors = {
        f"dtype.{dtype}": _tensor(dtype, (3, 1 + index % 7, 5), seed=seed * 1000 + index)
        for index, dtype in enumerate(dtypes)
        if not dtype.startswith(("q", "bits"))  # quantized ones have parameters beside their bytes
    }
    tensors["big"] = _tensor("float32", (37, 2001), seed=seed)
    tensors["empty"] = torch.empty(0, 7, dtype=torch.bfloat16)
    tensors["scalar"] = _tensor("float64", (), seed=seed + 1)
    tensors["transposed"] = _tensor("bfloat16", (31, 17), seed=seed + 2).t()
    tensors["permuted"] = _tensor("int16", (3, 4, 1, 5), seed=seed + 3).permute(3, 0, 2, 1)
    tensors["zz.last"] = _tensor("uint8", (1,), seed=seed + 4)
    return tensors


def blank_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same dtypes, shapes and strides, every byte 0xA5."""
    return {name: _like(tensor) for name, tensor in tensors.items()}


def _tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    content = bytearray(random.Random(seed).randbytes(count * kind.itemsize))
    if kind is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    return _over(content, kind, shape, None)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    content = bytearray([POISON]) * (tensor.numel() * tensor.element_size())
    return _over(content, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _over(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None
) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    storage = torch.frombuffer(content, dtype=torch.uint8).clone().untyped_storage()  # aligned as torch wants it
    view = torch.empty(0, dtype=dtype)
    if stride is None:
        stride = tuple(torch.empty(shape, device="meta").stride())
    return view.set_(storage, 0, shape, stride)


def _raw(tensor: torch.Tensor) -> bytes:
    """A dense tensor's bytes in memory order, read without any code that is tested here."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def _offsets(slab: Slab) -> list[int]:
    offsets, at = [], 0
    for spec in slab.specs:
        offsets.append(at)
        at += spec.size_bytes
    return offsets


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def _require_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    wrong = [name for name, tensor in expected.items() if _raw(got[name]) != _raw(tensor)]
    _require(not wrong, f"tensors {wrong[:5]} ({len(wrong)} of {len(expected)}) arrived with other bytes")


@contextlib.contextmanager
def _raises(kind: type[BaseException], what: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise ConformanceError(f"{kind.__name__} was due: {what}")


def _far() -> float:
    return time.monotonic() + FAR_S


def _near() -> float:
    return time.monotonic() + NEAR_S


def _resources() -> tuple[int, int]:
    fds = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return threading.active_count(), fds


@contextlib.contextmanager
def _traced_memory() -> Iterator[Callable[[], int]]:
    """How much more memory than at the beginning Python held at most, touched or not."""
    grown = 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield lambda: grown
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _waits_since(progress: LinkProgress, instant: float) -> bool:
    return progress.waiting_at > instant


def _longer_than(items: Sequence[object], count: int) -> bool:
    return len(items) > count


@contextlib.contextmanager
def _log_lines() -> Iterator[list[str]]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)


@dataclass(frozen=True)
class _Address:
    """A stream socket behind an endpoint. fresh: where an impostor may listen."""

    family: socket.AddressFamily
    name: Any
    fresh: Any
    endpoint: Callable[[Any], str]


def _address(endpoint: str) -> _Address | None:
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("tcp", "rdma"):
        host, _, port = rest.rpartition(":")
        return _Address(socket.AF_INET, (host, int(port)), (host, 0), lambda name: f"{scheme}://{name[0]}:{name[1]}")
    if scheme == "shm":
        fresh = f"\0conformance-{os.getpid()}-{time.monotonic_ns()}"
        return _Address(socket.AF_UNIX, "\0" + rest, fresh, lambda name: "shm://" + bytes(name[1:]).decode())
    return None


class _Source:
    """A serving transport of this process and what it offers."""

    def __init__(self, transport: Transport, slabs: str) -> None:
        self.transport = transport
        self.slabs = slabs
        self.shelf = SimpleShelf()
        self.endpoint = transport.serve(self.shelf)
        self.offers: list[Offer] = []

    def offer(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        key: ShardKey | None = None,
        version: int = 1,
        kind: str | None = None,
        ready: bool = True,
        segment_size_bytes: int = SEGMENT_SIZE_BYTES,
    ) -> Offer:
        if (kind or self.slabs) == "adopted":
            slab = Slab.adopt(dict(tensors))
        else:
            slab = Slab.allocate([spec_of(name, tensor) for name, tensor in tensors.items()])
            for name, tensor in tensors.items():
                slab.write(name, tensor)
        key = key or ShardKey(version, "checkpoint")
        offer = self.shelf.put(Offer(key, slab.manifest(segment_size_bytes), slab, epoch=len(self.offers)))
        self.offers.append(offer)
        if ready:
            offer.mark_all_ready()
        return offer


class _Victim:
    """Reads in a thread of its own, and says when it has got more than `count` segments or can get no more."""

    def __init__(self, link: Link, manifest: Manifest, slab: Slab, count: int) -> None:
        self.reached = threading.Event()
        self.got: list[int] = []
        self.torn: list[int] = []
        self.thread = threading.Thread(target=self._run, args=(link, manifest, slab, count), daemon=True)
        self.thread.start()

    def _run(self, link: Link, manifest: Manifest, slab: Slab, count: int) -> None:
        try:
            for segment in link.read(range(manifest.segment_count), slab, manifest.offsets, deadline=_far()):
                self.got.append(segment)
                if link.digest(segment) != manifest.digest(segment):
                    self.torn.append(segment)
                if len(self.got) > count:
                    self.reached.set()
        except SourceLost:
            pass
        finally:
            self.reached.set()


# --- the other process ---


class _Peer:
    """Another process that does what it is asked."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_peer_main, args=(child,), daemon=True)
        self._process.start()
        child.close()

    def ask(self, what: str, *arguments: object) -> Any:
        self._pipe.send((what, arguments))
        if not self._pipe.poll(FAR_S):
            raise ConformanceError(f"the other process did not {what} within {FAR_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def alive(self) -> bool:
        return self._process.is_alive()

    def freeze(self) -> None:
        """Returns when it has stopped."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        if self.alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead, and makes sure that this is what it died of."""
        alive = self.alive()
        self._process.kill()
        self._process.join(FAR_S)
        self._pipe.close()
        if alive and self._process.exitcode != -signal.SIGKILL:
            raise ConformanceError(f"the other process ended with {self._process.exitcode}, not by our SIGKILL")


@dataclass
class _Remote:
    """A source in another process, with the first half of its segments ready."""

    peer: _Peer
    make: MakeTransport
    slabs: str
    key: ShardKey = field(default=ShardKey(7, "checkpoint"))
    endpoint: str = ""

    def __enter__(self) -> _Remote:
        self.endpoint = self.peer.ask("serve", self.make, self.slabs, self.key)
        return self

    def __exit__(self, *_: object) -> None:
        if self.peer.alive():
            self.peer.ask("end")

    def open(self, reader: Transport) -> tuple[Link, Manifest, dict[str, torch.Tensor]]:
        link = reader.connect(self.endpoint, deadline=_far())
        return link, link.open(self.key, 1, deadline=_far()), _remote_tensors()


def _remote_tensors() -> dict[str, torch.Tensor]:
    return {"a": _tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=26)}


def _open_at(reader: Transport, endpoint: str, key: ShardKey, deadline: float) -> None:
    """Connect and open: a frozen process' kernel may still accept the connection."""
    with contextlib.closing(reader.connect(endpoint, deadline=deadline)) as link:
        link.open(key, 1, deadline=deadline)


@contextlib.contextmanager
def _impostor(listener: socket.socket, greeting: bytes | None) -> Iterator[None]:
    """Whoever connects is told this and then nothing more (None: nothing at all; empty: it is hung up on)."""
    done = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting or b"")
            if greeting != b"":
                done.wait(FAR_S)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _peer_main(pipe: Connection) -> None:
    """Serve or read as asked until the pipe closes."""
    transports: list[Transport] = []
    kept: list[object] = []
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if what == "serve":
                make, slabs, key = arguments
                source = _Source(make(), slabs)
                kept.append(source)
                offer = source.offer(_remote_tensors(), key=key, ready=False)
                for segment in range(offer.manifest.segment_count // 2):
                    offer.mark_ready(segment)
                transports.append(source.transport)
                pipe.send(source.endpoint)
            elif what == "read":
                make, endpoint, key, count = arguments
                reader: Transport = make()
                transports.append(reader)
                link = reader.connect(endpoint, deadline=_far())
                manifest = link.open(key, 1, deadline=_far())
                slab = Slab.allocate(manifest.tensors)
                reading = link.read(range(manifest.segment_count), slab, manifest.offsets, deadline=_far())
                got = [next(reading) for _ in range(count)]
                kept += [link, reading, slab]  # and stay in the middle
                pipe.send(got)
            else:
                for transport in transports:
                    transport.close()
                transports.clear()
                kept.clear()
                pipe.send(None)
        except Exception as error:
            pipe.send(error)
