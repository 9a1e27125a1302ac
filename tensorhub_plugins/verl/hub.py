"""Where the hub is: at the configured address, or in an actor that verl's manager starts on Ray's head node.

The embedded hub is a named actor on a fixed port, restarted by Ray without limit. Its state is soft: after kill -9 it
comes back at the same address and every worker tells it again what it holds; no other process is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from tensorhub_plugins.core.errors import HubUnreachable
from tensorhub_plugins.verl.config import WHERE, Options

log = logging.getLogger(__name__)

HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to the head node only
START_S = 60.0  # an actor's process on a busy machine: seconds; placing it on a cluster that scales: more
POLL_S = 0.1


def run_name(options: Options) -> str:
    """The run's name at the hub: as configured, else unique for this Ray cluster and job."""
    if options.run is not None:
        return options.run
    context = ray.get_runtime_context()
    return f"verl-{context.get_session_name()}-{context.get_job_id()}"


def ensure(options: Options) -> str:
    """The hub's address; starts the embedded hub when none is configured. Called where verl's manager lives, which
    owns the actor: it ends with the run."""
    if options.hub is not None:
        return options.hub
    name = _actor_name()
    if name in _addresses:
        return _addresses[name]  # it never changes: no update waits for a hub that is being started again
    on_head = {"num_cpus": 0, "resources": {HEAD_NODE: 0.001}}
    try:
        actor = ray.get_actor(name)
    except ValueError:
        host, port = ray.get(ray.remote(_free_address).options(**on_head).remote(), timeout=START_S)
        options_of_actor = {"name": name, "get_if_exists": True, "max_restarts": -1, "max_task_retries": -1}
        actor = ray.remote(_hub_class()).options(**options_of_actor, **on_head).remote(host, port)
    _owned[name] = actor
    _addresses[name] = address = str(ray.get(actor.address.remote(), timeout=START_S))
    log.warning("the hub of %s is at %s: tensorhub status --hub %s", run_name(options), address, address)
    return address


async def find(options: Options, *, deadline_s: float = START_S) -> str:
    """The hub's address, as a process learns it that is told nothing: waits until the manager has started the hub."""
    if options.hub is not None:
        return options.hub
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return str(await ray.get_actor(_actor_name()).address.remote())
        except (ValueError, ray.exceptions.RayActorError) as error:
            if time.monotonic() > deadline:
                raise HubUnreachable(
                    f"the embedded hub did not start: look for actor {_actor_name()} in Ray's logs, or start "
                    f"`tensorhub server` and set {WHERE}.hub to the address it prints",
                    deadline_s=deadline_s,
                ) from error
            await asyncio.sleep(POLL_S)


_owned: dict[str, Any] = {}  # Ray ends an actor when its last handle is gone
_addresses: dict[str, str] = {}


def _actor_name() -> str:
    return f"tensorhub_hub_{ray.get_runtime_context().get_job_id()}"


def _free_address() -> tuple[str, int]:
    """This node's address as other nodes reach it, and a port that is free now."""
    import socket

    host = ray.util.get_node_ip_address().strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _hub_class() -> type:
    # Made here and not at the top of the file: Ray then sends the class by value, and a restarted hub is up without
    # importing verl, which takes many seconds.
    class TensorHub:
        def __init__(self, host: str, port: int) -> None:
            from tensorhub_plugins.core import start_server
            from tensorhub_plugins.core.events import record

            host = f"[{host}]" if ":" in host else host
            self.server = start_server(f"tcp://{host}:{port}")
            record("hub", worker="hub", address=self.server.address)

        def address(self) -> str:
            return str(self.server.address)

    return TensorHub
