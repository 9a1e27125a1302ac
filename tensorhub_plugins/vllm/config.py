"""What users of vLLM write: the configuration of a worker, and of an engine that starts from the store."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tensorhub_plugins.core import Client, UsageError, here, options, run_log
from tensorhub_plugins.core.options import StoreOptions
from tensorhub_plugins.vllm.drafts import Source
from tensorhub_plugins.vllm.names import NAME, adapter_id

HUB_ENVIRONMENT = "TENSORHUB_HUB"
SECONDS = 0.001, float("inf")  # of an option that is one
START_TIMEOUT_S = 600.0  # as long as vLLM itself waits for its engine (VLLM_ENGINE_READY_TIMEOUT_S)
# Options of a worker that its client has under the same names.
OF_CLIENTS = (
    "transports", "digest", "delta", "memory_budget_bytes", "over_budget", "connect_timeout_s",
    "advertise_host", "interface", "ports", "job", "preemptible",
)  # fmt: skip


class WorkerConfig(StoreOptions, frozen=True, kw_only=True):
    """What `tensorhub_connect` takes, as a dict. Every worker of an engine gets the same."""

    hub: str
    run: str
    model: str
    replica: str  # one name per engine; live engines of a run must have different ones
    advertise_host: str | None = None
    preemptible: bool | None = None  # this node may be taken away; None: the environment's TENSORHUB_PREEMPTIBLE
    job: str | None = None  # what its next incarnation has, too, see Client; None: the environment's TENSORHUB_JOB
    # LoRA adapters that the engine takes from the store: the models of their histories, which are also what requests
    # call them. The base weights stay what the engine started with. See lora.py.
    lora: tuple[str, ...] = ()
    # Where the weights of MTP heads come from that draft for the model, see drafts.py. None: from the store, if they
    # are not read at the start.
    draft: Source | None = None
    connect_timeout_s: float = 10.0  # for the hub's first answer
    drain_timeout_s: float = 30.0  # for readers of the live weights before an install; then they are cut off
    serve_timeout_s: float = 120.0  # for what serving takes after an install: publishing, dropping the last version

    def connect(self, *, replica: str | None = None, **given: Any) -> Client:
        """Make a client of the store, as this engine or under another name. given: options of Client, over these."""
        own: dict[str, Any] = {
            **{name: getattr(self, name) for name in OF_CLIENTS},
            "location": msgspec.structs.replace(here(), **self.location),
        }
        return Client(self.hub, run=self.run, model=self.model, replica=replica or self.replica, **{**own, **given})

    @staticmethod
    def parse(config: Mapping[str, Any], where: str = "tensorhub's vLLM configuration") -> WorkerConfig:
        """Raise UsageError saying which key is wrong."""
        parsed = options.convert(config, WorkerConfig, where=where)
        options.check_store(parsed, where=where)
        options.check_limits(parsed, {"connect_timeout_s": SECONDS}, where=where)
        run_log.use(parsed.events)
        if "" in parsed.lora or len({*parsed.lora, parsed.model}) <= len(parsed.lora):
            raise UsageError(f"{where}: option lora is {parsed.lora!r}: name each once, and not as the model")
        return parsed


class StartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--model-loader-extra-config` takes besides the keys of WorkerConfig.

    Of those, hub (or the environment's TENSORHUB_HUB) and model must be given; run is "default", serve_from "live"."""

    version: int | Literal["latest"] = "latest"  # which one it starts with
    disk: Literal["never", "fallback", "only"] = "never"  # fallback: when the store has no version at all, or loses it
    disk_version: int = 0  # the version as which weights from disk are served to others; 0: they are not
    # For the first version to appear and arrive; None: START_TIMEOUT_S to appear, and then as long as it advances.
    start_timeout_s: float | None = None
    # Switch to every new version, see engine/core_follower.py; with "lora": of the adapters, and "now" is the default.
    follow: Literal["idle", "now"] | None = None
    follow_patience_s: float = 60.0  # "idle": after this long without an idle moment, switch at once
    may_be_held: bool = False  # at one version, by those that may ask it, for their evaluations: see routes.py

    @property
    def wait_s(self) -> float:
        """Return how long to wait for a first version of which nothing has come."""
        return START_TIMEOUT_S if self.start_timeout_s is None else self.start_timeout_s


class FollowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine follows. Its owner (an actor of verl or OpenRLHF) sends it as a dict, see ray/owned.py."""

    when: Literal["idle", "now"] = "now"  # see engine/core_follower.py
    patience_s: float = 60.0
    worker: str = ""  # its name in the event log; "": the replica's
    timeout_s: float = 600.0  # for a version to arrive, and for an install
    grows: bool = True  # as long as work goes on those may take longer
    until: int | None = None  # the last version to follow, see Follower, as the next three
    pins: bool = True
    whole_prompts: bool = False  # all samples of a prompt come from one version
    catches_up: bool = False  # it has weights of before the training
    staleness_s: float | None = None  # see engine/staleness.py
    pause_mode: Literal["keep", "wait", "abort"] = "keep"  # requests in flight during an installation
    recompute: bool = True  # after it: drop all KV of the old weights


def start_of(given: Mapping[str, Any] | None) -> StartConfig:
    """Return the part of the loader's configuration that says how an engine starts. UsageError: a value is wrong."""
    mine = {key: value for key, value in (given or {}).items() if key in StartConfig.__struct_fields__}
    return options.convert(mine, StartConfig, where="model_loader_extra_config")


def parse(given: Mapping[str, Any] | None, vllm_config: Any) -> tuple[StartConfig, WorkerConfig | None]:
    """UsageError says which key is wrong. No WorkerConfig: the weights come from disk and the store is not asked."""
    where, start = "model_loader_extra_config", start_of(given)
    rest = {key: value for key, value in (given or {}).items() if key not in StartConfig.__struct_fields__}
    if start.may_be_held and (start.follow is None or rest.get("lora")):
        raise UsageError(f'{where}: "may_be_held" is for engines that "follow" the weights: leave it out')
    timed = ("start_timeout_s",) if start.start_timeout_s is not None else ()
    options.check_limits(start, {"disk_version": (0, float("inf")), **dict.fromkeys(timed, SECONDS)}, where=where)
    backend = getattr(getattr(vllm_config, "weight_transfer_config", None), "backend", None)
    if start.follow and backend not in (None, NAME):
        raise UsageError(
            f'"follow" in {where} and --weight-transfer-config with the back end {backend!r:.80} would both change '
            "this engine's weights, one over the other: leave one of them out"
        )
    if start.disk == "only" and not rest and not start.follow:
        return start, None
    base = {"model": StoreOptions().model} if start.disk == "only" and rest.get("lora") else {}  # not the store's
    joining = configure({"serve_from": "live", **base, **rest}, vllm_config, where)
    check_lora(joining.lora, vllm_config)
    return start, joining


def check_lora(names: tuple[str, ...], vllm_config: Any) -> None:
    """Raise UsageError for an engine that cannot take these adapters from the store."""
    lora, parallel = getattr(vllm_config, "lora_config", None), vllm_config.parallel_config
    if not names:
        return
    if lora is None:
        raise UsageError(f"the adapters {', '.join(names)} are to come from the store: start with --enable-lora")
    if getattr(getattr(vllm_config, "weight_transfer_config", None), "backend", None) is not None:
        raise UsageError("the weights under adapters from the store stay: start without --weight-transfer-config")
    if len(names) > lora.max_cpu_loras:
        raise UsageError(f"{len(names)} adapters are to come from the store: start with --max-loras {len(names)}")
    ids = {adapter_id(name): name for name in names}
    if alike := [name for name in names if ids[adapter_id(name)] != name]:
        raise UsageError(f"vLLM would take the adapter {alike[0]!r} for {ids[adapter_id(alike[0])]!r}: rename one")
    if getattr(parallel, "pipeline_parallel_size", 1) > 1 or shares_experts(vllm_config):
        raise UsageError(
            "adapters from the store go to engines without pipeline parallelism, and without data parallel ranks that "
            "share experts: use tensor_parallel_size, or several engines"
        )


def configure(given: Mapping[str, Any], vllm_config: Any, where: str = "the store's configuration") -> WorkerConfig:
    """Return what a user gives on vLLM's command line, with what can be known filled in. Raise UsageError that says
    what is wrong."""
    filled = {"run": "default", "replica": f"{socket.gethostname()}-{vllm_config.instance_id}", **given}
    if not filled.get("hub") and os.environ.get(HUB_ENVIRONMENT):
        filled["hub"] = os.environ[HUB_ENVIRONMENT]
    return of_rank(WorkerConfig.parse(filled, where), vllm_config)


def of_rank(config: WorkerConfig, vllm_config: Any) -> WorkerConfig:
    """Return the configuration as this data parallel rank joins the store.

    vLLM makes engines of a dense model's that know nothing of each other and have one configuration: all but the first
    get a name of their own here, or the hub would take them for one worker. Those of a mixture of experts are parts of
    one engine, and have one name."""
    if not is_further_rank(vllm_config):
        return config
    return msgspec.structs.replace(
        config, replica=f"{config.replica}-dp{vllm_config.parallel_config.data_parallel_index}"
    )


def is_further_rank(vllm_config: Any) -> bool:
    """Return whether this is an engine of its own among several data parallel ranks, but not the first."""
    return not shares_experts(vllm_config) and bool(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def shares_experts(vllm_config: Any) -> bool:
    """Return whether the engine consists of several data parallel ranks of a mixture of experts. A dense model's are
    engines of their own; what serves them has the number of all in its configuration, they have 1."""
    is_moe = getattr(getattr(vllm_config, "model_config", None), "is_moe", True)
    return bool(getattr(vllm_config.parallel_config, "data_parallel_size", 1) > 1 and is_moe)
