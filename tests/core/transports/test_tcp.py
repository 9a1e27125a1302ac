"""What only tcp does: several streams, digests while it reads, where it listens."""

import contextlib
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transport_helpers import KEY, served, soon
from transport_suite.material import read_equal

from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.errors import HubUnreachable, SourceLost, UsageError, VersionGone
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol import address
from tensorhub_plugins.core.protocol.address import addresses_towards
from tensorhub_plugins.core.transports import read_plan as _plan
from tensorhub_plugins.core.transports import tcp
from tensorhub_plugins.core.transports.limits import TransportLimits
from tensorhub_plugins.core.transports.stream import link as stream_link
from tensorhub_plugins.core.transports.stream import tcp_socket
from tensorhub_plugins.core.transports.stream.link import SocketLink
from tensorhub_plugins.core.transports.stream.parallel_read import SegmentQueue
from tensorhub_plugins.core.transports.tcp import TcpSource, TcpTransport


def test_tcp_says_what_fails_in_its_other_thread(monkeypatch):
    def fail(views, algorithm):
        raise ZeroDivisionError

    with (
        served(TcpTransport()) as (_, endpoint),
        contextlib.closing(TcpTransport(offload_size_bytes=0)) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(_plan, "digest_of", fail)
        got = []
        with pytest.raises(ZeroDivisionError):
            got.extend(read_equal(link, range(16), Slab.allocate(manifest.tensors), deadline=soon()))
        assert got == []


@pytest.mark.parametrize(("cores", "offloads"), [(2, False), (16, True)])
def test_tcp_digests_in_another_thread_where_there_are_cores_for_it(monkeypatch, cores, offloads):
    threads = []

    def digest(views, algorithm):
        threads.append(threading.current_thread())
        return digest_of(views)

    monkeypatch.setattr(tcp, "cores", lambda: cores)
    tensors = {"a": torch.zeros(4 << 20, dtype=torch.uint8)}
    with (
        served(TcpTransport(), tensors, segment_size_bytes=tcp.OFFLOAD_SIZE_BYTES) as (_, endpoint),
        contextlib.closing(TcpTransport()) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(_plan, "digest_of", digest)
        assert list(read_equal(link, range(4), Slab.allocate(manifest.tensors), deadline=soon())) == [0, 1, 2, 3]
    assert len(threads) == 4
    assert all((thread is not threading.current_thread()) == offloads for thread in threads)


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
            assert congestion_of(channel.sock) == (tcp_socket.SAME_HOST_CONGESTION if known else default)


def congestion_of(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


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


def test_a_name_of_ones_own_for_loopback_says_nothing_of_where_workers_are(monkeypatch):
    """Debian's /etc/hosts gives 127.0.1.1 for the host's own name, and every other host was told to connect there."""
    routes = {"127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1", address.ELSEWHERE: "10.0.0.5"}
    monkeypatch.setattr(address, "resolve", lambda host, _: (host if host in routes else "127.0.1.1",))
    monkeypatch.setattr(address, "_own_address", lambda towards, _: routes[towards])
    assert addresses_towards("tcp://trainer-host:9", soon()) == ["10.0.0.5"]
    assert addresses_towards("tcp://127.0.0.1:9", soon()) == ["127.0.0.1"]
    assert addresses_towards("tcp://127.0.1.1:9", soon()) == ["127.0.0.1"]

    def not_elsewhere(towards, _):
        if towards == address.ELSEWHERE:
            raise OSError("Network is unreachable")
        return routes[towards]

    monkeypatch.setattr(address, "_own_address", not_elsewhere)
    assert addresses_towards("tcp://trainer-host:9", soon()) == ["127.0.0.1"]


def test_addresses_towards():
    assert addresses_towards("tcp://127.0.0.1:9", soon()) == ["127.0.0.1"]
    with pytest.raises((UsageError, HubUnreachable), match="there is no way to the hub"):
        addresses_towards("tcp://no such host.invalid:9", soon())


def test_streams_share_a_read(monkeypatch):
    asked = []
    request = SocketLink._request

    def asking(link, channel, segments, deadline):
        asked.append(list(segments))
        request(link, channel, segments, deadline)

    monkeypatch.setattr(SocketLink, "_request", asking)
    with served(TcpTransport()) as (_, endpoint), contextlib.closing(TcpTransport(streams=3)) as reader:
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        slab = Slab.allocate(manifest.tensors)
        assert sorted(read_equal(link, range(16), slab, deadline=soon())) == list(range(16))
        assert sorted(segment for each in asked for segment in each) == list(range(16)) and len(asked) >= 3
        asked.clear()
        assert list(read_equal(link, [5], slab, deadline=soon())) == [5]
        assert asked == [[5]]


def test_a_stream_that_runs_out_of_work_waits_for_more():
    later = deque([[], [], [4, 5, 6]])
    work = SegmentQueue([0, 1, 2, 3], lambda: later.popleft() if later else [], 2)
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
    work = SegmentQueue([], None, 2)
    with ThreadPoolExecutor(1) as pool:
        idle = pool.submit(work.take, 0)
        while not work._idle:
            time.sleep(0)
        work.end()
        assert idle.result(60) == [] and work.take(0) == []


@pytest.mark.parametrize("host", ["a..b", ".".join(["a" * 64, "b"])], ids=["an empty label", "a long label"])
def test_a_host_that_is_no_name_is_lost_or_refused_like_one_that_is_not_there(host):
    with contextlib.closing(TcpTransport()) as reader, pytest.raises(SourceLost, match="cannot connect"):
        reader.connect(f"tcp://{host}:80", deadline=soon())
    with pytest.raises(UsageError, match="is not an address"):
        tcp_socket.listen([host])


@contextlib.contextmanager
def kept(**limits):
    """Yield (offer, source, read): `read` reads all by a link of its own, and returns its channels."""
    source = TcpTransport()
    with (
        served(source) as (offer, endpoint),
        contextlib.closing(TcpTransport(limits=TransportLimits(**limits))) as reader,
    ):

        def read(*, waits=False, at=endpoint):
            link = reader.connect(at, deadline=soon())
            manifest = link.open(KEY, 1, deadline=soon())
            into = Slab.allocate(manifest.tensors)
            assert sorted(read_equal(link, range(manifest.segment_count), into, deadline=soon())) == list(range(16))
            assert [link.digest(k) for k in range(16)] == [manifest.digest(k) for k in range(16)]
            assert link.check(deadline=soon(), waits=waits)
            channels = list(link._channels)
            link.close()
            return channels

        yield offer, source, reader, read


@pytest.mark.parametrize("waits", [False, True])
def test_the_next_link_to_a_source_has_the_connection_of_the_last_one(waits):
    with kept() as (offer, source, reader, read):
        first, second, third = read(waits=waits), read(waits=waits), read()
        assert first == second == third and len(source._server._connections) == 1
        assert not third[0].is_lost() and len(reader._idle) == 1
    assert third[0].is_cut() and not reader._idle  # closed with its transport


def test_a_connection_at_rest_holds_no_offer():
    with kept() as (offer, source, reader, read):
        before = read(waits=True)
        offer.withdraw()
        assert offer.active_readers == 0 and not before[0].is_lost()
        link = reader.connect(before[0].peer, deadline=soon())
        with pytest.raises(VersionGone):
            link.open(KEY, 1, deadline=soon())
        link.close()
        assert not reader._idle  # only what ended well is kept


def test_a_connection_whose_source_has_gone_is_not_taken():
    with kept() as (offer, source, reader, read):
        first = read(waits=True)
        next(iter(source._server._connections)).cut()
        first[0]._poll.poll(5000)
        assert first[0].is_lost() and read() != first


def test_a_reader_keeps_so_many_connections():
    with kept(idle_at_reader_max=1) as (offer, source, reader, read):
        peer = read()[0].peer
        links = [reader.connect(peer, deadline=soon()) for _ in range(2)]
        channels = [list(link._channels) for link in links]
        for link in links:
            link.open(KEY, 1, deadline=soon())
            assert link.check(deadline=soon())
        for link in links:
            link.close()
        assert [each.channels for each in reader._idle] == channels[1:]
        assert channels[0][0].is_cut()


def test_a_link_that_is_closed_too_early_or_twice_keeps_nothing():
    with kept() as (offer, source, reader, read):
        link = reader.connect(read()[0].peer, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        reading = link.read(range(16), Slab.allocate(manifest.tensors), [(0, 0, 16000)], deadline=soon())
        next(reading)
        link.close()
        assert not reader._idle
        reading.close()
        read()
        other = reader.connect(link.peer, deadline=soon())
        assert other.progress.is_kept
        other.open(KEY, 1, deadline=soon())
        assert other.check(deadline=soon(), waits=False)
        for _ in range(2):
            other.close()
            other.cut()  # the connection is another's by now
        assert len(reader._idle) == 1 and not reader._idle[0].channels[0].is_lost()


def test_a_link_that_another_thread_closes_as_it_begins_to_read_keeps_nothing_that_is_in_use(monkeypatch):
    with kept() as (offer, source, reader, read):
        other = reader.connect(read()[0].peer, deadline=soon())
        manifest, reading = other.open(KEY, 1, deadline=soon()), []

        finish = stream_link.SocketLink._finish

        def meanwhile(link, *arguments):  # as the closing thread begins to end the offer
            with contextlib.suppress(SourceLost):
                into = Slab.allocate(manifest.tensors)
                reading.append(other.read(range(16), into, [(0, 0, 16000)], deadline=soon()))
                next(reading[0])
            finish(link, *arguments)

        monkeypatch.setattr(stream_link.SocketLink, "_finish", meanwhile)
        other.close()
        monkeypatch.undo()
        read()


def test_a_source_of_an_older_release_keeps_no_connection(monkeypatch):
    monkeypatch.setattr(TcpSource, "keeps_connections", False)
    with kept() as (offer, source, reader, read):
        assert read() != read() and not reader._idle


def test_a_source_out_of_slots_evicts_connections_at_rest():
    limits = TransportLimits(readers_per_peer_max=1)
    with served(TcpTransport(limits=limits)) as (_, endpoint), contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(TcpTransport())) for _ in range(2))
        link = first.connect(endpoint, deadline=soon())
        link.open(KEY, 1, deadline=soon())
        assert link.check(deadline=soon())
        link.close()
        other = second.connect(endpoint, deadline=soon())
        other.open(KEY, 1, deadline=soon())
        assert other.check(deadline=soon())
