"""What a framework's options mean in its Ray actors: clients of the store, and the configuration of vLLM's workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import ray

from tensorhub_plugins.core import PREEMPTIBLE_VARIABLE, Client, Location, Publisher, UsageError, here, with_faster
from tensorhub_plugins.core.options import StoreOptions, TrainingOptions
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.ray import secret

LABEL_PREFIX = "tensorhub.io/"  # ray start --labels tensorhub.io/data-center=eu,tensorhub.io/rack=r7
AGAIN_TIMEOUT_S = 60.0  # for a hub that has answered in this run: Ray may be starting it again, on a busy machine
MARKET_LABEL = "ray.io/market-type"  # likewise: "spot" or "on-demand"
ZONE_LABELS = ("ray.io/availability-region", "ray.io/availability-zone")  # KubeRay and Ray's autoscaler set them


def location_of(given: TrainingOptions) -> Location:
    """Return where this process is: what its environment says, then its node's labels, then the options (they are the
    same on every node), then the zone that the cloud has labelled the node with.

    One reader in a data centre reads from afar, and the others from it."""
    labels = node_labels()
    marked = {part: labels.get(f"{LABEL_PREFIX}{part.replace('_', '-')}", "") for part in ("data_center", "rack")}
    zone = {"data_center": "/".join(labels[name] for name in ZONE_LABELS if labels.get(name))}
    found = here()
    for says in (marked, given.location, zone):
        missing = {part: value for part, value in says.items() if value and not getattr(found, part)}
        found = msgspec.structs.replace(found, **missing)
    return found


def preemptible_by(labels: Mapping[str, str]) -> bool | None:
    """Return whether a node with these labels may be taken away at short notice: `tensorhub.io/preemptible`, true or
    false, else the market that it was bought on. None: they do not say. Raise UsageError for another value of ours."""
    name = f"{LABEL_PREFIX}preemptible"
    ours = labels.get(name)
    if ours is not None and ours not in ("true", "false"):
        raise UsageError(f"the node's label {name}={ours}: true, or false")
    if ours is not None:
        return ours == "true"
    return labels[MARKET_LABEL] == "spot" if MARKET_LABEL in labels else None


def is_preemptible() -> bool | None:
    """Return whether this node is, by its labels; None: its environment decides, or nothing is known."""
    return None if PREEMPTIBLE_VARIABLE in os.environ else preemptible_by(node_labels())


def node_labels() -> dict[str, str]:
    """Return the labels of this node that `ray start --labels` has set; none in a process that Ray has not started."""
    if not ray.is_initialized():
        return {}
    return {str(name): str(value) for name, value in ray.get_runtime_context().get_node_labels().items()}


def connect(
    given: TrainingOptions, *, replica: str, shard: int = 0, shard_count: int = 1, is_known: bool = False
) -> Client:
    """Make a client of the store, whose hub and run are known by now. is_known: the hub has answered in this run."""
    assert given.hub is not None and given.run is not None
    secret.learn()
    patience: dict[str, Any] = {"connect_timeout_s": AGAIN_TIMEOUT_S} if is_known else {}
    joining = WorkerConfig(**worker_config(given, replica=replica))
    return joining.connect(shard=shard, shard_count=shard_count, **patience)


def publisher_of(client: Client, given: TrainingOptions, **own: Any) -> Publisher:
    """Make the publisher of this trainer rank's client. own: options of Publisher that depend on the framework."""
    return Publisher(
        client,
        rank=client.shard,
        ranks=client.shard_count,
        worker=f"{client.replica}/{client.shard}",
        keep=given.keep,
        timeout_s=given.timeout_s,
        retain=given.retain,
        begins=True,
        in_background=given.in_background,
        device_room_bytes=given.device_room_bytes,
        **own,
    )


def worker_config(given: TrainingOptions, *, replica: str, adapter: bool = False) -> dict[str, Any]:
    """Return what `tensorhub_connect` takes in the workers of an engine on this node; hub and run are known by now.
    adapter: the run's model is a LoRA adapter, over weights that are not the store's."""
    location = location_of(given)
    own = {
        "replica": replica,
        "location": {"data_center": location.data_center, "rack": location.rack, "host": location.host},
        "advertise_host": ",".join(with_faster([node_address()])),
        "job": job(),
        "preemptible": is_preemptible(),
        **({"lora": [given.model], "model": f"{given.model}.base"} if adapter else {}),
    }
    return {**{name: getattr(given, name) for name in StoreOptions.__struct_fields__}, **own}


def job() -> str | None:
    """Return what the hub recognizes a restarted actor or engine by: Ray's job, as all its processes say."""
    if os.environ.get("TENSORHUB_JOB") or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_session_name()}-{context.get_job_id()}"


def node_address() -> str:
    """Return the address of this node, as other nodes reach it."""
    return str(ray.util.get_node_ip_address().strip("[]"))
