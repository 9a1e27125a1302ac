"""The common part of transports over sockets: one server for one shelf, and links that end with the transport."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports.interface import Shelf
from tensorhub_plugins.core.transports.limits import TransportLimits
from tensorhub_plugins.core.transports.stream.link import Connection, SocketLink
from tensorhub_plugins.core.transports.stream.source import SourceBackend, StreamServer
from tensorhub_plugins.core.transports.ways import WAYS


class SocketTransport:
    """The base class of tcp, shm, rdma and cuda_ipc."""

    _source: SourceBackend  # for `serve`

    def __init__(self, limits: TransportLimits, gate: Gate | None) -> None:
        self._limits, self._gate = limits, gate
        self._idle: deque[Connection] = deque()  # for the next links, the oldest first
        self._server: StreamServer | None = None
        self._links: weakref.WeakSet[SocketLink] = weakref.WeakSet()
        self._links_guard = threading.Lock()
        self._closed = False

    def _listen(self) -> tuple[list[socket.socket], str]:
        """Return listening sockets, and the endpoint that peers connect to."""
        raise NotImplementedError

    def serve(self, shelf: Shelf) -> str:
        if self._closed or self._server is not None:
            raise UsageError("this transport is closed or serves already: one transport, one shelf")
        listeners, endpoint = self._listen()
        self._server = StreamServer(listeners, shelf, self._source, self._limits, self._gate)
        return endpoint

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the transport is closed")

    def _add(self, link: SocketLink) -> None:
        with self._links_guard:
            self._links.add(link)
            closed = self._closed
        if closed:  # closed by another thread, while this one connected
            link.cut()

    def _keep(self, connection: Connection) -> None:
        surplus: Connection | None = connection
        with self._links_guard:
            if not self._closed:
                self._idle.append(connection)
                surplus = self._idle.popleft() if len(self._idle) > self._limits.idle_at_reader_max else None
        if surplus is not None:
            surplus.close()

    def _take(self, endpoints: Sequence[str], count: int = 1) -> Connection | None:
        """Return a kept connection of so many channels to the best of these endpoints of a source, the one that was
        used last; None: there is none."""
        best = WAYS.order(endpoints, time.monotonic())[0] if len(endpoints) > 1 else endpoints[0]
        with self._links_guard:
            alike = [each for each in self._idle if each.channels[0].peer == best and len(each.channels) == count]
            lost = [each for each in alike if any(channel.is_lost() for channel in each.channels)]
            taken = next((each for each in reversed(alike) if each not in lost), None)
            self._idle = deque(each for each in self._idle if each is not taken and each not in lost)
        for each in lost:
            each.close()
        return taken

    def close(self) -> None:
        """Stop serving, and cut all links, so that their users get SourceLost. Idempotent."""
        with self._links_guard:
            self._closed = True
            links = list(self._links)
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()
        if self._server is not None:
            self._server.close()
        for link in links:
            link.cut()
