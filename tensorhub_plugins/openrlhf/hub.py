"""Where the hub is: at the address in the flag, or in an actor that the driver starts on Ray's head node.

The embedded hub is an actor on a fixed port, restarted by Ray without limit. Its state is soft: after kill -9 it comes
back at the same address and every worker tells it again what it holds; no other process is restarted.
"""

from __future__ import annotations

from typing import Any

import msgspec
import ray

from tensorhub_plugins.core import Client
from tensorhub_plugins.core.errors import HubUnreachable, UsageError
from tensorhub_plugins.openrlhf.config import FLAG, NAME, Options

HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to the head node only
START_S = 60.0  # an actor's process on a busy machine: seconds; placing it on a cluster that scales: more
CONNECT_S = 10.0

_owned: list[Any] = []  # Ray ends an actor when its last handle is gone: the driver keeps it


def resolve(options: Options) -> Options:
    """Runs in the driver, once Ray is there: the same options with a hub that answers and a run that has a name."""
    if options.run is None:
        context = ray.get_runtime_context()
        options = msgspec.structs.replace(options, run=f"openrlhf-{context.get_session_name()}-{context.get_job_id()}")
    if options.hub is None:
        options = msgspec.structs.replace(options, hub=_start())
    assert options.hub is not None and options.run is not None
    check(options.hub)
    return options


def check(address: str) -> None:
    """UsageError unless a hub answers there."""
    try:
        Client(address, run="probe", model="probe", replica="probe", connect_deadline_s=CONNECT_S).close()
    except HubUnreachable as error:
        raise UsageError(
            f"no hub answers at {address}: start one with `tensorhub server --address {address}`, correct {FLAG}, or "
            f"write {FLAG} {NAME} to let the run bring its own"
        ) from error


def _start() -> str:
    on_head = {"num_cpus": 0, "resources": {HEAD_NODE: 0.001}}
    host, port = ray.get(ray.remote(_free_address).options(**on_head).remote(), timeout=START_S)
    actor = ray.remote(_hub_class()).options(max_restarts=-1, max_task_retries=-1, **on_head).remote(host, port)
    _owned.append(actor)
    return str(ray.get(actor.address.remote(), timeout=START_S))


def _free_address() -> tuple[str, int]:
    """This node's address as other nodes reach it, and a port that is free now."""
    import socket

    host = ray.util.get_node_ip_address().strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _hub_class() -> type:
    # Made here and not at the top of the file: Ray then sends the class by value, and a restarted hub is up without
    # importing this adapter.
    class TensorHub:
        def __init__(self, host: str, port: int) -> None:
            from tensorhub_plugins.core import start_server

            host = f"[{host}]" if ":" in host else host
            self.server = start_server(f"tcp://{host}:{port}")

        def address(self) -> str:
            return str(self.server.address)

    return TensorHub
