"""An optional journal of what a run did: one JSON object a line, read by `tensorhub timeline`, demos and benchmarks.

Switched on by the environment variable TENSORHUB_EVENTS, the path of a folder, or by the option `events` of an entrance
(`use`); every process appends to a file of its own in it. Unset (the default), `record` does nothing. A file that has
grown to SIZE_MAX is kept as NAME.old.jsonl in the place of the one before: of a long run the end is there, in bounded
space. Recording never fails a run: the first error is logged, and the journal of that process ends there.

Every line holds `t` (Unix time at the END of what is reported, in seconds), `event` and `worker`. A duration
is `seconds`, so the thing began at `t - seconds`. Workers are named `<replica>/<shard>`: "trainer/0",
"rollout-1/0". A field that does not apply is left out. origin: of a version, `Client.origin`.

publish        a trainer rank has published and the optimizer goes on.
               version, layout, bytes, shard; seconds: all that this rank waited in update_weights
fetch          a rollout worker has a version's bytes, verified (if staged: nothing was paused for it).
               version, layout, bytes, seconds, sources {worker: bytes}, transports {name: bytes};
               find_s: until a source was granted; reads {worker: [seconds until its last byte had come, and for
               how many of these it had not got the bytes itself]}; lost: sources that failed on the way
pause          a replica's engine is paused.
               version: the one it had; seconds: until it had stopped; in_flight: requests frozen
install        a rollout worker's bytes are in its live parameters.
               version, layout ("checkpoint": converted here; "runtime:...": copied raw), seconds,
               by ("reload" or "copy": how it was converted)
resume         a replica generates again.
               version: the new one; seconds: since the pause was asked for (it could not generate);
               in_flight: requests that go on; lost: requests frozen by the pause and not there after it
serve          a rollout worker became a source. version, layout, bytes
digests        identify a worker's weights. version, layout, digests {"root" (of several shards
               "root of shard 0/2"): hex of that layout's Manifest.root()}, computed from the bytes in the
               worker's own memory, never from those it was promised. A converter reports "checkpoint" (as
               received) and its runtime layout (as installed). Digests of different workers must be equal
               where version, layout and key are
request        one request ended at a replica. seconds, outcome ("stop", "length", "abort", "error"),
               versions [first, last] that its tokens came from, tokens
prompt         OpenRLHF: all samples of one prompt have come. number: of the prompt in this run, samples
request_given_back  OpenRLHF: an engine has to leave, and one of its prompts goes on elsewhere. tokens: those kept
update_failed  an update of a replica ended in an error. version, error
member         a member of the fleet has changed its state or version (vllm/ray/fleet/types.py).
               state, kind, version, node, why
hub_warning    a hub has logged a warning: a worker that it declared dead, a source that sends other bytes. what
target         the fleet's target number of replicas was changed. target, by ("people", or the policy's name)
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tensorhub_plugins.core import log

VARIABLE = "TENSORHUB_EVENTS"
SPANS = ("publish", "fetch", "install", "resume")  # events that are spans where a program has OpenTelemetry
NANOSECONDS = 10**9
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is not waited for
SIZE_MAX = 256 << 20  # bytes of a process's file, some million events; there are two

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_file: tuple[int, str, int] | None = None  # (pid, folder, file descriptor): a forked child opens its own
_room = SIZE_MAX  # bytes that this file may still take
_failed_pid = -1
failure = ""  # of this process's journal, or of its parent's
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))  # a thread may have held it
_fetched: dict[tuple[str, Any], Any] = {}  # by worker and version: OpenTelemetry's context of the span of its fetch


def use(folder: str | None) -> None:
    """Record events in this folder from now on, in this process and in those that it starts. None, or where the
    environment names one: as it was. Log lines begin to be shown, too (log.py)."""
    log.begin()
    if folder is not None:
        os.environ.setdefault(VARIABLE, folder)


def record(event: str, *, worker: str = "", **fields: object) -> None:
    """Append one line, or do nothing when TENSORHUB_EVENTS is unset. Never raises; None is left out.

    Pass `t=` (Unix seconds) to report something that ended earlier than now."""
    global _failed_pid, failure
    folder = os.environ.get(VARIABLE)
    tracing = sys.modules.get("opentelemetry.trace") if event in SPANS else None
    if tracing is None and (not folder or _failed_pid == os.getpid()):
        return
    line = {"t": round(time.time(), 6), "event": event, "worker": worker}
    line.update((name, value) for name, value in fields.items() if value is not None)
    if tracing is not None:
        _trace(tracing, line)
    if not folder or _failed_pid == os.getpid():
        return
    try:
        _write(folder, json.dumps(line, default=str).encode() + b"\n")
    except Exception as error:  # a full disk must not end a training run
        _failed_pid = os.getpid()
        failure = f"events are no longer recorded in {folder}: {error}"
        _log.warning("%s", failure)


def _trace(tracing: Any, line: dict[str, Any]) -> None:
    """Make a span of this event, for whatever this program has told OpenTelemetry to do with spans: in its version's
    trace, with a link to the span that it is in; an install as a child of its fetch. tracing: opentelemetry.trace."""
    try:
        event, key = line["event"], (line["worker"], line.get("version"))
        ended = round(line["t"] * NANOSECONDS)
        about = {name: value for name, value in line.items() if name not in ("t", "event", "seconds")}
        plain = {n: v if isinstance(v, (str, int, float)) else json.dumps(v, default=str) for n, v in about.items()}
        tracer, within, around = tracing.get_tracer("tensorhub_plugins"), None, tracing.get_current_span()
        if event == "install" and key in _fetched:
            within = _fetched[key]
        elif "origin" in line:
            tracer, within = _of_version(tracing, tracer, line)
        span = tracer.start_span(
            f"tensorhub.{event}",
            within,
            attributes={f"tensorhub.{name}": value for name, value in plain.items()},
            links=[tracing.Link(around.get_span_context())] if within and around.get_span_context().is_valid else (),
            start_time=ended - round(line.get("seconds", 0.0) * NANOSECONDS),
        )
        span.end(ended)
        if event == "fetch":
            _fetched.clear()  # of this process's only worker: earlier versions are installed by now
            _fetched[key] = tracing.set_span_in_context(span)
    except Exception as error:  # a program's own exporter, or an API of another release
        _log.debug("no span of %s: %s", line["event"], error)


def _of_version(tracing: Any, tracer: Any, line: dict[str, Any]) -> tuple[Any, Any]:
    """Return a tracer and a context that put this event's span into its version's trace. The ids of the trace and of
    its root, the publish of shard 0, are a hash of what every worker knows: no message carries them."""
    digest = hashlib.blake2b(f"{line['origin']} {line['version']}".encode(), digest_size=24).digest()
    trace, root = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")
    outside = tracing.set_span_in_context(tracing.INVALID_SPAN)
    if line["event"] == "publish" and not line.get("shard"):
        tracer = copy.copy(tracer)  # for this span only
        ids = {"generate_trace_id": trace, "generate_span_id": root, "is_trace_id_random": True}
        tracer.id_generator = SimpleNamespace(**{name: lambda it=it: it for name, it in ids.items()})
        return tracer, outside
    sampler = getattr(tracer, "sampler", None)  # as it decides of the root, wherever that is
    sampled = sampler is None or sampler.should_sample(outside, trace, "tensorhub.publish").decision.is_sampled()
    parent = tracing.SpanContext(trace, root, is_remote=True, trace_flags=tracing.TraceFlags(sampled))
    return tracer, tracing.set_span_in_context(tracing.NonRecordingSpan(parent))


def record_publish(report: Any, origin: str, worker: str, seconds: float, *, shard: int, **more: Any) -> None:
    """Record "publish", with the contents of a `PublishReport`."""
    record(
        "publish",
        worker=worker,
        version=report.version,
        layout=report.layout,
        bytes=report.size_bytes,
        seconds=seconds,
        shard=shard,
        origin=origin,
        **more,
    )


def record_fetch(report: Any, client: Any, *, worker: str, seconds: float) -> None:
    """Record "fetch", with the contents of this client's `ReplicateReport`."""
    record(
        "fetch",
        worker=worker,
        origin=client.origin(report.version),
        version=report.version,
        layout=report.layout,
        bytes=sum(report.sources.values()),
        wire_bytes=report.wire_size_bytes,
        seconds=seconds,
        find_s=round(report.seconds["find"], 6),
        sources=report.sources,
        transports=report.transports,
        reads={source: [round(s, 6) for s in seconds] for source, seconds in report.reads.items()},
        lost=len(report.losses) or None,
    )


def record_request(worker: str, began: float, outcome: str, versions: Sequence[int] = (), tokens: int = 0) -> None:
    """Record "request", with the versions of the answer's tokens in their order. began: in monotonic seconds."""
    answer = {"versions": [versions[0], versions[-1]], "tokens": tokens} if versions else {}
    record("request", worker=worker, seconds=time.monotonic() - began, outcome=outcome, **answer)


def root_key(shard: int, shard_count: int) -> str:
    """Return the name of a shard's root in "digests", the same for its publisher and for all its holders."""
    return "root" if shard_count == 1 else f"root of shard {shard}/{shard_count}"


def takes(event: str) -> bool:
    """Return whether this event is recorded, or is a span: ask before computing something only an event needs."""
    return enabled() or (event in SPANS and "opentelemetry.trace" in sys.modules)


def enabled() -> bool:
    """Return whether events are recorded."""
    return bool(os.environ.get(VARIABLE))


def _write(folder: str, data: bytes) -> None:
    """Append it to this process's file in that folder; once that is full, to a new one."""
    global _file, _room
    with _lock:  # also while it is written: another thread would close the file
        pid, name = os.getpid(), os.path.join(folder, f"{socket.gethostname().replace('/', '_')}-{os.getpid()}")
        _room -= len(data)
        if _file is None or _file[:2] != (pid, folder) or _room < 0 or not os.fstat(_file[2]).st_nlink:  # deleted
            if _file is not None and _file[0] == pid:
                last, _file = _file, None  # in case that the rest fails
                os.close(last[2])
                if last[1] == folder and os.path.exists(f"{name}.jsonl"):
                    os.replace(f"{name}.jsonl", f"{name}.old.jsonl")
            os.makedirs(folder, exist_ok=True)
            opened = os.open(f"{name}.jsonl", FLAGS, 0o644)
            _file, _room = (pid, folder, opened), SIZE_MAX - os.fstat(opened).st_size - len(data)
        # One write per line: a process that is killed leaves whole lines behind.
        written = os.write(_file[2], data)
        if written < len(data):  # the disk is full: no line is left torn, before those of this name's next process
            os.ftruncate(_file[2], os.fstat(_file[2]).st_size - written)
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, or as much as `ulimit -f` allows is written")
