"""Sources with several endpoints: which is tried first, which is taken, and what another one costs."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from transport_helpers import KEY, served, soon

from tensorhub_plugins.core.deadline import TIMEOUT_S_MAX, Deadline
from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.protocol import address
from tensorhub_plugins.core.transports import TransportLimits, tcp
from tensorhub_plugins.core.transports.stream import tcp_socket
from tensorhub_plugins.core.transports.stream.channel import Full
from tensorhub_plugins.core.transports.tcp import FAR_STREAMS, TcpTransport
from tensorhub_plugins.core.transports.ways import KNOWN_MAX, MEASURED_S, SHUT_S, WAYS, Ways

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
NOW = 1000.0
SOON_S = 30.0


def test_as_told_unless_another_is_clearly_faster_and_those_that_let_nobody_in_last() -> None:
    known = Ways()
    assert known.order([A, B, C], NOW) == [A, B, C] == known.unmeasured([A, B, C], NOW)
    known.shut(A, NOW)
    assert known.order([A, B, C], NOW) == [B, C, A] and known.unmeasured([A, B, C], NOW) == [B, C]
    known.measured(B, 100.0, NOW)
    known.measured(C, 120.0, NOW)
    assert known.order([A, B, C], NOW) == [B, C, A] and known.unmeasured([A, B, C], NOW) == []
    known.measured(C, 126.0, NOW)
    assert known.order([A, B, C], NOW) == [C, B, A]
    later = NOW + SHUT_S
    assert known.order([A, B, C], later) == [C, A, B] and known.unmeasured([A, B, C], later) == [A, B, C]
    known.shut(C, later)
    assert known.order([A, B, C], later)[-1] == C
    assert known.order([A, B, C], NOW + MEASURED_S) == [A, B, C] == known.unmeasured([A, B, C], NOW + MEASURED_S)
    assert known.unmeasured([A], NOW + MEASURED_S) == [], "there is nothing to compare"


def test_of_those_that_failed_the_one_that_failed_first_is_tried_first() -> None:
    """Each in turn, so that one that works again is found."""
    known = Ways()
    for number, endpoint in enumerate((A, B, C)):
        known.shut(endpoint, NOW + number)
    assert known.order([C, B, A], NOW + 2) == [A, B, C]
    known.shut(A, NOW + 3)
    assert known.order([A, B, C], NOW + 3) == [B, C, A]


def test_several_threads_note_what_they_have_found() -> None:
    """With as many endpoints as are remembered, each has one forgotten: a few thousand workers in a run do so."""
    known, problems = Ways(), list[BaseException]()

    def note(thread: int) -> None:
        try:
            for number in range(4 * KNOWN_MAX):
                known.measured(f"tcp://{thread}:{number}", 1.0, NOW)
        except BaseException as error:
            problems.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=note, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems and len(known._rates) <= KNOWN_MAX


def test_what_is_known_is_bounded_and_the_oldest_is_forgotten() -> None:
    known = Ways()
    for number in range(KNOWN_MAX + 1):
        known.measured(f"tcp://h:{number}", 1.0 + number, NOW)
    assert known.order(["tcp://h:0", "tcp://h:1"], NOW) == ["tcp://h:1", "tcp://h:0"]
    assert known.unmeasured(["tcp://h:0", "tcp://h:1"], NOW) and not known.unmeasured(["tcp://h:1", "tcp://h:2"], NOW)


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port of 127.0.0.1 where nobody answers: its queue of connections is full."""
    with socket.socket() as listening, socket.socket() as waiting, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting.connect(listening.getsockname())
        second.setblocking(False)
        second.connect_ex(listening.getsockname())
        yield int(listening.getsockname()[1])


def shut_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reached(*endpoints: str, timeout_s: float = SOON_S) -> str:
    with contextlib.closing(TcpTransport()) as reader:
        link = reader.connect(",".join(endpoints), deadline=time.monotonic() + timeout_s)
        assert link.open(KEY, 1, deadline=soon()).segment_count
        link.close()
        return link.peer


def test_one_that_refuses_or_does_not_answer_costs_little_and_is_asked_last() -> None:
    with served(TcpTransport()) as (_, here), silent() as port:
        nowhere, refuses = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{shut_port()}"
        assert reached(nowhere, refuses, here) == here
        now = time.monotonic()
        assert WAYS.order([nowhere, refuses, here], now)[0] == here == WAYS.order([refuses, here], now)[0]
        # The control: alone it costs all the time there is, and the error is what it was.
        with pytest.raises(SourceLost, match="cannot connect: timed out") as alone:
            reached(nowhere, timeout_s=0.3)
        assert alone.value.peer == nowhere
        with pytest.raises(SourceLost, match="cannot connect: .*Connection refused") as none:
            reached(refuses, refuses.replace("127.0.0.1", "127.0.0.2"))
        assert none.value.peer is not None and none.value.peer.count(refuses) == 1


def test_the_others_are_begun_beside_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their order, not by the clock: the first one never ends, and the second is begun all the same."""
    begun: list[int] = []
    begin = address._begin_connect
    monkeypatch.setattr(address, "_begin_connect", lambda ip, port: begun.append(port) or begin(ip, port))
    with silent() as nowhere, socket.create_server(("127.0.0.1", 0)) as listening:
        there = listening.getsockname()[1]
        ways_ = [("127.0.0.1", nowhere), ("127.0.0.1", there), ("127.0.0.1", shut_port())]
        sock, which = address.first_connected(ways_, Deadline.after(SOON_S))
        sock.close()
        assert (which, begun) == (1, [nowhere, there]), "and the third one is not"


def test_a_deadline_may_be_as_far_as_any() -> None:
    """poll(2) takes 24 days at most."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sock, _ = address.first_connected([listening.getsockname()], Deadline.after(TIMEOUT_S_MAX))
        sock.close()


def test_another_service_at_the_address_is_passed_over() -> None:
    """10.0.0.5 of another network, for example."""

    def greet() -> None:
        with contextlib.suppress(OSError):
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(64))
                sock.recv(1 << 10)

    with served(TcpTransport()) as (_, here), socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        ssh = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert reached(ssh, here) == here
        assert WAYS.order([ssh, here], time.monotonic()) == [here, ssh]
        thread.join(SOON_S)


def test_one_that_says_that_it_is_full_is_full_whatever_is_at_the_other_addresses() -> None:
    """Else the hub is told that the source refuses connections, or cannot be connected to. The control: another worker
    has that address here, and the source is at the other one."""
    limits = TransportLimits(readers_per_peer_max=1)
    with (
        served(TcpTransport(limits=limits)) as (_, full),
        served(TcpTransport()) as (_, here),
        silent() as port,
        contextlib.closing(TcpTransport()) as reader,
    ):
        link = reader.connect(full, deadline=soon())
        assert link.open(KEY, 1, deadline=soon())
        for other in (f"tcp://127.0.0.1:{shut_port()}", f"tcp://127.0.0.1:{port}"):
            began = time.monotonic()
            with pytest.raises(SourceLost, match="admits no more readers") as lost:
                reader.connect(f"{full},{other}", deadline=soon())
            assert isinstance(lost.value.__cause__, Full) and time.monotonic() < began + 2 * tcp_socket.ACCEPTED_S
        assert reached(full, here) == here


def test_a_name_that_is_not_looked_up_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, release = socket.getaddrinfo, threading.Event()

    def never(host: str, *arguments: object, **options: object) -> object:
        if host == "slow" and options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "it is no number")
        if host == "slow":
            release.wait(SOON_S)
            raise socket.gaierror(socket.EAI_AGAIN, "it takes too long")
        return asked(host, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", never)
    try:
        with served(TcpTransport()) as (_, here):
            assert reached("tcp://slow:1", here) == here
    finally:
        release.set()


@pytest.mark.slow
@pytest.mark.parametrize("nowhere", ["silent", "refuses", "unknown"])
def test_a_name_that_is_looked_up_late_has_its_turn(monkeypatch: pytest.MonkeyPatch, nowhere: str) -> None:
    """Beside an address that this reader does not reach. It was never looked at, at every try."""
    asked, looked_up = socket.getaddrinfo, threading.Event()

    def late(host: str, *arguments: object, **options: object) -> object:
        if host == "unknown" or (host == "late" and options.get("flags")):
            raise socket.gaierror(socket.EAI_NONAME, "there is none")
        if host == "late":
            looked_up.wait(SOON_S)
        return asked("127.0.0.1" if host == "late" else host, *arguments, **options)  # type: ignore[arg-type]

    def connects(addresses: list[tuple[str, int]], deadline: Deadline) -> object:
        try:
            return first_connected(addresses, deadline)
        finally:
            looked_up.set()

    first_connected = tcp_socket.first_connected
    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(tcp_socket, "first_connected", connects)
    with served(TcpTransport()) as (_, here), silent() as port:
        there = here.replace("127.0.0.1", "late")
        refuses = f"tcp://127.0.0.1:{shut_port()}"
        bad = {"silent": f"tcp://127.0.0.1:{port}", "refuses": refuses, "unknown": "tcp://unknown:1"}[nowhere]
        assert reached(bad, there) == there


def test_all_streams_lead_to_one_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """To whichever let the first one in: another one may lead to another worker."""
    asked = list[str]()
    connect = tcp.connect

    def noted(endpoint: str, scheme: str, **options: object) -> object:
        asked.append(endpoint)
        return connect(endpoint, scheme, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tcp, "connect", noted)
    with served(TcpTransport("127.0.0.2,127.0.0.3")) as (_, here), contextlib.closing(TcpTransport()) as reader:
        both = f"{here},{here.replace('127.0.0.2', '127.0.0.3')}"
        reader.connect(both, deadline=soon(), far=True).close()
        assert asked == [both, *[here] * (FAR_STREAMS - 1)]


def test_a_source_has_refused_if_it_has_at_each_of_its_addresses() -> None:
    """The hub then takes it for ended. One of several may be another host's, seen from here."""
    refuses, no_way = ("127.0.0.1", shut_port()), ("255.255.255.255", 1)
    for addresses in ([refuses, no_way], [no_way, refuses]):
        with pytest.raises(OSError, match="unreachable") as some:
            address.first_connected(addresses, Deadline.after(SOON_S))
        assert not isinstance(some.value, ConnectionRefusedError)
    with pytest.raises(ConnectionRefusedError):
        address.first_connected([refuses, refuses], Deadline.after(SOON_S))


def test_several_addresses_are_listened_on_at_one_port_and_no_others() -> None:
    with served(TcpTransport("127.0.0.2,127.0.0.3")) as (_, endpoint):
        assert endpoint.startswith("tcp://127.0.0.2:")
        for host in ("127.0.0.2", "127.0.0.3"):
            assert reached(there := endpoint.replace("127.0.0.2", host)) == there
        with pytest.raises(SourceLost, match="refused"):
            reached(endpoint.replace("127.0.0.2", "127.0.0.4"))
    with served(TcpTransport("127.0.0.2,192.0.2.1")) as (_, endpoint):  # behind address translation: all of them
        assert reached(endpoint.replace("127.0.0.2", "127.0.0.4"))


def test_a_port_that_is_taken_at_one_of_them_is_not_taken() -> None:
    (taken,) = tcp_socket.listen(["127.0.0.3"])
    port = taken.getsockname()[1]
    with taken:
        listeners = tcp_socket.listen(["127.0.0.2", "127.0.0.3"], range(port, min(port + 20, 65536)))
        ports = {each.getsockname()[1] for each in listeners}
        assert len(listeners) == 2 and len(ports) == 1 and port not in ports
        for each in listeners:
            each.close()
    first = socket.create_server(("127.0.0.2", port))  # nothing is left open there by the failed try
    first.close()
