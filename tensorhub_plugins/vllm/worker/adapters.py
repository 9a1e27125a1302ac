"""A LoRA adapter as a worker's second target: fetched, voted on and served as weights are (updater.py), and built and
swapped by vLLM's own LoRA manager, from memory.

    fetched      vLLM builds its LoRAModel of it, by its own checks; then `misfits` compares names, shapes and rank with
                 the model's, which vLLM does not. What does not fit is refused here, while the old one answers.
    installed    vLLM's `add_adapter` replaces the old one under the same id. If that fails in any worker, all put the
                 old one back, and answer from it.
    later        vLLM may evict an adapter, as others are used; it then asks for it again by the path of its request,
                 and gets the installed version.

The base weights are none of this: they stay what the engine started with.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch

from tensorhub_plugins.core import (
    CHECKPOINT,
    Deadline,
    NotPublished,
    ShardKey,
    TensorHubError,
    UsageError,
    VersionRefused,
    run_log,
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.lora import BASE, PATH, adapter_of, lora_request
from tensorhub_plugins.vllm.model_facts import differences, facts_of
from tensorhub_plugins.vllm.plugin import wrap
from tensorhub_plugins.vllm.worker import update_state
from tensorhub_plugins.vllm.worker.checkpoint_contract import some
from tensorhub_plugins.vllm.worker.update_state import Staged
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import Gather, ShardPosition, Steps, anyone

logger = get_logger(__name__)

# The tensors and the configuration of which vLLM builds now, in this thread.
_building: ContextVar[tuple[dict[str, torch.Tensor], dict[str, Any]] | None] = ContextVar("building", default=None)
PREFIX = "base_model.model."  # of PEFT's names; vLLM takes them without it as well
RETRY_S = 1.0  # before the first version is tried again
PATTERNS = ("rank_pattern", "alpha_pattern")  # of modules with a rank or scaling of their own; vLLM since 0.32


class AdapterUpdater(Updater):
    """One adapter of one worker. Every worker reads all of it: vLLM cuts out what it needs."""

    def __init__(
        self, config: WorkerConfig, name: str, manager: Any, vllm_config: Any, gather: Gather, shard: int
    ) -> None:
        """Join the adapter's history. manager: vLLM's worker_manager of the model runner."""
        replica = f"{config.replica}-{shard}" if shard else config.replica
        changes = {"model": name, "replica": replica, "install": "staged", "serve_from": "host"}
        self.name, self.request = name, lora_request(name)
        self._manager, self._facts = manager, facts_of(vllm_config.model_config.hf_config)
        self._built: tuple[int, Any] = (0, None)  # the version that arrived last, and vLLM's LoRAModel of it
        self._live: tuple[int, Any] = (0, None)  # the same, of the installed one
        self._before = self._live  # of the one before, which comes back if an install fails
        self._was_in_use = False  # by the layers, when it was replaced
        self._read_from_memory()
        position = ShardPosition(0, 1, CHECKPOINT)
        super().__init__(
            msgspec.structs.replace(config, **changes), manager._adapter_manager.model, vllm_config, position, gather
        )
        self._name = f"{config.replica}.{name}/{shard}"  # in the journal, beside the other adapters of this engine

    def _know(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Prepare for an adapter instead of weights."""
        self.addresses = cast(Any, SimpleNamespace(check=lambda **_: None))  # an adapter's tensors are vLLM's to move
        self._steps = Steps(self.gather, together=False)

    def install_first(self, wait_s: float) -> None:
        """Wait for the first version and install it, in all workers at once, before the engine answers anything. Raise
        TensorHubError when none that fits has come by then."""
        deadline, refused = Deadline.after(wait_s), dict[int, str]()
        while True:
            try:
                version = self.resolve(deadline.remaining(), refused)
            except NotPublished as error:
                why = "".join(f"; version {each} was refused: {reason}" for each, reason in refused.items())
                raise NotPublished(f"adapter {self.name}: {error.message}{why}", timeout_s=wait_s) from error
            result = self.update(version, deadline.remaining())
            if not anyone(self.gather, not result["installed"]):
                return
            logger.warning("%s: adapter %s: version %d: %s", self._name, self.name, version, result["error"])
            if anyone(self.gather, self.poll()["error_kind"] == VersionRefused.__name__):
                refused[version] = str(result["error"])
            elif anyone(self.gather, deadline.expired):
                raise TensorHubError(f"adapter {self.name}: {result['error']}", version=version, timeout_s=wait_s)
            else:
                time.sleep(min(RETRY_S, deadline.remaining()))

    # --- what vLLM reads ---

    def _read_from_memory(self) -> None:
        """Have this worker's LoRA manager take the store's adapters from here, and read them from memory."""
        manager, others = self._manager, self._manager._load_adapter
        known: dict[int, AdapterUpdater] = vars(manager).setdefault("tensorhub_adapters", {})
        other = known.get(self.request.lora_int_id, self)
        if other.name != self.name:
            raise UsageError(f"vLLM could not tell adapters {other.name!r} and {self.name!r} apart: rename one of them")
        is_first, known[self.request.lora_int_id] = not known, self
        if not is_first:
            return

        def load_adapter(request: Any) -> Any:
            ours = known.get(request.lora_int_id)
            if ours is None and not request.lora_path.startswith(PATH):
                return others(request)
            if ours is None or ours.request.lora_path != request.lora_path:
                raise ValueError(
                    f"adapter {request.lora_name!r} (id {request.lora_int_id}, path {request.lora_path}) is not one of "
                    f"the store's here, which are {some(sorted(each.name for each in known.values()))}: make its "
                    "request by tensorhub_plugins.vllm.lora_request"
                )
            _, built = ours._live  # what is installed, or being installed
            if built is None:
                raise ValueError(f"adapter {ours.name!r} has not come yet: wait until a version of it is installed")
            return built.clone(ours.request.lora_int_id)

        manager._load_adapter = load_adapter
        _read_from_memory(manager)

    def _build(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have vLLM make its LoRAModel; VersionRefused says what does not fit, and keeps nothing."""
        from vllm.lora.worker_manager import WorkerLoRAManager

        adapter, config = adapter_of(tensors)
        if wrong := differences(self._facts, config.get(BASE, {})):
            raise VersionRefused(f"the adapter is of another base model: {'; '.join(wrong)}")
        _check_patterns(config)
        others = [f"{name} {tensor.dtype}" for name, tensor in adapter.items() if not tensor.is_floating_point()]
        if others:
            raise VersionRefused(f"the adapter has tensors that are no floats: {some(others)}")
        if wild := [name for name, tensor in adapter.items() if not tensor.sum(dtype=torch.float64).isfinite()]:
            # Its requests would leave NaN in blocks of KV that others get, without it or with another adapter.
            raise VersionRefused(f"the adapter has NaN or Inf: {some(wild)}")
        plain = Counter(name.removeprefix(PREFIX) for name in adapter)  # vLLM knows both forms, and would take the last
        if twice := [name for name, count in plain.items() if count > 1]:
            raise VersionRefused(f"the adapter has two tensors of one name, with and without {PREFIX!r}: {some(twice)}")
        # Copies: vLLM keeps what it is given, and scales it in place.
        said = _building.set(({name: tensor.clone() for name, tensor in adapter.items()}, config))
        try:
            # vLLM's own, of the class: a framework may have put another one (verl's) into the class that is in use.
            built = WorkerLoRAManager._load_adapter(self._manager, self.request)
            wrong = list(misfits(built, self._manager._adapter_manager, config))
            if not wrong:  # vLLM packs what fused layers take when it swaps, too: then there is nothing left to pack
                self._manager._adapter_manager._create_merged_loras_inplace(built)
        except Exception as error:
            raise VersionRefused(f"vLLM does not take this adapter: {type(error).__name__}: {error}") from error
        finally:
            _building.reset(said)
        if wrong:
            raise VersionRefused(f"the adapter does not fit this model: {some(wrong)}")
        self._built = version, built

    # --- fetching, in the background thread ---

    def _acquire(self, version: int, deadline: Deadline, in_place: bool) -> Staged:
        staged = self._get(version, (CHECKPOINT,), deadline, serve=True)
        assert staged.fetched is not None
        try:
            self._build(version, staged.fetched.tensors())
        except BaseException as error:
            self._drop(staged)
            if isinstance(error, VersionRefused):
                raise VersionRefused(error.message, version=version) from error
            raise
        return staged

    # --- installing, in vLLM's own thread ---

    def _rehearse(self, staged: Staged) -> None:
        if self._built[0] != staged.version:
            raise UsageError(f"adapter {self.name!r}: version {staged.version} is not built", version=staged.version)

    def _change(self, version: int, deadline: Deadline) -> None:
        self._before, self._live = self._live, self._built
        self._was_in_use = self.request.lora_int_id in self._manager._adapter_manager.lora_index_to_id
        self._swap()

    def _swap(self) -> None:
        """Have vLLM's manager replace whatever it has under this id by what is live."""
        self._manager.add_adapter(msgspec.structs.replace(self.request, load_inplace=True))

    def install(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Install the adapter, as `Updater.install` does. After a failure all workers restore the former adapter."""
        result = super().install(version, timeout_s)
        if not result["broken"]:
            return result
        if self._steps.vote(version, self._undo()):
            before = self._live[0]
            self._handle(update_state.ServeCurrentAs(before) if before else update_state.Unversioned(mended=True))
            logger.warning("%s: adapter %s is version %d again", self._name, self.name, before)
        return {**result, "broken": self._state.broken, "version": self._state.version}

    def _undo(self) -> bool:
        """Return whether the old adapter is back. One that the layers did not hold comes when vLLM asks for it; the
        first one had none, and requests for it fail as before."""
        self._live = self._before
        try:
            self.evict()
            if self._was_in_use:
                self._swap()
        except Exception:
            logger.exception("%s: adapter %s cannot be put back", self._name, self.name)
            return False
        return True

    def evict(self) -> None:
        """Have vLLM ask for it again at its next request: its memory was lost, as by a sleep."""
        self._manager.remove_adapter(self.request.lora_int_id)

    # --- serving, in the background thread ---

    def _serve(self, staged: Staged) -> None:
        """Go on to serve what was fetched, and stop serving the version before."""
        try:
            if ShardKey(staged.version, CHECKPOINT, 0, 1) in self._client.serving():
                run_log.record("serve", worker=self._name, version=staged.version, layout=CHECKPOINT, bytes=0)
            self._handle(update_state.Served(staged.version))
            if staged.fetched is not None:
                staged.fetched.release()
        except TensorHubError as error:
            logger.warning("%s: version %d of adapter %s: %s", self._name, staged.version, self.name, error)


def misfits(built: Any, manager: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of vLLM's LoRAModel does not fit the model's modules, in words; vLLM ignores a module that is not
    there, and takes a matrix that is too small."""
    parts = {module: manager.packed_modules.get(module, [module]) for module in manager.modules}
    places = {name: (module, place) for module, names in parts.items() for place, name in enumerate(names)}
    if getattr(manager, "is_pooling_model", False):  # vLLM takes these without the name of what has the head
        places |= {name.removeprefix("model."): place for name, place in places.items()}
    if not built.loras:
        yield "it has no matrix of any module"
    for name, matrices in built.loras.items():
        if matrices.lora_a is None or matrices.lora_b is None:
            yield f"{name} has only one of its two matrices"
            continue
        if ".experts" in name:  # fused in ways of their own; vLLM compares these as it packs them
            continue
        if name not in places:
            yield f"{name} is no module of this model that takes adapters"
            continue
        if matrices.lora_a.ndim != 2 or matrices.lora_b.ndim != 2:
            yield f"{name} has tensors of shapes {[*matrices.lora_a.shape]} and {[*matrices.lora_b.shape]}, no matrices"
            continue
        rank, module, place = matrices.lora_a.shape[0], *places[name]
        if rank != matrices.lora_b.shape[1]:
            yield f"{name} has matrices of ranks {rank} and {matrices.lora_b.shape[1]}"
        elif rank > manager.lora_config.max_lora_rank:
            yield f"{name} has rank {rank}, above max_lora_rank={manager.lora_config.max_lora_rank}"
        elif rank != config["r"] and not any(config.get(pattern) for pattern in PATTERNS):
            yield f"{name} has rank {rank}, and the configuration says r={config['r']}"
        given = matrices.lora_a.shape[1], matrices.lora_b.shape[0]
        wanted = _sizes(manager.modules[module], place, len(parts[module]))
        if wanted is not None and given != wanted:
            yield f"{name} is from {given[0]} to {given[1]}, and the model's from {wanted[0]} to {wanted[1]}"


def _sizes(wrapped: Any, place: int, parts: int) -> tuple[int, int] | None:
    """Return the features that one of the parts of a layer takes and gives, of all ranks; None: it is not known."""
    layer = wrapped.base_layer
    if isinstance(wrapped.lora_a_stacked, torch.Tensor):  # an embedding, whose vocabulary is an axis, or a head
        takes = wrapped.lora_a_stacked.shape[1 if wrapped.lora_a_stacked.ndim == 3 else -1]
        return takes, wrapped.lora_b_stacked.shape[-2]
    if not hasattr(layer, "input_size") or not hasattr(layer, "output_size"):
        return None
    sizes = list(getattr(layer, "output_sizes", [layer.output_size]))
    if hasattr(layer, "total_num_kv_heads"):  # its sizes count the heads that several ranks share once for each
        heads = layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads
        each = layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size)
        sizes = [count * size for count, size in zip(heads, each, strict=True)]
    if parts in (1, len(sizes)):
        return layer.input_size, sum(sizes) if parts == 1 else sizes[place]
    return None


def _check_patterns(config: Mapping[str, Any]) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    if hasattr(PEFTHelper, "get_rank_and_scaling"):
        return
    for pattern in PATTERNS:
        if config.get(pattern):
            raise VersionRefused(f"the adapter has a {pattern}, which this vLLM does not apply: use one rank and alpha")


def _read_from_memory(manager: Any) -> None:
    """Have what vLLM builds while `_building` is set be built of that, and not of files."""
    from vllm.lora import lora_model, worker_manager

    base = manager._lora_model_cls
    takes = set(inspect.signature(base.from_lora_tensors).parameters)

    class FromMemory(base):  # type: ignore[misc, valid-type]
        @classmethod
        def from_local_checkpoint(cls, *args: Any, **given: Any) -> Any:
            building = _building.get()
            if building is None:
                return super().from_local_checkpoint(*args, **given)
            tensors, experts = building[0], given.get("moe_ep_spec")
            if experts is not None:
                is_elsewhere = lora_model._is_remote_expert_key
                tensors = {name: each for name, each in tensors.items() if not is_elsewhere(name, experts)}
            return cls.from_lora_tensors(tensors=tensors, **{name: given[name] for name in takes & set(given)})

    manager._lora_model_cls = FromMemory
    helper = worker_manager.PEFTHelper

    def from_local_dir(original: Any, path: str, max_position_embeddings: int | None, *args: Any, **given: Any) -> Any:
        building = _building.get()
        if building is None:
            return original(path, max_position_embeddings, *args, **given)
        return helper.from_dict({**building[1], "vllm_max_position_embeddings": max_position_embeddings})

    wrap(helper, "from_local_dir", from_local_dir)
