"""Sources that a reader cannot connect to, for people. PURE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NAMED_MAX = 3  # readers
REMEDY = (
    "set TENSORHUB_ADVERTISE or TENSORHUB_INTERFACE on its host to what other hosts can connect to, and "
    "TENSORHUB_PORTS to ports that a firewall lets pass"
)
# Loopback and link-local addresses.
ONE_HOST = re.compile(
    r"\w+://(localhost|127\.[\d.]+|169\.254\.[\d.]+|\[::1\]|\[fe[89ab][\da-f]:[^]]*\]):\d+", re.IGNORECASE
)


def is_of_one_host(endpoint: str) -> bool:
    """Return whether an endpoint of a transport leads nowhere, or to another process, from other hosts."""
    return ONE_HOST.fullmatch(endpoint) is not None


def unreached(source: str, endpoints: Mapping[str, str], readers: Sequence[str]) -> str:
    """Return that these readers cannot connect to this source, where they have tried, and what to do."""
    shown = ", ".join(readers[:NAMED_MAX]) + (f" and {len(readers) - NAMED_MAX} more" * (len(readers) > NAMED_MAX))
    where = [endpoint for name, endpoint in sorted(endpoints.items()) if name in ("rdma", "tcp", "tls")]
    why = ", an address of its own host alone" * any(map(is_of_one_host, where))
    at = f"at {', '.join(where)}{why}" if where else "as it serves no other host"
    return f"{shown} cannot connect to {source} {at}: {REMEDY}"
