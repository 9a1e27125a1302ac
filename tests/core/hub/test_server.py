"""The hub on the network: whoever talks to its port, it answers in kind, says so in its log, and goes on."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq
from hub_peer import ask, peer
from interrupts import Interrupt

from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.client import connection
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import HubUnreachable, ProtocolError, UsageError
from tensorhub_plugins.core.hub import hub
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.operations import problems
from tensorhub_plugins.core.process_lifetime import files_left
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import new_session, resolve
from tensorhub_plugins.core.security import secret
from tensorhub_plugins.core.types import Location, ShardKey


@pytest.fixture
def server() -> Iterator[Server]:
    with start_server() as running:
        yield running


@contextlib.contextmanager
def stranger(server: Server, identity: bytes | None = None) -> Iterator[zmq.Socket]:
    """A ZeroMQ client that may send what it likes."""
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 0)
    connection.setsockopt(zmq.RCVTIMEO, 10_000)
    if identity is not None:
        connection.setsockopt(zmq.IDENTITY, identity)
    connection.connect(server.address)
    try:
        yield connection
    finally:
        connection.close()
        context.term()


def hello(replica: str = "a") -> messages.Hello:
    return messages.Hello("r", "m", replica, 0, 1, Location(), {"tcp": "tcp://127.0.0.1:1"})


@contextlib.contextmanager
def worker(server: Server, replica: str = "a") -> Iterator[HubLink]:
    link = HubLink(
        server.address,
        hello(replica),
        connect_timeout_s=10.0,
        on_source_gone=lambda session: None,
        on_may_release=lambda effect: None,
    )
    try:
        yield link
    finally:
        link.close()


def serves(server: Server) -> bool:
    with stranger(server, new_session()) as connection:
        connection.send(messages.encode(messages.AskStatus(7)))
        return isinstance(messages.decode_from_hub(connection.recv()), messages.Status)


rng = random.Random(2)
HEADER = messages.encode(messages.Bye())[:3]
GARBAGE = {
    "nothing": [b""],
    "random": [rng.randbytes(100)],
    "random behind our magic": [HEADER + rng.randbytes(100)],
    "a request of the web": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "a pickle": [pickle.dumps(os.getcwd)],
    "a pickle behind our magic": [HEADER + pickle.dumps(os.getcwd)],
    "another protocol version": [b"TH\x09" + messages.encode(messages.AskStatus(1))[3:]],
    "what a hub would say": [messages.encode(messages.Unknown())],
    "half a message": [messages.encode(hello())[:20]],
    "two frames": [messages.encode(messages.AskStatus(1)), messages.encode(messages.AskStatus(1))],
    "many frames": [b"x"] * 100,
    "the largest frame": [HEADER + b"\xc1" * (messages.FROM_CLIENT_SIZE_BYTES_MAX - 3)],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_gets_a_typed_refusal_and_a_line_in_the_log(server, caplog, frames):
    with stranger(server, new_session()) as connection:
        connection.send_multipart(frames)
        refused = messages.decode_from_hub(connection.recv())
    assert isinstance(refused, messages.Refused) and (refused.request_id, refused.error) == (0, "ProtocolError")
    assert refused.message
    lines = [r for r in caplog.records if r.name == "tensorhub.hub" and r.levelno == logging.WARNING]
    assert len(lines) == 1 and "refused a message from" in lines[0].getMessage()
    assert serves(server)


def test_a_good_message_without_a_sessions_name_is_refused(server):
    with stranger(server) as connection:  # ZeroMQ makes one of five bytes
        connection.send(messages.encode(messages.AskStatus(1)))
        refused = messages.decode_from_hub(connection.recv())
    assert isinstance(refused, messages.Refused) and "not a tensorhub client" in refused.message


@pytest.mark.parametrize("is_ours", [True, False], ids=["a worker's", "the control"])
def test_what_a_connection_has_sent_that_its_worker_has_replaced_is_not_taken_for_a_strangers(server, caplog, is_ours):
    """A worker connects anew while the hub's process is stopped. Then ZeroMQ gives the former connection a name."""
    with stranger(server) as former:
        former.send(messages.encode(messages.AskStatus(1)) if is_ours else b"GET / HTTP/1.1")
        assert messages.decode_from_hub(former.recv()).error == "ProtocolError"
    assert bool([r for r in caplog.records if "refused a message from" in r.getMessage()]) != is_ours


def test_a_frame_beyond_the_limit_is_never_received(server):
    """ZeroMQ closes the connection when the frame is announced; the hub hears nothing of it."""
    with stranger(server, new_session()) as connection:
        connection.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = connection.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connection.send(bytes(messages.FROM_CLIENT_SIZE_BYTES_MAX + 1))
        assert monitor.poll(10_000), "the hub took it"
        connection.disable_monitor()
        monitor.close()
    assert serves(server)


def test_bytes_that_are_not_zeromq_do_no_harm(server):
    host, port = server.address.removeprefix("tcp://").split(":")
    for data in (rng.randbytes(10_000), b"\xff" + b"\x00" * 8 + b"\x7f", b"", b"\x01"):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(data)
    assert serves(server)


def test_a_flood_of_garbage_does_not_fill_the_log(server, caplog):
    with stranger(server, new_session()) as connection:
        for _ in range(500):
            connection.send(b"garbage")
        for _ in range(500):
            connection.recv()
    seconds = 1 + int(caplog.records[-1].created - caplog.records[0].created)
    lines = [r for r in caplog.records if "refused a message" in r.getMessage()]
    assert 1 <= len(lines) <= 10 * (seconds + 1)


def test_a_worker_is_not_disturbed_by_strangers(server):
    with worker(server) as link, stranger(server, new_session()) as connection:
        for frames in GARBAGE.values():
            connection.send_multipart(frames)
            connection.recv()
        reply = link.ask(lambda number: messages.Retain(number, 3), time.monotonic() + 10).result(10)
        assert isinstance(reply, messages.Done)


def test_a_worker_that_is_refused_hears_why(server, monkeypatch):
    bad = messages.Hello("r", "m", "a", 3, 2, Location(), {})
    with pytest.raises(UsageError, match="shard 3 of 2: shards count from 0"):
        HubLink(server.address, bad, connect_timeout_s=10.0, on_source_gone=id, on_may_release=id)
    malformed = messages.Hello("", "m", "a", 0, 1, Location(), {})
    with pytest.raises(UsageError, match=r"what the hub is told \(Hello\) has a value of no use"):
        HubLink(server.address, malformed, connect_timeout_s=10.0, on_source_gone=id, on_may_release=id)
    monkeypatch.setattr(connection, "_checked", lambda message: message)
    with pytest.raises(ProtocolError, match="malformed"):
        HubLink(server.address, malformed, connect_timeout_s=10.0, on_source_gone=id, on_may_release=id)


def test_a_fault_of_ours_starts_the_hub_afresh_and_the_workers_tell_it_all(server, caplog, monkeypatch):
    """Rule 6 for bugs: one poisoned message costs its sender an error and everybody else nothing."""
    true_handle = hub.Hub.handle
    key = ShardKey(1, "checkpoint")

    def handle(self, event, now):
        if isinstance(event, hub.Received) and isinstance(event.message, messages.Retain):
            self.registry.workers.clear()  # half a state, to make it worse
            raise KeyError("a bug")
        return true_handle(self, event, now)

    monkeypatch.setattr(hub.Hub, "handle", handle)
    with worker(server) as link:
        deadline = time.monotonic() + 20
        holding = messages.Holding(key, b"r" * 16, 10)
        link.ask(lambda number: messages.Publish(number, holding), deadline).result(10)
        with pytest.raises(ProtocolError, match="the hub failed over this"):
            link.ask(lambda number: messages.Retain(number, 3), deadline).result(10)
        while True:  # until the next heartbeat has been answered with Unknown, and that with Hello
            versions = link.ask(messages.AskVersions, deadline).result(10).versions
            if versions:
                break
        assert versions[0].version == 1 and versions[0].layouts == {"checkpoint": ("a/0",)}
    assert any("starts afresh" in record.getMessage() and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("step_s", [60.0, 0.5], ids=["it stands still", "the control"])
def test_a_hub_that_stood_still_gives_nobody_up_for_that(step_s: float) -> None:
    """Nobody speaks meanwhile but one that asks for the status, in whose sight the time passes."""
    now = [100.0]
    with Server(clock=lambda: now[0]) as running, peer(running.address) as here, stranger(running) as other:
        welcome = ask(here, hello())
        assert isinstance(welcome, messages.Welcome)
        for _ in range(int(60.0 / step_s)):
            now[0] += step_s
            other.send(messages.encode(messages.AskStatus(7)))
            other.recv()
        answer = ask(here, messages.Heartbeat(welcome.hub, 0))
        assert isinstance(answer, messages.Alive if step_s == 60.0 else messages.Unknown)


def test_the_address_it_got_and_one_it_cannot_have(server):
    assert server.address.startswith("tcp://127.0.0.1:") and not server.address.endswith(":0")
    with pytest.raises(UsageError, match="cannot listen on .*choose another address or port"):
        Server(server.address)
    for bad in ("nonsense", "tcp://", "tcp://127.0.0.1", "tcp://:1", "ipc:///x", "tcp://127.0.0.1:99999", "tcp://h:x"):
        with pytest.raises(UsageError, match="is no hub address: use tcp://host:port"):
            Server(bad)
        with pytest.raises(UsageError, match="is no hub address: use tcp://host:port"):
            HubLink(bad, hello(), connect_timeout_s=1.0, on_source_gone=id, on_may_release=id)
    with pytest.raises(UsageError, match="cannot listen on"):
        Server("tcp://no.such.host.invalid:1", insecure=True)


def test_a_name_that_has_both_is_looked_for_where_it_was(monkeypatch):
    """First at its IPv4 address: no hub needs to listen at the other one."""
    hosts = {"v4": ["1.2.3.4"], "v6": ["::1"], "both": ["::1", "1.2.3.4", "::1"]}

    def getaddrinfo(host, *_, flags=0, **__):
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        return [(0, 0, 0, "", (each, 0)) for each in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found = {name: resolve(name, Deadline.after(5)) for name in hosts}
    assert found == {"v4": ("1.2.3.4",), "v6": ("::1",), "both": ("1.2.3.4", "::1")}


@pytest.mark.slow
def test_ten_restarts_of_the_hub_are_seen():
    with start_server() as server:
        address, last = server.address, server._hub.session
        link = HubLink(
            address, hello(), connect_timeout_s=60.0, on_source_gone=id, on_may_release=lambda effect: None, keys=None
        )
    try:
        for count in range(1, 11):
            with start_server(address) as server:
                deadline = time.monotonic() + 60.0
                while link._machine.hub in (last, None) and time.monotonic() < deadline:
                    time.sleep(0.01)
                last, report = server._hub.session, fetch_status(address)
                assert report["restarts"] == count
        (problem,) = problems.find(report)
        assert problem.kind == "restarted" and "10 times in ten minutes" in problem.what
    finally:
        link.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(HubUnreachable, match="start one with `tensorhub server`, or correct the address") as caught:
        HubLink(address, hello(), connect_timeout_s=0.3, on_source_gone=id, on_may_release=id)
    assert time.monotonic() - began < 5 and (caught.value.peer, caught.value.timeout_s) == (address, 0.3)


def test_a_request_to_a_hub_that_went_away_ends_by_its_deadline():
    server = start_server()
    with worker(server) as link:
        server.close()
        with pytest.raises(HubUnreachable, match="the hub does not answer|did not decide in time"):
            link.ask(messages.AskVersions, time.monotonic() + 0.1).result(20)


def test_a_closed_link_says_so_and_ends_who_waits(server):
    with worker(server) as link:
        waiting = link.ask(lambda n: messages.Wait(n, 9, 0, 60.0), time.monotonic() + 60)
        link.close()
        link.close()
        with pytest.raises(UsageError, match="closed"):
            waiting.result(10)
        with pytest.raises(UsageError, match="the client is closed"):
            link.ask(messages.AskVersions, time.monotonic() + 1)
        link.end_lease(1)  # nothing to end any more, and no error


@pytest.mark.slow
def test_closing_leaves_no_thread_and_no_descriptor():
    start_server().close()  # what is made once stays
    before = threads_and_descriptors()
    for _ in range(3):
        server = start_server()
        with worker(server):
            pass
        server.close()
        server.close()
    assert not more_than(before)
    running = start_server()  # the control: an open one is seen
    assert more_than(before)
    running.close()


def more_than(before: tuple[list[str], int]) -> bool:
    """Whether there are threads or descriptors that were not there; what earlier tests have left may go meanwhile."""
    threads, descriptors = threads_and_descriptors()
    return bool(Counter(threads) - Counter(before[0])) or descriptors > before[1]


def threads_and_descriptors() -> tuple[list[str], int]:
    gc.collect()  # what earlier tests have left
    return sorted(t.name for t in threading.enumerate()), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(os.sched_getscheduler(0) != os.SCHED_OTHER, reason="runs at another priority, which the hub keeps")
def test_the_threads_of_zeromq_do_not_interrupt_the_hubs_own():
    def policies() -> dict[int, int]:
        found = {}
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # one of an earlier test's has ended meanwhile
                found[thread] = os.sched_getscheduler(thread)
        return found

    before = policies()
    wanted = [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_BATCH]  # the hub's; ZeroMQ's reaper and input/output
    deadline = time.monotonic() + 10
    with start_server():
        while True:  # a thread of ZeroMQ's sets its own policy, some time after it has started
            after = policies()
            started = sorted(policy for thread, policy in after.items() if thread not in before)
            if started == wanted or time.monotonic() > deadline:
                break
    assert all(after.get(thread, policy) == policy for thread, policy in before.items())
    assert started == wanted


# --- as many as the system permits ---

HUB_OF_FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from tensorhub_plugins.core.hub.server import start_server
with start_server() as server:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], server.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def hub_of_few_files(hard: int) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-c", HUB_OF_FEW_FILES, str(hard)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        soft, address = process.stdout.readline().split()
        yield int(soft), address
        process.communicate()


@pytest.mark.parametrize("hard", [160, 1000])
def test_a_hub_takes_as_many_workers_as_it_may_and_says_why_it_takes_no_more(hard: int) -> None:
    """With a soft limit of 1,024 files 1,014 workers were welcomed, and the others, and `status`, heard nothing."""
    with hub_of_few_files(hard) as (soft, address), contextlib.ExitStack() as stack:
        assert soft == hard
        answers: list[messages.HubMessage] = []
        while len(answers) < 100 and not isinstance((answers or [None])[-1], messages.Refused):
            worker = stack.enter_context(peer(address))
            answers.append(
                ask(worker, messages.Hello("r", "m", f"a{len(answers)}", 0, 1, Location(), {}, request_id=1))
            )
        report = fetch_status(address)
        if hard == 1000:  # the control: more than the soft limit it was started with
            assert all(isinstance(answer, messages.Welcome) for answer in answers)
            assert "more connections" not in status_text({**report, "connections_left": 1000})
            return
        assert len(answers) > 30 and all(isinstance(answer, messages.Welcome) for answer in answers[:-1])
        assert "raise its limit of open files" in getattr(answers[-1], "message", "")
        assert 0 < report["connections_left"] < hard and "room for" in status_text(report)


def test_that_nobody_else_can_connect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with start_server() as running:
        most = running._files_max
        for free in (100, 1, 0, 2, 40, 1, 100, 1):
            running._files_max = most - files_left(most) + free
            running._check_files()
            running._files_max = most
    assert caplog.text.count("no more connections can be accepted") == 2


@pytest.mark.parametrize("within", ["_listen", "__init__", "start_server"])
def test_an_interrupted_start_leaves_nothing_behind(within: str) -> None:
    """At every line of it. A context that is collected with its sockets open blocks, which would end this test."""
    at, keys = 1, secret.generate()
    start_server(keys=keys).close()  # what ZeroMQ opens once
    files = len(os.listdir("/proc/self/fd"))
    gc.collect()
    gc.freeze()  # what is collected is what the interrupted start has left
    while True:
        interrupt = Interrupt("caller", at, within)
        started = interrupt.during(lambda: start_server(keys=keys))
        if started is not None:
            break
        gc.collect()
        assert "tensorhub-hub" not in [thread.name for thread in threading.enumerate()]
        assert len(os.listdir("/proc/self/fd")) <= files
        at += 1
    gc.unfreeze()
    started.close()
    assert at > 1
