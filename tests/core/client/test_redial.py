"""A hub that is silent, or somewhere else: clients connect anew, and to the next of its addresses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from hub_limits import AT_ONCE
from zmq.utils.monitor import recv_monitor_message

from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.errors import HubUnreachable, UsageError
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey

HELD = m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 1)
HELLO = m.Hello("r", "m", "a", 0, 1, Location(), {})


@contextlib.contextmanager
def link(address: str, *, redial_s: float | None, connect_timeout_s: float = 30.0) -> Iterator[HubLink]:
    one = HubLink(
        address, HELLO, connect_timeout_s=connect_timeout_s, on_source_gone=id,
        on_may_release=lambda effect: None, redial_s=redial_s,
    )  # fmt: skip
    try:
        yield one
    finally:
        one.close()


def ask(one: HubLink, make: object, seconds: float = 30.0) -> m.Reply:
    return one.ask(make, time.monotonic() + seconds).result()


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{closed.getsockname()[1]}"


def test_after_so_many_seconds_without_a_word_and_again_after_as_many() -> None:
    session, redials = s.Session(HELLO, 0.0), []
    session.handle(s.Heard(m.Welcome(b"h" * 16, 1.0, 15.0, 0)), 10.0)
    for tick in range(11, 100):
        redials += [tick for effect in session.handle(s.Tick(), tick) if isinstance(effect, s.Redial)]
        if tick == 60:
            session.handle(s.Heard(m.Alive()), tick)
    assert redials == [31, 52, 81]


@pytest.mark.slow
@pytest.mark.parametrize("knows_both", [True, False], ids=["both addresses", "control: one"])
def test_a_hub_that_comes_back_at_another_address_is_found_again(knows_both: bool) -> None:
    with contextlib.ExitStack() as stack:
        first = start_server(limits=AT_ONCE)
        other = start_server(limits=AT_ONCE)
        stack.callback(other.close)
        both = f"{first.address},{other.address}" if knows_both else first.address
        one = stack.enter_context(link(both, redial_s=0.3))
        ask(one, lambda n: m.Publish(n, HELD))
        assert [v.version for v in ask(one, m.AskVersions).versions] == [1]
        first.close()
        if not knows_both:
            with pytest.raises(HubUnreachable):
                ask(one, m.AskVersions, 2.0)
            return
        while not ask(one, m.AskVersions).versions:  # until its Hello has told it all
            pass
        assert one.address == other.address
        assert fetch_status(both, timeout_s=1.0)["models"][0]["workers"]


def test_the_first_address_need_not_be_the_one() -> None:
    with nobody() as wrong, start_server() as hub, link(f"{wrong},{hub.address}", redial_s=0.3) as one:
        assert isinstance(ask(one, lambda n: m.Retain(n, 1)), m.Done) and one.address == hub.address


@pytest.mark.parametrize("refuses", [True, False], ids=["it refuses", "control: it is silent"])
def test_an_address_that_refuses_is_left_at_once(refuses: bool) -> None:
    """A call may have less time than one that is silent is given, and no hub would be blamed for it."""
    with contextlib.ExitStack() as stack:
        wrong = [stack.enter_context(nobody()) for _ in range(3)]
        if not refuses:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            wrong[1] = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        hub = stack.enter_context(start_server())
        heard = link(",".join([*wrong, hub.address]), redial_s=60.0, connect_timeout_s=30.0 if refuses else 1.0)
        if refuses:
            assert stack.enter_context(heard).address == hub.address
        else:
            with pytest.raises(HubUnreachable, match="no hub answers"), heard:
                pass


def test_addresses_that_have_all_refused_are_tried_again() -> None:
    """The hub and its clients are started at once, and its name has two addresses."""
    with nobody() as first, nobody() as second:
        port = first.rpartition(":")[2]
    hubs = list[Server]()
    starts = threading.Timer(0.7, lambda: hubs.append(start_server(f"tcp://127.0.0.1:{port}")))
    starts.start()
    try:
        with link(f"{first},{second}", redial_s=60.0) as one:
            assert one.address == first
    finally:
        starts.join()
        for hub in hubs:
            hub.close()


@pytest.mark.parametrize(("connect_timeout_s", "hasty"), [(0.0, True), (1.0, False)])
def test_who_did_not_wait_for_the_hub_is_told(connect_timeout_s: float, hasty: bool) -> None:
    with nobody() as address, pytest.raises(HubUnreachable, match="no hub answers") as caught:
        link(address, redial_s=None, connect_timeout_s=connect_timeout_s).__enter__()
    assert ("or wait for longer than 0 s" in str(caught.value)) == hasty


def test_each_address_is_checked() -> None:
    with (
        pytest.raises(UsageError, match="is no hub address: use tcp://host:port"),
        link("tcp://a:1,b:2", redial_s=None),
    ):
        pass


@pytest.mark.parametrize("listens", [True, False], ids=["another program", "control: nobody"])
def test_another_program_is_no_hub_that_does_not_run(listens: bool) -> None:
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(nobody())
        if listens:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            address = f"tcp://127.0.0.1:{port}"
        for call in (
            lambda: fetch_status(address, timeout_s=0.5),
            lambda: stack.enter_context(link(address, redial_s=None, connect_timeout_s=0.5)),
        ):
            with pytest.raises(HubUnreachable, match=f"no hub answers at {address}") as error:
                call()
            assert ("where another program listens" in str(error.value)) == listens


@pytest.mark.parametrize(("redial_s", "connections"), [(0.1, 3), (60.0, 1)], ids=["it is", "control"])
def test_a_connection_that_brings_nothing_is_replaced(redial_s: float, connections: int) -> None:
    """A hub that takes everything and says nothing: its socket lives, and answers ZeroMQ's own heartbeats."""
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        refused = pytest.raises(HubUnreachable, match="no hub answers")
        with refused, link(address, redial_s=redial_s, connect_timeout_s=1.5):
            pass
        accepted = 0
        while monitor.poll(0):
            recv_monitor_message(monitor)
            accepted += 1
        assert accepted >= connections and (connections > 1 or accepted == 1)
        router.disable_monitor()
        monitor.close()
    context.term()
