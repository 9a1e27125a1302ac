"""The journal of a process: where it is, how large, and what OpenTelemetry gets of it."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tensorhub_plugins.core import resources, run_log
from tensorhub_plugins.core.types import RECENT_S


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_an_option_names_the_folder_where_the_environment_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path / "environment"))
    run_log.use(str(tmp_path / "option"))
    run_log.record("x")
    monkeypatch.delenv(run_log.VARIABLE)
    run_log.use(None)
    assert not run_log.enabled()
    run_log.use(str(tmp_path / "option"))
    run_log.record("y", none=None)
    assert [[event["event"] for event in events(tmp_path / name)] for name in ("environment", "option")] == [
        ["x"],
        ["y"],
    ]
    monkeypatch.setenv(run_log.VARIABLE, "")  # monkeypatch puts back what it was before the test


def test_it_takes_bounded_space_and_keeps_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads at once: no line is torn, none of the last ones is lost."""
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    run_log.record("first")
    monkeypatch.setattr(run_log, "_room", 40_000)  # bytes that are left

    def write(worker: int) -> None:
        for number in range(200):
            run_log.record("x", worker=str(worker), number=number)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = sorted(tmp_path.iterdir())
    assert [file.name.split(".", 1)[1] for file in files] == ["jsonl", "old.jsonl"]
    assert 39_000 < files[1].stat().st_size < 41_000 and len(events(tmp_path)) == 1601
    monkeypatch.setattr(run_log, "_room", 0)
    run_log.record("last")
    assert sorted(tmp_path.iterdir()) == files and files[0].read_text().count("\n") == 1
    assert "first" not in files[1].read_text()  # what was oldest has given way
    files[0].unlink()  # somebody tidies up: it goes on
    monkeypatch.setattr(run_log, "_room", 0)
    run_log.record("after")
    assert json.loads(files[0].read_text())["event"] == "after"


def test_a_disk_that_gets_full_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when there is room again what follows is not lost: a container's processes have the same names each time."""
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # as a full disk: it writes a part
        for number in range(100):
            run_log.record("before", number=number)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        vars(run_log).update(_failed_pid=-1, _file=None)  # as the next process of this name
        run_log.record("after")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    *before, last = [event["event"] for event in events(tmp_path)]
    assert 5 < len(before) < 100 and set(before) == {"before"} and last == "after"


def test_a_folder_that_is_cleared_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all that follows would go to a file that nobody can open."""
    folder = tmp_path / "events"
    monkeypatch.setenv(run_log.VARIABLE, str(folder))
    run_log.record("before")
    run_log.record("before")
    assert len(events(folder)) == 2  # the control: while it is there it is one file
    shutil.rmtree(folder)
    run_log.record("after")
    assert [event["event"] for event in events(folder)] == ["after"]


def test_a_child_records_though_a_thread_wrote_when_it_was_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    with run_log._lock:
        child = os.fork()
        if not child:
            writer = threading.Thread(target=run_log.record, args=("of a child",), daemon=True)
            writer.start()
            writer.join(10.0)
            os._exit(writer.is_alive())
    assert os.waitpid(child, 0)[1] == 0 and [event["event"] for event in events(tmp_path)] == ["of a child"]


def test_spans_are_what_a_program_with_opentelemetry_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="no OpenTelemetry SDK here")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)  # a process has one provider, for good
    monkeypatch.delenv(run_log.VARIABLE, raising=False)  # without a journal, too
    with provider.get_tracer("trainer").start_as_current_span("step 7") as step:
        run_log.record("publish", worker="trainer/0", version=7, seconds=2.0, t=1000.0, bytes=5)
    run_log.record("fetch", worker="a/0", version=7, seconds=1.0, t=1001.5, sources={"trainer/0": 5}, lost=None)
    run_log.record("install", worker="a/0", version=7, seconds=0.5, t=1003.0)
    run_log.record("install", worker="a/0", version=8, seconds=0.5, t=1004.0)
    run_log.record("request", worker="a/0", seconds=0.5)  # is no span
    found = {(span.name, span.attributes.get("tensorhub.version")): span for span in exporter.get_finished_spans()}
    publish, fetch = found["tensorhub.publish", 7], found["tensorhub.fetch", 7]
    assert (publish.start_time, publish.end_time) == (998 * 10**9, 1000 * 10**9)
    assert publish.parent.span_id == step.get_span_context().span_id and fetch.parent is None
    assert publish.attributes["tensorhub.worker"] == "trainer/0" and publish.attributes["tensorhub.bytes"] == 5
    assert fetch.attributes["tensorhub.sources"] == '{"trainer/0": 5}' and "tensorhub.lost" not in fetch.attributes
    assert found["tensorhub.install", 7].parent.span_id == fetch.context.span_id
    assert found["tensorhub.install", 8].parent is None  # the control: of another version
    assert len(found) == 5

    exporter.clear()
    with provider.get_tracer("trainer").start_as_current_span("step 9") as step:
        for shard in (1, 0):
            run_log.record("publish", worker=f"trainer/{shard}", version=9, origin="r/actor/00", shard=shard)
    other, root, _ = exporter.get_finished_spans()
    assert root.parent is None and other.parent.span_id == root.context.span_id  # of all ranks one is the root
    assert other.context.trace_id == root.context.trace_id
    assert {link.context.span_id for span in (root, other) for link in span.links} == {step.get_span_context().span_id}

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an exporter that is broken")

    monkeypatch.setattr(trace, "get_tracer", broken)
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    run_log.record("publish", worker="trainer/0", version=8, seconds=0.1)
    assert [event["version"] for event in events(tmp_path)] == [8]


def test_that_a_disk_is_full_is_noted_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_noted", ("", float("-inf")))
    monkeypatch.setattr(run_log, "failure", "")
    monkeypatch.setattr(run_log, "_failed_pid", -1)
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    run_log.record("x")
    assert resources.lacked() == ""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_log, "_write", full)
    run_log.record("x")
    assert resources.lacked().endswith("No space left on device")
    monkeypatch.setattr(resources, "_noted", ("memory", time.monotonic()))
    assert resources.lacked() == "memory"
    monkeypatch.setattr(resources, "_noted", ("memory", time.monotonic() - RECENT_S))
    assert resources.lacked().endswith("No space left on device")
