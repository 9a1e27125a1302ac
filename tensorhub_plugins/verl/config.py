"""The options under actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub, and what refuses wrong ones.

Every refusal is a UsageError whose sentence says what to change, raised before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import omegaconf

from tensorhub_plugins.core import UsageError, options, run_log
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm import names

logger = get_logger(__name__)

BACKEND = "tensorhub"
ROLLOUT = "vllm_tensorhub"
TRAINER = "trainer"  # the trainer's name at the hub
WHERE = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{BACKEND}"

# Both adapters reach into parts of verl and vLLM that change without notice: only what was run counts as tested.
TESTED_VERL = ("0.9.1",)
TESTED_VLLM = names.run_with("verl")
WAY_OUT = f"set {WHERE}.allow_untested=true"

NO_HUB = f"correct {WHERE}.hub, or leave it out to run the hub on verl's head node"
MERGE = "set actor_rollout_ref.model.lora.merge=true so that the trainer merges the adapter before it publishes"
ROUTER = Path(__file__).with_name("router.yaml")  # a path, because verl opens it by one
FLEET = ("fleet_min", "fleet_max", "fleet_target", "fleet_spares", "fleet_policy")
DTYPES = ("bfloat16", "float16", "float32")


class Options(TrainingOptions, frozen=True, kw_only=True):
    """hub None: verl's head node runs one itself. The trainer's versions are steps, see versions.py."""

    dtype: str | None = None  # what matrices are published as, see parts.keeps_dtype; None: what the rollouts run
    parts: bool = True  # each trainer rank publishes what it holds, see parts.py; False: it gathers all
    slices: int | None = None  # tensor parallel size of the engines that pull, see Publisher; None: the rollouts'
    slices_experts: bool | None = None  # experts as well; None: unless the rollouts are expert parallel
    pause_mode: Literal["keep", "wait", "abort"] = "keep"  # requests in flight during an installation
    recompute: bool = True  # after it: drop all KV of the old weights (False keeps it: faster, and no longer exact)
    spans: Literal["auto", "split", "oldest"] = "auto"  # how samples of several versions are reported: versions.py
    replica_timeout_s: float = 15.0  # a replica that has not answered for this long gets no requests


def parse(given: Mapping[str, Any] | None) -> Options:
    """Parse the options in verl's configuration (a mapping, also omegaconf's). Raise UsageError that names the
    option."""
    parsed = options.convert(_plain(given or {}), Options, where=WHERE)
    limits: dict[str, tuple[float, float]] = {"replica_timeout_s": (1, 3600)}
    if parsed.slices is not None:
        limits["slices"] = (1, 999)
    options.check_training(parsed, where=WHERE, limits=limits)
    run_log.use(parsed.events)
    if parsed.dtype is not None and parsed.dtype not in DTYPES:
        raise UsageError(f"{WHERE}.dtype is {parsed.dtype!r}: choose one of {', '.join(DTYPES)}, or leave it out")
    return parsed


def check_verl(given: Options) -> None:
    if not given.allow_untested:
        options.check_tested("verl", metadata.version("verl"), TESTED_VERL, way_out=WAY_OUT)


def check_vllm(given: Options) -> None:
    if not given.allow_untested:
        options.check_tested("vllm", vllm_version(), TESTED_VLLM, way_out=WAY_OUT)


def vllm_version() -> str:
    """Return that of the installed one, or raise UsageError."""
    version = names.installed_version()
    if version is None:
        raise UsageError(f"vLLM is not installed: pip install vllm=={TESTED_VLLM[-1]}.0")
    return version


def use_our_router(rollout: Any) -> bool:
    """Have verl make our router where it would make its own; False if it must not. rollout: verl's configuration of
    the rollout, from which the load balancer is made later, in this same process."""
    theirs = rollout.get("router_config_path", None)
    if theirs == str(ROUTER):
        return True
    if theirs is not None or rollout.get("full_determinism", False):
        why = "full_determinism" if theirs is None else f"router_config_path={theirs}"
        logger.warning(
            "rollout.%s has another router: requests are not moved away from lost replicas, validation does not wait "
            "for its version, and samples of several versions are reported as of their oldest",
            why,
        )
        return False
    with omegaconf.open_dict(rollout):
        rollout.router_config_path = str(ROUTER)
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or value is None:
        return value
    if hasattr(value, "__iter__"):
        return [_plain(inner) for inner in value]
    return value
