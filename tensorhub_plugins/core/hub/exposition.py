"""The hub's figures over HTTP, as Prometheus reads them: `GET /metrics`."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.core.hub.server import LOOKUP_S, Server
from tensorhub_plugins.core.protocol.address import resolve
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.threads import Thread

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

log = logging.getLogger("tensorhub.hub")
REQUEST_S = 10.0
SCRAPES_MAX = 16  # at a time: connections that ask for nothing take none of the files that workers need
UP = "tensorhub_hub_answers", "1 if the hub has answered; else no other figure of it is here"


class Figures:
    """A collector of prometheus_client that asks the hub's thread at each scrape."""

    def __init__(self, server: Server) -> None:
        """Ask this hub, which runs in this process."""
        self._server = server

    def collect(self) -> Iterator[Family]:
        """Yield the figures of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            figures = self._server.figures()
        except TensorHubError:
            figures = []
        yield GaugeMetricFamily(*UP, value=float(bool(figures)))
        for figure in figures:
            names = [name for name, _ in figure.values[0][0]] if figure.values else []
            kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
            family = kind(figure.name, figure.help, labels=names)
            for labels, value in figure.values:
                family.add_metric([text for _, text in labels], value)
            yield family


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log no request."""


class _Http(ThreadingWSGIServer):
    request_queue_size = 2 * SCRAPES_MAX

    def server_bind(self) -> None:
        """Bind it. HTTPServer's would look up this host's full name, for as long as the resolver takes."""
        TCPServer.server_bind(self)
        self.free = threading.Semaphore(SCRAPES_MAX)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or in this one, where there is none left; close what is too many."""
        if not self.free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self.process_request_thread(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer it, and make room for the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, *_: Any) -> None:
        """Log a scrape that has failed, as its scraper has gone."""
        log.debug("a request for metrics has failed", exc_info=True)


@contextlib.contextmanager
def served(
    server: Server, host: str, port: int, lookup_s: float = LOOKUP_S, request_s: float = REQUEST_S
) -> Iterator[str]:
    """Serve the hub's figures, and this process's memory, files and processor time, within the block. Yield the URL.
    Raise UsageError where the address is taken, or is none of this host's. port 0 takes a free one.
    lookup_s: for the host's name. request_s: for the next bytes of a request."""
    host, registry = host.strip("[]"), CollectorRegistry()
    registry.register(Figures(server))
    ProcessCollector(registry=registry)
    with contextlib.ExitStack() as stack:
        try:
            found = resolve(host, Deadline.after(lookup_s))[0]
            family = socket.AF_INET6 if ":" in found else socket.AF_INET
            made = type("_Http", (_Http,), {"address_family": family})
            handler = type("_Handler", (_Handler,), {"timeout": request_s})
            http: WSGIServer = stack.enter_context(made((found, port), handler))
            http.set_app(make_wsgi_app(registry))
            thread = Thread(target=http.serve_forever, name="tensorhub-metrics")
            thread.start()
        except (OSError, OverflowError, ValueError, RuntimeError) as error:  # ValueError: what is no name
            why = resources.refusal(error)
            to_do = f"{why.message}" if why else f"{error}; choose --metrics-port, or --metrics-host"
            at = format_address("http", host, port)
            raise UsageError(f"metrics cannot be served at {at}: {to_do}") from error
        stack.callback(thread.join)
        stack.callback(http.shutdown)
        yield f"{format_address('http', host, http.server_port)}/metrics"
