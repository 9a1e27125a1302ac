"""A hub with a secret: who is let in, as what, and what the others are told, by real sockets. Each with its control."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hub_peer import peer

from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import HubUnreachable, UsageError
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.operations import problems
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import new_session
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.security import curve
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.types import Location, ShardKey

KEYS, OTHER = Keys.of(b"1" * 32), Keys.of(b"2" * 32)
READER, OBSERVER = KEYS.limited("reader"), KEYS.limited("observer")
SECONDS = 5.0  # far below the deadlines given here
VERSION = m.Holding(ShardKey(1, "checkpoint"), b"r" * 16, 100)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(keys=KEYS, limits=HubLimits(grace_s=0.0)) as running:
        yield running


@contextlib.contextmanager
def joined(server: Server, keys: Keys | None, run: str = "r") -> Iterator[HubLink]:
    name = "a" if keys is None else keys.role  # which is taken by one of them only
    hello = m.Hello(run, "m", name, 0, 1, Location(), {"tcp": "tcp://127.0.0.1:1"})
    link = HubLink(
        server.address, hello, connect_timeout_s=60.0, on_source_gone=id, on_may_release=lambda effect: None, keys=keys
    )
    try:
        yield link
    finally:
        link.close()


def ask(link: HubLink, make: object) -> m.Reply:
    return link.ask(make, Deadline.after(60.0)).result(timeout=SECONDS)


def test_who_has_the_secret_is_let_in(server: Server) -> None:
    with joined(server, KEYS, "in") as link:
        assert ask(link, lambda n: m.Publish(n, VERSION)) and ask(link, lambda n: m.Retain(n, 2))
        with joined(server, READER, "in") as reader:
            assert ask(reader, lambda n: m.Wait(n, 1, 0, 1.0)).version == 1
    assert fetch_status(server.address, keys=OBSERVER)["models"] == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (None, "asks for the run's secret: set TENSORHUB_SECRET_FILE"),
        (OTHER, "does not know this process's secret"),
        (OTHER.limited("reader"), "does not know this process's secret"),
        (Keys("publisher", b"3" * 32, READER._hub_public, b""), "does not know this process's secret"),
    ],
    ids=["none", "another", "another's reader", "right hub, own key"],
)
def test_a_stranger_hears_why_within_seconds(server: Server, keys: Keys | None, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match=words), joined(server, keys):
        pass
    with pytest.raises(UsageError, match=words):
        fetch_status(server.address, timeout_s=60.0, keys=keys)
    assert time.monotonic() - began < 2 * SECONDS


STRANGERS = {
    "none": (KEYS, None),
    "another": (KEYS, OTHER),
    "right hub, own key": (KEYS, Keys("publisher", b"3" * 32, READER._hub_public, b"")),
    "at a hub without one": (None, KEYS),
}


@pytest.mark.slow
@pytest.mark.parametrize(("of_hub", "of_stranger"), STRANGERS.values(), ids=STRANGERS)
def test_whose_handshakes_were_refused_is_in_the_status(of_hub: Keys | None, of_stranger: Keys | None) -> None:
    with start_server(keys=of_hub) as server:
        with joined(server, of_hub):
            assert fetch_status(server.address, keys=of_hub)["refused_hosts"] == []
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))):
            pass  # a probe of its port
        assert fetch_status(server.address, keys=of_hub)["refused_hosts"] == []
        with pytest.raises(UsageError), joined(server, of_stranger):
            pass
        report = fetch_status(server.address, keys=of_hub)
        hosts = report["refused_hosts"]
        assert {host["host"] for host in hosts} <= {"an unknown host", "127.0.0.1"}  # it may be gone before it is asked
        assert hosts[0]["count"] >= 1 and hosts[0]["seconds_ago"] < 60.0
        assert {problem.kind for problem in problems.find(report)} == {"refused_handshakes"}
        for _attempt in range(100):
            hosts = fetch_status(server.address, keys=of_hub)["refused_hosts"]
            if any(host["host"] == "127.0.0.1" for host in hosts):
                break
            with pytest.raises(UsageError), joined(server, of_stranger):
                pass
        else:
            pytest.fail("none of 100 was asked for its host before it was gone")
        figures = {each.name: each.values for each in server.figures()}
        assert figures["tensorhub_hub_refused_hosts"] == [((), float(len(hosts)))]


@pytest.mark.parametrize(("keys", "mechanism"), [(KEYS, "CURVE"), (None, "NULL")])
def test_who_looks_at_what_a_hub_asks_for_is_seen(keys: Keys | None, mechanism: str) -> None:
    """ZeroMQ's own handshakes had gone unseen where the client was first to see that they cannot succeed."""
    with start_server(keys=keys) as server:
        assert fetch_status(server.address, keys=keys)["refused_hosts"] == []
        assert curve.mechanism_of(server.address) == mechanism
        (host,) = fetch_status(server.address, keys=keys)["refused_hosts"]
        assert host["count"] == 1


def test_a_report_has_the_refusals_whose_events_have_come() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, (_, router.curve_secretkey) = True, zmq.curve_keypair()
    strangers = curve.Strangers(context, router, time.monotonic)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(SECONDS)
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0"))  # a ZMTP greeting
        while connection.recv(4096):
            pass  # until it has been refused: events of that have come before
    assert [each["count"] for each in strangers.report()] == [1]
    for each in (strangers.socket, router):
        each.close()
    context.term()


def test_a_descriptor_that_another_kind_of_socket_has_since_ends_no_hub() -> None:
    left, right = socket.socketpair()
    with left, right, socket.create_server(("127.0.0.1", 0)) as listener:
        assert curve._peer_of(left.fileno()) == ""
        with socket.create_connection(listener.getsockname()) as peer_of_listener:
            assert curve._peer_of(peer_of_listener.fileno()) == "127.0.0.1"  # the control


def test_hosts_of_refused_handshakes_are_bounded() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    now = 100.0
    strangers = curve.Strangers(context, router, lambda: now)
    strangers.refused("")
    assert [each["host"] for each in strangers.report()] == ["an unknown host"]
    for number in range(10 * curve.STRANGERS_MAX):
        strangers.refused(f"10.0.{number >> 8}.{number & 255}")
    now = 101.0
    strangers.refused("")
    now = 102.0
    assert len(strangers.report()) == curve.STRANGERS_MAX - 1  # one that left too early is no other host
    assert strangers.report()[0] == {"host": "10.0.2.127", "count": 1, "seconds_ago": 2.0}
    now = 5000.0
    assert strangers.report() == []
    for each in (strangers.socket, router):
        each.close()
    context.term()


def test_a_secret_where_the_hub_has_none() -> None:
    with start_server() as plain:
        refused = pytest.raises(UsageError, match="was started without a secret, and this process has one")
        with refused, joined(plain, KEYS):
            pass
        with joined(plain, None):  # the control
            pass


def close_each(proxy: socket.socket) -> None:
    """Close what connects, as a tunnel or a proxy does while its hub is away."""
    with contextlib.suppress(OSError):
        while True:
            proxy.accept()[0].close()


def test_what_closes_each_connection_is_not_said_to_be_a_hub_without_a_secret() -> None:
    """The hub without a secret above is the control."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        Thread(target=close_each, args=(proxy,), name="proxy").start()
        address = f"tcp://127.0.0.1:{proxy.getsockname()[1]}"
        with pytest.raises(HubUnreachable, match="another program listens"):
            HubLink(
                address,
                m.Hello("r", "m", "a", 0, 1, Location(), {}),
                connect_timeout_s=1.5,
                on_source_gone=lambda gone: None,
                on_may_release=lambda effect: None,
                keys=KEYS,
            )
        proxy.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_hub_that_starts_behind_a_proxy_is_not_said_to_have_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy closed each connection until then; `test_a_stranger_hears_why_within_seconds` is the control."""
    look, hubs = curve.mechanism_of, contextlib.ExitStack()
    proxy = hubs.enter_context(socket.create_server(("127.0.0.1", 0)))
    address = f"tcp://127.0.0.1:{proxy.getsockname()[1]}"

    def start_and_look(address: str, *ours: str) -> str | None:
        proxy.shutdown(socket.SHUT_RDWR)
        proxy.close()
        server.append(hubs.enter_context(start_server(address, keys=KEYS)))
        return look(address, *ours)

    server: list[Server] = []
    at: Any = SimpleNamespace(address=address)
    monkeypatch.setattr(curve, "mechanism_of", start_and_look)
    with hubs:
        Thread(target=close_each, args=(proxy,), name="proxy").start()
        with joined(at, KEYS):
            assert len(server) == 1
            assert fetch_status(address, keys=KEYS)["refused_hosts"] == []


def test_no_hub_at_all_is_still_no_hub() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        for keys in (None, KEYS):
            with pytest.raises(HubUnreachable, match="no hub answers"):
                fetch_status(address, timeout_s=0.3, keys=keys)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: m.Retain(n, 1024),
        lambda n: m.Pin(n, 1, 1.0),
        lambda n: m.Withdraw(n, 1, 1.0),
        lambda n: m.Publish(n, m.Holding(ShardKey(2, "checkpoint"), b"x" * 16, 100)),
        lambda n: m.Publish(n, m.Holding(ShardKey(2, "checkpoint"), b"x" * 16, 100, origin="replicated")),
        lambda n: m.Publish(n, m.Holding(ShardKey(1, "checkpoint", 0, 2), b"x" * 16, 50, origin="replicated")),
    ],
    ids=["retain", "pin", "withdraw", "new version", "said to be replicated", "cut in other shards"],
)
def test_a_reader_changes_nothing_for_others(server: Server, make: object) -> None:
    with joined(server, KEYS, "roles") as trainer:
        ask(trainer, lambda n: m.Publish(n, VERSION))
        with joined(server, READER, "roles") as reader:
            with pytest.raises(UsageError, match="a reader's key"):
                ask(reader, make)
            (version,) = ask(reader, m.AskVersions).versions
            assert (version.version, version.visible) == (1, True)
            passed_on = m.Holding(VERSION.key, VERSION.root, 100, origin="replicated")
            converted = m.Holding(ShardKey(1, "runtime"), b"c" * 16, 100)
            assert ask(reader, lambda n: m.Publish(n, passed_on))  # what it is for
            assert ask(reader, lambda n: m.Publish(n, converted))
            trainer_can = m.Publish(9, m.Holding(ShardKey(3, "checkpoint"), b"x" * 16, 100))
            assert ask(trainer, lambda n: m.Publish(n, trainer_can.holding))  # the control


@pytest.mark.parametrize("keys", [READER, KEYS], ids=["reader", "control"])
def test_what_a_readers_hello_says_for_others_is_not_believed(server: Server, keys: Keys) -> None:
    run = f"hello {keys.role}"
    held = m.Holding(ShardKey(5, "checkpoint"), b"x" * 16, 100, origin="replicated")
    hello = m.Hello(run, "m", "b", 0, 1, Location(), {}, (held,), directive=Directive(7, 0, (1,)), request_id=1)
    with joined(server, KEYS, run) as trainer, peer(server.address, keys, new_session()) as other:
        ask(trainer, lambda n: m.Publish(n, VERSION))
        other.send(m.encode(hello))
        assert isinstance(m.decode_from_hub(other.recv()), m.Welcome)
        visible = [version.version for version in ask(trainer, m.AskVersions).versions if version.visible]
        assert visible == ([1] if keys is READER else [5])


def test_an_observer_may_only_look(server: Server) -> None:
    refused = pytest.raises(
        UsageError, match="Hello was sent with an observer's key, which may ask for the status only"
    )
    with refused, joined(server, OBSERVER):
        pass
    assert fetch_status(server.address, keys=OBSERVER)["hub"]


@pytest.mark.parametrize("keys", [READER, KEYS], ids=["reader", "control"])
def test_a_readers_connection_cannot_speak_in_a_publishers_name(server: Server, keys: Keys) -> None:
    session = new_session()
    hello = m.Hello(f"stolen {keys.role}", "m", "a", 0, 1, Location(), {}, request_id=1)
    with peer(server.address, KEYS, session) as owner:
        owner.send(m.encode(hello))
        assert isinstance(m.decode_from_hub(owner.recv()), m.Welcome)
        with peer(server.address, keys, session) as thief:
            thief.send(m.encode(m.Unpublish(2, (VERSION.key,), 0.0, gone=True)))
            reply = m.decode_from_hub(thief.recv())
            if keys is READER:
                assert isinstance(reply, m.Refused) and "in the name of a publisher" in reply.message
            else:  # what keeps one publisher from another is not the role
                assert isinstance(reply, m.Unpublished)


@pytest.mark.slow
def test_a_hub_that_comes_back_with_the_secret_is_found_again() -> None:
    with start_server(keys=KEYS, limits=HubLimits(grace_s=0.0)) as first:
        address = first.address
        link = joined(first, KEYS)
        worker = link.__enter__()
    with start_server(address):  # somebody starts it without
        expired = worker.ask(lambda n: m.Wait(n, 1, 0, SECONDS), Deadline.after(SECONDS))
        with pytest.raises(HubUnreachable, match="was started without a secret, and this process has one"):
            expired.result(timeout=3 * SECONDS)
    with start_server(address, keys=KEYS, limits=HubLimits(grace_s=0.0)):
        assert ask(worker, m.AskVersions).versions == ()
        link.__exit__(None, None, None)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://10.0.0.1:0", "tcp://somewhere:0"])
def test_without_a_secret_a_hub_is_for_this_host(address: str) -> None:
    with pytest.raises(UsageError, match=r"any process that reaches .* could read and write weights"):
        Server(address)


def test_a_hub_for_all_has_a_secret_or_says_so() -> None:
    with start_server("tcp://0.0.0.0:0", keys=KEYS), start_server("tcp://0.0.0.0:0", insecure=True):
        pass
    with pytest.raises(UsageError, match="this needs the run's secret, and what was given is the key of a reader"):
        start_server(keys=READER)


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_SECRET", KEYS.text())
    with start_server() as server:
        fetch_status(server.address)
        monkeypatch.delenv("TENSORHUB_SECRET")
        with pytest.raises(UsageError, match="asks for the run's secret"):
            fetch_status(server.address)
