"""The transport over TLS 1.3, for links between sites: tcp.py with channels that encrypt.

Python's `ssl` copies every byte through records of 16 KiB: 0.43 GB/s where tcp has 1.51 (two busy cores, loopback, one
stream, 512 MiB with digests, medians of six alternating reads). So it is for links that are slower than that, which
carry several streams; within a data centre readers take another transport if the source has one.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.security import tls
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected, Silent, Stranger
from tensorhub_plugins.core.transports.tcp import TcpSource, TcpTransport


class TlsTransport(TcpTransport):
    """A transport over TLS. files: None: as in the environment; UsageError without. Other options: as for tcp."""

    name = "tls"

    def __init__(self, advertise_host: str | None = None, *, files: tls.TlsFiles | None = None, **options: Any) -> None:
        files = tls.files_from_environment() if files is None else files
        if files is None:
            raise UsageError(f"TLS needs a certificate: {TlsTransport.available()}")
        super().__init__(advertise_host, **options)
        reads, serves = tls.contexts(files)
        self._channel = partial(TlsChannel, context=reads, server_side=False)
        self._source = TlsSource(serves)

    @staticmethod
    def available() -> str | None:
        if tls.files_from_environment() is None:
            return f"{tls.CERT_VARIABLE}, {tls.KEY_VARIABLE} and {tls.CA_VARIABLE} name no files"
        return None


class TlsSource(TcpSource):
    """A backend that serves every reader with a certificate of the run's CA."""

    name = "tls"

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def channel(self, sock: socket.socket, peer: str, stall_s: float) -> Channel:
        return TlsChannel(sock, peer, stall_s=stall_s, context=self._context, server_side=True)


class TlsChannel(Channel):
    """A channel that waits with the socket's own timeout, which Python's ssl respects. The first call shakes hands."""

    sock: ssl.SSLSocket

    def __init__(
        self, sock: socket.socket, peer: str, *, stall_s: float, context: ssl.SSLContext, server_side: bool
    ) -> None:
        wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        super().__init__(wrapped, peer, stall_s=stall_s)
        self._serves = server_side

    def send(self, views: Sequence[bytes | memoryview], deadline: float | None) -> None:
        for view in views:
            left = memoryview(view)
            while left:
                self._limit(deadline)
                try:
                    left = left[self.sock.send(left) :]
                except TimeoutError:
                    raise Silent("took nothing") from None
                except (OSError, ValueError) as error:  # ValueError: closed meanwhile
                    raise self._lost(error) from error

    def fill(self, views: Sequence[memoryview], deadline: float | None) -> None:
        for view in views:
            left = view
            while left:
                self._limit(deadline)
                try:
                    count = self.sock.recv_into(left)
                except TimeoutError:
                    raise Silent("sent nothing") from None
                except (OSError, ValueError) as error:
                    raise self._lost(error) from error
                if not count:  # also in the middle of a record: a truncated stream is a loss
                    raise Disconnected("closed the connection")
                left = left[count:]

    def refuse(self) -> None:
        self.close()  # it would have to wait for the keys first

    def has_input(self) -> bool:
        return self.sock.pending() > 0 or super().has_input()

    def cut(self) -> None:
        # `SSLSocket.shutdown` drops its keys first: what another thread sends at that moment would go unencrypted.
        with self._guard, contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def _limit(self, deadline: float | None) -> None:
        if deadline is None:
            self.sock.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise Silent("was not done")
        try:
            self.sock.settimeout(min(left, self._stall_s))
        except OSError as error:
            raise Disconnected(str(error)) from error

    def _lost(self, error: Exception) -> Disconnected:
        if not isinstance(error, ssl.SSLError):
            return Disconnected(str(error))
        is_stranger = self._serves and not isinstance(error, ssl.SSLEOFError)
        return (Stranger if is_stranger else Disconnected)(f"TLS: {error}")
