"""Tells vLLM our names. Called in every vLLM process, also in those that never ask for the store.

So it imports nothing of vLLM (what it adds to a module, it adds once that module is imported), raises nothing, and may
be called twice. What it registers acts only where a configuration names it:
    --load-format tensorhub                                    load_format.py
    --weight-transfer-config '{"backend": "tensorhub"}'        weight_transfer.py
    either of the two                                          core_follower.py, and a health check of the weights
    worker_extension_cls                                       core_follower.py: open sessions do not keep KV of old
                                                               weights, and tokens are counted by version
    --load-format tensorhub, in `vllm serve`                   routes.py; and the names of adapters, see lora.py
    either of the two, or worker_extension_cls                 engine/pooling.py; engine/compiled.py
    either of the two                                          time to hand over the last copy when an engine ends
    either of the two                                          interrupts.py: an engine that starts ends at SIGTERM, and
                                                               one whose API server was killed
    either of the two, or worker_extension_cls                 worker_replies.py
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import ModuleType
from typing import Any

from tensorhub_plugins.vllm.names import LEAVING_S, NAME, WEIGHT_TRANSFER_FIRST, check_version


def register() -> None:
    """Register everything: the entry point `vllm.general_plugins`."""
    try:
        after_import({name: partial(_add, name, add) for name, add in ADDITIONS.items()})
    except Exception as error:  # an engine that never asked for us must start all the same
        _debug("tensorhub: not registered: %r", error)


def _add_load_format(model_loader: Any) -> None:
    # What vLLM's own decorator does, without importing our side (or logging) before it is asked for.
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.setdefault(NAME, _make_loader)


def _make_loader(load_config: Any) -> Any:
    """Make the loader; vLLM calls this as it would a loader's class."""
    _check_version()
    from tensorhub_plugins.vllm.load_format import TensorHubModelLoader

    return TensorHubModelLoader(load_config)


def _add_weight_transfer(factory: Any) -> None:
    # What register_engine does, which raises when it is called again. Older versions have no trainer's side.
    for registry, name in (
        ("WeightTransferEngineFactory", "TensorHubWeightTransferEngine"),
        ("WeightTransferTrainerFactory", "TensorHubTrainerEngine"),
    ):
        if hasattr(factory, registry):
            getattr(factory, registry)._registry.setdefault(NAME, partial(_transfer_class, name))


def _transfer_class(name: str) -> Any:
    _check_version(first=WEIGHT_TRANSFER_FIRST, what="its weight transfer")
    from tensorhub_plugins.vllm import weight_transfer

    return getattr(weight_transfer, name)


def _check_version(**needs: str) -> None:
    """Call before anything of ours is imported that needs what other versions lack."""
    import vllm

    check_version(vllm.__version__, **needs)


def _add_to_engine_core(core: Any) -> None:
    """Give core_follower.py hold of the scheduler and its caches, when asked for: workers cannot reach them."""

    def initialize_kv_caches(original: Any, engine_core: Any, vllm_config: Any) -> Any:
        if not (_is_ours(vllm_config) or _has_our_workers(vllm_config)):
            return original(engine_core, vllm_config)
        from tensorhub_plugins.core import gate
        from tensorhub_plugins.vllm.engine.compiled import shared
        from tensorhub_plugins.vllm.worker.extension import compare_unnamed

        try:
            with shared(engine_core, vllm_config):
                result = original(engine_core, vllm_config)
        finally:
            gate.open()  # a start that fails before its warm-up ends keeps no other engine of this process waiting
        compare_unnamed(engine_core)
        from tensorhub_plugins.vllm.engine.core_follower import attach

        attach(engine_core, vllm_config, owned=_has_our_workers(vllm_config))
        return result

    wrap(core.EngineCore, "_initialize_kv_caches", initialize_kv_caches)


def _add_health_check(async_llm: Any) -> None:
    """Have the health check say that an engine whose weights are mixed holds its requests."""

    async def check_health(original: Any, engine: Any) -> None:
        await original(engine)
        if _is_ours(engine.vllm_config):
            from tensorhub_plugins.vllm.engine.core_follower import check_weights

            await check_weights(engine)

    wrap(async_llm.AsyncLLM, "check_health", check_health)


def _add_time_to_leave(utils: Any) -> None:
    """Give a core time to hand over what only it has when it ends; vLLM kills it at once by default, or when its
    requests had their time. Its parent waits only until it has."""

    def begin(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        configs = (each for each in (*args, *kwargs.values()) if hasattr(each, "load_config"))
        setattr(self, NAME, any(map(_is_ours, configs)))
        original(self, *args, **kwargs)

    def end(original: Any, self: Any, timeout: float | None = None) -> None:
        if getattr(self, NAME):
            # From 0.29 on some cores have time of vLLM's own, which it gives to those only that would have none.
            of_vllm = getattr(utils, "get_engine_process_shutdown_timeout", lambda _, given: given)
            timeout = (of_vllm(getattr(self, "_request_shutdown_timeout", None), timeout) or 0.0) + LEAVING_S
        original(self, timeout)

    wrap(utils.CoreEngineProcManager, "__init__", begin)
    wrap(utils.CoreEngineProcManager, "shutdown", end)


def _add_ends_of_client(core_client: Any) -> None:
    """Have signals end `vllm serve` and `LLM` while they wait for their cores."""

    def begin(original: Any, self: Any, asyncio_mode: bool, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _ends_at_signals(vllm_config, interactive=not asyncio_mode):
            original(self, asyncio_mode, vllm_config, *args, **kwargs)

    wrap(core_client.MPClient, "__init__", begin)


def _add_to_core_client(core_client: Any) -> None:
    _add_ends_of_client(core_client)
    _add_end_of_coordinator(core_client)


def _add_ends_of_core(abstract: Any) -> None:
    """Have signals end a core while it waits for its workers, or loads the weights itself."""

    def begin(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _ends_at_signals(vllm_config, interactive=True):
            original(self, vllm_config, *args, **kwargs)

    wrap(abstract.Executor, "__init__", begin)


def _add_end_of_coordinator(caller: Any) -> None:
    """Have data parallel's coordinator end with what has started it: it takes no part in the end of the cores. caller:
    a module with a name of its own for what starts it, which it may have imported before this is registered."""

    @contextmanager
    def launch(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            if _is_ours(vllm_config):
                from vllm.v1.engine.coordinator import DPCoordinatorProc

                from tensorhub_plugins.vllm.interrupts import coordinate

                vars(coordinate).setdefault("original", DPCoordinatorProc.run_coordinator)
                stack.enter_context(replaced(DPCoordinatorProc, run_coordinator=coordinate))
            yield stack.enter_context(original(vllm_config, *args, **kwargs))

    wrap(caller, "launch_core_engines", launch)


def _ends_at_signals(vllm_config: Any, *, interactive: bool) -> Any:
    """Have it end with its parent from now on, and at signals within this context."""
    if not _is_ours(vllm_config):
        return nullcontext()
    from tensorhub_plugins.vllm.interrupts import end_with_parent, ends_at_signals

    end_with_parent(vllm_config.shutdown_timeout)
    return ends_at_signals(interactive=interactive)


def _add_routes(serve: Any) -> None:
    """Have `vllm serve` tell which version it has."""

    def register(original: Any, app: Any) -> None:
        original(app)
        from tensorhub_plugins.vllm.routes import attach

        attach(app)

    wrap(serve, "register_vllm_serve_api_routers", register)


def _add_adapters(serving: Any) -> None:
    """Have `vllm serve` offer the adapters that the engine takes from the store, from the start on."""

    def begin(original: Any, models: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        original(models, engine_client, *args, **kwargs)
        if _is_ours(engine_client.vllm_config):
            from tensorhub_plugins.vllm.lora import offer

            offer(models, engine_client.vllm_config)

    wrap(serving.OpenAIServingModels, "__init__", begin)


def _add_gathered(wrapper: str, classes: list[str], module: Any) -> None:
    """Make what is made of several requests of one version. classes: the names of one class in versions of vLLM."""
    from tensorhub_plugins.vllm.engine import pooling

    serving = next(getattr(module, name) for name in classes if hasattr(module, name))
    getattr(pooling, wrapper)(serving, lambda config: _is_ours(config) or _has_our_workers(config))


def _add_draining(multiproc_executor: Any) -> None:
    """Fetch every answer: one that is not fetched is taken for the answer to the next call."""
    from tensorhub_plugins.vllm.worker_replies import all_fetched

    all_are = partial(all_fetched, lambda self: _is_ours(self.vllm_config))
    wrap(multiproc_executor.MultiprocExecutor, "collective_rpc", all_are)


def wrap(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Have `new` called in the place of that function of a class or module, with the original first; once."""
    if not hasattr(getattr(owner, name), NAME):
        around(owner, name, new)
        setattr(getattr(owner, name), NAME, True)


def around(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Do what `wrap` does, of an object, too, and each time anew."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    setattr(owner, name, wrapped)


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Put these in the place of what a module, a class or an object has of their names, for as long as this lasts."""
    before = {name: getattr(owner, name) for name in others}
    try:
        for name, other in others.items():
            setattr(owner, name, other)
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)


def _is_ours(vllm_config: Any) -> bool:
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return NAME in (vllm_config.load_config.load_format, getattr(transfer, "backend", None))


def _has_our_workers(vllm_config: Any) -> bool:
    return str(getattr(vllm_config.parallel_config, "worker_extension_cls", "")).startswith("tensorhub_plugins.")


ADDITIONS: dict[str, Callable[[Any], None]] = {
    "vllm.model_executor.model_loader": _add_load_format,
    "vllm.distributed.weight_transfer.factory": _add_weight_transfer,
    "vllm.v1.engine.core": _add_to_engine_core,
    "vllm.v1.engine.async_llm": _add_health_check,
    "vllm.v1.engine.core_client": _add_to_core_client,
    "vllm.entrypoints.cli.serve": _add_end_of_coordinator,
    "vllm.v1.engine.utils": _add_time_to_leave,
    "vllm.v1.executor.abstract": _add_ends_of_core,
    "vllm.entrypoints.serve": _add_routes,
    "vllm.entrypoints.openai.models.serving": _add_adapters,
    "vllm.v1.executor.multiproc_executor": _add_draining,
}
# What engine/pooling.py wraps, and how. The second name of a class is the one before vLLM 0.25.
GATHERED = {
    "vllm.entrypoints.pooling.base.serving": ("of_one_version", "PoolingBaseServing", "PoolingServingBase"),
    "vllm.entrypoints.pooling.scoring.serving": ("scored_here", "ServingScores"),
    "vllm.entrypoints.pooling.offline": ("offline_pooling_of_one_version", "PoolingOfflineMixin"),
    "vllm.entrypoints.generate.beam_search.online": ("beams_of_one_version", "BeamSearchOnlineMixin"),
    "vllm.entrypoints.generate.beam_search.offline": ("offline_beams_of_one_version", "BeamSearchOfflineMixin"),
    "vllm.entrypoints.generate.generative_scoring.serving": (
        "generative_scores_of_one_version",
        "ServingGenerativeScoring",
    ),
    "vllm.entrypoints.speech_to_text.base.serving": (
        "transcripts_of_one_version",
        "SpeechToTextBaseServing",
        "OpenAISpeechToText",
    ),
}
ADDITIONS |= {name: partial(_add_gathered, wrapper, classes) for name, (wrapper, *classes) in GATHERED.items()}


def _add(name: str, add: Callable[[Any], None], module: Any) -> None:
    try:
        add(module)
    except Exception as error:
        _debug("tensorhub: nothing added to %s: %r", name, error)


def _debug(text: str, *values: object) -> None:
    from tensorhub_plugins.core.log import get_logger  # nothing of ours is imported where nothing goes wrong

    get_logger(__name__).debug(text, *values)


def after_import(calls: dict[str, Callable[[Any], None]]) -> None:
    """Call each of these with the module of that name, now or once it has been imported.

    Raises what a call raises, out of the import if that comes later."""
    waited_for = {name for finder in sys.meta_path if isinstance(finder, _AfterImport) for name in finder.waiting}
    waiting = {}
    for name, call in calls.items():
        if name in sys.modules:
            call(sys.modules[name])
        elif name not in waited_for:
            waiting[name] = call
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself, but notices when one of these modules has been imported."""

    def __init__(self, waiting: dict[str, Callable[[Any], None]]) -> None:
        self.waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        call = self.waiting.pop(name, None)  # once, and not again by the search below
        if call is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
