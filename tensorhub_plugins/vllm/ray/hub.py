"""The hub that a run brings along: an actor on Ray's head node, on a fixed port, restarted by Ray without limit.

Its state is soft: after kill -9, or where it has failed by itself, it comes back at the same address and every worker
tells it again what it holds; no other process is restarted.

It has a secret that is never shown: the processes of the job ask the actor for it (secret.py), and people find it in
a file on the head node. Where the environment or Ray's own token names one, that is it.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server
from threading import Thread
from typing import Any

import ray

from tensorhub_plugins.core import Client, HubUnreachable, UsageError, ports_of
from tensorhub_plugins.vllm.ray import secret
from tensorhub_plugins.vllm.ray.actor_handles import answer
from tensorhub_plugins.vllm.ray.config import node_address

HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to the head node only
CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 300.0  # an actor's process on a busy machine: a minute; placing it on a cluster that scales: more
ALIVE_CHECK_S = 1.0
ON_HEAD = {"num_cpus": 0, "resources": {HEAD_NODE: 0.001}}


def start(ports: str | None = None) -> tuple[Any, str]:
    """Return this job's hub, made if there is none: its actor and the hub's address. Ray ends it when its last handle
    is gone: the caller keeps it. ports: as of `StoreOptions`."""
    address = ray.remote(_free_address).options(**ON_HEAD).remote(ports)
    host, port = answer(address, "started a task on its head node", timeout_s=START_TIMEOUT_S)
    actor_class = ray.remote(_hub_class()).options(
        max_restarts=-1, max_task_retries=-1, name=secret.actor_name(), get_if_exists=True, **ON_HEAD
    )
    context = ray.get_runtime_context()
    file = f"{context.get_temp_dir()}/{context.get_session_name()}/{secret.actor_name()}.secret"
    actor = actor_class.remote(host, port, secret.choose().text(), file)
    return actor, address_of(actor)


def address_of(actor: Any) -> str:
    return str(answer(actor.address.remote(), "started the hub on its head node", timeout_s=START_TIMEOUT_S))


def command_of(actor: Any, address: str) -> str:
    """Return the command that shows on the head node what the hub knows."""
    file = answer(actor.secret_file.remote(), "started the hub on its head node", timeout_s=START_TIMEOUT_S)
    return f"tensorhub status --hub {address} --secret-file {file}"


def run_name(framework: str) -> str:
    """Return a name for the run at the hub, unique for this Ray cluster and job."""
    context = ray.get_runtime_context()
    return f"{framework}-{context.get_session_name()}-{context.get_job_id()}"


def check(address: str, otherwise: str) -> None:
    """UsageError unless a hub answers there. otherwise: what else users can do than to start one."""
    try:
        Client(address, run="probe", model="probe", replica="probe", connect_timeout_s=CONNECT_TIMEOUT_S).close()
    except HubUnreachable as error:
        raise unanswered(error, address, otherwise) from error


def unanswered(error: Exception, address: str, otherwise: str) -> UsageError:
    """Return the error for a hub that cannot be reached at the start."""
    start = f"start one with `tensorhub server --address {address}`"
    return UsageError(f"no hub answers at {address}: {start}, {otherwise} ({error})")


def _free_address(ports: str | None) -> tuple[str, int]:
    """Return this node's address as other nodes reach it, and a port that is free now, of those that may be used."""
    host = node_address()
    for port in reversed(ports_of(ports)):  # workers take the first ones, also while it is started again
        try:
            with create_server((host, port), family=(AF_INET, AF_INET6)[":" in host]) as probe:
                return host, probe.getsockname()[1]
        except OSError as error:
            why = error.strerror
    raise UsageError(f"the hub cannot listen on {host}, with no port that it may use (TENSORHUB_PORTS, ports): {why}")


def _hub_class() -> type:
    # Made here and not at the top of the file: Ray then sends the class by value, and a restarted hub is up without
    # importing the framework, which takes many seconds.
    class TensorHub:
        def __init__(self, host: str, port: int, secret: str, file: str) -> None:
            from tensorhub_plugins.core import Keys, UsageError, record, start_server, write_secret

            host = f"[{host}]" if ":" in host else host
            keys = Keys.parse(secret)
            self.keys = keys.text()
            self.server = self._serve(lambda: start_server(f"tcp://{host}:{port}", keys=keys))
            self.file = file
            with suppress(UsageError):  # it has been started again
                write_secret(Path(file), keys)
            record("hub", worker="hub", address=self.server.address, secret_file=file)
            Thread(target=self._end_with_it, daemon=True).start()

        def _serve(self, start: Any) -> Any:
            # An actor whose constructor raises is gone for good, also one that Ray has started again.
            said = ""
            while True:
                try:
                    return start()
                except Exception as error:  # another process has the port, or it was refused a resource
                    if not ray.get_runtime_context().was_current_actor_reconstructed:
                        raise
                    if str(error) != said:
                        said = str(error)
                        logging.getLogger("tensorhub.hub").warning("the hub cannot be started again yet: %s", said)
                    time.sleep(ALIVE_CHECK_S)

        def _end_with_it(self) -> None:
            while self.server.is_alive():
                time.sleep(ALIVE_CHECK_S)
            os._exit(1)  # Ray starts it again

        def address(self) -> str:
            return str(self.server.address)

        def secret(self) -> str:
            return str(self.keys)

        def secret_file(self) -> str:
            return str(self.file)

    return TensorHub
