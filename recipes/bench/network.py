"""Hosts as network namespaces on bridges with shaped links, and one process in each. Needs root, `ip` and `tc`.

Everything is made in namespaces of its own, named after this process, and removed at the end; the machine's own network
is not touched. A host's link is shaped in both directions with a token bucket (burst 128 KB: the kernel's large
segments pass whole, so that one flow does not eat a core).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
ANSWER_S_MAX = 180.0
BURST = "128kb"
CONGESTION_CONTROL = "reno"  # the same for all, and there in every kernel


def missing() -> str | None:
    """Return why this machine cannot do it, and what to do about that; None: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root, for example in a container with --privileged"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing: apt-get install iproute2"
    probe = subprocess.run(["ip", "netns", "add", f"thprobe{os.getpid()}"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"thprobe{os.getpid()}"], capture_output=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else None


def require() -> None:
    """End this process with a sentence where no network can be made."""
    reason = missing()
    if reason is not None:
        sys.exit(f"not run: {reason}")


def cannot_delay() -> str | None:
    """Return why no round-trip time can be made here; None: it can."""
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if shutil.which("cc") is None:
        return "there is no C compiler (cc)"
    return None


class Network:
    """A set of bridges ("sites") with hosts on them. A context manager."""

    def __init__(self) -> None:
        self._prefix = f"th{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []
        self._hosts = 0
        self._forwarders: list[subprocess.Popen[str]] = []
        self._sys: _Sys | None = None

    def __enter__(self) -> Network:
        self._add(self._switch)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sys is not None:
            self._sys.close()
        for forwarder in self._forwarders:
            forwarder.kill()
            forwarder.wait()
            if forwarder.stdout is not None:
                forwarder.stdout.close()
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def site(self, name: str) -> None:
        self._ip(self._switch, "link", "add", name, "type", "bridge")
        self._ip(self._switch, "link", "set", name, "up")

    def join(self, one: str, other: str, mbit: float, rtt_ms: float = 0.0) -> None:
        """Join two sites by a link that is shaped in both directions."""
        near, far = f"w{one}", f"w{other}"
        if rtt_ms:
            # site - shaped link - bridge - TAP - forwarder - ...: the delay follows the queue, as on a long wire
            for name in (f"m{one}", f"m{other}"):
                self._ip(self._switch, "link", "add", name, "type", "bridge")
                self._ip(self._switch, "link", "set", name, "up")
            self._veth(near, f"n{one}", one, f"m{one}")
            self._veth(far, f"n{other}", other, f"m{other}")
            self._delay(f"t{one}", f"t{other}", rtt_ms)
            for name in (one, other):
                self._ip(self._switch, "link", "set", f"t{name}", "master", f"m{name}", "up")
            # Traffic towards `other` leaves site `one` through `near`'s end of the pair.
            self._shape(self._switch, near, mbit)
            self._shape(self._switch, far, mbit)
            return
        self._ip(self._switch, "link", "add", near, "type", "veth", "peer", "name", far)
        for end, site in ((near, one), (far, other)):
            self._ip(self._switch, "link", "set", end, "master", site, "up")
            self._shape(self._switch, end, mbit)

    def cut(self, site: str) -> None:
        """Cut the link that joins this site: nothing crosses it any more, and no host is notified."""
        self._ip(self._switch, "link", "set", f"w{site}", "down")

    def mend(self, site: str) -> None:
        """Restore the link."""
        self._ip(self._switch, "link", "set", f"w{site}", "up")

    def impair(self, host: Host, how: str) -> None:
        """Impair a host's link, unnoticed. cut: nothing leaves or arrives. mute: nothing leaves. deafen: nothing
        arrives."""
        if how in ("cut", "mute"):
            self._drop_all(host.name, "eth0")
        if how in ("cut", "deafen"):
            self._drop_all(self._switch, host.port)

    def repair(self, host: Host) -> None:
        """End `impair`."""
        for name, device in ((host.name, "eth0"), (self._switch, host.port)):
            if host.mbit is None:
                _run("tc", "-n", name, *f"qdisc replace dev {device} root pfifo".split())
            else:
                self._shape(name, device, host.mbit)

    def part(self, host: Host, other: Host) -> None:
        """Have nothing from one host reach the other, unnoticed."""
        self._ip(host.name, *f"rule add to {other.address} type blackhole".split())

    def reunite(self, host: Host, other: Host) -> None:
        """End `part`."""
        self._ip(host.name, *f"rule del to {other.address} type blackhole".split())

    def _drop_all(self, name: str, device: str) -> None:
        _run("tc", "-n", name, *f"qdisc replace dev {device} root pfifo limit 0".split())

    def _veth(self, one: str, other: str, *bridges: str) -> None:
        self._ip(self._switch, "link", "add", one, "type", "veth", "peer", "name", other)
        for end, bridge in zip((one, other), bridges, strict=True):
            self._ip(self._switch, "link", "set", end, "master", bridge, "up")

    def _delay(self, one: str, other: str, rtt_ms: float) -> None:
        with tempfile.TemporaryDirectory() as folder:  # a program that runs needs its file no more
            program = str(Path(folder) / "delay")
            _run("cc", "-O2", "-pthread", "-o", program, str(Path(__file__).with_name("delay.c")))
            command = ["ip", "netns", "exec", self._switch, program, one, other, str(int(rtt_ms * 500)), "1"]
            forwarder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._forwarders.append(forwarder)
            assert forwarder.stdout is not None
            if "up" not in forwarder.stdout.readline():
                raise RuntimeError("the forwarder did not start")

    def host(self, site: str, mbit: float | None) -> Host:
        """Make a namespace with one address; mbit: its link's rate in each direction, None: unlimited."""
        self._hosts += 1
        name, port = f"{self._prefix}h{self._hosts}", f"p{self._hosts}"
        address = f"10.77.{self._hosts >> 8}.{self._hosts & 255}"
        self._add(name)
        self._ip(name, "link", "set", "lo", "up")
        self._ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip(name, "addr", "add", f"{address}/16", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")
        self._ip(self._switch, "link", "set", port, "master", site, "up")
        if mbit is not None:
            self._shape(name, "eth0", mbit)
            self._shape(self._switch, port, mbit)
        return Host(name, address, port, mbit)

    def crossed_bytes(self, site: str) -> int:
        """Return the bytes that came into this site over the link that joins it, headers included."""
        return self._counter(f"w{site}", "rx_bytes")

    def traffic_bytes(self, host: Host) -> tuple[int, int]:
        """Return the bytes that a host has received and sent, headers included."""
        return self._counter(host.port, "tx_bytes"), self._counter(host.port, "rx_bytes")

    def _counter(self, device: str, name: str) -> int:
        if self._sys is None:  # the switch's /sys, once: a process for each look would be too slow
            self._sys = _Sys(self._switch)
        return self._sys.read(f"/sys/class/net/{device}/statistics/{name}")

    def _add(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)

    def _ip(self, name: str, *arguments: str) -> None:
        _run("ip", "-n", name, *arguments)

    def _shape(self, name: str, device: str, mbit: float) -> None:
        tbf = f"qdisc replace dev {device} root tbf rate {mbit}mbit burst {BURST} limit 1mb"
        _run("tc", "-n", name, *tbf.split())


class _Sys:
    """A reader of a namespace's own /sys."""

    def __init__(self, name: str) -> None:
        script = 'while read path; do cat "$path"; done'
        self._shell = subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, path: str) -> int:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(path + "\n")
        self._shell.stdin.flush()
        return int(self._shell.stdout.readline())

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()


class Host:
    """A process in a namespace, which runs functions for us, one after the other."""

    def __init__(self, name: str, address: str, port: str, mbit: float | None) -> None:
        self.name = name
        self.mbit = mbit  # of its link
        self.address = address
        self.port = port  # the device at the other end of its link
        self._line: Connection | None = None
        self.process: Any = None

    def start(self, make: Callable[[], Any]) -> None:
        """Begin a process; `make` is called in it and returns the object whose methods `tell` calls."""
        context = multiprocessing.get_context("fork")  # torch is imported once, before
        self._line, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(end, self.name, make), daemon=True)
        self.process.start()
        self.answer()

    def tell(self, method: str, *arguments: Any) -> None:
        assert self._line is not None
        self._line.send((method, arguments))

    def answer(self) -> Any:
        assert self._line is not None
        if not self._line.poll(ANSWER_S_MAX):
            raise TimeoutError(f"{self.name} does not answer")
        good, value = self._line.recv()
        if not good:
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.tell("close")
        if self.process is not None:
            self.process.join(10)
            if self.process.is_alive():
                self.process.kill()


def _serve(line: Connection, name: str, make: Callable[[], Any]) -> None:
    try:
        enter(name)
        worker = make()
        line.send((True, None))
        while True:
            method, arguments = line.recv()
            line.send((True, getattr(worker, method)(*arguments)))
            if method == "close":
                break
    except EOFError:
        pass
    except BaseException:
        line.send((False, traceback.format_exc()))
    finally:
        os._exit(0)


def enter(name: str) -> None:
    """Put this process into a namespace."""
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter namespace {name}")
    os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(CONGESTION_CONTROL)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def stopping(*hosts: Host) -> Iterator[None]:
    try:
        yield
    finally:
        for host in hosts:
            host.stop()


def now() -> float:
    """Return the time of a clock that is the same in every process of this machine."""
    return time.monotonic()
