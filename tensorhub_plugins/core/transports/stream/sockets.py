"""The common part of transports over sockets: one server for one shelf, and links that end with the transport."""

from __future__ import annotations

import threading
import weakref

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.transports.stream.link import SocketLink
from tensorhub_plugins.core.transports.stream.source import StreamServer


class SocketTransport:
    """The base class of tcp, shm, rdma and cuda_ipc."""

    def __init__(self) -> None:
        self._server: StreamServer | None = None
        self._links: weakref.WeakSet[SocketLink] = weakref.WeakSet()
        self._links_guard = threading.Lock()
        self._closed = False

    def _check_may_serve(self) -> None:
        if self._closed or self._server is not None:
            raise UsageError("this transport is closed or serves already: one transport, one shelf")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the transport is closed")

    def _add(self, link: SocketLink) -> None:
        with self._links_guard:
            self._links.add(link)
            closed = self._closed
        if closed:  # closed by another thread, while this one connected
            link.cut()

    def close(self) -> None:
        """Stop serving, and cut all links, so that their users get SourceLost. Idempotent."""
        with self._links_guard:
            self._closed = True
            links = list(self._links)
        if self._server is not None:
            self._server.close()
        for link in links:
            link.cut()
