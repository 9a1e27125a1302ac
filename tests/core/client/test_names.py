"""Hosts' names: a resolver that never answers keeps nobody beyond its deadline, and a hub that moves is found again."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from client_stage import LATE_S, SOON_S
from hub_limits import AT_ONCE

from tensorhub_plugins.core import Client, HubUnreachable, TensorHubError, UsageError, start_server
from tensorhub_plugins.core.cli import direct, fetch_status, main
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.hub import exposition
from tensorhub_plugins.core.protocol.address import LOOKUPS_MAX, lookup, resolve
from tensorhub_plugins.core.transports import create

HANGS_S = 60.0  # as long as a lookup lasts where no name server answers, more than twice what a call is given here


class Resolver:
    """Stands for the system's: `hosts` is what it knows. A name that is not there is never answered."""

    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}
        self.asked: list[str] = []
        self.goes_on = threading.Event()
        self._system = socket.getaddrinfo

    def __call__(self, host: str, port: Any, *arguments: Any, **options: Any) -> Any:
        try:
            options_here = {**options, "flags": socket.AI_NUMERICHOST}
            return self._system(host, port, *arguments, **options_here)
        except socket.gaierror:
            if options.get("flags"):
                raise
        self.asked.append(host)
        if host not in self.hosts:
            self.goes_on.wait(HANGS_S)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._system(self.hosts[host], port, *arguments, **options)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    stand_in = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", stand_in)
    yield stand_in
    stand_in.goes_on.set()


def ends_in_time(call: Callable[[], Any], timeout_s: float = 1.0) -> TensorHubError:
    began = time.monotonic()
    with pytest.raises(TensorHubError) as caught:
        call()
    assert time.monotonic() - began < timeout_s + LATE_S < HANGS_S
    return caught.value


def client(address: str, **options: Any) -> Client:
    return Client(address, run="r", model="m", replica="a", **{"transports": ("shm",)} | options)


def test_a_client_whose_hub_has_a_name_that_is_never_answered(resolver):
    error = ends_in_time(lambda: client("tcp://hub:7070", connect_timeout_s=1))
    assert isinstance(error, HubUnreachable)
    assert "cannot be looked up now: the name 'hub' was not looked up in time" in str(error)
    error = ends_in_time(lambda: client("tcp://hub:7070", connect_timeout_s=1, advertise_host="127.0.0.1"))
    assert isinstance(error, HubUnreachable) and error.peer == "tcp://hub:7070"
    assert resolver.asked == ["hub"], "who asks meanwhile shares the thread"


def test_a_host_of_its_own_that_is_never_answered(resolver):
    with start_server(limits=AT_ONCE) as hub:
        error = ends_in_time(lambda: client(hub.address, transports=("tcp",), advertise_host="me"), timeout_s=3.0)
    assert "advertise_host='me' is not an address: the name 'me' was not looked up in time" in str(error)


def test_a_source_whose_name_is_never_answered_is_lost_in_time(resolver):
    tcp = create("tcp", advertise_host="127.0.0.1")
    try:
        error = ends_in_time(lambda: tcp.connect("tcp://trainer:1", deadline=time.monotonic() + 1))
        assert isinstance(error, SourceLost) and "the name 'trainer' was not looked up in time" in str(error)
    finally:
        tcp.close()


COMMANDS = {
    "status": ["status"],
    "pin": ["pin", "1", "--model", "m"],
    "unpin": ["unpin", "--model", "m"],
    "withdraw": ["withdraw", "1", "--model", "m"],
    "top": ["top"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("address", ["tcp://hub:7070", "tcp://hub:7070,tcp://other:7070"], ids=["one", "several"])
def test_every_command_ends_in_time_and_says_why(resolver, capsys, command, address):
    began = time.monotonic()
    status = 2 if command in ("status", "top") else 1
    assert main([*COMMANDS[command], "--hub", address, "--timeout", "1"]) == status
    assert time.monotonic() - began < 1 + LATE_S
    assert "cannot be looked up now" in (text := capsys.readouterr().err) and "start one" not in text


def test_what_is_measured_and_tried_waits_for_no_resolver_and_blames_no_peer(resolver, capsys):
    with start_server() as hub:
        for words in (["bench", "peer"], ["doctor", "machine", "--hub", hub.address, "--with", "peer"]):
            began = time.monotonic()
            assert main([*words, "--timeout", "1"]) == 1
            assert time.monotonic() - began < 1 + LATE_S
            text = "".join(capsys.readouterr())
            assert "the name 'peer' was not looked up in time" in text and "start `tensorhub" not in text


@pytest.mark.slow
def test_the_figures_wait_for_no_resolver(resolver, monkeypatch):
    def reverse(*_: Any) -> Any:
        raise AssertionError("whose full name nobody needs")

    monkeypatch.setattr(socket, "gethostbyaddr", reverse)
    with start_server() as hub:
        for host in ("127.0.0.1", "0.0.0.0", "::1", "[::1]"):
            with exposition.served(hub, host, 0) as url, urllib.request.urlopen(url, timeout=SOON_S) as answer:
                assert "tensorhub_hub_answers 1.0" in answer.read().decode()
        began = time.monotonic()
        refused = pytest.raises(UsageError, match="not looked up in time.*--metrics-host")
        with refused, exposition.served(hub, "me", 0, lookup_s=0.5):
            pass
        assert time.monotonic() - began < 1 + LATE_S


def test_a_name_that_is_none_is_said_at_once(monkeypatch, capsys):
    def unknown(host: str, *_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for call in (
        lambda: client("tcp://no-such-host:7070", connect_timeout_s=SOON_S),
        lambda: client("tcp://no-such-host:7070", connect_timeout_s=SOON_S, advertise_host="127.0.0.1"),
        lambda: fetch_status("tcp://no-such-host:7070", timeout_s=SOON_S),
    ):
        assert isinstance(error := ends_in_time(call, 0.0), UsageError)
        assert "correct the host's name ([Errno -2] Name or service not known)" in str(error)
    assert main(["status", "--hub", "tcp://no-such-host:7070"]) == 2
    assert "Name or service not known" in capsys.readouterr().err


def test_an_address_to_which_there_is_no_route_is_said_at_once_and_no_name_is_blamed():
    """The system forbids to connect to a broadcast address, as to one that a rule of its routes prohibits."""
    address = "tcp://255.255.255.255:7070"
    for call in (
        lambda: client(address, connect_timeout_s=SOON_S),
        lambda: client(address, connect_timeout_s=SOON_S, advertise_host="127.0.0.1"),
        lambda: fetch_status(address, timeout_s=SOON_S),
        lambda: direct(address, "r", "m", "pin", 1, SOON_S),
    ):
        assert isinstance(error := ends_in_time(call, 0.0), UsageError)
        assert "see this host's routes, firewall and sandbox" in str(error) and "name" not in str(error)


CALLS: dict[str, Callable[[Client], Any]] = {
    "publish": lambda c: c.publish(7, {"w": torch.ones(3)}, timeout_s=1),
    "replicate": lambda c: c.replicate({"w": torch.ones(3)}, 1, timeout_s=1),
    "fetch": lambda c: c.fetch(timeout_s=1),
    "wait": lambda c: c.wait(9, timeout_s=1),
    "target": lambda c: c.target(timeout_s=1),
    "versions": lambda c: c.versions(timeout_s=1),
    "retain": lambda c: c.retain(timeout_s=1),
    "pin": lambda c: c.pin(4, timeout_s=1),
    "withdraw": lambda c: c.withdraw(4, timeout_s=1),
    "begin": lambda c: c.begin(1, timeout_s=1),
}


@pytest.mark.slow
def test_every_call_ends_in_time_though_the_hub_is_gone_and_its_name_is_not_answered(resolver):
    resolver.hosts["hub"] = "127.0.0.1"
    with start_server(limits=AT_ONCE) as hub:
        one = client(hub.address.replace("127.0.0.1", "hub"))
    del resolver.hosts["hub"]
    while resolver.asked.count("hub") < 3:  # for the address to advertise, to connect, and since it is silent
        time.sleep(0.01)
    with ThreadPoolExecutor(len(CALLS)) as threads:
        errors = threads.map(lambda call: ends_in_time(lambda: call(one)), CALLS.values())
        assert {name: type(error) for name, error in zip(CALLS, errors, strict=True)} == dict.fromkeys(
            CALLS, HubUnreachable
        )
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < LATE_S


@pytest.mark.slow
def test_a_hub_that_moves_behind_its_name_is_found_again(resolver):
    resolver.hosts["hub"] = "127.0.0.1"
    first = start_server(limits=AT_ONCE)
    address = first.address.replace("127.0.0.1", "hub")
    with client(address) as one:
        one.publish(1, {"w": torch.ones(3)})
        first.close()
        with start_server(first.address.replace("127.0.0.1", "127.0.0.2"), limits=AT_ONCE) as other:
            with pytest.raises(HubUnreachable):  # the control: where it was nobody is
                one.versions(timeout_s=1)
            resolver.hosts["hub"] = "127.0.0.2"
            one.publish(2, {"w": torch.ones(3)}, timeout_s=SOON_S)
            (model,) = fetch_status(other.address)["models"]
            assert model["newest"] == 2


@pytest.mark.slow
def test_a_hub_that_comes_back_where_it_was_is_heard_though_names_are_not_answered(resolver):
    resolver.hosts["hub"] = "127.0.0.1"
    first = start_server(limits=AT_ONCE)
    with client(first.address.replace("127.0.0.1", "hub")) as one:
        first.close()
        del resolver.hosts["hub"]
        with pytest.raises(HubUnreachable):
            one.versions(timeout_s=3)
        with start_server(first.address, limits=AT_ONCE):
            one.publish(2, {"w": torch.ones(3)}, timeout_s=SOON_S)


def test_names_that_are_never_answered_keep_so_many_threads_and_no_more(resolver):
    for number in range(LOOKUPS_MAX):
        assert not lookup(f"name-{number}").done()
    with pytest.raises(OSError, match="other names are being looked up"):
        resolve("one-more", Deadline.after(SOON_S))
    assert resolve("127.0.0.1", Deadline.after(0)) == ("127.0.0.1",)  # needs none
    resolver.goes_on.set()
    with pytest.raises(socket.gaierror):
        lookup("name-0").result(SOON_S)
