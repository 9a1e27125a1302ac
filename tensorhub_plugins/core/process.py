"""What happens to open connections when this process forks, and when its interpreter exits.

A forked child has the parent's sockets and none of its threads: whoever is connected would not notice the parent's
death, and what waits for a thread would wait for ever. So a child closes the sockets and refuses to use what the parent
has made. A fork that runs no hook (a C library's) is seen as well: who makes something remembers its process. And how
many files it may have open, of which each connection is one.
"""

from __future__ import annotations

import atexit
import os
import resource
import socket
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from tensorhub_plugins.core.errors import UsageError


class Closable(Protocol):
    """A socket, or what has a last word to say."""

    def close(self) -> None:
        """Idempotent."""


FILES_MAX = 1 << 20  # more nobody needs, and what looks at all of them (a program that is started) is slow then
_in_children: WeakSet[Closable] = WeakSet()  # to be closed in a forked child
_at_exit: WeakSet[Closable] = WeakSet()  # to be closed when the interpreter exits


def close_in_children(*sockets: Closable) -> None:
    """A forked child does not keep these open."""
    _watch()
    _in_children.update(sockets)


class Descriptor:
    """A file descriptor that a forked child does not keep, as long as this object lives. number: -1 once it is closed,
    which may be done twice."""

    def __init__(self, number: int) -> None:
        self.number = number
        close_in_children(self)

    def close(self) -> None:
        """Without a lock, which another thread may have held when a child was forked."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


class ForeignSocket:
    """A library's connection, by its descriptor, that a forked child does not keep as long as this object lives. The
    library closes it in this process: the child looks whether the number is still that of the same socket."""

    def __init__(self, number: int) -> None:
        self._number, self._inode = number, _inode_of(number)
        close_in_children(self)

    def close(self) -> None:
        """In a child."""
        if self._inode and self._inode == _inode_of(self._number):
            os.close(self._number)


class ForeignPort:
    """A library's listening socket and all that it accepts, by their port: as `ForeignSocket`."""

    def __init__(self, port: int) -> None:
        self._port = port
        close_in_children(self)

    def close(self) -> None:
        """In a child."""
        for number in filter(_inode_of, map(int, os.listdir("/proc/self/fd"))):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
                name = found.getsockname()
                if found.family in (socket.AF_INET, socket.AF_INET6) and name[1] == self._port:
                    os.close(number)


def _inode_of(number: int) -> int:
    """0: it is no socket."""
    with suppress(OSError):
        status = os.fstat(number)
        return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
    return 0


def close_at_exit(link: Closable) -> None:
    """Unless it is closed before, which it then is not a second time."""
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
def _here() -> str:
    """This boot of this machine, and this namespace of its processes; "": unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process of this host was started, in ticks since the boot; None: there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


@cache
def _word(pid: int) -> str:
    """Return a random word that tells this process from one of a cloned machine with the same pid and start."""
    return os.urandom(8).hex()


def identity() -> str:
    """This process, to be told from all others, also from a later one with its number; "": unknown."""
    return f"{_here()} {os.getpid()} {_started(os.getpid())} {_word(os.getpid())}" if _here() else ""


def is_gone(process: str) -> bool:
    """Return whether no process with this `identity` is here, where it was; False if that cannot be seen. It may live
    on a machine of which this one is a copy (a snapshot), which shows the same: only the hub knows which is heard."""
    here, pid, started = (process.rsplit(" ", 3) + ["", "", ""])[:3]
    return here != "" and here == _here() and pid.isdigit() and _started(int(pid)) != started


@cache
def _watch() -> None:
    """Once, and not before there is something: importing has no effects."""
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
    """Let this process have as many files open as the system permits, and return how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_MAX if soft == resource.RLIM_INFINITY else soft


def files_left(most: int) -> int:
    """Return about how many more can be opened of so many: the system gives the lowest number that is free."""
    try:
        probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    os.close(probe)
    return max(0, most - probe - 1)
