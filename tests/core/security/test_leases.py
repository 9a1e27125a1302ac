"""A lease opens one shard of one source on one connection until it expires, by the pure parts and by real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial

import msgspec
import pytest
import torch

from tensorhub_plugins.core import Client, HubLimits, ShardKey, start_server
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.hub.names import public_name
from tensorhub_plugins.core.protocol.fields import COUNT_MAX
from tensorhub_plugins.core.protocol.messages import (
    SERVED_MAX,
    Acquire,
    Claim,
    Heartbeat,
    Ticket,
    decode_from_client,
    encode,
)
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.security.leases import HUBS_KEPT_MAX, SERVED_KEPT_MAX, Gate, issue, name_of, prove
from tensorhub_plugins.core.transports import NotServable, create
from tensorhub_plugins.core.transports.stream.messages import StreamOpen, request_decoder

KEYS, OTHER = Keys.of(b"1" * 32), Keys.of(b"2" * 32)
HERE, THERE = {"tcp": "tcp://10.0.0.1:1"}, {"tcp": "tcp://10.0.0.1:2"}
KEY = ShardKey(1, "checkpoint", 0, 2)
HUB, NONCE = b"H" * 16, b"n" * 16
CLAIM = Claim(HUB, "rollout-0/0", 100.0)


def gate(clock: float = 50.0) -> Gate:
    made = Gate(KEYS.lease_key)
    made.serves_at(HERE)
    made.hear(HUB, clock, now=7.0)
    return made


def refusal(
    ticket: Ticket, *, shard: ShardKey = KEY, claim: Claim = CLAIM, nonce: bytes = NONCE, now: float = 7.0
) -> str:
    """With the proof that this ticket gives on the connection NONCE."""
    return gate().refusal(shard, claim, prove(ticket.key, NONCE), nonce, now) or ""


def test_a_lease_is_good_for_what_was_granted_and_nothing_else() -> None:
    ticket = issue(KEYS.lease_key, HERE, KEY, CLAIM)
    assert refusal(ticket) == ""
    for wrong in (
        {"shard": ShardKey(1, "checkpoint", 1, 2)},
        {"shard": ShardKey(2, "checkpoint", 0, 2)},
        {"claim": Claim(HUB, "rollout-0/0", 1e9)},
        {"claim": Claim(HUB, "rollout-1/0", 100.0)},
        {"nonce": b"m" * 16},
    ):
        assert "is not of this hub, source, connection" in refusal(ticket, **wrong)
    assert "is not of this hub" in refusal(issue(OTHER.lease_key, HERE, KEY, CLAIM))
    assert "is not of this hub" in refusal(issue(KEYS.lease_key, THERE, KEY, CLAIM))
    assert gate().refusal(KEY, None, b"", NONCE, 7.0) == "it shows no lease of the hub"


def test_a_lease_expires_on_the_hubs_clock() -> None:
    ticket = issue(KEYS.lease_key, HERE, KEY, CLAIM)
    assert refusal(ticket, now=56.9) == ""
    assert refusal(ticket, now=58.0) == "its lease has expired 1.0 s ago"
    late = gate(clock=20.0)  # that word took 30 s to get here
    assert late.refusal(KEY, CLAIM, prove(ticket.key, NONCE), NONCE, 58.0) is None
    late.hear(HUB, 51.0, now=8.0)
    assert late.refusal(KEY, CLAIM, prove(ticket.key, NONCE), NONCE, 58.0) is not None


def test_a_hub_that_the_source_has_not_heard_yet_is_taken_at_its_word() -> None:
    claim = Claim(b"N" * 16, "rollout-0/0", 0.0)
    ticket = issue(KEYS.lease_key, HERE, KEY, claim)
    assert gate().refusal(KEY, claim, prove(ticket.key, NONCE), NONCE, 7.0) is None
    closed = Gate(KEYS.lease_key)
    assert closed.refusal(KEY, claim, prove(ticket.key, NONCE), NONCE, 7.0) is not None  # it does not serve yet


@pytest.mark.parametrize("since", [HUBS_KEPT_MAX - 1, HUBS_KEPT_MAX])
def test_an_expired_lease_does_not_come_back_to_life_when_its_hub_is_forgotten(since: int) -> None:
    """So many hubs have come since; to forget one is to refuse its leases, not to believe them."""
    ticket, source = issue(KEYS.lease_key, HERE, KEY, CLAIM), gate()
    for life in range(since):
        source.hear(life.to_bytes(16, "big"), 0.0, now=60.0)
    said = source.refusal(KEY, CLAIM, prove(ticket.key, NONCE), NONCE, 60.0)
    is_known = since < HUBS_KEPT_MAX
    why = "has expired 3.0 s ago" if is_known else "is of a hub that this source has not heard, or long ago"
    assert said == f"its lease {why}"


# --- real sockets ---

WEIGHTS = {"w": torch.arange(300_000, dtype=torch.float32)}


@pytest.fixture(scope="module")
def trainer() -> Iterator[tuple[str, Client]]:
    with start_server(keys=KEYS, limits=HubLimits(grace_s=0.0)) as hub:
        names = {"run": "r", "model": "m", "replica": "trainer", "transports": ("shm", "tcp")}
        with Client(hub.address, keys=KEYS, advertise_host="127.0.0.1", **names) as client:
            client.publish(1, WEIGHTS)
            client.publish(2, {"w": WEIGHTS["w"] + 1})
            yield hub.address, client


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("keys", [KEYS, KEYS.limited("reader")], ids=["publisher", "reader"])
def test_who_was_granted_a_lease_reads(trainer: tuple[str, Client], keys: Keys, transport: str) -> None:
    names = {"run": "r", "model": "m", "replica": f"{keys.role}-{transport}", "transports": (transport,)}
    with Client(trainer[0], keys=keys, **names) as reader:
        into = {"w": torch.zeros(300_000)}
        report = reader.replicate(into, 1, timeout_s=20)
        assert torch.equal(into["w"], WEIGHTS["w"]) and list(report.transports) == [transport]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_source_knows_which_lease_it_serves(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, into = {"run": "r", "model": "m", "transports": (transport,)}, {"w": torch.zeros(300_000)}
    with (
        start_server(keys=KEYS, limits=HubLimits(grace_s=0.0)) as hub,
        Client(hub.address, keys=KEYS, replica="trainer", advertise_host="127.0.0.1", **names) as source,
        Client(hub.address, keys=KEYS.limited("reader"), replica="rollout", **names) as reader,
    ):
        monkeypatch.setattr(source._hub._machine, "gate", None)  # else a heartbeat says it
        source.publish(1, WEIGHTS)
        assert source._gate is not None and source._gate.take_served() == ()
        reader.replicate(into, 1, timeout_s=20)
        session = public_name(reader._hub.session)
        assert [name.partition("-")[0] for name in source._gate.take_served()] == [session.hex()]
        assert source._gate.take_served() == ()


def test_what_a_source_says_of_its_leases_is_bounded() -> None:
    made, names = gate(), [name_of(NONCE.ljust(16), number) for number in range(2 * SERVED_KEPT_MAX)]
    for name in names:
        made.serve(name)
    said = [made.take_served() for _ in range(4)]
    assert [len(each) for each in said] == [SERVED_MAX, SERVED_MAX, 0, 0]
    assert len({name for each in said for name in each}) == SERVED_KEPT_MAX
    encode(Heartbeat(HUB, served=said[0]))


@pytest.mark.parametrize(("name", "is_read"), [("x" * 65, False), ("a\u202eb", False), (name_of(HUB, COUNT_MAX), True)])
def test_a_source_reads_no_name_of_a_lease_that_it_cannot_pass_on(name: str, is_read: bool) -> None:
    """A reader's key can sign any: a heartbeat with this one would not be read, and the source's session would end."""
    opening = StreamOpen(KEY, 1, lease=(Claim(HUB, name, 1e12), b""))
    for decode in (
        lambda: request_decoder.decode(msgspec.msgpack.encode(opening)),
        lambda: decode_from_client(encode(Heartbeat(HUB, served=(name,)))),
    ):
        with nullcontext() if is_read else pytest.raises((msgspec.ValidationError, ProtocolError)):
            decode()


def test_unpublish_waits_for_no_readers_key_that_reads_nothing() -> None:
    """Its lease and its heartbeats are real; it never connects to the source."""
    names = {"run": "r", "model": "m"}
    with (
        start_server(keys=KEYS, limits=HubLimits(grace_s=0.0, heartbeat_s=0.05)) as hub,
        Client(hub.address, keys=KEYS, replica="trainer", **names) as source,
        Client(hub.address, keys=KEYS.limited("reader"), replica="greedy", **names) as reader,
    ):
        source.retain(0)
        source.publish(1, WEIGHTS)
        deadline = time.monotonic() + 300.0
        acquire = partial(Acquire, version=1, at_least=0, layouts=("checkpoint",), timeout_s=300.0)
        assert reader._hub.ask(lambda number: acquire(request_id=number), deadline).result(60)
        report = source.unpublish(1, timeout_s=120.0)
        assert report.cut_off == ("greedy/0",) and report.seconds < 100.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stranger_reads_nothing(trainer: tuple[str, Client], transport: str) -> None:
    """It knows the endpoint, the shard and the protocol; tickets of its own, and one for the other version."""
    _, source = trainer
    endpoint = _endpoint(source._transports[transport])
    shard, other = ShardKey(1, "checkpoint"), ShardKey(2, "checkpoint")
    hub = source._hub._machine.hub
    soon = Claim(hub, "stranger/0", 1e12)
    with closing(create(transport)) as mine:
        for ticket in (None, _ticket(OTHER, source, shard, soon), _ticket(KEYS, source, other, soon)):
            link = mine.connect(endpoint, deadline=time.monotonic() + 10)
            link.ticket = ticket
            with pytest.raises(NotServable, match="admits no reader without a lease of its hub"):
                link.open(shard, 1 << 40, deadline=time.monotonic() + 10)
            link.close()
        expired = Claim(hub, "stranger/0", 0.001)
        for claim, lets_in in ((expired, False), (soon, True)):  # the last is the control
            link = mine.connect(endpoint, deadline=time.monotonic() + 10)
            link.ticket = _ticket(KEYS, source, shard, claim)
            if lets_in:
                assert link.open(shard, 1 << 40, deadline=time.monotonic() + 10).size_bytes == 1_200_000
            else:
                with pytest.raises(NotServable, match="has expired"):
                    link.open(shard, 1 << 40, deadline=time.monotonic() + 10)
            link.close()


def test_what_was_heard_on_one_connection_opens_no_other(trainer: tuple[str, Client]) -> None:
    _, source = trainer
    shard, claim = ShardKey(1, "checkpoint"), Claim(source._hub._machine.hub, "reader/0", 1e12)
    endpoint = _endpoint(source._transports["tcp"])
    ticket = _ticket(KEYS, source, shard, claim)
    with closing(create("tcp")) as mine:
        first = mine.connect(endpoint, deadline=time.monotonic() + 10)
        first.ticket = ticket
        first.open(shard, 1 << 40, deadline=time.monotonic() + 10)
        second = mine.connect(endpoint, deadline=time.monotonic() + 10)
        second.ticket = ticket
        second._channels[0].nonce = first._channels[0].nonce  # what a listener would repeat
        with pytest.raises(NotServable, match="is not of this hub, source, connection"):
            second.open(shard, 1 << 40, deadline=time.monotonic() + 10)
        first.close()
        second.close()


def _ticket(keys: Keys, source: Client, shard: ShardKey, claim: Claim) -> Ticket:
    endpoints = {name: _endpoint(transport) for name, transport in source._transports.items()}
    return issue(keys.lease_key, endpoints, shard, claim)


def _endpoint(transport: object) -> str:
    listener: socket.socket = transport._server._listeners[0]
    name = listener.getsockname()
    return f"shm://{name[1:].decode()}" if isinstance(name, bytes) else f"tcp://{name[0]}:{name[1]}"
