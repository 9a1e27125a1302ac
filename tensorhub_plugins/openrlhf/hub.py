"""Where the hub is: at the address in the flag, or in an actor that the driver starts (../vllm/ray/hub.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorhub_plugins.openrlhf.config import NO_HUB, Options
from tensorhub_plugins.vllm.ray import hub as ray_hub
from tensorhub_plugins.vllm.ray import secret

_owned: list[Any] = []  # Ray ends an actor when its last handle is gone: the driver keeps it


def resolve(options: Options) -> Options:
    """Return the same options with a hub that answers and a run that has a name. Runs in the driver, once Ray is
    there."""
    if options.run is None:
        options = msgspec.structs.replace(options, run=ray_hub.run_name("openrlhf"))
    if options.hub is None:
        actor, address = ray_hub.start(options.ports)
        _owned.append(actor)
        options = msgspec.structs.replace(options, hub=address)
        secret.learn()
        print(f"tensorhub: on the head node: {ray_hub.command_of(actor, address)}", flush=True)
    assert options.hub is not None
    ray_hub.check(options.hub, NO_HUB)
    return options
