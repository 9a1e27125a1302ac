"""Every transport passes the shipped conformance suite; a broken one does not; and the wire refuses what it must."""

import contextlib
import errno
import fcntl
import functools
import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.memory.copying import digest_of
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.testing import ConformanceError, SimpleShelf, TransportSuite, check_transport
from tensorhub_plugins.core.transports import LinkProgress, NotServable, Offer, choices, create, inproc, tcp
from tensorhub_plugins.core.transports import read_plan as _plan
from tensorhub_plugins.core.transports.inproc import MemoryLink, MemoryTransport
from tensorhub_plugins.core.transports.shm import (
    memory_file as _memfile,
)
from tensorhub_plugins.core.transports.shm import (
    process_memory as _process,
)
from tensorhub_plugins.core.transports.shm import (
    transport as shm,
)
from tensorhub_plugins.core.transports.shm.memory_file import Mappings, MemoryFile
from tensorhub_plugins.core.transports.shm.process_memory import ProcessMemory
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.stream import link as _wire
from tensorhub_plugins.core.transports.stream.link import (
    CONTROL,
    HEADER,
    HELLO,
    MAGIC,
    PROTOCOL,
    SEGMENT,
    Opened,
    Read,
)
from tensorhub_plugins.core.transports.tcp import TcpLink, TcpTransport, local_host_towards
from tensorhub_plugins.core.types import (
    ShardKey,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

KEY = ShardKey(1, "checkpoint")


def frame(message, kind=CONTROL, length=None):
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(kind, 0, 0, len(body) if length is None else length) + body


GREETING = HELLO.pack(MAGIC, PROTOCOL, 0)
# What only somebody who knows the protocol's beginning would send. Each must cost the source next to nothing.
FORGED = (
    HELLO.pack(MAGIC, PROTOCOL + 1, 0),  # another version
    GREETING + HEADER.pack(CONTROL, 0, 0, 1 << 63) + b"x",  # a huge length
    GREETING + HEADER.pack(CONTROL, 0, 0, _wire.REQUEST_SIZE_BYTES_MAX + 1) + b"x",
    GREETING + HEADER.pack(77, 0, 0, 0),  # a kind that is none
    GREETING + frame(["Shutdown", 1]),  # a type that is none
    GREETING + frame(["Open", "a", "b"]),  # wrong types of fields
    GREETING + HEADER.pack(CONTROL, 0, 0, 5) + b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
    GREETING + frame(Read([(0, 1)], 1.0)),  # reading before anything is open
    GREETING + frame(_wire.Open(KEY, 1)) + frame(Read([(0, 1 << 40)], 1.0)),  # segments that are not there
    GREETING + frame(_wire.Open(KEY, 1)) + frame(Read([(3, 3)], 1.0)),
)

TRANSPORTS = {
    "memory": (MemoryTransport, {"processes": False}),
    "tcp": (TcpTransport, {"garbage": FORGED}),
    "tcp-beside": (functools.partial(TcpTransport, beside_size_bytes=0), {"garbage": FORGED}),
    "tcp-3-streams": (functools.partial(TcpTransport, streams=3, beside_size_bytes=0), {"garbage": FORGED}),
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


@pytest.mark.parametrize("case", TransportSuite.CASES)
def test_conformance(suite, case):
    if reason := suite.skip_reason(case):
        pytest.skip(reason)
    suite.run(case)


def test_check_transport_runs_all_cases():
    report = check_transport(MemoryTransport, processes=False)
    assert set(report.passed) | set(report.skipped) == set(TransportSuite.CASES)
    assert set(report.skipped) == {
        "killed_source",
        "frozen_source",
        "killed_reader",
        "frozen_reader",
        "garbage",
        "impostor",
    }


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


def flips_a_bit(self, segments, target, placement, *, deadline):
    for segment in TcpLink.read(self, segments, target, placement, deadline=deadline):
        yield segment
        if segment == 1:
            with target.writable(1500, 1501) as views:
                views[0][0] ^= 1


def swaps_segments(self, segments, target, placement, *, deadline):
    for segment in TcpLink.read(self, segments, target, placement, deadline=deadline):
        yield segment
        if segment == 3:
            with target.writable_ranges([(0, 997), (997, 1994)]) as views:
                content = b"".join(views)
                content = memoryview(content[997:] + content[:997])
                for view in views:
                    view[:] = content[: len(view)]
                    content = content[len(view) :]


def forgets_the_last(self, segments, target, placement, *, deadline):
    yield from TcpLink.read(self, list(segments)[:-1], target, placement, deadline=deadline)


def yields_too_early(self, segments, target, placement, *, deadline):
    TcpLink.read(self, segments, target, placement, deadline=deadline)
    self._plan._digests = {segment: self._manifest.digest(segment) for segment in segments}
    yield from segments


def reads_nothing_unwanted(self, segments, target, placement, *, deadline):
    yield from () if set(placement) == {-1} else TcpLink.read(self, segments, target, placement, deadline=deadline)


def writes_the_unwanted(self, segments, target, placement, *, deadline):
    placement = [0 if place == -1 else place for place in placement]
    yield from TcpLink.read(self, segments, target, placement, deadline=deadline)


def lies_about_digests(self, segment):
    return self._offered.digest(segment)


def remembers_the_manifest(self, key, lease, *, deadline):
    self._offered = TcpLink.open(self, key, lease, deadline=deadline)
    return self._offered


def collects_first(self, segments, target, placement, *, deadline):
    yield from list(TcpLink.read(self, segments, target, placement, deadline=deadline))


def ignores_the_deadline(self, segments, target, placement, *, deadline):
    yield from TcpLink.read(self, segments, target, placement, deadline=deadline + 30)


def always_content(self, *, deadline):
    TcpLink.check(self, deadline=deadline)
    return True


class Deaf(LinkProgress):
    """Knows that something came, and not that the source waits."""

    def waiting(self):
        self.heard()


class Forgetful(LinkProgress):
    def delayed(self, segment):
        pass


def told_to(progress_class):
    def open(self, key, lease, *, deadline):
        self.progress = progress_class()
        return TcpLink.open(self, key, lease, deadline=deadline)

    open.__name__ = progress_class.__name__
    return open


def never_closes(self):
    self._closed = True


def closes_once(self):
    if self._closed:
        raise OSError("already closed")
    TcpLink.close(self)


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
        ("waiting_source_says_so", {"open": told_to(Deaf)}),
        ("waiting_source_says_so", {"open": told_to(Forgetful)}),
        ("late_segment", {"read": ignores_the_deadline}),
        ("frozen_source", {"read": ignores_the_deadline}),
        ("published_anew", {"check": always_content}),
        ("withdrawn_in_mid_read", {"check": always_content}),
        ("readers_are_counted", {"close": never_closes}),
        ("nothing_leaks", {"close": never_closes}),
        ("close_twice", {"close": closes_once}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f.__name__ for f in value.values()),
)
def test_a_broken_link_fails(case, methods, keep):
    make = broken(**methods)
    if case in ("nothing_leaks", "readers_are_counted"):
        make = keeping_links(make, keep)
    with (
        TransportSuite(make, make_source=functools.partial(TcpTransport, stall_s=60), patience_s=2.0) as suite,
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
            super().__init__(stall_s=60)

        def connect(self, endpoint, *, deadline):
            keep.append(super().connect(endpoint, deadline=deadline))
            return keep[-1]

        def close(self):
            pass

    return Keeping


def waits_for_no_offer(monkeypatch):
    def find_offer(shelf, key, lease, check):
        if (offer := shelf.find(key)) is None:
            raise VersionGone("the source does not offer it")
        return offer

    monkeypatch.setattr(inproc, "find_offer", find_offer)
    monkeypatch.setattr(_wire, "find_offer", find_offer)


def serves_what_is_not_ready(monkeypatch):
    monkeypatch.setattr(_wire._Conversation, "_await", lambda *_: None)


def cannot_be_cut_off(monkeypatch):
    attach = Offer.attach
    monkeypatch.setattr("tensorhub_plugins.core.transports.offer.CUT_S_MAX", 0.5)
    monkeypatch.setattr(Offer, "attach", lambda self, cut: attach(self, lambda: None))


def counts_no_readers(monkeypatch):
    monkeypatch.setattr(Offer, "attach", lambda self, cut: 0)


def never_notices_that_readers_left(monkeypatch):
    monkeypatch.setattr(_wire._Conversation, "_release", lambda self, **_: None)
    monkeypatch.setattr("tensorhub_plugins.core.transports.offer.CUT_S_MAX", 0.5)


def listens_to_anybody(monkeypatch):
    done = threading.Event()

    def run(self):
        self._channel.fill([memoryview(bytearray(1))], None)
        done.wait(3)  # longer than the suite's patience below
        raise _wire.Disconnected

    monkeypatch.setattr(_wire._Conversation, "run", run)


def keeps_silent_about_garbage(monkeypatch):
    monkeypatch.setattr(_wire._log, "disabled", True)


def believes_lengths(monkeypatch):
    def receive_body(self, length, limit, deadline):
        bytearray(min(length, 256 << 20))
        raise ProtocolError("too late")

    monkeypatch.setattr(_wire.Channel, "receive_body", receive_body)


@pytest.mark.parametrize("make", [MemoryTransport, TcpTransport])
def test_a_source_that_waits_for_no_expected_offer_fails(make, monkeypatch):
    waits_for_no_offer(monkeypatch)
    with TransportSuite(make) as suite, pytest.raises(ConformanceError, match="an offer was about to be made"):
        suite.run("expected_offer")


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


# --- torn bytes over shared memory, the one transport whose readers cannot be stopped ---


@contextlib.contextmanager
def served(transport, tensors=None, *, segment_size_bytes=1000, kind="allocated"):
    tensors = {"a": torch.arange(8000, dtype=torch.int16)} if tensors is None else tensors
    if kind == "allocated":
        slab = Slab.allocate(spec_of(name, tensor) for name, tensor in tensors.items())
        for name, tensor in tensors.items():
            slab.write(name, tensor)
    else:
        slab = Slab.adopt(tensors)
    offer = Offer(KEY, slab.manifest(segment_size_bytes), slab)
    offer.mark_all_ready()
    with slab, contextlib.closing(transport):
        yield offer, transport.serve(SimpleShelf(offer))


def soon(seconds=60.0):
    return time.monotonic() + seconds


# How the source's memory is read: the kind of its slab, the reader's options, and who copies.
WAYS = {
    "file": ("allocated", {}, MemoryFile),
    "mapped": ("allocated", {"map_from": 1}, MemoryFile),
    "address": ("adopted", {}, ProcessMemory),
}


def withdrawn_while_copied(monkeypatch, way):
    """Read segment 0, whose memory is withdrawn and overwritten while it is copied: what is yielded, what is torn."""
    kind, options, copier = WAYS[way]
    copy = copier.read
    with served(ShmTransport(), kind=kind) as (offer, endpoint), contextlib.closing(ShmTransport(**options)) as reader:

        def read(self, start, stop, views):
            offer.withdraw()
            offer.slab.tensors()["a"].fill_(-1)
            copy(self, start, stop, views)

        monkeypatch.setattr(copier, "read", read)
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        got = []
        with contextlib.suppress(SourceLost):
            got.extend(link.read([0], Slab.allocate(manifest.tensors), [0], deadline=soon()))
        torn = [segment for segment in got if link.digest(segment) != manifest.digest(segment)]
        return got, torn


@pytest.mark.parametrize("way", WAYS)
def test_shm_yields_nothing_that_was_overwritten_while_it_copied(monkeypatch, way):
    assert withdrawn_while_copied(monkeypatch, way) == ([], [])


@pytest.mark.parametrize("way", WAYS)
def test_without_looking_at_the_connection_it_would_and_the_digest_would_tell(monkeypatch, way):
    monkeypatch.setattr(_wire.Channel, "is_cut", lambda self: False)
    assert withdrawn_while_copied(monkeypatch, way) == ([0], [0])


# --- shm: memory that is met again ---


def read_all(reader, endpoint):
    """Through a link of its own; the tensor "a" as it was read."""
    link = reader.connect(endpoint, deadline=soon())
    manifest = link.open(KEY, 1, deadline=soon())
    target = Slab.allocate(manifest.tensors)
    segments = range(manifest.segment_count)
    for segment in link.read(segments, target, [0], deadline=soon()):
        assert link.digest(segment) == manifest.digest(segment)
    link.close()
    return target.tensors()["a"]


def inode_of(slab):
    return str(os.fstat(slab.shared_fd).st_ino)


def maps_of(inode):
    """How many mappings of this memory this process has; its owner, which is the same one, has one."""
    with open("/proc/self/maps") as maps:
        return sum(line.split()[4] == inode for line in maps)


def ends_of(fd):
    """How many descriptors this process has of that pipe; its owner, which is the same one, has two."""
    pipe = os.readlink(f"/proc/self/fd/{fd}")
    count = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or another thread's
            count += os.readlink(f"/proc/self/fd/{each}") == pipe
    return count


def until(condition):
    patience = soon()
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.001)


def test_shm_maps_memory_that_it_meets_again_and_sees_what_is_written_there(monkeypatch):
    preadv = os.preadv
    with served(ShmTransport()) as (offer, endpoint), contextlib.closing(ShmTransport()) as reader:
        tensor = offer.slab.tensors()["a"]
        assert torch.equal(read_all(reader, endpoint), tensor)
        assert len(reader._mappings) == 0 and maps_of(inode_of(offer.slab)) == 1
        monkeypatch.setattr(os, "preadv", None)  # from the second time on nothing is read through the file
        assert torch.equal(read_all(reader, endpoint), tensor)
        assert len(reader._mappings) == 1 and maps_of(inode_of(offer.slab)) == 2
        tensor.add_(1)
        offer.manifest = offer.slab.manifest(1000)
        assert torch.equal(read_all(reader, endpoint), tensor)
        assert len(reader._mappings) == 1 and maps_of(inode_of(offer.slab)) == 2
        monkeypatch.setattr(os, "preadv", preadv)
        assert torch.equal(read_all(ShmTransport(), endpoint), tensor)  # another reader begins anew
    assert len(reader._mappings) == 0


def test_shm_lets_go_of_a_mapping_when_its_owner_closes_the_slab():
    with contextlib.closing(ShmTransport(map_from=1)) as reader:
        with served(ShmTransport()) as (offer, endpoint):
            inode, owners = inode_of(offer.slab), offer.slab.tensors()
            read_all(reader, endpoint)
            assert len(reader._mappings) == 1 and maps_of(inode) == 2
        until(lambda: len(reader._mappings) == 0)
        assert maps_of(inode) == len(owners) == 1  # the owner still looks at its tensor


OWNER = """
import sys, torch
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.testing import SimpleShelf
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.types import ShardKey
tensor = torch.arange(8000, dtype=torch.int16)
slab = Slab.allocate([spec_of("a", tensor)])
slab.write("a", tensor)
offer = Offer(ShardKey(1, "checkpoint"), slab.manifest(1000), slab)
offer.mark_all_ready()
print(ShmTransport().serve(SimpleShelf(offer)), flush=True)
sys.stdin.read()
"""


def test_shm_lets_go_of_a_mapping_when_its_owner_is_killed():
    with contextlib.closing(ShmTransport(map_from=1)) as reader:
        owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            read_all(reader, owner.stdout.readline().decode().strip())
            assert len(reader._mappings) == 1
            ((_, inode, _),) = reader._mappings._kept
            assert maps_of(str(inode)) == 1
        finally:
            owner.kill()
            owner.communicate()
        until(lambda: len(reader._mappings) == 0)
        assert maps_of(str(inode)) == 0


def test_shm_maps_nothing_of_an_empty_file():
    mappings = Mappings(map_from=1)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    lifeline, other = os.pipe()
    assert mappings.meet(empty, lifeline) is None
    mappings.close()
    for fd in (empty, other):
        os.close(fd)


def test_shm_never_maps_a_file_that_could_become_shorter():
    mappings = Mappings(map_from=1)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    other, lifeline = os.pipe()
    assert mappings.meet(unsealed, lifeline) is None
    with pytest.raises(OSError):
        os.fstat(lifeline)  # nobody needs it any more
    for fd in (unsealed, other):
        os.close(fd)
    mappings.close()


def test_shm_keeps_a_bounded_number_of_mappings_those_it_met_last():
    before = len(os.listdir("/proc/self/fd"))
    mappings = Mappings(map_from=1)
    slabs = [Slab.allocate([spec_of("a", torch.zeros(1))]) for _ in range(_memfile.MAPPINGS_MAX + 3)]
    for slab in slabs:
        assert mappings.meet(slab.shared_fd, os.dup(slab.lifeline_fd)) is not None
    assert len(mappings) == _memfile.MAPPINGS_MAX
    assert [maps_of(inode_of(slab)) for slab in (*slabs[:4], slabs[-1])] == [1, 1, 1, 2, 2]
    assert [ends_of(slab.lifeline_fd) for slab in (*slabs[:4], slabs[-1])] == [2, 2, 2, 3, 3]
    assert len(os.listdir("/proc/self/fd")) > before + _memfile.MAPPINGS_MAX
    mappings.close()
    mappings.close()
    assert [ends_of(slab.lifeline_fd) for slab in slabs] == [2] * len(slabs)
    assert [maps_of(inode_of(slab)) for slab in slabs] == [1] * len(slabs)
    for slab in slabs:
        slab.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # others may just have been closed by an earlier test's threads


@pytest.mark.parametrize("count", [0, 17, 1 << 60])
def test_shm_believes_no_source_about_what_is_ready(monkeypatch, count):
    """It is asked for 16 segments."""
    read = _wire._Conversation._read

    class Boasting:
        size = HEADER.size
        unpack = HEADER.unpack

        def pack(self, kind, waited, segment, length):
            return HEADER.pack(kind, waited, segment, count if kind == _wire.READY else length)

    def boast(self, request):
        monkeypatch.setattr(_wire, "HEADER", Boasting())
        read(self, request)

    monkeypatch.setattr(_wire._Conversation, "_read", boast)
    with (
        served(ShmTransport()) as (_, endpoint),
        contextlib.closing(ShmTransport()) as reader,
        pytest.raises(ProtocolError, match=f"{count} segments from 0 on are said to be ready, due are"),
    ):
        read_all(reader, endpoint)


# --- shm: the memory of other processes ---


@pytest.fixture
def forbidden(monkeypatch):
    """No process may read another's memory."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_process, "_read", refuse)


def test_shm_tells_no_addresses_of_what_it_can_pass_on_as_a_file(monkeypatch):
    monkeypatch.setattr(_process, "pack", None)
    with served(ShmTransport()) as (offer, endpoint), contextlib.closing(ShmTransport()) as reader:
        assert reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon()) == offer.manifest


def test_shm_believes_no_source_about_its_addresses(monkeypatch):
    monkeypatch.setattr(_process, "pack", lambda extents: b"x" * 16)
    tensors = {"a": torch.arange(100)}
    with (
        served(ShmTransport(), tensors, kind="adopted") as (offer, endpoint),
        contextlib.closing(ShmTransport()) as reader,
    ):
        with pytest.raises(ProtocolError, match="as its manifest says"):
            reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon())
        assert offer.wait_no_readers(soon())


def test_what_cannot_be_read_any_more_is_a_source_that_is_lost(monkeypatch):
    def fails(*_):
        raise OSError(errno.EFAULT, "Bad address")

    tensors = {"a": torch.arange(100)}
    with (
        served(ShmTransport(), tensors, kind="adopted") as (offer, endpoint),
        contextlib.closing(ShmTransport()) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(_process, "_read", fails)
        with pytest.raises(SourceLost, match="cannot be read any more: .*Bad address"):
            list(link.read([0], Slab.allocate(manifest.tensors), [0], deadline=soon()))


# --- shm: where that is forbidden ---


def test_shm_stages_adopted_memory_once_for_the_second_reader_and_those_after_it(forbidden, monkeypatch):
    monkeypatch.setattr(shm, "TOGETHER_S", 1000.0)
    tensors = {"a": torch.arange(5000, dtype=torch.int16), "b": torch.arange(3, dtype=torch.int64)}
    with served(ShmTransport(), tensors, kind="adopted") as (offer, endpoint), contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(ShmTransport())) for _ in range(3)]
        first, *later = [reader.connect(endpoint, deadline=soon()) for reader in readers]
        with pytest.raises(NotServable, match="adopted"):
            first.open(KEY, 1, deadline=soon())
        copied = []
        readable, offer.slab.readable = offer.slab.readable, lambda *range_: copied.append(range_) or readable(*range_)
        slabs = []
        for link in later:
            manifest = link.open(KEY, 1, deadline=soon())
            slabs.append(Slab.allocate(manifest.tensors))
            segments = range(manifest.segment_count)
            assert sorted(link.read(segments, slabs[-1], manifest.offsets, deadline=soon())) == list(segments)
            assert all(link.digest(segment) == manifest.digest(segment) for segment in segments)
        assert len(copied) == manifest.segment_count, "copied once for both"
        for slab in slabs:
            assert all(torch.equal(slab.tensors()[name], tensor) for name, tensor in tensors.items())
        tensors["a"].zero_()  # what a publisher must not do: the copy is as it was published
        assert all(link.check(deadline=soon()) for link in later)
        manifest = later[0].open(KEY, 1, deadline=soon())  # the copy went with its last reader: one of torn bytes
        list(later[0].read([0], slabs[0], manifest.offsets, deadline=soon()))
        assert later[0].digest(0) != manifest.digest(0)
        offer.withdraw()
        assert offer.active_readers == 0 and not later[0].check(deadline=soon())


def test_shm_stages_nothing_for_readers_that_come_one_after_the_other(forbidden, monkeypatch):
    monkeypatch.setattr(shm, "TOGETHER_S", 0.0)
    with (
        served(ShmTransport(), {"a": torch.arange(100)}, kind="adopted") as (offer, endpoint),
        contextlib.closing(ShmTransport()) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        for _ in range(3):
            with pytest.raises(NotServable, match="adopted"):
                link.open(KEY, 1, deadline=soon())
        elsewhere = offer.attach(lambda: None)  # somebody reads over tcp
        assert link.open(KEY, 1, deadline=soon()) == offer.manifest
        offer.detach(elsewhere)


def open_at_once(endpoint, count):
    """So many links that have opened the offer, each of another reader, and what closes them."""
    stack = contextlib.ExitStack()
    links = []
    for _ in range(count):
        reader = stack.enter_context(contextlib.closing(ShmTransport()))
        links.append(reader.connect(endpoint, deadline=soon()))
        links[-1].open(KEY, 1, deadline=soon())
    return links, stack


def ways_of(links):
    return ["address" if isinstance(link._block, ProcessMemory) else "file" for link in links]


def finish(links):
    """Read everything, and let go of it."""
    for link in links:
        target = Slab.allocate(link._manifest.tensors)
        for segment in link.read(range(link._manifest.segment_count), target, [0], deadline=soon()):
            assert link.digest(segment) == link._manifest.digest(segment)
    assert all(link.check(deadline=soon()) for link in links)


def test_shm_stages_for_several_readers_at_a_time_and_keeps_that_memory_while_there_are_several():
    source = ShmTransport()
    with served(source, kind="adopted") as (offer, endpoint):
        dialect = source._server._dialect
        links, stack = open_at_once(endpoint, 4)
        with stack:
            assert ways_of(links) == ["address", "address", "file", "file"]
            finish(links)
        until(lambda: dialect._idle is not None)
        inode = os.fstat(dialect._idle.slab.shared_fd).st_ino

        offer.slab.tensors()["a"].add_(1)  # the next version of the same tensors
        following = Offer(KEY, offer.slab.manifest(1000), offer.slab)
        following.mark_all_ready()
        source._server._shelf = SimpleShelf(following)
        links, stack = open_at_once(endpoint, 3)
        with stack:
            assert ways_of(links) == ["file"] * 3
            assert {os.fstat(link._block._fd).st_ino for link in links} == {inode}
            finish(links)
        until(lambda: dialect._idle is not None)

        links, stack = open_at_once(endpoint, 1)  # one alone still uses what there is, and it is not kept for it
        with stack:
            assert ways_of(links) == ["file"]
            finish(links)
        until(lambda: following.active_readers == 0)
        assert dialect._idle is None and not dialect._stages
        links, stack = open_at_once(endpoint, 1)
        with stack:
            assert ways_of(links) == ["address"]


def test_shm_gives_staged_memory_back_when_the_transport_closes():
    source = ShmTransport()
    with served(source, kind="adopted") as (_, endpoint):
        links, stack = open_at_once(endpoint, 3)
        with stack:
            finish(links)
        dialect = source._server._dialect
        until(lambda: dialect._idle is not None)
        slab = dialect._idle.slab
        assert slab.shared_fd is not None
    assert slab.shared_fd is None and dialect._idle is None


def test_shm_gives_staged_memory_back_when_no_version_follows(monkeypatch):
    source = ShmTransport()
    with served(source, kind="adopted") as (_, endpoint):
        dialect = source._server._dialect
        for kept_s, kept in ((1000.0, True), (0.0, False)):
            monkeypatch.setattr(shm, "STAGE_KEPT_S", kept_s)
            links, stack = open_at_once(endpoint, 3)
            with stack:
                slab = dialect._stages[next(iter(dialect._stages))].slab
                finish(links)
            until(lambda: not dialect._stages)  # it is idle from then on, or gone
            if kept:
                assert dialect._idle.slab is slab and dialect._idle_ends.is_alive()
                timer = dialect._idle_ends
            else:
                until(lambda: dialect._idle is None)
                assert slab.shared_fd is None
                timer.join()  # cancelled when the memory was used again
                assert timer.finished.is_set()


def test_shm_cuts_a_reader_off_before_the_staged_memory_it_copies_from_is_used_again(monkeypatch):
    """When a conversation ends by a fault of the source, its reader may still be copying."""
    heard = []
    let_go = shm._ShmDialect.let_go

    def listen(self, channel, *, ended):
        let_go(self, channel, ended=ended)
        heard.append([link._channels[0].is_cut() for link in links])

    def fail(self, request):
        raise ProtocolError("it is broken")

    with served(ShmTransport(), kind="adopted") as (_, endpoint):
        links, stack = open_at_once(endpoint, 3)
        with stack:
            monkeypatch.setattr(shm._ShmDialect, "let_go", listen)
            monkeypatch.setattr(_wire._Conversation, "_read", fail)
            with pytest.raises(SourceLost):
                list(links[2].read([0], Slab.allocate(links[2]._manifest.tensors), [0], deadline=soon()))
            until(lambda: heard)
            assert heard[0] == [False, False, True]


def test_shm_does_not_serve_adopted_memory_and_tcp_does(forbidden, caplog):
    caplog.set_level(logging.INFO)
    tensors = {"a": torch.arange(100, dtype=torch.int16)}
    with (
        served(ShmTransport(), tensors, kind="adopted") as (offer, endpoint),
        contextlib.closing(ShmTransport()) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        with pytest.raises(NotServable, match="adopted"):
            link.open(KEY, 1, deadline=soon())
        assert isinstance(NotServable("x"), UsageError)
        with pytest.raises(VersionGone):  # the link is still good
            link.open(ShardKey(9, "checkpoint"), 1, deadline=soon())
        assert offer.active_readers == 0
        assert caplog.text.count("memory of other processes cannot be read here") == 1  # once, and never tried again
    with served(TcpTransport(), tensors, kind="adopted") as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        assert link.open(KEY, 1, deadline=soon()).size_bytes == 200


def test_shm_gives_readers_no_right_to_write(monkeypatch):
    received = []
    receive = _wire.Channel.receive_descriptors

    def receive_descriptors(self, count, deadline):
        fds = receive(self, count, deadline)
        received.extend(fds)
        return fds

    monkeypatch.setattr(_wire.Channel, "receive_descriptors", receive_descriptors)
    with served(ShmTransport()) as (_, endpoint), contextlib.closing(ShmTransport(map_from=1)) as reader:
        link = reader.connect(endpoint, deadline=soon())
        link.open(KEY, 1, deadline=soon())
        memory, lifeline = received
        for fd in received:
            assert not os.get_inheritable(fd)
            with pytest.raises(OSError):
                os.write(fd, b"x")
        with pytest.raises(OSError):
            mmap.mmap(memory, 1000)  # to write, which is the default


def test_tcp_says_what_fails_beside_the_reading(monkeypatch):
    def fail(views):
        raise ZeroDivisionError

    with (
        served(TcpTransport()) as (_, endpoint),
        contextlib.closing(TcpTransport(beside_size_bytes=0)) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(_plan, "digest_of", fail)
        got = []
        with pytest.raises(ZeroDivisionError):
            got.extend(link.read(range(16), Slab.allocate(manifest.tensors), [0], deadline=soon()))
        assert got == []


@pytest.mark.parametrize(("cores", "beside"), [(2, False), (16, True)])
def test_tcp_digests_beside_the_reading_where_there_are_cores_for_it(monkeypatch, cores, beside):
    threads = []

    def digest(views):
        threads.append(threading.current_thread())
        return digest_of(views)

    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    tensors = {"a": torch.zeros(4 << 20, dtype=torch.uint8)}
    with (
        served(TcpTransport(), tensors, segment_size_bytes=tcp.BESIDE_SIZE_BYTES) as (_, endpoint),
        contextlib.closing(TcpTransport()) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(_plan, "digest_of", digest)
        assert list(link.read(range(4), Slab.allocate(manifest.tensors), [0], deadline=soon())) == [0, 1, 2, 3]
    assert len(threads) == 4
    assert all((thread is not threading.current_thread()) == beside for thread in threads)


@pytest.mark.parametrize(("host", "known"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_tcp_within_a_host_is_not_paced(host, known):
    """A peer that has this end's own address is on this host; another address of the same host is not recognized."""
    source = TcpTransport(host)
    with served(source) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        link.open(KEY, 1, deadline=soon())
        with socket.socket() as plain:
            default = congestion_of(plain)
        for channel in (*link._channels, *source._server._connections):  # the reader's end, and the one that sends
            assert congestion_of(channel.sock) == (tcp.SAME_HOST_CONGESTION if known else default)


def congestion_of(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_shm_refuses_other_users(monkeypatch, caplog):
    with served(ShmTransport()) as (_, endpoint), contextlib.closing(ShmTransport()) as reader:
        reader.connect(endpoint, deadline=soon()).close()
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1000)  # the source is another user's, and not root's
        monkeypatch.setattr("tensorhub_plugins.core.transports.shm.transport._CREDENTIALS", _Credentials(uid + 2000))
        with pytest.raises(SourceLost):
            reader.connect(endpoint, deadline=soon())
    assert "belongs to user" in caplog.text


class _Credentials:
    size = struct.calcsize("iII")

    def __init__(self, uid):
        self._uid = uid

    def unpack(self, _):
        return 1234, self._uid, 0


@pytest.mark.parametrize("what", ["too short", "no descriptor", "one descriptor", "three descriptors", "not the byte"])
def test_shm_believes_no_source_about_its_memory(what, monkeypatch):
    """A file that ends early is an error, never a SIGBUS."""

    def send_descriptors(self, fds, deadline):
        short = os.memfd_create("short")
        os.ftruncate(short, 100)
        fds = [short] * {"no descriptor": 0, "one descriptor": 1, "three descriptors": 3}.get(what, 2)
        data = b"x" if what == "not the byte" else _wire.DESCRIPTOR
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        self.sock.sendmsg([data], rights)
        os.close(short)

    monkeypatch.setattr(_wire.Channel, "send_descriptors", send_descriptors)
    with served(ShmTransport()) as (offer, endpoint), contextlib.closing(ShmTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError):
            link.open(KEY, 1, deadline=soon())
        assert offer.wait_no_readers(soon())
        patience = soon()
        while len(os.listdir("/proc/self/fd")) > before:  # the source closes its own in a thread of its own
            assert time.monotonic() < patience


def test_shm_file_that_is_cut_while_it_is_read(tmp_path):
    """preadv says so; a mapping would have killed us."""
    tensors = {"a": torch.zeros(50_000, dtype=torch.uint8)}
    with Slab.adopt(tensors) as slab:
        manifest = slab.manifest(1000)
    path = tmp_path / "memory"
    path.write_bytes(bytes(50_000 + 4096))
    block = MemoryFile(manifest, os.open(path, os.O_RDONLY))
    block.read(0, 1000, [memoryview(bytearray(1000))])
    os.truncate(path, 500)
    with pytest.raises(ProtocolError, match="ends before"):
        block.read(0, 1000, [memoryview(bytearray(1000))])
    block.close()


# --- tcp ---


@pytest.mark.parametrize("streams", [0, 17])
def test_tcp_streams_are_bounded(streams):
    with pytest.raises(UsageError, match="streams"):
        TcpTransport(streams=streams)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_tcp_does_not_advertise_what_cannot_be_connected_to(host):
    with pytest.raises(UsageError, match="advertise_host"):
        TcpTransport(host)


def test_tcp_listens_only_where_it_says():
    with served(TcpTransport()) as (_, endpoint):
        assert endpoint.startswith("tcp://127.0.0.1:")
        with (
            pytest.raises(OSError),
            socket.create_connection(("127.0.0.2", int(endpoint.rpartition(":")[2])), timeout=5),
        ):
            pass


def test_tcp_behind_address_translation_listens_everywhere():
    """192.0.2.1 is nobody's address (RFC 5737): peers reach it through somebody else's."""
    with served(TcpTransport("192.0.2.1")) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        assert endpoint.startswith("tcp://192.0.2.1:")
        port = endpoint.rpartition(":")[2]
        reader.connect(f"tcp://127.0.0.1:{port}", deadline=soon()).close()


def test_tcp_over_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with served(TcpTransport("::1")) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        assert endpoint.startswith("tcp://[::1]:")
        assert reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon()).size_bytes == 16000


@pytest.mark.parametrize(
    "endpoint", ["tcp://", "tcp://host", "tcp://host:", "tcp://:1", "shm://x", "host:1", "tcp://h:x"]
)
def test_endpoints_that_are_none(endpoint):
    with contextlib.closing(TcpTransport()) as reader, pytest.raises(UsageError, match="endpoint"):
        reader.connect(endpoint, deadline=soon())


def test_local_host_towards():
    assert local_host_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError):
        local_host_towards("no such host.invalid")


def test_streams_share_a_read(monkeypatch):
    asked = []
    request = TcpLink._request
    monkeypatch.setattr(
        TcpLink,
        "_request",
        lambda self, channel, segments, deadline: (
            asked.append(list(segments)) or request(self, channel, segments, deadline)
        ),
    )
    with served(TcpTransport()) as (_, endpoint), contextlib.closing(TcpTransport(streams=3)) as reader:
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        slab = Slab.allocate(manifest.tensors)
        assert sorted(link.read(range(16), slab, [0], deadline=soon())) == list(range(16))
        assert sorted(segment for each in asked for segment in each) == list(range(16)) and len(asked) >= 3
        asked.clear()
        assert list(link.read([5], slab, [0], deadline=soon())) == [5]
        assert asked == [[5]]


def test_a_bigger_deadline_than_stall_does_not_wait_for_the_dead():
    """A source that says nothing at all is lost after stall_s, however far the deadline is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.closing(TcpTransport(stall_s=0.3)) as reader:
            began = time.monotonic()
            with pytest.raises(SourceLost, match="frozen or unreachable"):
                reader.connect(endpoint, deadline=soon(600))
            assert time.monotonic() - began < 60


def test_a_waiting_source_is_not_taken_for_a_dead_one(monkeypatch):
    """It says that it lives, and each time it does the reader waits anew. The segment comes after three such signs."""
    monkeypatch.setattr(_wire, "ALIVE_S", 0.01)
    monkeypatch.setattr(_wire, "VANISHED_S", 0.01)
    allowed, signs = [], []
    receive_header, allow = _wire.Channel.receive_header, _wire.Channel._allow

    def receive_and_count(self, deadline):
        kind, segment, length = receive_header(self, deadline)
        if kind == _wire.ALIVE:
            signs.append(kind)
            if len(signs) == 3:
                offer.mark_all_ready()
        return kind, segment, length

    def allow_and_note(self, option, deadline):
        if self is link._channels[0] and option == socket.SO_RCVTIMEO:
            allowed.append(min(self._stall_s, deadline - time.monotonic()))
        allow(self, option, deadline)

    with served(TcpTransport()) as (offer, endpoint), contextlib.closing(TcpTransport(stall_s=20.0)) as reader:
        offer._ready = bytearray(len(offer._ready))
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(_wire.Channel, "receive_header", receive_and_count)
        monkeypatch.setattr(_wire.Channel, "_allow", allow_and_note)
        assert list(link.read([0], Slab.allocate(manifest.tensors), [0], deadline=soon(600))) == [0]
    assert len(signs) >= 3
    assert len(allowed) > len(signs)
    assert set(allowed) == {20.0}


def test_a_stream_that_runs_out_of_work_waits_for_more():
    later = deque([[], [], [4, 5, 6]])
    work = tcp._Work([0, 1, 2, 3], lambda: later.popleft() if later else [], 2)
    assert [work.take(0), work.take(0), work.take(2)] == [[0, 1], [2], [3]]
    with ThreadPoolExecutor(2) as pool:
        idle = pool.submit(work.take, 0)  # it asks for more in vain, as does the other one
        while not work._idle:
            time.sleep(0)
        assert work.take(3) == []
        assert not idle.done()
        assert work.take(1) == [4, 5] and idle.result(60) == [6]
        ends = [pool.submit(work.take, 0) for _ in range(2)]
        assert [end.result(60) for end in ends] == [[], []]


def test_a_stream_that_waits_for_work_ends_with_the_read():
    work = tcp._Work([], None, 2)
    with ThreadPoolExecutor(1) as pool:
        idle = pool.submit(work.take, 0)
        while not work._idle:
            time.sleep(0)
        work.end()
        assert idle.result(60) == [] and work.take(0) == []


# --- the reader against forged sources ---


@contextlib.contextmanager
def forged_source(*answers):
    """Says these things one after the other, each after hearing something, and then hangs up when the test ends."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for answer in answers:
                    connection.recv(65536)
                    connection.sendall(answer)
                done.wait(30)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


def manifest_of(size_bytes=4000, segment_size_bytes=1000):
    with Slab.adopt({"a": torch.zeros(size_bytes, dtype=torch.uint8)}) as slab:
        return slab.manifest(segment_size_bytes)


def opened(manifest=None):
    return frame(Opened(0, msgspec.Raw((manifest or manifest_of()).encoded)))


@pytest.mark.parametrize(
    ("answers", "error", "reason"),
    [
        ((HELLO.pack(MAGIC, PROTOCOL + 1, 0),), ProtocolError, f"protocol {PROTOCOL + 1}, this side {PROTOCOL}"),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), ProtocolError, "no weight transfer"),
        ((GREETING, HEADER.pack(CONTROL, 0, 0, 1 << 62)), ProtocolError, "the limit is"),
        ((GREETING, HEADER.pack(SEGMENT, 0, 0, 0)), ProtocolError, "where a reply should be"),
        ((GREETING, frame(["Opened", 1, 2])), ProtocolError, "does not decode"),
        ((GREETING, frame(["Finished", True])), ProtocolError, "Finished where Opened"),
        ((GREETING, frame(["Opened", 0, None])), ProtocolError, "without a manifest"),
        ((GREETING, opened(manifest=msgspec.structs.replace(manifest_of(), digests=b""))), ProtocolError, "digests"),
        ((GREETING, opened(), HEADER.pack(SEGMENT, 0, 1, 1000)), ProtocolError, "segment 0 was due"),
        ((GREETING, opened(), HEADER.pack(SEGMENT, 0, 0, 1 << 60)), ProtocolError, "segment 0 has 1000 bytes"),
        ((GREETING, opened(), HEADER.pack(99, 0, 0, 0)), ProtocolError, "came kind 99"),
        ((GREETING, opened(), frame(["Finished", True])), ProtocolError, "Finished where"),
        ((GREETING, opened(), frame(["Refused", "late", "not here yet"])), SourceLost, "not here yet"),
        ((GREETING, opened(), HEADER.pack(SEGMENT, 0, 0, 1000) + b"x" * 999), SourceLost, "by the deadline"),
        ((GREETING, frame(["Refused", "gone", "never heard of it"])), VersionGone, "never heard of it"),
    ],
)
def test_a_reader_believes_no_source(answers, error, reason):
    with forged_source(*answers) as endpoint, contextlib.closing(TcpTransport()) as reader:
        deadline = soon(2.0)
        with pytest.raises(error, match=reason) as caught:
            link = reader.connect(endpoint, deadline=deadline)
            link.open(KEY, 1, deadline=deadline)
            list(link.read([0], Slab.allocate(manifest_of().tensors), [0], deadline=deadline))
        assert type(caught.value) is error
        assert caught.value.peer == endpoint
        assert caught.value.phase in ("connect", "open", "read")


def test_what_a_liar_announces_is_not_allocated():
    answers = GREETING, HEADER.pack(CONTROL, 0, 0, _wire.REPLY_SIZE_BYTES_MAX) + b"x"
    with forged_source(*answers) as endpoint, contextlib.closing(TcpTransport()) as reader:
        deadline = soon(1.0)
        link = reader.connect(endpoint, deadline=deadline)
        tracemalloc.start()
        with pytest.raises(SourceLost):
            link.open(KEY, 1, deadline=deadline)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 * _wire.CHUNK_SIZE_BYTES


# --- the source ---


def test_a_source_has_a_limit_of_readers(monkeypatch, caplog):
    monkeypatch.setattr(_wire, "CONNECTIONS_MAX", 2)
    with served(TcpTransport()) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        links = [reader.connect(endpoint, deadline=soon()) for _ in range(2)]
        with pytest.raises(SourceLost):
            reader.connect(endpoint, deadline=soon())
        assert "2 readers are connected" in caplog.text
        assert all(link.open(KEY, 1, deadline=soon()) for link in links)
        links[0].close()
        patience = soon()
        while True:  # the place is free as soon as the source has noticed
            try:
                reader.connect(endpoint, deadline=soon()).close()
                break
            except SourceLost:
                assert time.monotonic() < patience


def test_a_fault_of_the_shelf_costs_one_connection(caplog):
    class Shelf:
        def find(self, key):
            raise ZeroDivisionError

        def expect(self, key, lease, deadline):
            raise ZeroDivisionError

    with contextlib.closing(TcpTransport()) as source, contextlib.closing(TcpTransport()) as reader:
        endpoint = source.serve(Shelf())
        for _ in range(2):
            with pytest.raises(SourceLost):
                reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_withdrawing_is_no_warning(caplog):
    caplog.set_level(logging.WARNING)
    with served(TcpTransport()) as (offer, endpoint), contextlib.closing(TcpTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        link.open(KEY, 1, deadline=soon())
        offer.withdraw()
        assert not link.check(deadline=soon())
    assert caplog.text == ""


# --- offers ---


def offer_of(count=3):
    with Slab.adopt({"a": torch.zeros(count, dtype=torch.uint8)}) as slab:
        return Offer(KEY, slab.manifest(1), slab)


def test_offer_readiness():
    offer = offer_of()
    with pytest.raises(SourceLost, match="segment 1"):
        offer.wait_ready(1, time.monotonic())
    offer.mark_ready(1)
    offer.wait_ready(1, time.monotonic())
    assert not offer.poll_ready(0, time.monotonic())
    offer.mark_all_ready()
    offer.wait_ready(0, time.monotonic())
    offer.withdraw()
    with pytest.raises(SourceLost, match="withdrew"):
        offer.wait_ready(0, time.monotonic() + 60)


def test_offer_waiters_learn_of_withdrawal_at_once():
    offer = offer_of()
    problems = []

    def wait():
        try:
            offer.wait_ready(0, time.monotonic() + 600)
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


def test_offer_says_when_a_reader_cannot_be_stopped(monkeypatch):
    """Returning would let the owner write into memory that is being read."""
    monkeypatch.setattr("tensorhub_plugins.core.transports.offer.CUT_S_MAX", 0.01)
    offer = offer_of()
    offer.attach(lambda: None)
    with pytest.raises(RuntimeError, match="did not end"):
        offer.withdraw()


# --- choice ---


def test_create_and_choices():
    for name, kind in (("memory", MemoryTransport), ("tcp", TcpTransport), ("shm", ShmTransport)):
        with contextlib.closing(create(name, advertise_host="127.0.0.1")) as transport:
            assert isinstance(transport, kind)
            assert transport.name == name
    with pytest.raises(UsageError, match="no transport 'carrier pigeon'"):
        create("carrier pigeon")
    assert choices(("shm", "tcp"), {"tcp": "t", "memory": "m", "shm": "s"}) == [("shm", "s"), ("tcp", "t")]
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
    for transport in (MemoryTransport(), TcpTransport(), ShmTransport()):
        with contextlib.closing(transport):
            transport.serve(SimpleShelf())
            with pytest.raises(UsageError, match="one shelf"):
                transport.serve(SimpleShelf())


# --- plans ---


def test_runs_of():
    assert _plan.runs_of([3, 4, 5, 9, 8, 1, 2]) == [(3, 6), (9, 10), (8, 9), (1, 3)]
    assert _plan.runs_of([]) == []


def test_memory_link_is_cut_while_it_copies(monkeypatch):
    """withdraw() waits for the copy under way, and what it copied is not yielded."""
    with served(MemoryTransport()) as (offer, endpoint), contextlib.closing(MemoryTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        withdrawing = threading.Thread(target=offer.withdraw, daemon=True)

        def copy(sources, targets):
            withdrawing.start()
            while not offer.withdrawn:
                time.sleep(0.001)
            assert withdrawing.is_alive()  # it waits for us

        monkeypatch.setattr("tensorhub_plugins.core.transports.inproc.copy_views", copy)
        with pytest.raises(SourceLost):
            list(link.read([0], Slab.allocate(manifest.tensors), [0], deadline=soon()))
        withdrawing.join(60)
        assert not withdrawing.is_alive()
        assert isinstance(link, MemoryLink)
