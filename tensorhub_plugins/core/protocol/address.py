"""Addresses, scheme://host:port, of hubs and of transports; and the names of sessions.

The system's resolver keeps its callers for as long as it likes (40 s where no name server answers). So hosts' names are
looked up here alone, by threads that nobody has to wait for; sockets, ZeroMQ's too, are given what they stand for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one only since Python 3.11

from tensorhub_plugins.core.deadline import aside, remaining_s
from tensorhub_plugins.core.errors import HubUnreachable, UsageError
from tensorhub_plugins.core.types import is_text

ELSEWHERE = "192.0.2.1"  # for documentation: nobody's
PORT_MAX = 65535  # ZeroMQ takes port 99999 and uses another
LOOKUPS_MAX = 64  # under way in a process: one that is never answered keeps its thread

_lookups: dict[tuple[int, str], Future[tuple[str, ...]]] = {}  # under way, by process (a fork has no threads) and name


def new_session() -> bytes:
    """16 random bytes that name one life of a worker or hub; the first is never 0, which ZeroMQ keeps for itself."""
    return bytes([os.urandom(1)[0] | 1]) + os.urandom(15)


def parse_address(address: str, scheme: str) -> tuple[str, int]:
    """(host without the brackets of IPv6, port). UsageError when it is no address of this scheme."""
    prefix = f"{scheme}://"
    host, _, port = address.removeprefix(prefix).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not address.startswith(prefix) or not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise UsageError(f"{address!r} is no endpoint of {scheme}, which look like {prefix}10.0.0.1:5000")
    return host, int(port)


def format_address(scheme: str, host: str, port: int) -> str:
    """As in "tcp://host:port", an IPv6 address in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_address(address: str) -> str:
    """Return a hub's address, or raise UsageError."""
    try:
        parse_address(address if is_text(address) else "", "tcp")
    except UsageError as error:
        raise UsageError(f"{address!r} is no hub address: use tcp://host:port") from error
    return address


def hub_addresses(text: str) -> tuple[str, ...]:
    """Where a hub may be: one address, or several with commas between them. UsageError for what is none."""
    return tuple(check_address(each.strip()) for each in str(text).split(","))


def is_loopback(address: str) -> bool:
    """Whether only this host reaches it. A name counts for what it says, and is not looked up."""
    host, _ = parse_address(address, "tcp")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def lookup(host: str) -> Future[tuple[str, ...]]:
    """Begin to look a name up: its IP addresses, IPv4 first, as a hub may not listen on the other; OSError, ValueError.
    Returns at once, and the future of an IP address is done. Who asks meanwhile for the same name shares the thread."""
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
    """The IP addresses of a host's name, IPv4 first. deadline: on time.monotonic(). OSError, at the deadline a
    TimeoutError; ValueError for what is no name."""
    try:
        return lookup(host).result(remaining_s(deadline, time.monotonic()))
    except FutureTimeout:
        raise TimeoutError(f"the name {host!r} was not looked up in time: the resolver does not answer") from None


def _addresses(host: str, flags: int = 0) -> tuple[str, ...]:
    found = [address for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)]
    names = [f"{host}%{scope[1]}" if any(scope[1:]) else str(host) for host, _, *scope in found]  # of one interface
    return tuple(sorted(dict.fromkeys(names), key=lambda each: ":" in each))


def check_advertised(host: str) -> str:
    """Return a host that peers are told to connect to, or raise UsageError: 0.0.0.0 is none."""
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = not host
    if is_wildcard:
        raise UsageError(f"advertise_host={host!r} cannot be connected to: name an address peers can reach")
    return host


def address_towards(address: str, deadline: float) -> str:
    """The address of this host's interface that faces the hub, found without sending anything. HubUnreachable when its
    name cannot be looked up now, UsageError when there is no way to it.

    A name of this host's own that stands for loopback, as Debian's /etc/hosts has it, says nothing of where its workers
    are: then it is the address towards the default route."""
    host, port = parse_address(hub_addresses(address)[0], "tcp")
    try:
        own = _own_address(resolve(host, deadline)[0], port)
        if not ipaddress.ip_address(own.split("%")[0]).is_loopback or is_loopback(format_address("tcp", host, port)):
            return own
        with contextlib.suppress(OSError):  # no such route: nobody outside reads from here
            return _own_address(ELSEWHERE, port)
        return own
    except (OSError, ValueError) as error:
        raise no_way(address, error) from error


def _own_address(towards: str, port: int) -> str:
    """Return the address of this host from which that one is reached, by its route."""
    with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))  # an address: nothing is looked up
        return str(probe.getsockname()[0])


def no_way(address: str, error: BaseException) -> HubUnreachable | UsageError:
    """What to raise after the hub's name was not found: a resolver that is away may come back."""
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == socket.EAI_AGAIN:
        text = f"there is no way to the hub at {address}, whose name cannot be looked up now: {error}"
        return HubUnreachable(text, peer=address, phase="connect")
    return UsageError(f"there is no way to the hub at {address}: correct the host's name ({error})")
