"""What `--vllm.sync_backend tensorhub...` can say, and what refuses a wrong one.

    tensorhub                                   the run brings its own hub, on Ray's head node
    tensorhub://10.0.0.1:7070                   a hub that `tensorhub server` has started
    tensorhub://10.0.0.1:7070?keep=3&verify=1   options, by the names below; without a hub: tensorhub:?keep=3

The flag reaches every actor as OpenRLHF's `args.vllm.sync_backend`, so the driver writes what it has decided (the
hub's address, the run's name) back into it. Every refusal is a UsageError whose sentence says what to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from tensorhub_plugins.core import UsageError, options, run_log
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm import names
from tensorhub_plugins.vllm.lora import RANKS, history_of
from tensorhub_plugins.vllm.model_size import model_of
from tensorhub_plugins.vllm.outlook import check_number, is_meant, recovery_summary

FLAG = "--vllm.sync_backend"
NAME = "tensorhub"
NO_HUB = f"correct {FLAG}, or write {FLAG} {NAME} to let the run bring its own"
TRAINER = "trainer"  # the replica that publishes
ELEMENT_SIZE_BYTES = 2  # OpenRLHF runs vLLM, and trains, in bfloat16
TESTED_OPENRLHF = ("0.11.2",)  # the adapter reaches into parts that change without notice: only what was run counts
TESTED_VLLM = names.run_with("openrlhf")
COLOCATED = (
    "with --train.colocate_all trainer and engines share their GPUs, and OpenRLHF hands the weights over inside them "
    "(CUDA IPC): the store is not used"
)
GENERATE = "rollout.vllm_generate_batch_size"
# Numbers that GPUs and memory are counted with, and the least that they may be.
NUMBERS = {
    **dict.fromkeys(("actor.num_nodes", "actor.num_gpus_per_node", "vllm.tensor_parallel_size"), 1),
    **dict.fromkeys(("ds.tensor_parallel_size", "ds.ring_attn_size", "rollout.n_samples_per_prompt"), 1),
    **{f"{part}.{name}": 1 for part in ("train", "rollout") for name in ("batch_size", "micro_batch_size")},
    "ds.lora.rank": 0,
    **{f"{part}.{name}": 0 for part in ("ref", "reward", "critic") for name in ("num_nodes", "num_gpus_per_node")},
    **dict.fromkeys(("train.max_epochs", "train.num_episodes", "data.max_len", "eval.n_samples_per_prompt"), 1),
    **dict.fromkeys(("data.max_samples", GENERATE), 1),
}
SHARES_OFF_MAX = 1e-8  # numpy's, by which the data sets of prompts are mixed
STEPS = ("logger.logging_steps", "ckpt.save_steps", "eval.steps")  # OpenRLHF does something once in so many


class Options(TrainingOptions, frozen=True, kw_only=True):
    prompts_per_engine: int | None = None  # given to one at a time; None: twice what its vLLM runs (prompt_queue.py)
    parts: bool = True  # with ZeRO-3 each rank publishes the part that it holds, see parts.py; False: it gathers all


def is_ours(backend: str) -> bool:
    return backend == NAME or backend.startswith((f"{NAME}:", f"{NAME}?"))


def is_colocated(colocate_all: bool, async_enable: bool) -> bool:
    """Return whether OpenRLHF puts trainer and engines on the same GPUs; in async training they are apart all the
    same."""
    return colocate_all and not async_enable


def check_spelling(backend: str) -> None:
    """UsageError for what was meant to be ours: OpenRLHF would take it for a back end of torch, and fail much later."""
    word, rest = re.fullmatch(r"\s*([^?:/]*)(.*?)\s*", backend, re.DOTALL).groups()  # type: ignore[union-attr]
    if not is_ours(backend) and is_meant(word.strip(), NAME):
        rest = f"://{rest.lstrip('/')}" if rest.startswith("/") else rest
        raise UsageError(f"{FLAG} {backend!r} is no back end: did you mean {NAME}{rest}?")


def parse(backend: str) -> Options:
    """Parse the options in a value of --vllm.sync_backend. Raise UsageError that says what is wrong with it."""
    parts = urlsplit(backend)
    example = f"{FLAG} {NAME}://10.0.0.1:7070"
    if not is_ours(backend) or parts.path not in ("", NAME) or parts.fragment:
        raise UsageError(f"{FLAG} {backend!r} is not understood: write {FLAG} {NAME}, or {example}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{FLAG} {backend!r}: {error}; write {example}") from error
    if parts.netloc and not (host and port):
        raise UsageError(f"{FLAG} {backend!r} lacks a host or a port: write {example}, as `tensorhub server` prints it")
    query = dict(parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True))  # run=reinforce++ is meant so
    # The hub is written as an address, never as an option; where a node is, its environment says.
    given = options.convert(query, Options, where=f"{FLAG} {backend!r}", hidden=("hub", "location"))
    if parts.netloc:
        given = msgspec.structs.replace(given, hub=f"tcp://{parts.netloc}")
    limits: dict[str, tuple[float, float]] = {}
    if given.prompts_per_engine is not None:
        limits["prompts_per_engine"] = (1, 100_000)
    options.check_training(given, where=FLAG, limits=limits)
    run_log.use(given.events)
    return given


def settled(given: Options, args: Any) -> Options:
    """Return the options of a run: the history of a LoRA adapter is called after it; a version of a large model gets
    the time that its bytes take, or more while it works, unless the flag says another. args: OpenRLHF's, parsed."""
    if args.ds.lora.rank > 0:
        given = msgspec.structs.replace(given, model=history_of(given.model))
    if "timeout_s" in dict(parse_qsl(urlsplit(args.vllm.sync_backend).query)):
        return given
    model = model_of(args.actor.model_name_or_path)
    timeout_s = given.timeout_s if model is None else given.timeout_for(model.elements * ELEMENT_SIZE_BYTES)
    return msgspec.structs.replace(given, timeout_s=timeout_s, timeout_grows=True)


def to_flag(given: Options) -> str:
    """Return the value of --vllm.sync_backend that parses to these options."""
    default = Options()
    query = {
        name: ",".join(value) if isinstance(value, tuple) else int(value) if isinstance(value, bool) else value
        for name, value in msgspec.structs.asdict(given).items()
        if name != "hub" and value != getattr(default, name)
    }
    address = (given.hub or "").removeprefix("tcp://")
    return f"{NAME}:{'//' + address if address else ''}{'?' + urlencode(query, quote_via=quote) if query else ''}"


def check_versions(given: Options, *, openrlhf: str, vllm: str) -> None:
    if not given.allow_untested:
        way_out = f"add allow_untested=1 to {FLAG}"
        options.check_tested("openrlhf", openrlhf, TESTED_OPENRLHF, way_out=way_out)
        options.check_tested("vllm", vllm, TESTED_VLLM, way_out=way_out)


def installed_versions() -> Mapping[str, str]:
    """Return the versions of OpenRLHF and vLLM, without importing either. Raise UsageError when one is not there."""
    try:
        found = {"openrlhf": metadata.version("openrlhf"), "vllm": names.installed_version()}
    except metadata.PackageNotFoundError:
        found = {"openrlhf": None}
    for package, version in found.items():
        if version is None:
            raise UsageError(f"{FLAG} {NAME} needs {package}, which is not installed: pip install {package}")
    return {package: str(version) for package, version in found.items()}


def check_arguments(args: Any) -> None:
    """Refuse combinations that could not work, with OpenRLHF's parsed arguments."""
    for refusal in refusals(args):
        raise UsageError(refusal)
    check_recovery(parse(args.vllm.sync_backend), args)
    if is_colocated(args.train.colocate_all, args.train.async_enable):
        raise UsageError(
            "colocated engines get their weights inside the GPU: write --train.colocate_all in full so that "
            "OpenRLHF's own path is taken, or use engines of their own"
        )


def check_recovery(given: Options, args: Any) -> str:
    """Return where a run that resumes has its weights from; "" where that is as ever. Raise UsageError where the
    checkpoint would be loaded each time."""
    mode = given.recover_weights
    if mode == "off":
        return ""
    if given.hub is None or given.run is None:
        why = f"the run's own hub ends with it: write {FLAG} '{NAME}://HOST:PORT?run=NAME&recover_weights={mode}'"
    elif args.ds.lora.rank > 0:
        why = "an adapter is small: its checkpoint is loaded"
    elif args.ds.zero_stage == 0:
        why = "with --ds.zero_stage 0 DeepSpeed has one file of weights and of float32 masters: use 2"
    elif args.ds.zero_stage == 3 and mode != "latest":
        why = "with ZeRO-3 DeepSpeed makes the weights of masters that only the checkpoint has: use 2, or latest"
    elif args.ds.zero_stage == 3 and not given.parts:
        why = "with ZeRO-3 each rank takes back the part that it holds: leave out parts=false"
    elif args.ds.use_universal_ckpt:
        why = "--ds.use_universal_ckpt loads float32 masters, and makes the weights of them: leave that out"
    elif args.ckpt.disable_ds:
        why = "--ckpt.disable_ds leaves nothing to resume from: leave that out"
    else:
        return recovery_summary(mode, retains=given.retain is not None)
    raise UsageError(f"{FLAG} ...recover_weights={mode} would do nothing: {why}, or leave it out")


def wrong_numbers(args: Any) -> Iterator[str]:
    """Return what cannot be counted with, a sentence each."""
    for name, least in NUMBERS.items():
        value = attrgetter(name)(args)
        if value is None and name == GENERATE:  # OpenRLHF takes the batch size, once it has parsed the command line
            continue
        try:
            check_number(value, f"--{name}", least)
        except UsageError as error:
            yield error.message


def wrong_batches(args: Any) -> Iterator[str]:
    """Return ranks that are no multiple of those that share a sequence, and batches that DeepSpeed finds wrong once it
    has a model: they are no multiple of what all ranks take."""
    train, is_critic = args.train, bool(args.critic.model_name_or_path)
    for name, group in (("actor", args.actor), *([("critic", args.critic)] if is_critic else [])):
        ranks = group.num_nodes * group.num_gpus_per_node
        if ranks % args.ds.ring_attn_size or ranks < args.ds.ring_attn_size:
            yield f"--ds.ring_attn_size is {args.ds.ring_attn_size}, and the {name} has {ranks} ranks: set a divisor"
        elif ranks and train.batch_size * args.ds.ring_attn_size % (train.micro_batch_size * ranks):
            yield (
                f"--train.batch_size is {train.batch_size}, and the {ranks} ranks of the {name} take "
                f"--train.micro_batch_size {train.micro_batch_size} each: DeepSpeed wants a multiple of what they take"
            )


def wrong_sampling(args: Any) -> Iterator[str]:
    """Return what engines refuse once they are asked for samples, and steps of which none is ever reached."""
    rollout = args.rollout
    if rollout.temperature <= 0:
        yield f"--rollout.temperature is {rollout.temperature}, by which OpenRLHF divides logits: set it above 0"
    if args.eval.dataset and args.eval.temperature < 0:
        yield f"--eval.temperature is {args.eval.temperature}: vLLM takes 0 or more"
    if not 0 < rollout.top_p <= 1:
        yield f"--rollout.top_p is {rollout.top_p}: vLLM takes a share above 0, up to 1"
    if rollout.max_new_tokens is not None and rollout.max_new_tokens < 1:
        yield f"--rollout.max_new_tokens is {rollout.max_new_tokens}: vLLM takes 1 or more"
    for name in STEPS:
        if attrgetter(name)(args) == 0:
            yield f"--{name} is 0, by which OpenRLHF divides: set 1 or more, or -1"


def wrong_data(args: Any) -> Iterator[str]:
    """Return what OpenRLHF finds missing, or cannot read, once the engines are there."""
    names, given = (args.data.prompt_dataset or "").split(","), args.data.prompt_probs
    if not names[0].strip():
        yield "--data.prompt_dataset is empty: name data sets, files or folders, with commas between them"
    try:
        shares = None if given is None else [float(share) for share in given.split(",")]
    except ValueError:
        shares = []
    if shares is not None and (len(shares) != len(names) or abs(sum(shares) - 1) > SHARES_OFF_MAX):
        yield f"--data.prompt_probs is {given!r}: give a number for each of {len(names)} data sets, 1 in all"
    if not (args.reward.remote_url or args.reward.model_name_or_path):
        yield "nothing gives rewards: set --reward.remote_url, --reward.model_name_or_path or --train.agent_func_path"
    if args.train.async_enable and args.train.async_queue_size < 1:
        yield f"--train.async_queue_size is {args.train.async_queue_size}: OpenRLHF takes 1 or more"


def refusals(args: Any) -> Iterator[str]:
    """Return what could not work, a sentence each."""
    wrong = list(wrong_numbers(args))
    yield from wrong
    if not (wrong or args.train.dynamic_batch_enable):
        yield from wrong_batches(args)
    yield from wrong_sampling(args)
    yield from wrong_data(args)
    if args.ds.zero_stage not in range(4):
        yield f"--ds.zero_stage is {args.ds.zero_stage}: DeepSpeed has 0 to 3"
    if not 0 < args.vllm.gpu_memory_utilization <= 1:
        yield f"--vllm.gpu_memory_utilization is {args.vllm.gpu_memory_utilization}: vLLM takes a share, up to 1"
    if not args.actor.model_name_or_path:
        yield "--actor.model_name_or_path is empty: name a model's folder, or one on the Hugging Face hub"
    if (args.vllm.num_engines or 0) < 1:
        yield f"{FLAG} {NAME} moves weights to vLLM engines: set --vllm.num_engines to 1 or more"
    if args.ds.lora.rank > RANKS[-1]:
        yield f"--ds.lora.rank is {args.ds.lora.rank}, and vLLM takes adapters of rank {RANKS[-1]} at most: lower it"
    if args.ds.load_in_4bit:
        yield (
            "OpenRLHF trains 4-bit models under names that vLLM does not load, and an adapter over other weights than "
            "the engines': leave out --ds.load_in_4bit"
        )
    if args.data.max_images_per_prompt > 0:
        yield (
            "vision-language models were not tested with the store: leave out --data.max_images_per_prompt, or use "
            f"{FLAG} nccl"
        )
    if args.ds.param_dtype != "bf16":
        yield f"OpenRLHF runs vLLM in bfloat16, and --ds.param_dtype is {args.ds.param_dtype}: use bf16"
    if args.ds.tensor_parallel_size > 1:
        yield (
            "DeepSpeed tensor parallelism was not tested with the store: set --ds.tensor_parallel_size 1, or use "
            f"{FLAG} nccl"
        )
