"""The socket transports believe no peer; a source has limits, and says that it waits."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import sys
import termios
import threading
import time
import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transport_helpers import GREETING, KEY, frame, served, soon, until
from transport_suite.material import read_equal

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, VersionGone
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol.address import parse_address
from tensorhub_plugins.core.transports import TransportLimits
from tensorhub_plugins.core.transports.stream import channel, messages
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected
from tensorhub_plugins.core.transports.stream.messages import (
    CONTROL,
    HEADER,
    HELLO,
    MAGIC,
    PROTOCOL,
    SEGMENT,
    StreamOpen,
    StreamOpened,
)
from tensorhub_plugins.core.transports.stream.source import WARNINGS_MAX, WARNINGS_S, StreamServer, _host_of
from tensorhub_plugins.core.transports.tcp import TcpTransport


def test_a_bigger_deadline_than_stall_does_not_wait_for_the_dead():
    """A source that says nothing at all is lost after stall_s, however far the deadline is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.closing(TcpTransport(limits=TransportLimits(stall_s=0.3))) as reader:
            began = time.monotonic()
            with pytest.raises(SourceLost, match="frozen or unreachable"):
                reader.connect(endpoint, deadline=soon(600))
            assert time.monotonic() - began < 60


def test_a_waiting_source_is_not_taken_for_a_dead_one(monkeypatch):
    """It says that it lives, and each time it does the reader waits anew. The segment comes after three such signs."""
    allowed, signs = [], []
    receive_header, allow = channel.Channel.receive_header, channel.Channel._allow

    def receive_and_count(self, deadline):
        kind, segment, length = receive_header(self, deadline)
        if kind == messages.ALIVE:
            signs.append(kind)
            if len(signs) == 3:
                offer.mark_all_ready()
        return kind, segment, length

    def allow_and_note(self, option, deadline):
        if self is link._channels[0] and option == socket.SO_RCVTIMEO:
            allowed.append(min(self._stall_s, deadline - time.monotonic()))
        allow(self, option, deadline)

    source = TcpTransport(limits=TransportLimits(alive_s=0.01, vanished_s=0.01))
    patient = TcpTransport(limits=TransportLimits(stall_s=20.0))
    with served(source) as (offer, endpoint), contextlib.closing(patient) as reader:
        offer._ready = bytearray(len(offer._ready))
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        monkeypatch.setattr(channel.Channel, "receive_header", receive_and_count)
        monkeypatch.setattr(channel.Channel, "_allow", allow_and_note)
        assert list(read_equal(link, [0], Slab.allocate(manifest.tensors), deadline=soon(600))) == [0]
    assert len(signs) >= 3
    assert len(allowed) > len(signs)
    assert set(allowed) == {20.0}


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
    return frame(StreamOpened(0, msgspec.Raw((manifest or manifest_of()).encoded)))


@pytest.mark.parametrize(
    ("answers", "error", "reason"),
    [
        (
            (HELLO.pack(MAGIC, PROTOCOL + 1, 0, b""),),
            messages.OtherRelease,
            f"protocol {PROTOCOL + 1}, this side {PROTOCOL}",
        ),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), ProtocolError, "no weight transfer"),
        ((GREETING, HEADER.pack(CONTROL, 0, 0, 1 << 62)), ProtocolError, "the limit is"),
        ((GREETING, HEADER.pack(SEGMENT, 0, 0, 0)), ProtocolError, "where a message should be"),
        ((GREETING, frame(["StreamOpened", 1, 2])), ProtocolError, "does not decode"),
        ((GREETING, frame(["StreamFinished", True])), ProtocolError, "StreamFinished where StreamOpened"),
        ((GREETING, frame(["StreamOpened", 0, None])), ProtocolError, "without a manifest"),
        ((GREETING, opened(manifest=msgspec.structs.replace(manifest_of(), digests=b""))), ProtocolError, "digests"),
        ((GREETING, opened(), HEADER.pack(SEGMENT, 0, 1, 1000)), ProtocolError, "segment 0 was due"),
        ((GREETING, opened(), HEADER.pack(SEGMENT, 0, 0, 1 << 60)), ProtocolError, "segment 0 has 1000 bytes"),
        ((GREETING, opened(), HEADER.pack(99, 0, 0, 0)), ProtocolError, "came kind 99"),
        ((GREETING, opened(), frame(["StreamFinished", True])), ProtocolError, "StreamFinished where"),
        ((GREETING, opened(), frame(["StreamRefused", "late", "not here yet"])), SourceLost, "not here yet"),
        ((GREETING, opened(), HEADER.pack(SEGMENT, 0, 0, 1000) + b"x" * 999), SourceLost, "by the deadline"),
        ((GREETING, frame(["StreamRefused", "gone", "never heard of it"])), VersionGone, "never heard of it"),
    ],
)
def test_a_reader_believes_no_source(answers, error, reason):
    with forged_source(*answers) as endpoint, contextlib.closing(TcpTransport()) as reader:
        deadline = soon(2.0)
        with pytest.raises(error, match=reason) as caught:
            link = reader.connect(endpoint, deadline=deadline)
            link.open(KEY, 1, deadline=deadline)
            list(read_equal(link, [0], Slab.allocate(manifest_of().tensors), deadline=deadline))
        assert type(caught.value) is error
        assert caught.value.peer == endpoint
        assert caught.value.phase in ("connect", "open", "read")


def test_what_a_liar_announces_is_not_allocated():
    answers = GREETING, HEADER.pack(CONTROL, 0, 0, messages.REPLY_SIZE_BYTES_MAX) + b"x"
    with forged_source(*answers) as endpoint, contextlib.closing(TcpTransport()) as reader:
        deadline = soon(1.0)
        link = reader.connect(endpoint, deadline=deadline)
        tracemalloc.start()
        with pytest.raises(SourceLost):
            link.open(KEY, 1, deadline=deadline)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 * channel.CHUNK_SIZE_BYTES


# --- the source ---


def test_a_source_has_a_limit_of_readers(caplog):
    source = TcpTransport(limits=TransportLimits(readers_max=2))
    with served(source) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        links = [reader.connect(endpoint, deadline=soon()) for _ in range(2)]
        assert all(link.open(KEY, 1, deadline=soon()) for link in links)
        with pytest.raises(SourceLost):
            reader.connect(endpoint, deadline=soon())
        assert "2 readers are connected" in caplog.text
        links[0].close()
        patience = soon()
        while True:  # the place is free as soon as the source has noticed
            try:
                reader.connect(endpoint, deadline=soon()).close()
                break
            except SourceLost:
                assert time.monotonic() < patience


def connected(endpoint, sent=b""):
    host, port = parse_address(endpoint, "tcp")
    sock = socket.create_connection((host, port), timeout=60)
    sock.sendall(sent)
    return sock


@pytest.mark.parametrize("sent", [b"", GREETING, GREETING + HEADER.pack(CONTROL, 0, 0, 9)[:7]])
def test_who_only_sits_there_keeps_no_reader_out(sent):
    limits = TransportLimits(readers_max=4, hello_s=600.0)
    with (
        served(TcpTransport(limits=limits)) as (_, endpoint),
        contextlib.closing(TcpTransport()) as reader,
        contextlib.ExitStack() as stack,
    ):
        idle = [stack.enter_context(connected(endpoint, sent)) for _ in range(12)]
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        for sock in idle[:9]:  # of 4 places 3 are left to the last of them
            while sock.recv(100):
                pass
        for _ in range(12):
            stack.enter_context(connected(endpoint, sent))
        target = Slab.allocate(manifest.tensors)
        assert list(read_equal(link, [0], target, deadline=soon())) == [0]  # who has an offer open keeps its place


def test_one_address_does_not_take_all_places(caplog):
    limits = TransportLimits(readers_per_peer_max=2)
    with served(TcpTransport(limits=limits)) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        links = [reader.connect(endpoint, deadline=soon()) for _ in range(2)]
        assert all(link.open(KEY, 1, deadline=soon()) for link in links)
        with pytest.raises(SourceLost, match="the source admits no more readers from here now"):
            reader.connect(endpoint, deadline=soon())
        assert "2 readers are connected from there" in caplog.text
    assert _host_of("tcp://10.0.0.1:5") == _host_of("tcp://10.0.0.1:6") != _host_of("tcp://10.0.0.2:5")
    assert _host_of("pid 5") != _host_of("pid 6")


@pytest.mark.parametrize("sent", [b"", GREETING[:5], GREETING, GREETING + HEADER.pack(CONTROL, 0, 0, 9)[:7]])
def test_who_does_not_go_on_is_left_soon(sent):
    limits = TransportLimits(hello_s=0.3)
    with served(TcpTransport(limits=limits)) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        assert link.open(KEY, 1, deadline=soon())
        with connected(endpoint, sent) as silent:
            while silent.recv(100):  # for ever, if it were not cut off
                pass
        assert link.check(deadline=soon())  # who has an offer open may be silent; it was for as long


def test_half_a_header_after_an_offer_was_opened():
    limits = TransportLimits(hello_s=0.3)
    with served(TcpTransport(limits=limits)) as (offer, endpoint):
        with connected(endpoint, GREETING + frame(StreamOpen(KEY, 1))) as silent:
            until(lambda: offer.active_readers)
            silent.sendall(HEADER.pack(CONTROL, 0, 0, 9)[:1])
            while silent.recv(1 << 16):
                pass
        until(lambda: not offer.active_readers)


def test_a_fault_of_the_shelf_costs_one_connection(caplog):
    class Shelf:
        def find(self, key):
            raise ZeroDivisionError

        def await_offer(self, key, as_of, deadline):
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


# --- strangers in numbers ---


def test_a_stranger_that_comes_again_and_again_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The control: each of the first ones is said."""
    with served(TcpTransport()) as (_, endpoint):
        where = parse_address(endpoint, "tcp")
        began = time.monotonic()
        for _ in range(3 * WARNINGS_MAX):
            with socket.create_connection(where) as sock, contextlib.suppress(ConnectionResetError):
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while sock.recv(100):
                    pass
        seconds = time.monotonic() - began
    said = [record for record in caplog.records if "no reader of ours" in record.getMessage()]
    assert WARNINGS_MAX <= len(said) <= WARNINGS_MAX * (1 + seconds // WARNINGS_S)


def test_a_source_without_a_thread_for_a_reader_serves_the_next_one(monkeypatch, caplog) -> None:
    """A job may have no more processes than so many for a moment; the source goes on."""
    refused, start = [], threading.Thread.start

    def start_or_not(thread):
        if thread.name.startswith("tensorhub-tcp-tcp://") and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    with served(TcpTransport()) as (_, endpoint), contextlib.closing(TcpTransport()) as reader:
        for _ in range(2):
            with pytest.raises(SourceLost):
                reader.connect(endpoint, deadline=soon(10))
        assert reader.connect(endpoint, deadline=soon(10)).open(KEY, 1, deadline=soon(10))
    assert len(refused) == 2 and "can't start new thread" in caplog.text


@pytest.mark.parametrize("abandons", [True, False], ids=["", "control: closes"])
def test_who_sends_to_a_reader_that_gave_up_hears_of_it_at_once(abandons):
    """Its window was full when it shut down, and it has taken what had come: the kernel goes on for it for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        source, reader = Channel(ours, "reader", stall_s=60.0), Channel(theirs, "source", stall_s=60.0)
        ended = []

        def send() -> None:
            with pytest.raises(Disconnected) as caught:
                source.send([bytes(64 << 20)], None)
            ended.append(caught.value)

        thread = threading.Thread(target=send)
        thread.start()
        until(lambda: stands_still(theirs))
        theirs.shutdown(socket.SHUT_RDWR)
        while theirs.recv(1 << 20):
            pass
        (reader.abandon if abandons else reader.close)()
        thread.join(1.0 if not abandons else 30.0)
        assert bool(ended) == abandons
        source.cut()
        thread.join(30.0)
        assert ended and not thread.is_alive()


def stands_still(sock: socket.socket) -> bool:
    """Nothing more comes: the other side is out of room."""
    waiting = [int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)]
    for _ in range(20):
        threading.Event().wait(0.01)
        waiting.append(int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder))
    return waiting[0] > 0 and len(set(waiting)) == 1


@pytest.mark.parametrize("opened", [False, True])
def test_nobody_has_a_source_take_more_than_there_is_to_ask_for(opened, caplog):
    """128 connections that announced 4 MiB, and sent most of it before any lease was looked at, took 500 MB."""
    size = messages.OPENING_SIZE_BYTES_MAX
    begin = GREETING + (frame(StreamOpen(KEY, 1)) if opened else b"")
    with served(TcpTransport(limits=TransportLimits(hello_s=0.3))) as (offer, endpoint):
        size += 6 * offer.manifest.segment_count * opened
        for more, words in ((size + 1000, "the limit is"), (size - 1000, "in time")):
            caplog.clear()
            sent = begin + HEADER.pack(CONTROL, 0, 0, more) + bytes(100)
            with connected(endpoint, sent) as greedy, contextlib.suppress(OSError):
                while greedy.recv(1 << 16):
                    pass
            until(lambda words=words: words in caplog.text)


def test_the_control_whatever_may_be_read_can_be_asked_for():
    for count in (1, 2, 255, 700_000):
        worst = [(at + (1 << 16) * (count > 9), at + 1 + (1 << 16) * (count > 9)) for at in range(0, count, 2)]
        size = len(msgspec.msgpack.encode(messages.StreamRead(worst, 3600.0)))
        assert size <= messages.request_size_bytes_max(count) or size > messages.REQUEST_SIZE_BYTES_MAX
    assert messages.request_size_bytes_max(None) == 64 << 10
    assert messages.request_size_bytes_max(1 << 40) == messages.REQUEST_SIZE_BYTES_MAX


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO], ids=["no descriptor left", "control"])
def test_a_source_that_lacks_a_resource_names_it(caplog, number):
    server = SimpleNamespace(_backend=SimpleNamespace(name="shm"))
    StreamServer._log_end(server, "pid 1", OSError(number, os.strerror(number)))
    assert ("the system refuses open files" in caplog.text) == (number == errno.EMFILE)
