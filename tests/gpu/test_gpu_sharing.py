"""Memory that an engine gives away while it sleeps, and host memory that engines share: rows 8 and 27 of the suite."""

from __future__ import annotations

import os

import gpu_place
import pytest
import torch
from mapped import mapped

GIB = 1 << 30


def test_an_engine_sleeps_and_wakes_between_serves(place, clients):
    """Nothing of ours keeps the memory, or what was in it (A13)."""
    size_bytes = place.size(4 * GIB, 100_000)
    trainer, rollout, peer = clients("trainer"), clients("rollout"), clients("peer")
    trainer.retain(0)  # what is taken back need not be kept
    with mapped(place, size_bytes) as memory:
        address = memory.tensor.data_ptr()
        for version in range(1, place.size(6, 4)):
            weights = {"w": torch.full((size_bytes,), version, dtype=torch.uint8)}
            trainer.publish(version, weights)
            rollout.replicate({"w": memory.tensor}, version)
            trainer.unpublish(version)
            found = peer.fetch(version)
            assert set(found.report.sources) == {"rollout/0"}
            assert torch.equal(found.tensors()["w"], weights["w"])
            peer.unpublish(version)
            rollout.unpublish(version)
            free = gpu_place.free_bytes() if place.is_gpu else 0
            memory.unmap()
            if place.is_gpu:
                assert gpu_place.free_bytes() - free >= size_bytes * 9 // 10
            memory.map()
            assert memory.tensor.data_ptr() == address
    place.check()


def test_memory_that_is_unmapped_while_it_is_copied_is_named(place):
    """The control."""
    if place.is_gpu:
        pytest.skip("it would be a fault of the GPU, after which nothing runs")
    host = place.device.buffer(100_000)
    with mapped(place, 100_000) as memory:
        event = place.device.begin_down([memory.tensor], host)
        memory.unmap()
        place.device.wait(event)
    with pytest.raises(AssertionError, match="unordered: copy .*, to unmap it writes"):
        place.check()


def shared_bytes():
    """Host memory of this process that others can map."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name, stat = os.readlink(f"/proc/self/fd/{fd}"), os.stat(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if name.startswith("/memfd:") and "simulated device" not in name:
            found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_engines_of_a_host_install_from_one_copy_in_its_memory(place, clients, is_shared):
    """The weights come to the host once, and both read them there. The control: engines that each fetch their own."""
    size_bytes = place.size(4 * GIB, 4 << 20)
    transports = ("shm", "tcp")
    weights = {"w": place.random(size_bytes, 1)}
    clients("trainer", transports=transports).publish(1, weights, copy=False)
    expected, before, kept = place.content(weights["w"]), shared_bytes(), []
    for number in range(2):
        rollout = clients(f"rollout-{number}", transports=transports)
        if is_shared:
            live = place.random(size_bytes, 10 + number)
            report = rollout.replicate({"w": live}, 1, serve=False)
            assert set(report.transports) == {"shm"} and place.content(live) == expected
        else:
            kept.append(rollout.fetch(1))
    copies = (shared_bytes() - before) / size_bytes
    assert (0.9 < copies < 1.5) if is_shared else copies > 1.9, copies
    place.check()
