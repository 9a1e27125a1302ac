"""One worker's share of every update: fetch, vote, install, serve. Knows the model, not vLLM's worker.

update_state.py decides what may happen when; this is its shell. One thread does all background work of a worker in
order: the fetch of a version, and after its install the work of serving it. So the next fetch begins when the last
version is served, and memory for two versions is always enough.

A fetch that fails with VersionRefused got tensors that are not this model's and never will be (checkpoint_contract.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

import torch
from typing_extensions import assert_never

from tensorhub_plugins.core import (
    CHECKPOINT,
    Deadline,
    DeadlineExceeded,
    Fetched,
    NotPublished,
    ShardKey,
    TensorHubError,
    UsageError,
    VersionRefused,
    copy_all,
    forget_live_memory,
    run_log,
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.worker import digests, intake, memory_need, plan, update_state, weights
from tensorhub_plugins.vllm.worker.addresses import Addresses
from tensorhub_plugins.vllm.worker.conversion import NotEnough, worth_it
from tensorhub_plugins.vllm.worker.loader_calls import Asked
from tensorhub_plugins.vllm.worker.preserved import Buffers, ExternalCall
from tensorhub_plugins.vllm.worker.update_state import BrokenWeights, Event, Staged, UpdateState
from tensorhub_plugins.vllm.worker.votes import Gather, ShardPosition, anyone, first_says

logger = get_logger(__name__)

TIMEOUT_S = 60.0  # where none is given, for what does not depend on the size
PLAN_AHEAD_S = 10.0  # for vLLM's thread to call `poll`; after that the first version is read whole
MAKE_ROOM_S = 1.0  # for readers that were just directed to the last version
CHANGES = itertools.count(1)  # of weights, in this process
HAND_OVER_TIMEOUT_S = 5.0  # a node with a spot notice has half a minute; followers take the newest version anyway


def time_of_update(timeout_s: float | None, *, grows: bool) -> tuple[float, bool]:
    """Return the seconds of an update, and whether it may take longer as long as it advances; None: it may."""
    return (TIMEOUT_S, True) if timeout_s is None else (timeout_s, grows)


class Updater:
    def __init__(
        self, config: WorkerConfig, model: torch.nn.Module, vllm_config: Any, position: ShardPosition, gather: Gather
    ) -> None:
        self.config, self.position = config, position
        self.model, self._vllm_config, self.gather = model, vllm_config, gather
        self._name = f"{config.replica}/{position.shard}"
        self._lock = threading.Lock()  # guards the state; held briefly
        self._state = UpdateState(serves_live=config.source == "live")
        self._fetching: Future[None] | None = None  # the last fetch
        self._serving: Future[None] | None = None  # the last offer to peers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorhub")
        self._is_leaving = self._grows = False
        self.changed = self._prepared = 0  # another number after each change of the weights; the version
        self.external: ExternalCall | None = None
        self.buffers: Buffers = ()  # that others may have changed since the last install, and what was in them
        self._asked = Asked()
        self._known: tuple[Fetched, plan.Given] | None = None  # the last that `_given` returned, until it is released
        self._plans_ahead = position.shard_count > 1  # else a worker needs everything
        self._client = config.connect(shard=position.shard, shard_count=position.shard_count)
        try:
            self._know(model, vllm_config)
        except UsageError:
            self._client.close()
            raise

    def _know(self, model: torch.nn.Module, vllm_config: Any) -> None:
        eager = getattr(getattr(vllm_config, "model_config", None), "enforce_eager", False)
        self.addresses = Addresses(model, eager=eager)
        self._intake = intake.of(model, vllm_config, self.gather)
        self._contract, self._conversion = self._intake.contract, self._intake.conversion
        self._steps, self._quantizer = self._intake.steps, self._intake.quantizer
        memory_need.say(self._client, self.config.copies, model, vllm_config)

    # --- the state, and what it asks for ---

    def _handle(self, event: Event) -> None:
        """Change the state and carry out the effects, in order; UsageError if the event is impossible now."""
        withdrawn: list[int] = []
        with self._lock:
            effects = self._state.handle(event)
            if isinstance(event, (update_state.Installed, update_state.Unversioned)):
                self.changed = next(CHANGES)
            for effect in effects:
                match effect:
                    case update_state.Fetch():
                        self._fetching = self._thread.submit(self._fetch, effect)
                    case update_state.Drop(staged):
                        self._thread.submit(self._drop, staged)
                    case update_state.Serve(staged):
                        self._serving = self._thread.submit(self._serve, staged)
                    case update_state.ServeAgain():
                        self._serving = self._thread.submit(self._serve_again)
                    case update_state.Unpublish(version):
                        withdrawn.append(version)  # this waits, so not with the lock held
                    case _:
                        assert_never(effect)
        for version in withdrawn:
            self._client.unpublish(version, self.position.layout, timeout_s=self.config.serve_timeout_s)

    # --- what the engine's owner asks for ---

    def poll(self) -> dict[str, Any]:
        """Return state, versions, the last error and the last fetch's report (see UpdateState.status), at once; only
        the first version is planned here (see `_plan_ahead`)."""
        self._asked.answer_all()
        with self._lock:
            serving = self._serving is not None and not self._serving.done()
            return {**self._state.status(), "serving": serving, "layout": self.position.layout}

    def start_fetch(self, version: int, timeout_s: float, grows: bool = False, *, in_place: bool | None = None) -> None:
        """Fetch this version in the background; drop what was staged and not installed. grows: as of Client.fetch.

        in_place: read it into the live weights during the install, if a peer has this layout (None: as configured, or
        when they are broken: then only damaged parts are read, and the engine does not generate meanwhile)."""
        if in_place is None:
            in_place = self.config.install == "direct" or self._state.broken is not None
        self._handle(update_state.StartFetch(version, Deadline.after(timeout_s), in_place, grows))

    def update(
        self, version: int, timeout_s: float | None, *, in_place: bool | None = None, grows: bool = False
    ) -> dict[str, Any]:
        """Fetch and install at once, while the engine is paused. Never raises; returns what `install` does."""
        timeout_s, grows = time_of_update(timeout_s, grows=grows)
        deadline = Deadline.after(timeout_s)
        try:
            self.start_fetch(version, timeout_s, grows, in_place=in_place)
            assert self._fetching is not None
            # It ends at its own deadline, and after its readers have been drained.
            self._asked.see_to(self._fetching, timeout_s + self.config.drain_timeout_s, grows=grows)
        except (TensorHubError, FutureTimeout) as error:
            logger.warning("%s: version %d: %s", self._name, version, error)
        # In any case: the other workers of this engine wait for this one's vote.
        return self.install(version, timeout_s if grows else deadline.remaining())

    def resolve(self, timeout_s: float, refused: Mapping[int, str] | None = None) -> int:
        """Return the version to run, none of `refused`, the same in every worker; NotPublished if there is none."""
        try:
            newest, error = self._client.target(refused=refused or {}, timeout_s=timeout_s), None
        except TensorHubError as failure:
            newest, error = 0, failure
        version = first_says(self.gather, newest)
        if not version:
            raise error or NotPublished("the engine's first worker found no version", timeout_s=timeout_s)
        return version

    def serve_current_as(self, version: int) -> None:
        """Serve the live weights, which came from elsewhere, as this version."""
        self._handle(update_state.ServeCurrentAs(version))

    def fall_asleep(self) -> None:
        """Withdraw the live weights, which are about to leave their memory; no peer may read them there."""
        self.before_external_change("sleep")
        self._handle(update_state.FallAsleep())
        forget_live_memory()  # a registration would keep the memory, or outlive its owner

    @property
    def is_asleep(self) -> bool:
        """Return whether the weights are not in their memory, and are not expected to be."""
        return self._state.is_asleep

    def wake_up(self) -> None:
        """Serve the weights again, which are back where they were, unless they are no version of the store any more."""
        self._handle(update_state.WakeUp())

    def discard(self) -> None:
        """Drop what is staged, so that another worker may convert it and its memory is free."""
        self._handle(update_state.Discard())

    def prepare_install(self, timeout_s: float) -> None:
        """Prepare an install before the pause, between two steps: do all that it would wait for, or might refuse.

        A ready worker has done most of it already. Raise DeadlineExceeded, with nothing changed, while the live weights
        are still being copied for peers; VersionRefused for a checkpoint that does not fill this model; UsageError for
        a model whose weights have been moved."""
        self._prepare(None, Deadline.after(timeout_s), timeout_s)

    def install(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Replace the weights while the engine is paused, in all its workers or in none.

        Never raises: "installed" tells whether the model now is this version, "broken" why it must not be used."""
        began, deadline = time.monotonic(), Deadline.after(timeout_s)
        refusal: Exception | None = None
        try:
            self._prepare(version, deadline, timeout_s)
        except Exception as error:
            refusal = error
        if not self._steps.vote(version, refusal is None, self._way):
            reason = refusal or UsageError("another worker of this engine was not ready", version=version)
            return self._result(version, began, reason)
        self._handle(update_state.StartInstall(version))  # still unchanged: only this thread installs or discards
        failure: Exception | None = None
        converted_by: str | None = None
        try:
            converted_by = self._change(version, deadline)
            self.addresses.check(search=False)
        except Exception as error:
            logger.exception("%s: version %d: the install failed half way", self._name, version)
            failure = error
        if not self._steps.vote(version, failure is None) and failure is None:
            failure = UsageError("another worker of this engine failed half way", version=version)
        if failure is not None:
            self._handle(update_state.InstallFailed(str(failure)))
            return self._result(version, began, failure)
        if converted_by is not None:
            self._contract.accept()
        staged = self._state.staged
        assert staged is not None
        got = staged.fetched
        layout, unpinned = (self.position.layout, None) if got is None else (got.layout, got.unpinned)
        how = {"layout": layout, "seconds": time.monotonic() - began, "by": converted_by, "unpinned": unpinned}
        record = partial(run_log.record, "install", worker=self._name, version=version, t=time.time(), **how)
        self._thread.submit(record)  # in its order, and not in the pause
        self._handle(update_state.Installed())
        return self._result(version, began, None, layout)

    def guard(self, *, together: bool = False, stale: str = "") -> None:
        """Raise BrokenWeights if these weights must not be used; together: or those of any other worker of the engine,
        all of which ask at once. stale: why its core's caches must not be used."""
        any_broken = together and anyone(self.gather, self._state.broken is not None or bool(stale))
        self._state.guard()
        if any_broken:
            raise BrokenWeights(stale or "another worker of this engine; install a version before resuming")

    def mark_broken(self, reason: str) -> None:
        """Mark the weights as changed outside of an install: nothing may be computed with them until the next one."""
        self._handle(update_state.Broken(reason))

    def mark_unversioned(self, *, mended: bool = False) -> None:
        """Mark the weights as replaced, whole, from elsewhere: they are no version of the store any more. mended: they
        were mixed before, and are not any more."""
        self._handle(update_state.Unversioned(mended))

    def mark_unchanged(self) -> None:
        """Serve the weights again: they were to be replaced from elsewhere, and were not."""
        self._handle(update_state.Unchanged())

    def before_external_change(self, what: str) -> None:
        """Wait until no peer reads the weights: something else is about to change or move them."""
        timeout_s = self.config.serve_timeout_s
        deadline = Deadline.after(timeout_s)
        self._wait_until_served(deadline, timeout_s)
        served = self._state.to_withdraw()
        if served is not None:
            logger.info("%s: version %d is withdrawn before %s", self._name, served, what)
        self._withdraw_live(deadline)

    def digests(self) -> dict[str, Any]:
        """Return layout, version, and the digests of every live tensor by name (digests.py)."""
        if self.is_asleep:
            raise UsageError(update_state.ASLEEP)
        of_tensors = digests.of_live(self.model, self._vllm_config)
        return {"layout": self.position.layout, "version": self._state.version, **of_tensors}

    def close(self, *, hands_over: bool = False) -> None:
        """Leave the store; idempotent. hands_over: see Client.hand_over."""
        self._is_leaving = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if hands_over:
            self._client.hand_over(HAND_OVER_TIMEOUT_S)
        self._client.close()

    # --- fetching, in the background thread ---

    def _fetch(self, fetch: update_state.Fetch) -> None:
        version, staged, self._grows = fetch.version, None, fetch.grows
        try:
            staged = self._acquire(version, Deadline(fetch.deadline), fetch.in_place)
            # Here, not in the install: it may take as long as the slowest reader, and the engine generates meanwhile.
            self._withdraw_live(Deadline.after(self.config.drain_timeout_s))
        except Exception as failure:
            error = failure if isinstance(failure, TensorHubError) else None
            if error is None:  # in any case the weights are untouched and the owner must be notified
                logger.exception("%s: version %d: fetch failed", self._name, version)
                error = TensorHubError(f"{type(failure).__name__}: {failure}", version=version)
            if not self._is_leaving:  # else nothing has failed: it was cancelled
                logger.warning("%s: version %d was not fetched: %s", self._name, version, error)
                run_log.record("update_failed", worker=self._name, version=version, error=str(error))
            self._handle(update_state.FetchFailed(version, error, staged))
        else:
            self._handle(update_state.Fetched(staged))

    def _acquire(self, version: int, deadline: Deadline, in_place: bool) -> Staged:
        if in_place:
            self._client.wait(version, timeout_s=deadline.remaining())
            held = {info.version: info.layouts for info in self._client.versions()}
            if held.get(version, {}).get(self.position.layout) and not self._conversion.hidden:
                return Staged(version)
            # No peer has our layout yet. Only the hub can decide whether to convert or to wait for a peer that does,
            # and a converter needs the checkpoint in host memory anyway.
        staged = self._get_needed(version, deadline) or self._get(version, self._layouts, deadline, serve=self._relays)
        assert staged.fetched is not None
        try:
            if staged.fetched.layout == self.position.layout:
                weights.check_same_tensors(weights.tensors(self.model), staged.fetched.tensors())
            else:
                self._check(staged.fetched)
        except VersionRefused as error:
            self._drop(staged)
            raise VersionRefused(error.message, version=version) from error
        except BaseException:
            self._drop(staged)
            raise
        return staged

    def _check(self, fetched: Fetched) -> None:
        given = plan.given_by(fetched)
        if not self._quantizer.knows(given.shapes):
            return  # the loaders have to run, in vLLM's own thread
        given = self._quantizer.given(given)
        self._contract.check(given.tensors, given.shapes)

    def _given(self, fetched: Fetched) -> plan.Given:
        """Return a fetched checkpoint as this model's loaders want it, or raise VersionRefused. In vLLM's own thread,
        and first before the pause: its bytes stay what they are, so what was found then is true of them later."""
        known = self._known
        if known is None or known[0] is not fetched:
            known = self._known = fetched, self._intake.given(plan.given_by(fetched))
        return known[1]

    def _get_needed(self, version: int, deadline: Deadline) -> Staged | None:
        """Fetch only what this worker needs of a checkpoint; None: unknown, or this one is unlike the last.

        A runtime layout is always fetched whole."""
        needed = self._conversion.wanted()
        staged = None if needed is None else self._get_like_the_last(version, needed, deadline)
        return self._get_first(version, deadline) if staged is None and self._plans_ahead else staged

    def _get_like_the_last(self, version: int, needed: plan.Plan, deadline: Deadline) -> Staged | None:
        try:
            staged = self._get(
                version, self._layouts, deadline, serve=self._relays, wanted=self._quantizer.wanted(needed)
            )
        except UsageError as error:
            logger.info("%s: version %d is not like the last: %s", self._name, version, error)
            return None
        shapes = None if (got := staged.fetched) is None or got.wanted is None else plan.given_by(got).shapes
        if shapes is None or self._conversion.fits(self._quantizer.shapes(shapes)):
            return staged
        logger.info("%s: version %d has other tensors than the last one", self._name, version)
        self._drop(staged)
        return None

    def _get_first(self, version: int, deadline: Deadline) -> Staged:
        """Do the same for the first checkpoint: fetch its tables alone, then what a rehearsal over shapes names."""
        began = time.monotonic()
        found = self._got(version, self._layouts, deadline, serve=self._relays, wanted=())
        if found.wanted is None:
            return self._came(found, began)
        found.release()
        try:
            needed = worth_it(self._plan_ahead(plan.given_by(found).shapes, deadline))
            wanted = None if needed is None else self._quantizer.wanted(needed)
            staged = self._get(version, (CHECKPOINT,), deadline, serve=self._relays, wanted=wanted)
        except BaseException:
            if found.converts is not None:
                self._client.abandon(version, found.converts)
            raise
        assert staged.fetched is not None
        staged.fetched.converts = found.converts
        return staged

    def _plan_ahead(self, shapes: plan.Shapes, deadline: Deadline) -> plan.Plan | None:
        """Return what of a checkpoint of these shapes is needed. The loaders run over the live model's modules: in
        vLLM's own thread, between two steps, during the next `poll`."""
        planned = self._asked.ask(lambda: self._quantizer.plan(shapes, self._contract.rehearse_shapes))
        try:
            return planned.result(timeout=min(deadline.remaining(), PLAN_AHEAD_S))
        except FutureTimeout:
            return None if planned.cancel() else planned.result(timeout=deadline.remaining())

    @property
    def _relays(self) -> bool:
        """Return whether segments are offered to peers while the rest still arrives."""
        return self.config.source == "host"

    @property
    def _layouts(self) -> tuple[str, ...]:
        """Return the layouts that may be fetched. A raw copy would lack what kernels derive and keep for themselves."""
        return (CHECKPOINT,) if self._conversion.hidden else (self.position.layout, CHECKPOINT)

    def _get(self, version: int, layouts: tuple[str, ...], deadline: Deadline, **how: Any) -> Staged:
        """Fetch a version. how: serve, into, repair and wanted, see Client.fetch."""
        began = time.monotonic()
        return self._came(self._got(version, layouts, deadline, **how), began)

    def _got(self, version: int, layouts: tuple[str, ...], deadline: Deadline, **how: Any) -> Fetched:
        how |= {"timeout_s": deadline.remaining(), "grows": self._grows, "borrow": True}
        return self._client.fetch(version, layouts, **how)

    def _came(self, fetched: Fetched, began: float) -> Staged:
        self._handle(update_state.BytesRead(fetched.report))
        run_log.record_fetch(fetched.report, self._client, worker=self._name, seconds=time.monotonic() - began)
        return Staged(fetched.version, fetched if fetched.slabs else None, fetched.report)

    def _drop(self, staged: Staged) -> None:
        """Free bytes that will not be installed, or are not needed any more."""
        fetched = self._forget(staged)
        try:
            if fetched is None:
                if staged.report is not None:  # read in place, and perhaps offered
                    self._client.unpublish(staged.version, self.position.layout)
                return
            if fetched.converts is not None:
                self._client.abandon(fetched.version, fetched.converts)
            if self.config.source == "host" or fetched.layout != self.position.layout:
                self._client.unpublish(fetched.version, fetched.layout)
            fetched.release()
        except TensorHubError as error:
            logger.warning("%s: version %d was not released: %s", self._name, staged.version, error)

    def _forget(self, staged: Staged) -> Fetched | None:
        """Return what was fetched, of which no views are kept any more."""
        if self._known is not None and self._known[0] is staged.fetched:
            self._known = None
        return staged.fetched

    # --- installing, in vLLM's own thread ---

    def _prepare(self, version: int | None, deadline: Deadline, timeout_s: float) -> None:
        """Have no peer read what will change; raise, with nothing changed, if this version cannot be installed (None:
        the one that is staged)."""
        self.addresses.check(search=version is None or version != self._prepared)
        self._wait_until_served(deadline, timeout_s)
        with self._lock:
            staged = self._state.staged if version is None else self._state.ready_for(version)
        if staged is not None:
            self._rehearse(staged)
        self._withdraw_live(deadline)

    @property
    def _way(self) -> str:
        fetched = None if self._state.staged is None else self._state.staged.fetched
        return "copy" if fetched is None or fetched.layout == self.position.layout else "convert"

    def _rehearse(self, staged: Staged) -> None:
        """Raise VersionRefused, and drop the version, unless these bytes fill this model. No other bytes change."""
        self._prepared = staged.version
        if staged.fetched is None or staged.fetched.layout == self.position.layout:
            return  # a peer's tensors have been compared, and its weights were complete
        try:
            self._given(staged.fetched)
        except VersionRefused as error:
            refused = VersionRefused(error.message, version=staged.version)
            self._handle(update_state.Refused(refused))
            raise refused from error

    def _change(self, version: int, deadline: Deadline) -> str | None:
        """Write the model. Return how a checkpoint was converted, None for a copy of our own layout."""
        staged = self._state.staged
        assert staged is not None
        self._put_back()
        if staged.fetched is None:
            staged = self._read_in_place(version, deadline)
        if staged.fetched is None or staged.fetched.layout == self.position.layout:
            if staged.fetched is not None:
                weights.copy_tensors(self.addresses.tensors(), staged.fetched.tensors())
            weights.refresh_derived(self.model, is_raw=True)
            return None
        try:
            return self._convert(staged.fetched)
        except NotEnough as error:
            logger.warning("%s: version %d is read whole: %s", self._name, version, error)
        whole = self._get(version, (CHECKPOINT,), deadline, serve=False)
        assert whole.fetched is not None
        whole.fetched.converts, staged.fetched.converts = staged.fetched.converts, None
        self._handle(update_state.ReadInPlace(whole))
        return self._convert(whole.fetched)

    def _put_back(self) -> None:
        """Give buffers what they held before others changed them: no checkpoint does."""
        with torch.inference_mode():  # which can write inference tensors and others
            copy_all(self.buffers)
        self.buffers = ()

    def _convert(self, fetched: Fetched) -> str:
        how = self._intake.install(self._given(fetched))
        self._plans_ahead = False  # what is needed is known, or unknowable
        return how

    def _read_in_place(self, version: int, deadline: Deadline) -> Staged:
        """Read into the live weights, to be served there; or fetch the checkpoint, if no peer has our layout."""
        live, in_host_memory = self.addresses.tensors(), self.config.source == "host"
        try:
            # Half of the time: it may run out before the hub has noticed that a peer is dead.
            first = Deadline.after(deadline.remaining() / 2)
            layouts = (self.position.layout, CHECKPOINT)
            repair = self._state.repairs  # after an install that failed half way only damaged parts are read again
            staged = self._get(version, layouts, first, serve=not in_host_memory, into=live, repair=repair)
        except TensorHubError as error:
            logger.warning("%s: version %d: not read in place: %s", self._name, version, error)
            staged = self._get(version, (CHECKPOINT,), deadline, serve=in_host_memory)
        self._handle(update_state.ReadInPlace(staged))
        return staged

    def _result(self, version: int, began: float, error: Exception | None, layout: str | None = None) -> dict[str, Any]:
        if error is not None:
            run_log.record("update_failed", worker=self._name, version=version, error=str(error))
        with self._lock:
            return {
                "installed": error is None,
                "version": self._state.version,
                "layout": layout,
                "seconds": time.monotonic() - began,
                "report": self._state.report,
                "error": None if error is None else f"{type(error).__name__}: {error}",
                "broken": self._state.broken,
            }

    # --- serving, in the background thread ---

    def _serve_again(self) -> None:
        with self._lock:
            version = self._state.to_serve_again()
        if version is not None:
            self._serve(Staged(version))

    def _serve(self, staged: Staged) -> None:
        """Offer the new version in our layout after an install, then stop offering the one before."""
        try:
            self._offer(staged)
        except Exception as error:  # the weights are right; only peers cannot read them from here
            logger.warning("%s: version %d is not served: %s", self._name, staged.version, error)
        try:
            # Nothing writes the weights meanwhile: the next install waits for this thread.
            place = self.position
            if (self.config.verify or run_log.enabled()) and not digests.verify(
                self._name, self.model, place.layout, place.shard, place.shard_count, staged
            ):
                self.mark_broken(f"the live weights are not those of version {staged.version} any more")
                logger.error("%s: %s", self._name, self._state.broken)
            self._drop_source(staged)
        except Exception:
            logger.exception("%s: after the install of version %d", self._name, staged.version)

    def _offer(self, staged: Staged) -> None:
        version, layout, timeout_s = staged.version, self.position.layout, self.config.serve_timeout_s
        if self._conversion.hidden:
            return
        in_host_memory = self.config.source == "host"
        live = weights.tensors(self.model)
        # Staged bytes are offered since they arrived, live ones since they were read in place, and after a sleep a copy
        # may be, because it was the last.
        key = ShardKey(version, layout, self.position.shard, self.position.shard_count)
        if key not in self._client.serving():
            if in_host_memory:
                converts = staged.fetched is not None and staged.fetched.converts
                if converts and self._client.abandon(version, layout, unless_awaited=True):
                    self._handle(update_state.Served(None))
                    return
                self._make_room(version)
            self._client.publish(version, live, layout, copy=in_host_memory, timeout_s=timeout_s)
        size = sum(tensor.nbytes for tensor in live.values())
        run_log.record("serve", worker=self._name, version=version, layout=layout, bytes=size)
        self._handle(update_state.Served(version))

    def _make_room(self, version: int) -> None:
        """Reuse the former version's memory for this one, unless it has readers: else allocate a third copy."""
        with self._lock:
            before = self._state.served
        if before in (None, version):
            return
        key = ShardKey(before, self.position.layout, self.position.shard, self.position.shard_count)
        offer = self._client.find(key)
        if offer is not None and not offer.active_readers:
            self._client.unpublish(before, self.position.layout, timeout_s=MAKE_ROOM_S)
            self._handle(update_state.Withdrawn())

    def _drop_source(self, staged: Staged) -> None:
        """Free what was fetched; what we serve of it stays for as long as needed."""
        fetched, layout = self._forget(staged), self.position.layout
        if fetched is None:
            return
        if fetched.converts is not None and self._state.served != staged.version:
            self._client.abandon(staged.version, layout)
        if fetched.layout != layout:
            self._client.unpublish(staged.version, fetched.layout, timeout_s=self.config.serve_timeout_s)
        fetched.release()

    def _wait_until_served(self, deadline: Deadline, timeout_s: float) -> None:
        serving = self._serving
        if serving is not None:
            try:
                serving.result(timeout=deadline.remaining())
            except FutureTimeout:
                raise DeadlineExceeded(
                    "the weights are still being copied for peers: raise the deadline",
                    version=self._state.version,
                    phase="prepare_install",
                    timeout_s=timeout_s,
                ) from None

    def _withdraw_live(self, deadline: Deadline) -> None:
        """Withdraw the live weights: no peer reads them afterwards."""
        with self._lock:
            served = self._state.to_withdraw()
        if served is not None:
            self._client.unpublish(served, self.position.layout, timeout_s=deadline.remaining())
            self._handle(update_state.Withdrawn())
