"""What a worker tells its readers to connect to: which addresses of this host, and which ports.

The one place that decides it, for all adapters. What a node says of itself (the environment) comes before what is given
for all of them (arguments and options); else it is the address that faces the hub, in each family in which one does,
and the network cards with a faster link. Of several readers take one that works, and the fastest (transports/ways.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import socket
import struct
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.options import port_range
from tensorhub_plugins.core.protocol.address import addresses_towards
from tensorhub_plugins.core.types import HOSTS_MAX, NAME_LENGTH_MAX, is_text, printable

HOST_VARIABLE = "TENSORHUB_ADVERTISE"
INTERFACE_VARIABLE = "TENSORHUB_INTERFACE"
PORTS_VARIABLE = "TENSORHUB_PORTS"
ANY_PORT = range(1)  # 0: one that is free

GET_FLAGS, GET_ADDRESS = 0x8913, 0x8915  # of an interface, by ioctl; the address is that of IPv4
IS_UP = 1
INTERFACE_NAME_MAX = 15
NOT_IN_USE = 0x08 | 0x20 | 0x40  # flags of an IPv6 address: a duplicate, deprecated, tentative
HOST_NAME = re.compile(r"\w([\w.-]{0,251}[\w.])?")


class Advertised(NamedTuple):
    """Where readers are told to connect to: one host or several, with commas between them, the preferred first."""

    host: str
    ports: range  # to be listened on, the first that is free


def choose(
    hub: str, deadline: float, *, host: str | None = None, interface: str | None = None, ports: str | None = None
) -> Advertised:
    """Return what to advertise to readers. host, interface, ports: as given for this worker. UsageError for what cannot
    be, HubUnreachable when the hub's name cannot be looked up now."""
    choices = ports_of(ports)
    said_host, said_interface = os.environ.get(HOST_VARIABLE), os.environ.get(INTERFACE_VARIABLE)
    if said_host:
        return _advertised(hosts_of(said_host, HOST_VARIABLE), choices)
    if said_interface or interface:
        what = INTERFACE_VARIABLE if said_interface else "interface"
        found = addresses_of(said_interface or interface, what)
        if len({":" in each for each in found}) > 1:  # the hub's family first: more hosts may have it
            wants_v6 = ":" in addresses_towards(hub, deadline)[0]
            found.sort(key=lambda each: (":" in each) != wants_v6)
        return _advertised(found, choices)
    if host in (None, ""):
        return _advertised(with_faster(addresses_towards(hub, deadline)), choices)
    return _advertised(hosts_of(host), choices)


def _advertised(hosts: Sequence[str], ports: range) -> Advertised:
    return Advertised(",".join(hosts[:HOSTS_MAX]), ports)


def ports_of(given: str | None = None) -> range:
    """Return the ports for data: those that TENSORHUB_PORTS=from-to says, else that are given in the same way; else any
    that is free. UsageError for what is no range."""
    environment = os.environ.get(PORTS_VARIABLE)
    if environment:
        return port_range(environment, PORTS_VARIABLE)
    return ANY_PORT if given is None else port_range(given, "ports")


def hosts_of(given: object, what: str = "advertise_host") -> list[str]:
    """Return the hosts that peers are told to connect to, given with commas between them, or raise UsageError: there is
    none at 0.0.0.0, or with a port. what: that has said so."""
    hosts = given.split(",") if is_text(given) else [given]
    if len(hosts) > HOSTS_MAX:
        raise UsageError(f"{what}={given!r:.80}: {len(hosts)} hosts, and at most {HOSTS_MAX} may be told to peers")
    return list(dict.fromkeys(_check_host(each, what) for each in hosts))


def _check_host(host: object, what: str) -> str:
    if not is_text(host) or len(host) > NAME_LENGTH_MAX or printable(host) != host:
        raise UsageError(f"{what}={host!r:.80}: a text of at most {NAME_LENGTH_MAX} characters that can be printed")
    host = host.strip(" ")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip = ipaddress.ip_address(bare)
        no_interface = ip.version == 6 and ip.is_link_local and "%" not in bare
        is_none = ip.is_unspecified or ip.is_multicast or ip == ipaddress.IPv4Address("255.255.255.255") or no_interface
    except ValueError:
        is_none = HOST_NAME.fullmatch(bare) is None or bare.rstrip(".").rpartition(".")[2].isdecimal()
    if is_none:
        raise UsageError(
            f"{what}={host!r:.80} cannot be connected to: give the address or the name, without a port, under which "
            "other hosts reach this one"
        )
    return bare


def addresses_of(interfaces: object, what: str = "interface") -> list[str]:
    """Return the addresses of network interfaces of this host, in their order, IPv4 first: of those of these, with
    commas between them, that are up and have any which leaves it. UsageError, which names the interfaces that have."""
    names = dict.fromkeys(interfaces.split(",")) if isinstance(interfaces, str) else {}
    if found := [address for each in names for address in _addresses_of(each.strip())]:
        return found
    known = [f"{name} ({', '.join(found)})" for name in _interfaces() if (found := _addresses_of(name))]
    raise UsageError(
        f"{what}={interfaces!r:.80}: no network interface of that name is up here and has an address; these have: "
        f"{', '.join(known) or 'none'}"
    )


def _interfaces() -> list[str]:
    """Return the names of this host's network interfaces; none where the system does not report them (AF_NETLINK)."""
    with contextlib.suppress(OSError):
        return [name for _, name in socket.if_nameindex()]
    return []


def _addresses_of(interface: str) -> list[str]:
    name, found = os.fsencode(interface), list[str]()
    if not 1 <= len(name) <= INTERFACE_NAME_MAX or b"\0" in name:
        return found
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = struct.unpack_from("H", ioctl(probe, GET_FLAGS, struct.pack("40s", name)), 16)
        if not flags & IS_UP:
            return found
        found.append(socket.inet_ntoa(ioctl(probe, GET_ADDRESS, struct.pack("40s", name))[20:24]))
    for address, _, _, _, flag, of in map(str.split, _table_v6().splitlines()):
        ip = ipaddress.IPv6Address(bytes.fromhex(address))
        if of == interface and not int(flag, 16) & NOT_IN_USE and not ip.is_link_local:
            found.append(str(ip))
    return found


def with_faster(hosts: Sequence[str], devices: Path = Path("/sys/class/net")) -> list[str]:
    """Return these addresses of this host, and those of its network cards whose links are faster than theirs, the
    fastest first; only private addresses, as these are not asked for. devices: by name."""
    speeds = {name: _speed(devices / name) for name in _interfaces()}
    known = {name: _addresses_of(name) for name, speed in speeds.items() if speed}
    slow = max((speeds[name] for name, has in known.items() if not set(has).isdisjoint(hosts)), default=math.inf)
    faster = sorted((name for name in known if speeds[name] > slow), key=lambda name: -speeds[name])
    private = [each for name in faster for each in known[name] if ipaddress.ip_address(each).is_private]
    return [*hosts, *private][:HOSTS_MAX]


def _speed(device: Path) -> int:
    """Return the Mbit/s of a network card's link, or of several that are bonded; 0: unknown, or it is no card."""
    with contextlib.suppress(OSError, ValueError):  # of what is down, or virtual
        if (device / "device").exists() or (device / "bonding").exists():
            return max(0, int((device / "speed").read_text()))
    return 0


def _table_v6() -> str:
    """Return lines of address, index, prefix, scope, flags, name; hexadecimal."""
    with contextlib.suppress(OSError):
        return Path("/proc/net/if_inet6").read_text()
    return ""
