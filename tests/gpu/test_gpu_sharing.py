"""Memory that an engine gives away while it sleeps, and host memory that engines share: rows 8 and 27 of the suite."""

from __future__ import annotations

import os

import gpu_place
import pytest
import torch
from mapped import mapped

from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.memory.staging import copy_all

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


def shared():
    """Host memory of this process that others can map: bytes by file."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name, stat = os.readlink(f"/proc/self/fd/{fd}"), os.stat(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if name.startswith("/memfd:") and "simulated device" not in name:
            found[stat.st_ino] = stat.st_blocks * 512
    return found


def bytes_since(before):
    """Of what was not there then."""
    return sum(size_bytes for file, size_bytes in shared().items() if file not in before)


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_engines_of_a_host_install_from_one_copy_in_its_memory(place, clients, is_shared):
    """The weights come to the host once, and both read them there. The control: engines that each fetch their own."""
    size_bytes = place.size(4 * GIB, 4 << 20)
    transports = ("shm", "tcp")
    weights = {"w": place.random(size_bytes, 1)}
    clients("trainer", transports=transports).publish(1, weights, copy=False)
    expected, before, kept = place.content(weights["w"]), shared(), []
    for number in range(2):
        rollout = clients(f"rollout-{number}", transports=transports)
        if is_shared:
            live = place.random(size_bytes, 10 + number)
            report = rollout.replicate({"w": live}, 1, serve=False)
            assert set(report.transports) == {"shm"} and place.content(live) == expected
        else:
            kept.append(rollout.fetch(1))
    copies = bytes_since(before) / size_bytes
    assert (0.9 < copies < 1.5) if is_shared else copies > 1.9, copies
    place.check()


@pytest.mark.parametrize("borrows", [True, False])
def test_engines_of_a_host_install_from_borrowed_memory(place, clients, figure, borrows):
    """It is registered with the device by each of them, to be read only. The control: memory of their own."""
    size_bytes = place.size(2 * GIB, 2 << 20)
    transports, layout = ("shm", "tcp"), "runtime:f"
    first = clients("rollout-0", transports=transports)
    weights = {"w": place.random(size_bytes, 1)}
    first.publish(1, weights, layout)
    expected, before, kept = place.content(weights["w"]), shared(), []
    for number in (1, 2):
        fetched = clients(f"rollout-{number}", transports=transports).fetch(1, (layout,), borrow=borrows)
        assert pinning.wait_for_background(60)
        live = place.random(size_bytes, 10 + number)
        assert fetched.unpinned is None or "801" in fetched.unpinned, fetched.unpinned
        taken = place.timed(lambda live=live, fetched=fetched: copy_all([(live, fetched.tensors()["w"])]), 2)
        if place.is_gpu:
            host = place.device.buffer(size_bytes)
            bare = place.timed(lambda live=live, host=host: live.copy_(host, non_blocking=True))
            ratio = figure(
                f"install, borrowed: {borrows}, GB/s", size_bytes / taken / 1e9, limit=size_bytes / bare / 1e9
            )
            place.judge(ratio >= 0.2, f"an install reaches {ratio:.2f} of a pinned copy: {fetched.unpinned}")
            copy_all([(live, fetched.tensors()["w"])])
        assert place.content(live) == expected
        kept.append(fetched)
    copies = bytes_since(before) / size_bytes
    assert copies < 0.1 if borrows else copies > 1.9, copies
    place.check()
