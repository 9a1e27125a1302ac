"""TCP sockets of transports that leave the host: how they listen, connect and are tuned."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import SourceLost, UsageError
from tensorhub_plugins.core.protocol.address import PORT_MAX, resolve
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import greet
from tensorhub_plugins.core.transports.stream.source import BACKLOG

# A host that vanished without a word is noticed after about this long; longer than a frozen reader is given, since the
# kernel counts a closed window as silence too.
USER_TIMEOUT_MS = 90_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
LOOPBACK = "127.0.0.1"
PORTS_VARIABLE = "TENSORHUB_PORTS"
CONNECT_S_MIN = 0.001  # 0 would mean not to wait for the answer at all
LISTEN_LOOKUP_S = 2.0  # of this host's own name
# Within a host nothing is lost and nobody shares the way: BBR, the default of some systems, would only hold bytes back
# (it takes 1.5 times as long). Reno is in every kernel and needs no privilege.
SAME_HOST_CONGESTION = b"reno"


def connect(
    endpoint: str, host: str, port: int, *, stall_s: float, deadline: float, make: Callable[..., Channel] = Channel
) -> Channel:
    """A connection to a source that has introduced itself. make: of the connected socket. SourceLost, ProtocolError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise SourceLost("the deadline passed", peer=endpoint, phase="connect")
    sock: socket.socket | None = None
    try:
        sock = _connected(host, port, Deadline.after(min(left, stall_s)))
        tune(sock)
    except (OSError, ValueError) as error:  # ValueError: no name that can be looked up, as "a..b"
        if sock is not None:
            sock.close()
        raise SourceLost(f"cannot connect: {error}", peer=endpoint, phase="connect") from error
    return greet(sock, endpoint, stall_s=stall_s, deadline=deadline, make=make)


def _connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first of its IP addresses that lets us in. Raise the last one's OSError, or ValueError."""
    *others, last = resolve(host, deadline)
    for number, each in enumerate(others):
        with contextlib.suppress(OSError):
            left_s = deadline.remaining() / (len(others) + 1 - number)
            return socket.create_connection((each, port), timeout=max(CONNECT_S_MIN, left_s))
    return socket.create_connection((last, port), timeout=max(CONNECT_S_MIN, deadline.remaining()))


def tune(sock: socket.socket) -> None:
    """No delay, and keep-alives that notice a dead peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        if hasattr(socket, option):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_CONGESTION") and sock.getsockname()[0] == sock.getpeername()[0]:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SAME_HOST_CONGESTION)


def ports() -> range:
    """Return the ports that TENSORHUB_PORTS=from-to allows for data; only 0, any that is free, where it is not set."""
    said = os.environ.get(PORTS_VARIABLE, "")
    if not said:
        return range(1)
    first, dash, last = said.partition("-")
    decimal = dash and all(each.isascii() and each.isdecimal() and len(each) <= 5 for each in (first, last))
    if not decimal or not 1 <= int(first) <= int(last) <= PORT_MAX:
        raise UsageError(f"{PORTS_VARIABLE}={said!r:.80}: a range of ports, as in 7100-7163, from 1 to {PORT_MAX}")
    return range(int(first), int(last) + 1)


def listen(host: str, port: int) -> socket.socket:
    """A listener on this address; on all, where it is not of this host (address translation). port: 0 takes the first
    free one of `ports`. UsageError."""
    choices = range(port, port + 1) if port else ports()
    for each in choices:
        try:
            return _listen(host, each)
        except UsageError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not taken or len(choices) == 1:
                raise
    said = os.environ.get(PORTS_VARIABLE)
    raise UsageError(
        f"all ports of {PORTS_VARIABLE}={said} are taken: each client takes one for each of tcp, tls, rdma"
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listener on this address and port. UsageError."""
    try:
        found = resolve(host, Deadline.after(LISTEN_LOOKUP_S))[0]
        family, kind, protocol, _, address = socket.getaddrinfo(
            found, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, ValueError) as error:
        raise UsageError(f"advertise_host={host!r} is not an address: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host!r}, port {port}: {error}") from error
    return listener
