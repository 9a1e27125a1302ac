"""The options under actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub, and what refuses wrong ones.

Every refusal is a UsageError whose sentence says what to change, raised before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
import omegaconf

from tensorhub_plugins.core import DEFAULT_TRANSPORTS, Location, UsageError, here, options

log = logging.getLogger(__name__)

BACKEND = "tensorhub"
ROLLOUT = "vllm_tensorhub"
WHERE = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{BACKEND}"

# Both adapters reach into parts of verl and vLLM that change without notice: only what was run counts as tested.
TESTED_VERL = ("0.9.1",)
TESTED_VLLM = ("0.29",)
WAY_OUT = f"set {WHERE}.allow_untested=true"

ROUTER = Path(__file__).with_name("router.yaml")  # a path, because verl opens it by one
DTYPES = ("bfloat16", "float16", "float32")


LocationPart = Literal["data_center", "rack"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    hub: str | None = None  # tcp://host:port of a running `tensorhub server`; None: verl's head node runs one itself
    run: str | None = None  # names the history at the hub; None: unique for this Ray job
    model: str = "actor"
    location: dict[LocationPart, str] = {}  # or per node: TENSORHUB_DATA_CENTER, TENSORHUB_RACK
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS  # in order of preference
    install: Literal["staged", "direct"] = "staged"  # staged: bytes arrive in host memory while the engine generates
    serve_from: Literal["host", "live"] | None = None  # what peers read: a host copy, or the live weights themselves
    dtype: str | None = None  # what floating-point weights are published as; None: as verl hands them over
    keep: int = 2  # versions the trainer holds for readers; memory on each trainer host is keep + 1 of its shard
    timeout_s: float = 120.0  # for one publish, one fetch, one installation
    pause_mode: Literal["keep", "wait", "abort"] = "keep"  # requests in flight during an installation
    recompute: bool = True  # after it: drop all KV of the old weights (False keeps it: faster, and no longer exact)
    spans: Literal["auto", "split", "oldest"] = "auto"  # how samples of several versions are reported: versions.py
    replica_timeout_s: float = 15.0  # a replica that has not answered for this long gets no requests
    pull_until: int | None = None  # the last step whose weights replicas take, for experiments with staleness
    restarts: int = 10  # of one replica's server before it is given up
    verify: bool = False  # record digests of every version on both sides (costs a pass over the bytes)
    allow_untested: bool = False  # run with versions of verl and vLLM that were not tested


def parse(given: Mapping[str, Any] | None) -> Options:
    """Options from verl's configuration (a mapping, also omegaconf's), or UsageError naming the option."""
    parsed = options.convert(_plain(given or {}), Options, where=WHERE)
    _check(parsed)
    return parsed


def _check(given: Options) -> None:
    limits = {
        "keep": (1, 64),
        "restarts": (0, 1000),
        "timeout_s": (0.1, 86_400),
        "replica_timeout_s": (1, 3600),
    }
    options.check_limits(given, limits, where=WHERE)
    options.check_given(given, ("model", "run"), where=WHERE)
    if given.hub is not None and not given.hub.startswith("tcp://"):
        raise UsageError(
            f"{WHERE}.hub is {given.hub!r}: give the address `tensorhub server` prints, e.g. tcp://10.0.0.1:7070, "
            "or leave it out to run the hub on verl's head node"
        )
    if not given.transports:
        raise UsageError(f"{WHERE}.transports is empty: name at least one, e.g. [tcp]")
    if given.dtype is not None and given.dtype not in DTYPES:
        raise UsageError(f"{WHERE}.dtype is {given.dtype!r}: choose one of {', '.join(DTYPES)}, or leave it out")


def check_verl(given: Options) -> None:
    if not given.allow_untested:
        options.check_tested("verl", metadata.version("verl"), TESTED_VERL, way_out=WAY_OUT)


def check_vllm(given: Options) -> None:
    import vllm

    if not given.allow_untested:
        options.check_tested("vllm", vllm.__version__, TESTED_VLLM, way_out=WAY_OUT)


def location(given: Options) -> Location:
    """Where this process is. Options are the same on every node, so what a node's own environment says comes first."""
    place = here()
    return Location(
        data_center=place.data_center or given.location.get("data_center", ""),
        rack=place.rack or given.location.get("rack", ""),
        host=place.host,
        device=place.device,
    )


def use_our_router(rollout: Any) -> bool:
    """Have verl make our router where it would make its own; False if it must not. rollout: verl's configuration of
    the rollout, from which the load balancer is made later, in this same process."""
    theirs = rollout.get("router_config_path", None)
    if theirs == str(ROUTER):
        return True
    if theirs is not None or rollout.get("full_determinism", False):
        why = "full_determinism" if theirs is None else f"router_config_path={theirs}"
        log.warning(
            "rollout.%s has another router: requests are not moved away from lost replicas, and samples of several "
            "versions are reported as of their oldest",
            why,
        )
        return False
    with omegaconf.open_dict(rollout):
        rollout.router_config_path = str(ROUTER)
    return True


def spans_of(choice: str, rollout: Any) -> str:
    """How samples of several versions are handed to verl's client. "auto": split where the client of this trainer
    understands pieces (verl chooses the client by the trainer, see versions.py)."""
    if choice != "auto":
        return choice
    root = rollout._get_root()
    async_training = root.get("async_training")
    if async_training is not None:
        return "split" if async_training.get("partial_rollout") else "oldest"
    trainer = root.get("trainer") or {}
    v1 = trainer.get("v1") or {}
    understands = trainer.get("use_v1", True) and v1.get("trainer_mode") in ("separate_async", "colocate_async")
    return "split" if understands else "oldest"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or value is None:
        return value
    if hasattr(value, "__iter__"):
        return [_plain(inner) for inner in value]
    return value


def refused(error: Exception, address: str) -> UsageError:
    """What a hub that cannot be reached at start is reported as."""
    return UsageError(
        f"no hub answers at {address}: start one with `tensorhub server --address {address}`, correct {WHERE}.hub, "
        f"or leave it out to run the hub on verl's head node ({error})"
    )
