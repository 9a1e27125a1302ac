"""Addresses, scheme://host:port, of hubs and of transports; and the names of sessions.

The system's resolver may block its callers for long (40 s where no name server answers). So hosts' names are looked up
only here, in threads that nothing has to wait for; sockets, ZeroMQ's too, are given the resolved addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one only since Python 3.11

from tensorhub_plugins.core.deadline import Deadline, aside, remaining_s
from tensorhub_plugins.core.errors import HubUnreachable, UsageError
from tensorhub_plugins.core.options import PORT_MAX
from tensorhub_plugins.core.types import is_text

ELSEWHERE = "192.0.2.1"  # reserved for documentation: belongs to no host
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


def format_address(scheme: str, host: str, port: int) -> str:
    """Return an address like "tcp://host:port", with an IPv6 address in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
        done.set_exception(OSError(f"{LOOKUPS_MAX} other names are being looked up: the resolver does not answer"))
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
    *others, last = resolve(host, deadline)
    for number, each in enumerate(others):
        with contextlib.suppress(OSError):
            left_s = deadline.remaining() / (len(others) + 1 - number)
            return socket.create_connection((each, port), timeout=max(CONNECT_S_MIN, left_s))
    return socket.create_connection((last, port), timeout=max(CONNECT_S_MIN, deadline.remaining()))


def _addresses(host: str, flags: int = 0) -> tuple[str, ...]:
    found = [address for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)]
    names = [f"{host}%{scope[1]}" if any(scope[1:]) else str(host) for host, _, *scope in found]  # of one interface
    return tuple(sorted(dict.fromkeys(names), key=lambda each: ":" in each))


def address_towards(address: str, deadline: float) -> str:
    """Return the address of this host's interface that faces the hub, found without sending anything, by the first of
    the hub's IP addresses to which there is a route. Raise HubUnreachable when its name cannot be looked up now,
    UsageError when there is no route to it.

    A name of this host that stands for loopback, as in Debian's /etc/hosts, does not tell where its workers are: then
    return the address towards the default route."""
    problem: OSError | ValueError | None = None
    for each in hub_addresses(address):
        host, port = parse_address(each, "tcp")
        try:
            *others, last = resolve(host, deadline)
            for found in others:  # of a family that this host may not have
                with contextlib.suppress(OSError):
                    return _facing(found, host, port)
            return _facing(last, host, port)
        except (OSError, ValueError) as error:
            problem = problem or error
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
    with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))  # an address: nothing is looked up
        return str(probe.getsockname()[0])


def no_way(address: str, error: BaseException) -> HubUnreachable | UsageError:
    """Return the error to raise after the hub's name was not found: a resolver that is down may come back."""
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == socket.EAI_AGAIN:
        text = f"there is no way to the hub at {address}, whose name cannot be looked up now: {error}"
        return HubUnreachable(text, peer=address, phase="connect")
    return UsageError(f"there is no way to the hub at {address}: correct the host's name ({error})")
