"""What users of vLLM write: the configuration of a worker, and of an engine that starts from the store."""

from __future__ import annotations

import os
import socket
from typing import Any, Literal

import msgspec

from tensorhub_plugins.core import DEFAULT_TRANSPORTS, LATEST, Client, Location, UsageError

HUB_ENVIRONMENT = "TENSORHUB_HUB"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tensorhub_connect` takes, as a dict. Every worker of an engine gets the same."""

    hub: str  # "tcp://host:port"
    run: str
    model: str
    replica: str  # one name per engine; live engines of a run must have different ones
    location: Location | None = None  # None: this host, see core.client.here
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    advertise_host: str | None = None
    install: Literal["staged", "direct"] = "staged"
    serve_from: Literal["host", "live"] | None = None  # None: "host" if staged, "live" if direct
    verify: bool = False  # hash the live weights after every install, in the background; always on with events
    connect_timeout_s: float = 10.0
    drain_timeout_s: float = 30.0  # for readers of the live weights before an install; then they are cut off
    serve_timeout_s: float = 120.0  # for what serving takes after an install: publishing, dropping the last version

    @property
    def source(self) -> Literal["host", "live"]:
        return self.serve_from or ("host" if self.install == "staged" else "live")

    def connect(self, *, replica: str | None = None, **options: Any) -> Client:
        """A client of the store, as this engine or under another name. options: of Client, over these."""
        given: dict[str, Any] = {
            "location": self.location,
            "transports": self.transports,
            "advertise_host": self.advertise_host,
            "connect_timeout_s": self.connect_timeout_s,
            **options,
        }
        return Client(self.hub, run=self.run, model=self.model, replica=replica or self.replica, **given)

    @staticmethod
    def parse(config: dict[str, Any]) -> WorkerConfig:
        """Raise UsageError saying which key is wrong."""
        try:
            parsed = msgspec.convert(config, WorkerConfig)
        except msgspec.ValidationError as error:
            known = ", ".join(WorkerConfig.__struct_fields__)
            raise UsageError(f"tensorhub's vLLM configuration: {error}; known keys: {known}") from error
        if parsed.install == "direct" and parsed.serve_from == "host":
            raise UsageError('install="direct" keeps nothing in host memory: use serve_from="live"')
        return parsed


class StartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--model-loader-extra-config` takes besides the keys of WorkerConfig.

    Of those, hub (or the environment's TENSORHUB_HUB) and model must be given; run is "default", serve_from "live".
    """

    version: int | Literal["latest"] = LATEST
    disk: Literal["never", "fallback", "only"] = "never"  # fallback: when the store has no version at all, or loses it
    disk_version: int = 0  # the version as which weights from disk are served to others; 0: they are not
    start_timeout_s: float = 600.0  # for the first version to appear and arrive
    follow: Literal["idle", "now"] | None = None  # switch to every new version, see engine.py
    follow_patience_s: float = 60.0  # "idle": after this long without an idle moment, switch at once


def parse(options: Any, vllm_config: Any) -> tuple[StartConfig, WorkerConfig | None]:
    """UsageError says which key is wrong. No WorkerConfig: the weights come from disk and nobody else is asked."""
    options = dict(options or {})
    mine = {key: options.pop(key) for key in StartConfig.__struct_fields__ if key in options}
    try:
        start = msgspec.convert(mine, StartConfig)
    except msgspec.ValidationError as error:
        known = ", ".join((*StartConfig.__struct_fields__, *WorkerConfig.__struct_fields__))
        raise UsageError(f"model_loader_extra_config: {error}; known keys: {known}") from error
    if start.disk == "only" and not options and not start.follow:
        return start, None
    return start, configure({"serve_from": "live", **options}, vllm_config)


def configure(options: dict[str, Any], vllm_config: Any) -> WorkerConfig:
    """What a person gives on vLLM's command line, with what can be known filled in; UsageError says what is wrong."""
    filled = {"run": "default", "replica": f"{socket.gethostname()}-{vllm_config.instance_id}", **options}
    if not filled.get("hub") and os.environ.get(HUB_ENVIRONMENT):
        filled["hub"] = os.environ[HUB_ENVIRONMENT]
    return WorkerConfig.parse(filled)
