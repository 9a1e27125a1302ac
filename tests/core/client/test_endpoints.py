"""A source with several endpoints: read over the one that was measured to be the fastest, and past those that fail."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
import torch
from client_stage import NEAR, SOON_S

from tensorhub_plugins.core import (
    Client,
    CorruptBytes,
    DeadlineExceeded,
    HubLimits,
    SourceLost,
    TransferLimits,
    start_server,
)
from tensorhub_plugins.core.transfer.source_reader import SourceReader
from tensorhub_plugins.core.transports import tcp
from tensorhub_plugins.core.transports.stream.messages import HELLO
from tensorhub_plugins.core.transports.tcp import TcpLink
from tensorhub_plugins.core.transports.ways import WAYS

TENSORS = {"w": torch.arange(2_000_000)}
HOSTS = ("127.0.0.2", "127.0.0.3")


PATIENT = TransferLimits(measure_s=SOON_S)  # however busy the machine is


class Read:
    """A trainer at two addresses, its reader, and over which of them bytes come."""

    def __init__(self, stage, monkeypatch):
        self.trainer = stage.client("trainer", transports=("tcp",), advertise_host=",".join(HOSTS))
        self.reader = stage.client("reader", transports=("tcp",), limits=PATIENT)
        self.over = []
        self.segments = dict.fromkeys(HOSTS, 0)
        transfer = TcpLink._transfer

        def noted(link, manifest, plan, segments, deadline):
            for segment in transfer(link, manifest, plan, segments, deadline):
                self.segments[self.host_of(link.peer)] += 1
                yield segment

        monkeypatch.setattr(TcpLink, "_transfer", noted)

    @staticmethod
    def host_of(endpoint):
        return endpoint.removeprefix("tcp://").rpartition(":")[0]

    def fetch(self, version):
        """Return how many segments have come from each address."""
        self.whole = self.trainer.publish(version, TENSORS).manifest.segment_count
        self.segments.update(dict.fromkeys(HOSTS, 0))
        fetched = self.reader.fetch(version, timeout_s=SOON_S)
        assert torch.equal(fetched.tensors()["w"], TENSORS["w"]) and not fetched.report.losses
        return tuple(self.segments.values())

    @property
    def endpoints(self):
        port = next(iter(self.trainer._transports.values()))._server._listeners[0].getsockname()[1]
        return [f"tcp://{host}:{port}" for host in HOSTS]


@pytest.fixture
def read(stage, monkeypatch):
    return Read(stage, monkeypatch)


def test_each_is_measured_by_a_segment_and_then_the_fastest_is_taken(read):
    first, second = read.fetch(1)
    assert min(first, second) == 1 and first + second == read.whole > 16
    assert WAYS.unmeasured(read.endpoints, time.monotonic()) == []
    for version, faster in ((2, 1), (3, 0)):
        for number, endpoint in enumerate(read.endpoints):
            WAYS.measured(endpoint, 1.0 + (number == faster), time.monotonic())
        segments = read.fetch(version)
        assert segments[faster] == read.whole and segments[1 - faster] == 0


@pytest.mark.parametrize("how", ["is cut", "is slow"])
def test_one_that_fails_while_it_is_measured_costs_nothing_but_its_segment(read, monkeypatch, how):
    transfer = TcpLink._transfer

    def fails(link, manifest, plan, segments, deadline):
        if read.host_of(link.peer) == HOSTS[1]:
            if how == "is cut":
                link.cut()
            else:
                raise SourceLost("the deadline passed", peer=link.peer)
        return transfer(link, manifest, plan, segments, deadline)

    monkeypatch.setattr(TcpLink, "_transfer", fails)
    assert read.fetch(1) == (read.whole, 0)
    assert WAYS.order(read.endpoints[::-1], time.monotonic()) == read.endpoints, "it is known to be the worse one"
    assert read.fetch(2) == (read.whole, 0)


def test_what_is_small_and_what_has_no_digests_is_not_measured(stage, read, monkeypatch):
    read.trainer.publish(1, {"w": TENSORS["w"][:1000]})
    assert read.reader.fetch(1, timeout_s=SOON_S).report.sources
    assert WAYS.unmeasured(read.endpoints, time.monotonic()) == read.endpoints
    plain = stage.client("plain", transports=("tcp",), advertise_host=",".join(HOSTS), verify=False)
    plain.publish(2, TENSORS)
    monkeypatch.setattr(SourceReader, "_measure", lambda *_: pytest.fail("without digests it could not be checked"))
    stage.client("other", transports=("tcp",), verify=False).fetch(2, timeout_s=SOON_S)


@pytest.mark.parametrize("spoilt", [HOSTS[1:], HOSTS], ids=["of one endpoint", "of both"])
def test_other_bytes_of_one_endpoint_are_read_over_another(read, monkeypatch, spoilt):
    """What is between the two may spoil them. Of both it is the source: the control."""
    read.trainer.publish(1, TENSORS)
    digest = TcpLink.digest
    monkeypatch.setattr(
        TcpLink, "digest", lambda link, n: bytes(16) if read.host_of(link.peer) in spoilt else digest(link, n)
    )
    with pytest.raises(CorruptBytes) if spoilt == HOSTS else contextlib.nullcontext():
        fetched = read.reader.fetch(1, timeout_s=SOON_S)
        assert torch.equal(fetched.tensors()["w"], TENSORS["w"]) and "corrupt" in " ".join(fetched.report.losses)


class Between:
    """What is at an endpoint instead of the source: passes connections on, but of what the source sends only so many
    bytes, and then none, or cuts the connection."""

    def __init__(self, host, source, passes, *, cuts):
        self.passes, self.cuts, self._source, self._sockets = passes, cuts, source, []
        self._listener = socket.create_server((host, source[1]))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                reader, source = self._listener.accept()[0], socket.create_connection(self._source)
                self._sockets += [reader, source]
                threading.Thread(target=self._pass, args=(reader, source), daemon=True).start()
                threading.Thread(target=self._pass, args=(source, reader, self.passes), daemon=True).start()

    def _pass(self, source, target, left=1 << 60):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data[:left])
                left = max(0, left - len(data))
                if self.cuts and not left:
                    break
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def at_one(monkeypatch, make, hosts=HOSTS):
    """A trainer that says these, and is at the second one of HOSTS only; with its port."""
    listen = tcp.listen
    with monkeypatch.context() as patched:
        patched.setattr(tcp, "listen", lambda _, ports: listen(HOSTS[1:], ports))
        trainer = make("trainer", transports=("tcp",), advertise_host=",".join(hosts))
    return trainer, next(iter(trainer._transports.values()))._server._listeners[0].getsockname()[1]


HASTY = TransferLimits(open_s=1.0, stall_s=0.5)
IN_MANIFEST, IN_SEGMENT = HELLO.size + 400, 20_000


@pytest.mark.parametrize("cuts", [False, True], ids=["is silent", "is cut"])
@pytest.mark.parametrize("passes", [0, HELLO.size, IN_MANIFEST, IN_SEGMENT])
def test_an_endpoint_that_lets_in_and_then_fails_is_left_for_another(stage, monkeypatch, passes, cuts):
    """A network that carries small packets only, for example: it was tried again and again, until the deadline."""
    trainer, port = at_one(monkeypatch, stage.client)
    reader = stage.client("reader", transports=("tcp",), limits=HASTY)
    with contextlib.closing(Between(HOSTS[0], (HOSTS[1], port), passes, cuts=cuts)):
        for version in (1, 2):
            trainer.publish(version, TENSORS)
            fetched = reader.fetch(version, timeout_s=SOON_S)
            assert torch.equal(fetched.tensors()["w"], TENSORS["w"]) and len(fetched.report.losses) <= 2 - version
        bad, good = (f"tcp://{host}:{port}" for host in HOSTS)
        assert WAYS.order([bad, good], time.monotonic()) == [good, bad]


def test_a_source_that_cuts_off_what_it_has_served_leaves_its_endpoint_as_it_was(read, monkeypatch):
    """It unpublishes, for example: the next version comes over the same one."""
    transfer, ended = TcpLink._transfer, []

    def ends(link, manifest, plan, segments, deadline):
        for count, segment in enumerate(transfer(link, manifest, plan, segments, deadline)):
            yield segment
            if count == 1 and not ended:
                ended.append(link.peer)
                for each in list(next(iter(read.trainer._transports.values()))._server._connections):
                    each.cut()

    monkeypatch.setattr(TcpLink, "_transfer", ends)
    read.trainer.publish(1, TENSORS)
    assert read.reader.fetch(1, timeout_s=SOON_S).report.losses and len(ended) == 1
    assert WAYS.unmeasured([*read.endpoints, "tcp://other:1"], time.monotonic())[:2] == read.endpoints


def test_an_endpoint_is_not_blamed_when_its_reader_is_closed_while_it_is_measured(read, monkeypatch):
    opened, closed = SourceReader._open_other, []

    def opens(reader, endpoint):
        link = opened(reader, endpoint)
        if not closed:
            closed.append(endpoint)
            reader.close()
        return link

    monkeypatch.setattr(SourceReader, "_open_other", opens)
    read.trainer.publish(1, TENSORS)
    with contextlib.suppress(DeadlineExceeded):
        read.reader.fetch(1, timeout_s=2.0)
    WAYS.measured("tcp://other:1", 1.0, time.monotonic())
    assert WAYS.unmeasured([*closed, "tcp://other:1"], time.monotonic()), "it may still be the faster one"


@pytest.mark.parametrize("is_protected", [True, False], ids=["with leases", "without"])
@pytest.mark.parametrize("holds", ["nothing", "the version", "another run's"])
@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[::-1]], ids=["first", "second"])
def test_another_worker_at_an_endpoint_is_passed_over(
    tmp_path, monkeypatch, small_segments, is_protected, holds, hosts
):
    """At an address that each host has for itself, with ports that all of them have."""
    if is_protected:
        (tmp_path / "secret").write_text(os.urandom(32).hex())
        (tmp_path / "secret").chmod(0o600)
        monkeypatch.setenv("TENSORHUB_SECRET_FILE", str(tmp_path / "secret"))
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(start_server(limits=HubLimits(grace_s=0.2, heartbeat_s=0.1)))

        def client(replica, run="r", **options):
            options = {"transports": ("tcp",), "location": NEAR, **options}
            made = Client(hub.address, run=run, model="m", replica=replica, **options)
            return stack.enter_context(contextlib.closing(made))

        trainer, port = at_one(monkeypatch, client, hosts)
        own = {"run": "other" if holds == "another run's" else "r", "advertise_host": HOSTS[0]}
        other = client("other", ports=f"{port}-{port}", **own)
        trainer.publish(1, TENSORS)
        if holds == "another run's":
            other.publish(1, {"w": TENSORS["w"] + 1})
        elif holds == "the version":
            other.fetch(1, timeout_s=SOON_S)
        fetched = client("reader").fetch(1, timeout_s=SOON_S)
        assert torch.equal(fetched.tensors()["w"], TENSORS["w"]) and not fetched.report.losses
