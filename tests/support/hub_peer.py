"""A peer at the hub's port that speaks for itself: a bare socket, without a client's session behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import new_session
from tensorhub_plugins.core.security import curve
from tensorhub_plugins.core.security.keys import Keys

TIMEOUT_MS = 20_000


@contextlib.contextmanager
def peer(
    address: str, keys: Keys | None = None, session: bytes | None = None, **options: int
) -> Iterator[zmq.Socket[bytes]]:
    """Yield a bare socket. session: None for a new one. options: of the socket, over these."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    for name, value in {"LINGER": 0, "RCVTIMEO": TIMEOUT_MS, "SNDTIMEO": TIMEOUT_MS, **options}.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.setsockopt(zmq.IDENTITY, new_session() if session is None else session)
    curve.guard_client(socket, keys)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def ask(socket: zmq.Socket[bytes], message: m.ClientMessage) -> m.HubMessage:
    """Send this, and return the hub's next message."""
    socket.send(m.encode(message))
    return m.decode_from_hub(socket.recv())
