"""PURE: the options that all adapters have in common, and the conversion of users' input to a Struct.

Every refusal is a UsageError that names the option, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from tensorhub_plugins.core.deadline import size_s
from tensorhub_plugins.core.digests import Algorithm
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import COMPILED as COMPILED
from tensorhub_plugins.core.types import DOMAINS_MAX, STEPS_PER_ATTEMPT, Across, check_name

# The default of a worker, best first; those that its machine lacks are skipped.
DEFAULT_TRANSPORTS = ("shm", "rdma", "tcp", "tls")
TRANSPORTS = (*DEFAULT_TRANSPORTS, "cuda_ipc")

PORT_MAX = 65535  # ZeroMQ takes port 99999 and uses another
SPARES_MAX = 64  # of one run, each with the resources of a replica
FLEET_MAX = 1024  # replicas of one run; its dispatcher reports them all every second
# name, or name:number,...; a name without a dot is a built-in one
POLICY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:-?\d+(\.\d+)?(,-?\d+(\.\d+)?)*)?")

Delta = Literal["auto", "off"]
RecoverWeights = Literal["off", "resumed_step", "latest"]
LocationPart = Literal["data_center", "rack", "host"]


class StoreOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options: which store, and how an engine uses it."""

    hub: str | None = None  # "tcp://host:port" of a `tensorhub server`; None: the run starts one itself
    run: str | None = None  # names the history at the hub; None: unique for this run
    model: str = "actor"  # names the weights at the hub: what is published and read under one name is one model
    # The location. What a node itself sets takes precedence: TENSORHUB_DATA_CENTER, TENSORHUB_RACK, and Ray's labels.
    location: dict[LocationPart, str] = {}
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS  # in order of preference
    # The network on which weights are read, where each node's TENSORHUB_ADVERTISE, _INTERFACE and _PORTS do not say it.
    interface: str | None = None  # those of these ("ib0,eth1") that a node has; None: what faces the hub
    ports: str | None = None  # "from-to": of each node, one for each client and transport; None: any
    install: Literal["staged", "direct"] = "staged"  # staged: bytes arrive in host memory while the engine generates
    # What peers read: a copy in host memory, or the live weights themselves. None: "host" if staged, "live" if direct.
    serve_from: Literal["host", "live"] | None = None
    digest: Algorithm = "xxh3_128"  # blake3: cannot be forged on the way, and engines accept no other
    delta: Delta = "auto"  # readers on other hosts take what has changed instead of whole segments, where they can
    # What engines have compiled goes from one to the next (vllm/engine/compiled.py). It is code, so "auto" means: where
    # the run has a secret.
    compile_cache: Literal["auto", "on", "off"] = "auto"
    verify: bool = False  # record digests of every version on both sides (costs a pass over the bytes)
    memory_budget_bytes: int | None = None  # of each worker, for versions in host memory; None: half of its machine's
    over_budget: Literal["warn", "refuse"] = "warn"  # what to do about more, at the start and later
    # A folder on each node, into which every process records what it does, for `tensorhub timeline`; None: as the
    # environment's TENSORHUB_EVENTS says, which comes first.
    events: str | None = None

    @property
    def source(self) -> Literal["host", "live"]:
        """Return what peers read."""
        return self.serve_from or ("host" if self.install == "staged" else "live")

    @property
    def copies(self) -> int:
        """Return how many copies of its version an engine's worker keeps in host memory: one that arrives, and one that
        is served, or staged. A worker that borrows an engine's memory on its host needs none; a third one is needed
        while the last one is still read when the next has arrived."""
        return 2


class TrainingOptions(StoreOptions, frozen=True, kw_only=True):
    """Additional options of frameworks that train."""

    keep: int = 1  # versions each trainer rank holds for readers; its host memory is keep + 1 of its share
    retain_copies: int = 1  # in so many hosts (racks, data centres) the newest version survives, see Client.retain
    retain_across: Across = "host"  # what retain_copies counts: "host", "rack" or "data_center"
    # For one publish, one fetch, one installation, and for an engine to be up to date. Where it is not given and the
    # size of the model is known, a second for each half GB is added.
    timeout_s: float = 120.0
    timeout_grows: bool = False  # what works may take longer, as where no timeout_s is given
    # Training continues while a version is copied from its GPU, and the next publish raises its error (Publisher);
    # None: where a trainer rank has a GPU.
    in_background: bool | None = None
    device_room_bytes: int | None = None  # of its memory, for that; None: what no step has needed, 4 GiB at most
    restarts: int = 10  # of one engine before it is abandoned
    engine_timeout_s: float = 60.0  # an engine that served and has not answered for so long is restarted
    staleness_s: float | None = None  # an engine without contact to the hub for longer takes no new work
    pull_until: int | None = None  # the last step whose weights engines take, for experiments with staleness
    recover_weights: RecoverWeights = "off"  # of a run that resumes: not from its checkpoint, see client/recovery.py
    allow_untested: bool = False  # run with versions of the framework and of vLLM that were not tested
    # How many replicas a run has, see vllm/ray/fleet/. External servers do not count.
    fleet_min: int = 1  # so many others must be ready before one that is drained by name leaves
    fleet_max: int = FLEET_MAX  # replicas, whatever the target or a policy says
    fleet_target: int | None = None  # None: as many as the framework has started
    fleet_spares: int = 0  # started beyond that, without weights or requests, for the next one to join
    # What sets the target instead: constant:4, free_resources, queue_length:16, or yours: package.module.function
    fleet_policy: str | None = None

    @property
    def retain(self) -> tuple[int, Across] | None:
        """Return what the trainer asks the hub to retain; None: nothing that it would not retain anyway."""
        return (self.retain_copies, self.retain_across) if self.retain_copies > 1 else None

    @classmethod
    def timeout_for(cls, size_bytes: int) -> float:
        """Return the timeout, in whole seconds, of a run that was given none and has versions of this size."""
        return float(round(cls().timeout_s + size_s(size_bytes)))


class Need(NamedTuple):
    """Host memory that a worker will take: so many copies of its share of a version, old and new ones together, and
    for a while `more_bytes`, with their purpose (`for_`) as text for users."""

    version_bytes: int
    copies: int
    more_bytes: int = 0
    for_: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the size of all of it in bytes."""
        return self.version_bytes * self.copies + self.more_bytes


def memory_summary(worker: str, need: Need, workers: int = 1) -> str:
    """Return what a worker takes, and so many workers on its host, as text for users."""
    one = f"{worker} takes up to {gigabytes(need.size_bytes)} of host memory"
    copies = f"{need.copies} copies of the {gigabytes(need.version_bytes)} that it has of a version"
    copies += f", and {gigabytes(need.more_bytes)} {need.for_}" if need.more_bytes else ""
    all_ = "" if workers == 1 else f", and the {workers} of its host {gigabytes(workers * need.size_bytes)}"
    return f"{one} ({copies}){all_}"


def need_summary(given: StoreOptions, worker: str, need: Need, workers: int) -> str:
    """Return the same before the run. Raise UsageError for what exceeds a strict budget."""
    said, budget = memory_summary(worker, need, workers), given.memory_budget_bytes
    if budget is not None and need.size_bytes > budget:
        said = f"{said}, above memory_budget_bytes={budget}"
        if given.over_budget == "refuse":
            raise UsageError(f"{said}: raise it, use more hosts, or set over_budget=warn")
    return said


def gigabytes(size_bytes: int) -> str:
    """Return the size in GB, or in MB below one, as text."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


Options = TypeVar("Options", bound=msgspec.Struct)


def convert(given: Mapping[str, Any], kind: type[Options], *, where: str, hidden: Sequence[str] = ()) -> Options:
    """Convert a user's options. where: the place of the input, for errors. hidden: fields that are not options there.

    Strings are parsed ("3" for 3, "shm,tcp" for a list). Raise UsageError, with a hint for a misspelt name."""
    fields = {field.name: field for field in msgspec.structs.fields(kind) if field.name not in hidden}
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(fields)}"
            raise UsageError(f"{where} has no option {name!r}: {hint}")
    lacking = [name for name, field in fields.items() if field.required and name not in given]
    if lacking:
        raise UsageError(f"{where} lacks option {', '.join(lacking)}: give a value")
    return kind(**{name: _value(value, fields[name].type, f"{where}: option {name}") for name, value in given.items()})


def _value(given: Any, kind: Any, where: str) -> Any:
    if isinstance(given, str) and get_origin(kind) is tuple:
        given = given.split(",") if given else ()
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.keep`"
        kinds = {kind} if get_origin(kind) is Literal else set(get_args(kind)) - {type(None)}
        choices = [one for each in kinds for one in get_args(each)]
        if all(get_origin(each) is Literal for each in kinds) and choices:
            raise UsageError(f"{where} is {given!r}: choose one of {', '.join(map(str, choices))}") from error
        text = str(error)
        raise UsageError(f"{where} is {given!r}: {text[:1].lower()}{text[1:]}") from error


def check_store(given: StoreOptions, *, where: str) -> None:
    """Raise UsageError for a hub that is no address, and for options that are empty."""
    if given.hub is not None and not given.hub.startswith("tcp://"):
        raise UsageError(
            f"{where}: option hub is {given.hub!r}: give the address `tensorhub server` prints, e.g. "
            "tcp://10.0.0.1:7070, or leave it out to have the run start one"
        )
    if given.memory_budget_bytes is not None and given.memory_budget_bytes < 0:
        raise UsageError(f"{where}: option memory_budget_bytes is {given.memory_budget_bytes}: give a number of bytes")
    if given.ports is not None:
        port_range(given.ports, f"{where}: option ports")
    for name in ("model", "run", "transports", "interface", "events"):
        if getattr(given, name) in ("", ()):
            example = "name at least one, e.g. tcp" if name == "transports" else "give a value"
            raise UsageError(f"{where}: option {name} is empty: {example}, or leave it out")
    for name in ("model", "run"):
        check_name(f"{where}: option {name}", getattr(given, name) or "default")
    if strange := sorted({*given.transports} - {*TRANSPORTS}):
        raise UsageError(f"{where}: option transports has {strange[0]!r}: choose of {', '.join(TRANSPORTS)}")
    if given.install == "direct" and given.serve_from == "host":
        raise UsageError(f'{where}: install="direct" keeps nothing in host memory: use serve_from="live"')


def port_range(said: object, what: str) -> range:
    """Return the ports of "from-to". UsageError for anything else."""
    first, dash, last = said.partition("-") if isinstance(said, str) else ("", "", "")
    decimal = dash and all(each.isascii() and each.isdecimal() and len(each) <= 5 for each in (first, last))
    if not decimal or not 1 <= int(first) <= int(last) <= PORT_MAX:
        raise UsageError(f"{what}={said!r:.80}: a range of ports, as in 7100-7163, from 1 to {PORT_MAX}")
    return range(int(first), int(last) + 1)


def check_training(
    given: TrainingOptions, *, where: str, limits: Mapping[str, tuple[float, float]] | None = None
) -> None:
    """Do `check_store`, and check what has to hold for options that all nodes share. limits: of further options."""
    check_store(given, where=where)
    common = {"keep": (1, 64), "restarts": (0, 1000), "timeout_s": (0.1, 86_400), "fleet_min": (1, FLEET_MAX)}
    common |= {"engine_timeout_s": (1, 86_400), "retain_copies": (1, DOMAINS_MAX)}
    common |= {"fleet_max": (given.fleet_min, FLEET_MAX), "fleet_spares": (0, SPARES_MAX)}
    maybe: dict[str, tuple[float, float]] = {"device_room_bytes": (0, 1 << 40), "staleness_s": (1, 86_400)}
    maybe |= {"fleet_target": (given.fleet_min, given.fleet_max), "pull_until": (0, STEPS_PER_ATTEMPT - 2)}
    chosen = {name: limit for name, limit in maybe.items() if getattr(given, name) is not None}
    check_limits(given, {**common, **chosen, **(limits or {})}, where=where)
    if given.fleet_policy is not None and POLICY.fullmatch(given.fleet_policy) is None:
        raise UsageError(
            f"{where}: option fleet_policy is {given.fleet_policy!r}: give a function's name, with numbers if it takes "
            "any, e.g. queue_length:16 or mypackage.mymodule.policy"
        )
    if "host" in given.location:
        raise UsageError(f"{where}: option location.host is the same on every node: set TENSORHUB_HOST on each instead")


def check_limits(options: msgspec.Struct, limits: Mapping[str, tuple[float, float]], *, where: str) -> None:
    """Raise UsageError for the first option outside its limits, both of which are allowed."""
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise UsageError(f"{where}: option {name} is {value}: choose a number from {low} to {high}")


def check_numbers(limits: msgspec.Struct, *, above_0: Sequence[str] = ()) -> None:
    """Raise UsageError for the first field that is no finite number from 0 on, or is 0 and may not be."""
    kind = type(limits).__name__
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise UsageError(f"{kind}({name}={value!r}): pass a finite number that is not negative")
        if not value and name in above_0:
            raise UsageError(f"{kind}({name}=0): it must be above 0")


def check_tested(package: str, version: str, tested: Sequence[str], *, way_out: str) -> None:
    """Raise UsageError unless `version` is one of `tested`, which may be prefixes. way_out: how a user runs others
    nevertheless."""
    if not any(version == one or version.startswith((f"{one}.", f"{one}+")) for one in tested):
        raise UsageError(
            f"{package} {version} was not tested with this adapter: install {package} {' or '.join(tested)}, or "
            f"{way_out} at your own risk"
        )
