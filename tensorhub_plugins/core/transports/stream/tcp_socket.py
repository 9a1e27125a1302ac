"""TCP sockets of transports that leave the host: listening, connecting and tuning."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import SourceLost, UsageError
from tensorhub_plugins.core.protocol.address import connected, resolve, stands_for_loopback
from tensorhub_plugins.core.protocol.advertised import ANY_PORT, HOST_VARIABLE, PORTS_VARIABLE, ports_of
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import greet
from tensorhub_plugins.core.transports.stream.source import BACKLOG

# A host that vanished silently is detected after about this long; longer than a frozen reader is given, since the
# kernel counts a closed window as silence too.
USER_TIMEOUT_MS = 90_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
LOOPBACK = "127.0.0.1"
LISTEN_LOOKUP_S = 2.0  # of this host's own name
# Within a host nothing is lost and the path is not shared: BBR, the default of some systems, would only hold bytes back
# (it takes 1.5 times as long). Reno is in every kernel and needs no privilege.
SAME_HOST_CONGESTION = b"reno"


def connect(
    endpoint: str, host: str, port: int, *, stall_s: float, deadline: float, make: Callable[..., Channel] = Channel
) -> Channel:
    """Connect to a source, which introduces itself. make: wraps the socket. Raise SourceLost or ProtocolError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise SourceLost("the deadline passed", peer=endpoint, phase="connect")
    sock: socket.socket | None = None
    try:
        sock = connected(host, port, Deadline.after(min(left, stall_s)))
        tune(sock)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up, like "a..b"
        if sock is not None:
            sock.close()
        raise SourceLost(f"cannot connect: {error}", peer=endpoint, phase="connect") from error
    return greet(sock, endpoint, stall_s=stall_s, deadline=deadline, make=make)


def tune(sock: socket.socket) -> None:
    """Disable Nagle's delay, and set keep-alives that detect a dead peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        if hasattr(socket, option):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_CONGESTION") and sock.getsockname()[0] == sock.getpeername()[0]:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SAME_HOST_CONGESTION)


def listen(host: str, ports: range | None = None) -> socket.socket:
    """Return a listener on this address, or on all of this host's if it has no such one (address translation) or if it
    is a name of several or of loopback here. ports: the first that is free is taken; None: as in the environment. Raise
    UsageError."""
    ports = ports_of() if ports is None else ports
    for port in ports:
        try:
            return _listen(host, port)
        except UsageError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not taken or ports == ANY_PORT:
                raise
    raise UsageError(
        f"all ports from {ports[0]} to {ports[-1]} are taken: each client takes one for each of tcp, tls and rdma, so "
        f"give a longer range, as {PORTS_VARIABLE} or as ports"
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a listener on this port, as `listen` does."""
    try:
        found = resolve(host, Deadline.after(LISTEN_LOOKUP_S))
    except (OSError, ValueError) as error:
        what = HOST_VARIABLE if os.environ.get(HOST_VARIABLE) == host else "advertise_host"
        raise UsageError(f"{what}={host!r} is not an address: {error}") from error
    try:
        if host == "localhost" or (len(found) == 1 and not stands_for_loopback(found[0], host)):
            with contextlib.suppress(_NotHere):
                return _listener(found[0], port)
        with contextlib.suppress(_NotHere):  # of both families, if this host has both
            return _listener("::", port)
        return _listener("0.0.0.0", port)
    except OSError as error:
        said = f", one of {PORTS_VARIABLE} or ports" if port else ""
        raise UsageError(f"cannot listen on {host!r}, port {port}{said}: {error}") from error


class _NotHere(Exception):
    """This host has no such address, or nothing of its family."""


def _listener(ip: str, port: int) -> socket.socket:
    """Return a listener on this address alone, "::" for all of both families. Raise OSError, or `_NotHere`."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        *_, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _NotHere if error.errno == errno.EAFNOSUPPORT else error from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ip == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        raise _NotHere if error.errno == errno.EADDRNOTAVAIL else error from None
