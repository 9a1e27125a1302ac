"""Every decoder and both ports against mutated messages: nothing but its own refusals, no reset, and memory stays flat.

For TENSORHUB_FUZZ_S seconds in all, 20 by default; `make fuzz` takes ten minutes and a new seed. A failure names its
seed and round: TENSORHUB_FUZZ_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq
from client_messages import HUB, KEYS, A, B, C, client_messages
from mutations import changed_bytes, mutated
from transport_helpers import GREETING, KEY, read_all, served, soon
from transport_suite.material import read_equal

from tensorhub_plugins.core import Client, Part, start_server
from tensorhub_plugins.core.errors import ProtocolError, TensorHubError, UsageError
from tensorhub_plugins.core.hub.hub import Hub, Received, Tick
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.report import report, validate
from tensorhub_plugins.core.manifest import Manifest, TensorSpec, TensorTable
from tensorhub_plugins.core.memory import block, moves
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import parse_address
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.protocol.lineage import Attempt
from tensorhub_plugins.core.transports import TransportLimits
from tensorhub_plugins.core.transports.rdma import messages as rdma
from tensorhub_plugins.core.transports.shm.process_memory import ProcessMemory
from tensorhub_plugins.core.transports.stream import messages as wire
from tensorhub_plugins.core.transports.tcp import TcpTransport
from tensorhub_plugins.core.types import CHECKPOINT, DECODE_ERRORS, Location, ShardKey

SECONDS = float(os.environ.get("TENSORHUB_FUZZ_S", "20"))
SEED = int(os.environ.get("TENSORHUB_FUZZ_SEED", "1"))
SHARE_S = SECONDS / 6  # of each test here
GROWTH_BYTES_MAX = 48 << 20  # of this process by one test: what is not given back grows by more in ten minutes
ROUNDS_MIN = 50  # however slow the machine is

pytestmark = pytest.mark.timeout(100 + 3 * SECONDS)


class Rounds:
    """Mutations until the time is over; says afterwards whether memory has stayed flat."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def __iter__(self) -> Iterator[random.Random]:
        ends_at = time.monotonic() + SHARE_S
        before = 0
        while time.monotonic() < ends_at or self.count < ROUNDS_MIN:
            self.count += 1
            yield random.Random(f"{self.name} {SEED} {self.count}")
            if self.count == ROUNDS_MIN // 2:  # what is kept by everybody once is there by now
                before = resident_bytes()
        gc.collect()
        assert resident_bytes() - before < GROWTH_BYTES_MAX, f"{self.name}: memory grew in {self.count} rounds"

    def __str__(self) -> str:
        return f"{self.name}, TENSORHUB_FUZZ_SEED={SEED}, round {self.count}"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def only(rounds: Rounds, *allowed: type[BaseException]) -> Iterator[None]:
    """Nothing else is raised, or it is said how to see it again."""
    try:
        yield
    except allowed:
        pass
    except BaseException as error:
        raise AssertionError(f"{rounds}: {type(error).__name__}: {error}") from error


def hub_messages() -> list[m.HubMessage]:
    grant = m.Grant(0, A, "a/0", {"tcp": "tcp://1.2.3.4:5"}, Location(), b"r" * 16, 100, 3)
    return [
        m.Welcome(HUB, 1.0, 15.0, 1, Directive(1, 1, (3,))),
        m.Unknown(HUB),
        m.Alive((1, 2), Directive(), (KEYS[0], (1, 2))),
        m.Done(1),
        m.Unpublished(1, ("a/0",), True),
        m.Granted(1, 1, CHECKPOINT, 1, (grant,), KEYS[1], 1, HUB),
        m.Visible(1, 1),
        m.Refused(1, "NotPublished", "not yet"),
        m.Begun(1, Attempt(1, 5, b"m" * 16)),
        m.Rivals(1, ("trainer/0",), ("boot pid:[1] 7 8",)),
        m.Versions(1, ()),
        m.Status(1, {"hub": "x"}),
        m.SourceGone(A),
        m.MayRelease((KEYS[0],)),
    ]


def manifest() -> Manifest:
    table = TensorTable.of(
        [
            TensorSpec("a", "float32", (4, 6), 96),
            TensorSpec("b", "bfloat16", (5, 3), 30, (1, 5)),
            TensorSpec("c", "uint8", (2, 4), 8, None, Part((8, 4), (2, 0))),
            TensorSpec("d", "float32", (0, 7), 0),
        ]
    )
    return Manifest(table, bytes(16 * 5), 32)


# --- decoders ---


def with_header(body: bytes) -> bytes:
    return m.encode(m.Bye())[: len(m.encode(m.Bye())) - len(msgspec.msgpack.encode(m.Bye()))] + body


@pytest.mark.slow
def test_what_hub_and_client_say_to_each_other():
    ways: list[tuple[list[Any], Callable[[bytes], Any]]] = [
        (hub_messages(), m.decode_from_hub),
        (client_messages(random.Random(0)), m.decode_from_client),
    ]
    for messages, decode in ways:  # the control: they are right as they are
        assert [decode(m.encode(message)) for message in messages] == messages
    rounds = Rounds("decoders of the hub")
    for rng in rounds:
        messages, decode = rng.choice(ways)
        body = mutated(rng, msgspec.msgpack.encode(rng.choice(messages)))
        frame = changed_bytes(rng, with_header(body)) if rng.random() < 0.1 else with_header(body)
        with only(rounds, ProtocolError):
            assert decode(frame) is not None


@pytest.mark.slow
def test_what_readers_and_sources_say_to_each_other():
    encoded = manifest().encoded
    rails = rdma.Dial([])
    corpus: list[tuple[Any, Any]] = [
        (wire.StreamOpen(KEY, 3, by_address=True), wire.request_decoder),
        (wire.StreamRead([(0, 3), (7, 9)], 5.0), wire.request_decoder),
        (wire.StreamFinish(), wire.request_decoder),
        (wire.StreamOpened(0, msgspec.Raw(encoded), bytes(32)), wire.reply_decoder),
        (wire.StreamRefused("gone", "never heard of it"), wire.reply_decoder),
        (wire.StreamFinished(True), wire.reply_decoder),
        (rails, rdma.dial_decoder),
        (rdma.Dialed([], "no"), rdma.dialed_decoder),
        (rdma.Taken(1), rdma.taken_decoder),
        (rdma.Rails(["ethernet"], []), rdma.rails_decoder),
    ]
    for message, decoder in corpus:
        assert decoder.decode(msgspec.msgpack.encode(message)) is not None
    rounds = Rounds("decoders of the data ports")
    for rng in rounds:
        message, decoder = rng.choice(corpus)
        with only(rounds, *DECODE_ERRORS):
            decoder.decode(mutated(rng, msgspec.msgpack.encode(message)))
        with only(rounds, ProtocolError):
            ProcessMemory(os.getpid(), changed_bytes(rng, bytes(32)), 0)


@pytest.mark.slow
def test_manifests_and_what_is_done_with_them():
    mine = TensorTable.of([TensorSpec("a", "float32", (4, 6), 96), TensorSpec("c", "uint8", (8, 4), 32)])
    whole = manifest()
    assert Manifest.decode(whole.encoded).check() == whole and moves.plan(whole.tensors, mine)
    decoded = 0
    rounds = Rounds("manifests")
    for rng in rounds:
        body, found = mutated(rng, whole.encoded), None
        with only(rounds, ProtocolError, UsageError):
            found = Manifest.decode(body)
            decoded += 1
            assert len(found.root()) == 16 and len(found.tensors.spans) <= len(found.tensors)
            if found.segment_count < 1000:
                found.specs_in(range(found.segment_count))
                moves.needed(found, moves.plan(found.tensors, mine))
            moves.check_cover({0: found.tensors}, mine)
        with only(rounds, ProtocolError, UsageError):
            if found is not None and found.size_bytes < 1 << 20:
                os.close(block.Block(found.tensors).fd)  # it belongs to who has made the block
    assert decoded > rounds.count / 100  # some have to be right still


# --- the hub ---


@pytest.mark.slow
def test_no_message_makes_the_hub_fail():
    """Its state is what it must be after every one; it would be reset by an exception."""
    rounds = Rounds("the hub's machine")
    hub, now = Hub(HUB, 0.0), 10.0
    for rng in rounds:
        if rounds.count % 200 == 1:  # from nothing now and then
            hub, now = Hub(HUB, 0.0), rng.choice((1.0, 10.0))
        message = rng.choice(client_messages(rng))
        if rng.random() < 0.5:
            try:
                message = m.decode_from_client(with_header(mutated(rng, msgspec.msgpack.encode(message))))
            except ProtocolError:
                continue
        now += rng.choice((0.0, 0.01, 1.0, 20.0 * (rng.random() < 0.05)))
        with only(rounds):
            hub.handle(Received(rng.choice((A, B, C)), message), now)
            if rng.random() < 0.2:
                hub.handle(Tick(), now)
            validate(hub.registry)
            m.encode(m.Status(1, report(hub.registry, now)))


@pytest.mark.slow
def test_the_hubs_port(caplog):
    caplog.set_level(logging.ERROR)
    rounds = Rounds("the hub's port")
    context = zmq.Context()
    with start_server(limits=HubLimits(messages_per_s_max=10**9)) as hub:  # all of it is to be decoded
        life, peers = hub._hub.session, []
        for identity in (A, B, b"short", b""):
            peer = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            if identity:
                peer.setsockopt(zmq.IDENTITY, identity)
            peer.connect(hub.address)
            peers.append(peer)
        try:
            for rng in rounds:
                body = msgspec.msgpack.encode(rng.choice(client_messages(rng)))
                frame = with_header(body if rng.random() < 0.2 else mutated(rng, body))
                frames = [changed_bytes(rng, frame) if rng.random() < 0.2 else frame] * rng.choice((1, 1, 1, 1, 3))
                peer = rng.choice(peers)
                with contextlib.suppress(zmq.Again):
                    peer.send_multipart(frames, zmq.NOBLOCK)
                while peer.poll(1 if rounds.count % 20 == 0 else 0):
                    m.decode_from_hub(peer.recv())
                if rounds.count % 50 == 0:
                    garble(hub.address, rng)
        finally:
            for peer in peers:
                peer.close()
            context.term()
        assert hub.is_alive() and hub._hub.session == life and caplog.text == "", rounds
        client = Client(hub.address, run="a run", model="of its own", replica="honest", transports=("tcp",))
        with client:
            client.publish(1, {"w": torch.ones(3)})
            assert client.wait() == 1


def garble(address: str, rng: random.Random) -> None:
    """Bytes that are not even ZeroMQ's."""
    host, port = parse_address(address, "tcp")
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as sock:
        greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
        sock.sendall(rng.choice((rng.randbytes(100), greeting + rng.randbytes(100), changed_bytes(rng, greeting))))


# --- the data port ---


def frame(body: bytes, rng: random.Random) -> bytes:
    header = wire.HEADER.pack(wire.CONTROL, 0, 0, len(body))
    return (changed_bytes(rng, header) if rng.random() < 0.1 else header) + body


@pytest.mark.slow
def test_a_sources_port(caplog):
    caplog.set_level(logging.ERROR)
    rounds = Rounds("a source's port")
    requests = [
        wire.StreamOpen(KEY, 1),
        wire.StreamRead([(0, 3)], 1.0),
        wire.StreamFinish(),
        wire.StreamOpen(ShardKey(9, "x"), 1),
    ]
    source = TcpTransport(limits=TransportLimits(hello_s=1.0))
    with served(source) as (offer, endpoint), contextlib.closing(TcpTransport()) as reader:
        before = read_all(reader, endpoint)
        host, port = parse_address(endpoint, "tcp")
        for rng in rounds:
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as stranger:
                said = [GREETING if rng.random() < 0.95 else changed_bytes(rng, GREETING)]
                for _ in range(rng.randrange(1, 5)):
                    body = msgspec.msgpack.encode(rng.choice(requests))
                    said.append(frame(body if rng.random() < 0.5 else mutated(rng, body), rng))
                stranger.sendall(b"".join(said))
                stranger.settimeout(0.005)
                while stranger.recv(1 << 16):
                    pass
        assert torch.equal(read_all(reader, endpoint), before), rounds
        assert offer.wait_no_readers(soon())
    assert caplog.text == "", rounds


@pytest.mark.slow
def test_a_reader_of_strangers():
    """Whatever a source answers, a reader raises one of our errors."""
    rounds = Rounds("a reader")
    of = manifest_of_one()
    replies = [
        wire.StreamOpened(0, msgspec.Raw(of.encoded)),
        wire.StreamRefused("gone", "no"),
        wire.StreamFinished(True),
    ]
    answers: list[bytes] = []

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.sendall(answers[0])
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(TcpTransport()) as reader:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        for rng in rounds:
            body = msgspec.msgpack.encode(rng.choice(replies))
            segment = wire.HEADER.pack(wire.SEGMENT, 0, 0, 1000) + bytes(1000)
            said = [GREETING, frame(body if rng.random() < 0.3 else mutated(rng, body), rng)]
            said.append(segment if rng.random() < 0.5 else changed_bytes(rng, segment))
            answers[:] = [b"".join(said)]
            with only(rounds, TensorHubError):
                link = reader.connect(endpoint, deadline=soon(5))
                try:
                    link.open(KEY, 1, deadline=soon(5))
                    list(read_equal(link, [0], Slab.allocate(of.tensors, pin=False), deadline=soon(5)))
                finally:
                    link.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def manifest_of_one() -> Manifest:
    with Slab.adopt({"a": torch.zeros(1000, dtype=torch.uint8)}) as slab:
        return slab.manifest(1000)
