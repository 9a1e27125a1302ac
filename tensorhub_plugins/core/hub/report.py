"""The hub's state for operators, and its invariants. PURE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from tensorhub_plugins.core.hub import standing, unreached
from tensorhub_plugins.core.hub.copy_counts import Copies, Counted
from tensorhub_plugins.core.hub.limits import ANSWER_SIZE_BYTES_MAX
from tensorhub_plugins.core.hub.publishing import spenders
from tensorhub_plugins.core.hub.reading import awaited
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Lease, Room, Version, Worker, checksum_of
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.lineage import merged
from tensorhub_plugins.core.protocol.reach import at_all_hosts
from tensorhub_plugins.core.types import ShardKey, VersionInfo, attempt_of, step_of

MODEL_SIZE_BYTES = 16_384  # of a model's own entry, with the longest names and WITHDRAWN_MAX versions
Record = TypeVar("Record")


def report(registry: Registry, now: float, size_bytes_max: int = ANSWER_SIZE_BYTES_MAX) -> dict[str, object]:
    """Return the state as plain lists and dicts, for `tensorhub status`; where truncated, `left_out` says how many
    entries are missing. Models with a worker that has the run's secret come first; each gets an equal share."""
    own = {h.id for h in registry.histories.values() if any(w.role != "reader" for w in h.workers.values())}
    histories = sorted(registry.histories.values(), key=lambda history: history.id not in own)
    left, models = size_bytes_max, []
    for index, history in enumerate(histories):
        sharing = len(own) - index if index < len(own) else len(histories) - index
        room = Room(left // sharing)
        left -= room.size_bytes
        model = _model(registry, history, now, room)
        if model is not None:
            models.append(model)
        left += room.size_bytes
    return {
        "hub": registry.session.hex(),
        "up_s": round(now - registry.started, 3),
        "was_restarted": registry.restarts > 0,
        "restarts": registry.restarts,
        "models": models,
        "left_out": len(histories) - len(models),
    }


def _model(registry: Registry, history: History, now: float, room: Room) -> dict[str, object] | None:
    """Return what is reported of one model; None: there is no space even for its name."""
    if not room.takes(MODEL_SIZE_BYTES):
        return None
    room.left_out = 0
    names = Room(room.size_bytes // 2)
    room.size_bytes -= names.size_bytes
    versions = [_version(info) for info in history.version_infos(names)]
    room.size_bytes, room.left_out = room.size_bytes + names.size_bytes, names.left_out
    workers = sorted(history.workers.values(), key=lambda worker: worker.role == "reader")
    leases = (lease for worker in workers for lease in worker.leases.values())
    shut = unreached.readers_of(history)
    return {
        "run": history.run,
        "model": history.model,
        "newest": history.newest_visible,
        "newest_attempt": attempt_of(history.newest_visible),
        "newest_step": step_of(history.newest_visible),
        "newest_age_s": round(standing.newest_age_s(history, now), 3),
        "newest_replicas": standing.newest_replicas(history),
        "pace_s": round(standing.pace_s(registry, history), 3),
        "unfinished": _unfinished(standing.unfinished(history, now)),
        "retain_newest": history.retain_newest,
        "retain_domains": history.retain_domains,
        "retain_across": history.retain_across,
        "missing_copies": [
            {**_number(number), "why": missing.why} for number, missing in history.missing.items() if missing.why
        ],
        "bytes_published": history.published_size_bytes,
        "bytes_retained": sum(
            h.size_bytes for worker in history.workers.values() for h in worker.holdings.values() if h.must_retain
        ),
        "budget_bytes": registry.limits.published_bytes_max or None,
        "over_budget": [
            {"worker": name, "bytes": size, "versions": count}
            for name, size, count in (spenders(history) if history.is_over_budget else [])
        ],
        "pinned": history.directive.pin or None,
        "withdrawn": list(history.directive.withdrawn),
        "attempt": history.directive.attempts[-1].number if history.directive.attempts else 0,
        "corrupt_segments": history.corrupt_segments,
        "read_bytes": dict(history.read_bytes),
        "wire_bytes": history.wire_bytes,
        "versions": versions,
        "workers": _some(room, workers, lambda worker: _worker(registry, worker, now, shut.get(worker.session, []))),
        "leases": _some(room, leases, lambda lease: _lease(registry, lease, now)),
        "lost": _some(room, standing.lost(history, now).items(), _lost),
        "left_out": room.left_out,
    }


def _unfinished(found: standing.Unfinished | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {**_number(found.version), **found._asdict(), "seconds": round(found.seconds, 3)}


def _lost(one: tuple[str, standing.Lost]) -> dict[str, object]:
    name, (host, seconds) = one
    return {"worker": name, "host": host, "seconds_ago": round(seconds, 3)}


def _some(
    room: Room, records: Iterable[Record], shown: Callable[[Record], dict[str, object]]
) -> list[dict[str, object]]:
    """Return the first of them, as many as there is space for."""
    found: list[dict[str, object]] = []
    for record in records:
        if room.is_full:
            room.left_out += 1
            continue
        entry = shown(record)
        if room.takes(len(msgspec.msgpack.encode(entry))):
            found.append(entry)
    return found


def _version(info: VersionInfo) -> dict[str, object]:
    layouts = {layout: list(workers) for layout, workers in info.layouts.items()}
    return {**_number(info.version), "visible": info.visible, "layouts": layouts}


def _number(version: int) -> dict[str, object]:
    """Return a version as workers have it, and as users do."""
    return {"version": version, "attempt": attempt_of(version), "step": step_of(version)}


def _worker(registry: Registry, worker: Worker, now: float, shut: list[str]) -> dict[str, object]:
    complete = [h for h in worker.holdings.values() if h.complete]
    lag, (refused, why) = standing.lag_of(worker, now), standing.refusal_of(worker)
    return {
        "worker": worker.name,
        "location": msgspec.to_builtins(worker.hello.location),
        "endpoints": at_all_hosts(worker.hello.endpoints, worker.hello.hosts),
        "last_heard_s": round(now - worker.last_heard, 3),
        "silent": standing.is_silent(worker, now),
        "follows": lag
        and {
            **_number(worker.installed or 0),
            "installed_s": round(now - worker.installed_at, 3),
            "lag_steps": lag.steps,
            "behind_s": round(lag.behind_s, 3),
        },
        "holds": sorted({h.key.version for h in complete}),
        "bytes_held": sum(h.size_bytes for h in complete),
        "bytes_published": worker.published_size_bytes,
        "preemptible": worker.hello.preemptible,
        "pending": len(worker.pending),
        "waits": _awaited(worker, now),
        "corrupt_segments": worker.corrupt_segments,
        "refuses": {**_number(refused), "why": why} if refused else None,
        "fails": worker.failure,
        "lacks": worker.lacks,
        "unreached": unreached.summary_of(worker, shut),
    }


def _awaited(worker: Worker, now: float) -> dict[str, object] | None:
    """Return which version it has no source of yet, and the worker that converts that."""
    if (found := awaited(worker)) is None:
        return None
    pending, number, other = found
    said: dict[str, object] = {**_number(number), "waits_s": round(now - pending.since, 3), "converter": None}
    if other is not None:
        said["converter"] = {
            "worker": other.name,
            "host": other.hello.location.host,
            "converts": any(key.version == number for key in other.claims),
            "worked_s": round(now - other.worked_at, 3) if other.worked else None,
        }
    return said


def _lease(registry: Registry, lease: Lease, now: float) -> dict[str, object]:
    workers = registry.workers
    bound = lease.reader.lease_bounds.get(lease.request_id)
    is_told = bound is not None and now - bound.progress_at < standing.SILENT_HEARTBEATS * lease.reader.beat_s
    sources = {str(shard): workers[s].name if s in workers else "unknown" for shard, s in lease.sources.items()}
    return {
        "reader": lease.reader.name,
        **_number(lease.version),
        "layout": lease.layout,
        "sources": sources,
        "read_bytes": 0 if bound is None else bound.progress,
        "bytes_per_s": round(bound.bytes_per_s) if bound is not None and is_told else 0,
        "seconds_left": round(lease.deadline - now, 3),
    }


def must(holds: object) -> None:
    """Assert this, under `python -O`, too: the server keeps no records that are inconsistent."""
    if not holds:
        raise AssertionError("the hub's records are not what they must be")


def _validate_copies(version: Version) -> None:
    """Assert that the counts match the holdings."""
    counted = Copies()
    for by_shard in version.holdings.values():
        for holders in by_shard.values():
            for h in holders.values():
                must(h.counted == Counted(h.complete, h.complete and h.stays))
                counted.change(h.key, h.worker.group, Counted(), h.counted)
    must(vars(counted) == vars(version.copies))


def _validate_leases(registry: Registry, worker: Worker) -> None:
    """Assert the invariants of the leases under which it reads, and of those under which it is read."""
    for request, lease in worker.leases.items():
        must(lease.request_id == request and lease.reader is worker and lease.sources)
        must(lease.shards_of == Counter(lease.sources.values()))
        for source_session in lease.shards_of:
            source = worker.history.workers.get(source_session)
            must(source is None or source.readers[worker.session, request] is lease)
    must(worker.reading == Counter(key for lease in worker.leases.values() for key in lease.shard_keys()))
    must(worker.sources == Counter(source for lease in worker.leases.values() for source in lease.shards_of))
    silent = [lease for lease in worker.leases.values() if not lease.serves]
    must(worker.keeping == Counter(key for lease in silent for key in lease.shard_keys()))
    for (reader, request), lease in worker.readers.items():
        must(registry.workers[reader].leases[request] is lease)
        must(worker.session in lease.sources.values())


def _validate_worker(registry: Registry, session: bytes, worker: Worker) -> None:
    must(worker.session == session and worker.history.workers[session] is worker)
    for key, h in worker.holdings.items():
        must(h.worker is worker and h.key == key)
        version = worker.history.versions[key.version]
        must(version.holders(key)[session] is h)
        must(version.contents[key.layout, key.shard_count, key.shard][0] == h.root)
    published = (h.size_bytes for h in worker.holdings.values() if h.complete and h.is_published)
    must(worker.published_size_bytes == sum(published))
    must(worker.holdings_checksum in (0, checksum_of(worker)))
    must(not worker.aside or worker.role == "reader")
    must(worker.aside.keys().isdisjoint(worker.holdings))
    must(all(worker.history.aside[key.version][session] is worker for key in worker.aside))
    must(all(claim.version.claims[key] is claim and claim.worker is worker for key, claim in worker.claims.items()))
    _validate_leases(registry, worker)
    for request, pending in worker.pending.items():
        must(worker.history.waiting[session, request] is pending)


def validate(registry: Registry) -> None:
    """Assert the invariants that hold between any two calls of handle."""
    for session, worker in registry.workers.items():
        _validate_worker(registry, session, worker)
    readers = [worker for worker in registry.workers.values() if worker.role == "reader"]
    shards = sum(len(lease.sources) for worker in readers for lease in worker.leases.values())
    for worker in registry.workers.values():
        announced = [len(lease.sources) for lease in worker.leases.values() if lease.is_announced]
        must(worker.announced_shards == sum(announced))
    must(registry.readers_records == shards + sum(len(w.holdings) + len(w.aside) for w in readers))
    must(all(w.layouts == Counter(key.layout for key in (*w.holdings, *w.aside)) for w in readers))
    for history in registry.histories.values():
        for number, workers in history.aside.items():
            must(workers and all(any(key.version == number for key in w.aside) for w in workers.values()))
        must(history.groups.keys() == {worker.group for worker in history.workers.values()})
        must(history.published_size_bytes == sum(w.published_size_bytes for w in history.workers.values()))
        must(history.withdrawn == frozenset(history.directive.withdrawn))
        must(not history.is_over(history.directive.pin))
        must(history.directive.attempts == merged(history.directive.attempts))
        must(all(history.waiting.get(begins) is pending for begins, pending in history.beginning.items()))
        for number, version in history.versions.items():
            must(version.number == number)
            must(not (version.visible and history.is_over(number)))
            must(not version.visible or version.may_be_lost or version.copies.is_held())
            _validate_copies(version)
            for (layout, count), by_shard in version.holdings.items():
                for shard, holders in by_shard.items():
                    must(shard < count and holders)
                    for session, h in holders.items():
                        must(registry.workers[session].holdings.get(ShardKey(number, layout, shard, count)) is h)
            for key, claim in version.claims.items():
                must(registry.workers[claim.worker.session].claims[key] is claim)
            for sources in version.sources.values():
                must(all(session in registry.workers for session in sources.sessions()))
        for number, queues in history.wait_queues.items():
            must(queues and all(queues.values()))
            for wait_key, queue in queues.items():
                must(all(pending.queue == (number, wait_key) for pending in queue.values()))
        for (session, request), pending in history.waiting.items():
            must(registry.workers[session].pending[request] is pending)
            # A request that waits is to be tried, or in a queue, where it is found when what it waits for comes.
            is_found = pending.queue is not None or (session, request) in history.ready
            must(is_found or isinstance(pending.message, m.Unpublish))
        must(not history.leaving and not history.changed)
    registry.uplink.validate()
