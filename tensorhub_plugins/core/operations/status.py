"""What a hub knows, fetched and as text: for `tensorhub status`, `top`, and programs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.client.connection import end_context
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import HubUnreachable, TensorHubError, UsageError
from tensorhub_plugins.core.operations import problems as wrong
from tensorhub_plugins.core.operations.problems import Problem, ago, rate_text
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import (
    check_route,
    hub_addresses,
    new_session,
    no_way,
    parse_address,
    resolve,
)
from tensorhub_plugins.core.security import curve, secret
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.types import printable, version_label

CHECK_S = 0.1


def fetch_status(address: str, *, timeout_s: float = 5.0, keys: Keys | None = None) -> dict[str, Any]:
    """Return the hub's report. Raise HubUnreachable when none answers in time, UsageError when it does not admit us, or
    its name does not exist. address: one or several, separated by commas, which share timeout_s."""
    deadline, addresses = Deadline.after(timeout_s), hub_addresses(address)
    keys = secret.given(keys)
    problems: list[TensorHubError] = []
    for number, each in enumerate(addresses):
        left_s = deadline.remaining() / (len(addresses) - number)
        try:
            return _fetch_status(each, Deadline.after(left_s), keys, number == len(addresses) - 1)
        except HubUnreachable as error:
            problems.append(error)
        except UsageError as error:
            if len(addresses) == 1:
                raise
            problems.append(error)
    *_, last = problems
    raise last.within(last.message, peer=address, phase="status", timeout_s=timeout_s)


@resources.named()
def _fetch_status(address: str, deadline: Deadline, keys: Keys | None, is_last: bool) -> dict[str, Any]:
    host, port = parse_address(address, "tcp")
    try:
        found = resolve(host, deadline)
    except (OSError, ValueError) as error:
        raise no_way(address, error) from error
    check_route(address, found)
    resources.try_for_zmq(0)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    curve.guard_client(socket, keys)
    handshakes = curve.Handshakes(socket, address, keys)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.IDENTITY, new_session())
        socket.setsockopt(zmq.MAXMSGSIZE, messages.FROM_HUB_SIZE_BYTES_MAX)
        try:
            for each in found:  # ZeroMQ asks the first one that admits us
                handshakes.connect(each, port)
        except zmq.ZMQError as error:
            raise UsageError(f"{address!r} is no hub address: use tcp://host:port") from error
        wanted = zmq.POLLOUT
        while deadline.remaining():
            ready = socket.poll(int(1000 * min(CHECK_S, deadline.remaining())), wanted)
            if ready & zmq.POLLOUT:
                socket.send(messages.encode(messages.AskStatus(1)))
                wanted = zmq.POLLIN
            elif ready:
                reply = messages.decode_from_hub(socket.recv())
                if isinstance(reply, messages.Status):
                    return reply.report
                if isinstance(reply, messages.Refused):
                    raise UsageError(f"the hub refuses it: {printable(reply.message)}", peer=address, phase="status")
            problem = handshakes.problem(time.monotonic())
            if problem is not None:
                raise UsageError(problem, phase="status")
            if handshakes.is_refused and len(found) == 1 and not is_last:
                break
        raise HubUnreachable(handshakes.unheard(), peer=address, phase="status")
    finally:
        handshakes.close()
        socket.close()
        end_context(context)


def directive_text(run: str, model: str, pin: int | None, withdrawn: Sequence[int]) -> str:
    """Return one line for users."""
    words = f"{run}/{model}: " + (
        f"version {version_label(pin)} is pinned" if pin else "no version is pinned, followers run the newest"
    )
    return f"{words}; withdrawn: {', '.join(map(version_label, withdrawn))}" if withdrawn else words


def escaped(found: Any) -> Any:
    """Return it without characters that control how it is printed: any hub may have sent it."""
    match found:
        case str():
            return printable(found)
        case dict():
            return {escaped(key): escaped(value) for key, value in found.items()}
        case list():
            return [escaped(each) for each in found]
        case _:
            return found


def _worker_lines(worker: dict[str, Any]) -> list[str]:
    host = worker["location"]["host"] or "host unknown"
    holds = f"[{', '.join(map(version_label, worker['holds']))}]" if worker["holds"] else "nothing"
    line = (
        f"  worker {worker['worker']} on {host}: holds {holds}, "
        f"{worker['bytes_held'] / 1e6:.1f} MB, heard {worker['last_heard_s']:.1f} s ago"
    )
    if follows := worker.get("follows"):
        line = f"{line}, runs {follows_text(follows)}"
    lines = [line]
    if corrupt := worker.get("corrupt_segments"):
        lines.append(f"    readers got {corrupt} corrupt segments from it: see its log and theirs")
    if refuses := worker.get("refuses"):
        why = refuses["why"] or "its log says why"
        lines.append(f"    it cannot install version {version_label(refuses['version'])}: {why}")
    elif worker.get("fails"):
        lines.append(f"    its last try to install one failed: {worker['fails']}")
    if waits := wrong.waits_text(worker):
        lines.append(f"    it {waits}")
    if worker.get("unreached"):
        lines.append(f"    {worker['unreached']}")
    return lines


def follows_text(follows: dict[str, Any]) -> str:
    """Return what a follower runs, and how far that is behind: "9 (7 steps behind, for 70 s)"."""
    version = version_label(follows["version"]) if follows["version"] else "none yet"
    steps, behind_s = follows["lag_steps"], follows["behind_s"]
    return f"{version} ({steps} step{'s' * (steps > 1)} behind, for {ago(behind_s)})" if steps else version


def at(report: Mapping[str, Any]) -> str:
    """Return where the hub was asked, for a headline."""
    return f" at {report['address']}" if "address" in report else ""


def status_text(report: dict[str, Any], problems: Sequence[Problem] | None = None) -> str:
    """Return the report as text for users, what is wrong first. problems: what was found in it; None: look."""
    report = escaped(report)
    found = wrong.find(report) if problems is None else [Problem(*map(printable, each)) for each in problems]
    state = "" if found else ", nothing is wrong" if report["models"] else ", no worker is connected"
    lines = [f"hub {report['hub'][:8]}{at(report)}, up {ago(report['up_s'])}, {len(report['models'])} models{state}"]
    for problem in found:
        lines += [f"! {problem.of}: {problem.what}", *([f"    {problem.to_do}"] if problem.to_do else [])]
    for model in report["models"]:
        lines += ["", *_model_lines(model)]
    if report.get("left_out"):
        lines.append(f"\nand {report['left_out']} more models, for which there is no room")
    return "\n".join(lines)


def _model_lines(model: dict[str, Any]) -> list[str]:
    newest = version_label(model["newest"]) if model["newest"] else "none"
    age = f", published {ago(model['newest_age_s'])} ago" if model["newest"] and "newest_age_s" in model else ""
    lines = [f"{model['run']}/{model['model']}: newest version {newest}{age}"]
    if model.get("attempt"):
        lines.append(f"  the trainer is in attempt {model['attempt']}: versions are attempt/step, those of 0 a step")
    pin, withdrawn = model.get("pinned"), model.get("withdrawn", [])
    if pin or withdrawn:
        lines.append(f"  {directive_text(model['run'], model['model'], pin, withdrawn)}")
    for version in model["versions"]:
        state = "visible" if version["visible"] else "not visible"
        if version["version"] in withdrawn:
            state = "withdrawn"
        elif version["version"] == pin:
            state = f"{state}, pinned"
        lines.append(f"  version {version_label(version['version'])} ({state})")
        lines += [f"    {layout}: {', '.join(workers)}" for layout, workers in version["layouts"].items()]
    lines += [line for worker in model["workers"] for line in _worker_lines(worker)]
    if read := model.get("read_bytes"):
        by_way = ", ".join(f"{way} {size / 1e6:.1f} MB" for way, size in sorted(read.items()))
        lines.append(f"  read so far: {by_way}; {model['wire_bytes'] / 1e6:.1f} MB on the wire")
    for lease in model["leases"]:
        sources = ", ".join(sorted(set(lease["sources"].values())))
        lines.append(
            f"  lease: {lease['reader']} reads version {version_label(lease['version'])} {lease['layout']} "
            f"from {sources}{rate_text(lease)}, {lease['seconds_left']:.0f} s left"
        )
    if model.get("left_out"):
        lines.append(f"  and {model['left_out']} more entries, for which there is no room")
    return lines
