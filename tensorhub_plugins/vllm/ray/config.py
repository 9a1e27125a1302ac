"""What a framework's options mean in its Ray actors: clients of the store, and the configuration of vLLM's workers."""

from __future__ import annotations

from typing import Any

import msgspec
import ray

from tensorhub_plugins.core import Client, Location, here
from tensorhub_plugins.core.options import StoreOptions, TrainingOptions


def location_of(given: TrainingOptions) -> Location:
    """Where this process is. Options are the same on every node, so what a node's own environment says comes first."""
    own = here()
    parts = {part: value for part, value in given.location.items() if not getattr(own, part)}
    return msgspec.structs.replace(own, **parts)


def connect(given: TrainingOptions, *, replica: str, shard: int = 0, shard_count: int = 1) -> Client:
    """A client of the store, whose hub and run are known by now."""
    assert given.hub is not None and given.run is not None
    return Client(
        given.hub,
        run=given.run,
        model=given.model,
        replica=replica,
        shard=shard,
        shard_count=shard_count,
        location=location_of(given),
        transports=given.transports,
        advertise_host=node_address(),
    )


def worker_config(given: TrainingOptions, *, replica: str) -> dict[str, Any]:
    """What `tensorhub_connect` takes in the workers of an engine on this node; hub and run are known by now."""
    location = location_of(given)
    own = {
        "replica": replica,
        "location": {"data_center": location.data_center, "rack": location.rack, "host": location.host},
        "advertise_host": node_address(),
    }
    return {**{name: getattr(given, name) for name in StoreOptions.__struct_fields__}, **own}


def node_address() -> str:
    """This node's, as other nodes reach it."""
    return str(ray.util.get_node_ip_address().strip("[]"))
