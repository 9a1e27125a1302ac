"""Which address and which ports readers are told: what the node says of itself, what is given, what faces the hub."""

from __future__ import annotations

import socket
import time

import pytest

from tensorhub_plugins.core import Client, UsageError, start_server
from tensorhub_plugins.core.protocol import advertised
from tensorhub_plugins.core.protocol.advertised import ANY_PORT, addresses_of, choose, hosts_of, ports_of, with_faster
from tensorhub_plugins.core.transports import create
from tensorhub_plugins.core.transports.stream import tcp_socket

HUB = "tcp://127.0.0.1:9"
VARIABLES = ("TENSORHUB_ADVERTISE", "TENSORHUB_INTERFACE", "TENSORHUB_PORTS")


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def interfaces(monkeypatch):
    """eth0 (IPv4), ib0 (both), wg0 (IPv6), down0 (it is down)."""
    v4 = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "down0": "10.0.0.7"}
    names = [*v4, "wg0"]

    def ioctl(_, what, request):
        name = request.rstrip(b"\0").decode()
        if name not in names or (what == advertised.GET_ADDRESS and name not in v4):
            raise OSError("no such device")
        if what == advertised.GET_FLAGS:
            return request[:16] + bytes([advertised.IS_UP * (name != "down0"), 0])
        return request[:20] + socket.inet_aton(v4[name])

    table = (
        f"{'0' * 31}1 01 80 10 80 lo\n"
        "fe800000000000000000000000000001 02 40 20 80 ib0\n"  # leaves no link
        "fd770000000000000000000000000001 02 40 00 a0 ib0\n"  # deprecated
        "fd770000000000000000000000000005 02 40 00 80 ib0\n"
        "fd780000000000000000000000000005 03 40 00 80 wg0\n"
    )
    monkeypatch.setattr(advertised, "ioctl", ioctl)
    monkeypatch.setattr(advertised, "_table_v6", lambda: table)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))


def soon() -> float:
    return time.monotonic() + 5


def test_what_the_node_says_of_itself_comes_before_what_is_given(monkeypatch, interfaces):
    assert choose(HUB, soon()) == ("127.0.0.1", ANY_PORT)
    assert choose(HUB, soon(), host="10.0.0.9").host == "10.0.0.9"
    assert choose(HUB, soon(), host="10.0.0.9", interface="ib0").host == "10.1.0.5,fd77::5"
    monkeypatch.setenv("TENSORHUB_INTERFACE", "eth0")
    assert choose(HUB, soon(), host="10.0.0.9", interface="ib0").host == "10.0.0.5"
    monkeypatch.setenv("TENSORHUB_ADVERTISE", "trainer.example")
    assert choose(HUB, soon(), host="10.0.0.9", interface="ib0").host == "trainer.example"


def test_an_interface_of_both_families_is_advertised_in_that_of_the_hub(interfaces, monkeypatch):
    assert addresses_of("ib0") == ["10.1.0.5", "fd77::5"]
    assert choose(HUB, soon(), interface="wg0").host == "fd78::5"
    monkeypatch.setattr(advertised, "addresses_towards", lambda *_: ["fd77::9"])
    assert choose("tcp://[fd77::1]:9", soon(), interface="ib0").host == "fd77::5,10.1.0.5"


def test_of_several_interfaces_those_that_are_here_count(interfaces):
    assert addresses_of("ib1, ib0,eth0") == ["10.1.0.5", "fd77::5", "10.0.0.5"]


@pytest.mark.parametrize("name", ["nope0", "down0", "", ",", "x" * 16, "eth0\0", "é" * 9, 5])
def test_an_interface_that_is_none_is_refused_with_those_there_are(interfaces, name, monkeypatch):
    with pytest.raises(
        UsageError, match=r"interface=.*these have: lo \(127\.0\.0\.1, ::1\), eth0 \(10\.0\.0\.5\)"
    ) as said:
        addresses_of(name)
    assert "wg0 (fd78::5)" in str(said.value) and "down0 (" not in str(said.value)


def test_a_card_with_a_faster_link_is_told_beside_the_address_that_faces_the_hub(interfaces, monkeypatch, tmp_path):
    """Where its link is known to be faster, and its address is of no public network."""

    def device(name: str, mbit: str, kind: str = "device") -> None:
        (tmp_path / name / kind).mkdir(parents=True)
        (tmp_path / name / "speed").write_text(mbit)

    device("eth0", "1000\n")
    device("ib0", "400000\n")
    assert with_faster(["10.0.0.5"], tmp_path) == ["10.0.0.5", "10.1.0.5", "fd77::5"]
    assert with_faster(["10.1.0.5"], tmp_path) == ["10.1.0.5"], "the control: the other one is slower"
    assert with_faster(["10.9.9.9"], tmp_path) == ["10.9.9.9"], "the speed of its link is not known"
    device("wg0", "400000\n", "virtual")
    device("down0", "-1\n")
    assert with_faster(["10.0.0.5"], tmp_path) == ["10.0.0.5", "10.1.0.5", "fd77::5"]
    monkeypatch.setattr(advertised, "_addresses_of", lambda name: {"eth0": ["10.0.0.5"], "ib0": ["8.8.8.8"]}.get(name))
    assert with_faster(["10.0.0.5"], tmp_path) == ["10.0.0.5"]


def test_several_may_be_told_and_how_many_is_bounded(monkeypatch, interfaces):
    monkeypatch.setenv("TENSORHUB_ADVERTISE", "10.0.0.5, [fd77::5],trainer,10.0.0.5")
    assert choose(HUB, soon()).host == "10.0.0.5,fd77::5,trainer"
    monkeypatch.setenv("TENSORHUB_ADVERTISE", "a,b,c,d,e")
    with pytest.raises(UsageError, match="^TENSORHUB_ADVERTISE='a,b,c,d,e': 5 hosts, and at most 4 may be told"):
        choose(HUB, soon())
    monkeypatch.delenv("TENSORHUB_ADVERTISE")
    assert choose(HUB, soon(), interface="eth0,ib0,wg0").host == "10.0.0.5,10.1.0.5,fd77::5,fd78::5"


def test_an_interface_of_this_host():
    assert addresses_of("lo")[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host",
    ["10.0.0.5", "[fd77::5]", "fd77::5", "fe80::1%eth0", "trainer", "a-b.c_d.example.", "10-0-0-5.pod", "127.0.0.1"],
)
def test_what_peers_can_connect_to(host):
    assert hosts_of(host) == [host.strip("[]")]


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "[::]", "224.0.0.1", "ff02::1", "255.255.255.255", "fe80::1", "10.0.0.5:7070", "300.1.1.1", "1.2"]
    + ["tcp://h", "a b", "a/b", "*", "-a", "[10.0.0.5", "10.0.0.0/16", "a,b c", "a,,b"],
)
def test_what_nobody_can_connect_to_is_refused_by_the_name_that_said_it(monkeypatch, host):
    with pytest.raises(UsageError, match="^advertise_host=.* cannot be connected to: give the address or the name"):
        choose(HUB, soon(), host=host)
    monkeypatch.setenv("TENSORHUB_ADVERTISE", host)
    with pytest.raises(UsageError, match="^TENSORHUB_ADVERTISE=.* cannot be connected to"):
        choose(HUB, soon(), host="10.0.0.5")
    with pytest.raises(UsageError, match="cannot be connected to"):
        create("tcp", advertise_host=host)


def test_ports_are_those_that_the_environment_names_or_that_are_given(monkeypatch):
    assert ports_of() == ANY_PORT and ports_of("7100-7101") == range(7100, 7102)
    monkeypatch.setenv("TENSORHUB_PORTS", "7200-7200")
    assert ports_of() == ports_of("7100-7101") == range(7200, 7201)


@pytest.mark.parametrize("said", ["7", "a-b", "0-5", "9-8", "1-65536", "1-2-3", "-", "\u0661-\u0662", "7100:7163"])
def test_a_range_that_is_none_is_refused_when_a_client_connects(monkeypatch, said):
    with start_server() as hub:
        options = {"run": "r", "model": "m", "replica": "a", "transports": ("tcp",)}
        with pytest.raises(UsageError, match="^ports="):
            Client(hub.address, **options, ports=said)
        monkeypatch.setenv("TENSORHUB_PORTS", said)
        with pytest.raises(UsageError, match="^TENSORHUB_PORTS="):
            Client(hub.address, **options, advertise_host="127.0.0.1")


def test_a_port_of_the_range_that_is_free_is_taken(monkeypatch):
    (listener,) = tcp_socket.listen(["127.0.0.1"])
    with listener as taken:
        port = taken.getsockname()[1]
        (other,) = tcp_socket.listen(["127.0.0.1"], range(port, min(port + 20, 65536)))
        with other:
            assert other.getsockname()[1] > port
        for variable in ("", f"{port}-{port}"):
            monkeypatch.setenv("TENSORHUB_PORTS", variable)
            with pytest.raises(UsageError, match=f"all ports from {port} to {port} are taken: .* TENSORHUB_PORTS"):
                tcp_socket.listen(["127.0.0.1"], None if variable else range(port, port + 1))


def bound(host: str) -> str:
    (listener,) = tcp_socket.listen([host])
    with listener:
        return str(listener.getsockname()[0])


def test_a_name_that_stands_for_loopback_here_is_listened_for_everywhere(monkeypatch):
    """As Debian's /etc/hosts has it; for other hosts it stands for this one's address, which nobody listened on."""
    names = {"trainer": ("127.0.1.1",), "both": ("127.0.0.1", "::1"), "localhost": ("127.0.0.1", "::1")}
    names["alone"] = ("127.0.0.2",)
    monkeypatch.setattr(tcp_socket, "resolve", lambda host, _: names.get(host, (host,)))
    assert bound("trainer") in ("::", "0.0.0.0") and bound("both") in ("::", "0.0.0.0")
    assert bound("localhost") == bound("127.0.0.1") == "127.0.0.1", "the controls: they say loopback themselves"
    assert bound("127.0.1.1") == "127.0.1.1"
    monkeypatch.setattr(tcp_socket, "stands_for_loopback", lambda *_: False)
    assert bound("alone") == "127.0.0.2", "the control: of one address, that one"


def test_without_ipv6_all_addresses_of_ipv4_are_listened_on(monkeypatch):
    make = socket.socket

    def without(family=socket.AF_INET, *arguments, **options):
        if family == socket.AF_INET6:
            raise OSError(tcp_socket.errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *arguments, **options)

    monkeypatch.setattr(tcp_socket.socket, "socket", without)
    assert bound("192.0.2.1") == "0.0.0.0"
