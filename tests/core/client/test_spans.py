"""The spans of one version, where programs have OpenTelemetry: one trace, from whatever process they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from client_processes import Process
from hub_limits import AT_ONCE

from tensorhub_plugins.core import start_server, version_of

sampling = pytest.importorskip("opentelemetry.sdk.trace.sampling", reason="no OpenTelemetry SDK here")


@pytest.fixture
def start() -> Iterator[Any]:
    """Start a process of traced.py at a hub of this test."""
    import traced

    with start_server(limits=AT_ONCE) as server:
        started: list[Process] = []

        def start(kind: str, run: str, sampler: Any = None) -> Process:
            started.append(Process(getattr(traced, kind), server.address, run, sampler))
            return started[-1]

        yield start
        for process in started:
            process.close()


def test_the_spans_of_a_version_are_one_trace_over_processes(start: Any) -> None:
    """Its publish is the root. Another version, another run, another start of the trainer: traces of their own."""
    versions = [1, version_of(1, 2)]  # the second after a restart
    publishes, others = (
        start("Trainer", run).call("publish", *steps) for run, steps in (("r", [1, 2]), ("other", [1]))
    )
    spans = start("Rollout", "r").call("install", *versions)
    assert [each[:2] for each in publishes] == [("tensorhub.publish", version) for version in versions]
    for (_, version, trace, parent, root), of_it in zip(publishes, (spans[:3], spans[3:]), strict=True):
        names, of, traces, parents, ids = zip(*of_it, strict=True)
        assert names == ("tensorhub.fetch", "tensorhub.install", "tensorhub.resume") and set(of) == {version}
        assert set(traces) == {trace} and parent == 0 and parents == (root, ids[0], root)
    assert len({trace for _, _, trace, _, _ in publishes + others}) == 3  # the control


def test_a_version_is_sampled_whole_or_not_at_all(start: Any) -> None:
    trainer, rollout = (start(kind, "r", sampling.ParentBasedTraceIdRatio(0.5)) for kind in ("Trainer", "Rollout"))
    published = [version for _, version, *_ in trainer.call("publish", *range(1, 13), begins=False)]
    fetched = [version for name, version, *_ in rollout.call("install", *range(1, 13))]
    assert 0 < len(published) < 12 and sorted(fetched) == sorted(3 * published)
