"""UNIX sockets between processes of one host, in the abstract namespace, and the identity of the peer.

Being able to connect is what "the same host" means for shm and cuda_ipc: containers that share no network namespace use
tcp.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
import uuid

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import greet
from tensorhub_plugins.core.transports.stream.source import BACKLOG

AGAIN_S = 0.005  # between two tries where more wait to be accepted than the system queues

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def forbidden() -> str | None:
    """Return why no such socket can be made here; None: one can, or too many are open now."""
    try:
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close()
    except OSError as error:
        if resources.refusal(error) is None:
            return f"UNIX sockets are forbidden here ({error})"
    return None


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return (process, user) of the peer; process 0: not visible from here."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def check_owner(sock: socket.socket) -> int:
    """Return the peer's process. Raise ProtocolError when it is another user's: the abstract namespace has no
    permissions of its own, so a stranger may connect to us, or listen where we connect."""
    pid, uid = peer_of(sock)
    if uid not in (os.geteuid(), 0):
        raise ProtocolError(f"process {pid} belongs to user {uid}, not to {os.geteuid()}")
    return pid


def listen(scheme: str) -> tuple[list[socket.socket], str]:
    """Return a listening socket with a new name, and its endpoint. scheme: "shm://", for example."""
    name = f"tensorhub-{uuid.uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on an abstract UNIX socket: {error}") from error
    return [listener], scheme + name


def connect(endpoint: str, scheme: str, *, stall_s: float, deadline: float) -> Channel:
    """Connect and introduce ourselves. Raise SourceLost; UsageError for an endpoint of another kind."""
    name = endpoint.removeprefix(scheme)
    if not endpoint.startswith(scheme) or not name:
        raise UsageError(f"{endpoint!r} is no endpoint of {scheme[:-3]}, which look like {scheme}tensorhub-...")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    until = min(deadline, time.monotonic() + stall_s)
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        while (failed := sock.connect_ex("\0" + name)) == errno.EAGAIN and time.monotonic() < until:
            time.sleep(AGAIN_S)  # unlike TCP's, this connect does not wait itself
        if failed:
            raise OSError(failed, os.strerror(failed))
        check_owner(sock)
    except (OSError, ValueError, ProtocolError) as error:
        sock.close()
        raise SourceLost(f"not on this host, or gone: {error}", peer=endpoint, phase="connect") from error
    return greet(sock, endpoint, stall_s=stall_s, deadline=deadline)
