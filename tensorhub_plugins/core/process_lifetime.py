"""Open connections when this process forks, and when its interpreter exits.

A forked child has the parent's sockets and none of its threads: peers would not notice the parent's death, and a wait
for one of its threads would never end. So a child closes the sockets and refuses to use the parent's objects. A fork
that runs no hook (a C library's) is detected as well: an object remembers the process that made it. Also here: the
number of files that it may have open, of which each connection is one.
"""

from __future__ import annotations

import atexit
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from tensorhub_plugins.core.errors import UsageError


class Closable(Protocol):
    """A socket, or an object that has a last message to send."""

    def close(self) -> None:
        """Close it. Idempotent."""


FILES_MAX = 1 << 20  # more than needed; scanning all descriptors, as starting a program does, gets slow beyond
_in_children: WeakSet[Closable] = WeakSet()  # to be closed in a forked child
_at_exit: WeakSet[Closable] = WeakSet()  # to be closed when the interpreter exits


def close_in_children(*sockets: Closable) -> None:
    """Close these in a forked child."""
    _watch()
    _in_children.update(sockets)


class OfThisProcess:
    """A base class of what has connections, threads or memory of its process."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError(
            f"a {type(self).__name__} belongs to the process that has made it, and is neither pickled nor copied: make "
            "one in each process"
        )


class Descriptor:
    """A file descriptor that a forked child does not keep, as long as this object lives. number: -1 once it is closed,
    which may be done twice."""

    def __init__(self, number: int) -> None:
        self.number = number
        close_in_children(self)

    def close(self) -> None:
        """Close it, without a lock, which another thread may have held when a child was forked."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


class ForeignSocket:
    """A library's connection, by its descriptor, that a forked child does not keep as long as this object lives. The
    library closes it in this process: the child checks that the number is still that of the same socket."""

    def __init__(self, number: int) -> None:
        self._number, self._inode = number, _inode_of(number)
        close_in_children(self)

    def close(self) -> None:
        """Close it in a child."""
        if self._inode and self._inode == _inode_of(self._number):
            os.close(self._number)


class ForeignPort:
    """A library's listening socket and all that it accepts, by their port: handled as `ForeignSocket`."""

    def __init__(self, port: int) -> None:
        self._port = port
        close_in_children(self)

    def close(self) -> None:
        """Close them in a child."""
        for number in filter(_inode_of, map(int, os.listdir("/proc/self/fd"))):
            with suppress(OSError), socket_of(number) as found:
                name = found.getsockname()
                if found.family in (socket.AF_INET, socket.AF_INET6) and name[1] == self._port:
                    os.close(number)


@contextmanager
def socket_of(number: int) -> Iterator[socket.socket]:
    """Yield a library's socket, which stays open and as it is: for a copy there may be no descriptor left. Raise
    OSError where this is a descriptor of none, or of none any more."""
    # Of another type a default timeout would be applied to it, for the parent and a child alike.
    found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=number)
    try:
        yield found
    finally:
        found.detach()


def _inode_of(number: int) -> int:
    """Return a socket's inode; 0: it is no socket."""
    with suppress(OSError):
        status = os.fstat(number)
        return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
    return 0


def close_at_exit(link: Closable) -> None:
    """Close it at the interpreter's exit, unless it is closed before."""
    _watch()
    _at_exit.add(link)


def check_not_forked(pid: int, what: str) -> None:
    """Raise UsageError in a child of the process `pid`, which has made `what`."""
    if os.getpid() != pid:
        raise UsageError(
            f"this {what} was made by process {pid} and this is its fork {os.getpid()}, which has none of its threads: "
            f"make a {what} in the child, under a replica name of its own (or start it with spawn or forkserver)"
        )


@cache
def machine() -> str:
    """Return an id of this boot of this machine, which its containers share; "": unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def _here() -> str:
    """Return an id of this boot of this machine, and of this process's namespaces of PIDs and of clocks, by which
    processes and their starts are numbered; "": unknown."""
    clocks = ""
    with suppress(OSError):
        clocks = os.readlink("/proc/self/ns/time")  # not before Linux 5.6
    with suppress(OSError):
        return f"{machine()} {os.readlink('/proc/self/ns/pid')} {clocks}" if machine() else ""
    return ""


def _started(pid: int) -> str | None:
    """Return when a process of this host was started, in ticks since the boot; None: no such process runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


@cache
def _word(pid: int) -> str:
    """Return a random word, as a cloned machine may have a process with the same pid and start."""
    return os.urandom(8).hex()


def identity() -> str:
    """Return a text that identifies this process, even among later ones with its pid; "": unknown."""
    return f"{_here()} {os.getpid()} {_started(os.getpid())} {_word(os.getpid())}" if _here() else ""


def is_gone(process: str) -> bool:
    """Return whether no process with this `identity` is here, where it was; False if that cannot be seen. It may be
    alive on a machine of which this one is a copy (a snapshot), which looks the same: only the hub hears which is."""
    here, pid, started = (process.rsplit(" ", 3) + ["", "", ""])[:3]
    return here != "" and here == _here() and pid.isdigit() and _started(int(pid)) != started


@cache
def _watch() -> None:
    """Register the hooks once, at the first use: importing has no effects."""
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_exits, os.getpid())


def _forked() -> None:
    sockets = list(_in_children)
    _in_children.clear()
    _at_exit.clear()
    for each in sockets:
        with suppress(OSError):
            each.close()


def _exits(pid: int) -> None:
    for each in list(_at_exit) if os.getpid() == pid else ():
        each.close()


def raise_files_max() -> int:
    """Raise this process's limit of open files as far as the system permits, and return it."""
    soft, hard = limits_of(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = limits_of(resource.RLIMIT_NOFILE)
    return FILES_MAX if soft == resource.RLIM_INFINITY else soft


def limits_of(kind: int) -> tuple[int, int]:
    """Return the soft and the hard limit of a resource; as /proc reports them where a sandbox forbids to ask, and else
    as none."""
    with suppress(OSError):
        return resource.getrlimit(kind)
    soft = hard = resource.RLIM_INFINITY
    with suppress(OSError, IndexError, ValueError):  # a title, then a line for each kind, by its number
        said = Path("/proc/self/limits").read_text().splitlines()[1 + kind][26:].split()
        soft, hard = (resource.RLIM_INFINITY if each == "unlimited" else int(each) for each in said[:2])
    return soft, hard


def files_left(most: int) -> int:
    """Return about how many more files can be opened of so many: the system assigns the lowest free number."""
    try:
        probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    os.close(probe)
    return max(0, most - probe - 1)
