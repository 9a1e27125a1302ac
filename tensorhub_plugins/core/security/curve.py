"""CURVE on the hub's socket: both ends prove their keys, everything between them is encrypted.

The hub admits the public keys of its three roles (`Doorman`, which ZeroMQ asks for each new connection, ZAP), and knows
the role of every message from its connection. A client whose handshake fails would only see ZeroMQ try for ever:
`Handshakes` reports in a sentence what is wrong.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

import zmq
from zmq.utils.monitor import parse_monitor_message

from tensorhub_plugins.core.deadline import aside
from tensorhub_plugins.core.process_lifetime import ForeignSocket, socket_of
from tensorhub_plugins.core.protocol.address import parse_address
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.security.secret import FILE_VARIABLE, SECRET_VARIABLE
from tensorhub_plugins.core.types import RECENT_S, Role

ZAP_ADDRESS, ZAP_VERSION, ZAP_DOMAIN = "inproc://zeromq.zap.01", b"1.0", b"tensorhub"
USER = "User-Id"  # ZeroMQ's name for what the doorman answers about a connection
HANDSHAKE_MS = 10_000  # a silent connection is dropped; thousands that start at once take seconds
CLOSED_TIMES, CLOSED_S = 3, 1.0  # so many times over so long: not a hub that is just starting or ending
REDIAL_S = 1.0  # a hub that was started with the wrong secret is soon restarted
PROBE_S = 1.0
STRANGERS_MAX = 64  # hosts that are remembered
SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03"  # of ZMTP 3, with its major version
GREETING_BYTES, MECHANISM = 64, slice(12, 32)
NO_DETAIL, PROTOCOL, AUTH, DONE = (
    int(event)
    for event in (
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
    )
)


def guard_hub(router: zmq.Socket[bytes], keys: Keys) -> None:
    """Secure the hub's socket before `bind`, after a `Doorman` was made: without one ZeroMQ admits every key."""
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.of_hub())
    router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def guard_client(dealer: zmq.Socket[bytes], keys: Keys | None) -> None:
    """Secure the client's socket before `connect`. None: no encryption, for a hub without a secret."""
    if keys is not None:
        public, secret = keys.own()
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.hub_public())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)


class Doorman:
    """Answers ZeroMQ whether to admit a client. Poll `socket`, and call `answer` when it is readable."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admitted: Mapping[bytes, Role],
        refused: Callable[[str], object] = lambda host: None,
    ) -> None:
        """Bind the socket. refused: called with the address of each client whose key is not admitted."""
        self._admitted, self._refused = admitted, refused
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer all questions that wait."""
        with contextlib.suppress(zmq.Again):
            while True:
                # version, request, domain, address, identity, mechanism, public key
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                role = self._admitted.get(question[6]) if len(question) == 7 and question[5] == b"CURVE" else None
                if role is None and len(question) == 7:
                    self._refused(question[3].decode(errors="replace"))
                said = (b"200", b"OK", role.encode()) if role else (b"400", b"no key of this hub", b"")
                self.socket.send_multipart([ZAP_VERSION, question[1], *said, b""])


class Strangers:
    """The hosts whose handshakes with the hub have failed lately: of workers with another secret, or with none where
    the hub has one. Poll `socket`, and call `look` when it is readable; only the hub's thread does. Before `bind`.

    ZeroMQ reports a failure without the peer; that the connection is over comes next, and names its descriptor. A
    client that sees first that the mechanisms differ leaves unseen, as a probe does; `mechanism_of` is seen.

    accepted: called with the descriptor of each new connection."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        clock: Callable[[], float],
        accepted: Callable[[int], object] = lambda descriptor: None,
    ) -> None:
        self._clock, self._accepted = clock, accepted
        address = f"inproc://tensorhub-strangers-{id(self)}"
        router.monitor(address, zmq.EVENT_ACCEPTED | PROTOCOL | zmq.EVENT_DISCONNECTED)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for us
        self.socket.connect(address)
        self.hosts: dict[int, str] = {}  # of connections by descriptor, of which a process has a limited number
        self._failed = False
        self._refused: dict[str, tuple[int, float]] = {}  # by host: how many, and when the last one was

    def look(self) -> None:
        """Take all events that have come."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
                number = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self.hosts[number] = _peer_of(number)
                    self._accepted(number)
                elif event["event"] == PROTOCOL:
                    self._failed = True
                else:
                    host = self.hosts.pop(number, "")
                    if self._failed:
                        self.refused(host)
                    self._failed = False

    def refused(self, host: str) -> None:
        """Note a handshake that was refused."""
        count, _ = self._refused.pop(host, (0, 0.0))
        self._refused[host] = count + 1, self._clock()
        while len(self._refused) > STRANGERS_MAX:
            del self._refused[next(iter(self._refused))]

    def report(self) -> list[dict[str, object]]:
        """Return the hosts of lately, the last one first, with those whose events have come meanwhile."""
        self.look()
        now = self._clock()
        return [
            {"host": host or "an unknown host", "count": count, "seconds_ago": round(now - at, 3)}
            for host, (count, at) in reversed(self._refused.items())
            if now - at < RECENT_S and (host or len(self._refused) == 1)  # else most likely a known one's, too
        ]


def _peer_of(descriptor: int) -> str:
    """Return the address at the other end; "": it is closed already, and another socket may have its descriptor."""
    try:
        with socket_of(descriptor) as connection:
            return str(connection.getpeername()[0]).removeprefix("::ffff:")
    except (OSError, LookupError, TypeError):  # the latter two: a socket of another family
        return ""


class Handshakes:
    """The outcome of a client's connections to the hub. `socket` is to be polled. address: of the hub, for error texts.
    wake: called in another thread when `problem` has something to report.

    Used by the thread of the client's socket, and closed before it."""

    def __init__(
        self, client: zmq.Socket[bytes], address: str, keys: Keys | None, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._client, self._address, self._keys = client, address, keys
        self._wake = wake
        self._closed_times, self._closed_first = 0, 0.0  # handshakes that the hub has ended without a reason
        self._redial_at: float | None = None
        self._connection: ForeignSocket | None = None
        self._mechanism: Future[str | None] | None = None  # of a hub that does not admit us
        self._greeted = False  # with ours: what closed before may have been a proxy whose hub was still away
        self.endpoint = ""  # what ZeroMQ is connected to
        self.shut_out = ""  # why the hub does not admit us, as far as is known
        self.is_refused = False  # a connection; ZeroMQ goes on trying
        events = NO_DETAIL | PROTOCOL | AUTH | DONE | zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
        self.socket = client.get_monitor_socket(events)
        self.socket.setsockopt(zmq.LINGER, 0)

    def connect(self, host: str, port: int) -> None:
        """Connect the client to this address. host: an IP address, as ZeroMQ's thread would wait for a name."""
        self._client.setsockopt(zmq.IPV6, ":" in host)
        self._client.connect(format_address("tcp", host, port))
        self.endpoint = format_address("tcp", host, port)

    def unheard(self) -> str:
        """Return that no hub answers there, and what does."""
        what = ", where another program listens, or a hub that is stopped" if self._connection is not None else ""
        return f"no hub answers at {self._address}{what}"

    def leads_to(self, hosts: Collection[str], port: int) -> bool:
        """Return whether it is connected to one of these."""
        return self.endpoint in {format_address("tcp", host, port) for host in hosts}

    def problem(self, now: float) -> str | None:
        """Return why the hub does not admit us, once when that is certain; None: there is nothing new."""
        has_news = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return self._look_into(now) if has_news or self._redial_at is not None or self._mechanism is not None else None

    def _look_into(self, now: float) -> str | None:
        failed = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_CONNECTED:  # a child that inherited it would hide our death
                    self._connection = ForeignSocket(int(event["value"]))
                elif event["event"] == zmq.EVENT_CONNECT_RETRIED:
                    self.is_refused = True
                else:
                    failed = self._has_failed(int(event["event"]), now)
        with contextlib.suppress(zmq.ZMQError):
            if failed:  # instead of twenty times a second; after a refusal ZeroMQ would not retry at all
                self._redial_at = now + REDIAL_S
                self._client.disconnect(self.endpoint)
        if self._redial_at is not None and now >= self._redial_at:
            self._redial()
        if failed and self._mechanism is None:
            endpoint, ours = self.endpoint, "NULL" if self._keys is None else "CURVE"
            self._mechanism = aside(lambda: mechanism_of(endpoint, ours))
            self._mechanism.add_done_callback(lambda _: self._wake())
        if self._mechanism is None or not self._mechanism.done():
            return None
        mechanism = None if self._mechanism.exception() else self._mechanism.result()
        is_ours, self._mechanism = self._keys is not None and mechanism == "CURVE", None
        found = self._why(mechanism) if self._greeted or not is_ours else None
        self._greeted = is_ours
        if is_ours and found is None and self._redial_at is not None:
            self._redial()  # to see whether it closes this one, too
        is_new = found is not None and found != self.shut_out
        self.shut_out = found or self.shut_out
        return found if is_new else None

    def _redial(self) -> None:
        self._redial_at = None
        with contextlib.suppress(zmq.ZMQError):
            self._client.connect(self.endpoint)

    def _has_failed(self, event: int, now: float) -> bool:
        if event == DONE:
            self._closed_times, self.shut_out, self._mechanism, self._greeted = 0, "", None, False
            return False
        if event == NO_DETAIL:
            self._closed_first = self._closed_first if self._closed_times else now
            self._closed_times += 1
            return self._closed_times >= CLOSED_TIMES and now - self._closed_first >= CLOSED_S
        return True

    def _why(self, mechanism: str | None) -> str | None:
        if self._keys is not None and mechanism == "CURVE":
            return (
                f"the hub at {self._address} does not know this process's secret: it must be the one that the hub was "
                f"started with (see {FILE_VARIABLE} and {SECRET_VARIABLE})"
            )
        if self._keys is not None and mechanism == "NULL":
            return (
                f"the hub at {self._address} was started without a secret, and this process has one: start the hub "
                f"with the same {FILE_VARIABLE}, or take the secret away from both"
            )
        if mechanism == "CURVE":
            return (
                f"the hub at {self._address} asks for the run's secret: set {FILE_VARIABLE} to the file that it was "
                f"started with (or {SECRET_VARIABLE})"
            )
        return None

    def close(self) -> None:
        """Stop watching, before the client's socket is closed."""
        self._client.disable_monitor()
        self.socket.close()


def mechanism_of(address: str, ours: str = "") -> str | None:
    """Return how the ZeroMQ socket at this address authenticates its peers, "CURVE" or "NULL", by the first bytes of
    its greeting (ZMTP 3); None: it sends no such greeting. Unless that is `ours`, the hub notes it as a handshake that
    it has refused: those of ZeroMQ end unseen where this end was first to see that the mechanisms differ."""
    deadline = time.monotonic() + PROBE_S
    with contextlib.suppress(OSError), socket.create_connection(parse_address(address, "tcp"), PROBE_S) as probe:
        probe.sendall(SIGNATURE)
        greeting = b""
        while len(greeting) < MECHANISM.stop and time.monotonic() < deadline:
            if not (received := probe.recv(MECHANISM.stop - len(greeting))):
                break
            greeting += received
        if len(greeting) < MECHANISM.stop or greeting[:1] != SIGNATURE[:1]:
            return None
        mechanism = greeting[MECHANISM].rstrip(b"\0")
        if mechanism == ours.encode():
            return ours
        with contextlib.suppress(OSError):
            other = b"CURVE" if mechanism == b"NULL" else b"NULL"
            probe.sendall(b"\0" + other.ljust(GREETING_BYTES - len(SIGNATURE) - 1, b"\0"))
            while time.monotonic() < deadline and probe.recv(GREETING_BYTES):
                pass  # until the hub has closed it: it has noted the refusal by then
        return mechanism.decode(errors="replace")
    return None
