"""The code inside every vLLM worker: it pulls a version while the engine generates, and installs it on request.

Give an engine `worker_extension_cls="tensorhub_plugins.vllm.TensorHubWorkerExtension"`; vLLM then mixes this class
into its worker. One update; each step is one `collective_rpc` to all workers of the engine
    tensorhub_connect(config)          once, after the engine has started; see config.WorkerConfig
    tensorhub_start_fetch(version)     the bytes arrive in host memory, in a thread, while the engine generates
    tensorhub_poll()                   until every worker's "state" is "ready"; both return at once
    tensorhub_prepare_install()        optional; raises rather than let the install wait for something
    pause the engine, keeping its requests, and let it forget caches
    tensorhub_install(version)         a local copy or reload (waits): all workers of the engine or none
    resume the engine                  only if every worker's result says "installed"

What is installed
    The runtime layout when a peer has it or is making it (a plain copy); else the checkpoint, which this worker
    converts (conversion.py: by vLLM's layerwise reload, or by copies shown to be the same) and publishes in the
    runtime layout for its peers.

What it serves afterwards, while the engine generates (`serve_from`)
    "host"   an immutable copy in shared host memory: the staged bytes themselves, or a snapshot after a conversion.
             Peers on this host map it, and the next install does not wait for readers. Takes host memory for two
             versions, the one served and the one arriving.
    "live"   the engine's own weights in place; no extra memory. Before the next version is "ready" their readers
             are drained.
With `install="direct"` bytes go from the peer straight into the live weights, while the engine is paused.

Never mixed bytes
    Until the first byte of the model changes, a failure leaves the old version whole. After it the worker is
    *broken* until an install succeeds: `tensorhub_poll` reports it, `tensorhub_guard` raises, and execute_model
    refuses to compute, which ends the engine rather than let it answer. So: do not resume, fetch and install again.
    Workers of one engine agree before they change anything and again afterwards; one that failed breaks all.

Never another model's bytes
    A checkpoint that is not whole, or not this model's, is refused before the pause (checkpoint_contract.py);
    "error_kind" is then VersionRefused, and the old version goes on.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import msgspec
import torch

from tensorhub_plugins.core import SECRET_VARIABLE, Manifest, Slab, UsageError, gate, keys_from_environment, work
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm import drafts, names
from tensorhub_plugins.vllm.config import WorkerConfig, check_lora, is_further_rank, shares_experts
from tensorhub_plugins.vllm.interrupts import leave_garbage
from tensorhub_plugins.vllm.plugin import around
from tensorhub_plugins.vllm.worker import (
    adapters,
    addresses,
    cpu,
    draft,
    fingerprint,
    intake,
    memory_need,
    not_finite,
    online_quantization,
    progress,
    weights,
)
from tensorhub_plugins.vllm.worker.methods import CHANGE_WEIGHTS, may_change_weights
from tensorhub_plugins.vllm.worker.preserved import ExternalCall, copied_buffers, preserved
from tensorhub_plugins.vllm.worker.updater import TIMEOUT_S, Updater, time_of_update
from tensorhub_plugins.vllm.worker.votes import ShardPosition, anyone, engine_gather, first_name

logger = get_logger(__name__)

BEGIN = "tensorhub_begin"  # in a model: what gets its first version, once the worker has all of its models
BEGUN = "tensorhub_begun"  # in a worker: that has been


class TensorHubWorkerExtension:
    """A mixin for vLLM's Worker. Arguments and results are plain types, as collective_rpc requires."""

    model_runner: Any  # the worker's own, as is
    vllm_config: Any
    tensorhub_leave_weights: tuple[str, ...] = ()  # a subclass's methods that only read: not checked

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Hook into vLLM's worker as it is made: the only moment before load_model that an extension gets."""
        following = super().__new__
        worker: Any = following(cls) if following is object.__new__ else following(cls, *args, **kwargs)
        hook(cls)
        worker.load_model = partial(_load_model, worker)
        return worker

    def tensorhub_connect(self, config: dict[str, Any], secret: str | None = None) -> dict[str, Any]:
        """Join the store. Return layout, shard, shard_count, size_bytes, vllm; UsageError says what cannot work.

        secret: the run's, if this process's environment has none."""
        import vllm

        learn_secret(secret)
        parsed = WorkerConfig.parse(config)
        if is_further_rank(self.vllm_config):
            raise UsageError(
                "vLLM returns the answer of the first of several data parallel engines only, and those of the "
                "others are lost: make an engine of each rank, or let them follow (--load-format tensorhub)"
            )
        if parsed.lora:
            raise UsageError("adapters are joined by tensorhub_connect_adapters, and the weights of their engine stay")
        updater = join(parsed, self.model_runner.get_model(), self.vllm_config, draft.of_worker(self))
        size_bytes = sum(tensor.nbytes for tensor in weights.tensors(self.model_runner.get_model()).values())
        return {
            "layout": updater.position.layout,
            "shard": updater.position.shard,
            "shard_count": updater.position.shard_count,
            "size_bytes": size_bytes,
            "vllm": vllm.__version__,
        }

    def tensorhub_connect_adapters(
        self, config: dict[str, Any], secret: str | None = None, wait_s: float = 0.0
    ) -> list[int]:
        """Join the histories of this engine's LoRA adapters (WorkerConfig.lora); return their versions. wait_s: wait
        for the first one of each, and install it; 0: it is installed when it comes."""
        learn_secret(secret)
        model, parsed = self.model_runner.get_model(), WorkerConfig.parse(config)
        check_lora(parsed.lora, self.vllm_config)
        _check_caches(self.vllm_config)
        leave_adapters(model)
        joined = vars(model)["tensorhub_adapters"] = {}
        gather, shard = engine_gather(self.vllm_config)
        manager = self.model_runner.lora_manager
        for name in parsed.lora:
            joined[name] = adapters.AdapterUpdater(parsed, name, manager, self.vllm_config, gather, shard)
            if wait_s:
                joined[name].install_first(wait_s)
        return [each.poll()["version"] for each in joined.values()]

    # target: an adapter of this engine; "": its weights

    def tensorhub_start_fetch(
        self, version: int, timeout_s: float | None = None, grows: bool = False, target: str = ""
    ) -> None:
        """Start fetching this version, in a thread. UsageError during another fetch, or if it is installed. grows: it
        may take longer than timeout_s while it advances, as it may without a timeout_s."""
        if not target and len(all_attached(self)) > 1:
            raise UsageError("this engine takes adapters from the store: its weights stay what it was started with")
        timeout_s, grows = time_of_update(timeout_s, grows=grows)
        _updater(self, target).start_fetch(version, timeout_s, grows)

    def tensorhub_poll(self, target: str = "") -> dict[str, Any]:
        """Return state ("idle", "fetching", "ready", "failed", "broken"), version, next_version, error, report, ..."""
        return {**_updater(self, target).poll(), "worked": work.count()}

    def tensorhub_discard(self, target: str = "") -> None:
        """Drop a version that is ready and will not be installed."""
        _updater(self, target).discard()

    def tensorhub_prepare_install(self, timeout_s: float = TIMEOUT_S, target: str = "") -> None:
        """Prepare an install before the pause, between two steps: it will neither wait nor find another model."""
        _updater(self, target).prepare_install(timeout_s)

    def tensorhub_install(self, version: int, timeout_s: float = TIMEOUT_S, target: str = "") -> dict[str, Any]:
        """Install while the engine is paused. Never raises; see "installed", "error", "broken", "seconds", "layout"."""
        result = _updater(self, target).install(version, timeout_s)
        if result["installed"]:
            progress.begin_again(self.model_runner)
        return result

    def tensorhub_guard(self) -> None:
        """Raise BrokenWeights if this worker's weights must not be used."""
        for updater in all_attached(self):
            updater.guard()

    def tensorhub_guard_all(self, stale: str = "") -> None:
        """Raise BrokenWeights if any worker of the engine must not be used, or the caches of its core (stale). All are
        asked at once, while nothing runs."""
        for updater in all_attached(self):
            updater.guard(together=True, stale=stale)

    def tensorhub_health(self) -> str | None:
        """Return why this worker's weights must not be used, or None."""
        said = [updater.poll()["broken"] for updater in all_attached(self) if not updater.is_asleep]
        return next(filter(None, said), None)

    def tensorhub_lose(self) -> None:
        """Compute nothing with these weights until the next install: another data parallel rank's are not theirs."""
        if (updater := attached(self)) is not None and not updater.poll()["broken"]:
            updater.mark_broken("another data parallel rank has lost its weights, or has others")

    def tensorhub_weights(self) -> tuple[int | None, int]:
        """Return the version of its weights (0: none of the store's; None: it has not joined), and a number, which is
        another one after each change."""
        updater = attached(self)
        return (None, 0) if updater is None else (updater.poll()["version"], updater.changed)

    def tensorhub_digests(self) -> dict[str, Any]:
        """Return layout, version, runtime {name: hex}, checkpoint {Hugging Face name: hex} or None."""
        return _updater(self).digests()

    def tensorhub_close(self) -> None:
        """Leave the store; the engine keeps its weights. Takes seconds if no other worker has its version."""
        leave(_model(self), hands_over=True)


def learn_secret(secret: str | None) -> None:
    """Use the run's secret, if this process's environment has none."""
    if secret is not None and keys_from_environment() is None:
        os.environ[SECRET_VARIABLE] = secret


# --- how a model gets its updater ---


def join(
    config: WorkerConfig, model: torch.nn.Module, vllm_config: Any, drafting: Any = None, *, on_disk: bool = False
) -> Updater:
    """Join the store with this worker's model, in all workers of the engine at once; UsageError says what cannot work.

    The updater is the model's from then on (`attached`). drafting: see draft.py. on_disk: it was read, see intake.py.
    """
    import vllm

    names.check_version(vllm.__version__)
    whole = draft.together(model, _followed_draft(config, drafting, vllm_config))
    _check_supported(whole, vllm_config, lora=bool(config.lora))
    gather, shard = engine_gather(vllm_config)
    # Every worker takes part before anything can fail on one of them alone.
    config = msgspec.structs.replace(config, replica=first_name(gather, config.replica))
    prints = gather(fingerprint.fingerprint(whole, vllm_config, ranks=fingerprint.parallel_ranks(vllm_config)))
    position = ShardPosition(shard, len(prints), fingerprint.replica_layout(prints))
    leave(model)
    if on_disk:
        intake.keep_tried(whole, vllm_config, gather)
    updater = vars(model)["tensorhub_updater"] = Updater(config, whole, vllm_config, position, gather)
    logger.info("%s/%d of %d: %s", config.replica, position.shard, position.shard_count, position.layout)
    return updater


def _followed_draft(config: WorkerConfig, drafting: torch.nn.Module | None, vllm_config: Any) -> torch.nn.Module | None:
    """Return the draft if versions bring its weights; else say what becomes of it."""
    source = drafts.source_in(vllm_config, config.draft)
    method = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    if source == "disk":
        logger.warning(
            "speculative decoding (%s): the draft keeps the weights it was started with. Answers stay those of the new "
            "version, but fewer drafts are accepted as it moves on%s",
            method,
            '. With option draft="store" versions bring it' if drafts.is_of_the_model(method) else "",
        )
    if source == "store" and drafting is None and fingerprint.group_of("pp").is_last_rank:
        text = f"vLLM shows no heads that draft ({method}) here, as its weight transfer alone never does: start with"
        raise UsageError(f'{text} --load-format tensorhub, which has them follow, or read them (option draft="disk")')
    return drafting if source == "store" else None


def leave(model: torch.nn.Module | None, *, hands_over: bool = False) -> None:
    """Leave the store, if this model has joined it."""
    updater = None if model is None else vars(model).pop("tensorhub_updater", None)
    leave_adapters(model, hands_over=hands_over)
    if updater is not None:
        updater.close(hands_over=hands_over)


def leave_adapters(model: torch.nn.Module | None, *, hands_over: bool = False) -> None:
    """Leave the histories of this model's adapters, all at once: handing over takes seconds."""
    joined = {} if model is None else vars(model).pop("tensorhub_adapters", {})
    with ThreadPoolExecutor(max(1, len(joined))) as threads:
        list(threads.map(partial(Updater.close, hands_over=hands_over), joined.values()))


def attached(worker: Any) -> Updater | None:
    """Return the updater of this worker's model, or None."""
    model = _model(worker)
    return None if model is None else vars(model).get("tensorhub_updater")


def all_attached(worker: Any) -> list[Updater]:
    """Return the updaters of this worker: of its weights, and of its adapters."""
    return [*filter(None, [attached(worker)]), *_adapters(worker).values()]


def _adapters(worker: Any) -> dict[str, adapters.AdapterUpdater]:
    """Return those of the adapters, by name."""
    model = _model(worker)
    return {} if model is None else vars(model).get("tensorhub_adapters", {})


def extend(vllm_config: Any) -> None:
    """Do what `worker_extension_cls` does, for a worker class that exists already."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    worker_class = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    if not issubclass(worker_class, TensorHubWorkerExtension):
        worker_class.__bases__ = (*worker_class.__bases__, TensorHubWorkerExtension)
    hook(worker_class)


# --- what is wrapped around the worker's own methods ---


def hook(worker_class: type) -> None:
    """Wrap the methods that vLLM calls on its workers, once. Without an updater on the model they behave as before.

    A mixin cannot override what the worker class defines itself."""
    if "tensorhub_hooked" in vars(worker_class):
        return
    worker_class.tensorhub_hooked = True  # type: ignore[attr-defined]
    for each in worker_class.__mro__:
        memory_need.wait_for_the_last(each)
    wrappers: dict[str, Callable[..., Any]] = {
        "compile_or_warm_up_model": _warm_up,
        "execute_model": _execute_model,
        "shutdown": _shutdown,
        "sleep": _sleep,
        "wake_up": _wake_up,
        "discard": _discard,
        "load_model": _load_again,
        "get_kv_cache_spec": _begin,  # what an engine asks all of its workers first, once they have their models
    }
    only_read = getattr(worker_class, "tensorhub_leave_weights", ())
    for name in dir(worker_class):
        is_method = not name.startswith("_") and isinstance(inspect.getattr_static(worker_class, name), FunctionType)
        if is_method and may_change_weights(name) and name not in only_read:
            wrappers[name] = partial(_external_change, name)
    for name, wrapper in wrappers.items():
        if (original := getattr(worker_class, name, None)) is not None:
            setattr(worker_class, name, _around(original, wrapper))


def _around(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(partial(original, worker), worker, *args, **kwargs)

    return method


def _load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
    with cpu.live_layers():
        return type(worker).load_model(worker, *args, **kwargs)


def _begin(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    model, is_first = _model(worker), not hasattr(worker, BEGUN)
    begin = vars(model or worker).pop(BEGIN, None)
    setattr(worker, BEGUN, True)  # asked again later, the weights may be others than those in the files
    if begin is not None:
        begin(draft.of_worker(worker))
    elif is_first and model is not None and attached(worker) is None and intake.is_from_files(worker.vllm_config):
        gather, _ = engine_gather(worker.vllm_config)
        intake.keep_tried(model, worker.vllm_config, gather, partial(_check_supported, model, worker.vllm_config))
    return original(*args, **kwargs)


def _warm_up(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Warm up with the gate closed: other threads' calls to the device would invalidate the CUDA graphs it captures."""
    gate.close()
    try:
        result = original(*args, **kwargs)
    finally:
        gate.open()
    updater = attached(worker)
    if updater is not None:
        updater.addresses.check()
    return result


def _execute_model(original: Any, worker: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
    # A step without tokens computes nothing: vLLM makes one to clear requests whose clients have disconnected.
    if scheduled.total_num_scheduled_tokens:
        worker.tensorhub_guard()
    if joined := all_attached(worker):
        progress.begin_again(worker.model_runner, scheduled.scheduled_cached_reqs.resumed_req_ids)
        progress.ask_again(worker.model_runner, scheduled.scheduled_cached_reqs)
        if scheduled.total_num_scheduled_tokens:
            not_finite.clear_after(worker, max(updater.changed for updater in joined))
    return original(scheduled, *args, **kwargs)


def _shutdown(original: Any, worker: Any) -> None:
    leave(_model(worker), hands_over=True)
    original()
    if multiprocessing.current_process().name.startswith("VllmWorker"):  # else it is its caller's, which goes on
        leave_garbage()


def _sleep(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    updater = attached(worker)
    if updater is not None:
        updater.fall_asleep()
    result = original(*args, **kwargs)
    if updater is not None and _loses_weights(*args, **kwargs):
        updater.mark_broken("sleep(level=2) threw the weights away")
    return result


def _wake_up(original: Any, worker: Any, tags: list[str] | None = None) -> Any:
    result = original(tags)
    if (updater := attached(worker)) is not None and (tags is None or "weights" in tags):
        updater.wake_up()
    for each in _adapters(worker).values():
        each.evict()  # a sleep may have lost what vLLM had of it
    return result


def _discard(original: Any, worker: Any, tags: tuple[str, ...]) -> Any:
    """Free some memory without sleeping, as vLLM does since 0.32."""
    updater = attached(worker) if "weights" in tags else None
    if updater is not None:
        updater.fall_asleep()
        updater.mark_broken("discard threw the weights away")
    return original(tags)


def _external_change(name: str, original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    if name in CHANGE_WEIGHTS and _adapters(worker):
        raise UsageError(f"{name}: this engine takes adapters from the store, and its weights stay what they are")
    updater = attached(worker)
    ours = getattr(getattr(worker, "weight_transfer_engine", None), "tensorhub", False)
    if updater is None or (ours and name == "start_weight_update"):
        return original(*args, **kwargs)
    is_certain = name in CHANGE_WEIGHTS
    with external_change(updater, name, worker.vllm_config, is_certain=is_certain):
        return original(*args, **kwargs)


def _load_again(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to load another model: it would answer instead of the store's, and updates would write into it."""
    if all_attached(worker):
        raise UsageError("load_model: this engine's weights are in the store: publish a version, or use reload_weights")
    return original(*args, **kwargs)


def compare_unnamed(core: Any) -> None:
    """Wrap what vLLM's engine core asks of its workers for others. A function, or a private method, is on no list of
    names, and is not among the methods that `hook` wraps: the bytes are compared around it."""

    def collective_rpc(original: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        is_named = isinstance(method, str) and not method.startswith("_")
        return original(method if is_named else partial(run_unnamed, method), *args, **kwargs)

    around(core, "collective_rpc", collective_rpc)


def run_unnamed(method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Do in a worker what vLLM would, between the comparisons."""
    from vllm.v1.serial_utils import run_method

    name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
    return _external_change(name, partial(run_method, worker, method, args, kwargs), worker)


def _loses_weights(level: int = 1, *args: Any, **kwargs: Any) -> bool:
    from vllm.platforms import current_platform

    return level >= 2 and not current_platform.is_cpu()  # the CPU build does not sleep


# --- small things ---


def _updater(worker: Any, target: str = "") -> Updater:
    updater = _adapters(worker).get(target) if target else attached(worker)
    if updater is None:
        raise UsageError("not connected: call tensorhub_connect(config) first")
    return updater


def _model(worker: Any) -> torch.nn.Module | None:
    runner: Any = getattr(worker, "model_runner", None)
    return None if getattr(runner, "model", None) is None else runner.get_model()


def _check_supported(model: torch.nn.Module, vllm_config: Any, *, lora: bool = False) -> None:
    """Raise UsageError for settings that would fail silently. lora: these weights stay; adapters come."""
    parallel = vllm_config.parallel_config
    if getattr(vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False):
        # vLLM then ties them or not by the values of the first weights, which may be wrong for later ones.
        raise UsageError(
            "config.json says that the word embeddings are tied, and the checkpoint holds an lm_head of its own: set "
            "tie_word_embeddings to false, or leave lm_head out of the checkpoint"
        )
    if vllm_config.lora_config is not None and not lora:
        raise UsageError(
            "this engine was started for LoRA, so its weights are not replaced: name the adapters that the trainer "
            'publishes in option "lora", or switch LoRA off'
        )
    if getattr(parallel, "enable_eplb", False):
        raise UsageError("expert load balancing moves experts between workers at run time: switch enable_eplb off")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UsageError("prefill context parallelism is not supported: set prefill_context_parallel_size=1")
    if shares_experts(vllm_config):
        _check_ranks(vllm_config)
    _check_caches(vllm_config)
    addresses.check_config(vllm_config)
    online_quantization.check(model, vllm_config)
    cpu.check_layers(model, vllm_config)


def _check_caches(vllm_config: Any) -> None:
    """Raise UsageError for what keeps results of these weights, or of an adapter, where no update forgets them."""
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", None)
    encoded = getattr(vllm_config, "ec_transfer_config", None)
    for leaves, what, option in (
        (connector, f"the KV cache leaves this engine ({connector})", "--kv-transfer-config and KV offloading"),
        (encoded, "what encoders have computed leaves this engine", "--ec-transfer-config"),
    ):
        if leaves:
            raise UsageError(f"{what} and may come back when what made it is gone: start without {option}")
    progress.check()


def _check_ranks(vllm_config: Any) -> None:
    """Raise UsageError for ranks that share experts, and so step together, but would be updated one at a time."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if vllm_config.load_config.load_format != names.NAME or getattr(transfer, "backend", None) == names.NAME:
        raise UsageError(
            "data parallel ranks of a mixture of experts share its experts and have to be updated as one: start the "
            f'engine with --load-format {names.NAME} and "follow", without --weight-transfer-config'
        )
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        raise UsageError("elastic expert parallelism moves experts between workers at run time: leave it off")


# --- changes of a worker's weights from outside the store: vLLM's own routes, for any back end ------------------------


@contextmanager
def external_change(updater: Updater, what: str, vllm_config: Any, *, is_certain: bool = True) -> Iterator[None]:
    """Wrap such a change, in all workers of the engine at once: all begin it, or none. No peer reads the weights
    meanwhile, and afterwards they are no version of the store. If it fails they are unchanged and served as before, or
    broken.

    is_certain: it changes them, now or later on; else only if their bytes differ afterwards. While the engine sleeps
    there are none, and to read them would end the process. Within another one it is a part of that, whose workers need
    not all come to it."""
    if updater.external is not None:
        with _part_of(updater.external, updater, what, is_certain=is_certain):
            yield
        return
    reason, is_begun, together = "", False, not shares_experts(vllm_config)  # those are not asked at once
    call = updater.external = ExternalCall(is_certain)
    try:
        try:
            updater.before_external_change(what)
            if not updater.is_asleep:
                call.before = Slab.adopt(weights.tensors(updater.model)).manifest()
                call.buffers = copied_buffers(updater.model)
            is_begun = True
        finally:  # all workers do it, or none: what they do may be one step of all
            if together and anyone(updater.gather, not is_begun) and is_begun:
                is_begun = False
                raise UsageError(f"{what}: another worker of this engine could not begin, and nothing has changed")
        with preserved(updater.model):
            yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:  # in any case: the other workers wait for what this one says
        updater.external, reason = None, reason or call.failure
        changed = (is_begun and _differs(updater, call.before)) or (call.is_certain and not reason)
        if is_begun and (call.before is None or updater.is_asleep):
            try:
                updater.before_external_change(what)  # again: to wake it up serves them
            except Exception as error:
                reason = reason or f"{type(error).__name__}: {error}"
        if together:
            failed, changed = anyone(updater.gather, bool(reason)), anyone(updater.gather, changed)
            reason = reason or "another worker of this engine failed" * failed
        if changed:
            updater.buffers = updater.buffers or call.buffers
        if not changed:
            updater.mark_unchanged()
        elif reason:
            updater.mark_broken(f"{what} failed half way: {reason}")
        else:
            updater.mark_unversioned()


@contextmanager
def _part_of(call: ExternalCall, updater: Updater, what: str, *, is_certain: bool) -> Iterator[None]:
    """Note what comes of a change within such a call, which has its own end. One that fails before anything is changed
    may be tried again in it."""
    try:
        with preserved(updater.model):
            yield
    except BaseException as error:
        if call.before is None or updater.is_asleep or _differs(updater, call.before):
            call.failure = f"{what}: {type(error).__name__}: {error}"
        raise
    call.is_certain |= is_certain


def _differs(updater: Updater, before: Manifest | None) -> bool:
    """Return whether its weights are others than they were, or of another form: all workers are to hear of it, and the
    call itself has not failed. before: None: they were asleep."""
    if before is None or updater.is_asleep:
        return updater.is_asleep == (before is not None)
    try:
        now = Slab.adopt(weights.tensors(updater.model))
        return now.specs != before.tensors or bool(now.damaged(before))
    except Exception:
        logger.warning("the weights cannot be compared any more, and count as changed", exc_info=True)
        return True
