"""How much memory there is, on machines and in containers made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorhub_plugins.core.errors import ResourceRefused
from tensorhub_plugins.core.machine import Room, available_bytes, cores, pids_max, total_bytes

MB, MACHINE_FREE = 1 << 20, 900 << 20
NO_LIMIT = (1 << 63) - 4096  # as version 1 says it
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, *groups: str) -> Path:
    write(root, "proc/meminfo", f"MemTotal: 1000000 kB\nMemFree: 3 kB\nMemAvailable: {MACHINE_FREE >> 10} kB")
    write(root, "proc/self/cgroup", "\n".join(groups))
    return root


def v1(root: Path, folder: str, limit: int, used: int, cache: int = 0) -> None:
    write(root, f"{V1}/{folder}/memory.limit_in_bytes", limit)
    write(root, f"{V1}/{folder}/memory.usage_in_bytes", used)
    write(root, f"{V1}/{folder}/memory.stat", f"inactive_file 0\ntotal_inactive_file {cache}")


def v2(root: Path, folder: str, limit: object, used: int, cache: int = 0, high: object = "max") -> None:
    write(root, f"{V2}/{folder}/memory.max", limit)
    write(root, f"{V2}/{folder}/memory.high", high)
    write(root, f"{V2}/{folder}/memory.current", used)
    write(root, f"{V2}/{folder}/memory.stat", f"anon 5\ninactive_file {cache}")


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path)) == MACHINE_FREE
    assert total_bytes(tmp_path) == total_bytes(tmp_path / "none") > 64 * MB  # the real machine's


def test_what_the_system_does_not_say_is_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0
    write(tmp_path, "proc/meminfo", "MemAvailable:")
    write(tmp_path, "proc/self/cgroup", "0::/job")
    write(tmp_path, f"{V2}/job/memory.max", "a lot")
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../outside"], ids=["a namespace", "the machine's path", ".."])
def test_a_container_has_what_its_group_leaves(tmp_path: Path, path: str) -> None:
    """Its limits are where it sees the mount, whatever it is told of its path."""
    machine(tmp_path, "1:name=systemd:/", f"0::{path}")
    v2(tmp_path, "", 100 * MB, 70 * MB, cache=5 * MB)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (100 * MB, 35 * MB)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    machine(tmp_path, "5:cpu,cpuacct:/kubepods/pod", "4:hugetlb,memory:/kubepods/pod", "0::/")
    v1(tmp_path, "", 80 * MB, 60 * MB, cache=MB)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (80 * MB, 21 * MB)
    v1(tmp_path, "", NO_LIMIT, 60 * MB)  # the control
    assert available_bytes(tmp_path) == MACHINE_FREE and total_bytes(tmp_path) > 80 * MB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    """The job has more than its step, and less of it left."""
    machine(tmp_path, "0::/slurm/job/step")
    v2(tmp_path, "slurm", "max", 900 * MB)
    v2(tmp_path, "slurm/job", 200 * MB, 190 * MB)
    v2(tmp_path, "slurm/job/step", 50 * MB, 10 * MB)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (50 * MB, 10 * MB)
    v2(tmp_path, "slurm/job", 200 * MB, 20 * MB)
    assert available_bytes(tmp_path) == 40 * MB


def test_both_versions_at_once(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/a", "0::/b")
    v1(tmp_path, "a", 30 * MB, 0)
    v2(tmp_path, "b", 20 * MB, 0)
    assert available_bytes(tmp_path) == 20 * MB


def test_where_all_are_slowed_down_is_a_limit(tmp_path: Path) -> None:
    machine(tmp_path, "0::/a")
    v2(tmp_path, "a", "max", 10 * MB, high=40 * MB)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (40 * MB, 30 * MB)


def test_what_is_over_its_limit_has_nothing(tmp_path: Path) -> None:
    machine(tmp_path, "0::/a")
    v2(tmp_path, "a", 10 * MB, 12 * MB)
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize("used", [10 * MB, 12 * MB], ids=["all of it", "more"])
def test_of_a_group_that_is_full_nothing_is_taken(tmp_path: Path, used: int) -> None:
    """Not what the machine has, nor the limit; also by one that is to hold the last copy."""
    machine(tmp_path, "0::/a")
    v2(tmp_path, "a", 10 * MB, used)
    with pytest.raises(ResourceRefused, match="this process may take 0.0 GB more"):
        Room(tmp_path).take(1)
    Room(tmp_path).take(0)
    v2(tmp_path, "a", 10 * MB, used, cache=3 * MB)  # which the kernel reclaims
    room = Room(tmp_path)
    room.take(MB)
    v2(tmp_path, "a", 10 * MB, 0)  # what was free when it began
    with pytest.raises(ResourceRefused):
        room.take(3 * MB)


def test_where_the_system_does_not_say_what_is_free_the_limit_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a")
    write(tmp_path, f"{V2}/a/memory.max", 10 * MB)
    for free in ("", "MemAvailable: 1000000 kB"):
        write(tmp_path, "proc/meminfo", free)
        Room(tmp_path).take(10 * MB)
        with pytest.raises(ResourceRefused):
            Room(tmp_path).take(10 * MB + 1)
    Room(tmp_path / "none").take(64 * MB)  # nothing is known


def test_the_machine_may_have_less_than_the_group(tmp_path: Path) -> None:
    machine(tmp_path, "0::/a")
    v2(tmp_path, "a", 1 << 50, 0)
    assert available_bytes(tmp_path) == MACHINE_FREE and total_bytes(tmp_path) < 1 << 50


def test_cores_are_those_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the least of its groups, rounded up, and no more than this process may run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert cores(tmp_path) == 12
    machine(tmp_path, "4:cpu,cpuacct:/pod/a", "0::/pod/a")
    write(tmp_path, f"{V2}/cpu.max", "max 100000")
    write(tmp_path, f"{V2}/pod/cpu.max", "350000 100000")
    write(tmp_path, f"{V2}/pod/a/cpu.max", "max 100000")
    assert cores(tmp_path) == 4
    write(tmp_path, "sys/fs/cgroup/cpu/pod/a/cpu.cfs_quota_us", -1)
    write(tmp_path, "sys/fs/cgroup/cpu/pod/a/cpu.cfs_period_us", 100000)
    write(tmp_path, "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", 150000)
    write(tmp_path, "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", 100000)
    assert cores(tmp_path) == 2
    write(tmp_path, f"{V2}/pod/a/cpu.max", "10000 100000")
    assert cores(tmp_path) == 1


def test_threads_are_those_of_the_groups(tmp_path: Path) -> None:
    """Of the least of them; a container's own group may have no limit, and the pod's one."""
    assert pids_max(tmp_path) == ""
    machine(tmp_path, "6:pids:/pod/a", "0::/pod/a")
    write(tmp_path, f"{V2}/pod/a/pids.max", "max")
    assert pids_max(tmp_path) == "max"
    write(tmp_path, f"{V2}/pod/pids.max", 900)
    assert pids_max(tmp_path) == "900"
    write(tmp_path, "sys/fs/cgroup/pids/pod/a/pids.max", 1000)
    assert pids_max(tmp_path) == "900"
    write(tmp_path, "sys/fs/cgroup/pids/pod/a/pids.max", 64)
    assert pids_max(tmp_path) == "64"
