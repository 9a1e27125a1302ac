"""Endpoints of workers as text, and those that a reader cannot connect to, for people. PURE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LEAVE_THE_HOST = ("rdma", "tcp", "tls")  # transports to which other hosts may connect
NAMED_MAX = 3  # readers
REMEDY = (
    "set TENSORHUB_ADVERTISE or TENSORHUB_INTERFACE on its host to what other hosts can connect to, and "
    "TENSORHUB_PORTS to ports that a firewall lets pass"
)
# Loopback and link-local addresses.
ONE_HOST = re.compile(
    r"\w+://(localhost|127\.[\d.]+|169\.254\.[\d.]+|\[::1\]|\[fe[89ab][\da-f]:[^]]*\]):\d+", re.IGNORECASE
)


def format_address(scheme: str, host: str, port: int | str) -> str:
    """Return an address like "tcp://host:port", with an IPv6 address in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def at_all_hosts(endpoints: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """Return a worker's endpoints by transport, and with commas between them those at its further hosts."""

    def further(name: str, endpoint: str) -> list[str]:
        port = endpoint.rpartition(":")[2]
        return [format_address(name, host, port) for host in hosts] if name in LEAVE_THE_HOST else []

    return {name: ",".join([endpoint, *further(name, endpoint)]) for name, endpoint in endpoints.items()}


def is_of_one_host(endpoint: str) -> bool:
    """Return whether an endpoint of a transport leads nowhere, or to another process, from other hosts."""
    return ONE_HOST.fullmatch(endpoint) is not None


def unreached(source: str, endpoints: Mapping[str, str], readers: Sequence[str]) -> str:
    """Return that these readers cannot connect to this source, where they have tried, and what to do. endpoints: by
    transport, of several with commas between them."""
    shown = ", ".join(readers[:NAMED_MAX]) + (f" and {len(readers) - NAMED_MAX} more" * (len(readers) > NAMED_MAX))
    named = [endpoint for name, endpoint in sorted(endpoints.items()) if name in LEAVE_THE_HOST]
    where = [each for endpoint in named for each in endpoint.split(",")]
    why = ", an address of its own host alone" * all(map(is_of_one_host, where))
    at = f"at {', '.join(where)}{why}" if where else "as it serves no other host"
    return f"{shown} cannot connect to {source} {at}: {REMEDY}"
