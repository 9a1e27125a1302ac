"""The blocking client: publish, unpublish, replicate. With history.py all that an adapter or a training loop needs.

    with Client("tcp://host:7070", run="r1", model="actor", replica="trainer") as trainer:
        trainer.publish(1, tensors)                 # for vLLM: vllm.checkpoint_tensors(model)
    with Client("tcp://host:7070", run="r1", model="actor", replica="rollout-0") as rollout:
        report = rollout.replicate(parameters)      # the newest version, in place, from the best holder

The path of a version: `publish` puts an offer on this worker's shelf, from which the transports serve it, and notifies
the hub. `replicate` and `fetch` ask the hub for sources and run a `Transfer`; what they have read becomes an offer too.
Every method may be called from any thread. Every wait has a deadline, and errors say what to do (see errors.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import torch

from tensorhub_plugins.core import digests, options, resources, run_log, types
from tensorhub_plugins.core.client import arguments, calls, publication
from tensorhub_plugins.core.client.allowed import Allowed
from tensorhub_plugins.core.client.budget import Budget
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.client.destinations import Destinations, LiveMemory
from tensorhub_plugins.core.client.hand_over import hand_over
from tensorhub_plugins.core.client.history import History
from tensorhub_plugins.core.client.reports import Fetched, PublishReport, UnpublishReport
from tensorhub_plugins.core.client.requested_copies import READ_TIMEOUT_S, Copies
from tensorhub_plugins.core.client.serving import BACKGROUND_TIMEOUT_S, Serving
from tensorhub_plugins.core.deadline import NEVER, Deadline, bounded
from tensorhub_plugins.core.errors import TensorHubError
from tensorhub_plugins.core.manifest import Part, TensorSpec
from tensorhub_plugins.core.memory.claims import claimed
from tensorhub_plugins.core.memory.pool import SlabPool
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.process_lifetime import check_not_forked, identity
from tensorhub_plugins.core.protocol import advertised, messages
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.security import secret, tls
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transfer import replication
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transfer.report import ReplicateReport
from tensorhub_plugins.core.transfer.runner import Outcome, Transfer
from tensorhub_plugins.core.transports import DEFAULT_LIMITS, DEFAULT_TRANSPORTS, Offer, TransportLimits

log = logging.getLogger("tensorhub.client")

CLOSE_S = 5.0  # a second close waits so long for the first, which may itself wait for the second's thread


@calls.all_public
@resources.in_each_call
class Client(History):
    """One worker's connection to the store.

    address: the hub's, "tcp://host:port", or all that the one hub may have, with commas. run, model: name the history.
    replica, shard, shard_count: which part of which copy this worker is; the names of live replicas must differ.
    location: defaults to `here()`. transports: names in order of preference; those that do not work here are left out,
    and logged. advertise_host: the addresses under which peers reach this host, or interface: those of these network
    interfaces, with commas; else those that face the hub. ports: "from-to". The environment comes before all of these.

    verify: publish a digest of every segment, and compare those of all that is read. Without it, which all workers of
    a model must agree on, only the source's statement after the read confirms that its bytes were the published ones.
    delta: "auto": send and take what has changed instead of whole segments, between hosts, where that saves time.
    digest: the algorithm to publish with. With "blake3", which no host on the way can forge, no other is read, either.
    keys: the run's secret, or a reader's key; None: the environment's (see security/secret.py), if it has one.
    job: identifies this worker's next incarnation to a hub with a secret, which lets it take over the name at once.
    None: the environment's TENSORHUB_JOB; without one a name is free after five silent heartbeats.
    preemptible: this worker may be preempted at short notice: what only such workers have is not safe, see `retain`.
    None: the environment's TENSORHUB_PREEMPTIBLE, 1 or 0; without one it is not.
    limits, transport_limits: when sources and connections count as slow or lost, see TransferLimits, TransportLimits.
    memory_budget_bytes: for all that is offered from memory of the client's own, published, retained and read (None:
    half of this machine's); the rest of it is for copies that `retain(domains=2)` needs. An excess is logged, or, with
    over_budget="refuse", not published (UsageError), with the versions that use the memory. The last copy of a retained
    version is kept all the same.

    Any timeout_s is in seconds, 0 or more, from the first line of a call; above a year counts as a year. It covers all
    that the call does: checking tensors, copies, digests, the hub's answer. An explicit one is strict. None, of
    calls that move weights: 60 s (unpublish: 30 s), and one more for each 0.5 GB that they move. Every method that asks
    the hub may raise HubUnreachable, when it has not answered shortly after timeout_s (here: connect_timeout_s), and
    UsageError, for arguments that can never work or when the client is closed. A call that has raised is not carried
    out later. ResourceRefused, a UsageError, when the system refuses this process a thread, descriptor or memory."""

    def __init__(
        self,
        address: str,
        *,
        run: str,
        model: str,
        replica: str,
        shard: int = 0,
        shard_count: int = 1,
        location: types.Location | None = None,
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        advertise_host: str | None = None,
        interface: str | None = None,
        ports: str | None = None,
        connect_timeout_s: float = 10.0,
        verify: bool = True,
        digest: digests.Algorithm = digests.XXH3,
        keys: Keys | None = None,
        limits: TransferLimits | None = None,
        transport_limits: TransportLimits = DEFAULT_LIMITS,
        memory_budget_bytes: int | None = None,
        over_budget: Literal["warn", "refuse"] = "warn",
        job: str | None = None,
        preemptible: bool | None = None,
        delta: options.Delta = "auto",
    ) -> None:
        deadline = Deadline.after(bounded(connect_timeout_s, "connect_timeout_s"))
        arguments.check_identity(shard, shard_count, run=run, model=model, replica=replica)
        arguments.check_budget(memory_budget_bytes, over_budget)
        resources.begin_client()
        self.replica, self.shard, self.shard_count, self._worker = replica, shard, shard_count, f"{replica}/{shard}"
        self._gate = None if (keys := secret.given(keys)) is None else Gate(keys.lease_key)
        self._verify, self.digest = verify, digests.chosen(digest, verify=verify)
        self._limits = TransferLimits() if limits is None else limits
        self._location = arguments.located(arguments.here() if location is None else location)
        self._lock, self._left, self._transfers = threading.Lock(), threading.Event(), set[Transfer]()
        self._seen, self._closed, self._pid = 0, False, os.getpid()  # seen: the newest version read or published here
        self.budget = Budget(self._worker, memory_budget_bytes, refuses=over_budget == "refuse")
        self._serving = Serving(self._worker, SlabPool(), self.budget, arguments.check_delta(delta))
        self._preemptible = arguments.is_preemptible() if preemptible is None else preemptible
        self._job = arguments.check_word("job", os.environ.get("TENSORHUB_JOB", "") if job is None else job)
        self.changes, self._copies = self._serving.changes, Copies(self._serving, self._copy)
        told = advertised.choose(address, deadline, host=advertise_host, interface=interface, ports=ports)
        self._transports = arguments.usable(transports, told, transport_limits, self._gate)
        try:
            self._hub = self._serving.hub = self._link(address, self._hello(run, model, told), deadline, keys)
        except BaseException:
            self._close_local()
            raise
        calls.undone_by(self.close)

    # --- versions: publish, read, unpublish ---

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor] | Slab,
        layout: str = types.CHECKPOINT,
        *,
        copy: bool = True,
        timeout_s: float | None = None,
        parts: Mapping[str, Part] | None = None,
        strict: bool = False,
    ) -> PublishReport:
        """Offer a version to all readers; return when the hub knows of it. Until unpublish its bytes must not change.

        tensors: name -> tensor of any dtype, shape and device (but meta); copied into host memory (copy=True; a dense
        one with its strides) or adopted in place (copy=False: dense tensors, all on the CPU or all on one device). A
        Slab is published as it is, every tensor of it written, and belongs to the client from then on. parts: tensors
        that are a part of what the replica holds under that name, and where: start, global_shape in elements, by axis.
        Versions only grow within a layout; also allowed are the same version in another layout, an unpublished one with
        the same bytes, and an older one that operators make the fleet return to (`pin`, `withdraw`). strict: names,
        dtypes and shapes must be those that this client published before in this layout; else differences are logged.
        For one of several shards of a checkpoint only the tensors still here are compared: others may have moved.

        Raise UsageError for what can never be published, as a version that was withdrawn, DeadlineExceeded when it
        was not copied and digested in time, HubUnreachable without an answer: then nothing is published later; it says
        whether the request may have reached the hub, in which case it is unpublished."""
        allowed = Allowed.begin(timeout_s, tensors)
        arguments.check_flags(copy=copy, strict=strict)
        key = self._key(version, layout)
        with allowed.naming(version):
            self._check_open()
            self._serving.check(key)
            slab = publication.slab_of(self._serving, tensors, version, parts, allowed.deadline, copy=copy)
            return self._publish(key, slab, parts, allowed, strict=strict, is_ours=slab is not tensors)

    def _publish(
        self,
        key: types.ShardKey,
        slab: Slab,
        parts: Mapping[str, Part] | None,
        allowed: Allowed,
        *,
        strict: bool,
        is_ours: bool,
    ) -> PublishReport:
        version, deadline, copied = key.version, allowed.deadline, time.monotonic()
        try:
            with claimed(slab, f"{self._worker} publishes, as version {version},", deadline):
                manifest, changed = publication.describe(
                    self._serving, key, slab, parts, deadline, algorithm=self.digest, strict=strict
                )
                digested = time.monotonic()
                calls.check()  # an interrupted caller may publish it again by now
                # A trainer does not lend: an engine that installs late would keep it from reusing its memory.
                lends = key.layout != types.CHECKPOINT and is_ours
                self._serving.publish(key, manifest, slab, deadline, lends=lends)
        except BaseException:
            if is_ours:
                self._serving.pool.discard(slab)
            raise
        with self._lock:
            self._seen = max(self._seen, version)
        if changed:
            log.warning("%s: version %d: %s", self._worker, version, changed)
        ended = time.monotonic()
        seconds = {"copy": copied - allowed.began, "digest": digested - copied, "announce": ended - digested}
        report = PublishReport(version, key.layout, manifest.size_bytes, seconds, manifest)
        if is_ours and key.layout == types.CHECKPOINT and run_log.takes("publish"):  # a Publisher records more
            self._record_publish(report, ended - allowed.began)
        return report

    def unpublish(self, version: int, layout: str | None = None, *, timeout_s: float | None = None) -> UnpublishReport:
        """Stop offering a version (layout None: in every layout). Afterwards its memory may change.

        Return when its last reader has finished, or after timeout_s, when the remaining readers are disconnected. The
        last copy of a retained version is moved to host memory first and served from there until it is not needed; so
        is a copy about which the hub does not answer, as it may be the last one: this does not raise HubUnreachable.
        Raise DeadlineExceeded when moving it takes longer: then it stays on offer where it is, and must not change yet.
        A version that is not offered here is no error. Raise UsageError while it is still being read here.

        For tensors that were published in place a few segments are compared with their digests: the log and
        `UnpublishReport.damaged` name those that were written to meanwhile. `recheck` compares all."""
        arguments.check_offered(version, layout, timeout_s)
        self._check_open()
        return self._serving.unpublish(version, layout, timeout_s)

    def recheck(self, version: int, layout: str | None = None) -> tuple[str, ...]:
        """Return the tensors of a version offered here (layout None: in every layout) whose bytes are not those that
        were published; empty: all are right, or nothing of it is offered, or it was published with verify=False.

        It reads all of them, at the speed of memory. A damaged shard is no longer offered."""
        arguments.check_offered(version, layout)
        self._check_open()
        return self._serving.recheck(version, layout)

    def replicate(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int | str = types.LATEST,
        layout: str = types.CHECKPOINT,
        *,
        timeout_s: float | None = None,
        serve: bool = True,
        parts: Mapping[str, Part] | None = None,
        repair: bool = False,
    ) -> ReplicateReport:
        """Read a version into these tensors, in place, from the best holders, and become a source of it.

        tensors: name -> dense tensor, all on the CPU or all on one device, of the dtype and shape that were published
        (or of a part's). version: its number, or "latest", which is never older than what was read before. The
        checkpoint layout may be read in part (the names given); any other layout must match shard for shard, tensor
        for tensor. serve: offer what was read to others, until unpublish. parts: tensors that are only a part of what
        is published, and its position there (in elements), for example a rank's rows; what was published in parts is
        assembled. Only the segments that are needed are read.

        An error after the first byte leaves the tensors mixed: do not use them before another replicate() succeeds (or
        read into a `fetch`ed slab instead). repair: they are mixed, or damaged: segments that have the right digest are
        kept, which takes one pass over all bytes, and only the others are read, from any holder.

        Raise NotPublished, VersionGone, DeadlineExceeded, HubUnreachable, CorruptBytes when no source is left that has
        sent the published bytes, or UsageError naming the tensor that does not fit, or two that share memory here (tied
        weights) and were published with different bytes. Further names of the same memory take host memory while they
        are read. Memory that another call of this process reads into, or that is published, is a UsageError."""
        allowed = Allowed.begin(timeout_s, tensors)
        arguments.check_flags(serve=serve, repair=repair)
        with allowed.naming(version):
            live = LiveMemory(tensors, parts, repairs=repair, deadline=allowed.deadline)
            destinations = Destinations(self._serving, allowed.deadline, serve=serve, into=live)
            report = self._transfer(destinations, version, (layout,), allowed, claim=False).report
        if run_log.takes("fetch"):
            run_log.record_fetch(report, self._hub, worker=self._worker, seconds=time.monotonic() - allowed.began)
        return report

    def fetch(
        self,
        version: int | str = types.LATEST,
        layouts: Sequence[str] = (types.CHECKPOINT,),
        *,
        timeout_s: float | None = None,
        converts: bool = True,
        serve: bool = False,
        into: Mapping[str, torch.Tensor] | None = None,
        repair: bool = False,
        wanted: Iterable[TensorSpec] | None = None,
        borrow: bool = False,
        grows: bool = False,
    ) -> Fetched:
        """Read a version into host memory of its own, in the first of `layouts` (by preference) that is available.

        Return one slab for each source shard: `Fetched.tensors()` are views of them, on the CPU, with the published
        names, dtypes and shapes. `Fetched.release()` returns the memory; else the next fetch takes new memory.
        converts: when no worker has layouts[0], one reader is chosen to read layouts[-1] and is expected to publish
        layouts[0] of that version; the others wait for it. Fetched.converts is set if this worker was chosen.
        serve: offer the bytes to others as they arrive. Errors as in `replicate`; none leaves anything behind. grows:
        timeout_s is for finding the version; reading it takes what its size adds, and as long as segments arrive.
        into, repair: tensors for layouts[0], which is read in place as by `replicate`; Fetched has no slabs then.
        wanted: of a checkpoint only these tensors or parts of them, in one slab, not offered; UsageError: it has none.
        borrow: where another rollout of this host has the whole shard in memory that can be shared, use that, and take
        none. These tensors must not be written; a forked child does not have them. They are offered until the
        next such fetch begins; until then, and until they are released, the lender uses new memory for what it reads.
        """
        allowed = Allowed.begin(timeout_s, into, grows=grows)
        arguments.check_layouts(layouts, converts=converts, serve=serve, repair=repair, borrow=borrow, grows=grows)
        with allowed.naming(version):
            only = None if wanted is None else arguments.wanted_table(wanted, allowed.deadline)
            own = None if into is None else LiveMemory(into, repairs=repair, deadline=allowed.deadline)
            destinations = Destinations(
                self._serving, allowed.deadline, serve=serve, into=own, in_place=layouts[0], wanted=only, borrows=borrow
            )
            claim = converts and len(layouts) > 1
            outcome = self._transfer(destinations, version, tuple(layouts), allowed, claim=claim)
        if outcome.claimed is not None and outcome.report.layout == layouts[0]:
            self.abandon(outcome.report.version, layouts[0])  # a conversion that is not needed after all
        return Fetched.of(outcome, destinations.allocated, layouts[0], only, self._serving.releaser)

    def abandon(self, version: int, layout: str, *, unless_awaited: bool = False) -> bool:
        """Abandon a conversion that `fetch` assigned to this worker; another is chosen. Does not wait for the hub.
        unless_awaited: keep it, and return False, if other replicas read that layout, as far as the hub knew."""
        arguments.check_flags(unless_awaited=unless_awaited)
        key = self._key(version, layout)
        check_not_forked(self._pid, "client")
        if not (is_kept := unless_awaited and self._hub.is_awaited(key)):
            self._hub.ask(lambda number: messages.Abandon(number, key), Deadline.after(BACKGROUND_TIMEOUT_S))
        return not is_kept

    def hand_over(self, timeout_s: float = 25.0) -> bool:
        """Prepare to leave: unpublish all that this worker serves, newest first, and wait until another worker has what
        only it has. Return whether nothing was left in time. Raise UsageError for a timeout that is no number, and in
        a forked child; no other error. In a signal's handler: `threading.Thread(target=client.hand_over).start()`."""
        timeout_s = bounded(timeout_s)
        check_not_forked(self._pid, "client")
        self._hub.leave()
        return hand_over(self, timeout_s)

    def allocate(self, specs: Iterable[TensorSpec], *, deadline: float = NEVER) -> Slab:
        """Return host memory for these tensors, shareable with readers of this host; reused from old versions.

        Write all of them (`Slab.write`), then `publish` the slab. Raise UsageError for a name that comes twice, and
        DeadlineExceeded at the deadline, a `Deadline`."""
        self._check_open()
        slab = self._serving.take(arguments.checked_specs(specs, deadline), deadline)
        calls.undone_by(lambda: self._serving.recycle(slab))
        return slab

    def reserve(self, specs: Iterable[TensorSpec], count: int) -> None:
        """Allocate memory for so many calls of `allocate` for these tensors; its pages are made in the background."""
        self._check_open()
        self._serving.pool.reserve(arguments.checked_specs(specs, NEVER), arguments.check_count(count))

    def serving(self) -> list[types.ShardKey]:
        """Return the shards that this worker offers now, sorted."""
        check_not_forked(self._pid, "client")
        return self._serving.keys()

    def find(self, key: types.ShardKey) -> Offer | None:
        """Return the offer that serves this shard now, with its slab and readers; None: it is not offered."""
        check_not_forked(self._pid, "client")
        return self._serving.find(arguments.check_key(key))

    def close(self) -> None:
        """Leave and disconnect the readers, which go elsewhere. Closing twice is fine, and waits for the first, which
        may have been interrupted; in a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            self._left.wait(CLOSE_S)
            return
        try:
            self._copies.close()
            self._serving.close()
            self._hub.close()
            self._close_local()
        finally:
            self._left.set()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---

    def _record_publish(self, report: PublishReport, seconds: float) -> None:
        origin = self._hub.origin(report.version)
        if types.COMPILED not in origin:
            run_log.record_publish(report, origin, self._worker, seconds, shard=self.shard)

    def _key(self, version: int, layout: str) -> types.ShardKey:
        number = types.check_version(version)
        return types.ShardKey(number, types.check_name("layout", layout), self.shard, self.shard_count)

    def _hello(self, run: str, model: str, told: advertised.Advertised) -> messages.Hello:
        """Start to serve; return the Hello with this worker's identity and endpoints."""
        endpoints = {name: transport.serve(self._serving) for name, transport in self._transports.items()}
        if self._gate is not None:
            self._gate.serves_at(endpoints)
        return messages.Hello(
            run=run,
            model=model,
            replica=self.replica,
            shard=self.shard,
            shard_count=self.shard_count,
            location=self._location,
            endpoints=endpoints,
            hosts=tuple(told.host.split(",")[1:]),
            process=identity(),
            job=self._job,
            preemptible=self._preemptible,
            tls_only=tls.is_required_of(self._location.data_center),
        )

    def _link(self, address: str, identity: messages.Hello, deadline: Deadline, keys: Keys | None) -> HubLink:
        return HubLink(
            address,
            identity,
            connect_timeout_s=deadline.remaining(),
            on_source_gone=self._source_gone,
            on_may_release=lambda effect: self._serving.may_release(effect.keys),
            on_directive=self._directed,
            on_doubted=self._serving.doubt,
            copies=self._copies,
            keys=keys,
            gate=self._gate,
        )

    def _copy(self, version: int) -> None:
        """Read a version to hold it for others, see requested_copies.py."""
        allowed = Allowed.begin(READ_TIMEOUT_S)
        into = Destinations(self._serving, allowed.deadline, serve=True, for_others=True)
        self._transfer(into, version, (types.CHECKPOINT,), allowed, claim=False)
        self._serving.releaser(into.allocated.values())()  # what was here before is not offered a second time

    def _machine_for(
        self, destinations: Destinations, version: int | str, layouts: tuple[str, ...], allowed: Allowed, *, claim: bool
    ) -> replication.Replication:
        number = 0 if version == types.LATEST else types.check_version(version)
        wanted = messages.Acquire(
            request_id=0,
            version=number,
            at_least=0 if number else self._seen,
            layouts=tuple(types.check_name("layout", layout) for layout in layouts),
            timeout_s=allowed.begins_with - allowed.began,
            claim=claim,
            serve=destinations.serve,
            for_others=destinations.for_others,
            in_part=destinations.in_part,
            grows=allowed.grows,
        )
        return replication.Replication(
            wanted,
            deadline=allowed.begins_with,
            timeout_s=wanted.timeout_s,
            verify=self._verify,
            algorithm=self.digest if self.digest == digests.BLAKE3 else None,
            borrows=destinations.borrows,
            location=self._location,
            limits=self._limits,
        )

    def _transfer(
        self, destinations: Destinations, version: int | str, layouts: tuple[str, ...], allowed: Allowed, *, claim: bool
    ) -> Outcome:
        """Read into these destinations; after an error release what they had."""
        self._check_open()
        machine = self._machine_for(destinations, version, layouts, allowed, claim=claim)
        transfer = Transfer(machine, self._hub, self._transports, destinations, self._hub.unreached, self._worker)
        calls.when_interrupted(lambda: transfer.stop(calls.Interrupted()))
        with self._lock:
            self._transfers.add(transfer)
        transfer.direct(self._hub.directive)
        try:
            destinations.begin(lambda: machine.deadline)
            read = (outcome := transfer.run()).report
            destinations.complete(read.version, read.layout)
            if self._hub.directive.is_over(read.version):  # withdrawn or superseded just now
                self._serving.supersede(self._hub.directive.attempts)
            calls.undone_by(destinations.take_back)
            calls.undone_by(lambda: self._unclaim(transfer))
        except BaseException:
            destinations.fail()
            self._unclaim(transfer)
            raise
        finally:
            destinations.end()
            with self._lock:
                self._transfers.discard(transfer)
        with self._lock:
            self._seen = self._seen if destinations.for_others else max(self._seen, read.version)
        for loss in read.losses:
            log.warning("%s: version %d: lost %s", self._worker, read.version, loss)
        return outcome

    def _unclaim(self, transfer: Transfer) -> None:
        if transfer.claimed is not None:
            with suppress(TensorHubError):
                self.abandon(transfer.claimed.version, transfer.claimed.layout)

    def _directed(self, directive: Directive) -> None:
        with self._lock:
            transfers = list(self._transfers)
            self._seen = 0 if directive.is_over(self._seen) else self._seen
        for transfer in transfers:
            transfer.direct(directive)
        if directive.attempts:
            self._serving.supersede(directive.attempts)

    def _source_gone(self, gone: bytes) -> None:
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.source_gone(gone)

    def _close_local(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._copies.join()
        self._serving.free()
