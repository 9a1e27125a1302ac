"""No worker can speak for another: what others hear of a session is not what it speaks with. By real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import zmq

from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.names import SPARE_MAX, Names, public_name
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import new_session
from tensorhub_plugins.core.security import curve
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.types import Location, ShardKey

KEYS = Keys.of(b"1" * 32)
KEY = ShardKey(1, "checkpoint")
ANSWER_MS = 10_000
context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()


class Peer:
    """A connection that says which identity it has."""

    def __init__(self, server: Server, keys: Keys | None, identity: bytes) -> None:
        self.identity = identity
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        curve.guard_client(self.socket, keys)
        self.socket.connect(server.address)

    def ask(self, message: m.ClientMessage) -> m.HubMessage:
        self.socket.send(m.encode(message))
        return m.decode_from_hub(self.socket.recv())


@contextlib.contextmanager
def peer(server: Server, keys: Keys | None, identity: bytes | None = None) -> Iterator[Peer]:
    one = Peer(server, keys, new_session() if identity is None else identity)
    try:
        yield one
    finally:
        one.socket.close()


def hello(replica: str) -> m.Hello:
    return m.Hello("r", "m", replica, 0, 1, Location(), {"tcp": f"tcp://{replica}:1"}, request_id=1)


@pytest.fixture(params=[None, KEYS], ids=["without a secret", "of one secret"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return request.param


@pytest.fixture
def server(keys: Keys | None) -> Iterator[Server]:
    with start_server(keys=keys, limits=HubLimits(grace_s=0.0)) as running:
        yield running


@pytest.fixture
def trainer(server: Server, keys: Keys | None) -> Iterator[Peer]:
    with peer(server, keys) as one:
        assert isinstance(one.ask(hello("trainer")), m.Welcome)
        assert isinstance(one.ask(m.Publish(2, m.Holding(KEY, b"r" * 16, 100))), m.Done)
        yield one


def grant_of(server: Server, keys: Keys | None) -> m.Grant:
    with peer(server, keys) as reader:
        assert isinstance(reader.ask(hello("reader")), m.Welcome)
        granted = reader.ask(m.Acquire(2, 1, 0, ("checkpoint",), 5.0))
        assert isinstance(granted, m.Granted)
        return granted.grants[0]


def test_who_has_heard_of_a_session_cannot_speak_for_it(server: Server, keys: Keys | None, trainer: Peer) -> None:
    grant = grant_of(server, keys)
    assert grant.session == public_name(trainer.identity) != trainer.identity
    with peer(server, keys, grant.session) as thief:
        answer = thief.ask(m.Unpublish(3, (KEY,), 0.0, gone=True))
        assert isinstance(answer, m.Unknown)
        thief.socket.send(m.encode(m.Bye()))
        assert isinstance(thief.ask(m.AskVersions(4)), m.Unknown)  # heard after it
        name = "trainer" if keys is None else "thief"  # with a secret that name is taken
        assert isinstance(thief.ask(hello(name)), m.Welcome)  # as a worker of its own, which holds nothing
    versions = trainer.ask(m.AskVersions(3))
    assert isinstance(versions, m.Versions)
    assert [(v.version, v.visible) for v in versions.versions] == [(1, True)]


def test_the_control_the_identity_itself_is_what_speaks(server: Server, keys: Keys | None, trainer: Peer) -> None:
    with peer(server, keys, trainer.identity) as again:
        assert isinstance(again.ask(m.Unpublish(3, (KEY,), 0.0, gone=True)), m.Unpublished)


def test_neither_reports_nor_the_log_say_an_identity(
    server: Server, keys: Keys | None, trainer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    said = repr(fetch_status(server.address, keys=keys))
    trainer.socket.send(b"garbage")
    refused = m.decode_from_hub(trainer.socket.recv())
    assert isinstance(refused, m.Refused) and "trainer/0" in said
    assert public_name(trainer.identity).hex()[:8] in caplog.text
    secret = trainer.identity.hex()[:8]
    assert secret not in said + caplog.text and repr(trainer.identity) not in said + caplog.text + repr(refused)


def test_names_of_strangers_are_forgotten_and_those_of_workers_stay() -> None:
    names, workers = Names(), {public_name(b"w" * 16): None}
    identities = [b"w" * 16, *(number.to_bytes(16, "big") for number in range(1, 5 * SPARE_MAX))]
    for identity in identities:
        public = names.public(identity, workers)
        assert names.identity(public) == identity
    assert len(names) <= SPARE_MAX + 2
    assert names.identity(public_name(b"w" * 16)) == b"w" * 16
    assert names.identity(public_name(identities[1])) is None
