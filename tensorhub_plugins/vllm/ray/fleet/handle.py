"""A run's fleet: replicas join and leave while it runs. One named actor a job, on Ray's head node.

    from tensorhub_plugins.vllm.ray.fleet import find

    fleet = find()  # of the Ray cluster that this machine belongs to; find("01000000") if several jobs have one
    fleet.list()  # a View: name, kind, state, version, requests, node of every member
    fleet.add(2)  # two more, as soon as there is room
    fleet.add_external("http://10.0.0.9:8000")  # a `vllm serve` that was started by hand
    fleet.drain("rollout-3", timeout_s=30)
    fleet.drain(node="10.0.0.7")  # a spot notice: its members come back elsewhere
    fleet.undrain("10.0.0.7")  # it stays after all
    fleet.target(8)  # keep 8

Each returns within seconds, with a sentence on what has begun; `tensorhub fleet` is the same as a command. A framework
calls `start` once, where it lives as long as the run; its dispatcher finds the actor by `of_this_job` and reports to
it (types.py). state.py decides, actor.py carries out, starter.py owns what was started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from tensorhub_plugins.core import Deadline, DeadlineExceeded, TensorHubError, UsageError, connected
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm.ray import policy
from tensorhub_plugins.vllm.ray.fleet.actor import FleetActor, sentence
from tensorhub_plugins.vllm.ray.fleet.events import DRAIN_TIMEOUT_S, Add, Drain, SetTarget
from tensorhub_plugins.vllm.ray.fleet.starter import Starter
from tensorhub_plugins.vllm.ray.fleet.types import Launcher, View
from tensorhub_plugins.vllm.ray.hub import ON_HEAD

FLEET, STARTER = "tensorhub_fleet_", "tensorhub_starter_"  # and the job's id
ANSWER_TIMEOUT_S = 15.0  # of a command, on a busy machine
CONNECT_TIMEOUT_S = 5.0
OPTIONS = ("fleet_min", "fleet_max", "fleet_target", "fleet_spares", "fleet_policy", "events")
CALLS_MAX = 10_000  # of one actor at a time; every member has one start or stop under way


# --- a framework's side -----------------------------------------------------------------------------------------------

_owned: dict[str, tuple[Any, Any]] = {}  # Ray ends an actor when its last handle is gone


def start(launcher: Launcher, options: TrainingOptions) -> Any:
    """Start the fleet's actor in a process that lives as long as the run; called again, return the same one.

    Raise UsageError for a policy that cannot be used."""
    if options.fleet_policy is not None:
        policy.load(options.fleet_policy)
    job = ray.get_runtime_context().get_job_id()
    if job not in _owned:
        how = {
            "get_if_exists": True,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": CALLS_MAX,
            **ON_HEAD,
        }
        starter = ray.remote(Starter).options(name=f"{STARTER}{job}", **how).remote(launcher)
        # Without what a framework adds: its package would be imported there.
        plain = TrainingOptions(**{name: getattr(options, name) for name in OPTIONS})
        fleet = ray.remote(FleetActor).options(name=f"{FLEET}{job}", **how).remote(f"{STARTER}{job}", plain)
        _owned[job] = starter, fleet
    return _owned[job][1]


def of_this_job() -> Any | None:
    """Return the fleet's actor, in any process of the job; None before `start`."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(f"{FLEET}{ray.get_runtime_context().get_job_id()}")
    return None


# --- people's side ----------------------------------------------------------------------------------------------------


class Fleet:
    """A running fleet. Every call returns within seconds, and raises UsageError for what cannot be."""

    def __init__(self, actor: Any, job: str) -> None:
        self.actor, self.job = actor, job

    def list(self) -> View:
        """Return its members, and what it aims at."""
        return self._answer(self.actor.view)

    def add(self, count: int) -> str:
        """Start so many more replicas of the run's own kind, as soon as there is room."""
        return self._said(self.actor.command, Add(count))

    def add_external(self, url: str) -> str:
        """Take in a server that was started by hand, as "http://host:port"."""
        return self._said(self.actor.add_external, url)

    def drain(
        self, name: str | None = None, *, node: str | None = None, timeout_s: float = DRAIN_TIMEOUT_S, now: bool = False
    ) -> str:
        """Give no more requests to this member, or to those on this node; end them when they have none left.

        timeout_s: then what is under way is given back, and goes on elsewhere. node: an address, a host's name, or
        Ray's id: nothing is started there any more, and what ran there comes back elsewhere; external servers whose
        address names it leave for good. now: also if too few others are ready, fleet_min or one; else a member that is
        drained by its name goes on until they are. A node goes away: its members never wait."""
        if (name is None) == (node is None):
            raise UsageError("drain: give a member's name or a node, one of the two")
        if name is None:
            return self._said(self.actor.drain_node, node, timeout_s)
        return self._said(self.actor.command, Drain(name, timeout_s, now))

    def undrain(self, node: str) -> str:
        """Start replicas on this node again, after `drain(node=...)`."""
        return self._said(self.actor.undrain_node, node)

    def target(self, count: int | None) -> str:
        """Keep so many replicas of the run's own kind. None: let the policy say how many."""
        return self._said(self.actor.command, SetTarget(count))

    def _said(self, method: Any, *arguments: Any) -> str:
        text, is_refused = self._answer(method, *arguments)
        if is_refused:
            raise UsageError(text)
        return str(text)

    def _answer(self, method: Any, *arguments: Any) -> Any:
        try:
            return ray.get(method.remote(*arguments), timeout=ANSWER_TIMEOUT_S)
        except GetTimeoutError as error:
            raise DeadlineExceeded(
                "the fleet does not answer: look at Ray's head node, and at `tensorhub fleet list` for what has begun",
                timeout_s=ANSWER_TIMEOUT_S,
            ) from error
        except RayActorError as error:
            raise TensorHubError(
                "the fleet's actor has just been lost; Ray starts it again while the run goes on: look at `tensorhub "
                "fleet list` for what has begun, and try again"
            ) from error


def find(job: str | None = None, address: str | None = None) -> Fleet:
    """Return the fleet of a run on a Ray cluster. Raise UsageError if there is none.

    job: Ray's id of it, where several have a fleet; address: of the cluster, "host:port"; None: the one that this
    machine belongs to."""
    fleets = find_all(job, address)
    if len(fleets) > 1:
        listed = _listed([fleet.job for fleet in fleets])
        raise UsageError(f"{len(fleets)} runs on this Ray cluster have a fleet: choose one by its job, {listed}")
    return fleets[0]


def find_all(job: str | None = None, address: str | None = None) -> list[Fleet]:
    """Return the fleets of all runs on a Ray cluster, or that of one job: see `find`. Raise UsageError if there is
    none."""
    if not ray.is_initialized():
        _connect(address)
    actors = {
        found["name"].removeprefix(FLEET): found
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["name"].startswith(FLEET)
    }
    if not actors:
        raise UsageError(
            "no run on this Ray cluster has a fleet: one is there once the rollouts have started, of verl with "
            "rollout.name=vllm_tensorhub, of OpenRLHF with --vllm.sync_backend tensorhub"
        )
    if job is not None and job not in actors:
        raise UsageError(f"job {job} has no fleet: there are {_listed(actors)}")
    fleets = []
    for name in [job] if job is not None else sorted(actors):
        with contextlib.suppress(ValueError):  # it has just ended
            actor = ray.get_actor(actors[name]["name"], namespace=actors[name]["namespace"])
            fleets.append(Fleet(actor, name))
    if not fleets:
        raise UsageError(f"the fleet of job {_listed([job] if job is not None else actors)} has just ended")
    return fleets


def _listed(jobs: Collection[str]) -> str:
    return ", ".join(sorted(jobs))


def _connect(address: str | None) -> None:
    try:
        host, _, port = (address or "").rpartition(":")  # Ray waits for minutes where nothing listens
        if host and port.isdigit() and "//" not in host:
            connected(host.strip("[]"), int(port), Deadline.after(CONNECT_TIMEOUT_S)).close()
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
        where = "this machine belongs to no Ray cluster"
        if address:  # Ray itself does not try its token at an address
            where = f"no Ray cluster answers at {address}, or it wants a token (then set RAY_AUTH_MODE=token)"
        raise UsageError(
            f"{where}: run this on one of its nodes, or give the head's address, e.g. --address 10.0.0.1:6379 "
            f"({sentence(error)})"
        ) from error
