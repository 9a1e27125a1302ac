"""Where workers tell others to connect to, on hosts of their own: network namespaces, as root.

    inside - gate - outside       "near" (10.77.0.0/24, fd77::/64) and "fast" (10.78.0.0/24) join inside and beside
      |
    beside

The gate stands for address translation, `docker -p`: a process that passes connections on, as Docker's own proxy does.
What a firewall drops is dropped by a rule for what comes back from those ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

SOON_S = 60.0
OPEN = "7100-7103"  # what the firewall leaves open
SCRIPT = Path(__file__).with_name("on_a_host.py")
NAME = f"tha{os.getpid()}"
HOSTS = Path("/etc/netns")  # of each namespace a folder, for what is to be in its /etc


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def missing() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "hosts of their own are network namespaces: they need root and `ip` (iproute2)"
    done = subprocess.run(["ip", "netns", "add", f"{NAME}probe"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"{NAME}probe"], capture_output=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


class Process:
    """One that runs on a host, see on_a_host.py."""

    def __init__(self, host: str) -> None:
        environment = {**os.environ, "ON_HOST": host}
        command = ["ip", "netns", "exec", f"{NAME}{host}", sys.executable, str(SCRIPT)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes, env=environment)

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None and stdout is not None
            stdin.write(json.dumps([name, arguments]) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer["is"]

        return call

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    if reason := missing():
        pytest.skip(reason)
    etc = [HOSTS / f"{NAME}{host}" for host in ("inside", "beside")]
    try:
        for host in ("inside", "beside", "gate", "outside"):
            ip("netns", "add", f"{NAME}{host}")
            ip("-n", f"{NAME}{host}", "link", "set", "lo", "up")
        for one, other, device, net in (
            ("inside", "beside", "near", "10.77.0"),
            ("inside", "beside", "fast", "10.78.0"),
            ("inside", "gate", "in0", "172.31.7"),
            ("gate", "outside", "out0", "10.79.0"),
        ):
            peer = {"name": device, "netns": f"{NAME}{other}"}
            words = [word for pair in peer.items() for word in pair]
            ip("-n", f"{NAME}{one}", "link", "add", device, "type", "veth", "peer", *words)
            for number, host in enumerate((one, other), 1):
                ip("-n", f"{NAME}{host}", "addr", "add", f"{net}.{number}/24", "dev", device)
                if device == "near":
                    ip("-n", f"{NAME}{host}", "addr", "add", f"fd77::{number}/64", "dev", device, "nodad")
                ip("-n", f"{NAME}{host}", "link", "set", device, "up")
        for folder, address in zip(etc, ("127.0.1.1", "10.77.0.1"), strict=True):
            folder.mkdir(parents=True)
            both = "10.77.0.1 both-host\nfd77::1 both-host\n"
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} trainer-host\n{both}")
        yield
    finally:
        for host in ("inside", "beside", "gate", "outside"):
            subprocess.run(["ip", "netns", "del", f"{NAME}{host}"], capture_output=True, check=False)
        for folder in etc:
            shutil.rmtree(folder, ignore_errors=True)
        if HOSTS.is_dir() and not any(HOSTS.iterdir()):
            HOSTS.rmdir()


@pytest.fixture(scope="module")
def trainer(network: None) -> Iterator[Process]:
    process = Process("inside")
    try:
        process.hub(address="tcp://0.0.0.0:7070")
        process.hub(address="tcp://[fd77::1]:7071")
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def rollout(network: None) -> Iterator[Process]:
    process = Process("beside")
    try:
        yield process
    finally:
        process.close()


WAYS = {
    "the address that faces the hub": ("tcp://10.77.0.1:7070", {}, "tcp://10.77.0.1:"),
    "a hub of IPv6": ("tcp://[fd77::1]:7071", {}, "tcp://[fd77::1]:"),
    "a hub under a name that is loopback here": ("tcp://trainer-host:7070", {}, "tcp://"),
    "an address": ("tcp://127.0.0.1:7070", {"TENSORHUB_ADVERTISE": "10.77.0.1"}, "tcp://10.77.0.1:"),
    "an address of IPv6": ("tcp://127.0.0.1:7070", {"TENSORHUB_ADVERTISE": "fd77::1"}, "tcp://[fd77::1]:"),
    "a name that is loopback here": (
        "tcp://127.0.0.1:7070",
        {"TENSORHUB_ADVERTISE": "trainer-host"},
        "tcp://trainer-host:",
    ),
    "an interface": ("tcp://127.0.0.1:7070", {"TENSORHUB_INTERFACE": "fast"}, "tcp://10.78.0.1:"),
    "the first of several interfaces": (
        "tcp://10.77.0.1:7070",
        {"TENSORHUB_INTERFACE": "ib0,fast"},
        "tcp://10.78.0.1:",
    ),
    "an interface of both families, and a hub of IPv6": (
        "tcp://[fd77::1]:7071",
        {"TENSORHUB_INTERFACE": "near"},
        "tcp://[fd77::1]:",
    ),
    "ports": ("tcp://10.77.0.1:7070", {"TENSORHUB_PORTS": "7200-7209"}, "tcp://10.77.0.1:720"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_of_another_host_reads_from_there(trainer: Process, rollout: Process, way: str) -> None:
    hub, environment, endpoint = WAYS[way]
    if "loopback here" in way and endpoint == "tcp://":  # towards the default route
        ip("-n", f"{NAME}inside", "route", "replace", "default", "dev", "near")
    told = trainer.publish(hub=hub, run=way, environment=environment)
    assert told.startswith(endpoint) and "//127." not in told
    theirs = hub.replace("127.0.0.1", "10.77.0.1")
    assert rollout.fetch(hub=theirs, run=way) == ""
    assert rollout.unreached(hub=theirs, run=way) == ""


def test_a_link_local_hub_is_faced_by_an_address_of_its_interface(trainer: Process) -> None:
    ip("-n", f"{NAME}inside", "addr", "add", "fe80::77/64", "dev", "near", "nodad")
    (facing,) = trainer.facing(hub="tcp://[fe80::77%near]:7070")
    assert facing == "fe80::77%near"
    assert trainer.facing(hub="tcp://[fd77::1]:7070") == ["fd77::1"], "the control"


def test_loopback_that_is_told_to_another_host_is_found_and_said(trainer: Process, rollout: Process) -> None:
    assert trainer.publish(hub="tcp://127.0.0.1:7070", run="loopback").startswith("tcp://127.0.0.1:")
    hub = "tcp://10.77.0.1:7070"
    error = rollout.fetch(hub=hub, run="loopback", timeout_s=4.0)
    assert "Connection refused" in error and "set TENSORHUB_ADVERTISE or TENSORHUB_INTERFACE on its host" in error
    deadline = time.monotonic() + SOON_S
    while not (said := rollout.unreached(hub=hub, run="loopback")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert said.startswith("rollout/0 cannot connect to trainer/0 at tcp://127.0.0.1:")
    assert "an address of its own host alone: set TENSORHUB_ADVERTISE" in said
    while len(found := [line for line in trainer.logged() if "cannot connect to trainer/0" in line]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sorted(line.startswith("trainer/0: ") for line in found) == [False, True], "the hub's log and the trainer's"


def test_behind_a_firewall_that_leaves_a_range_open(trainer: Process, rollout: Process) -> None:
    hub, drop = (
        "tcp://10.77.0.1:7070",
        ("to", "10.77.0.2", "ipproto", "tcp", "sport", "7104-65534", "type", "blackhole"),
    )
    ip("-n", f"{NAME}inside", "rule", "add", *drop)
    try:
        trainer.publish(hub=hub, run="open", environment={"TENSORHUB_PORTS": OPEN})
        assert rollout.fetch(hub=hub, run="open") == ""
        trainer.publish(hub=hub, run="shut")
        error = rollout.fetch(hub=hub, run="shut", timeout_s=3.0)  # the control
        assert "timed out" in error and "TENSORHUB_PORTS to ports that a firewall lets pass" in error
    finally:
        ip("-n", f"{NAME}inside", "rule", "del", *drop)


def test_bench_between_two_hosts_and_behind_a_firewall(network: None) -> None:
    """As people start it. Its bare stream and its weights need two ports of those that are open."""

    def command(host: str, ports: str, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TENSORHUB_HOST": host, "TENSORHUB_PORTS": ports}
        program = ["ip", "netns", "exec", f"{NAME}{host}", sys.executable, "-m", "tensorhub_plugins.core.cli", "bench"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*program, *words], **pipes, env=environment)  # type: ignore[call-overload, no-any-return]

    def measured(ports: str, *more: str) -> tuple[int, str]:
        there = command("inside", ports, "--serve", "--mb", "16", "--insecure")
        try:
            assert there.stdout is not None and any("waiting" in line for line in iter(there.stdout.readline, ""))
            here = command("beside", OPEN, "10.77.0.1", "--rounds", "2", *more)
            said, _ = here.communicate(timeout=SOON_S)
            return here.returncode, said
        finally:
            there.kill()
            there.communicate()

    status, said = measured(OPEN)
    assert status == 0 and "read over tcp: 16.8 MB" in said and "not over shm, which is faster: the two" in said, said
    with dropped("to", "10.77.0.2", "ipproto", "tcp", "sport", "7104-65534"):
        assert measured(OPEN)[0] == 0
        status, said = measured("7200-7209", "--timeout", "8")
        assert status == 1 and "TENSORHUB_PORTS" in said, said
        status, said = measured(OPEN, "--secret-file", "/dev/null")
        assert status == 1 and "secret" in said, said


HUB, COUNT = "tcp://10.77.0.1:7070", 2_000_000  # 16 MB
SLOW = "tbf rate 20mbit burst 128kb limit 1mb"
NEAR_V4 = ("to", "10.77.0.2", "ipproto", "tcp", "sport", "7104-65534")
NEAR_V6 = ("to", "fd77::2", "ipproto", "tcp", "sport", "7104-65534")
FAST = ("to", "10.78.0.2", "ipproto", "tcp")


def carried(device: str) -> int:
    """How many bytes have left the inside host by this device."""
    command = ["ip", "-n", f"{NAME}inside", "-s", "-j", "link", "show", "dev", device]
    (shown,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return int(shown["stats64"]["tx"]["bytes"])


@contextlib.contextmanager
def dropped(*what: str) -> Iterator[None]:
    """Silently, as by a firewall."""
    family = ["-6"] if any(":" in word for word in what) else []
    ip(*family, "-n", f"{NAME}inside", "rule", "add", *what, "type", "blackhole")
    try:
        yield
    finally:
        ip(*family, "-n", f"{NAME}inside", "rule", "del", *what, "type", "blackhole")


@pytest.fixture
def near_is_slow(network: None) -> Iterator[None]:
    tc = ["tc", "-n", f"{NAME}inside", "qdisc"]
    if shutil.which("tc") is None:
        pytest.skip("a slow network is made by `tc` (iproute2)")
    subprocess.run([*tc, "replace", "dev", "near", "root", *SLOW.split()], check=True)
    try:
        yield
    finally:
        subprocess.run([*tc, "del", "dev", "near", "root"], check=True)


@pytest.mark.parametrize("interfaces", ["near,fast", "fast,near", "near"])
def test_of_two_networks_the_faster_one_is_found_by_measuring(
    trainer: Process, rollout: Process, near_is_slow: None, interfaces: str
) -> None:
    """One segment, of 245, comes over the slow one; of the next version nothing does."""
    run, whole = f"two: {interfaces}", 8 * COUNT
    told = trainer.publish(hub=HUB, run=run, environment={"TENSORHUB_INTERFACE": interfaces}, count=COUNT)
    assert ("10.77.0.1" in told, "10.78.0.1" in told) == (True, "fast" in interfaces)
    for version in (1, 2):
        if version == 2:
            trainer.publish(hub=HUB, run=run, version=2, count=COUNT)
        near, fast = carried("near"), carried("fast")
        assert rollout.fetch(hub=HUB, run=run, version=version, count=COUNT, timeout_s=60.0) == ""
        near, fast = carried("near") - near, carried("fast") - fast
        if "fast" in interfaces:
            assert fast > 0.95 * whole and near < 0.05 * whole
        else:
            assert near > whole > fast, "the control: it is the only one"
    assert rollout.unreached(hub=HUB, run=run) == ""


def test_a_network_that_is_cut_costs_little_and_the_other_one_is_taken(trainer: Process, rollout: Process) -> None:
    with dropped(*FAST):
        for run, interfaces in (("cut", "fast,near"), ("alone", "fast")):
            trainer.publish(hub=HUB, run=run, environment={"TENSORHUB_INTERFACE": interfaces}, count=COUNT)
        assert rollout.fetch(hub=HUB, run="cut", count=COUNT) == ""
        assert rollout.unreached(hub=HUB, run="cut") == ""
        assert "timed out" in rollout.fetch(hub=HUB, run="alone", timeout_s=3.0), "the control"


def test_a_network_that_is_cut_later_is_left(trainer: Process, rollout: Process) -> None:
    """It was known to be the better one; that it does not answer any more is found by connecting."""
    run = "later"
    trainer.publish(hub=HUB, run=run, environment={"TENSORHUB_INTERFACE": "fast,near"}, count=COUNT)
    assert rollout.fetch(hub=HUB, run=run, count=COUNT) == ""
    trainer.publish(hub=HUB, run=run, version=2, count=COUNT)
    ip("-n", f"{NAME}inside", "link", "set", "fast", "down")
    try:
        assert rollout.fetch(hub=HUB, run=run, version=2, count=COUNT) == ""
    finally:
        ip("-n", f"{NAME}inside", "link", "set", "fast", "up")


@pytest.mark.parametrize("blocked", [(), (NEAR_V4,), (NEAR_V6,), (NEAR_V4, NEAR_V6)], ids=["none", "v4", "v6", "both"])
def test_a_hub_of_both_families_has_its_workers_tell_both(trainer: Process, rollout: Process, blocked: Any) -> None:
    run, hub = f"both: {len(blocked)} {blocked[:1]}", "tcp://both-host:7070"
    told = trainer.publish(hub=hub, run=run)
    port = told.rpartition(":")[2]
    assert told == f"tcp://10.77.0.1:{port},tcp://[fd77::1]:{port}"
    with contextlib.ExitStack() as stack:
        for each in blocked:
            stack.enter_context(dropped(*each))
        error = rollout.fetch(hub=hub, run=run, timeout_s=20.0 if len(blocked) < 2 else 3.0)
        assert ("timed out" in error) == (len(blocked) == 2), error
    deadline = time.monotonic() + SOON_S
    while not (said := rollout.unreached(hub=hub, run=run)) and len(blocked) == 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (f"at {told.replace(',', ', ')}: set TENSORHUB_ADVERTISE" in said) == (len(blocked) == 2)


def test_without_a_way_out_by_ipv4_a_hub_of_all_interfaces_is_one_of_both_families(trainer: Process) -> None:
    """On a host that has IPv6 alone nobody would reach it otherwise."""
    subprocess.run(["ip", "-n", f"{NAME}inside", "route", "del", "default"], capture_output=True, check=False)
    address = trainer.everywhere(port=7090)
    assert address == "tcp://[::]:7090"
    trainer.hub(address=address)
    beside = Process("beside")
    try:
        for run, at in (("of four", "tcp://10.77.0.1:7090"), ("of six", "tcp://[fd77::1]:7090")):
            trainer.publish(hub=at, run=run)
            assert beside.fetch(hub=at, run=run) == ""
        ip("-n", f"{NAME}inside", "route", "add", "default", "via", "10.77.0.2")
        assert trainer.everywhere(port=7090) == "tcp://0.0.0.0:7090"  # the control
    finally:
        subprocess.run(["ip", "-n", f"{NAME}inside", "route", "del", "default"], capture_output=True, check=False)
        beside.close()


def test_behind_address_translation(trainer: Process) -> None:
    """As with `docker run -p 7070:7070 -p 7110:7110 -e TENSORHUB_ADVERTISE=the-host -e TENSORHUB_PORTS=7110-7110`."""
    hub = "tcp://10.79.0.1:7070"
    gate, outside = Process("gate"), Process("outside")
    try:
        for port in (7070, 7110):
            gate.forward(near=["10.79.0.1", port], far=["172.31.7.1", port])
        environment = {"TENSORHUB_ADVERTISE": "10.79.0.1", "TENSORHUB_PORTS": "7110-7110"}
        told = trainer.publish(hub="tcp://172.31.7.1:7070", run="translated", environment=environment)
        assert told == "tcp://10.79.0.1:7110"
        assert outside.fetch(hub=hub, run="translated") == ""
        trainer.publish(hub="tcp://172.31.7.1:7070", run="plain")
        error = outside.fetch(hub=hub, run="plain", timeout_s=2.0)  # the control
        assert "cannot connect" in error and "TENSORHUB_ADVERTISE" in error
    finally:
        gate.close()
        outside.close()
