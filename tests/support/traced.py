"""Processes that keep their spans in memory: a trainer and a rollout, as adapters record what these do."""

from __future__ import annotations

from typing import Any

from client_processes import tensors_of
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tensorhub_plugins.core import Client, run_log
from tensorhub_plugins.core.client.publisher import Publisher

Spans = list[tuple[str, int, int, int, int]]


class Traced:
    def __init__(self, address: str, run: str, sampler: Any = None) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        trace.set_tracer_provider(provider)
        self.client = Client(address, run=run, model="actor", replica=type(self).__name__, transports=("tcp",))

    def spans(self) -> Spans:
        """Return the name, version, trace, parent's id (0: a root) and own id of each span."""
        return [
            (
                span.name,
                span.attributes["tensorhub.version"],
                own.trace_id,
                getattr(span.parent, "span_id", 0),
                own.span_id,
            )
            for span in self.exporter.get_finished_spans()
            for own in [span.context]
        ]


class Trainer(Traced):
    def publish(self, *steps: int, begins: bool = True) -> Spans:
        """Publish these steps, each as a trainer that has started again, or as one that never says that it has."""
        for step in steps:
            publisher = Publisher(self.client, rank=0, ranks=1, worker="trainer/0", keep=9, timeout_s=60, begins=begins)
            publisher.publish(step, tensors_of(step).items())
        return self.spans()


class Rollout(Traced):
    def install(self, *versions: int) -> Spans:
        """Fetch, install and resume, as the processes of an engine record it."""
        for version in versions:
            report = self.client.fetch(version, timeout_s=60).report
            run_log.record_fetch(report, self.client, worker="a/0", seconds=0.1)
            run_log.record("install", worker="a/0", version=version, seconds=0.1)
            run_log.record("resume", worker="a", version=version, seconds=0.1, origin=self.client.origin(version))
        return self.spans()
