"""One worker's share of every update: fetch, agree, install, serve on. Knows the model, not vLLM's worker.

States, as `poll` tells them
    idle       nothing under way
    fetching   a version is on its way into host memory (or, for a direct install, awaited)
    ready      it is here and verified, and nobody reads the live weights any more: install or discard it
    failed     the last fetch ended in an error; nothing has changed, fetch again. Unless its kind is VersionRefused:
               these are not the tensors of this model (see contract.py), and never will be
    broken     the weights are mixed or lost; fetch and install again, until then nothing may be computed with them
A broken worker can fetch: `broken` keeps the reason until an install succeeds.

One thread does all background work of a worker in order: the fetch of a version, and after its install what serving
needs. So the next fetch begins when the last version is served, and memory for two versions is always enough.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgspec
import torch

from tensorhub_plugins.core import run_log as events
from tensorhub_plugins.core.client.client import Client, Fetched, ReplicateReport
from tensorhub_plugins.core.errors import DeadlineExceeded, NotPublished, TensorHubError, UsageError, VersionRefused
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    Location,
    ShardKey,
)
from tensorhub_plugins.vllm.worker import weights
from tensorhub_plugins.vllm.worker.contract import Contract
from tensorhub_plugins.vllm.worker.conversion import Conversion

logger = logging.getLogger("vllm.tensorhub")  # vLLM's logging configuration only knows names below "vllm"

VOTE_SIZE_BYTES = 32  # what workers of one engine exchange: a fingerprint, or a version and a verdict

Gather = Callable[[bytes], list[bytes]]  # one VOTE_SIZE_BYTES message per worker of the engine, in shard order


class BrokenWeights(TensorHubError):
    """An install failed half way and these weights are mixed: install a version again before generating."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tensorhub_connect` takes, as a dict. Every worker of an engine gets the same."""

    hub: str  # "tcp://host:port"
    run: str
    model: str
    replica: str  # one name per engine; live engines of a run must have different ones
    location: Location | None = None  # None: this host, see core.client.here
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    advertise_host: str | None = None
    install: Literal["staged", "direct"] = "staged"
    serve_from: Literal["host", "live"] | None = None  # None: "host" if staged, "live" if direct
    verify: bool = False  # hash the live weights after every install, in the background; always on with events
    connect_timeout_s: float = 10.0
    drain_timeout_s: float = 30.0  # for readers of the live weights before an install; then they are cut off
    serve_timeout_s: float = 120.0  # for what serving takes after an install: publishing, dropping the last version

    @property
    def source(self) -> Literal["host", "live"]:
        return self.serve_from or ("host" if self.install == "staged" else "live")

    @staticmethod
    def parse(config: dict[str, Any]) -> WorkerConfig:
        """Raise UsageError saying which key is wrong."""
        try:
            parsed = msgspec.convert(config, WorkerConfig)
        except msgspec.ValidationError as error:
            known = ", ".join(WorkerConfig.__struct_fields__)
            raise UsageError(f"tensorhub's vLLM configuration: {error}; known keys: {known}") from error
        if parsed.install == "direct" and parsed.serve_from == "host":
            raise UsageError('install="direct" keeps nothing in host memory: use serve_from="live"')
        return parsed


@dataclass(frozen=True)
class Place:
    """Which part of which replica this worker is, and the runtime layout of that replica."""

    shard: int
    shard_count: int
    layout: str


@dataclass(frozen=True)
class _Staged:
    """What the next install will install. fetched None: nothing is here, it is read in place during the pause."""

    version: int
    fetched: Fetched | None
    report: ReplicateReport | None = None  # of the read that brought the bytes
    converted_by: str | None = None  # once installed, if it was the checkpoint


class Updater:
    def __init__(
        self, config: WorkerConfig, model: torch.nn.Module, vllm_config: Any, place: Place, gather: Gather
    ) -> None:
        self.config, self.place = config, place
        self._model, self._vllm_config, self.gather = model, vllm_config, gather
        self._name = f"{config.replica}/{place.shard}"
        self._contract = Contract(model, vllm_config)
        self._conversion = Conversion(model, vllm_config)
        self._lock = threading.Lock()  # guards the fields below; held for moments only
        self._staged: _Staged | None = None
        self._fetching: int | None = None
        self._version = 0  # installed; 0: what the engine was started with
        self._served: int | None = None  # the version this worker offers in its runtime layout
        self._error: TensorHubError | None = None
        self._broken: str | None = None
        self._report: dict[str, Any] | None = None
        self._fetched: Future[None] | None = None
        self._serving: Future[None] | None = None
        self._asleep = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorhub")
        self._client = Client(
            config.hub,
            run=config.run,
            model=config.model,
            replica=config.replica,
            shard=place.shard,
            shard_count=place.shard_count,
            location=config.location,
            transports=config.transports,
            advertise_host=config.advertise_host,
            connect_timeout_s=config.connect_timeout_s,
        )

    # --- what the engine's owner asks for ---

    def poll(self) -> dict[str, Any]:
        """State, versions, the last error and the last fetch's report; plain types, returns at once."""
        with self._lock:
            if self._fetching is not None:
                state = "fetching"
            elif self._staged is not None:
                state = "ready"
            elif self._broken is not None:
                state = "broken"
            else:
                state = "idle" if self._error is None else "failed"
            return {
                "state": state,
                "version": self._version,
                "next_version": self._fetching or (self._staged.version if self._staged else None),
                "served_version": self._served,
                "serving": self._serving is not None and not self._serving.done(),
                "layout": self.place.layout,
                "broken": self._broken,
                "error": None if self._error is None else str(self._error),
                "error_kind": None if self._error is None else type(self._error).__name__,
                "report": self._report,
            }

    def begin_fetch(self, version: int, timeout_s: float, *, in_place: bool | None = None) -> None:
        """Start to get this version, in the background; what was staged and not installed is dropped.

        in_place: read it into the live weights during the install, if somebody has this layout (None: as configured).
        """
        if in_place is None:
            in_place = self.config.install == "direct"
        deadline = time.monotonic() + timeout_s  # before anything changes: what is no number is refused here
        with self._lock:
            if self._asleep:
                raise UsageError("the engine sleeps and its weights are not there: wake it up first", version=version)
            if self._fetching is not None:
                raise UsageError(f"version {self._fetching} is still being fetched: poll until it is ready")
            if version == self._version and self._broken is None:
                raise UsageError(f"version {version} is installed already")
            dropped, self._staged = self._staged, None
            self._fetching, self._error, self._report = version, None, None
        if dropped is not None:
            self._thread.submit(self._drop, dropped)
        self._fetched = self._thread.submit(self._fetch, version, deadline, in_place)

    def update(self, version: int, timeout_s: float, *, in_place: bool | None = None) -> dict[str, Any]:
        """Fetch and install at once, while the engine stands still. Never raises; returns what `install` does."""
        deadline = time.monotonic() + timeout_s
        try:
            self.begin_fetch(version, timeout_s, in_place=in_place)
            assert self._fetched is not None
            # It ends at its own deadline, and after its readers have been drained.
            self._fetched.result(timeout=timeout_s + self.config.drain_timeout_s)
        except (TensorHubError, FutureTimeout) as error:
            logger.warning("%s: version %d: %s", self._name, version, error)
        # Whatever happened here: the other workers of this engine wait for this one's vote.
        return self.install(version, _left(deadline))

    def resolve(self, timeout_s: float, refused: Sequence[int] = ()) -> int:
        """The version to run, none of `refused`, the same for every worker; NotPublished if there is none in time."""
        try:
            newest, error = self._client.target(refused=refused, timeout_s=timeout_s), None
        except TensorHubError as failure:
            newest, error = 0, failure
        version = agreed(self.gather, newest)
        if not version:
            raise error or NotPublished("the engine's first worker found no version", timeout_s=timeout_s)
        return version

    def adopt(self, version: int) -> None:
        """The live weights came from elsewhere and are this version: serve them as it."""
        with self._lock:
            self._version, self._broken = version, None
            self._serving = self._thread.submit(self._serve, _Staged(version, None))

    def fall_asleep(self) -> None:
        """The live weights are about to leave their memory; nobody may read them there."""
        self.before_foreign_change("sleep")
        with self._lock:
            self._asleep = True

    @property
    def is_asleep(self) -> bool:
        """The weights are not there, and nobody expects them to be."""
        return self._asleep

    def wake_up(self) -> None:
        """They are back where they were: serve them again. Unless they are no version of the store any more."""
        with self._lock:
            was_asleep, self._asleep = self._asleep, False
            if was_asleep:
                self._serve_again()

    def discard(self) -> None:
        """Give up what is staged, so that another worker may convert it and its memory is free."""
        with self._lock:
            dropped, self._staged, self._error = self._staged, None, None
            if dropped is not None:
                self._thread.submit(self._drop, dropped)
                self._serve_again()

    def prepare_install(self, timeout_s: float) -> None:
        """Before the pause, between two steps of the engine: what an install would wait for, or might refuse.

        A worker that is ready has most of it behind it already. Raise DeadlineExceeded, with nothing changed, while the
        live weights are still being copied for peers; VersionRefused for a checkpoint that does not fill this model.
        """
        deadline = time.monotonic() + timeout_s
        self._wait_until_served(deadline, timeout_s)
        with self._lock:
            staged = self._staged
        if staged is not None:
            self._rehearse(staged)
        self._withdraw_live(deadline)

    def install(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Replace the weights; the engine is paused. All workers of the engine do, or none starts.

        Never raises: "installed" says whether the model now is this version, "broken" why it must not be used.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        try:
            staged = self._ready(version, deadline, timeout_s)
            refusal: Exception | None = None
        except Exception as error:
            staged, refusal = None, error
        if not self._agree(version, refusal is None):
            reason = refusal or UsageError("another worker of this engine was not ready", version=version)
            return self._result(version, began, reason)
        assert staged is not None
        with self._lock:
            self._broken = f"version {version} is being installed"
        failure: Exception | None = None
        try:
            staged = self._change(staged, deadline)
        except Exception as error:
            logger.exception("%s: version %d: the install failed half way", self._name, version)
            failure = error
        if not self._agree(version, failure is None) and failure is None:
            failure = UsageError("another worker of this engine failed half way", version=version)
        with self._lock:
            held, self._staged = self._staged, None
            if failure is None:
                self._version, self._broken = version, None
                if staged.converted_by is not None:
                    self._contract.accept()
            else:
                self._broken = f"version {version} was not installed completely: {failure}"
        if failure is not None:
            assert held is not None
            self._thread.submit(self._drop, held)
            return self._result(version, began, failure)
        layout = self.place.layout if staged.fetched is None else staged.fetched.layout
        seconds = time.monotonic() - began
        by = staged.converted_by
        events.record("install", worker=self._name, version=version, layout=layout, seconds=seconds, by=by)
        with self._lock:
            self._serving = self._thread.submit(self._serve, staged)
        return self._result(version, began, None, layout)

    def guard(self) -> None:
        """Raise BrokenWeights if these weights must not be used."""
        broken = self._broken
        if broken is not None:
            raise BrokenWeights(f"{broken}; install a version before resuming", version=self._version or None)

    def break_weights(self, reason: str) -> None:
        """Somebody else has changed the weights: nothing may be computed with them until the next install."""
        with self._lock:
            self._broken = reason

    def forget_version(self) -> None:
        """Somebody else has replaced the weights, whole: they are no version of the store any more."""
        with self._lock:
            self._version = 0

    def replaced(self) -> None:
        """All weights have come from elsewhere, whole, after an install that failed; they are no version."""
        with self._lock:
            self._version, self._broken, self._error, self._report = 0, None, None, None

    def before_foreign_change(self, what: str) -> None:
        """Somebody else is about to change the weights or move them away: nobody may read them any more."""
        timeout_s = self.config.serve_timeout_s
        deadline = time.monotonic() + timeout_s
        self._wait_until_served(deadline, timeout_s)
        if self._served is not None and self.config.source == "live":
            logger.info("%s: version %d is withdrawn before %s", self._name, self._served, what)
        self._withdraw_live(deadline)

    def digests(self) -> dict[str, Any]:
        """Digests of every live tensor, by runtime name and by checkpoint name (None where that is not possible)."""
        live = weights.tensors(self._model)
        view = weights.checkpoint_view(self._model, self._vllm_config)
        return {
            "layout": self.place.layout,
            "version": self._version,
            "runtime": {name: weights.digest(tensor) for name, tensor in live.items()},
            "checkpoint": None if view is None else {name: weights.digest(tensor) for name, tensor in view.items()},
        }

    def close(self) -> None:
        """Leave the store; twice is fine."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # --- fetching, in the background thread ---

    def _fetch(self, version: int, deadline: float, in_place: bool) -> None:
        staged: _Staged | None = None
        error: TensorHubError | None = None
        try:
            staged = self._acquire(version, deadline, in_place)
            # Here rather than in the install: it may take as long as the slowest reader, and the engine generates.
            self._withdraw_live(time.monotonic() + self.config.drain_timeout_s)
        except TensorHubError as failure:
            error = failure
        except Exception as failure:
            # Whatever it is, the weights are untouched and the owner must hear of it.
            logger.exception("%s: version %d: fetch failed", self._name, version)
            error = TensorHubError(f"{type(failure).__name__}: {failure}", version=version)
        if error is not None:
            if staged is not None:
                self._drop(staged)
                staged = None
            logger.warning("%s: version %d was not fetched: %s", self._name, version, error)
            events.record("update_failed", worker=self._name, version=version, error=str(error))
        with self._lock:
            self._fetching, self._staged, self._error = None, staged, error

    def _acquire(self, version: int, deadline: float, in_place: bool) -> _Staged:
        if in_place:
            self._client.wait(version, timeout_s=_left(deadline))
            held = {info.version: info.layouts for info in self._client.versions()}
            if held.get(version, {}).get(self.place.layout) and not self._conversion.hidden:
                return _Staged(version, None)
            # Nobody has our layout yet. Whether to convert or to wait for a peer that does, only the hub can say,
            # and whoever converts needs the checkpoint in host memory anyway.
        staged = self._get(version, self._layouts, deadline, serve=self.config.source == "host")
        assert staged.fetched is not None
        try:
            if staged.fetched.layout == self.place.layout:
                weights.check_same_tensors(weights.tensors(self._model), staged.fetched.tensors())
            else:
                self._contract.check(staged.fetched.tensors())
        except VersionRefused as error:
            self._drop(staged)
            raise VersionRefused(error.message, version=version) from error
        except UsageError:
            self._drop(staged)
            raise
        return staged

    @property
    def _layouts(self) -> tuple[str, ...]:
        """What may be fetched. What kernels derive and keep for themselves no raw copy would bring along."""
        return (CHECKPOINT,) if self._conversion.hidden else (self.place.layout, CHECKPOINT)

    def _get(
        self,
        version: int,
        layouts: tuple[str, ...],
        deadline: float,
        *,
        serve: bool,
        into: dict[str, torch.Tensor] | None = None,
    ) -> _Staged:
        began = time.monotonic()
        fetched = self._client.fetch(version, layouts, timeout_s=_left(deadline), serve=serve, into=into)
        return self._note(
            _Staged(version, fetched if fetched.slabs else None, fetched.report), time.monotonic() - began
        )

    def _drop(self, staged: _Staged) -> None:
        """Let go of bytes that will not be installed, or are not needed any more."""
        fetched = staged.fetched
        try:
            if fetched is None:
                if staged.report is not None:  # read in place, and perhaps offered from there
                    self._client.unpublish(staged.version, self.place.layout)
                return
            if fetched.converts is not None:
                self._client.abandon(fetched.version, fetched.converts)
            if self.config.source == "host" or fetched.layout != self.place.layout:
                self._client.unpublish(fetched.version, fetched.layout)
            fetched.release()
        except TensorHubError as error:
            logger.warning("%s: version %d was not let go of: %s", self._name, staged.version, error)

    # --- installing, in vLLM's own thread ---

    def _ready(self, version: int, deadline: float, timeout_s: float) -> _Staged:
        """What is to be installed, with nobody reading what will change; raises without having changed anything."""
        self._wait_until_served(deadline, timeout_s)
        with self._lock:
            staged, error, asleep = self._staged, self._error, self._asleep
        if asleep:
            raise UsageError("the engine sleeps and its weights are not there: wake it up first", version=version)
        if staged is None and error is not None:
            raise error
        if staged is None or staged.version != version:
            has = "nothing" if staged is None else f"version {staged.version}"
            raise UsageError(f"{has} is ready: fetch version {version} first", version=version)
        self._rehearse(staged)
        self._withdraw_live(deadline)
        return staged

    def _rehearse(self, staged: _Staged) -> None:
        """Raise VersionRefused, and let go of it, unless these bytes fill this model. No other bytes change."""
        if staged.fetched is None or staged.fetched.layout == self.place.layout:
            return  # a peer's tensors have been compared, and its weights were whole
        try:
            self._contract.rehearse(staged.fetched.tensors())
        except VersionRefused as error:
            refused = VersionRefused(error.message, version=staged.version)
            with self._lock:
                self._staged, self._error = None, refused
                self._thread.submit(self._drop, staged)
                self._serve_again()
            raise refused from error

    def _change(self, staged: _Staged, deadline: float) -> _Staged:
        """Write the model, and return what it was written with; `_staged` is what must be let go of on failure."""
        if staged.fetched is None:
            staged = self._read_in_place(staged.version, deadline)
            if staged.fetched is None:
                weights.refresh_scalars(self._model)
                return staged
        tensors = staged.fetched.tensors()
        if staged.fetched.layout == self.place.layout:
            weights.copy_tensors(weights.tensors(self._model), tensors)
            weights.refresh_scalars(self._model)
        else:
            self._contract.rehearse(tensors)  # again only for what has been read in place of something else
            staged = replace(staged, converted_by=self._conversion.install(tensors))
        return staged

    def _read_in_place(self, version: int, deadline: float) -> _Staged:
        """Into the live weights, to be served there; or the checkpoint, when the peers with our layout are gone."""
        live, in_host_memory = weights.tensors(self._model), self.config.source == "host"
        try:
            # Half of the time: it may be over before the hub has noticed that a peer is dead.
            first = time.monotonic() + _left(deadline) / 2
            layouts = (self.place.layout, CHECKPOINT)
            staged = self._get(version, layouts, first, serve=not in_host_memory, into=live)
        except TensorHubError as error:
            logger.warning("%s: version %d: not read in place: %s", self._name, version, error)
            staged = self._get(version, (CHECKPOINT,), deadline, serve=in_host_memory)
        with self._lock:
            self._staged = staged
        return staged

    def _note(self, staged: _Staged, seconds: float) -> _Staged:
        """Keep the report for `poll` and tell the event log."""
        assert staged.report is not None
        report = _plain(staged.report)
        with self._lock:
            self._report = report
        events.record(
            "fetch",
            worker=self._name,
            version=report["version"],
            layout=report["layout"],
            bytes=report["size_bytes"],
            seconds=seconds,
            sources=report["sources"],
            transports=report["transports"],
        )
        return staged

    def _agree(self, version: int, willing: bool) -> bool:
        """Whether every worker of the engine is willing, for the same version."""
        vote = version.to_bytes(8, "big") + bytes([willing])
        votes = self.gather(vote.ljust(VOTE_SIZE_BYTES, b"\0"))
        return willing and all(other == votes[0] for other in votes)

    def _result(self, version: int, began: float, error: Exception | None, layout: str | None = None) -> dict[str, Any]:
        if error is not None:
            events.record("update_failed", worker=self._name, version=version, error=str(error))
        with self._lock:
            return {
                "installed": error is None,
                "version": self._version,
                "layout": layout,
                "seconds": time.monotonic() - began,
                "report": self._report,
                "error": None if error is None else f"{type(error).__name__}: {error}",
                "broken": self._broken,
            }

    # --- serving, in the background thread ---

    def _serve_again(self) -> None:
        """The live weights were withdrawn for a change that did not come. With the lock held."""
        if self._broken is None and self._version and self.config.source == "live" and not self._asleep:
            self._serving = self._thread.submit(self._serve_live)

    def _serve_live(self) -> None:
        with self._lock:
            version = self._version if self._served is None and self._staged is None else 0
        if version:
            self._serve(_Staged(version, None))

    def _serve(self, staged: _Staged) -> None:
        """After an install: offer the new version in our layout, then stop offering the one before."""
        try:
            self._offer(staged)
        except Exception as error:  # the weights are right; only peers cannot have them from here
            logger.warning("%s: version %d is not served: %s", self._name, staged.version, error)
        try:
            if self.config.verify or events.enabled():
                self._verify(staged)
            self._drop_source(staged)
        except Exception:
            logger.exception("%s: after the install of version %d", self._name, staged.version)

    def _offer(self, staged: _Staged) -> None:
        version, layout, timeout_s = staged.version, self.place.layout, self.config.serve_timeout_s
        if self._conversion.hidden:
            return
        in_host_memory = self.config.source == "host"
        live = weights.tensors(self._model)
        # Staged bytes are offered since they arrived, live ones since they were read in place, and after a sleep a copy
        # may be, because it was the last.
        key = ShardKey(version, layout, self.place.shard, self.place.shard_count)
        if key not in self._client.serving():
            self._client.publish(version, live, layout, copy=in_host_memory, timeout_s=timeout_s)
        size_bytes = sum(tensor.nbytes for tensor in live.values())
        events.record("serve", worker=self._name, version=version, layout=layout, bytes=size_bytes)
        with self._lock:
            previous, self._served = self._served, version
        if previous not in (None, version):  # it returned to what it has never ceased to serve
            self._client.unpublish(previous, layout, timeout_s=timeout_s)

    def _drop_source(self, staged: _Staged) -> None:
        """Let go of what was fetched, unless it is what we serve."""
        fetched, layout = staged.fetched, self.place.layout
        if fetched is None:
            return
        if fetched.converts is not None and self._served != staged.version:
            self._client.abandon(staged.version, layout)
        if fetched.layout != layout:
            self._client.unpublish(staged.version, fetched.layout, timeout_s=self.config.serve_timeout_s)
        if fetched.layout != layout or self.config.source == "live":
            fetched.release()

    def _verify(self, staged: _Staged) -> None:
        """Hash what the model really holds. Nothing writes it now: the next install waits for this thread."""
        version, layout = staged.version, self.place.layout
        root = Slab.adopt(weights.tensors(self._model)).manifest().root().hex()
        events.record("digests", worker=self._name, version=version, layout=layout, digests={"root": root})
        if staged.report is None:  # adopted: there is nothing to compare with
            return
        if staged.report.layout == layout:
            if staged.report.roots != {self.place.shard: root}:
                self.break_weights(f"the live weights are not those of version {version} any more")
                logger.error("%s: %s", self._name, self._broken)
        elif staged.fetched is not None and events.enabled():
            roots = {shard: slab.manifest().root().hex() for shard, slab in staged.fetched.slabs.items()}
            named = {"root" if len(roots) == 1 else f"root.{shard}": value for shard, value in roots.items()}
            received = staged.report.layout
            events.record("digests", worker=self._name, version=version, layout=received, digests=named)

    def _wait_until_served(self, deadline: float, timeout_s: float) -> None:
        serving = self._serving
        if serving is not None:
            try:
                serving.result(timeout=_left(deadline))
            except FutureTimeout:
                raise DeadlineExceeded(
                    "the weights are still being copied for peers: raise the deadline",
                    version=self._version,
                    phase="prepare_install",
                    timeout_s=timeout_s,
                ) from None

    def _withdraw_live(self, deadline: float) -> None:
        """Nobody reads the live weights afterwards."""
        with self._lock:
            served = self._served if self.config.source == "live" else None
        if served is not None:
            self._client.unpublish(served, self.place.layout, timeout_s=_left(deadline))
            with self._lock:
                self._served = None


def _plain(report: Any) -> dict[str, Any]:
    """A report as types that JSON knows."""
    fields = asdict(report)
    fields["losses"] = list(fields["losses"])
    fields["roots"] = {str(shard): root for shard, root in fields["roots"].items()}
    return fields


def anyone(gather: Gather, here: bool) -> bool:
    """Whether it is so in any worker of the engine."""
    return any(vote[0] for vote in gather(bytes([here]).ljust(VOTE_SIZE_BYTES, b"\0")))


def agreed(gather: Gather, number: int) -> int:
    """What the engine's first worker says, for all of them."""
    votes = gather(number.to_bytes(8, "big").ljust(VOTE_SIZE_BYTES, b"\0"))
    return int.from_bytes(votes[0][:8], "big")


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
