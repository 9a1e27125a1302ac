"""The blocking client: publish, unpublish, replicate, retain. What an adapter or a training loop needs, nothing else.

    with Client("tcp://host:7070", run="r1", model="actor", replica="trainer") as trainer:
        trainer.publish(1, tensors)                 # for vLLM: vllm.checkpoint_tensors(model)

    with Client("tcp://host:7070", run="r1", model="actor", replica="rollout-0") as rollout:
        report = rollout.replicate(parameters)      # the newest version, in place, from the best holder

The way of a version: `publish` puts an offer on this worker's shelf, where the transports serve it from, and tells the
hub. `replicate` and `fetch` ask the hub for sources and run a `Transfer`; what they have read becomes an offer too.
Every method may be called from any thread. Every wait has a deadline, and errors say what to do (see errors.py).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import torch

from tensorhub_plugins.core.client import session
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.errors import (
    HubUnreachable,
    TensorHubError,
    UsageError,
    VersionRefused,
)
from tensorhub_plugins.core.manifest import (
    Manifest,
    Part,
    TensorSpec,
    TensorTable,
)
from tensorhub_plugins.core.memory.moves import check_cover, difference, with_parts
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import check_tensors, contiguous_spec, same_bytes, share_memory
from tensorhub_plugins.core.memory.tied import LiveTensors
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import (
    address_towards,
)
from tensorhub_plugins.core.transfer import replication
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transfer.runner import Outcome, Transfer
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS, Offer, Transport, create, unavailable
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    LATEST,
    SHARDS_MAX,
    Location,
    ShardKey,
    VersionInfo,
    check_name,
    check_version,
)

log = logging.getLogger("tensorhub.client")

POOLED_SLABS_MAX = 2  # per set of tensors: one being filled while one is still read
BACKGROUND_TIMEOUT_S = 30.0  # for readers of a kept copy that may be dropped
ANNOUNCE_S = 1.0  # a hub that is there has long answered by then; one that is away is told when it is back
LAYOUTS_MAX = 8  # that one fetch names
FOR_EVER = float("inf")  # until the hub is back: for what is so, whatever it says


@dataclass(frozen=True)
class PublishReport:
    """seconds by phase: "copy" (into the slab), "digest", "announce" (until the hub knew)."""

    version: int
    layout: str
    size_bytes: int
    seconds: dict[str, float]
    manifest: Manifest


@dataclass(frozen=True)
class UnpublishReport:
    """cut_off: readers that had not finished by the deadline. kept: it was the last copy of a retained version."""

    version: int
    seconds: float
    cut_off: tuple[str, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class ReplicateReport:
    """seconds by phase: "find", "read". sources: "replica/shard" -> bytes. losses: sources that failed on the way."""

    version: int
    layout: str
    size_bytes: int
    seconds: dict[str, float]
    sources: dict[str, int]
    transports: dict[str, int]
    losses: tuple[str, ...]
    roots: dict[int, str]  # source shard -> hex of its manifest's root


@dataclass
class Fetched:
    """One version in memory of its own. slabs and manifests are by source shard.

    converts: nobody had the preferred layout, and this worker is expected to publish it, or to `abandon` it.
    """

    version: int
    layout: str
    slabs: dict[int, Slab]
    manifests: dict[int, Manifest]
    report: ReplicateReport
    converts: str | None = None
    _release: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def slab(self) -> Slab:
        """The only slab; UsageError when the source had several shards."""
        if len(self.slabs) != 1:
            raise UsageError(f"version {self.version} came in {len(self.slabs)} shards: use .slabs or .tensors()")
        return next(iter(self.slabs.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, sharing the slabs' memory.

        VersionRefused when two source shards have published one name with different bytes.
        """
        found: dict[str, torch.Tensor] = {}
        shard_of: dict[str, int] = {}
        for shard, slab in sorted(self.slabs.items()):  # in the order of shards, whichever came first
            for name, tensor in slab.tensors().items():
                if name in found and not same_bytes(found[name], tensor):
                    raise VersionRefused(
                        f"tensor {name!r} is published by shard {shard_of[name]} and by shard {shard}, with different "
                        "bytes: publish it in one of them",
                        version=self.version,
                    )
                found[name], shard_of[name] = tensor, shard
        return found

    def release(self) -> None:
        """Give the memory back to the client for the next fetch; what is published stays until its unpublish."""
        if self._release is not None:
            self._release()
        self._release, self.slabs = None, {}


class Client:
    """One worker's way into the store.

    address: the hub's, "tcp://host:port". run, model: name the history. replica, shard, shard_count: which part of
    which copy this worker is; the names of live replicas must differ. location: defaults to `here()`. transports:
    names in order of preference; those that do not work here are left out, which the log says. advertise_host:
    the address under which peers reach this host; defaults to the one that faces the hub.

    verify: publish a digest of every segment, and compare those of all that is read. Without it, which all workers of
    a model must agree on, only the source's word after the reading says that its bytes were still the published ones.

    limits: when a source counts as slow or dead, and how far ahead it is asked; see TransferLimits.

    Raise HubUnreachable when no hub answers within connect_timeout_s (seconds), UsageError for what cannot work.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        model: str,
        replica: str,
        shard: int = 0,
        shard_count: int = 1,
        location: Location | None = None,
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        advertise_host: str | None = None,
        connect_timeout_s: float = 10.0,
        verify: bool = True,
        limits: TransferLimits | None = None,
    ) -> None:
        for what, name in (("run", run), ("model", model), ("replica", replica)):
            check_name(what, name)
        if not 0 <= shard < shard_count <= SHARDS_MAX:
            raise UsageError(f"shard {shard} of {shard_count}: shards count from 0, {SHARDS_MAX} at most")
        self.replica, self.shard, self.shard_count = replica, shard, shard_count
        self._lock = threading.Lock()
        self._offers: dict[ShardKey, Offer] = {}
        self._offered: dict[ShardKey, int] = {}  # which offering of this client it is, also once it is kept
        self._offerings = 0
        self._incoming: set[ShardKey] = set()  # offers whose bytes are still arriving
        self._pool: list[Slab] = []
        self._owned: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()  # of `allocate` -> how often handed out
        self._copies: WeakSet[Slab] = WeakSet()  # made to keep a last copy, not to be used again
        self._fetched: WeakSet[Slab] = WeakSet()  # hold what was read from others
        self._transfers: set[Transfer] = set()
        self._serving: set[_Targets] = set()  # transfers that pass on what arrives, from the moment that they ask
        self._shelved = threading.Condition(self._lock)  # an offer came, or one that was expected will not
        self._verify = verify
        self._limits = TransferLimits() if limits is None else limits
        self._location = here() if location is None else location
        self._seen = 0
        self._published: dict[str, tuple[int, Manifest | None]] = {}  # layout -> newest version published here
        self._closed = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="tensorhub-background")
        self._transports = _usable(transports, advertise_host or address_towards(address))
        try:
            endpoints = {name: transport.serve(self) for name, transport in self._transports.items()}
            self._hub = HubLink(
                address,
                messages.Hello(
                    run=run,
                    model=model,
                    replica=replica,
                    shard=shard,
                    shard_count=shard_count,
                    location=self._location,
                    endpoints=endpoints,
                ),
                connect_timeout_s=connect_timeout_s,
                on_source_gone=self._source_gone,
                on_may_drop=self._may_drop,
                on_directive=self._directed,
            )
        except BaseException:
            self._close_local()
            raise

    # --- the verbs ---

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor] | Slab,
        layout: str = CHECKPOINT,
        *,
        copy: bool = True,
        timeout_s: float = 60.0,
        parts: Mapping[str, Part] | None = None,
        strict: bool = False,
    ) -> PublishReport:
        """Offer a version to everybody; returns when the hub knows of it. Until unpublish its bytes must not change.

        tensors: name -> tensor of any dtype and device; copied into host memory (copy=True) or adopted in place
        (copy=False: dense tensors of one device). A Slab is published as it is and belongs to the client from then on.
        parts: those of the tensors that are a part of what the whole replica holds under that name, and where in it.
        Versions only grow within a layout; the same version in another layout is welcome, and so is one that was taken
        back, with the same bytes. So is an older one that operators make the fleet return to (`pin`, `withdraw`).
        strict: names, dtypes and shapes must be those of the version published before in this layout, by this client.
        Without it, what differs is said in the log. Of a shard of the checkpoint layout that is one of several, only
        the tensors that are still here are compared: the others may have gone to another shard.

        Raise UsageError for what can never be published, HubUnreachable when the hub stays away until the deadline:
        then nothing was published.
        """
        key = ShardKey(check_version(version), check_name("layout", layout), self.shard, self.shard_count)
        timeout_s = _in_bounds(timeout_s)
        self._check_open()
        with self._lock:
            newest, last = self._published.get(layout, (0, None))
            if key in self._offers:
                raise UsageError("this version is published here already: unpublish it first", version=version)
        if version < newest and not self._returns(version, newest):
            raise UsageError(f"version {newest} of layout {layout} was published here before: versions only grow")
        began = time.monotonic()
        if isinstance(tensors, Slab):
            slab = tensors
            if slab.kind == "allocated" and slab.unwritten:
                raise UsageError(
                    f"{len(slab.unwritten)} tensors of the slab were never written, first {list(slab.unwritten[:5])}: "
                    "write them all, or call mark_written for those that were filled through their views",
                    version=version,
                )
            with self._lock:  # it was published before, taken back, and is used again by its owner
                if slab in self._pool:
                    self._pool.remove(slab)
        elif copy:
            slab = self._snapshot(tensors)
        else:
            slab = Slab.adopt(tensors)
        copied = time.monotonic()
        try:
            described = with_parts(slab.specs, parts)
            changed = self._changed(layout, last, described)
            if changed and strict:
                if slab is not tensors:
                    self._discard(slab)
                raise UsageError(
                    f"{changed}. Nothing was published: publish what version {newest} consisted of. If the change is "
                    "meant, take a new run or model name, or pass strict=False",
                    version=version,
                )
            manifest = msgspec.structs.replace(slab.manifest(digests=self._verify), tensors=described)
            if version == newest and last is not None and manifest.root() != last.root():
                raise UsageError(f"version {newest} of layout {layout} was published here before with other bytes")
            digested = time.monotonic()
            self._offer(
                key, manifest, slab, origin="replicated" if slab in self._fetched else "published", timeout_s=timeout_s
            )
        except BaseException:
            if slab is not tensors:
                self._recycle(slab)
            raise
        with self._lock:
            self._published[layout] = version, manifest
            self._seen = max(self._seen, version)
        if changed:
            log.warning("%s/%d: version %d: %s", self.replica, self.shard, version, changed)
        seconds = {"copy": copied - began, "digest": digested - copied, "announce": time.monotonic() - digested}
        return PublishReport(version, layout, manifest.size_bytes, seconds, manifest)

    def unpublish(self, version: int, layout: str | None = None, *, timeout_s: float = 30.0) -> UnpublishReport:
        """Take a version back (layout None: in every layout). Afterwards its memory may change.

        Returns when its last reader has finished, or at the deadline, when the readers that are left are cut off. The
        last copy of a retained version is moved to host memory first and served from there until it is not needed.
        """
        check_version(version)
        self._check_open()
        began = time.monotonic()
        with self._lock:
            keys = [k for k in self._offers if k.version == version and layout in (None, k.layout)]
            if not self._incoming.isdisjoint(keys):
                raise UsageError("it is still being read here: let replicate or fetch return first", version=version)
        if not keys:
            return UnpublishReport(version, 0.0)
        return self._unpublish(keys, version, began, timeout_s)

    def replicate(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int | str = LATEST,
        layout: str = CHECKPOINT,
        *,
        timeout_s: float = 60.0,
        serve: bool = True,
        parts: Mapping[str, Part] | None = None,
    ) -> ReplicateReport:
        """Read a version into these tensors, in place, from the best holders, and become a source of it.

        tensors: name -> dense tensor. The checkpoint layout may be wanted in part (the names given); any other layout
        must match shard for shard, tensor for tensor. serve: offer what was read to others, until unpublish. parts:
        tensors that are only a part of what is published, and where it lies there, for example a rank's rows; what was
        published in parts is put together. Only the segments that are needed are read.

        An error after the first byte leaves the tensors mixed: do not use them before another replicate() succeeds (or
        read into a `fetch`ed slab instead). Raise NotPublished, VersionGone, DeadlineExceeded, HubUnreachable, or
        UsageError naming the tensor that does not fit, or two that are the same memory here (tied weights) and were
        published with different bytes. Further names of the same memory take host memory while they are read.
        """
        targets = _InPlace(self, tensors, parts, serve=serve)
        outcome = self._transfer(targets, version, (layout,), timeout_s, claim=False)
        targets.complete()
        return _report(outcome)

    def fetch(
        self,
        version: int | str = LATEST,
        layouts: Sequence[str] = (CHECKPOINT,),
        *,
        timeout_s: float = 60.0,
        converts: bool = True,
        serve: bool = False,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Fetched:
        """Read a version into host memory of its own, in the first of `layouts` (by preference) that can be had.

        converts: when nobody has layouts[0], one reader is chosen to read layouts[-1] and is expected to publish
        layouts[0] of that version; the others wait for it. Fetched.converts says that this worker was chosen.
        serve: offer the bytes to others as they arrive. Errors as in `replicate`; nothing is left behind by one.
        into: tensors for layouts[0], which is read in place, as by `replicate`; Fetched has no slabs then.
        """
        if isinstance(layouts, str) or not 1 <= len(layouts) <= LAYOUTS_MAX:
            raise UsageError(f"layouts={layouts!r}: give a list of 1 to {LAYOUTS_MAX} layouts, the preferred one first")
        targets = _Allocated(self, serve=serve) if into is None else _Either(self, into, layouts[0], serve=serve)
        outcome = self._transfer(targets, version, tuple(layouts), timeout_s, claim=converts and len(layouts) > 1)
        chosen = outcome.claimed is not None and outcome.layout != layouts[0]
        if outcome.claimed is not None and not chosen:
            self.abandon(outcome.version, layouts[0])
        targets.complete()
        slabs = {} if into is not None and outcome.layout == layouts[0] else targets.slabs
        return Fetched(
            outcome.version,
            outcome.layout,
            slabs,
            outcome.manifests,
            _report(outcome),
            layouts[0] if chosen else None,
            self._releaser(list(slabs.values())),
        )

    def abandon(self, version: int, layout: str) -> None:
        """Give up a conversion that `fetch` has put on this worker; another is chosen."""
        key = ShardKey(check_version(version), check_name("layout", layout), self.shard, self.shard_count)
        self._hub.ask(lambda number: messages.Abandon(number, key), time.monotonic() + BACKGROUND_TIMEOUT_S)

    def wait(self, version: int | str = LATEST, *, newer_than: int = 0, timeout_s: float = 60.0) -> int:
        """Return a visible version: this one, or the newest that is above newer_than. NotPublished at the deadline."""
        number = 0 if version == LATEST else check_version(version)
        if newer_than:
            check_version(newer_than)
        reply = self._ask(lambda n: messages.Wait(n, number, newer_than, timeout_s), timeout_s)
        assert isinstance(reply, messages.Visible)
        return reply.version

    def target(
        self, installed: int = 0, *, refused: Iterable[int] = (), pins: bool = True, timeout_s: float = 60.0
    ) -> int:
        """Return the version that this worker is to run, once that is not `installed` (0: none is).

        It is the pinned version; else the newest visible one that is not in `refused` (versions that this worker could
        not install, the last 64 count). It is older than what is installed only if that was withdrawn, or if it is
        pinned. A version in `refused` is returned once more when it is pinned again. pins=False: as if nothing were
        pinned, for who needs the trainer's newest. Raise NotPublished at the deadline, or VersionGone if what is
        installed was withdrawn, or what is pinned is held by nobody, and there is nothing to run instead.
        """
        refused = tuple(check_version(number) for number in refused)[-messages.REFUSED_MAX :]
        if installed:
            check_version(installed)
        serial = self._hub.directive.serial
        reply = self._ask(lambda n: messages.Target(n, installed, timeout_s, refused, serial, pins), timeout_s)
        assert isinstance(reply, messages.Visible)
        return reply.version

    def pin(self, version: int, *, timeout_s: float = 10.0) -> None:
        """Make all followers of this run and model go to this version and stay there, until `unpin`.

        "latest" is the pinned version meanwhile, and its last copy is not given up. UsageError if nobody holds it.
        """
        number = check_version(version)
        self._ask(lambda n: messages.Pin(n, number, timeout_s), timeout_s)

    def unpin(self, *, timeout_s: float = 10.0) -> None:
        """Let all followers go on to the newest version."""
        self._ask(lambda n: messages.Pin(n, 0, timeout_s), timeout_s)

    def withdraw(self, version: int, *, timeout_s: float = 10.0) -> None:
        """This version is bad: nobody is given it any more, who reads it is stopped (VersionGone), and followers that
        run it return to the newest other one that is held. So keep two, with `retain(newest=2)`.

        It stays withdrawn; good weights need another number. UsageError if there never was such a version.
        """
        number = check_version(version)
        self._ask(lambda n: messages.Withdraw(n, number, timeout_s), timeout_s)

    def versions(self, *, timeout_s: float = 10.0) -> list[VersionInfo]:
        """What the hub knows, oldest version first."""
        reply = self._ask(messages.AskVersions, timeout_s)
        assert isinstance(reply, messages.Versions)
        return list(reply.versions)

    def retain(self, newest: int = 1, *, timeout_s: float = 10.0) -> None:
        """Never give up the last copy of this many newest versions (of this run and model) by an unpublish."""
        if not 0 <= newest <= messages.RETAIN_MAX:
            raise UsageError(f"retain(newest={newest}): a count of versions from 0 to {messages.RETAIN_MAX}")
        self._ask(lambda number: messages.Retain(number, newest), timeout_s)

    def allocate(self, specs: Iterable[TensorSpec]) -> Slab:
        """Host memory for these tensors, shareable with readers on this host; reused from versions that are over."""
        self._check_open()
        wanted = TensorTable.of(specs)
        with self._lock:
            for index, slab in enumerate(self._pool):
                if slab.specs == wanted:
                    del self._pool[index]
                    self._owned[slab] += 1
                    slab.expect_writes()
                    return slab
        slab = Slab.allocate(wanted)
        with self._lock:
            self._owned[slab] = 1
        return slab

    def serving(self) -> list[ShardKey]:
        """The shards this worker offers now."""
        with self._lock:
            return sorted(self._offers)

    def close(self) -> None:
        """Leave: readers are cut off and go elsewhere. Closing twice is fine."""
        with self._shelved:
            if self._closed:
                return
            self._closed = True
            self._shelved.notify_all()
        self._hub.close()
        self._close_local()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the shelf, read by the transports' serving threads ---

    def find(self, key: ShardKey) -> Offer | None:
        """Part of the Shelf protocol."""
        with self._lock:
            return self._offers.get(key)

    def expect(self, key: ShardKey, lease: int, deadline: float) -> Offer | None:
        """Part of the Shelf protocol: the hub may lend what this worker has just been told to read."""
        with self._shelved:
            while key not in self._offers and any(t.may_offer(key, lease) for t in self._serving) and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0 or not self._shelved.wait(left):
                    break
            return self._offers.get(key)

    # --- inside ---

    def _transfer(
        self, targets: _Targets, version: int | str, layouts: tuple[str, ...], timeout_s: float, *, claim: bool
    ) -> Outcome:
        self._check_open()
        for layout in layouts:
            check_name("layout", layout)
        number = 0 if version == LATEST else check_version(version)
        timeout_s = _in_bounds(timeout_s)
        machine = replication.Replication(
            version=number,
            at_least=0 if number else self._seen,
            layouts=layouts,
            claim=claim,
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            verify=self._verify,
            serve=targets.serves,
            location=self._location,
            limits=self._limits,
        )
        transfer = Transfer(machine, self._hub, self._transports, targets)
        with self._lock:
            self._transfers.add(transfer)
        targets.begin()
        try:
            outcome = transfer.run()
            targets.settle(outcome.version)
        except BaseException:
            targets.restart()
            if machine.claimed is not None:
                with suppress(TensorHubError):
                    self.abandon(machine.claimed.version, machine.claimed.layout)
            raise
        finally:
            targets.end()
            with self._lock:
                self._transfers.discard(transfer)
        with self._lock:
            self._seen = max(self._seen, outcome.version)
        for loss in outcome.losses:
            log.warning("%s/%d: version %d: lost %s", self.replica, self.shard, outcome.version, loss)
        return outcome

    def _offer(
        self, key: ShardKey, manifest: Manifest, slab: Slab, *, origin: messages.Origin, timeout_s: float
    ) -> None:
        """Put a shard on the shelf and tell the hub."""
        offer = Offer(key, manifest, slab, birth=self._hub.sequence + 1)
        offer.mark_all_ready()
        with self._lock:
            if key in self._offers:
                raise UsageError("this version is published here already: unpublish it first", version=key.version)
            self._put(offer)
        holding = messages.Holding(key, manifest.root(), manifest.size_bytes, True, origin)
        try:
            self._ask(lambda number: messages.Publish(number, holding), timeout_s)
        except BaseException:
            with self._lock:
                self._offers.pop(key, None)
                self._offered.pop(key, None)
            offer.withdraw()
            raise

    def _changed(self, layout: str, last: Manifest | None, tensors: TensorTable) -> str:
        """How these tensors differ from those of the last version; empty: not at all, or there was none."""
        may_move = layout == CHECKPOINT and self.shard_count > 1
        found = difference(last.tensors, tensors, may_move=may_move) if last is not None else ""
        return f"the tensors of layout {layout} are not those published here before: {found}" if found else ""

    def _announce(self, offer: Offer, *, complete: bool) -> Future[messages.Reply]:
        """Tell the hub of what was read, whenever it listens."""
        holding = messages.Holding(offer.key, offer.manifest.root(), offer.manifest.size_bytes, complete, "replicated")
        return self._hub.ask(lambda number: messages.Publish(number, holding), FOR_EVER)

    def _unpublish(self, keys: list[ShardKey], version: int, began: float, timeout_s: float) -> UnpublishReport:
        with self._lock:
            offered = {key: self._offered.get(key) for key in keys}
        try:
            reply = self._ask(lambda number: messages.Unpublish(number, tuple(keys), timeout_s), timeout_s)
            assert isinstance(reply, messages.Unpublished)
        except HubUnreachable:  # it may be the last copy; the hub says when it is back
            log.warning("%s/%d: version %d is kept, the hub does not answer", self.replica, self.shard, version)
            reply = messages.Unpublished(0, must_retain=True)
        with self._lock:  # two threads may give up the same, and one of them read it again before the other hears
            keys = [key for key in keys if self._offered.get(key) == offered[key]]
        if reply.must_retain:
            for key in keys:
                self._keep(key, began + _in_bounds(timeout_s))
        else:
            for key in keys:
                self._withdraw(key)
        return UnpublishReport(version, time.monotonic() - began, reply.cut_off, reply.must_retain)

    def _put(self, offer: Offer) -> None:
        """On the shelf. Called with the lock."""
        self._offerings += 1
        self._offers[offer.key], self._offered[offer.key] = offer, self._offerings

    def _keep(self, key: ShardKey, deadline: float) -> None:
        """Rule 4: go on serving the last copy, from memory that the caller does not touch."""
        with self._lock:
            offer = self._offers.get(key)
        if offer is None or offer.slab.kind == "allocated":
            return
        copy = Slab.allocate(offer.manifest.tensors)  # with their strides: the published bytes are the storage's
        for name, tensor in offer.slab.tensors().items():
            copy.write(name, tensor)
        moved = Offer(key, offer.manifest, copy, birth=offer.birth)
        moved.mark_all_ready()
        with self._lock:
            self._copies.add(copy)
            self._offers[key] = moved
        offer.wait_no_readers(deadline)
        offer.withdraw()

    def _withdraw(self, key: ShardKey) -> None:
        with self._lock:
            offer = self._offers.pop(key, None)
            self._offered.pop(key, None)
        if offer is not None:
            offer.withdraw()
            self._recycle(offer.slab)

    def _snapshot(self, tensors: Mapping[str, torch.Tensor]) -> Slab:
        """A copy of these tensors in host memory of this client's."""
        check_tensors(tensors)
        slab = self.allocate(contiguous_spec(name, t.dtype, t.shape) for name, t in tensors.items())
        try:
            for name, tensor in tensors.items():
                slab.write(name, tensor)
        except BaseException:
            self._recycle(slab)
            raise
        return slab

    def _releaser(self, slabs: list[Slab]) -> Callable[[], None]:
        """Recycles these slabs as they are handed out now: not if that has happened, and somebody has them again."""
        with self._lock:
            handed_out = [(slab, self._owned[slab]) for slab in slabs]

        def release() -> None:
            for slab, times in handed_out:
                self._recycle(slab, times)

        return release

    def _recycle(self, slab: Slab, times: int | None = None) -> None:
        """Keep a slab that nobody uses any more for the next `allocate`. times: only if not handed out since."""
        with self._lock:
            if any(offer.slab is slab for offer in self._offers.values()):
                return
            if slab not in self._owned and slab not in self._copies:
                return
            if slab in self._pool or times not in (None, self._owned.get(slab)):
                return
            self._fetched.discard(slab)
            alike = sum(pooled.specs == slab.specs for pooled in self._pool)
            if slab in self._owned and alike < POOLED_SLABS_MAX and not self._closed:
                self._pool.append(slab)
                return
            self._owned.pop(slab, None)
        slab.close()

    def _discard(self, slab: Slab) -> None:
        """Let go of a copy that will not be used again."""
        with self._lock:
            self._owned.pop(slab, None)
        slab.close()

    def _ask(self, make: Callable[[int], session.Request], timeout_s: float) -> messages.Reply:
        future: Future[messages.Reply] = self._hub.ask(make, time.monotonic() + _in_bounds(timeout_s))
        return future.result()  # the session machine ends every request at its deadline

    def _returns(self, version: int, newest: int) -> bool:
        """Whether operators make the fleet go back from the newest version that was published here to this one."""
        directive = self._hub.directive
        return version == directive.pin or newest in directive.withdrawn

    def _directed(self, directive: messages.Directive) -> None:
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.withdrawn(directive.withdrawn)

    def _source_gone(self, gone: bytes) -> None:
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.source_gone(gone)

    def _may_drop(self, effect: session.MayDrop) -> None:
        with suppress(RuntimeError):  # closed meanwhile
            self._background.submit(self._drop_kept, list(effect.keys))

    def _drop_kept(self, keys: list[ShardKey]) -> None:
        with self._lock:
            keys = [key for key in keys if key in self._offers]
        if keys:
            try:
                self._unpublish(keys, keys[0].version, time.monotonic(), BACKGROUND_TIMEOUT_S)
            except TensorHubError as error:
                log.info("%s/%d: kept copies stay for now: %s", self.replica, self.shard, error)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the client is closed")

    def _close_local(self) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)
        for transport in self._transports.values():
            transport.close()
        with self._lock:
            offers, self._offers = list(self._offers.values()), {}
            pool, self._pool = self._pool, []
        for offer in offers:
            offer.withdraw()
            if offer.slab in self._owned or offer.slab in self._copies:
                offer.slab.close()
        for slab in pool:
            slab.close()


# --- where a transfer's bytes go ---


class _Targets:
    """What `_InPlace` and `_Allocated` share: the offers through which arriving bytes are served on."""

    def __init__(self, client: Client, *, serve: bool) -> None:
        self._client = client
        self._serve = serve
        self._arriving: dict[int, Offer] = {}
        self._granted: set[ShardKey] | None = None  # None: not yet told what to read
        self._birth = 0
        self._in_place: LiveTensors | None = None
        self.slabs: dict[int, Slab] = {}

    @property
    def serves(self) -> bool:
        """Whether others may be sent here before anything has arrived."""
        return self._serve

    def begin(self) -> None:
        """Sources are asked for from now on."""
        self._birth = self._client._hub.sequence + 1
        if self.serves:
            with self._client._shelved:
                self._client._serving.add(self)

    def may_offer(self, key: ShardKey, lease: int) -> bool:
        """Whether this shard may soon be offered, by whom was asked before this lease."""
        return self._birth <= lease and (self._granted is None or key in self._granted)

    def expect(self, key: ShardKey) -> None:
        with self._client._shelved:
            self._granted = {*(self._granted or ()), key}
            self._client._shelved.notify_all()

    def end(self) -> None:
        """Nothing more is prepared."""
        with self._client._shelved:
            self._client._serving.discard(self)
            self._client._shelved.notify_all()

    def settle(self, version: int) -> None:
        """Everything has arrived, and nobody was told so yet. UsageError when it cannot stay as it is (see tied.py)."""
        if self._in_place is not None and self._in_place.tied:
            self._in_place.check(version)
            for offer in self._arriving.values():
                offer.move(self._in_place.settled(offer.slab))

    def prepare(self, key: ShardKey, manifest: Manifest) -> Slab:
        client = self._client
        slab = self.slabs[key.shard] = self._memory(manifest)
        if self._serve and slab.specs == manifest.tensors:
            with client._lock:
                if key in client._offers or client._closed:
                    return slab
                offer = Offer(key, manifest, slab, birth=self._birth)
                client._put(offer)
                client._incoming.add(key)
                client._shelved.notify_all()
            self._arriving[key.shard] = offer
            client._announce(offer, complete=False)
        return slab

    def _memory(self, manifest: Manifest) -> Slab:
        raise NotImplementedError

    def verified(self, shard: int, segment: int) -> None:
        if shard in self._arriving:
            self._arriving[shard].mark_ready(segment)

    def restart(self) -> None:
        """Nothing of what was prepared will be completed."""
        client = self._client
        for offer in self._arriving.values():
            with suppress(UsageError):  # closed meanwhile: the hub knows, or will
                client._hub.ask(
                    lambda number, key=offer.key: messages.Unpublish(number, (key,), 0.0, gone=True),  # type: ignore[misc]
                    time.monotonic() + BACKGROUND_TIMEOUT_S,
                )
            with client._lock:
                client._incoming.discard(offer.key)
            client._withdraw(offer.key)
        self._arriving.clear()
        self.slabs.clear()

    def complete(self) -> None:
        """All bytes are here and verified."""
        client = self._client
        answers = []
        for offer in self._arriving.values():
            offer.mark_all_ready()
            with client._lock:
                client._incoming.discard(offer.key)
            answers.append(client._announce(offer, complete=True))
        if wait(answers, ANNOUNCE_S).not_done:  # nothing of it is the caller's to wait for
            log.info("%s/%d: the hub has not heard yet what was read", client.replica, client.shard)


class _InPlace(_Targets):
    def __init__(
        self, client: Client, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, Part] | None, *, serve: bool
    ) -> None:
        super().__init__(client, serve=serve)
        # What cannot be a target is refused before anything moves.
        self._in_place: LiveTensors = LiveTensors(tensors)
        with client._lock:
            for key, offer in client._offers.items():
                if offer.slab.kind == "adopted" and share_memory(offer.slab.tensors(), tensors):
                    raise UsageError(
                        "these tensors are published: unpublish that version before they change", version=key.version
                    )
        self._names = tensors.keys()
        self._adopted: Slab | None = self._in_place.adopt()
        self._wanted = with_parts(self._adopted.specs, parts)
        self._parts = dict(parts or {})
        self._sources: dict[int, TensorTable] = {}

    def prepare(self, key: ShardKey, manifest: Manifest) -> Slab:
        self.check(key, manifest)
        return super().prepare(key, manifest)

    def check(self, key: ShardKey, manifest: Manifest) -> None:
        """Raise UsageError for tensors that would not fit, or would be missing."""
        self._sources[key.shard] = manifest.tensors
        if len(self._sources) == key.shard_count or key.layout != CHECKPOINT:
            check_cover(self._sources, self._wanted)

    def _memory(self, manifest: Manifest) -> Slab:
        slab, self._adopted = self._adopted, None
        if slab is not None and slab.specs == manifest.tensors and not self._parts:
            return slab  # what the rest would find out, without looking at thousands of tensors
        names = [spec.name for spec in manifest.tensors if spec.name in self._names]
        if slab is None or len(names) < len(self._names):  # else one source shard has all of it
            slab = self._in_place.adopt(names)
        slab.specs = with_parts(slab.specs, {name: self._parts[name] for name in names if name in self._parts})
        return slab

    def restart(self) -> None:
        super().restart()
        self._sources.clear()


class _Allocated(_Targets):
    def _memory(self, manifest: Manifest) -> Slab:
        return self._client.allocate(manifest.tensors)

    def restart(self) -> None:
        slabs = list(self.slabs.values())
        super().restart()
        for slab in slabs:
            self._client._recycle(slab)

    def complete(self) -> None:
        for slab in self.slabs.values():
            slab.mark_written()
        self._client._fetched.update(self.slabs.values())
        super().complete()


class _Either(_Allocated):
    """One layout in place, any other in memory of its own."""

    def __init__(self, client: Client, tensors: Mapping[str, torch.Tensor], layout: str, *, serve: bool) -> None:
        super().__init__(client, serve=serve)
        self._tensors, self._layout = _InPlace(client, tensors, None, serve=False), layout

    def prepare(self, key: ShardKey, manifest: Manifest) -> Slab:
        self._in_place = self._tensors._in_place if key.layout == self._layout else None
        if self._in_place is not None:
            self._tensors.check(key, manifest)
        return super().prepare(key, manifest)

    def _memory(self, manifest: Manifest) -> Slab:
        return self._tensors._memory(manifest) if self._in_place is not None else super()._memory(manifest)

    def restart(self) -> None:
        super().restart()
        self._tensors.restart()


# --- small things ---


def here() -> Location:
    """This worker's location: TENSORHUB_DATA_CENTER, TENSORHUB_RACK, TENSORHUB_HOST (default: the host's name)."""
    return Location(
        data_center=os.environ.get("TENSORHUB_DATA_CENTER", ""),
        rack=os.environ.get("TENSORHUB_RACK", ""),
        host=os.environ.get("TENSORHUB_HOST") or socket.gethostname(),
    )


def _in_bounds(timeout_s: float) -> float:
    """Seconds that every clock and message can hold: a wait "for ever" lasts a year, one for less than nothing none."""
    if not isinstance(timeout_s, (int, float)) or timeout_s != timeout_s:  # the latter: not a number
        raise UsageError(f"timeout_s={timeout_s!r}: pass a number of seconds, float('inf') to wait as long as it takes")
    return min(max(0.0, timeout_s), messages.SECONDS_MAX)


def _usable(names: Sequence[str], advertise_host: str) -> dict[str, Transport]:
    transports = {}
    for name in names:
        reason = unavailable(name)
        if reason is None:
            transports[name] = create(name, advertise_host=advertise_host)
        else:
            # Nobody who names no transport wants to hear on every worker that it has no RDMA card.
            log.log(
                logging.INFO if tuple(names) == DEFAULT_TRANSPORTS else logging.WARNING, "no %s here: %s", name, reason
            )
    if not transports:
        raise UsageError(f"none of the transports {list(names)} works here: name another, for example tcp")
    return transports


def _report(outcome: Outcome) -> ReplicateReport:
    return ReplicateReport(
        outcome.version,
        outcome.layout,
        outcome.size_bytes,
        outcome.seconds,
        dict(outcome.sources),
        dict(outcome.transports),
        outcome.losses,
        {shard: manifest.root().hex() for shard, manifest in outcome.manifests.items()},
    )
