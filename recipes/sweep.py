"""Remove the shared memory that a run's killed processes left: `python recipes/sweep.py RUN_FOLDER SINCE` (seconds).

verl ends its actors by having Ray kill them, and with them Python's resource tracker, which would have unlinked vLLM's
message queues (psm_*, some 250 MB each) and multiprocessing's semaphores (sem.mp-*). What the ranks of an engine of the
CPU build share (vllm_dist_*, 4 MB each) is left by every engine that is killed. Every run leaves some, also without us;
a full /dev/shm is what comes of it. Waits until the run's processes, known by RUN in their environment, have ended,
ends those that still hold some, and removes what this user made since then and no process has mapped or open, in other
containers as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED = Path("/dev/shm")
NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
WAIT_S = 30.0  # Ray's own processes end some seconds after their driver
KILL_S = 30.0  # until the kernel has ended a process on a busy machine
CLOSE_S = 2.0  # it frees what a process has mapped first, then closes its files


def sweep(run: str, since: float, shared: Path = SHARED) -> list[Path]:
    """Remove what the run left, and return it. since: as of time.time()."""
    deadline = time.monotonic() + WAIT_S
    ours = ancestors()  # the script that runs this one is of the run too
    while left := [process for process in processes() if process not in ours and _is_of(process, run)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    made = [file for pattern in NAMES for file in shared.glob(pattern) if _made_since(file, since)]
    # Only holders of one of them: other processes that got RUN, an editor for example, go on.
    _kill([process for process in left if _mapped(made, [process])])
    return _remove(made)


def kill_group(group: int, shared: Path = SHARED) -> list[Path]:
    """Send SIGKILL to a process group that the caller has made. Remove what only its processes have mapped there, which
    Python's resource tracker would have done, had it not been killed with them."""
    members = [process for process in processes() if _group_of(process) == group]
    held = _mapped([file for pattern in NAMES for file in shared.glob(pattern)], members)
    _kill(members)
    return _remove(held)


def _kill(members: list[Path]) -> None:
    """Kill them, and return when their memory is freed."""
    for process in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while any(read(process / "maps") for process in members) and time.monotonic() < deadline:  # a zombie has none
        time.sleep(0.05)


def _remove(files: list[Path]) -> list[Path]:
    """Remove those that no process has mapped or open."""
    mapped = set(_mapped(files, processes()))
    left, deadline = [file for file in files if file not in mapped], time.monotonic() + CLOSE_S
    while (is_open := list(map(_is_open, left))) and any(is_open) and time.monotonic() < deadline:
        time.sleep(0.05)
    removed = [file for file, keeps in zip(left, is_open, strict=True) if not keeps]
    for file in removed:
        with contextlib.suppress(OSError):  # another user's
            file.unlink()
    return removed


def _is_open(file: Path) -> bool:
    """Return whether a process has it open or mapped, by asking for a lease: what is about to map it, or is not to be
    seen from this container, has nothing in /proc/PID/maps here. False where there are no leases."""
    descriptor = -1
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # of who opens it just now; by default that is ignored
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # and with it the lease
    return False


def _mapped(files: list[Path], members: Iterable[Path]) -> list[Path]:
    """Return those that one of these processes has mapped. By the inode, too: the process that has made a semaphore has
    mapped it under another name, which it had before it was complete."""
    maps = "\n".join(read(process / "maps") for process in members) if files else ""
    return [file for file in files if str(file) in maps or ((place := _place(file)) and place in maps)]


def _place(file: Path) -> str:
    """Return how /proc/PID/maps names the file's place; "": it is gone."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return ""
    return f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "


def _group_of(process: Path) -> int:
    fields = read(process / "stat").rpartition(")")[2].split()
    return int(fields[2]) if fields else 0


def _made_since(file: Path, since: float) -> bool:
    try:
        status = file.lstat()  # anybody may put a link there
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_mtime >= since


def _is_of(process: Path, run: str) -> bool:
    return f"RUN={run}" in read(process / "environ").split("\0")


def ancestors() -> set[Path]:
    """Return this process and its ancestors."""
    found, pid = set(), str(os.getpid())
    while pid != "0":
        found.add(Path(f"/proc/{pid}"))
        _, pid, *_ = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() or ["", "0"]  # it may have ended
    return found


def processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def read(file: Path) -> str:
    try:
        return os.fsdecode(file.read_bytes())  # as the names of files in sys.argv
    except OSError:  # ended meanwhile, or another user's
        return ""


if __name__ == "__main__":
    sweep(sys.argv[1], float(sys.argv[2]))
