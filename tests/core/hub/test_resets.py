"""A connection that is reset while much of it is unread ends no process: neither the hub's nor a worker's.

ZeroMQ (4.3.5) aborts the process, `Assertion failed: !_io_error`, where it has stopped to read a connection, as its
queue is full, the peer resets it, and the next sign of life is due, or is among what is read afterwards.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
import torch
from client_processes import Dealer, Hub, HubOfFewFiles, Process, Router

from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.process_lifetime import socket_of
from tensorhub_plugins.core.protocol.address import parse_address

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)  # of ZMTP 3.1, without a secret
GREETING_SIZE, READY_SIZE = 64, 2
MESSAGE, PING = b"\x00\x02hi", b"\x04\x07\x04PING\x00\x00"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER
TRIES = 5


def dial(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address, "tcp"))


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    properties = ((b"Socket-Type", kind), (b"Identity", identity))
    body = b"\x05READY" + b"".join(bytes([len(k)]) + k + len(v).to_bytes(4, "big") + v for k, v in properties)
    return bytes([4, len(body)]) + body


def greet(peer: socket.socket, kind: bytes, identity: bytes = b"") -> None:
    peer.settimeout(2)
    peer.sendall(GREETING + ready(kind, identity))
    received = 0
    while received < GREETING_SIZE + READY_SIZE:
        received += (more := len(peer.recv(1 << 10)))
        if not more:
            raise ConnectionError("it was closed")


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.close()


def ends(process: Process, what: Callable[[], object]) -> bool:
    """Return whether the process has ended after one of several tries."""
    for _ in range(TRIES):
        what()
        time.sleep(0.2)
        if not process.alive():
            return True
    return False


@pytest.mark.parametrize("is_hub", [True, False], ids=["the hub", "the control: with a queue that ends"])
def test_a_peer_that_resets_its_connection_with_much_of_it_unread_ends_no_hub(is_hub: bool) -> None:
    process = Process(Hub, "tcp://127.0.0.1:0", 0.0) if is_hub else Process(Router, 32)
    address = process.call("address")

    def burst() -> None:
        peer = dial(address)
        greet(peer, b"DEALER", os.urandom(16))
        peer.sendall((MESSAGE * 40 + PING) * 100)
        reset(peer)

    try:
        assert ends(process, burst) != is_hub
        assert not is_hub or fetch_status(address)["up_s"] > 0
    finally:
        process.close()


@pytest.mark.slow
@pytest.mark.parametrize("queue_max", [None, 1000], ids=["a worker", "the control: with a queue that ends"])
def test_a_hub_that_resets_its_connection_with_much_of_it_unread_ends_no_worker(queue_max: int | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Process(Dealer, listener.getsockname()[1], queue_max)

        def burst() -> None:
            hub, _ = listener.accept()
            greet(hub, b"ROUTER")
            sent = threading.Thread(target=hub.sendall, args=(MESSAGE * 5000,))
            sent.start()
            sent.join(5)
            reset(hub)
            time.sleep(0.5)  # the next sign of life is due

        try:
            assert ends(worker, burst) == (queue_max is not None)
        finally:
            worker.close()


def test_connections_that_are_over_keep_no_hub_from_new_ones() -> None:
    """Where a connection has taken another one's place, which sends more, ZeroMQ keeps that one for ever."""
    hub = Process(HubOfFewFiles, 140)
    address = hub.call("address")
    try:
        with Client(address, run="r", model="m", replica="worker", transports=("tcp",)) as worker:
            worker.publish(1, {"w": torch.ones(3)})
            for _ in range(160):
                identity = os.urandom(16)
                with suppress(OSError), dial(address) as first, dial(address) as other:  # for a moment it accepts none
                    for peer in (first, other):
                        greet(peer, b"DEALER", identity)
                        peer.sendall(MESSAGE)
                        peer.recv(1)  # the hub's refusal
                    first.sendall(MESSAGE)
            assert worker.versions(timeout_s=30)[0].visible
            worker.publish(2, {"w": torch.ones(3)})
            with ExitStack() as others:
                for n in range(5):
                    named = {"run": "r", "model": "m", "replica": f"other-{n}", "transports": ("tcp",)}
                    late = others.enter_context(Client(address, **named, connect_timeout_s=15))
                    assert late.wait(timeout_s=15) == 2
    finally:
        hub.close()


def test_the_connection_of_a_host_that_is_gone_without_a_word_ends_by_itself() -> None:
    """The control: of what accepts them the system asks nothing."""
    found = set()
    with start_server() as hub, dial(hub.address):
        port = parse_address(hub.address, "tcp")[1]
        while len(found) < 2:  # accepted a moment later
            for number in map(int, os.listdir("/proc/self/fd")):
                with suppress(OSError), socket_of(number) as one:
                    if one.family == socket.AF_INET and one.getsockname()[1] == port:
                        asks = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                        after_s = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                        found.add((bool(asks), bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)), after_s))
    assert {accepts: asks and after_s for asks, accepts, after_s in found} == {True: False, False: 60}
