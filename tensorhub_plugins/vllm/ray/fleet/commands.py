"""`tensorhub fleet`: what core/cli.py has parsed, said to the fleet of a running job."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time

import ray

from tensorhub_plugins.core import TensorHubError, UsageError, attempt_of, version_label
from tensorhub_plugins.vllm.ray import hub, secret
from tensorhub_plugins.vllm.ray.config import node_address
from tensorhub_plugins.vllm.ray.fleet.handle import Fleet, find, find_all
from tensorhub_plugins.vllm.ray.fleet.types import Member, View
from tensorhub_plugins.vllm.ray.preemption import LOOK_INTERVAL_S

GONE_POLL_S = 0.5


def run(options: argparse.Namespace) -> int:
    """Run one command; return its exit status."""
    if options.action == "guard":
        return guard(options)
    fleet = find(options.job, options.address)
    match options.action:
        case "list":
            print(text(fleet.list()))
            print(*_of_hub(fleet.job), sep="\n", end="")
        case "add" if options.url is not None:
            print(fleet.add_external(options.url))
        case "add":
            print(fleet.add(options.count))
        case "drain" if options.node is not None:
            print(fleet.drain(node=options.node, timeout_s=options.timeout))
        case "drain":
            print(fleet.drain(options.name, timeout_s=options.timeout, now=options.now))
        case "undrain":
            print(fleet.undrain(options.node))
        case "target":
            print(fleet.target(_target(options.count)))
    return 0


def _of_hub(job: str) -> list[str]:
    """Return how to ask the hub that this job has started; nothing of one that was there before."""
    named = secret.actor_name(job)
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["name"] == named:
            actor = ray.get_actor(**found)
            return [f"its hub, on the head node: {hub.command_of(actor, hub.address_of(actor))}", ""]
    return []


def _target(given: str) -> int | None:
    if given == "policy":
        return None
    try:
        return int(given)
    except ValueError as error:
        raise UsageError(f"target {given!r}: give a number, or `policy` to let the run's policy say it") from error


def guard(options: argparse.Namespace) -> int:
    """Wait for SIGTERM or SIGUSR1, then drain this node and wait until nothing of any fleet is left on it."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: told.set())
    print(
        f"tensorhub: SIGTERM or SIGUSR1 drains this node, with {options.timeout:.0f} s for what is under way",
        flush=True,
    )
    while not told.wait(LOOK_INTERVAL_S):
        pass
    fleets = find_all(options.job, options.address)  # the node goes away for every job
    deadline = time.monotonic() + options.timeout
    begun = [_has_begun_to_drain(fleet, options.timeout) for fleet in fleets]
    left = [fleet for fleet, is_draining in zip(fleets, begun, strict=True) if is_draining]
    while (left := [fleet for fleet in left if _is_leaving(fleet, node_address())]) and time.monotonic() < deadline:
        time.sleep(GONE_POLL_S)
    if left:
        print(f"tensorhub: not all have left after {options.timeout:.0f} s", file=sys.stderr)
    return 0 if all(begun) and not left else 1


def _has_begun_to_drain(fleet: Fleet, timeout_s: float) -> bool:
    try:
        print(fleet.drain(node=ray.get_runtime_context().get_node_id(), timeout_s=timeout_s), flush=True)
        return True
    except TensorHubError as error:  # the other jobs' are still to be drained
        print(f"tensorhub: job {fleet.job}: {error.message}", file=sys.stderr)
        return False


def _is_leaving(fleet: Fleet, address: str) -> bool:
    try:
        members = fleet.list().members
    except TensorHubError:  # its actor has just been lost: Ray starts it again, or the job has ended and all is empty
        return fleet.job in {one.job for one in _living()}
    return any(one.node == address and one.state in ("draining", "stopping") for one in members)


def _living() -> list[Fleet]:
    try:
        return find_all()
    except UsageError:
        return []


def text(view: View) -> str:
    """Return the view as text for a terminal."""
    names = ("NAME", "KIND", "STATE", "VERSION", "IN FLIGHT", "NODE", "SINCE", "WHY")
    rows = [names, *(_row(member) for member in view.members), *(_row(member) for member in view.gone)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    by = f", set by {view.policy}" if view.policy else ""
    limits = f"fleet_min {view.minimum}, fleet_max {view.maximum}"
    ready = view.count("ready")
    spares = f", {sum(one.state == 'spare' for one in view.members)} of {view.spares} spares" if view.spares else ""
    room = f"room for {view.slots} more; {view.waiting} requests wait"
    lines.append(f"target {view.target}{by}, {ready} ready{spares}; {limits}; {room}")
    attempt = max((attempt_of(member.version) for member in view.members), default=0)
    if attempt:
        lines.append(f"the trainer is in attempt {attempt}: VERSION is attempt/step, of attempt 0 a step")
    return "\n".join(lines)


def _row(member: Member) -> tuple[str, ...]:
    version = version_label(member.version) if member.version else "-"
    since = f"{member.since_s:.0f} s" if member.since_s < 600 else f"{member.since_s / 60:.0f} min"
    return (member.name, member.kind, member.state, version, str(member.in_flight), member.node, since, member.why)
