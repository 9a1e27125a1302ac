"""Addresses, scheme://host:port, of hubs and of transports; and the names of sessions."""

from __future__ import annotations

import ipaddress
import os
import socket

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import is_text

PORT_MAX = 65535  # ZeroMQ takes port 99999 and uses another


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


def needs_ipv6(address: str) -> bool:
    """Whether this is an IPv6 address, or a name that has no other. Looks a name up; False where that fails.

    ZeroMQ is to be told: of a name that has both it would take the IPv6 address only, where the hub may not listen."""
    host, _ = parse_address(address, "tcp")
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):
        return False
    return found == {socket.AF_INET6}


def check_advertised(host: str) -> str:
    """Return a host that peers are told to connect to, or raise UsageError: 0.0.0.0 is none."""
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = not host
    if is_wildcard:
        raise UsageError(f"advertise_host={host!r} cannot be connected to: name an address peers can reach")
    return host


def local_host_towards(host: str, port: int = 9) -> str:
    """This host's address on the way to `host`; nothing is sent. UsageError without a route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no route to {host!r}: {error}") from error


def address_towards(address: str) -> str:
    """The address of this host's interface that faces the hub, found without sending anything."""
    host, port = parse_address(hub_addresses(address)[0], "tcp")
    try:
        return local_host_towards(host, port)
    except UsageError as error:
        raise UsageError(
            f"there is no way to the hub at {address}: correct the host's name ({error.message})"
        ) from error
