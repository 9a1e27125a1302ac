"""How much memory this process may have, how much of it is free now, and how many cores it may use.

/proc/meminfo is the machine's, in a container too. A container, a job or a service is limited by a control group: the
one that this process is in, or one above it. All processes of a group share it, so what is free is the least that any
of these groups leaves. Versions 1 and 2 of control groups report the same in different files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tensorhub_plugins.core.errors import ResourceRefused

ROOT = Path("/")


class _Files(NamedTuple):
    """The mount point of one version of control groups, and its names of files."""

    mount: str
    limits: tuple[str, ...]  # the least counts; beyond memory.high all are throttled
    used: str
    cache: tuple[str, ...]  # in memory.stat, with groups below: page cache, which is reclaimed first


V1 = _Files(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = _Files("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def total_bytes(root: Path = ROOT) -> int:
    """Return the memory limit of this process: the least of the machine and of each group that it is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for _, _, limit in _limited(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Return what it could take now without swapping or being killed; 0 where the system does not report it."""
    return free_bytes(root) or 0


def free_bytes(root: Path) -> int | None:
    """Return the same; None where the system does not report it. A group that does not say what it uses leaves its
    limit at most."""
    free = [machine] if (machine := 1024 * _field(root / "proc/meminfo", "MemAvailable:")) else []
    for folder, files, limit in _limited(root):
        used = _number(folder / files.used) or 0
        free.append(limit - used + sum(_field(folder / "memory.stat", name) for name in files.cache if used))
    return max(0, min(free)) if free else None


class Room:
    """The host memory that one call may take: what is free when it takes the first of it. What it has taken counts from
    then on, though pages are allocated as they are written."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._size_bytes: int | None = None
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count memory that is about to be mapped. Raise ResourceRefused where there is not so much."""
        if self._size_bytes is None:
            free = free_bytes(self._root)
            self._size_bytes = total_bytes(self._root) if free is None else free
        self._taken_bytes += size_bytes
        if self._taken_bytes > self._size_bytes:
            raise ResourceRefused(
                f"{self._taken_bytes / 1e9:.1f} GB of host memory are needed, and this process may take "
                f"{self._size_bytes / 1e9:.1f} GB more (MemAvailable, and its control groups): release what is not "
                "used, read fewer tensors (wanted) or into tensors that are there (replicate), or take a larger host"
            )


def affinity() -> set[int]:
    """Return the cores that this thread may run on; empty where the system does not report them."""
    with suppress(OSError):
        return os.sched_getaffinity(0)
    return set()


def cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use at a time: those that it may run on, limited by its control groups'
    CPU time (`docker run --cpus`, a pod's limit), rounded up."""
    most = len(affinity()) or os.cpu_count() or 1
    return max(1, min([most, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield how many cores each group with a limit gives this process."""
    for is_v2, path in groups_of("cpu", root):
        for folder in _upwards(root, "sys/fs/cgroup" if is_v2 else "sys/fs/cgroup/cpu", path):
            with suppress(OSError, ValueError):
                if is_v2:
                    quota, period = map(int, (folder / "cpu.max").read_text().split())  # "max 100000": ValueError
                else:
                    quota, period = (int((folder / f"cpu.cfs_{k}_us").read_text()) for k in ("quota", "period"))
                if quota > 0 and period > 0:
                    yield quota / period


def pids_max(root: Path = ROOT) -> str:
    """Return how many processes and threads the control groups of this process allow it: a number, "max", or nothing
    where that cannot be seen."""
    said = []
    for is_v2, path in groups_of("pids", root):
        for folder in _upwards(root, "sys/fs/cgroup" if is_v2 else "sys/fs/cgroup/pids", path):
            with suppress(OSError):
                said.append((folder / "pids.max").read_text().strip())
    return min((each for each in said if each.isdecimal()), key=int, default="max" if said else "")


def _limited(root: Path) -> Iterator[tuple[Path, _Files, int]]:
    """Yield the groups with a limit that this process is in, from its own upwards."""
    for is_v2, path in groups_of("memory", root):
        files = V2 if is_v2 else V1
        for folder in _upwards(root, files.mount, path):
            limits = [limit for limit in (_number(folder / name) for name in files.limits) if limit is not None]
            if limits:
                yield folder, files, min(limits)


def _upwards(root: Path, mount: str, path: str) -> Iterator[Path]:
    """Yield the folder of a group, then those of the groups that it is in."""
    # Without a cgroup namespace a container sees the machine's path, and mounts only what is below it.
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(mount, *parts[:depth])


def groups_of(controller: str, root: Path = ROOT) -> Iterator[tuple[bool, str]]:
    """Yield the groups that may limit this process: whether it is of version 2, and its path."""
    with suppress(OSError, ValueError):  # ValueError: other lines than expected
        for line in os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0" or controller in controllers.split(","):
                yield hierarchy == "0", path


def _number(path: Path) -> int | None:
    """Return the number in a file; None: there is no such file, or it contains "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _field(path: Path, name: str) -> int:
    """Return a field of a table with a name and a number in each line; 0: there is none."""
    with suppress(OSError, ValueError):
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if len(row) > 1 and row[0] == name), 0)
    return 0
