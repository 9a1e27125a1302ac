"""The system refuses a thread, a descriptor, memory, a call: at each public call, each in a process of its own.

Either another way is taken, or the call raises ResourceRefused, which names what is lacking and what raises the limit:
nothing is killed, nothing else is raised, nobody else is blamed, and when the limit is lifted the same call succeeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_plugins.core import Client
from tensorhub_plugins.core.hub.server import start_server

CHILD = Path(__file__).with_name("refused.py")
GROUPS = {"REFUSED_PIDS": "pids", "REFUSED_MEMORY": "memory"}  # control groups of version 1
LARGE_BYTES = 400 << 20  # more than the group of "memory of the group" may have, less than a machine
CALL_S_MAX = 4.5  # refused.TIMEOUT_S, and half a second

CALLS = ["connect", "serve", "status", "publisher", "publish", "publish in place", "fetch", "replicate", "borrow"]
CALLS += ["allocate", "ask"]

SYSTEM_CALLS = [
    "poll",
    "epoll_ctl",
    "epoll_wait",
    "fcntl",
    "ioctl",
    "setsockopt",
    "getsockopt",
    "getsockname",
    "connect",
]
SYSTEM_CALLS += ["sendto", "recvfrom", "sendmsg", "recvmsg", "bind", "listen", "accept4"]
# Once it has a connection ZeroMQ's own threads make those, and end the process where one is refused.
NOT_LATER = ["call poll", "call epoll_ctl", "call epoll_wait"]
BEFORE = ["connect", "serve", "status", "publisher"]

# What the error says of each; None: there is another way, and no call fails.
WORDS: dict[str, str | None] = {
    "nothing": None,
    "thread": "threads: this process has",
    **{f"threads above {n}": "threads: this process has" for n in range(8)},
    **{f"files above {n}": "open files: this process may have" for n in (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 24)},
    "memory file": None,
    "memory file, unknown": None,
    "seals": None,
    "file size": None,
    "addresses": "bytes of addresses (`ulimit -v`)",
    "other process's memory": None,
    "UNIX socket": None,
    "IPv6": None,
    "names of interfaces": "sockets of AF_NETLINK, which a sandbox forbids here",
    "socket": "the system refuses memory",
    "event": "eventfd2, which a sandbox forbids here",
    "epoll": "epoll_create1, which a sandbox forbids here",
    "which cores": None,
    "which policy": "sched_setscheduler, which a sandbox forbids here",
    "limits and policies": "sched_setscheduler, which a sandbox forbids here",
    "limits": None,
    **{f"call {name}": f"the system refuses {name}, which a sandbox forbids here" for name in SYSTEM_CALLS},
    "call recvmsg": "which a sandbox forbids here",  # with it the names of interfaces are read
    "mappings": "vm.max_map_count",
    "data": "of data (`ulimit -d`)",
}
QUICK = ["nothing", "thread", "threads above 3", "files above 2", "files above 13", "memory file", "file size"]
QUICK += ["addresses", "call poll", "call connect"]
LONG = [each for each in WORDS if each not in QUICK]
REFUSES_ALL = ["thread", "threads above 0", "files above 0"]  # to make a client is impossible there


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, str]]:
    """The folders of a control group for each, by the variable that names it; those that can be made here."""
    made = {}
    for variable, controller in GROUPS.items():
        folder = Path(f"/sys/fs/cgroup/{controller}/tensorhub-refused-{os.getpid()}")
        with suppress(OSError):
            folder.mkdir()
            made[variable] = str(folder)
    yield made
    for made_folder in made.values():
        Path(made_folder).rmdir()


def outcomes(cases: list[tuple[str, str]], groups: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    with ExitStack() as stack:
        hub = stack.enter_context(start_server())
        source = stack.enter_context(Client(hub.address, run="r", model="m", replica="source"))
        source.publish(1, {f"w{k}": torch.full((1 << 16,), float(k)) for k in range(4)})
        if any(call == "fetch large" for _, call in cases):
            source.publish(1, {"x": torch.zeros(LARGE_BYTES // 4)}, "large", copy=False)
        command = [sys.executable, str(CHILD), hub.address, json.dumps(cases)]
        done = subprocess.run(command, env={**os.environ, **groups}, stdout=subprocess.PIPE, check=True, timeout=600)
        assert source.serving()  # whatever became of its readers
    found = map(json.loads, done.stdout.splitlines())
    return {(each["resource"], each["call"]): each for each in found}


@pytest.fixture(scope="module")
def quick(groups: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    return outcomes([(what, call) for what in QUICK for call in calls_of(what) if _can_be_made(what, groups)], groups)


@pytest.fixture(scope="module")
def long(groups: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    return outcomes([(what, call) for what in LONG for call in calls_of(what) if _can_be_made(what, groups)], groups)


def calls_of(what: str) -> list[str]:
    return BEFORE if what in NOT_LATER else CALLS


def _can_be_made(what: str, groups: dict[str, str]) -> bool:
    return not what.startswith("threads above") or "REFUSED_PIDS" in groups


def problems_of(found: dict[str, Any], words: str | None) -> list[str]:
    """What is wrong with this outcome of a call."""
    ended, said = found["ended"], found.get("said", [])
    wrong = [] if ended in ("ok", "ResourceRefused") else [f"it ended with {ended}: {found['text']}"]
    if ended == "ResourceRefused" and (words is None or words not in found["text"]):
        wrong.append(f"it says {found['text']!r}")
    if found.get("seconds", 0.0) > CALL_S_MAX:
        wrong.append(f"it took {found['seconds']} s")
    if found.get("again", "ok") != "ok":
        wrong.append(f"when the limit was lifted it raised {found['again']}")
    wrong += [line for line in said if line.startswith(("thread ", "ERROR", "CRITICAL")) or "came where" in line]
    return wrong


def check(what: str, outcomes: dict[tuple[str, str], dict[str, Any]]) -> None:
    found = {call: outcomes.get((what, call)) for call in calls_of(what)}
    if found["connect"] is None:
        pytest.skip("no control group can be made here")
    if any(each is not None and "no seccomp here" in each["text"] for each in found.values()):
        pytest.skip("no system call can be refused here")
    wrong = {call: problems_of(each or {}, WORDS[what]) for call, each in found.items()}
    assert {call: problems for call, problems in wrong.items() if problems} == {}
    if what in REFUSES_ALL or what.startswith("call "):
        assert found["connect"] is not None and found["connect"]["ended"] == "ResourceRefused"


@pytest.mark.heavy
@pytest.mark.timeout(180)
@pytest.mark.parametrize("what", QUICK)
def test_what_is_refused_is_named_or_done_without(what: str, quick: dict[tuple[str, str], dict[str, Any]]) -> None:
    check(what, quick)


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", LONG)
def test_what_else_is_refused_is_named_or_done_without(what: str, long: dict[tuple[str, str], dict[str, Any]]) -> None:
    check(what, long)


@pytest.mark.heavy
@pytest.mark.long
def test_memory_that_the_group_cannot_give_is_not_taken(groups: dict[str, str]) -> None:
    """Of 256 MB: it would be killed. A control: the same read where nothing is refused."""
    if "REFUSED_MEMORY" not in groups:
        pytest.skip("no control group can be made here")
    cases = [("memory of the group", "fetch large"), ("memory of the group", "fetch"), ("nothing", "fetch large")]
    found = outcomes(cases, groups)
    refused = found["memory of the group", "fetch large"]
    assert refused["ended"] == "ResourceRefused" and "of host memory are needed" in refused["text"]
    assert refused["again"] == "ok"
    assert found["memory of the group", "fetch"]["ended"] == found["nothing", "fetch large"]["ended"] == "ok"


def test_each_kind_of_wrong_outcome_is_found() -> None:
    """The table's own control."""
    good = {"ended": "ok", "text": "", "seconds": 0.1, "again": "ok", "said": ["WARNING no memory file"]}
    assert problems_of(good, None) == []
    assert problems_of({**good, "ended": "ResourceRefused", "text": "the system refuses threads"}, "threads") == []
    for other in (
        {"ended": "signal 6"},
        {"ended": "OSError"},
        {"ended": "ResourceRefused", "text": "the system refuses threads"},
        {"seconds": 5.0},
        {"again": "UsageError"},
        {"said": ["ERROR the connection to the hub has failed"]},
        {"said": ["WARNING lost source: 0 files came where 2 should"]},
    ):
        assert len(problems_of({**good, **other}, None)) == 1
