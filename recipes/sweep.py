"""Remove the shared memory that a run's killed processes left: `python recipes/sweep.py RUN_FOLDER SINCE` (seconds).

verl ends its actors by having Ray kill them, and with them Python's resource tracker, which would have unlinked vLLM's
message queues (psm_*, some 250 MB each) and multiprocessing's semaphores (sem.mp-*). Every run leaves some, also
without us; a full /dev/shm is what comes of it. Waits until the run's processes, known by RUN in their environment,
have ended, ends those that still hold some, and removes what this user made since then and no process has mapped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED = Path("/dev/shm")
NAMES = ("psm_*", "sem.mp-*")
WAIT_S = 30.0  # Ray's own processes end some seconds after their driver
KILL_S = 30.0  # until the kernel has ended a process on a busy machine


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
    """Remove those that no process has mapped."""
    mapped = set(_mapped(files, processes()))
    removed = [file for file in files if file not in mapped]
    for file in removed:
        file.unlink(missing_ok=True)
    return removed


def _mapped(files: list[Path], members: Iterable[Path]) -> list[Path]:
    """Return those that one of these processes has mapped. By the inode, too: the process that has made a semaphore has
    mapped it under another name, which it had before it was complete."""
    maps = "\n".join(read(process / "maps") for process in members) if files else ""
    return [file for file in files if str(file) in maps or ((place := _place(file)) and place in maps)]


def _place(file: Path) -> str:
    """Return how /proc/PID/maps names the file's place; "": it is gone."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return ""
    return f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "


def _group_of(process: Path) -> int:
    fields = read(process / "stat").rpartition(")")[2].split()
    return int(fields[2]) if fields else 0


def _made_since(file: Path, since: float) -> bool:
    try:
        status = file.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and status.st_mtime >= since


def _is_of(process: Path, run: str) -> bool:
    return f"RUN={run}" in read(process / "environ").split("\0")


def ancestors() -> set[Path]:
    """Return this process and its ancestors."""
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(Path(f"/proc/{pid}"))
        pid = int(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])
    return found


def processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:  # ended meanwhile, or another user's
        return ""


if __name__ == "__main__":
    sweep(sys.argv[1], float(sys.argv[2]))
