"""The hub's figures over HTTP, as Prometheus reads them: `GET /metrics`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.core.hub.server import Server

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

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


@contextlib.contextmanager
def served(server: Server, host: str, port: int) -> Iterator[str]:
    """Serve the hub's figures, and this process's memory, files and processor time, within the block. Yield the URL.
    Raise UsageError where the address is taken, or is none of this host's. port 0 takes a free one."""
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    registry.register(Figures(server))
    ProcessCollector(registry=registry)
    try:
        http, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError, ValueError) as error:  # ValueError: what is no name
        raise UsageError(f"metrics cannot be served at {host}:{port}: {error}; choose --metrics-port") from error
    try:
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{http.server_port}/metrics"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
