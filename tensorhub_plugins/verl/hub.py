"""Where the hub is: at the configured address, or in an actor that verl's manager starts (../vllm/ray/hub.py), under a
name by which all processes of the run find it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from tensorhub_plugins.core import HubUnreachable
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl.config import WHERE, Options
from tensorhub_plugins.vllm.ray import hub as ray_hub
from tensorhub_plugins.vllm.ray import secret

logger = get_logger(__name__)

POLL_INTERVAL_S = 0.1


def run_name(options: Options) -> str:
    """Return the run's name at the hub: as configured, else unique for this Ray cluster and job."""
    return options.run if options.run is not None else ray_hub.run_name("verl")


def ensure(options: Options) -> str:
    """Return the hub's address; start the embedded hub when none is configured. Called where verl's manager lives,
    which owns the actor: it ends with the run."""
    if options.hub is not None:
        return options.hub
    name = secret.actor_name()
    if name in _addresses:
        return _addresses[name]  # it never changes: no update waits for a hub that is being started again
    try:
        actor = ray.get_actor(name)
        address = ray_hub.address_of(actor)
    except ValueError:
        actor, address = ray_hub.start(options.ports)
    _owned[name] = actor
    _addresses[name] = address
    command = ray_hub.command_of(actor, address)
    logger.info("the hub of %s is at %s; on the head node: %s", run_name(options), address, command)
    return address


async def find(options: Options, *, timeout_s: float = ray_hub.START_TIMEOUT_S) -> str:
    """Return the hub's address, as a process learns it that is not configured with one: wait until the manager has
    started the hub."""
    if options.hub is not None:
        return options.hub
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return str(await ray.get_actor(secret.actor_name()).address.remote())
        except (ValueError, ray.exceptions.RayActorError) as error:
            if time.monotonic() > deadline:
                raise HubUnreachable(
                    f"the embedded hub did not start: look for actor {secret.actor_name()} in Ray's logs, or start "
                    f"`tensorhub server` and set {WHERE}.hub to the address it prints",
                    timeout_s=timeout_s,
                ) from error
            await asyncio.sleep(POLL_INTERVAL_S)


_owned: dict[str, Any] = {}  # Ray ends an actor when its last handle is gone
_addresses: dict[str, str] = {}
