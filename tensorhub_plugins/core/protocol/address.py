"""Addresses, scheme://host:port, of hubs and of transports; and the names of sessions.

The system's resolver may block its callers for long (40 s where no name server answers). So hosts' names are looked up
only here, in threads that nothing has to wait for; sockets, ZeroMQ's too, are given the resolved addresses.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one only since Python 3.11

from tensorhub_plugins.core.deadline import POLL_S_MAX, Deadline, aside, remaining_s
from tensorhub_plugins.core.errors import HubUnreachable, UsageError
from tensorhub_plugins.core.options import PORT_MAX
from tensorhub_plugins.core.protocol.reach import format_address, is_of_one_host
from tensorhub_plugins.core.types import is_text

ELSEWHERE = "192.0.2.1"  # reserved for documentation: belongs to no host
STAGGER_S = 0.25  # within a continent every host that lets us in has answered by then
CONNECT_S_MIN = 0.001  # 0 would mean not to wait for the answer at all
LOOKUPS_MAX = 64  # at a time in a process: one that is never answered keeps its thread

_lookups: dict[tuple[int, str], Future[tuple[str, ...]]] = {}  # pending, by process (a fork has no threads) and name


def new_session() -> bytes:
    """Return 16 random bytes that identify an incarnation of a worker or hub; the first is never 0, ZeroMQ's own."""
    return bytes([os.urandom(1)[0] | 1]) + os.urandom(15)


def parse_address(address: str, scheme: str) -> tuple[str, int]:
    """Return (host without the brackets of IPv6, port). Raise UsageError when it is no address of this scheme."""
    prefix = f"{scheme}://"
    host, _, port = address.removeprefix(prefix).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not address.startswith(prefix) or not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise UsageError(f"{address!r} is no endpoint of {scheme}, which look like {prefix}10.0.0.1:5000")
    return host, int(port)


def host_and_port(text: str, port: int) -> tuple[str, int]:
    """Return those of HOST, HOST:PORT or [HOST]:PORT; this port where it has none. An IPv6 address alone has none.
    Raise UsageError for others."""
    has_port = text.count(":") == 1 or "]:" in text
    return parse_address(f"tcp://{text}" if has_port else format_address("tcp", text.strip("[]"), port), "tcp")


def check_address(address: str) -> str:
    """Return a hub's address, or raise UsageError."""
    try:
        parse_address(address if is_text(address) else "", "tcp")
    except UsageError as error:
        raise UsageError(f"{address!r} is no hub address: use tcp://host:port") from error
    return address


def hub_addresses(text: str) -> tuple[str, ...]:
    """Return the possible addresses of a hub, one or several separated by commas. Raise UsageError for others."""
    return tuple(check_address(each.strip()) for each in str(text).split(","))


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches it. A name is judged as it is, and not looked up."""
    host, _ = parse_address(address, "tcp")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def lookup(host: str) -> Future[tuple[str, ...]]:
    """Begin to look up a name: its IP addresses, IPv4 first, as a hub may listen only there; OSError, ValueError.
    Return at once; the future of an IP address is done. Concurrent calls for the same name share a thread."""
    try:
        done: Future[tuple[str, ...]] = Future()
        done.set_result(_addresses(host, socket.AI_NUMERICHOST))
        return done
    except (OSError, ValueError):
        pass
    key = os.getpid(), host
    under_way = _lookups.get(key)
    if under_way is None and len(_lookups) >= LOOKUPS_MAX:
        too_many = f"{LOOKUPS_MAX} other names are being looked up: the resolver does not answer"
        done.set_exception(socket.gaierror(socket.EAI_AGAIN, too_many))
        return done
    if under_way is None:
        under_way = _lookups[key] = aside(lambda: _addresses(host))
        under_way.add_done_callback(lambda _: _lookups.pop(key, None))
    return under_way


def resolve(host: str, deadline: float) -> tuple[str, ...]:
    """Return the IP addresses of a host's name, IPv4 first. deadline: on time.monotonic(). Raise OSError, at the
    deadline TimeoutError; ValueError for what is no name."""
    try:
        return lookup(host).result(remaining_s(deadline, time.monotonic()))
    except FutureTimeout:
        raise TimeoutError(f"the name {host!r} was not looked up in time: the resolver does not answer") from None


def connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first of a host's IP addresses that lets us in. Raise the last one's OSError, or ValueError."""
    return first_connected([(each, port) for each in resolve(host, deadline)], deadline)[0]


def first_connected(addresses: Sequence[tuple[str, int]], deadline: Deadline) -> tuple[socket.socket, int]:
    """Connect to one of these IP addresses and ports; return the socket, and which it was. Each is tried when the one
    before it has failed, and beside it when that has not answered in STAGGER_S (RFC 8305): one whose packets are
    dropped costs no more. Raise the last one's OSError, ConnectionRefusedError only if all refuse; at the deadline
    TimeoutError."""
    trying: dict[int, tuple[socket.socket, int]] = {}
    poll, begun, problems = select.poll(), 0, list[OSError]()
    next_at, ends_at = 0.0, max(deadline, time.monotonic() + CONNECT_S_MIN)
    try:
        while trying or begun < len(addresses):
            now = time.monotonic()
            if begun < len(addresses) and (not trying or now >= next_at):
                begun, next_at = begun + 1, now + STAGGER_S
                try:
                    sock = _begin_connect(*addresses[begun - 1])
                except OSError as error:  # nothing of its family here, or no route
                    problems.append(error)
                    continue
                trying[sock.fileno()] = sock, begun - 1
                poll.register(sock, select.POLLOUT)
            if now >= ends_at:
                raise TimeoutError("timed out")
            waits_until = min(ends_at, next_at) if begun < len(addresses) else ends_at
            for descriptor, _ in poll.poll(math.ceil(min(waits_until - now, POLL_S_MAX) * 1000)):
                poll.unregister(descriptor)
                sock, which = trying.pop(descriptor)
                if not (number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    return sock, which
                sock.close()
                problems.append(OSError(number, os.strerror(number)))
        others = [each for each in problems if not isinstance(each, ConnectionRefusedError)]
        if others and isinstance(problems[-1], ConnectionRefusedError):
            raise OSError(f"{problems[-1]}; at another address of it: {others[-1]}")
        raise problems[-1] if problems else OSError("there is no address")
    finally:
        for sock, _ in trying.values():
            sock.close()


def _begin_connect(ip: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    number = sock.connect_ex(address)
    if number in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    raise OSError(number, os.strerror(number))


def _addresses(host: str, flags: int = 0) -> tuple[str, ...]:
    found = [address for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)]
    names = [f"{host}%{scope[1]}" if any(scope[1:]) else str(host) for host, _, *scope in found]  # of one interface
    return tuple(sorted(dict.fromkeys(names), key=lambda each: ":" in each))


def addresses_towards(address: str, deadline: float) -> list[str]:
    """Return the addresses of this host's interfaces that face the hub, found without sending anything: by those of the
    hub's IP addresses to which there is a route, one in each family, and more than one only if other hosts may connect
    to each. Raise HubUnreachable when its name cannot be looked up now, UsageError when there is no route to it.

    A name of this host that stands for loopback, as in Debian's /etc/hosts, does not tell where its workers are: then
    return the address towards the default route."""
    problem: OSError | ValueError | None = None
    for each in hub_addresses(address):
        host, port = parse_address(each, "tcp")
        facing = dict[bool, str]()  # by family: IPv6 or not
        try:
            for found in resolve(host, deadline):
                try:
                    facing.setdefault(":" in found, _facing(found, host, port))
                except OSError as error:  # of a family that this host may not have
                    problem = problem or error
        except (OSError, ValueError) as error:
            problem = problem or error
        if facing:
            first, *others = dict.fromkeys(facing.values())
            return [first, *(each for each in others if not is_of_one_host(format_address("tcp", each, 0)))]
    assert problem is not None
    raise no_way(address, problem) from problem


def _facing(hub: str, name: str, port: int) -> str:
    own = _own_address(hub, port)
    if stands_for_loopback(own, name):
        with contextlib.suppress(OSError):  # no such route: no other host reads from here
            return _own_address(ELSEWHERE, port)
    return own


def stands_for_loopback(address: str, name: str) -> bool:
    """Return whether this IP address is loopback, though the name that it was found by does not say so."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback and not is_loopback(format_address("tcp", name, 0))


def _own_address(towards: str, port: int) -> str:
    """Return the address of this host from which that one is reached, by its route."""
    family, *_, address = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def of_all_interfaces(port: int) -> str:
    """Return the address by which a hub listens on all interfaces: for both families where this host has no way out by
    IPv4."""
    host = "0.0.0.0"
    try:
        _own_address(ELSEWHERE, port)
    except OSError:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6):
            host = "::"
    return format_address("tcp", host, port)


def check_route(address: str, found: Sequence[str]) -> None:
    """Raise UsageError where this host has a route to none of a hub's IP addresses: ZeroMQ would try them silently."""
    problem = OSError("there is no address")
    for each in found:
        try:
            _own_address(each, parse_address(address, "tcp")[1])
            return
        except OSError as error:
            problem = error
    raise no_way(address, problem) from problem


def no_way(address: str, error: BaseException) -> HubUnreachable | UsageError:
    """Return the error to raise where a hub's name was not found (a resolver that is down may come back), or no route
    to its address."""
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == socket.EAI_AGAIN:
        text = f"there is no way to the hub at {address}, whose name cannot be looked up now: {error}"
        return HubUnreachable(text, peer=address, phase="connect")
    if isinstance(error, (socket.gaierror, ValueError)):
        what = "correct the host's name"
    else:
        what = "see this host's routes, firewall and sandbox, or correct the address"
    return UsageError(f"there is no way to the hub at {address}: {what} ({error})")
