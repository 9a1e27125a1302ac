"""Every transport passes the shipped conformance suite; a broken one does not; offers, choice and plans."""

import contextlib
import functools
import mmap
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from transport_helpers import FORGED, KEY, served, soon
from transport_suite import ConformanceError, SimpleShelf, TransportSuite, check_transport

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import LinkProgress, Offer, TransportLimits, choices, create
from tensorhub_plugins.core.transports import read_plan as _plan
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.stream import channel
from tensorhub_plugins.core.transports.stream import source as stream_source
from tensorhub_plugins.core.transports.tcp import TcpLink, TcpTransport

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TRANSPORTS = {
    "tcp": (TcpTransport, {"garbage": FORGED}),
    "tcp-offload": (functools.partial(TcpTransport, offload_size_bytes=0), {"garbage": FORGED}),
    "tcp-3-streams": (functools.partial(TcpTransport, streams=3, offload_size_bytes=0), {"garbage": FORGED}),
    "shm": (ShmTransport, {"garbage": FORGED}),
    "shm-mapped": (functools.partial(ShmTransport, map_from=1), {"garbage": FORGED}),
    "shm-by-address": (ShmTransport, {"slabs": "adopted", "garbage": FORGED}),
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def suite(request):
    make, options = TRANSPORTS[request.param]
    if reason := getattr(make, "func", make).available():
        pytest.skip(reason)
    with TransportSuite(make, **options) as suite:
        yield suite


@pytest.mark.slow
@pytest.mark.parametrize("case", TransportSuite.CASES)
def test_conformance(suite, case):
    if reason := suite.skip_reason(case):
        pytest.skip(reason)
    suite.run(case)


@pytest.mark.slow
def test_check_transport_runs_all_cases():
    report = check_transport(TcpTransport, processes=False)
    assert set(report.passed) | set(report.skipped) == set(TransportSuite.CASES)
    assert set(report.skipped) == {"killed_source", "frozen_source", "killed_reader", "frozen_reader"}


# --- negative controls: the suite fails what is broken, in the case that is meant for it ---


def broken(link_class=None, **overrides):
    """A tcp transport whose links have these methods instead of their own."""
    link_type = type("BrokenLink", (link_class or TcpLink,), overrides)

    class Broken(TcpTransport):
        def connect(self, endpoint, *, deadline):
            link = super().connect(endpoint, deadline=deadline)
            link.__class__ = link_type
            return link

    return Broken


def flips_a_bit(self, segments, target, moves, *, deadline):
    for segment in TcpLink.read(self, segments, target, moves, deadline=deadline):
        yield segment
        if segment == 1:
            with target.writable(1500, 1501) as views:
                views[0][0] ^= 1


def swaps_segments(self, segments, target, moves, *, deadline):
    for segment in TcpLink.read(self, segments, target, moves, deadline=deadline):
        yield segment
        if segment == 3:
            with target.writable_ranges([(0, 997), (997, 1994)]) as views:
                content = b"".join(views)
                content = memoryview(content[997:] + content[:997])
                for view in views:
                    view[:] = content[: len(view)]
                    content = content[len(view) :]


def forgets_the_last(self, segments, target, moves, *, deadline):
    yield from TcpLink.read(self, list(segments)[:-1], target, moves, deadline=deadline)


def yields_too_early(self, segments, target, moves, *, deadline):
    TcpLink.read(self, segments, target, moves, deadline=deadline)
    self._plan._digests = {segment: self._manifest.digest(segment) for segment in segments}
    yield from segments


def reads_nothing_unwanted(self, segments, target, moves, *, deadline):
    yield from () if not moves else TcpLink.read(self, segments, target, moves, deadline=deadline)


def writes_the_unwanted(self, segments, target, moves, *, deadline):
    moves = [Move(0, 0, min(self._manifest.size_bytes, target.size_bytes))]
    yield from TcpLink.read(self, segments, target, moves, deadline=deadline)


LEFT = []  # targets of reads that have ended


def leaves_its_target(self, segments, target, moves, *, deadline):
    try:
        yield from TcpLink.read(self, segments, target, moves, deadline=deadline)
    finally:
        LEFT.append(target)


def writes_into_what_was_left(self, segment):
    for target in LEFT:
        with target.writable_ranges([(0, 1)]) as views:
            views[0][:] = b"?"
    LEFT.clear()
    return TcpLink.digest(self, segment)


MAPPED = []


def maps_and_keeps(self, key, as_of, *, deadline):
    MAPPED.append(mmap.mmap(-1, 4096))
    return TcpLink.open(self, key, as_of, deadline=deadline)


def lies_about_digests(self, segment):
    return self._offered.digest(segment)


def remembers_the_manifest(self, key, as_of, *, deadline):
    self._offered = TcpLink.open(self, key, as_of, deadline=deadline)
    return self._offered


def collects_first(self, segments, target, moves, *, deadline):
    yield from list(TcpLink.read(self, segments, target, moves, deadline=deadline))


def asks_for_no_more(self, segments, target, moves, *, deadline, more=None):
    yield from TcpLink.read(self, segments, target, moves, deadline=deadline)


def ignores_the_deadline(self, segments, target, moves, *, deadline):
    yield from TcpLink.read(self, segments, target, moves, deadline=deadline + 30)


def always_content(self, *, deadline):
    TcpLink.check(self, deadline=deadline)
    return True


class Deaf(LinkProgress):
    """Knows that something came, and not that the source waits."""

    def waiting(self):
        self.heard()


class Forgetful(LinkProgress):
    class Nothing(set):
        def add(self, segment):
            pass

    def __init__(self):
        super().__init__()
        self.delayed_segments = self.Nothing()


def told_to(progress_class):
    def open(self, key, as_of, *, deadline):
        self.progress = progress_class()
        return TcpLink.open(self, key, as_of, deadline=deadline)

    open.__name__ = progress_class.__name__
    return open


def never_closes(self):
    self._closed = True


def closes_once(self):
    if self._closed:
        raise OSError("already closed")
    TcpLink.close(self)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "methods"),
    [
        ("exact_bytes", {"read": flips_a_bit}),
        ("exact_bytes", {"read": swaps_segments}),
        ("exact_bytes", {"read": forgets_the_last}),
        ("exact_bytes", {"read": yields_too_early}),
        ("many_tiny_tensors", {"read": yields_too_early}),
        ("nothing_wanted", {"read": writes_the_unwanted}),
        ("nothing_wanted", {"read": reads_nothing_unwanted}),
        ("changed_bytes_show", {"digest": lies_about_digests, "open": remembers_the_manifest}),
        ("pipelined", {"read": collects_first}),
        ("more_while_reading", {"read": asks_for_no_more}),
        ("waiting_source_says_so", {"open": told_to(Deaf)}),
        ("waiting_source_says_so", {"open": told_to(Forgetful)}),
        ("late_segment", {"read": ignores_the_deadline}),
        ("frozen_source", {"read": ignores_the_deadline}),
        ("published_anew", {"check": always_content}),
        ("withdrawn_in_mid_read", {"check": always_content}),
        ("readers_are_counted", {"close": never_closes}),
        ("nothing_leaks", {"close": never_closes}),
        ("nothing_leaks", {"open": maps_and_keeps}),
        ("nothing_is_written_after_the_end", {"read": leaves_its_target, "digest": writes_into_what_was_left}),
        ("close_twice", {"close": closes_once}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f.__name__ for f in value.values()),
)
def test_a_broken_link_fails(case, methods, keep):
    make = broken(**methods)
    if "close" in methods and case != "close_twice":
        make = keeping_links(make, keep)
    with (
        TransportSuite(
            make, make_source=functools.partial(TcpTransport, limits=TransportLimits(stall_s=60)), patience_s=2.0
        ) as suite,
        pytest.raises((ConformanceError, OSError)),
    ):
        suite.run(case)


@pytest.fixture
def keep():
    """What a leaky transport holds on to; let go of at the end of the test."""
    kept = []
    yield kept
    for link in kept:
        TcpLink.close(link)


def keeping_links(make, keep):
    class Keeping(make):
        def __init__(self):
            super().__init__(limits=TransportLimits(stall_s=60))

        def connect(self, endpoint, *, deadline):
            keep.append(super().connect(endpoint, deadline=deadline))
            return keep[-1]

        def close(self):
            pass

    return Keeping


def waits_for_no_offer(monkeypatch):
    def find_offer(shelf, key, as_of, check):
        if (offer := shelf.find(key)) is None:
            raise VersionGone("the source does not offer it")
        return offer

    monkeypatch.setattr(stream_source, "find_offer", find_offer)


def serves_what_is_not_ready(monkeypatch):
    monkeypatch.setattr(stream_source.ReaderConnection, "_await", lambda *_: None)


def cannot_be_cut_off(monkeypatch):
    attach = Offer.attach
    monkeypatch.setattr(Offer, "withdraw", functools.partialmethod(Offer.withdraw, timeout_s=0.5))
    monkeypatch.setattr(Offer, "attach", lambda self, cut: attach(self, lambda: None))


def counts_no_readers(monkeypatch):
    monkeypatch.setattr(Offer, "attach", lambda self, cut: 0)


def never_notices_that_readers_left(monkeypatch):
    monkeypatch.setattr(stream_source.ReaderConnection, "_release", lambda self, **_: None)
    monkeypatch.setattr(Offer, "withdraw", functools.partialmethod(Offer.withdraw, timeout_s=0.5))


def listens_to_anybody(monkeypatch):
    done = threading.Event()

    def run(self):
        self._channel.fill([memoryview(bytearray(1))], None)
        done.wait(3)  # longer than the suite's patience below
        raise channel.Disconnected

    monkeypatch.setattr(stream_source.ReaderConnection, "run", run)


def keeps_silent_about_garbage(monkeypatch):
    monkeypatch.setattr(stream_source._log, "disabled", True)


def believes_lengths(monkeypatch):
    def receive_body(self, length, limit, deadline):
        bytearray(min(length, 256 << 20))
        raise ProtocolError("too late")

    monkeypatch.setattr(channel.Channel, "receive_body", receive_body)


def test_a_source_that_waits_for_no_expected_offer_fails(monkeypatch):
    waits_for_no_offer(monkeypatch)
    with TransportSuite(TcpTransport) as suite, pytest.raises(ConformanceError, match="an offer was about to be made"):
        suite.run("expected_offer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "damage"),
    [
        ("pipelined", serves_what_is_not_ready),
        ("withdrawn_before_read", cannot_be_cut_off),
        ("readers_are_counted", counts_no_readers),
        ("readers_are_counted", never_notices_that_readers_left),
        ("reader_gives_up", never_notices_that_readers_left),
        ("garbage", listens_to_anybody),
        ("garbage", keeps_silent_about_garbage),
        ("garbage", believes_lengths),
    ],
)
def test_a_broken_source_fails(case, damage, monkeypatch):
    with TransportSuite(TcpTransport, garbage=FORGED) as suite:
        suite.run(case)
    damage(monkeypatch)
    with (
        TransportSuite(TcpTransport, garbage=FORGED, patience_s=2.0) as suite,
        pytest.raises((ConformanceError, SourceLost, RuntimeError)),
    ):
        suite.run(case)
    monkeypatch.undo()


# --- offers ---


def offer_of(count=3):
    with Slab.adopt({"a": torch.zeros(count, dtype=torch.uint8)}) as slab:
        return Offer(KEY, slab.manifest(1), slab)


@pytest.mark.parametrize("make", [TcpTransport, ShmTransport])
def test_a_link_that_is_made_while_its_transport_closes_is_cut(make, monkeypatch):
    if reason := make.available():
        pytest.skip(reason)
    with served(make()) as (_, endpoint):
        for closes in (False, True):
            reader = make()
            with contextlib.closing(reader):
                if closes:  # another thread does, just after this one has looked whether it is open
                    monkeypatch.setattr(reader, "_check_open", reader.close)
                link = reader.connect(endpoint, deadline=soon())
                with pytest.raises(SourceLost) if closes else contextlib.nullcontext():
                    link.open(KEY, 1, deadline=soon())
                link.close()


def test_offer_readiness():
    offer = offer_of()
    assert not offer.poll_ready(1, time.monotonic())
    offer.mark_ready(1)
    assert offer.poll_ready(1, time.monotonic()) and not offer.poll_ready(0, time.monotonic())
    offer.mark_all_ready()
    assert offer.poll_ready(0, time.monotonic())
    offer.withdraw()
    with pytest.raises(SourceLost, match="withdrew"):
        offer.poll_ready(0, time.monotonic() + 60)


def test_offer_waiters_learn_of_withdrawal_at_once():
    offer = offer_of()
    problems = []

    def wait():
        try:
            offer.poll_ready(0, time.monotonic() + 600)
        except TensorHubError as error:
            problems.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    offer.withdraw()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(problems[0], SourceLost)


def test_offer_withdrawal_cuts_once_refuses_newcomers_and_raises_the_epoch():
    offer = offer_of()
    cuts = []
    readers = []
    readers.append(offer.attach(lambda: (cuts.append(1), offer.detach(readers[0]))))
    assert offer.active_readers == 1
    for _ in range(2):
        offer.withdraw()
    assert cuts == [1]
    assert offer.epoch == 1
    assert offer.withdrawn
    with pytest.raises(VersionGone):
        offer.attach(lambda: None)


def test_offer_says_when_a_reader_cannot_be_stopped():
    """Returning would let the owner write into memory that is being read."""
    offer = offer_of()
    offer.attach(lambda: None)
    with pytest.raises(RuntimeError, match="did not end"):
        offer.withdraw(timeout_s=0.01)


# --- choice ---


def test_create_and_choices():
    for name, kind in (("tcp", TcpTransport), ("shm", ShmTransport)):
        with contextlib.closing(create(name, advertise_host="127.0.0.1")) as transport:
            assert isinstance(transport, kind)
            assert transport.name == name
    with pytest.raises(UsageError, match="no transport 'carrier pigeon'"):
        create("carrier pigeon")
    assert choices(("shm", "tcp"), {"tcp": "t", "rdma": "r", "shm": "s"}) == [("shm", "s"), ("tcp", "t")]
    assert choices(("shm",), {"tcp": "t"}) == []


def test_a_transport_that_does_not_work_here_says_why(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match="'shm' cannot be used here: .*memfd"):
        create("shm")


def test_importing_starts_and_opens_nothing():
    code = (
        "import os, threading; before = os.listdir('/proc/self/fd'), threading.active_count()\n"
        "import tensorhub_plugins.core.transports.tcp, tensorhub_plugins.core.transports.shm.transport\n"
        "assert (os.listdir('/proc/self/fd'), threading.active_count()) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_serving_twice():
    for transport in (TcpTransport(), ShmTransport()):
        with contextlib.closing(transport):
            transport.serve(SimpleShelf())
            with pytest.raises(UsageError, match="one shelf"):
                transport.serve(SimpleShelf())


# --- plans ---


def test_runs_of():
    assert _plan.runs_of([3, 4, 5, 9, 8, 1, 2]) == [(3, 6), (9, 10), (8, 9), (1, 3)]
    assert _plan.runs_of([]) == []
