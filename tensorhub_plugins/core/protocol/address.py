"""Addresses of hubs, and the names of lives."""

from __future__ import annotations

import os
import socket

from tensorhub_plugins.core.errors import UsageError


def new_session() -> bytes:
    """16 random bytes that name one life of a worker or hub; the first is never 0, which ZeroMQ keeps for itself."""
    return bytes([os.urandom(1)[0] | 1]) + os.urandom(15)


def check_address(address: str) -> str:
    """Return a hub's address, or raise UsageError. ZeroMQ itself takes port 99999 and uses another."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{address!r} is no hub address: use tcp://host:port")
    return address


def address_towards(address: str) -> str:
    """The address of this host's interface that faces the hub, found without sending anything."""
    host, _, port = check_address(address).removeprefix("tcp://").rpartition(":")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no way to the hub at {address}: correct the host's name ({error})") from error
