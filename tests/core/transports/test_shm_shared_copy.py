"""Adopted memory that several readers want: the source copies it once for all."""

import contextlib
import errno
import logging
import mmap
import os
import threading

import pytest
import torch
from transport_helpers import KEY, served, soon, until
from transport_suite import SimpleShelf
from transport_suite.material import read_equal

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError, VersionGone
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.transports import NotServable, Offer, TransportLimits
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.process_memory import ProcessMemory
from tensorhub_plugins.core.transports.shm.source import ShmSource
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.stream import channel
from tensorhub_plugins.core.transports.stream import source as stream_source
from tensorhub_plugins.core.transports.tcp import TcpTransport
from tensorhub_plugins.core.types import ShardKey


@pytest.fixture
def forbidden(monkeypatch):
    """No process may read another's memory."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_process, "_read", refuse)


# --- shm: where that is forbidden ---


def test_shm_copies_adopted_memory_once_for_the_second_reader_and_those_after_it(forbidden):
    tensors = {"a": torch.arange(5000, dtype=torch.int16), "b": torch.arange(3, dtype=torch.int64)}
    source = ShmTransport(limits=TransportLimits(together_s=1000.0))
    with served(source, tensors, kind="adopted") as (offer, endpoint), contextlib.ExitStack() as stack:
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
            assert sorted(read_equal(link, segments, slabs[-1], deadline=soon())) == list(segments)
            assert all(link.digest(segment) == manifest.digest(segment) for segment in segments)
        assert len(copied) == manifest.segment_count, "copied once for both"
        for slab in slabs:
            assert all(torch.equal(slab.tensors()[name], tensor) for name, tensor in tensors.items())
        tensors["a"].zero_()  # what a publisher must not do: the copy is as it was published
        assert all(link.check(deadline=soon()) for link in later)
        manifest = later[0].open(KEY, 1, deadline=soon())  # the copy went with its last reader: one of torn bytes
        list(read_equal(later[0], [0], slabs[0], deadline=soon()))
        assert later[0].digest(0) != manifest.digest(0)
        offer.withdraw()
        assert offer.active_readers == 0 and not later[0].check(deadline=soon())


def test_shm_copies_nothing_for_readers_that_come_one_after_the_other(forbidden):
    source = ShmTransport(limits=TransportLimits(together_s=0.0))
    with (
        served(source, {"a": torch.arange(100)}, kind="adopted") as (offer, endpoint),
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
        for segment in read_equal(link, range(link._manifest.segment_count), target, deadline=soon()):
            assert link.digest(segment) == link._manifest.digest(segment)
    assert all(link.check(deadline=soon()) for link in links)


def test_shm_copies_for_several_readers_at_a_time_and_keeps_that_memory_while_there_are_several():
    source = ShmTransport()
    with served(source, kind="adopted") as (offer, endpoint):
        backend = source._server._backend
        links, stack = open_at_once(endpoint, 4)
        with stack:
            assert ways_of(links) == ["address", "address", "file", "file"]
            finish(links)
        until(lambda: backend._idle is not None)
        inode = os.fstat(backend._idle.slab.shared_fd).st_ino

        offer.slab.tensors()["a"].add_(1)  # the next version of the same tensors
        following = Offer(KEY, offer.slab.manifest(1000), offer.slab)
        following.mark_all_ready()
        source._server._shelf = SimpleShelf(following)
        links, stack = open_at_once(endpoint, 3)
        with stack:
            assert ways_of(links) == ["file"] * 3
            assert {os.fstat(link._block._fd).st_ino for link in links} == {inode}
            finish(links)
        until(lambda: backend._idle is not None)

        links, stack = open_at_once(endpoint, 1)  # one alone still uses what there is, and it is not kept for it
        with stack:
            assert ways_of(links) == ["file"]
            finish(links)
        until(lambda: following.active_readers == 0)
        assert backend._idle is None and not backend._copies
        links, stack = open_at_once(endpoint, 1)
        with stack:
            assert ways_of(links) == ["address"]


def test_shm_gives_the_shared_copy_back_when_the_transport_closes():
    source = ShmTransport()
    with served(source, kind="adopted") as (_, endpoint):
        links, stack = open_at_once(endpoint, 3)
        with stack:
            finish(links)
        backend = source._server._backend
        until(lambda: backend._idle is not None)
        slab = backend._idle.slab
        assert slab.shared_fd is not None
    assert slab.shared_fd is None and backend._idle is None


def test_shm_gives_the_shared_copy_back_when_no_version_follows():
    source = ShmTransport()
    with served(source, kind="adopted") as (_, endpoint):
        backend = source._server._backend
        for kept_s, kept in ((1000.0, True), (0.0, False)):
            backend._limits = TransportLimits(shared_copy_kept_s=kept_s)
            links, stack = open_at_once(endpoint, 3)
            with stack:
                slab = backend._copies[next(iter(backend._copies))].slab
                finish(links)
            until(lambda: not backend._copies)  # it is idle from then on, or gone
            if kept:
                assert backend._idle.slab is slab
                (waits,) = (each for each in threading.enumerate() if each.name == "tensorhub-shm-idle")
            else:
                until(lambda: backend._idle is None)
                assert slab.shared_fd is None
                waits.join(10.0)  # it ended when the memory was used again
                assert not waits.is_alive()


def test_shm_keeps_no_shared_copy_where_no_thread_would_give_it_back(monkeypatch, caplog):
    """All readers hear that their bytes are the published ones: none has to read again."""
    start = Thread.start

    def refused(thread):
        if thread.name == "tensorhub-shm-idle":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", refused)
    source = ShmTransport()
    with served(source, kind="adopted") as (offer, endpoint):
        backend = source._server._backend
        links, stack = open_at_once(endpoint, 3)
        with stack:
            slab = backend._copies[next(iter(backend._copies))].slab
            finish(links)
        until(lambda: offer.active_readers == 0)
        assert backend._idle is None and slab.shared_fd is None
    assert "failed" not in caplog.text


def test_shm_cuts_a_reader_off_before_the_shared_copy_it_reads_is_used_again(monkeypatch):
    """When a conversation ends by a fault of the source, its reader may still be copying."""
    heard = []
    done = ShmSource.on_reader_done

    def listen(self, channel, *, ended):
        done(self, channel, ended=ended)
        heard.append([link._channels[0].is_cut() for link in links])

    def fail(self, request):
        raise ProtocolError("it is broken")

    with served(ShmTransport(), kind="adopted") as (_, endpoint):
        links, stack = open_at_once(endpoint, 3)
        with stack:
            monkeypatch.setattr(ShmSource, "on_reader_done", listen)
            monkeypatch.setattr(stream_source.ReaderConnection, "_read", fail)
            with pytest.raises(SourceLost):
                list(read_equal(links[2], [0], Slab.allocate(links[2]._manifest.tensors), deadline=soon()))
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
    receive = channel.Channel.receive_descriptors

    def receive_descriptors(self, count, deadline):
        fds = receive(self, count, deadline)
        received.extend(fds)
        return fds

    monkeypatch.setattr(channel.Channel, "receive_descriptors", receive_descriptors)
    with served(ShmTransport()) as (_, endpoint), contextlib.closing(ShmTransport(map_from=1)) as reader:
        link = reader.connect(endpoint, deadline=soon())
        link.open(KEY, 1, deadline=soon())
        memory, liveness_fd = received
        for fd in received:
            assert not os.get_inheritable(fd)
            with pytest.raises(OSError):
                os.write(fd, b"x")
        with pytest.raises(OSError):
            mmap.mmap(memory, 1000)  # to write, which is the default
