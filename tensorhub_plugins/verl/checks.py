"""PURE: what verl's configuration means for the store. Told in sentences, or refused, each thing in one.

The driver asks before Ray starts (driver.py), and so does `tensorhub doctor verl` (doctor.py), which asks verl's own
checks besides (stock.py): what verl refuses by itself is not looked at here, unless there is advice to give.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import msgspec

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.options import Need, gigabytes
from tensorhub_plugins.verl import config
from tensorhub_plugins.verl.config import BACKEND, FLEET, MERGE, ROLLOUT, ROUTER, WAY_OUT, WHERE, Options
from tensorhub_plugins.verl.versions import check_pieces, reported_as
from tensorhub_plugins.vllm import drafts
from tensorhub_plugins.vllm.outlook import (
    BESIDE,
    Model,
    Outlook,
    adapter_summary,
    check_number,
    count,
    fleet_summary,
    gpus_summary,
    is_meant,
    memory_summary,
    recovery_summary,
)

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of a number, in bytes
# verl's names of what a model is trained in (PrecisionType).
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
}
DROP_IN_COPIES = 2  # every worker has all of a version, and the one before until it is there
COLOCATED = ("sync", "colocate_async")  # trainers of verl that share their GPUs with the engines
SEPARATE = "trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
REFUSED_BY_WORKERS = {  # vLLM's options, and what they would do to updates
    "enable_lora": "adapters over the weights",
    "worker_extension_cls": "they have the store's",
    "enable_eplb": "moves experts at run time",
    "kv_transfer_config": "KV of former weights may come back",
    "kv_offloading_size": "KV of former weights may come back",
    "calculate_kv_scales": "KV is scaled by what the first weights made",
    "ec_transfer_config": "what encoders made may come back",
    "cpu_offload_gb": "weights stay in host memory",
    "offload_group_size": "layers are refilled from host memory",
    "engram_config": "embeddings stay in host memory",
    "kernel_config.monokernel": "kernels read weights that they have packed for themselves",
    "compilation_config.inductor_compile_config.freezing": "compiled code has weights in it",
}
# Quantization that makes something of floats, which verl publishes, and is known to follow updates.
OF_FLOATS = (
    *("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "int8_per_channel_weight_only"),
    *("experts_int8", "online", "ascend"),  # `online` says which of them elsewhere, `ascend` is of NPUs
)
DROP_IN = (
    "in drop-in mode verl does not hand a LoRA adapter to its engines: set actor_rollout_ref.rollout.name="
    f"{ROLLOUT} (pull mode), or {MERGE}"
)
RESUME = ("disable", "auto", "resume_path")
POOLS = ("trainer", "actor_rollout_ref.rollout", "rollout", "reward.reward_model", "distillation")
KINDS = ("tensor_model", "data", "pipeline_model", "expert")
# The least that an option may be, and what stands for a wrong one while the others are looked at.
NUMBERS: dict[str, tuple[int, int | None]] = {
    **{f"{pool}.{name}": (0, 1) for pool in POOLS for name in ("nnodes", "n_gpus_per_node")},
    **{f"actor_rollout_ref.rollout.{kind}_parallel_size": (1, 1) for kind in KINDS},
    "data.train_batch_size": (0, None),
    **dict.fromkeys(("data.max_prompt_length", "data.max_response_length"), (1, 1)),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (1, None),
    "actor_rollout_ref.actor.ppo_epochs": (1, 1),
    **{f"actor_rollout_ref.rollout.{name}": (1, 1) for name in ("n", "val_kwargs.n", "agent.num_workers")},
    "reward.num_workers": (1, 1),
    SYNC_STEP: (1, 1),
    "actor_rollout_ref.model.lora_rank": (0, 0),
    "actor_rollout_ref.model.lora.rank": (0, 0),
    "trainer.total_epochs": (1, 1),
    **{"trainer.critic_warmup": (0, 0), "trainer.test_freq": (-1, -1), "trainer.save_freq": (-1, -1)},
    **dict.fromkeys(("trainer.total_training_steps", "rollout.total_rollout_steps"), (1, None)),
    **{f"async_training.{name}": (1, 1) for name in ("require_batches", "concurrent_samples_per_replica")},
}
NEVER_NULL = ("trainer.", "async_training.")  # with what stands for a wrong one: verl compares it, minutes later


def concerns_store(root: Any) -> bool:
    """Return whether a configuration of verl names the store; others are none of ours."""
    rollout = get(root, "actor_rollout_ref", "rollout")
    backend, module = get(rollout, "checkpoint_engine", "backend"), get(rollout, *_MODULE)
    return BACKEND in (backend or "") or get(rollout, "name") == ROLLOUT or "tensorhub_plugins" in (module or "")


_MODULE = ("checkpoint_engine", "custom_backend_module")


def settle(root: Any) -> list[str]:
    """Refuse what is not of the kind that it is counted or read as, and put in its place what lets the others be
    looked at. To be called before anything else here."""
    wrong = []
    for option, (least, stands_for) in NUMBERS.items():
        *parents, name = option.split(".")
        place = get(root, *parents)
        value, is_needed = get(place, name), stands_for is not None and option.startswith(NEVER_NULL)
        if value is not None or (is_needed and name in (place or ())):
            try:
                check_number(value, option, least)
            except UsageError as error:
                wrong.append(error.message)
                place[name] = stands_for
    engine = get(root, "actor_rollout_ref", "rollout", "checkpoint_engine")
    for place, name, option in ((engine, "engine_kwargs", ""), (get(engine, "engine_kwargs"), BACKEND, ".keep")):
        value = get(place, name)
        if value is not None and not isinstance(value, Mapping):
            where = WHERE if option else f"{ENGINE}.{name}"
            wrong.append(f"{where} is {value!r}: it has options, such as {WHERE}.keep=2")
            place[name] = {}
    return wrong


def check(root: Any) -> tuple[Options, Outlook]:
    """Return the store's options (verl's defaults where they are wrong), and what will happen or is wrong.

    root: verl's whole configuration, for which `concerns_store` is true."""
    rollout = get(root, "actor_rollout_ref", "rollout")
    outlook = Outlook()
    outlook.ask(check_backend, rollout)
    given = get(rollout, "checkpoint_engine", "engine_kwargs", BACKEND)
    options = outlook.ask(config.parse, given) or Options()
    outlook.ask(check_kwargs, rollout)
    outlook.ask(check_name, rollout, options)
    outlook.tell(check_mode, root)
    if is_served(root):
        outlook.ask(check_batch, root)
        outlook.ask(check_trainer, get(root, "trainer"))
        outlook.ask(check_ranks, root)
        outlook.tell(check_engines, root)
    outlook.said.append(f"weights: {parts_summary(root, options)}")
    outlook.said.append(f"dtype: {dtype_summary(options)}")
    outlook.ask(check_resume, get(root, "trainer"))
    outlook.tell(check_recovery, root, options)
    outlook.ask(check_path, get(root, "actor_rollout_ref", "model"))
    outlook.tell(check_adapter, root, options)
    outlook.ask(check_gather, get(root, "actor_rollout_ref", "actor"))
    outlook.ask(check_drafts, rollout)
    if get(rollout, "name") == ROLLOUT:
        outlook.ask(check_parallel, rollout)
        outlook.ask(check_engine_kwargs, rollout)
        outlook.ask(check_pieces, options, rollout)
        outlook.said.append(
            f"pull mode: each of {count(engines_of(root).number, 'engine')} fetches every version by itself, while it "
            "generates"
        )
        if reported_as(options.spans, rollout) == "oldest":
            outlook.said.append(
                "samples of several versions are reported as of their oldest, verl's client knows no other way"
            )
    else:
        outlook.said.append(
            f"drop-in: verl stops all engines for every version, and waits for the slowest; rollout.name={ROLLOUT} "
            "lets each of them go on"
        )
    outlook.tell(check_fleet, options, rollout)
    where = f"at {options.hub}" if options.hub else "started on Ray's head node; its address is printed"
    outlook.said.append(f"hub: {where}; run: {options.run or 'a new name for every job'}")
    return options, outlook


class Engines(NamedTuple):
    """What verl starts of engines on GPUs of their own."""

    number: int
    gpus: int  # of one
    gpus_here: int  # of one, on one node
    nodes: int
    gpus_per_node: int
    where: str  # the options that say so


def engines_of(root: Any) -> Engines:
    """Return the engines as verl counts them. one_step_off and fully_async have options of their own for the nodes of
    rollouts."""
    rollout, where = get(root, "actor_rollout_ref", "rollout"), "actor_rollout_ref.rollout"
    place = rollout
    if get(root, "rollout") is not None:
        place, where = get(root, "rollout"), "rollout"
    nodes, per_node = int(get(place, "nnodes") or 0), int(get(place, "n_gpus_per_node") or 0)
    size = gpus_of_engine(rollout)
    return Engines(nodes * per_node // size, size, min(size, per_node), nodes, per_node, where)


def gpus_of_engine(rollout: Any) -> int:
    kinds = ("tensor_model", "data", "pipeline_model")
    sizes = [int(get(rollout, f"{kind}_parallel_size") or 1) for kind in kinds]
    return sizes[0] * sizes[1] * sizes[2]


def check_trainer(trainer: Any) -> None:
    """Check the trainer's GPUs, without which verl makes a trainer of no ranks."""
    if not get(trainer, "nnodes") or not get(trainer, "n_gpus_per_node"):
        raise UsageError("the trainer needs GPUs: set trainer.nnodes and trainer.n_gpus_per_node to 1 or more")


def check_ranks(root: Any) -> None:
    """Check how the trainer's ranks divide, and a batch among them, which verl asserts in its first update."""
    reference, trainer = get(root, "actor_rollout_ref"), get(root, "trainer")
    actor, ranks = get(reference, "actor"), (get(trainer, "nnodes") or 0) * (get(trainer, "n_gpus_per_node") or 0)
    strategy, place = get(actor, "strategy"), "actor_rollout_ref.actor"
    if not ranks or strategy not in ("fsdp", "fsdp2", "megatron"):
        return
    kinds = [f"megatron.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")]
    kinds = kinds if strategy == "megatron" else ["ulysses_sequence_parallel_size"]
    sizes = {f"{place}.{kind}": get(actor, *kind.split(".")) for kind in kinds}
    if None in sizes.values():  # without a configuration for this strategy, which verl refuses
        return
    together, names = prod(sizes.values()), " times ".join(name for name, size in sizes.items() if size > 1)
    if ranks % together:
        raise UsageError(f"the trainer has {ranks} ranks, which is no multiple of {together} ({names})")
    shards = get(actor, "fsdp_config", "fsdp_size")
    if strategy != "megatron" and isinstance(shards, int) and shards > 0 and ranks % shards:
        words = f"{place}.fsdp_config.fsdp_size is {shards}, and the trainer's {ranks} ranks are no multiple of it"
        raise UsageError(f"{words}: set a divisor, or -1 for all of them")
    mini, samples = get(actor, "ppo_mini_batch_size"), get(reference, "rollout", "n") or 1
    if mini and mini * samples % (ranks // together):
        raise UsageError(
            f"{place}.ppo_mini_batch_size ({mini}) times actor_rollout_ref.rollout.n ({samples}) is no multiple of the "
            f"{ranks // together} ranks that share a batch: verl stops at its first update"
        )


def check_resume(trainer: Any) -> None:
    """Check what verl finds wrong only once all models are loaded."""
    mode, path = get(trainer, "resume_mode"), get(trainer, "resume_from_path")
    if mode not in (None, *RESUME):
        raise UsageError(
            f"trainer.resume_mode is {mode!r}, which verl does not know: choose one of {', '.join(RESUME)}"
        )
    if mode == "resume_path" and "global_step_" not in (path if isinstance(path, str) else ""):
        raise UsageError(
            f"trainer.resume_mode=resume_path, and trainer.resume_from_path is {path!r}: name the folder "
            "global_step_... of a checkpoint"
        )


def check_recovery(root: Any, options: Options) -> str:
    """Return where a run that resumes has its weights from; "" where that is as ever. Raise UsageError where the
    checkpoint would be loaded each time."""
    mode = options.recover_weights
    if mode == "off":
        return ""
    actor, model = (get(root, "actor_rollout_ref", name) for name in ("actor", "model"))
    trained = DTYPES.get(str(get(actor, "fsdp_config", "model_dtype") or "float32"))
    if options.hub is None or options.run is None:
        why = f"the run's own hub ends with it: set {WHERE}.hub and {WHERE}.run"
    elif (
        trains_lora(model)
        or get(actor, "strategy") not in ("fsdp", "fsdp2")
        or not parts_summary(root, options).startswith("each")
    ):
        why = "it takes parts of whole weights, which strategy fsdp or fsdp2 publishes without LoRA"
    elif get(root, "trainer", "resume_mode") == "disable":
        why = "trainer.resume_mode=disable resumes from nothing: set auto"
    elif "model" not in (get(actor, "checkpoint", "load_contents") or ["model"]):
        why = "actor_rollout_ref.actor.checkpoint.load_contents has no model, which is loaded where no worker has it"
    elif mode == "resumed_step" and options.dtype not in (None, trained):
        why = (
            f"the trainer's {trained} weights are published in {options.dtype}, of which they cannot be made: set "
            f"{WHERE}.dtype={trained}, or actor_rollout_ref.actor.fsdp_config.model_dtype={options.dtype}"
        )
    else:
        return recovery_summary(mode, retains=options.retain is not None)
    raise UsageError(f"{WHERE}.recover_weights={mode} would do nothing: {why}, or leave it out")


def check_kwargs(rollout: Any) -> None:
    """Refuse a misspelt back end, whose options are read by none."""
    for name in get(rollout, "checkpoint_engine", "engine_kwargs") or ():
        if name != BACKEND and is_meant(str(name), BACKEND):
            raise UsageError(f"{ENGINE}.engine_kwargs.{name} is not read: did you mean {WHERE}?")


def check_path(model: Any) -> None:
    if not str(get(model, "path") or "").strip():
        raise UsageError("actor_rollout_ref.model.path is empty: name a model's folder, or one on the Hugging Face hub")


def check_engines(root: Any) -> str:
    """Return how many GPUs the job needs, and for what. Raise UsageError where not one engine would start: verl finds
    nothing wrong, and waits for ever."""
    engines, trainer = engines_of(root), get(root, "trainer")
    if not engines.nodes or not engines.gpus_per_node:
        raise UsageError(
            f"the engines need GPUs of their own: set {engines.where}.nnodes and {engines.where}.n_gpus_per_node"
        )
    total = engines.nodes * engines.gpus_per_node
    if not engines.number:
        raise UsageError(
            f"an engine takes {engines.gpus} GPUs (actor_rollout_ref.rollout.tensor_model_parallel_size), and all "
            f"engines together have {total} ({engines.where}.nnodes times n_gpus_per_node): raise these or lower that"
        )
    used = engines.number * engines.gpus
    parts = {
        "the trainer": int(get(trainer, "n_gpus_per_node") or 0) * int(get(trainer, "nnodes") or 0),
        f"{count(engines.number, 'engine')} of {engines.gpus}": used,
        "reward models": _pool(get(root, "reward", "reward_model"), "enable_resource_pool"),
        "teachers": _pool(get(root, "distillation"), "enabled"),
    }
    rest = f"; {total - used} of the engines' {total} stay unused" if used < total else ""
    return f"{gpus_summary(parts)}{rest}"


def _pool(part: Any, switch: str) -> int:
    return int(get(part, "nnodes") or 0) * int(get(part, "n_gpus_per_node") or 0) if get(part, switch) else 0


def check_backend(rollout: Any) -> None:
    backend = get(rollout, "checkpoint_engine", "backend")
    if get(rollout, "name") is None:
        raise UsageError(f"actor_rollout_ref.rollout.name is not set: set it to {ROLLOUT} (pull mode), or to vllm")
    if backend == BACKEND:
        return
    if get(rollout, "name") == ROLLOUT:
        raise UsageError(
            f"rollout.name={ROLLOUT} follows the store, but {ENGINE}.backend is {backend!r}: set it to {BACKEND!r}"
        )
    raise UsageError(
        f"{ENGINE}.backend is {backend!r}: for the store set it to {BACKEND!r}, or leave out "
        "custom_backend_module=tensorhub_plugins.verl"
    )


def check_name(rollout: Any, options: Options) -> None:
    """Refuse engines that the store was not tried with, unless `allow_untested` is set; verl's registry knows which
    there are."""
    name = get(rollout, "name")
    if options.allow_untested or name is None:
        return
    if get(rollout, "disaggregation", "enabled"):
        raise UsageError(
            "actor_rollout_ref.rollout.disaggregation was not tried with the store: set its `enabled` to False, or "
            f"{WAY_OUT}"
        )
    if name in ("vllm", ROLLOUT):
        return
    close = difflib.get_close_matches(str(name), [ROLLOUT, "vllm"], n=1)
    raise UsageError(
        f"actor_rollout_ref.rollout.name is {name!r}, and the store was tried with verl's vllm engines alone: "
        + (f"did you mean {close[0]}?" if close else f"set {ROLLOUT} (pull mode) or vllm (drop-in), or {WAY_OUT}")
    )


def check_drafts(rollout: Any) -> None:
    """Draft models: MTP heads get every version, and no other draft does."""
    remedy = "leave rollout.engine_kwargs.vllm.speculative_config out, or set rollout.load_format=auto"
    drafts.source(None, draft_of(rollout), get(rollout, "load_format") or "dummy", remedy=remedy)


def check_engine_kwargs(rollout: Any) -> None:
    """Refuse what workers refuse when they join the store (vllm/worker/extension.py), minutes after the start."""
    given = {str(k).replace("-", "_"): v for k, v in (get(rollout, "engine_kwargs", "vllm") or {}).items()}
    refused = [f"{name} ({why})" for name, why in REFUSED_BY_WORKERS.items() if get(given, *name.split("."))]
    if given.get("load_format"):
        refused.append("load_format (they start with what rollout.load_format says)")
    kind = given.get("quantization") or get(rollout, "quantization")
    if kind and kind not in OF_FLOATS and not get(rollout, "qat", "enable"):
        refused.append(f"quantization={kind} (not known to be made of floats, which verl publishes, in every update)")
    if refused:
        raise UsageError(
            f"engines that pull do not take {', '.join(refused)}: leave it out of actor_rollout_ref.rollout, or set "
            "rollout.name=vllm (drop-in)"
        )


def draft_of(rollout: Any) -> str | None:
    """Return what vLLM's engines will draft with, as vLLM calls it; None: nothing."""
    mtp = get(rollout, "mtp")
    if get(mtp, "enable") and get(mtp, "enable_rollout"):
        return str(get(mtp, "method") or "mtp")
    given = get(rollout, "engine_kwargs", "vllm", "speculative_config")
    given = msgspec.json.decode(given) if isinstance(given, str) and given.startswith("{") else given
    if not isinstance(given, Mapping):
        return None
    return str(given.get("method") or "draft_model")


def trains_lora(model: Any) -> bool:
    return (get(model, "lora_rank") or get(model, "lora", "rank") or 0) > 0


def has_adapter(model: Any) -> bool:
    """Return whether verl trains a LoRA adapter and does not merge it into the weights."""
    return trains_lora(model) and not get(model, "lora", "merge")


def check_adapter(root: Any, options: Options) -> str:
    """Return what becomes of a LoRA adapter; "" where there is none. Raise UsageError for one that no engine would
    get."""
    reference = get(root, "actor_rollout_ref")
    model, strategy = get(reference, "model"), get(reference, "actor", "strategy")
    if not has_adapter(model):
        return ""
    if get(reference, "rollout", "name") != ROLLOUT:
        raise UsageError(DROP_IN)
    if is_separate_async(root) and get(reference, "hybrid_engine") is not False:
        why = "verl itself gives adapters to engines on the trainer's GPUs, in a way that vLLM 0.29 does not take"
        mend = "set actor_rollout_ref.hybrid_engine=False"
    elif strategy not in ("fsdp", "fsdp2"):
        why = f"verl's {strategy} engine does not hand over its adapter"
        mend = "set actor_rollout_ref.actor.strategy=fsdp2"
    elif not get(model, "lora_rank"):
        why = "actor_rollout_ref.model.lora.rank is of verl's Megatron engine alone"
        mend = "set actor_rollout_ref.model.lora_rank"
    elif not options.parts:
        why, mend = "trainer ranks publish an adapter in parts", f"leave {WHERE}.parts=false out"
    elif get(model, "target_parameters"):
        why = "vLLM applies adapters to modules, not to parameters"
        mend = "leave actor_rollout_ref.model.target_parameters out"
    else:
        return adapter_summary(options.model, "actor_rollout_ref.model.path")
    raise UsageError(f"{why}: {mend}, or {MERGE}")


def check_gather(actor: Any) -> None:
    """Refuse a gather of Megatron's that is left to the next forward pass: until then a rank has what the optimizer's
    step made of its own share, and of all others what was before. verl exports and saves that, too."""
    engine, option = get(actor, "megatron"), "override_ddp_config.overlap_param_gather"
    is_left = get(engine, *option.split(".")) and get(engine, "use_distributed_optimizer") is not False
    if get(actor, "strategy") == "megatron" and is_left and not get(engine, "use_megatron_fsdp"):
        raise UsageError(
            f"actor_rollout_ref.actor.megatron.{option} leaves gathering what the optimizer has changed to the next "
            "forward pass, and the weights are read before it, with old ones among them: leave it out"
        )


def parts_summary(root: Any, options: Options) -> str:
    """Return whether trainer ranks publish what they hold, or gather whole tensors, and why; see parts.py."""
    reference = get(root, "actor_rollout_ref")
    strategy, model = get(reference, "actor", "strategy"), get(reference, "model")
    engine = get(reference, "actor", "megatron" if strategy == "megatron" else "fsdp_config")
    if has_adapter(model):
        return "each trainer rank publishes its part of the adapter, and nothing is gathered"
    if not options.parts:
        why = f"{WHERE}.parts=false"
    elif strategy not in ("fsdp", "fsdp2", "megatron"):
        why = f"verl's {strategy} engine hands over whole tensors only"
    elif trains_lora(model):
        why = "LoRA: verl merges the adapter into whole tensors"
    elif get(engine, "qat", "enable"):
        why = "quantization-aware training quantizes whole tensors"
    elif get(engine, "use_megatron_fsdp"):
        why = "Megatron-FSDP cuts parameters in its own way"
    elif strategy == "megatron":
        return (
            "each trainer rank publishes the parts that megatron gave it, and nothing is gathered, if its bridge moves "
            "rows or columns and computes nothing; else whole tensors are gathered, and rank 0's log says why"
        )
    else:
        return f"each trainer rank publishes the part that {strategy} gave it, and nothing is gathered"
    return f"whole tensors are gathered to every trainer rank ({why})"


def tell_memory(outlook: Outlook, root: Any, options: Options, model: Model | None) -> None:
    """Say what hosts need. What exceeds a budget that is kept is wrong."""
    trainer, rollout = get(root, "trainer"), get(root, "actor_rollout_ref", "rollout")
    if has_adapter(get(root, "actor_rollout_ref", "model")):
        return  # it is small
    if model is None:
        outlook.unseen.append(
            f"memory (actor_rollout_ref.model.path={get(root, 'actor_rollout_ref', 'model', 'path')} is no folder "
            "here and not in the Hugging Face cache, or says no size)"
        )
        return
    size_bytes = model.elements * SIZES[options.dtype or "float32"]
    here, engines = int(get(trainer, "n_gpus_per_node") or 1), engines_of(root)
    share = Need(size_bytes // max(1, here * int(get(trainer, "nnodes") or 1)), options.keep + 1)
    outlook.tell(memory_summary, options, model, "each trainer rank", share, here)
    part = Need(size_bytes // int(get(rollout, "tensor_model_parallel_size") or 1), options.copies)
    if get(rollout, "name") == ROLLOUT:
        outlook.tell(memory_summary, options, model, "each worker of an engine", part, engines.gpus_here)
        if engines.gpus_here < engines.gpus_per_node:
            outlook.said.append(BESIDE)
        return
    whole, workers = Need(size_bytes, DROP_IN_COPIES), engines.gpus_per_node
    outlook.tell(memory_summary, options, model, "each worker of an engine", whole, workers)
    if workers > 1:
        outlook.said.append(
            f"LOOK: drop-in takes {gigabytes(whole.size_bytes * workers)} of host memory on every host of engines, as "
            f"each worker has all of a version; rollout.name={ROLLOUT} takes "
            f"{gigabytes(part.size_bytes * engines.gpus_here)}"
        )


def dtype_summary(options: Options) -> str:
    if options.dtype is None:
        return "weights are published as the trainer has them"
    return (
        f"matrices are published as {options.dtype} ({WHERE}.dtype), routers and what has one dimension as the trainer "
        "has them"
    )


def check_parallel(rollout: Any) -> None:
    """Refuse what verl refuses where rollout.name is vllm, and would take here."""
    if (get(rollout, "data_parallel_size") or 1) > 1:
        raise UsageError(
            f"rollout.data_parallel_size is {rollout.data_parallel_size}: with {ROLLOUT} every engine is a replica of "
            "its own, so set it to 1; verl then starts as many replicas as the GPUs allow"
        )
    if (get(rollout, "pipeline_model_parallel_size") or 1) > 1:
        raise UsageError(
            f"rollout.pipeline_model_parallel_size is {rollout.pipeline_model_parallel_size}: verl starts vLLM without "
            "it, and would reserve GPUs that stay unused; set it to 1 and tensor_model_parallel_size higher"
        )


def check_fleet(options: Options, rollout: Any) -> str:
    """Return what becomes of the number of replicas; "" where it stays. Raise UsageError for options that would do
    nothing."""
    router = get(rollout, "router_config_path")
    if get(rollout, "name") != ROLLOUT:
        why = f"drop-in mode has a fixed number of engines: set rollout.name={ROLLOUT}"
    elif get(rollout, "full_determinism"):
        why = "rollout.full_determinism has verl's own router, which knows no fleet: switch it off"
    elif router not in (None, str(ROUTER)):
        why = f"the router of rollout.router_config_path={router} knows no fleet: leave that out"
    else:
        return fleet_summary(options, options.fleet_policy or options.fleet_target or "as many replicas as verl starts")
    asked = [name for name in FLEET if getattr(options, name) != getattr(Options(), name)]
    if asked:
        raise UsageError(f"{WHERE}.{asked[0]} would do nothing: {why}, or leave it out")
    return ""


def check_mode(root: Any) -> str:
    """Return which trainer this is, in a sentence. Raise UsageError for one whose engines get their weights another
    way."""
    trainer = get(root, "trainer")
    if get(root, "rollout") is not None:
        mode = "one_step_off" if get(root, "async_training") is None else "fully_async"
        if get(root, "actor_rollout_ref", "hybrid_engine"):
            raise UsageError(f"trainer {mode!r} starts with actor_rollout_ref.hybrid_engine=False only: add that")
        return f"trainer: {mode}"
    mode, is_legacy = get(trainer, "v1", "trainer_mode"), get(trainer, "use_v1") is False
    if is_legacy or mode != "separate_async":
        if not is_legacy and mode not in COLOCATED:
            raise UsageError(f"trainer.v1.trainer_mode is {mode!r}, which verl does not know: set separate_async")
        name = "the legacy trainer (trainer.use_v1=False)" if is_legacy else f"trainer {mode!r}"
        steps = steps_of(root)
        raise UsageError(
            f"{name} shares its GPUs with the engines and hands them the weights inside the GPU (CUDA IPC); verl gives "
            f"it no engines anywhere else, so the store would do nothing: add {'trainer.use_v1=True ' * is_legacy}"
            f"{SEPARATE} {f'{SYNC_STEP}={steps} ' if steps else ''}"
            "actor_rollout_ref.rollout.nnodes=... actor_rollout_ref.rollout.n_gpus_per_node=..., or leave the store's "
            "lines out"
        )
    if get(root, "actor_rollout_ref", "hybrid_engine") is not False:
        return (
            "trainer: separate_async, hybrid: the engines on GPUs of their own are served by the store, those on the "
            "trainer's GPUs by verl (actor_rollout_ref.hybrid_engine=False leaves the latter out)"
        )
    return "trainer: separate_async"


def is_served(root: Any) -> bool:
    """Return whether this trainer has engines on GPUs of their own, which the store is for."""
    return get(root, "rollout") is not None or is_separate_async(root)


def is_separate_async(root: Any) -> bool:
    trainer = get(root, "trainer")
    is_other = get(root, "rollout") is not None or get(trainer, "use_v1") is False
    return not is_other and get(trainer, "v1", "trainer_mode") == "separate_async"


def check_batch(root: Any) -> None:
    """Check verl's own condition, which it finds broken a minute after its start, and name what keeps the recipe as it
    is: `parameter_sync_step` is the number of optimizer steps that a batch is trained in."""
    batch, mini = _batch(root)
    per_step = get(root, "trainer", "v1", "separate_async", "parameter_sync_step") or 1
    if not is_separate_async(root) or batch is None or mini is None or batch == per_step * mini:
        return
    steps = steps_of(root)
    raise UsageError(
        f"data.train_batch_size is {batch}, and verl wants {SYNC_STEP} ({per_step}) times "
        f"actor_rollout_ref.actor.ppo_mini_batch_size ({mini}): "
        + (f"set {SYNC_STEP}={steps}" if steps else "make the first a multiple of the last")
    )


def steps_of(root: Any) -> int | None:
    """Return the `parameter_sync_step` that leaves a recipe as it is; None where there is none."""
    batch, mini = _batch(root)
    return batch // mini if batch and mini and batch % mini == 0 else None


def _batch(root: Any) -> tuple[Any, Any]:
    mini = get(root, "actor_rollout_ref", "actor", "ppo_mini_batch_size")
    return get(root, "data", "train_batch_size"), mini


def get(tree: Any, *names: str) -> Any:
    """Return what is under these names, in mappings within each other, those of vLLM also as JSON; None: nothing is."""
    for name in names:
        if isinstance(tree, str):
            try:
                tree = msgspec.json.decode(tree)
            except msgspec.DecodeError:
                return None  # which vLLM refuses
        tree = tree.get(name) if hasattr(tree, "keys") else None  # omegaconf's lists have `get`, too
    return tree
