"""Runs calls where the system refuses something: each in a forked child, so that what ends one process is seen.

    python refused.py HUB CASES       # CASES: JSON, [[resource, call], ...]; a JSON line for each outcome

One process imports everything and forks: a start of torch for each of a hundred cases would take minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import mmap
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from tensorhub_plugins.core import Client, Publisher
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.hub.server import start_server

TIMEOUT_S, CASE_S_MAX = 4.0, 30.0
HELD_BYTES = 1 << 20

# --- what is refused ---

CLONE, CLONE3, MEMFD_CREATE, FCNTL, SOCKET, PROCESS_VM_READV = 56, 435, 319, 72, 41, 310
EVENTFD2, EPOLL_CREATE1, SCHED_GETAFFINITY, SCHED_GETSCHEDULER, PRLIMIT64 = 290, 291, 204, 145, 302
CALLS_BY_NAME = {"poll": 7, "epoll_ctl": 233, "epoll_wait": 232, "fcntl": 72, "ioctl": 16, "setsockopt": 54}
CALLS_BY_NAME |= {"getsockopt": 55, "getsockname": 51, "connect": 42, "sendto": 44, "recvfrom": 45, "sendmsg": 46}
CALLS_BY_NAME |= {"recvmsg": 47, "bind": 49, "listen": 50, "accept4": 288}
NUMBERS = errno.EPERM, errno.EACCES, errno.ENOSYS  # a sandbox chooses
OF_SYSTEMD_RESOURCES = [142, 144, 160, 203, 237, 238, 302]  # SystemCallFilter=~@resources: policies, limits, cores
F_ADD_SEALS, AF_UNIX, AF_INET6, AF_NETLINK = 1033, 1, 10, 16
PR_SET_NO_NEW_PRIVS, SECCOMP, SET_MODE_FILTER, TSYNC = 38, 317, 1, 1
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(calls: list[int], number: int, *, argument: tuple[int, int] | None = None) -> None:
    """These system calls fail with this error from now on, in all threads; argument: only where that one is so."""
    code = [(LOAD, 0, 0, 0)]
    for call in calls:
        if argument is None:
            code += [(EQUAL, 0, 1, call), (RETURN, 0, 0, ERRNO | number)]
        else:
            at, value = argument
            code += [(EQUAL, 0, 3, call), (LOAD, 0, 0, 16 + 8 * at), (EQUAL, 0, 1, value)]
            code += [(RETURN, 0, 0, ERRNO | number), (LOAD, 0, 0, 0)]
    code.append((RETURN, 0, 0, ALLOW))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code), ctypes.addressof(packed))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(SECCOMP, SET_MODE_FILTER, TSYNC, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "no seccomp here")


def limit(kind: int, value: int) -> Callable[[], None]:
    """Returns what lifts it again."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    return lambda: resource.setrlimit(kind, before)


def files(spare: int) -> Callable[[], None]:
    """All but so many are taken; not even root may always raise the hard limit again."""
    probe = os.open(os.devnull, os.O_RDONLY)
    taken = [probe, *(os.open(os.devnull, os.O_RDONLY) for _ in range(63))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + spare,) * 2)
    return lambda: [os.close(each) for each in taken] and None


def addresses(spare: int) -> Callable[[], None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limit(resource.RLIMIT_AS, used + spare)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def mappings(spare: int) -> Callable[[], None]:
    """All but so many of vm.max_map_count are taken: each second page of a mapping may not be written to."""
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    size, libc = 2 * most * mmap.PAGESIZE, ctypes.CDLL(None)
    taken = mmap.mmap(-1, size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(taken))

    def protect(first: int, size_bytes: int, how: int) -> bool:
        return libc.mprotect(ctypes.c_void_p(start + first), ctypes.c_size_t(size_bytes), how) == 0

    left = most - len(Path("/proc/self/maps").read_text().splitlines()) - spare
    for k in range(left // 2):
        protect(2 * k * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ)
    return lambda: protect(0, size, mmap.PROT_READ | mmap.PROT_WRITE) and None


def threads(spare: int) -> Callable[[], None]:
    """By a control group of its own: only there ZeroMQ meets the limit itself."""
    group = Path(os.environ["REFUSED_PIDS"]) / f"{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "pids.max").write_text(str(len(os.listdir("/proc/self/task")) + spare))
    return lambda: (group / "pids.max").write_text("max") and None


def memory(spare: int) -> Callable[[], None]:
    group = Path(os.environ["REFUSED_MEMORY"]) / f"{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "memory.limit_in_bytes").write_text(str(spare))
    return lambda: (group / "memory.limit_in_bytes").write_text("-1") and None


RESOURCES: dict[str, Callable[[], Callable[[], None] | None]] = {
    "nothing": lambda: None,
    "thread": lambda: refuse([CLONE, CLONE3], errno.EAGAIN),
    **{f"threads above {n}": (lambda n=n: threads(n)) for n in range(8)},
    **{f"files above {n}": (lambda n=n: files(n)) for n in (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 24, 28, 32)},
    "memory file": lambda: refuse([MEMFD_CREATE], errno.EPERM),
    "memory file, unknown": lambda: refuse([MEMFD_CREATE], errno.ENOSYS),
    "seals": lambda: refuse([FCNTL], errno.EPERM, argument=(1, F_ADD_SEALS)),
    "file size": lambda: limit(resource.RLIMIT_FSIZE, 4096),
    "addresses": lambda: addresses(256 << 10),
    "other process's memory": lambda: refuse([PROCESS_VM_READV], errno.EPERM),
    "UNIX socket": lambda: refuse([SOCKET], errno.EAFNOSUPPORT, argument=(0, AF_UNIX)),
    "IPv6": lambda: refuse([SOCKET], errno.EAFNOSUPPORT, argument=(0, AF_INET6)),
    "names of interfaces": lambda: refuse([SOCKET], errno.EAFNOSUPPORT, argument=(0, AF_NETLINK)),
    "socket": lambda: refuse([SOCKET], errno.ENOBUFS),
    "event": lambda: refuse([EVENTFD2], errno.EPERM),
    "epoll": lambda: refuse([EPOLL_CREATE1], errno.ENOSYS),
    "which cores": lambda: refuse([SCHED_GETAFFINITY], errno.EPERM),
    "which policy": lambda: refuse([SCHED_GETSCHEDULER], errno.EPERM),
    "limits and policies": lambda: refuse(OF_SYSTEMD_RESOURCES, errno.EPERM),
    **{f"call {n}": (lambda n=n, e=e: refuse([CALLS_BY_NAME[n]], e)) for n, e in zip(CALLS_BY_NAME, cycle(NUMBERS))},
    "limits": lambda: refuse([PRLIMIT64], errno.EPERM),
    "mappings": lambda: mappings(4),
    "data": lambda: limit(resource.RLIMIT_DATA, _status_bytes("VmData") + (1 << 20)),
    "memory of the group": lambda: memory(256 << 20),
}

# --- the calls ---


def tensors() -> dict[str, torch.Tensor]:
    return {f"w{k}": torch.full((HELD_BYTES // 16,), float(k)) for k in range(4)}


def _of_zeromq() -> set[str]:
    """Return the names of all threads. One of ZeroMQ's has its name when it has set its policy: where that is
    refused it ends the process, and the last to begin may do so after a client has connected."""
    return {Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")}


class Case:
    """What is there before something is refused: of a Client only where the call is not to make one."""

    def __init__(self, hub: str, *, connected: bool) -> None:
        self.hub, self.name = hub, f"child-{os.getpid()}"
        self.mine = tensors()
        self.version = 1
        self.client = self.connect() if connected else None
        while connected and len(_of_zeromq() & {"ZMQbg/Reaper", "ZMQbg/IO/0"}) < 2:
            time.sleep(0.001)

    def connect(self, model: str = "m") -> Client:
        return Client(self.hub, run="r", model=model, replica=self.name, connect_timeout_s=TIMEOUT_S)

    def next(self) -> int:
        """The number of a version that nobody has used."""
        self.version += 1
        return self.version


def connect(case: Case) -> None:
    case.connect().close()


def serve(case: Case) -> None:
    start_server().close()


def status(case: Case) -> None:
    assert fetch_status(case.hub, timeout_s=TIMEOUT_S)["models"]


def publisher(case: Case) -> None:
    client = case.connect(case.name)
    made = Publisher(client, rank=0, ranks=1, worker=case.name, keep=1, timeout_s=TIMEOUT_S, in_background=True)
    with contextlib.closing(made):
        made.publish(case.next(), case.mine.items())
        made.settle()


def publish(case: Case, *, copy: bool = True) -> None:
    version = case.next()
    case.client.publish(version, case.mine, case.name, copy=copy, timeout_s=TIMEOUT_S)
    case.client.unpublish(version, timeout_s=TIMEOUT_S)


def fetch(case: Case) -> None:
    fetched = case.client.fetch(1, timeout_s=TIMEOUT_S)
    assert all(torch.equal(fetched.tensors()[name], tensor) for name, tensor in tensors().items())
    fetched.release()


def fetch_large(case: Case) -> None:
    case.client.fetch(1, ("large",), timeout_s=20.0).release()


def replicate(case: Case) -> None:
    for tensor in case.mine.values():
        tensor.zero_()
    case.client.replicate(case.mine, 1, timeout_s=TIMEOUT_S)
    case.client.unpublish(1, timeout_s=TIMEOUT_S)
    assert all(torch.equal(case.mine[name], tensor) for name, tensor in tensors().items())


def borrow(case: Case) -> None:
    case.client.fetch(1, timeout_s=TIMEOUT_S, borrow=True, serve=True).release()


def allocate(case: Case) -> None:
    from tensorhub_plugins.core import spec_of

    slab = case.client.allocate([spec_of(name, tensor) for name, tensor in case.mine.items()])
    for name, tensor in case.mine.items():
        slab.write(name, tensor)
    version = case.next()
    case.client.publish(version, slab, case.name, timeout_s=TIMEOUT_S)
    case.client.unpublish(version, timeout_s=TIMEOUT_S)


def ask(case: Case) -> None:
    assert case.client.wait(1, timeout_s=TIMEOUT_S) == 1 and case.client.versions()
    case.client.retain(1)
    case.client.pin(1)
    case.client.unpin()
    assert not case.client.recheck(1)
    case.client.hand_over(1.0)


CALLS: dict[str, tuple[Callable[[Case], None], bool]] = {
    "connect": (connect, False),
    "serve": (serve, False),
    "status": (status, False),
    "publisher": (publisher, False),
    "publish": (publish, True),
    "publish in place": (lambda case: publish(case, copy=False), True),
    "fetch": (fetch, True),
    "fetch large": (fetch_large, True),
    "replicate": (replicate, True),
    "borrow": (borrow, True),
    "allocate": (allocate, True),
    "ask": (ask, True),
}


def act(hub: str, what: str, call: str) -> dict[str, object]:
    """In a child. What came of it; of the same call again, when a limit was lifted."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    threading.excepthook = lambda args: said.append(f"thread {args.thread}: {args.exc_value!r}")
    run, connected = CALLS[call]
    case = Case(hub, connected=connected)
    lift = RESOURCES[what]()
    began, found = time.monotonic(), {"ended": "ok", "text": ""}
    try:
        run(case)
    except BaseException as error:
        found = {"ended": type(error).__name__, "text": str(error), "from": repr(error.__cause__)}
    found["seconds"] = time.monotonic() - began
    if lift is not None:
        lift()
        try:
            run(case)
            found["again"] = "ok"
        except BaseException as error:
            found["again"] = repr(error)
    return {**found, "said": said}


def fork(hub: str, what: str, call: str) -> dict[str, object]:
    """The outcome of one case; of a child that was killed, by which signal."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = json.dumps(act(hub, what, call))
        except BaseException as error:  # before anything was refused
            answer = json.dumps({"ended": "not begun", "text": repr(error)})
        os.write(theirs, answer[:60000].encode())
        os._exit(0)
    os.close(theirs)
    parts = []
    while select.select([ours], [], [], CASE_S_MAX)[0] and (part := os.read(ours, 65536)):
        parts.append(part)
    os.close(ours)
    if not parts:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    for variable in ("REFUSED_PIDS", "REFUSED_MEMORY"):
        with contextlib.suppress(OSError, KeyError):
            (Path(os.environ[variable]) / str(child)).rmdir()
    if parts:
        return json.loads(b"".join(parts))
    ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    return {"ended": ended, "text": ""}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for what, call in json.loads(sys.argv[2]):
        print(json.dumps({"resource": what, "call": call, **fork(sys.argv[1], what, call)}), flush=True)
