"""One trainer rank: keeps a snapshot of its share of each version and offers it to readers.

A version is written straight into an allocated slab while the framework gathers it tensor by tensor, so the next
optimizer step may change the weights at once. Old versions are unpublished in the background: a slow reader holds up
memory, never the training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.client.arguments import check_identity
from tensorhub_plugins.core.client.client import Client
from tensorhub_plugins.core.client.parts import Held, Ownership
from tensorhub_plugins.core.deadline import NEVER, Deadline, until
from tensorhub_plugins.core.device.devices import here, settled
from tensorhub_plugins.core.digests import XXH3
from tensorhub_plugins.core.errors import DeadlineExceeded, TensorHubError, UsageError
from tensorhub_plugins.core.manifest import Manifest, Part, TensorSpec, TensorTable
from tensorhub_plugins.core.memory.downloads import Downloads
from tensorhub_plugins.core.memory.moves import difference, with_parts
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.slices import SLICES_MAX, Slice, slices_of
from tensorhub_plugins.core.memory.staging import host_copy
from tensorhub_plugins.core.memory.tensors import check_tensor, contiguous_spec, dtype_of, spec_of
from tensorhub_plugins.core.options import Need
from tensorhub_plugins.core.process_lifetime import OfThisProcess
from tensorhub_plugins.core.run_log import enabled, record, record_publish, root_key
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.types import CHECKPOINT, NAME_LENGTH_MAX, Across, check_version, items_of, version_of

log = logging.getLogger(__name__)

SECONDS = "tensorhub/publish/seconds"
HELD = "every tensor of the model as a Held, as `held_run`, `fsdp1_parts` and `fsdp2_parts` make them"
PAIRS = "pairs of a name and a tensor"
BEGIN_S = 60.0  # at least: a former incarnation on another host expires after 15 s of silence
RETAIN_S = 10.0  # for the hub to answer
UNPUBLISH_S = 30.0  # for readers of an old version to finish before they are disconnected
AHEAD_S = 1.0  # at most, for deltas of an old version that are being made to break off, and its memory to be free


def _start_of_ranks() -> str:
    """Return an id of this launch, shared by its ranks: the rendezvous that torch's launchers name."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    life = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    return f"{address} {port} {life}".strip()[:NAME_LENGTH_MAX]


Pieces: TypeAlias = "dict[str, list[Slice]]"  # by tensor
Call: TypeAlias = "list[None]"  # of `publish`; not empty: it was abandoned


class Snapshot(NamedTuple):
    """One rank's share of a version, while it is being copied."""

    slab: Slab
    whole: TensorTable  # the tensors of all ranks
    parts: dict[str, Part]  # the positions of its own in them
    downloads: Downloads


def _ranks_here() -> int:
    """Return the number of ranks on this host, according to torch's launchers."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdecimal() and int(said) else 1


@resources.in_each_call
class Publisher(OfThisProcess):
    """Publishes the share of one trainer rank, version after version.

    client: this rank's (shard = rank, shard_count = ranks). keep: versions on offer; host memory is used for one more,
    which is logged, or refused, beforehand (`Client.budget`), for all ranks of a host as torch's launchers count them.
    dtype: floating-point tensors are published in it, except those for which `keeps_dtype` is true; None: as they come.

    model: the tensors of the whole model, in the order in which they will come, where that is known: the first version
    is then handled like the others.

    slices: the size of the tensor parallel engines that read it. Matrices are published slice by slice (slices.py), so
    that each of their workers reads little more than what it needs; others read the same, in more pieces.
    slices_experts: experts as well: these engines are not expert parallel.

    in_background: publish returns when the copies are queued on the device, and the training goes on; the next call, or
    `settle`, waits for the rest and raises its errors, which are logged at once. The copies follow what the calling
    thread's stream has queued, and precede what it queues next, an optimizer's step for example: the weights must be
    written on that stream only. They take memory of the device that no step has needed so far, 4 GiB at most, or
    device_room_bytes; beyond it publish waits for them, and always after an allocation has failed. None: True if this
    process uses a device when the first version is published; a CPU has nothing to queue.

    retain: how many copies of the newest version survive, and across what (`Client.retain`); None: as it was.

    begins: the first step that is published begins an attempt (`Client.begin`), all ranks together: a run that resumes
    supersedes what its former incarnation published from that step on. Versions are those of `version` then.

    Every version must consist of the same tensors, by name, dtype and shape; else it is a UsageError that names what is
    missing, new or changed, and nothing is published. The tensors of all ranks are compared, as every rank sees them
    all: a tensor may be assigned to another rank than before."""

    _call: Call | None = None  # the last publish

    def __init__(
        self,
        client: Client,
        *,
        rank: int,
        ranks: int,
        worker: str,
        keep: int,
        timeout_s: float,
        dtype: torch.dtype | None = None,
        keeps_dtype: Callable[[TensorSpec], bool] = lambda spec: False,
        model: Sequence[TensorSpec] = (),
        slices: int = 1,
        slices_experts: bool = False,
        retain: tuple[int, Across] | None = None,
        begins: bool = False,
        in_background: bool | None = False,
        device_room_bytes: int | None = None,
    ) -> None:
        check_identity(rank, ranks)
        if type(keep) is not int or keep < 1:
            raise UsageError(f"keep={keep!r:.80}: how many versions are on offer, from 1")
        if type(slices) is not int or not 1 <= slices <= SLICES_MAX:
            raise UsageError(f"slices={slices!r:.80}: give the tensor parallel size of the engines, 1 to {SLICES_MAX}")
        self.client = client
        self.attempt: int | None = None if begins else 0  # None: it begins with the first version
        self.rank, self.ranks, self.worker = rank, ranks, worker
        self.keep, self.timeout_s, self.dtype, self.keeps_dtype = keep, timeout_s, dtype, keeps_dtype
        self._retain, self._is_retained, self._noted = (retain if rank == 0 else None), False, ""  # noted: a root
        self._slices_of = partial(slices_of, count=slices, experts=slices_experts)
        model = [msgspec.structs.replace(spec, stride=None, part=None) for spec in model]  # as they will be published
        ownership = Ownership(ranks)
        # This rank's tensors of the last version: the next one almost always has the same.
        self._mine = TensorTable.of(spec for spec in model if ownership.give(spec.size_bytes) == rank)
        self._is_fixed = bool(model)
        self._whole = TensorTable.of(model)  # of all ranks, of the last version
        self._coming_whole = self._whole  # the same, of the one in the background
        self._published: deque[int] = deque()
        self._sent: Manifest | None = None  # of the last version
        self._in_background, self._queued, self._room_bytes = in_background, Downloads(), device_room_bytes
        self._executor: ThreadPoolExecutor | None = None
        self._coming: Future[dict[str, float]] | None = None  # the last version, in the background
        self._last_seconds: float | None = None  # that the previous version took
        self._is_said = self._is_reserved = False  # the memory it takes was reported, and is being made
        if model:
            self._reserve(self._plain(self._pieces_of(map(self._cast_spec, self._mine))), ahead=True)
        self._retired: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_publishing, self._ahead = False, threading.Lock()  # ahead: while one that is over stays for deltas
        self._retiring: Thread | None = None  # started with the first that is over

    @property
    def in_background(self) -> bool:
        """Return whether training continues before a version is available to others."""
        if self._in_background is None:
            self._in_background = here() is not None
        return self._in_background

    @property
    def whole_size_bytes(self) -> int:
        """Return the size of the last version: the shares of all ranks together."""
        return sum(spec.size_bytes for spec in self._coming_whole or self._whole)

    @calls.public
    def begin(self, step: int) -> None:
        """Continue from this step, on every rank: a run that resumes, or is rolled back. Errors as of `Client.begin`.

        A version of the previous attempt that is in the background is waited for; its error was logged."""
        if self._coming is not None:
            calls.wait_for(self._coming)
            self._coming = None
        timeout_s = max(self.timeout_s, BEGIN_S)
        self.attempt = self.client.begin(step, launch_id=_start_of_ranks(), timeout_s=timeout_s)
        self._is_retained = False
        self._retain_newest(timeout_s)

    def _retain_newest(self, timeout_s: float) -> None:
        """Ask for the copies that are to survive, until the hub has heard it in this attempt."""
        if self._retain is not None and not self._is_retained:
            copies, across = self._retain
            self.client.retain(domains=copies, across=across, timeout_s=timeout_s)
            self._is_retained = True

    @calls.public
    def prepare(self, held: Iterable[Held]) -> None:
        """Allocate the memory of the parts that `publish_parts` will be given; its pages are made, and pinned, in the
        background, while the first step is computed. Raise UsageError where it does not fit."""
        self._reserve(self._plain(self._parts_of(_checked(held))[2]), ahead=True)

    def version(self, step: int) -> int:
        """Return the version of this step, in the attempt that was begun."""
        return version_of(self.attempt or 0, step)

    def publish(self, step: int, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Take all of `weights` (each step of it is a collective of all ranks), keep this rank's share, publish it.

        Return metrics in seconds and bytes; none if this very version is on offer already."""
        return self._publish(step, lambda version, _: self._snapshot(version, weights), gathers=True)

    def publish_parts(self, step: int, held: Iterable[Held]) -> dict[str, float]:
        """Publish what this rank holds of a sharded model: no rank waits for another, and nothing is gathered.

        held: every tensor of the model, on every rank in the same order, see parts.py; of one that this rank has in
        several parts, a Held for each. Metrics as from `publish`. The
        memory it takes is the slab, and one part as it is cast. timeout_s is for all of it, once the previous version
        is settled; in `publish` it is for what comes after the collectives, which no rank may leave."""
        return self._publish(step, lambda version, deadline: self._snapshot_parts(version, held, deadline))

    def root(self, weights: Iterable[Any], *, by_parts: bool) -> str:
        """Return the root, in hex, that this rank's share of these weights would be published with; offer nothing.

        weights: as for `publish_parts` if by_parts, else as for `publish`. It takes the memory of one more version
        for a moment, and as long as copying and digesting it. Errors as of theirs, but those of the version that is in
        the background, which it waits for: the next publish raises them."""
        if self._coming is not None:
            calls.run(partial(calls.wait_for, self._coming))
        deadline = Deadline.after(self.timeout_s)
        try:
            taken = self._snapshot_parts(0, weights, deadline) if by_parts else self._snapshot(0, weights)
            return calls.run(partial(self._root_of, taken))
        finally:
            calls.run(self._queued.finish)

    def _root_of(self, taken: Snapshot) -> str:
        taken.downloads.wait()
        with taken.slab as slab:
            slab.know_digests(taken.downloads.digests(slab.segment_size_bytes))
            return _root(slab, taken.parts, self.client.digest).hex()

    def retain_version_of(self, root: str) -> None:
        """Retain the version in which this rank's share has this root, as soon as it is published, in place of the last
        one of which this was asked. Nothing where only the newest version's one copy is retained: it is this rank's."""
        self._noted = root
        if self._sent is not None and self._published:
            self._retain_noted(self._published[-1], self._sent)

    def _retain_noted(self, version: int, manifest: Manifest, timeout_s: float = RETAIN_S) -> None:
        if self._retain is None or self._noted != manifest.root().hex():
            return
        copies, across = self._retain
        try:
            self.client.retain(domains=copies, across=across, also=version, timeout_s=timeout_s)
        except TensorHubError as error:
            log.warning("%s: version %d may be lost, which a checkpoint has: %s", self.worker, version, error)

    @property
    def newest(self) -> int:
        """Return the newest version that this rank has published, and still offers; 0: none."""
        return self._published[-1] if self._published else 0

    @calls.public
    def settle(self) -> None:
        """Wait for what is published in the background, and raise its error."""
        if (coming := self._coming) is not None:
            calls.wait_for(coming)
            self._coming = None if self._coming is coming else self._coming
            self._last_seconds = coming.result().get(SECONDS)

    def _log_failure(self, done: Future[dict[str, float]]) -> None:
        """Log an error at once: the next publish, which raises it, may be minutes away, and engines wait."""
        error = done.exception()
        if error is not None:
            log.error("%s: a version was not published, as the next publish will say, too: %s", self.worker, error)

    def _publish(
        self, step: int, snapshot: Callable[[int, Deadline], Snapshot], *, gathers: bool = False
    ) -> dict[str, float]:
        self.settle()
        if self.attempt is None:
            self.begin(check_version(step, "step") - 1)
        self._retain_newest(self.timeout_s)
        version, started, mine = self.version(step), time.monotonic(), list[None]()
        deadline, self._call, abandon = Deadline.after(self.timeout_s), mine, mine.append
        try:
            calls.run(self._end_deltas)
            try:
                taken = snapshot(version, deadline)
            except DeadlineExceeded as error:
                text = "the deadline passed before the parts were copied, and nothing was published: raise timeout_s"
                raise error.within(text, version=version, phase="prepare", timeout_s=self.timeout_s) from error
            deadline = Deadline.after(self.timeout_s) if gathers else deadline
            offer = self._offer_later if self.in_background else self._offer
            return calls.run(partial(offer, version, taken, started, deadline, mine))
        except BaseException:
            abandon(None)  # in C: if several signals have come, the next one is raised after it
            calls.run(self._end)
            raise

    def _end(self) -> None:
        """End a failed call. Return when nothing is copied any more: it is released then."""
        self._is_publishing = False
        self._queued.finish()

    def _check_alone(self, version: int, mine: Call) -> None:
        """Raise UsageError if another thread has begun to publish: one of the two would be lost without an error."""
        if self._call is not mine:
            text = "another thread has begun to publish meanwhile: let one thread publish, one version after the other"
            raise UsageError(text, version=version)

    def _end_deltas(self) -> None:
        """Have the deltas that are made ahead break off: what they kept may be the memory for this version."""
        self._is_publishing = True
        if self._ahead.acquire(timeout=AHEAD_S):
            self._ahead.release()

    def _offer_later(
        self, version: int, taken: Snapshot, started: float, deadline: Deadline, mine: Call
    ) -> dict[str, float]:
        """Call `_offer` in the background; return what is known at once, and how long the previous version took."""
        self._check_alone(version, mine)
        if self._executor is None:
            self._executor = resources.pool_of(1, "tensorhub-publish")
        size_bytes, self._coming_whole = float(taken.slab.size_bytes), taken.whole
        self._coming = self._executor.submit(self._offer, version, taken, started, deadline, mine)
        self._coming.add_done_callback(self._log_failure)
        self._is_publishing = False
        return {
            **({} if self._last_seconds is None else {SECONDS: self._last_seconds}),
            "tensorhub/publish/gather_seconds": time.monotonic() - started,
            "tensorhub/publish/bytes": size_bytes,
        }

    def _offer(self, version: int, taken: Snapshot, started: float, deadline: Deadline, mine: Call) -> dict[str, float]:
        slab, whole, parts, downloads = taken
        downloads.wait()
        if mine:  # nothing of it is published later
            slab.close()
            return {}
        self._check_alone(version, mine)
        slab.know_digests(downloads.digests(slab.segment_size_bytes))
        gathered = time.monotonic()
        if self._published and version <= self._published[-1]:
            return self._again(version, slab, parts)
        left_s = deadline.remaining()
        report = self.client.publish(version, slab, CHECKPOINT, timeout_s=left_s, parts=parts, strict=True)
        ended = time.monotonic()
        origin, unpinned = self.client.origin(version), slab.unpinned or None
        record_publish(report, origin, self.worker, ended - started, shard=self.rank, unpinned=unpinned)
        if enabled():  # the digests are in the manifest anyway
            digests = {root_key(self.rank, self.ranks): report.manifest.root().hex()}
            record("digests", worker=self.worker, version=version, layout=CHECKPOINT, digests=digests)
        self._published.append(version)
        self._sent = report.manifest
        self._retain_noted(version, report.manifest, deadline.remaining())
        self._whole = whole
        calls.stays()
        if not self._is_reserved:  # the first version has only the memory of its own
            self._reserve_ahead(slab.specs, self.keep)
        self._is_publishing = False  # the deltas of what is over have time now
        while len(self._published) > self.keep:
            self._retired.put(self._published.popleft())
        self._begin_to_retire()
        return {
            SECONDS: ended - started,
            "tensorhub/publish/gather_seconds": gathered - started,
            "tensorhub/publish/bytes": float(slab.size_bytes),
        }

    def _again(self, version: int, slab: Slab, parts: dict[str, Part]) -> dict[str, float]:
        """Accept a version that was sent before if nothing changed; else the readers would keep the old weights."""
        sent, newest = self._sent, self._published[-1]
        same = sent and version == newest and _root(slab, parts, sent.digest_algorithm) == sent.root()
        slab.close()
        self._is_publishing = False
        if same:
            return {}
        raise UsageError(
            "other weights were given for a version that is already published (versions must grow): after a rollback "
            "begin anew, with Publisher.begin",
            version=version,
        )

    def _snapshot(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Return a slab with this rank's tensors, the tensors of all ranks, and the positions of its parts in them.
        While the names are unknown until all have passed, they are buffered in ordinary memory and copied once more."""
        ownership = Ownership(self.ranks)
        pieces = self._pieces_of(self._mine)
        slab = self._allocate(self._plain(pieces)) if self._mine or self._is_fixed else None
        buffered: dict[str, torch.Tensor] = {}
        passed: dict[str, TensorSpec] = {}
        twice: list[str] = []
        downloads = self._downloads(slab)
        for name, tensor in self._settled(weights):
            check_tensor(name, tensor)
            twice += [name] * (name in passed)
            spec = passed[name] = self._cast_spec(contiguous_spec(name, tensor.dtype, tensor.shape))
            mine = name in self._mine.positions if self._is_fixed else ownership.give(spec.size_bytes) == self.rank
            if not mine or (self._whole and self._whole.get(name) != spec):  # the latter is refused below
                continue
            if slab is not None and self._mine.get(name) == spec:
                _write(slab, pieces[name], tensor.detach(), downloads)
            else:
                buffered[name] = host_copy(tensor, dtype_of(spec))
        # Not earlier: each step was a collective, and a rank that leaves early hangs the others.
        whole = TensorTable.of(passed.values())
        if twice or (self._whole and whole != self._whole):
            downloads.wait()
            if slab is not None:
                slab.close()
            if twice:
                raise UsageError(f"tensor {twice[0]!r} is there twice, and nothing was published", version=version)
            raise self._not_the_same(version, whole)
        if slab is not None and not buffered and not slab.unwritten:
            return Snapshot(slab, whole, _parts(pieces), downloads)
        downloads.wait()
        return self._reshape(slab, whole, buffered)

    def _snapshot_parts(self, version: int, held: Iterable[Held], deadline: Deadline) -> Snapshot:
        """Return a slab with this rank's parts, the whole tensors, and the positions of the parts in them."""
        whole, here, pieces = self._parts_of(_checked(held, deadline), deadline)
        if self._whole and whole != self._whole:
            raise self._not_the_same(version, whole)
        slab = self._allocate(self._plain(pieces), deadline)
        downloads, stays = self._downloads(slab), not self.in_background
        for name, tensor in self._settled([(name, tensor) for name, (tensor, _) in here.items()]):
            _write(slab, pieces[name], tensor.detach(), downloads, stays=stays, deadline=deadline)
        return Snapshot(slab, whole, _parts(pieces), downloads)

    def _parts_of(
        self, held: Sequence[Held], deadline: float = NEVER
    ) -> tuple[TensorTable, dict[str, tuple[torch.Tensor, Part | None]], Pieces]:
        """Return the whole tensors, what this rank has of them, and how that is published."""
        whole = TensorTable.of(self._cast_spec(one.whole) for one in until(deadline, held) if not one.is_further)
        dtypes = {spec.name: dtype_of(spec) for spec in whole}
        here = {one.name: (one.tensor, one.part) for one in until(deadline, held) if one.tensor is not None}
        specs = (
            contiguous_spec(name, dtypes[part.tensor if part and part.tensor else name], tensor.shape)
            for name, (tensor, part) in until(deadline, here.items())
        )
        parts = {name: part for name, (_, part) in here.items() if part is not None}
        return whole, here, self._pieces_of(with_parts(specs, parts, partial(until, deadline)), deadline)

    def _downloads(self, slab: Slab | None) -> Downloads:
        """Return what downloads everything that goes into this slab."""
        digested = slab.specs if slab is not None and self.client.digest == XXH3 else None
        if self._queued.lacks_room and self.in_background:
            self._room_bytes = 0
        self._queued = Downloads(self._room_bytes, digested=digested) if self.in_background else Downloads()
        return self._queued

    def _settled(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return these after their writes, on any stream; in the background after those of this thread's stream, which
        the copies follow; tensors in host memory, which are read at once, always after all."""
        return settled(_pairs(weights), host_only=self.in_background)

    def _pieces_of(self, specs: Iterable[TensorSpec], deadline: float = NEVER) -> Pieces:
        """Return by name the slices in which each is published."""
        return {spec.name: self._slices_of(spec) for spec in until(deadline, specs)}

    def _plain(self, pieces: Pieces) -> list[TensorSpec]:
        """Return what memory they take."""
        return [msgspec.structs.replace(piece.spec, part=None) for each in pieces.values() for piece in each]

    def _allocate(self, plain: list[TensorSpec], deadline: float = NEVER) -> Slab:
        self._reserve(plain)
        return self.client.allocate(plain, deadline=deadline)

    def _reserve(self, plain: list[TensorSpec], *, ahead: bool = False) -> None:
        """Report the memory of its share of each version, once, and have it made ahead of the first one, and pinned
        where there is a device. Raise UsageError where it does not fit."""
        if not self._is_said:
            mend = "keep fewer versions, publish them in a smaller dtype, or train on more hosts"
            need = Need(sum(spec.size_bytes for spec in plain), self.keep + 1)
            self.client.budget.check(need, workers=_ranks_here(), mend=mend)
            if here() is not None:
                self.client.reserve(plain, self.keep + 1)
                self._is_reserved = True
        self._is_said = True
        if ahead and not self._is_reserved:
            self._reserve_ahead(plain, self.keep + 1)

    def _reserve_ahead(self, specs: Iterable[TensorSpec], count: int) -> None:
        self._is_reserved = True
        with contextlib.suppress(TensorHubError):  # the version that needs it says so
            self.client.reserve(specs, count)

    def _cast_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return what such a tensor is published as. A one-byte float is quantized: a cast would invalidate its
        scale."""
        dtype = dtype_of(spec)
        if self.dtype is None or not dtype.is_floating_point or dtype.itemsize == 1 or self.keeps_dtype(spec):
            return spec
        return contiguous_spec(spec.name, self.dtype, spec.shape)

    def _not_the_same(self, version: int, whole: TensorTable) -> UsageError:
        found = difference(self._whole, whole)
        return UsageError(
            f"the weights are not those of {'the version before' if self._published else 'the model'}: {found}. "
            "Nothing was published. If the change is meant, take a new run or model name",
            version=version,
        )

    def _reshape(self, slab: Slab | None, whole: TensorTable, buffered: dict[str, torch.Tensor]) -> Snapshot:
        """Assemble a slab of the tensors that there are now: their names or shapes are new."""
        unwritten = None if slab is None else frozenset(slab.unwritten)
        kept = [
            spec
            for spec in self._mine
            if unwritten is not None and all(p.spec.name not in unwritten for p in self._slices_of(spec))
        ]
        self._mine = TensorTable.of([*kept, *(spec_of(name, tensor) for name, tensor in buffered.items())])
        pieces = self._pieces_of(self._mine)
        fresh = self._allocate(self._plain(pieces))
        with Downloads() as downloads:
            for name, tensor in buffered.items():
                _write(fresh, pieces[name], tensor, downloads)
            for name, tensor in slab.tensors(p.spec.name for s in kept for p in pieces[s.name]).items() if slab else ():
                fresh.write_later(name, tensor, downloads)
        if slab is not None:
            slab.close()
        return Snapshot(fresh, whole, _parts(pieces), Downloads())

    def _begin_to_retire(self) -> None:
        """Start the thread that withdraws what is over. Where the system refuses it, do so at a later publish: this one
        is done."""
        if self._retiring is None and not self._retired.empty():
            thread = Thread(target=self._retire, name="tensorhub-unpublish")
            try:
                thread.start()
                self._retiring = thread
            except RuntimeError as error:
                found = resources.refusal(error) or error
                log.warning("%s: the version before stays on offer until the next one: %s", self.worker, found)

    def _retire(self) -> None:
        while (version := self._retired.get()) is not None:
            try:
                # Unpublished before all ranks have the next one, it would be retained, and released a heartbeat late.
                with contextlib.suppress(TensorHubError):
                    self.client.wait(newer_than=version, timeout_s=UNPUBLISH_S)
                with self._ahead:  # while both versions are here, and not while the next one wants the memory
                    ahead = self.client.changes.make_ahead
                    ahead(version, CHECKPOINT, lambda: self._is_publishing or self._retired.qsize() > 0)
                    if self._is_publishing:  # which waits for it
                        self._unpublish(version)
                self._unpublish(version)  # nothing, if that was done
            except Exception as error:  # whatever it is, the versions after it have to go
                log.warning("%s: version %d was not withdrawn: %s", self.worker, version, error)

    def _unpublish(self, version: int) -> None:
        self.client.unpublish(version, CHECKPOINT, timeout_s=UNPUBLISH_S)

    @calls.public
    def close(self) -> None:
        """Unpublish the versions and close the client. Errors are not raised: the run is over."""
        with contextlib.suppress(Exception):
            self.settle()
        if self._executor is not None:
            self._executor.shutdown()
        if self._retiring is not None:
            self._retired.put(None)
            self._retiring.join(timeout=1.0)
        with contextlib.suppress(TensorHubError):
            self.client.close()


def _checked(held: Iterable[Held], deadline: float = NEVER) -> list[Held]:
    """Return what is held. Raise UsageError for what is not."""
    given = list(until(deadline, items_of(held, "held", HELD), 1))
    for each in given:
        if not isinstance(each, Held):
            raise UsageError(f"held: {each!r:.80} is none: give {HELD}")
    first = {each.whole.name for each in until(deadline, given) if not each.is_further}
    names = set[str]()
    for each in until(deadline, given):
        if each.name in names:
            raise UsageError(f"held: {each.name} is there twice")
        names.add(each.name)
        if each.is_further and (each.part is None or each.part.tensor not in first):
            raise UsageError(f"held: {each.name} is a further part of a tensor of which there is no first one")
    return given


def _pairs(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield these. Raise UsageError for what is no pair."""
    for each in items_of(weights, "weights", PAIRS):
        if not isinstance(each, tuple | list) or len(each) != 2:
            raise UsageError(f"weights: {each!r:.80} is no pair: give {PAIRS}")
        yield each[0], each[1]


def _write(
    slab: Slab,
    pieces: list[Slice],
    tensor: torch.Tensor,
    downloads: Downloads,
    *,
    stays: bool = False,
    deadline: float = NEVER,
) -> None:
    """Copy it in piece by piece, each cast by itself: no copy of all of it is made."""
    for piece in pieces:
        slab.write_later(piece.spec.name, piece.of(tensor), downloads, stays=stays, deadline=deadline)


def _root(slab: Slab, parts: dict[str, Part], algorithm: str) -> bytes:
    """Return the root of the manifest that this slab would be published with."""
    manifest = slab.manifest(algorithm=algorithm)
    return msgspec.structs.replace(manifest, tensors=with_parts(slab.specs, parts)).root()


def _parts(pieces: Pieces) -> dict[str, Part]:
    return {piece.spec.name: piece.spec.part for each in pieces.values() for piece in each if piece.spec.part}
