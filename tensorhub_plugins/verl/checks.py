"""PURE: what verl's configuration means for the store. Told in sentences, or refused in one.

The driver asks before Ray starts (driver.py), and so does `tensorhub doctor verl` (doctor.py).
"""

from __future__ import annotations

from typing import Any

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.options import Need, says_need
from tensorhub_plugins.verl import config
from tensorhub_plugins.verl.config import BACKEND, FLEET, LORA, ROLLOUT, ROUTER, WHERE, Options, spans_of

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of a number, in bytes
DROP_IN_COPIES = 2  # every worker has all of a version, and the one before until it is there
SEPARATE = "trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False"
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"


def concerns_store(root: Any) -> bool:
    """Whether a configuration of verl names the store; others are none of ours."""
    rollout = _get(root, "actor_rollout_ref", "rollout")
    backend, module = _get(rollout, "checkpoint_engine", "backend"), _get(rollout, *_MODULE)
    return BACKEND in (backend or "") or _get(rollout, "name") == ROLLOUT or "tensorhub_plugins" in (module or "")


_MODULE = ("checkpoint_engine", "custom_backend_module")


def check(root: Any) -> tuple[Options, list[str]]:
    """The store's options and what will happen, one sentence each; UsageError for what cannot work.

    root: verl's whole configuration, for which `concerns_store` is true.
    """
    rollout = _get(root, "actor_rollout_ref", "rollout")
    pulls = _get(rollout, "name") == ROLLOUT
    check_backend(rollout)
    options = config.parse(_get(rollout, "checkpoint_engine", "engine_kwargs", BACKEND))
    said = [check_mode(root), f"weights: {says_parts(root, options)}", f"dtype: {says_dtype(options)}"]
    fleet = check_fleet(options, rollout)
    check_model(_get(root, "actor_rollout_ref", "model"))
    if pulls:
        check_parallel(rollout)
        engines = _engines(rollout)
        said.append(f"pull mode: each of {engines} engines fetches every version by itself, while it generates")
        if spans_of(options.spans, rollout) == "oldest":
            said.append("samples of several versions are reported as of their oldest, verl's client knows no other way")
    else:
        said.append(
            f"drop-in: verl stops all engines for every version, and waits for the slowest; rollout.name={ROLLOUT} "
            "lets each of them go on"
        )
    if fleet:
        said.append(fleet)
    where = f"at {options.hub}" if options.hub else "started on Ray's head node; its address is printed"
    said.append(f"hub: {where}; run: {options.run or 'a new name for every job'}")
    return options, said


def check_backend(rollout: Any) -> None:
    backend = _get(rollout, "checkpoint_engine", "backend")
    if _get(rollout, "name") is None:
        raise UsageError(f"actor_rollout_ref.rollout.name is not set: set it to {ROLLOUT} (pull mode), or to vllm")
    if backend == BACKEND:
        return
    if _get(rollout, "name") == ROLLOUT:
        raise UsageError(
            f"rollout.name={ROLLOUT} follows the store, but {ENGINE}.backend is {backend!r}: set it to {BACKEND!r}"
        )
    raise UsageError(
        f"{ENGINE}.backend is {backend!r}: for the store set it to {BACKEND!r}, or leave out "
        "custom_backend_module=tensorhub_plugins.verl"
    )


def check_model(model: Any) -> None:
    """Adapters: verl gives the store the base weights alone, which never change."""
    lora = _get(model, "lora")
    if (_get(model, "lora_rank") or _get(lora, "rank") or 0) > 0 and not _get(lora, "merge"):
        raise UsageError(LORA)


def says_parts(root: Any, options: Options) -> str:
    """Whether trainer ranks publish what they hold, or gather whole tensors, and why; see parts.py."""
    reference = _get(root, "actor_rollout_ref")
    strategy, lora = _get(reference, "actor", "strategy"), _get(reference, "model", "lora")
    if not options.parts:
        why = f"{WHERE}.parts=false"
    elif strategy not in ("fsdp", "fsdp2"):
        why = f"verl's {strategy} engine hands over whole tensors only"
    elif (_get(reference, "model", "lora_rank") or _get(lora, "rank") or 0) > 0:
        why = "LoRA: verl merges the adapter into whole tensors"
    elif _get(reference, "actor", "fsdp_config", "qat", "enable"):
        why = "quantization-aware training quantizes whole tensors"
    else:
        return f"each trainer rank publishes the part that {strategy} gave it, and nothing is gathered"
    return f"whole tensors are gathered to every trainer rank ({why})"


def says_memory(root: Any, options: Options, elements: int | None) -> list[str]:
    """What hosts need, of a model of so many numbers. UsageError for more than a budget that is kept."""
    if elements is None:
        return ["memory: the model is not on this machine, so every worker says at its start what it takes"]
    trainer, rollout = _get(root, "trainer"), _get(root, "actor_rollout_ref", "rollout")
    size_bytes = elements * SIZES[options.dtype or "float32"]
    here = int(_get(trainer, "n_gpus_per_node") or 1)
    share = size_bytes // max(1, here * int(_get(trainer, "nnodes") or 1))
    said = says_need(options, "each trainer rank", Need(share, options.keep + 1), here)
    workers = int(_get(rollout, "n_gpus_per_node") or 0) or here
    if _get(rollout, "name") == ROLLOUT:
        need = Need(size_bytes // int(_get(rollout, "tensor_model_parallel_size") or 1), options.copies)
    else:
        need = Need(size_bytes, DROP_IN_COPIES)
    return [f"memory: {said}", f"memory: {says_need(options, 'each rollout worker', need, workers)}"]


def says_dtype(options: Options) -> str:
    if options.dtype is None:
        return "weights are published as the trainer has them"
    return (
        f"matrices are published as {options.dtype} ({WHERE}.dtype), routers and what has one dimension as the trainer "
        "has them"
    )


def check_parallel(rollout: Any) -> None:
    """What verl refuses where rollout.name is vllm, and would take here."""
    if (_get(rollout, "data_parallel_size") or 1) > 1:
        raise UsageError(
            f"rollout.data_parallel_size is {rollout.data_parallel_size}: with {ROLLOUT} every engine is a replica of "
            "its own, so set it to 1; verl then starts as many replicas as the GPUs allow"
        )
    if (_get(rollout, "pipeline_model_parallel_size") or 1) > 1:
        raise UsageError(
            f"rollout.pipeline_model_parallel_size is {rollout.pipeline_model_parallel_size}: verl starts vLLM without "
            "it, and would reserve GPUs that nobody uses; set it to 1 and tensor_model_parallel_size higher"
        )


def check_fleet(options: Options, rollout: Any) -> str:
    """What becomes of the number of replicas; "" where it stays. UsageError for options that would do nothing."""
    router = _get(rollout, "router_config_path")
    if _get(rollout, "name") != ROLLOUT:
        why = f"drop-in mode has a fixed number of engines: set rollout.name={ROLLOUT}"
    elif _get(rollout, "full_determinism"):
        why = "rollout.full_determinism has verl's own router, which knows no fleet: switch it off"
    elif router not in (None, str(ROUTER)):
        why = f"the router of rollout.router_config_path={router} knows no fleet: leave that out"
    else:
        target = options.fleet_policy or options.fleet_target or "as many replicas as verl starts"
        bounds = f"at least {options.fleet_min}, at most {options.fleet_max}"
        return f"fleet: {target}, {bounds}; `tensorhub fleet` adds and drains"
    asked = [name for name in FLEET if getattr(options, name) != getattr(Options(), name)]
    if asked:
        raise UsageError(f"{WHERE}.{asked[0]} would do nothing: {why}, or leave it out")
    return ""


def check_mode(root: Any) -> str:
    """Which trainer this is, in a sentence; UsageError for one whose engines get their weights another way."""
    rollout, trainer = _get(root, "actor_rollout_ref", "rollout"), _get(root, "trainer")
    if _get(root, "async_training") is not None:
        return "trainer: fully_async"
    if _get(root, "rollout") is not None:
        return "trainer: one_step_off"
    mode = _get(trainer, "v1", "trainer_mode")
    if _get(trainer, "use_v1") is False or mode != "separate_async":
        name = "the legacy trainer (trainer.use_v1=False)" if _get(trainer, "use_v1") is False else f"trainer {mode!r}"
        raise UsageError(
            f"{name} shares its GPUs with the engines and hands them the weights inside the GPU (CUDA IPC); verl gives "
            f"it no engines anywhere else, so the store would do nothing: add {SEPARATE} "
            "actor_rollout_ref.rollout.nnodes=... actor_rollout_ref.rollout.n_gpus_per_node=..., or leave the store's "
            "lines out"
        )
    return _separate_async(root, rollout, trainer)


def _separate_async(root: Any, rollout: Any, trainer: Any) -> str:
    """The trainer's own conditions, which it finds broken a minute after its start."""
    if not _get(rollout, "nnodes") or not _get(rollout, "n_gpus_per_node"):
        raise UsageError(
            "trainer 'separate_async' needs GPUs of its own for the engines: set actor_rollout_ref.rollout.nnodes and "
            "actor_rollout_ref.rollout.n_gpus_per_node"
        )
    per_step = _get(trainer, "v1", "separate_async", "parameter_sync_step") or 1
    batch, mini = (
        _get(root, "data", "train_batch_size"),
        _get(root, "actor_rollout_ref", "actor", "ppo_mini_batch_size"),
    )
    if batch is not None and mini is not None and batch != per_step * mini:
        raise UsageError(
            f"data.train_batch_size is {batch}, and verl wants parameter_sync_step ({per_step}) times "
            f"ppo_mini_batch_size ({mini}): set trainer.v1.separate_async.parameter_sync_step=1 (verl's default is 4) "
            f"and actor_rollout_ref.actor.ppo_mini_batch_size={batch}"
        )
    if _get(root, "actor_rollout_ref", "hybrid_engine") is not False:
        return (
            "trainer: separate_async, hybrid: the engines on GPUs of their own are served by the store, those on the "
            "trainer's GPUs by verl (actor_rollout_ref.hybrid_engine=False leaves the latter out)"
        )
    return "trainer: separate_async"


def _engines(rollout: Any) -> int:
    gpus = (_get(rollout, "nnodes") or 0) * (_get(rollout, "n_gpus_per_node") or 0)
    return int(gpus // (_get(rollout, "tensor_model_parallel_size") or 1))


def _get(tree: Any, *names: str) -> Any:
    for name in names:
        tree = None if tree is None else tree.get(name)
    return tree
