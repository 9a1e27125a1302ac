"""What may wait of one connection, and of all, before the hub cuts some off, and makes its socket anew."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from functools import partial
from typing import Any

import pytest
import zmq
from client_stage import until
from hub_peer import ask, peer

from tensorhub_plugins.core.hub import hub, server
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.server import start_server
from tensorhub_plugins.core.hub.unfinished import Unfinished
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey

CUT_OFF, ANEW = "cut off a connection from 127.0.0.1", "all connections are made anew"
HELLO = m.Hello(
    run="r",
    model="m",
    replica="a",
    shard=0,
    shard_count=1,
    location=Location(),
    endpoints={"tcp": "tcp://1.2.3.4:5"},
    request_id=1,
)
HELD = m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 1)


def ask_again(worker: zmq.Socket[bytes], message: m.ClientMessage) -> m.HubMessage:
    """Ask until there is an answer, as sessions do: what was under way as the socket was made anew is lost."""
    worker.setsockopt(zmq.RCVTIMEO, 500)
    for _ in range(40):
        with contextlib.suppress(zmq.Again):
            return ask(worker, message)
    raise AssertionError("no answer")


@pytest.mark.slow
@pytest.mark.parametrize("of_all", [1 << 14, 1 << 40], ids=["with what it has left", "without"])
@pytest.mark.parametrize("count", [5000, 100], ids=["too much", "the control: as much as may wait"])
def test_a_connection_of_which_a_busy_hub_has_too_much_to_do_is_cut_off(
    count: int, of_all: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it has left to be read: that goes with the socket, and all connect again."""
    true_handle = hub.Hub.handle

    def busy(self: hub.Hub, event: hub.Event, now: float) -> list[hub.Effect]:
        if isinstance(event, hub.Received) and isinstance(event.message, m.AskStatus):
            time.sleep(0.001)
        return true_handle(self, event, now)

    monkeypatch.setattr(hub.Hub, "handle", busy)
    limits = {"bytes_max": 1 << 14, "bytes_max_of_all": of_all, "growth_bytes": -(1 << 40)}
    monkeypatch.setattr(server, "Unfinished", partial(Unfinished, **limits))
    with (
        start_server(limits=HubLimits(messages_per_s_max=10**9)) as running,
        peer(running.address) as worker,
        peer(running.address, SNDHWM=0) as flood,
    ):
        assert isinstance(ask(worker, HELLO), m.Welcome)
        for number in range(count):
            flood.send(m.encode(m.AskStatus(number)))
        until(lambda: count == 100 or (CUT_OFF if of_all > 1 << 14 else ANEW) in caplog.text)
        assert isinstance(ask_again(worker, m.Publish(2, HELD)), m.Done)
        assert (CUT_OFF in caplog.text) == (count > 100)
        assert (ANEW in caplog.text) == (count > 100 and of_all == 1 << 14)


def test_a_hub_that_lacks_files_as_it_makes_its_socket_anew_tries_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended for good, with its records; so it did where another process had its port for long."""
    with start_server() as running, peer(running.address) as worker:
        assert isinstance(ask(worker, HELLO), m.Welcome)
        true_router, failures = server._router, iter([zmq.ZMQError(errno.EMFILE), OSError(errno.EMFILE, "files")])

        def router(*given: Any) -> zmq.Socket[bytes]:
            for failure in failures:
                raise failure
            return true_router(*given)

        monkeypatch.setattr(server, "_router", router)
        whys = iter(["the test says so"])
        monkeypatch.setattr(server.Server, "_why_anew", lambda self, now: next(whys, ""))
        until(lambda: caplog.text.count("cannot listen, and tries again") == 2)
        assert isinstance(ask_again(worker, m.Publish(2, HELD)), m.Done) and running.is_alive()


@pytest.mark.parametrize("ends", [False, True], ids=["one message of many frames", "the control: many messages"])
def test_a_message_without_an_end_is_cut_off(
    ends: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ would keep all of its frames, of any peer that the hub admits."""
    # This process has had other tests, whose memory it takes again before it grows.
    monkeypatch.setattr(server, "Unfinished", partial(Unfinished, growth_bytes=-(1 << 40)))
    observer = Keys.of(b"1" * 32).limited("observer")
    with (
        start_server(keys=Keys.of(b"1" * 32), limits=HubLimits(messages_per_s_max=10**9)) as running,
        peer(running.address, Keys.of(b"1" * 32)) as worker,
        peer(running.address, observer, SNDHWM=0) as endless,
    ):
        assert isinstance(ask(worker, HELLO), m.Welcome)
        frame = bytes(1 << 20)
        for _ in range(20 if ends else 1000):  # a second, in which the hub looks ten times
            endless.send(frame, 0 if ends else zmq.SNDMORE, copy=False)
        endless.send(b"")
        until(lambda: ends or CUT_OFF in caplog.text)
        assert isinstance(ask(worker, m.Publish(2, HELD)), m.Done)
        endless.send(m.encode(m.AskStatus(7)))  # it may connect again
        while getattr(m.decode_from_hub(endless.recv()), "request_id", 0) != 7:
            pass
        assert (CUT_OFF in caplog.text) != ends


def test_what_has_come_is_counted_for_each_connection() -> None:
    """What was handed over does not count, nor what the connection before it had, of the same descriptor."""
    now = iter(range(1, 100))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = Unfinished(0.0, listener.getsockname()[1], bytes_max=100_000, growth_bytes=-(1 << 40))
        number = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, number)
        stack.callback(ours.close)

        def connect() -> socket.socket:
            """Accept a connection under this number, as the system gives the same one out again."""
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            with listener.accept()[0] as accepted:
                os.dup2(accepted.fileno(), number)
            ours.accepted(number, float(next(now)))
            return client

        def cut(
            client: socket.socket, size: int, taken: int, *, is_all_taken: bool = True, after_s: float = 0.0
        ) -> bool:
            """Return whether it is cut when so much more of it has come, and been handed over."""
            client.sendall(bytes(size))
            while size:
                size -= len(os.read(number, size))
            if taken:
                ours.took(Frame(number, taken))  # type: ignore[arg-type]
            return ours.cut([number], float(next(now)) + after_s, is_all_taken=is_all_taken) == [number]

        client = connect()
        assert not any(cut(client, 90_000, 85_000) for _ in range(50))  # headers
        assert not cut(client, 90_000, 0) and cut(client, 20_000, 0) and not client.recv(1)
        client = connect()
        assert not cut(client, 100_000, 0) and cut(client, 5_000, 0)
        client = connect()
        assert not cut(client, 90_000, 40_000, is_all_taken=False)
        assert cut(client, 60_000, 0, is_all_taken=False)  # what waits is counted as long as there is more to take
        client = connect()
        assert not cut(client, 20_000, 1000, is_all_taken=False)
        client = connect()
        assert cut(client, 20_000, 10, is_all_taken=False)  # each message takes memory, however small it is
        assert ours.cut([1 << 20], float(next(now)), is_all_taken=True) == []  # closed meanwhile
        client = connect()
        assert not cut(client, 150_000, 1000, is_all_taken=False, after_s=100.0)  # headers and signs of life


def test_of_many_connections_with_much_to_take_the_largest_are_cut_off() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        ours = Unfinished(0.0, port, bytes_max=1000, bytes_max_of_all=1500, growth_bytes=-(1 << 40))
        stack.callback(ours.close)
        found = []
        for size in (10, 900, 20, 800, 700):
            stack.enter_context(socket.create_connection(listener.getsockname())).sendall(bytes(size))
            accepted = stack.enter_context(listener.accept()[0])
            assert len(accepted.recv(size, socket.MSG_WAITALL)) == size
            ours.accepted(accepted.fileno(), 1.0)
            found.append(accepted.fileno())
        assert ours.cut(found, 1.2, is_all_taken=False) == [found[1]]
        assert ours.cut([found[0], found[2]], 1.4, is_all_taken=False) == []
        ours = Unfinished(1.0, port, bytes_max=100, bytes_max_of_all=700, growth_bytes=-(1 << 40))
        stack.callback(ours.close)
        for each in found:
            ours.accepted(each, 1.0)
        assert ours.cut([found[3]], 1.2, is_all_taken=False) == [found[3]] and not ours.has_left_too_much
        assert ours.cut([found[3]], 1.35, is_all_taken=False) == [] and not ours.has_left_too_much, "it counts once"
        assert ours.cut([found[4]], 1.5, is_all_taken=False) == [found[4]] and ours.has_left_too_much
        assert ours.cut([], 1.51, is_all_taken=True) == []
        assert not ours.has_left_too_much, "all was taken"


def test_a_socket_of_another_port_under_a_connection_s_number_is_left_alone() -> None:
    """A connection ends, and its number is given to what this process opens next, before the hub hears of the end."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = Unfinished(0.0, listener.getsockname()[1], bytes_max=1000, growth_bytes=-(1 << 40))
        stack.callback(ours.close)

        def connect(to: socket.socket) -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(to.getsockname()))
            accepted = stack.enter_context(to.accept()[0])
            client.sendall(bytes(2000))
            assert len(accepted.recv(2000, socket.MSG_WAITALL)) == 2000
            ours.accepted(accepted.fileno(), 1.0)
            return client, accepted

        (_, ended), (client, foreign) = connect(listener), connect(other)
        assert ours.cut([ended.fileno(), foreign.fileno()], 1.2, is_all_taken=False) == [ended.fileno()]
        left, over = connect(listener)
        left.shutdown(socket.SHUT_WR)
        assert over.recv(1) == b"" and ours.count_left([over.fileno()]) == 1
        ours.accepted(foreign.fileno(), 1.3)
        client.shutdown(socket.SHUT_WR)
        assert foreign.recv(1) == b"" and ours.count_left([foreign.fileno()]) == 0
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        assert ours.cut([unix.fileno()], 1.5, is_all_taken=False) == []
        foreign.sendall(b"still open")
        assert client.recv(10, socket.MSG_WAITALL) == b"still open"


class Frame:
    """A frame of so many bytes that has come over this descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    def __len__(self) -> int:
        return self.size

    def get(self, option: int) -> int:
        return self.descriptor
