"""TCP sockets of transports that leave the host: listening, connecting and tuning."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.protocol.address import (
    STAGGER_S,
    first_connected,
    lookup,
    parse_address,
    resolve,
    stands_for_loopback,
)
from tensorhub_plugins.core.protocol.advertised import ANY_PORT, HOST_VARIABLE, PORTS_VARIABLE, ports_of
from tensorhub_plugins.core.transports.stream.channel import Channel, Full
from tensorhub_plugins.core.transports.stream.link import greet
from tensorhub_plugins.core.transports.stream.source import BACKLOG
from tensorhub_plugins.core.transports.ways import WAYS

# A host that vanished silently is detected after about this long; longer than a frozen reader is given, since the
# kernel counts a closed window as silence too.
USER_TIMEOUT_MS = 90_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
LOOPBACK = "127.0.0.1"
LISTEN_LOOKUP_S = 2.0  # of this host's own name
ACCEPTED_S = 2.0  # for an endpoint that has accepted, or is silent, where there are others that may do better
PORT_TRIES = 16  # one that is free at an address may be taken at another one
# Within a host nothing is lost and the path is not shared: BBR, the default of some systems, would only hold bytes back
# (it takes 1.5 times as long). Reno is in every kernel and needs no privilege.
SAME_HOST_CONGESTION = b"reno"


def connect(
    endpoint: str, scheme: str, *, stall_s: float, deadline: float, make: Callable[..., Channel] = Channel
) -> Channel:
    """Connect to a source, which introduces itself. endpoint: or several of it, with commas between them: the best that
    lets us in is taken, and becomes the channel's peer. make: wraps the socket. Raise SourceLost, ProtocolError, or
    UsageError for what is no endpoint."""
    left = WAYS.order(endpoint.split(","), time.monotonic())
    where = {each: parse_address(each, scheme) for each in left}
    full: SourceLost | None = None  # as one of them has said; another one may lead to another worker, or to nothing
    while True:
        if not left or time.monotonic() >= deadline:
            raise full or SourceLost("the deadline passed", peer=endpoint, phase="connect")
        try:
            sock, taken = _first_of({each: where[each] for each in left}, Deadline.after(_within(deadline, stall_s)))
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up, like "a..b"
            if full is not None:
                raise full from full.__cause__
            raise SourceLost(f"cannot connect: {error}", peer=endpoint, phase="connect") from error
        for each in left[: left.index(taken)]:
            WAYS.shut(each, time.monotonic())
        others = left[left.index(taken) + 1 :]
        until = Deadline.after(min(_within(deadline) / 2, ACCEPTED_S)) if others else deadline
        try:
            return greet(sock, taken, stall_s=stall_s, deadline=until, make=make)
        except (SourceLost, ProtocolError) as error:  # another service has that address here
            if isinstance(error, SourceLost) and isinstance(error.__cause__, Full):
                full, deadline = error, min(deadline, Deadline.after(ACCEPTED_S))
            elif full is None and not others:
                raise
            else:
                WAYS.shut(taken, time.monotonic())
            left = others


def _within(deadline: float, limit_s: float = math.inf) -> float:
    return max(0.0, min(deadline - time.monotonic(), limit_s))


def _first_of(endpoints: Mapping[str, tuple[str, int]], deadline: Deadline) -> tuple[socket.socket, str]:
    """Connect to the first of these endpoints that lets us in; return which. Names that take long to look up do not
    keep the others waiting, and have their turn when those do not answer. Raise OSError or ValueError."""
    names = {each: lookup(host) for each, (host, _) in endpoints.items()}
    wait(names.values(), min(deadline.remaining(), STAGGER_S) if len(names) > 1 else 0.0)
    late = [name for name in names.values() if not name.done()]
    if late:
        with contextlib.suppress(OSError):
            return _first_found(endpoints, names, Deadline.after(min(deadline.remaining() / 2, ACCEPTED_S)))
        wait(late, deadline.remaining(), FIRST_COMPLETED)
    if not _found(names):  # raises as it says
        resolve(next(iter(endpoints.values()))[0], deadline)
    return _first_found(endpoints, names, deadline)


def _found(names: Mapping[str, Future[tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    return {each: name.result() for each, name in names.items() if name.done() and name.exception() is None}


def _first_found(
    endpoints: Mapping[str, tuple[str, int]], names: Mapping[str, Future[tuple[str, ...]]], deadline: Deadline
) -> tuple[socket.socket, str]:
    """Do so with those whose names have been looked up."""
    ways = [(each, (ip, endpoints[each][1])) for each, addresses in _found(names).items() for ip in addresses]
    sock, which = first_connected([address for _, address in ways], deadline)
    try:
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock, ways[which][0]


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


def listen(hosts: Sequence[str], ports: range | None = None) -> list[socket.socket]:
    """Return listeners on these addresses, all on one port; or one on all of this host's if it has not each of them
    (address translation) or if one is a name of several or of loopback here. ports: the first that is free is taken;
    None: as in the environment. Raise UsageError."""
    ports = ports_of() if ports is None else ports
    for port in ports if ports != ANY_PORT else [0] * (PORT_TRIES if len(hosts) > 1 else 1):
        try:
            return _listen(hosts, port)
        except UsageError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not taken or (ports == ANY_PORT and len(hosts) == 1):
                raise
    raise UsageError(
        f"all ports from {ports[0]} to {ports[-1]} are taken: each client takes one for each of tcp, tls and rdma, so "
        f"give a longer range, as {PORTS_VARIABLE} or as ports"
    )


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return listeners on this port, as `listen` does."""
    own = [_own_address(host) for host in hosts]
    try:
        if all(own):
            with contextlib.suppress(_NotHere):
                return _listeners([ip for ip in own if ip], port)
        with contextlib.suppress(_NotHere):  # of both families, if this host has both
            return [_listener("::", port)]
        return [_listener("0.0.0.0", port)]
    except OSError as error:
        said = f", one of {PORTS_VARIABLE} or ports" if port else ""
        raise UsageError(f"cannot listen on {', '.join(map(repr, hosts))}, port {port}{said}: {error}") from error


def _own_address(host: str) -> str | None:
    """Return the address that a host of our own stands for; None: several, or loopback here. Raise UsageError."""
    try:
        found = resolve(host, Deadline.after(LISTEN_LOOKUP_S))
    except (OSError, ValueError) as error:
        what = HOST_VARIABLE if host in os.environ.get(HOST_VARIABLE, "").split(",") else "advertise_host"
        raise UsageError(f"{what}={host!r} is not an address: {error}") from error
    is_one = host == "localhost" or (len(found) == 1 and not stands_for_loopback(found[0], host))
    return found[0] if is_one else None


def _listeners(ips: Sequence[str], port: int) -> list[socket.socket]:
    """Return a listener on each of these addresses, all on one port. Raise as `_listener`."""
    with contextlib.ExitStack() as opened:
        listeners = list[socket.socket]()
        for ip in dict.fromkeys(ips):
            listeners.append(opened.enter_context(_listener(ip, port)))
            port = listeners[0].getsockname()[1]
        opened.pop_all()
        return listeners


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
