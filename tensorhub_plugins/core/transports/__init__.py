"""The transfer of bytes from a source's slab into a target's: one interface, several transports.

A source has a *shelf* of *offers*, one for each shard it has published, and serves it on every transport it knows. A
reader connects, opens one offer by its `ShardKey`, reads segments of it straight into its own slab, checks that nothing
changed meanwhile, and closes: interface.py.

Two workers find their transport by trying: the reader goes through those it prefers in order, as far as the source has
an endpoint for them, until one connects and opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.options import DEFAULT_TRANSPORTS
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.security.tls import MODE_VARIABLE
from tensorhub_plugins.core.transports.interface import Bases, Link, LinkProgress, More, NotServable, Shelf, Transport
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS, TransportLimits
from tensorhub_plugins.core.transports.offer import Offer

__all__ = [
    "Bases",
    "DEFAULT_LIMITS",
    "DEFAULT_TRANSPORTS",
    "Link",
    "LinkProgress",
    "More",
    "NotServable",
    "Offer",
    "Shelf",
    "Transport",
    "TransportLimits",
    "choices",
    "create",
    "expected",
    "unavailable",
]

# Imported on first use: importing the package opens nothing and needs nothing.
MODULES: dict[str, tuple[str, str]] = {
    "shm": ("tensorhub_plugins.core.transports.shm.transport", "ShmTransport"),
    "cuda_ipc": ("tensorhub_plugins.core.transports.cuda_ipc.transport", "CudaIpcTransport"),
    "tcp": ("tensorhub_plugins.core.transports.tcp", "TcpTransport"),
    "tls": ("tensorhub_plugins.core.transports.tls", "TlsTransport"),
    "rdma": ("tensorhub_plugins.core.transports.rdma.transport", "RdmaTransport"),
}


def create(
    name: str,
    *,
    advertise_host: str | None = None,
    ports: range | None = None,
    limits: TransportLimits = DEFAULT_LIMITS,
    gate: Gate | None = None,
) -> Transport:
    """Make a transport by name. Raise UsageError for an unknown name, or with the reason why it does not work here.

    advertise_host: the address of this host that peers reach, for transports that leave it; None: this host only.
    ports: of theirs to listen on, the first that is free; None: what the environment says. limits: for transports with
    peers in other processes. gate: decides which readers may read; None: all."""
    reason = unavailable(name)
    if reason is not None:
        raise UsageError(f"transport {name!r} cannot be used here: {reason}")
    options: dict[str, Any] = {"limits": limits, "gate": gate}
    if name in ("tcp", "tls", "rdma"):
        options |= {"advertise_host": advertise_host, "ports": ports}
    return cast(Transport, _kind(name)(**options))


def unavailable(name: str) -> str | None:
    """Return why this transport does not work on this machine, as half a sentence, or None. UsageError: unknown."""
    return cast("str | None", _kind(name).available())


def expected(name: str) -> bool:
    """Return whether this machine has the hardware for it, so that a failure should be reported."""
    return bool(getattr(_kind(name), "expected", bool)())


def _kind(name: str) -> Any:
    if name not in MODULES:
        raise UsageError(f"there is no transport {name!r}; known are {', '.join(sorted(MODULES))}")
    module, attribute = MODULES[name]
    return getattr(import_module(module), attribute)


def choices(
    preferred: Sequence[str], endpoints: Mapping[str, str], *, far: bool = False, tls_only: bool = False
) -> list[tuple[str, str]]:
    """Return the (transport, endpoint) pairs to try, best first: those that the reader prefers and the source has. far:
    the source is in another data centre, and TLS comes first; with tls_only nothing else is allowed."""
    both = [name for name in preferred if name in endpoints and (name == "tls" or not (far and tls_only))]
    return [(name, endpoints[name]) for name in sorted(both, key=lambda name: far and name != "tls")]


def nothing_in_common(endpoints: Mapping[str, str], *, far: bool, tls_only: bool) -> str:
    """Explain why there are no `choices`."""
    if far and tls_only and "tls" not in endpoints:
        return f"it is in another data centre and has no TLS, which {MODE_VARIABLE}=required asks for here"
    if far and not endpoints:
        return f"it serves other data centres over TLS only ({MODE_VARIABLE}=required there), and has none"
    hint = ": it wants TLS, which is not set up here (TENSORHUB_TLS_CERT)" if set(endpoints) == {"tls"} else ""
    return f"no common transport: it has {sorted(endpoints)}{hint}"
