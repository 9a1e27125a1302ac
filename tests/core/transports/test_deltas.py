"""A delta on a link: whatever a source sends for a segment, its reader ends with the published bytes, or leaves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transport_helpers import KEY, served, soon
from transport_suite.material import read_equal

from tensorhub_plugins.core.client.changes import Bases, Changes
from tensorhub_plugins.core.deltas.frame import Step
from tensorhub_plugins.core.errors import ProtocolError, SourceLost
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.stream import messages
from tensorhub_plugins.core.transports.stream.messages import StreamRead, bases_of
from tensorhub_plugins.core.transports.stream.source import ReaderConnection
from tensorhub_plugins.core.transports.tcp import TcpTransport

NEW = torch.arange(8000, dtype=torch.int16)
OLD = NEW - (NEW % 50 == 0).to(torch.int16)


class Answers:
    """What a source answers readers of its offer with. right: a delta that is what it should be."""

    def __init__(self, right: bool = True) -> None:
        self.right, self.found, self.refused = right, 0, list[tuple[bytes, bytes]]()
        self.sender: Any = None

    def wanted(self) -> None:
        pass

    def find(self, segment: int, bases: tuple[bytes, ...], rate: float) -> list[Step]:
        self.found += 1
        if self.right:
            return [Step(bases[0], self.sender(segment))]
        nonsense = [b"", b"\x00", b"\x01" * 30, bytes(range(200)), b"\x03" + b"x" * 400]
        return [Step(bases[0] if segment % 2 else b"n" * 16, nonsense[segment % len(nonsense)])]

    def refuse(self, links: list[tuple[bytes, bytes]]) -> None:
        self.refused += links


@contextlib.contextmanager
def read_with_bases(make: Callable[[], TcpTransport], answers: Answers) -> Any:
    """Yield (link, target, bases, manifest) of a reader that holds OLD where NEW is served."""
    slab = Slab.adopt({"a": OLD.clone()})
    with served(make(), {"a": NEW}) as (offer, endpoint), contextlib.closing(make()) as reader:
        offer.deltas = answers
        before = slab.manifest(1000)
        answers.sender = lambda segment: encoded(offer.manifest, segment)
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        was = {segment: before.digest(segment) for segment in range(manifest.segment_count)}
        link.bases = Bases(Changes(list), manifest, slab, was, [])
        yield link, slab, manifest


def encoded(manifest: Manifest, segment: int) -> bytes:
    from tensorhub_plugins.core.client.changes import spans_of
    from tensorhub_plugins.core.deltas import codec

    start, stop = manifest.segment_range(segment)
    old, new = (np.frombuffer(each.numpy().tobytes(), np.uint8)[start:stop] for each in (OLD, NEW))
    made = codec.encode(old, new, spans_of(manifest, segment), codec.NUMPY)
    assert made is not None
    return made


@pytest.mark.parametrize("streams", [1, 4])
def test_segments_come_as_deltas(streams):
    answers = Answers()
    with read_with_bases(functools.partial(TcpTransport, streams=streams), answers) as (link, slab, manifest):
        arrived = sorted(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))
        assert arrived == list(range(manifest.segment_count)) == sorted(link.progress.deltas)
        assert torch.equal(slab.tensors()["a"], NEW) and answers.refused == []


def test_over_tls_too(tmp_path: Path):
    pytest.importorskip("cryptography", reason="makes the certificates")
    from tls_files import run_files

    from tensorhub_plugins.core.transports.tls import TlsTransport

    make, answers = functools.partial(TlsTransport, files=run_files(tmp_path)), Answers()
    with read_with_bases(make, answers) as (link, slab, manifest):
        arrived = sorted(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))
        assert arrived == sorted(link.progress.deltas) and torch.equal(slab.tensors()["a"], NEW)


@pytest.mark.parametrize("streams", [1, 4])
def test_nonsense_ends_in_whole_segments_over_the_same_link(streams):
    answers = Answers(right=False)
    with read_with_bases(functools.partial(TcpTransport, streams=streams), answers) as (link, slab, manifest):
        arrived = list(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))
        assert sorted(arrived) == list(range(manifest.segment_count)) and link.progress.deltas == {}
        assert all(link.digest(segment) == manifest.digest(segment) for segment in arrived)
        assert torch.equal(slab.tensors()["a"], NEW)
        assert len(answers.refused) == answers.found > 0  # the source forgets them, once each


def test_a_source_that_sends_deltas_that_nobody_asked_for_is_left(monkeypatch):
    monkeypatch.setattr(messages, "bases_of", lambda request: {0: (b"n" * 16,)})
    for with_bases in (True, False):
        frame = [b"n" * 16, b"\x00\x00\x00\x01", b"\x00"]
        monkeypatch.setattr(ReaderConnection, "_delta", lambda self, offer, segment, frame=frame: frame)
        with read_with_bases(TcpTransport, Answers()) as (link, slab, manifest):
            link.bases = link.bases if with_bases else None
            with pytest.raises((ProtocolError, SourceLost)):
                list(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))


def test_a_delta_that_is_longer_than_it_may_be_is_not_received(monkeypatch):
    monkeypatch.setattr(ReaderConnection, "_delta", lambda self, offer, segment: [bytes(600)])
    with (
        read_with_bases(TcpTransport, Answers()) as (link, slab, manifest),
        pytest.raises(ProtocolError, match="announced"),
    ):
        list(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))


def test_bases_that_do_not_fit_their_request_are_refused_before_anything_is_listed():
    assert bases_of(StreamRead([(0, 2)], 1.0, (b"a" * 16 + bytes(16),))) == {0: (b"a" * 16,), 1: ()}
    for runs, bases in (([(0, 1 << 40)], (b"a" * 16,)), ([(0, 2)], (b"a" * 31,)), ([(0, 1)], (b"", b"a" * 16))):
        with pytest.raises(ProtocolError):
            bases_of(StreamRead(runs, 1.0, bases))


class Before(msgspec.Struct, frozen=True, tag="StreamRead", array_like=True):
    """The request as it was before there were deltas."""

    runs: list[tuple[int, int]]
    seconds: float


def test_a_peer_that_knows_no_deltas_is_understood_and_understands():
    count = messages.BASED_SEGMENTS_MAX
    new = StreamRead([(2 * k, 2 * k + 1) for k in range(count)], 1.0, (b"a" * 16 * count,) * messages.BASES_MAX, 1e9)
    sent = msgspec.msgpack.encode(new)
    assert msgspec.msgpack.decode(sent, type=Before) == Before(new.runs, 1.0)
    assert len(sent) < messages.OPENING_SIZE_BYTES_MAX  # which it accepts whatever is open
    old = messages.request_decoder.decode(msgspec.msgpack.encode(Before([(0, 2)], 1.0)))
    assert old == StreamRead([(0, 2)], 1.0) and bases_of(old) == {}
