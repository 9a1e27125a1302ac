"""Shared memory: bytes that are overwritten while they are copied, mappings, addresses, and who may read."""

import contextlib
import errno
import fcntl
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid

import pytest
import torch
from transport_helpers import KEY, read_all, served, soon, until
from transport_suite.material import read_equal

from tensorhub_plugins.core.errors import ProtocolError, SourceLost
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.transports.shm import memory_file as _memfile
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.memory_file import MappingCache, MemoryFile
from tensorhub_plugins.core.transports.shm.process_memory import ProcessMemory
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.stream import channel, messages, unix_socket
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import greet
from tensorhub_plugins.core.transports.stream.messages import HEADER

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
            got.extend(read_equal(link, [0], Slab.allocate(manifest.tensors), deadline=soon()))
        torn = [segment for segment in got if link.digest(segment) != manifest.digest(segment)]
        return got, torn


@pytest.mark.parametrize("way", WAYS)
def test_shm_yields_nothing_that_was_overwritten_while_it_copied(monkeypatch, way):
    assert withdrawn_while_copied(monkeypatch, way) == ([], [])


@pytest.mark.parametrize("way", WAYS)
def test_without_looking_at_the_connection_it_would_and_the_digest_would_tell(monkeypatch, way):
    monkeypatch.setattr(channel.Channel, "is_cut", lambda self: False)
    assert withdrawn_while_copied(monkeypatch, way) == ([0], [0])


# --- shm: memory that is met again ---


def inode_of(slab):
    return str(os.fstat(slab.shared_fd).st_ino)


def maps_of(inode):
    """How many mappings of this memory this process has; its owner, which is the same one, has one. A library's file
    may have the same inode on its own file system."""
    with open("/proc/self/maps") as maps:
        return sum(line.split()[4] == inode and "/memfd:" in line for line in maps)


def ends_of(fd):
    """How many descriptors this process has of that pipe, whose owner, which is the same one, has two; or of a slab,
    not by the name of its file, which all slabs have."""
    count = 0
    for each in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists them, or another thread's
            count += os.path.sameopenfile(fd, each)
    return count


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


@pytest.fixture
def default_timeout(request):
    socket.setdefaulttimeout(request.param)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.parametrize("default_timeout", [None, 10.0], ids=["", "a default timeout"], indirect=True)
def test_shm_lets_go_of_a_mapping_when_its_owner_closes_the_slab(default_timeout):
    """Its watcher waited as long as a default timeout of sockets, with the lock of the next read, and ended then."""
    with contextlib.closing(ShmTransport(map_from=1)) as reader:
        with served(ShmTransport()) as (offer, endpoint):
            inode, owners = inode_of(offer.slab), offer.slab.tensors()
            read_all(reader, endpoint)
            assert len(reader._mappings) == 1 and maps_of(inode) == 2
        until(lambda: len(reader._mappings) == 0)
        until(lambda: maps_of(inode) == len(owners) == 1)  # the owner still looks at its tensor


OWNER = """
import sys, torch
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from transport_suite import SimpleShelf
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
            ((_, inode, _),) = reader._mappings.kept.keys()
            assert maps_of(str(inode)) == 1
        finally:
            owner.kill()
            owner.communicate()
        until(lambda: len(reader._mappings) == 0)
        until(lambda: maps_of(str(inode)) == 0)  # it is freed after it was dropped


def test_shm_maps_nothing_of_an_empty_file():
    mappings = MappingCache(map_from=1)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    liveness_fd, other = os.pipe()
    assert mappings.get_or_map(empty, liveness_fd) is None
    mappings.close()
    for fd in (empty, other):
        os.close(fd)


def test_shm_never_maps_a_file_that_could_become_shorter():
    mappings = MappingCache(map_from=1)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    other, liveness_fd = os.pipe()
    assert mappings.get_or_map(unsealed, liveness_fd) is None
    with pytest.raises(OSError):
        os.fstat(liveness_fd)  # nobody needs it any more
    for fd in (unsealed, other):
        os.close(fd)
    mappings.close()


def test_shm_keeps_a_bounded_number_of_mappings_those_it_met_last():
    before = len(os.listdir("/proc/self/fd"))
    mappings = MappingCache(map_from=1)
    slabs = [Slab.allocate([spec_of("a", torch.zeros(1))]) for _ in range(_memfile.MAPPINGS_MAX + 3)]
    for slab in slabs:
        assert mappings.get_or_map(slab.shared_fd, os.dup(slab.owner_liveness_fd)) is not None
    assert len(mappings) == _memfile.MAPPINGS_MAX
    assert [maps_of(inode_of(slab)) for slab in (*slabs[:4], slabs[-1])] == [1, 1, 1, 2, 2]
    assert [ends_of(slab.owner_liveness_fd) for slab in (*slabs[:4], slabs[-1])] == [2, 2, 2, 3, 3]
    assert len(os.listdir("/proc/self/fd")) > before + _memfile.MAPPINGS_MAX
    mappings.close()
    mappings.close()
    assert [ends_of(slab.owner_liveness_fd) for slab in slabs] == [2] * len(slabs)
    assert [maps_of(inode_of(slab)) for slab in slabs] == [1] * len(slabs)
    for slab in slabs:
        slab.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # others may just have been closed by an earlier test's threads


@pytest.mark.parametrize("count", [0, 17, 1 << 60])
def test_shm_believes_no_source_about_what_is_ready(monkeypatch, count):
    """It is asked for 16 segments."""
    send = channel.Channel.send

    def boast(self, views, deadline):
        kind, waited, segment, _ = HEADER.unpack(views[0]) if len(views[0]) == HEADER.size else (None,) * 4
        send(self, [HEADER.pack(kind, waited, segment, count)] if kind == messages.READY else views, deadline)

    monkeypatch.setattr(channel.Channel, "send", boast)
    with (
        served(ShmTransport()) as (_, endpoint),
        contextlib.closing(ShmTransport()) as reader,
        pytest.raises(ProtocolError, match=f"{count} segments from 0 on are said to be ready, due are"),
    ):
        read_all(reader, endpoint)


# --- shm: the memory of other processes ---


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
            list(read_equal(link, [0], Slab.allocate(manifest.tensors), deadline=soon()))


def test_shm_refuses_other_users(monkeypatch, caplog):
    with served(ShmTransport()) as (_, endpoint), contextlib.closing(ShmTransport()) as reader:
        reader.connect(endpoint, deadline=soon()).close()
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1000)  # the source is another user's, and not root's
        monkeypatch.setattr(unix_socket, "peer_of", lambda sock: (1234, uid + 2000))
        monkeypatch.setattr(unix_socket, "check_owner", lambda sock: 1234)  # it would refuse itself to ask
        with pytest.raises(SourceLost):
            reader.connect(endpoint, deadline=soon())
    assert "belongs to user" in caplog.text


def test_shm_says_nothing_to_other_users(monkeypatch):
    """Who knows the name of a source that has gone may listen there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger, contextlib.closing(ShmTransport()) as reader:
        stranger.bind("\0tensorhub-test-" + uuid.uuid4().hex)
        stranger.listen()
        name = stranger.getsockname()[1:].decode()
        monkeypatch.setattr(unix_socket, "peer_of", lambda sock: (1234, os.geteuid() + 2000))
        with pytest.raises(SourceLost, match="process 1234 belongs to user"):
            reader.connect(f"shm://{name}", deadline=soon())
        connection, _ = stranger.accept()
        with connection:
            assert connection.recv(100) == b""


@pytest.mark.parametrize("what", ["too short", "no descriptor", "one descriptor", "three descriptors", "not the byte"])
def test_shm_believes_no_source_about_its_memory(what, monkeypatch):
    """A file that ends early is an error, never a SIGBUS."""

    def send_descriptors(self, fds, deadline):
        short = os.memfd_create("short")
        os.ftruncate(short, 100)
        fds = [short] * {"no descriptor": 0, "one descriptor": 1, "three descriptors": 3}.get(what, 2)
        data = b"x" if what == "not the byte" else channel.DESCRIPTOR
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        self.sock.sendmsg([data], rights)
        os.close(short)

    monkeypatch.setattr(channel.Channel, "send_descriptors", send_descriptors)
    with served(ShmTransport()) as (offer, endpoint), contextlib.closing(ShmTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError):
            link.open(KEY, 1, deadline=soon())
        assert offer.wait_no_readers(soon())
        patience = soon()
        while len(os.listdir("/proc/self/fd")) > before:  # the source closes its own in a thread of its own
            assert time.monotonic() < patience


@pytest.mark.parametrize("fails", ["thread", "nothing"])
def test_shm_keeps_no_descriptor_of_memory_that_it_cannot_keep(fails, monkeypatch):
    """No more threads, to watch over it. The control: where there are, it is kept; and then it is, too."""
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "tensorhub-shm-mappings" and fails == "thread":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with served(ShmTransport()) as (offer, endpoint), contextlib.closing(ShmTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        leftover = [Slab.allocate([spec_of("a", torch.zeros(1))])]  # an earlier test's, that is collected meanwhile
        leftover.append(leftover)
        del leftover
        before = ends_of(offer.slab.shared_fd)
        if fails == "thread":
            with pytest.raises(RuntimeError, match="new thread"):
                link.open(KEY, 1, deadline=soon())
            gc.collect()
        else:
            link.open(KEY, 1, deadline=soon())
        expected = before + (fails == "nothing")
        until(lambda: ends_of(offer.slab.shared_fd) == expected)  # the source closes its own in a thread of its own
        link.close()
        monkeypatch.undo()
        assert torch.equal(read_all(reader, endpoint), offer.slab.tensors()["a"])


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


def test_a_full_source_is_heard_that_has_closed_before_its_reader_has_introduced_itself():
    """The control: one that has closed without a word."""
    for end, said in ((Channel.refuse, "the source admits no more readers"), (Channel.close, "the source went away")):
        ours, theirs = socket.socketpair()
        end(Channel(theirs, "a reader", stall_s=1.0))
        with pytest.raises(SourceLost, match=said):
            greet(ours, "a source", stall_s=1.0, deadline=soon())


def test_where_more_connect_at_once_than_the_system_queues_they_wait_for_the_source_to_accept():
    """The control: a source that accepts nobody is lost once the time is over, and one that is gone at once."""
    endpoint = f"shm://tensorhub-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind("\0" + endpoint.removeprefix("shm://"))
        listener.listen(0)
        first.connect(listener.getsockname())
        with pytest.raises(SourceLost, match="temporarily unavailable"):
            unix_socket.connect(endpoint, "shm://", stall_s=60.0, deadline=soon(0.1))
        accepts = threading.Timer(0.3, lambda: [listener.accept()[0].close() for _ in range(2)])
        accepts.start()
        with pytest.raises(SourceLost, match="the source went away"):  # after it was accepted
            unix_socket.connect(endpoint, "shm://", stall_s=60.0, deadline=soon())
        accepts.join()
    with pytest.raises(SourceLost, match="not on this host, or gone") as gone:
        unix_socket.connect(endpoint, "shm://", stall_s=60.0, deadline=soon())
    assert isinstance(gone.value.__cause__, ConnectionRefusedError)
