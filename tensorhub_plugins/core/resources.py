"""Resources that the system may refuse a process: threads, open files, memory, a system call. One error for all.

A library that gets none may end the process (ZeroMQ aborts where it cannot start a thread), and Python's errors name
neither the limit nor how to raise it. So what a library is about to take is tried before, and a refusal to our own
calls becomes a `ResourceRefused` at each public call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import TypeAlias, TypeVar

from tensorhub_plugins.core import log, run_log
from tensorhub_plugins.core.errors import DeadlineExceeded, HubUnreachable, ResourceRefused, TensorHubError
from tensorhub_plugins.core.machine import pids_max
from tensorhub_plugins.core.process_lifetime import limits_of, raise_files_max
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.types import RECENT_S

ClassT = TypeVar("ClassT")

ZMQ_THREADS = 2  # of each context, started with its first socket: where one is refused, ZeroMQ ends the process
ZMQ_FILES = 16  # of a context with one monitored connection, and some spare: it aborts without an epoll
NO_THREAD = "can't start new thread"  # Python's RuntimeError
NO_MEMORY = "can't allocate memory"  # torch's
LACKED_LENGTH_MAX = 1024  # characters, of 4 bytes at most

_noted = "", float("-inf")  # what this process has lacked last, and when


def _of_limit(kind: int) -> str:
    soft, hard = (f"{each}" if each != resource.RLIM_INFINITY else "unlimited" for each in limits_of(kind))
    return soft if soft == hard else f"{soft} of {hard}"


def _files() -> str:
    return (
        f"open files: this process may have {_of_limit(resource.RLIMIT_NOFILE)}. Raise the limit (`ulimit -n`, "
        "LimitNOFILE= of systemd, --ulimit nofile= of docker), or close what it does not need"
    )


def _files_of_system() -> str:
    return "open files of the whole machine: raise fs.file-max (`sysctl fs.file-nr` shows how many are open)"


def _threads() -> str:
    return (
        f"threads: this process has {threading.active_count()}, its user may have {_of_limit(resource.RLIMIT_NPROC)} "
        f"(`ulimit -u`), its control group {pids_max() or 'an unknown number'} (pids.max; --pids-limit of docker, "
        "podPidsLimit of Kubernetes, TasksMax= of systemd), and for their stacks there are "
        f"{_room()}. Raise what is reached, or start fewer workers there"
    )


def _room() -> str:
    return (
        f"{_of_limit(resource.RLIMIT_AS)} bytes of addresses (`ulimit -v`) and "
        f"{_of_limit(resource.RLIMIT_DATA)} of data (`ulimit -d`)"
    )


def _memory() -> str:
    return (
        f"memory: this process may have {_room()}; the control group (memory.max) and the machine (`free`, "
        "vm.max_map_count) limit it, too. Raise what is reached, or release versions that are not used"
    )


def _file_size() -> str:
    return (
        f"the size of files, memory files among them: this process may write {_of_limit(resource.RLIMIT_FSIZE)} bytes. "
        "Raise the limit (`ulimit -f unlimited`, LimitFSIZE=)"
    )


def _call(name: str) -> str:
    return (
        f"{name}, which a sandbox forbids here (seccomp, a security module), or the kernel lacks: permit it (the "
        "container's profile, `docker run --security-opt seccomp=...`, SystemCallFilter= and RestrictAddressFamilies= "
        "of systemd)"
    )


# System calls by their names, tried with a socket that is closed: nothing is done, and a sandbox answers first.
Calls: TypeAlias = Mapping[str, Callable[[socket.socket], object]]
# ZeroMQ ends the process over those, or says nothing: as a context gets its first socket, and all the time.
ZMQ_CALLS: Calls = {
    "epoll_create1": lambda _: select.epoll().close(),
    "eventfd2": lambda _: os.close(os.eventfd(0)),
    "sched_getscheduler and sched_setscheduler": lambda _: os.sched_setscheduler(
        0, os.sched_getscheduler(0), os.sched_getparam(0)
    ),
}
CALLS: Calls = {
    "poll": lambda _: select.poll().poll(0),
    "epoll_ctl": lambda _: select.epoll().register(select.epoll()),
    "epoll_wait": lambda _: select.epoll().poll(0),
    "fcntl": lambda _: fcntl.fcntl(NO_FILE, fcntl.F_SETFL, 0),
    "ioctl": lambda gone: gone.setblocking(False),
    "setsockopt": lambda gone: gone.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    "getsockopt": lambda gone: gone.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR),
    "getsockname": lambda gone: gone.getsockname(),
    "connect": lambda gone: gone.connect(("", 1)),
    "sendto": lambda gone: gone.send(b""),
    "recvfrom": lambda gone: gone.recv(1),
}
CALLS_OF_TRANSFERS: Calls = {
    **CALLS,
    "sendmsg": lambda gone: gone.sendmsg([b""]),
    "recvmsg": lambda gone: gone.recvmsg(1),
}
_TO_LISTEN: Calls = {
    "bind": lambda gone: gone.bind(("", 0)),
    "listen": lambda gone: gone.listen(),
    "accept4": lambda gone: gone.accept(),
}
CALLS_OF_CLIENT: Calls = {**CALLS_OF_TRANSFERS, **_TO_LISTEN}
CALLS_OF_HUB: Calls = {**CALLS, **_TO_LISTEN, "sockets of AF_NETLINK": lambda _: socket.if_nameindex()}
ALL_CALLS: Calls = {**ZMQ_CALLS, **CALLS_OF_CLIENT, **CALLS_OF_HUB}
NO_FILE = 1 << 30


# The scarce resource by the number of the error, whatever call has failed.
SCARCE: dict[int, Callable[[], str]] = {
    errno.EMFILE: _files,
    errno.ENFILE: _files_of_system,
    errno.ENOMEM: _memory,
    errno.ENOBUFS: _memory,
    errno.EFBIG: _file_size,
}
# A peer, a firewall or a file may answer so, too: where one was involved, this is no lack of resources.
FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT)


def refusal(error: BaseException | None, *, forbidden: bool = False) -> ResourceRefused | None:
    """Return this error, or its cause, as a resource that this process lacks; None: it is something else. forbidden: no
    peer was involved, so that a call that is not permitted counts, too."""
    while error is not None:
        if isinstance(error, ResourceRefused):
            return error
        what = _lacks(error, forbidden=forbidden)
        if what is not None:
            return ResourceRefused(f"the system refuses {what} ({error})")
        error = error.__cause__
    return None


def _lacks(error: BaseException, *, forbidden: bool) -> str | None:
    number = getattr(error, "errno", None)  # ZeroMQ's errors have one, too, and are no OSError
    if number in SCARCE:
        return SCARCE[number]()
    if number in FORBIDDEN or isinstance(error, (HubUnreachable, DeadlineExceeded)):
        if (found := refused_call(CALLS_OF_TRANSFERS)) and is_forbidden(found[1]):
            return _of_call(*found)
        if forbidden and not isinstance(error, TensorHubError):
            return _call("a system call")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY in str(error)):
        return _memory()
    if isinstance(error, (RuntimeError, OSError)) and NO_THREAD in str(error):
        return _threads()
    return None


def _of_call(name: str, error: OSError) -> str:
    return SCARCE[error.errno]() if error.errno in SCARCE else _call(name)


def is_forbidden(error: BaseException | None) -> bool:
    """Return whether this process was not permitted a system call."""
    return isinstance(error, OSError) and error.errno in FORBIDDEN


@contextmanager
def named(*, notes: bool = False) -> Iterator[None]:
    """Raise what the system refuses within as `ResourceRefused`. Decorates each public call. notes: for `lacked`."""
    try:
        yield
    except Exception as error:
        found = refusal(error, forbidden=not isinstance(error, TensorHubError))
        if found is not None and notes:
            note(found.message)
        if found is None or found is error:
            raise
        raise found from error


def note(lack: str) -> None:
    """Have `lacked` return this for a while."""
    global _noted
    _noted = lack[:LACKED_LENGTH_MAX], time.monotonic()


def lacked() -> str:
    """Return what this process has lacked lately, the disk of its journal for good; "": nothing."""
    what, at = _noted
    return what if time.monotonic() - at < RECENT_S else run_log.failure[:LACKED_LENGTH_MAX]


def in_each_call(of: type[ClassT]) -> type[ClassT]:
    """Decorate a class: `named` is around each of its public methods, and around its constructor, and what the system
    refuses them is noted."""
    for name, method in vars(of).copy().items():
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(of, name, named(notes=True)(method))
    return of


def begin_client() -> None:
    """Raise limits, and try what is needed, before name look-ups, whose errors do not name what is lacking. Begin to
    show log lines."""
    log.begin()
    raise_files_max()
    try_for_zmq(1, CALLS_OF_CLIENT)


def refused_call(calls: Calls) -> tuple[str, OSError] | None:
    """Return the first of these system calls that the system refuses this process, by its name, and the error."""
    try:
        gone = _closed_socket()
    except OSError as error:
        return "socket", error
    for name, call in calls.items():
        try:
            call(gone)
        except OSError as error:
            if error.errno != errno.EBADF:  # as it is closed
                return name, error
    return None


def _closed_socket() -> socket.socket:
    try:
        gone = socket.socket(socket.AF_INET)
    except OSError:  # a host, or a sandbox, may have only one of them
        gone = socket.socket(socket.AF_INET6)
    gone.close()
    return gone


def try_for_zmq(threads: int, calls: Calls = CALLS) -> None:
    """Try to take what a ZeroMQ context with one connection needs, so many threads, and these system calls. Raise
    ResourceRefused."""
    with named(), ExitStack() as opened:
        for _ in range(ZMQ_FILES):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    if found := refused_call({**ZMQ_CALLS, **calls}):
        raise ResourceRefused(f"the system refuses {_of_call(*found)} ({found[1]})") from found[1]
    try_threads(ZMQ_THREADS + threads)


def pool_of(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads are started, so that `submit` starts none: one that failed would have queued its work
    nevertheless. It has fewer where the system allows fewer; raise ResourceRefused where it allows none."""
    for fewer in range(threads, 0, -1):
        try:
            try_threads(fewer)
        except ResourceRefused:
            if fewer == 1:
                raise
            continue
        break
    pool, over = ThreadPoolExecutor(fewer, thread_name_prefix=name), threading.Event()
    try:
        with named():
            for _ in range(fewer):
                pool.submit(over.wait)
    except BaseException:
        over.set()
        pool.shutdown(wait=False)
        raise
    over.set()
    return pool


def try_threads(count: int) -> None:
    """Raise ResourceRefused unless this process can start so many threads now."""
    over = threading.Event()
    started: list[Thread] = []
    try:
        with named():
            for _ in range(count):
                thread = Thread(target=over.wait, name="tensorhub-try")
                thread.start()
                started.append(thread)
    finally:
        over.set()
        for thread in started:
            thread.join()
