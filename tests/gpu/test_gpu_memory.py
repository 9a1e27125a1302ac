"""Pinning, forks, threads, exports and want of memory: rows 9, 10, 11, 12, 21 and 28 of the suite."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch

from tensorhub_plugins.core import Slab, TensorSpec, TransferLimits
from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.memory import pinning

GIB = 1 << 30


def test_pinning_beside_a_transfer_loses_no_source(place, clients):
    """The first read pins its memory in the background while bytes arrive; a source may be silent for five seconds."""
    size_bytes = place.size(16 * GIB, 1 << 20)
    count = 8
    weights = {f"w{n}": place.random(size_bytes // count, n) for n in range(count)} if not place.is_gpu else {}
    if place.is_gpu:  # in host memory: what is pinned is what is measured
        block = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
        weights = {f"w{n}": block.roll(n).repeat(size_bytes // count // len(block)) for n in range(count)}
    trainer, rollout = clients("trainer"), clients("rollout", limits=TransferLimits(stall_s=5.0))
    trainer.publish(1, weights, copy=False)
    found = rollout.fetch(1, timeout_s=300).tensors()
    assert all(place.content(found[name]) == place.content(tensor) for name, tensor in weights.items())
    assert pinning.wait_for_background(120)
    place.check()


def test_a_pinning_that_fails_leaves_no_error_behind(place):
    host = torch.zeros(1 << 20, dtype=torch.uint8)
    with place.device.calling() as driver:
        if place.is_gpu:
            assert driver.register(host) == ""  # twice is an error
        else:
            place.simulation.fail("register")
        assert driver.register(host)
        if place.is_gpu:
            driver.unregister(host)
    after = place.put(torch.arange(1000))
    place.fill_late(after, 3)  # the next kernel of this thread
    assert set(place.content(after)) == {3}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_unpinned(place):
    place.content(place.put(torch.arange(10)))  # this process uses the device
    child = os.fork()
    if not child:
        status = 1
        try:
            with Slab.allocate([TensorSpec("w", "uint8", (1000,), 1000)]) as slab:
                slab.write("w", torch.full((1000,), 5, dtype=torch.uint8))
                is_unpinned = slab.copying_device is None or not place.is_gpu
                status = 0 if is_unpinned and set(bytes(slab.readable(0, 1000)[0])) == {5} else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_new_thread_copies_with_the_tensors_device(place):
    """With one GPU this shows that it works at all; contexts on another one take two."""
    there, found = place.random(1 << 20, 1), []
    expected = place.content(there)

    def read() -> None:
        with Slab.adopt({"w": there}) as slab:
            found.append(b"".join(map(bytes, slab.readable(0, slab.size_bytes))))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(60)
    assert found == [expected]
    place.check()


def test_memory_is_exported_for_rdma_or_refused_with_the_reason(place, figure):
    """dma-buf, also by a thread that has no context. Never another size than was asked for."""
    there, said = place.random(2 << 20, 1), []
    owner = devices.of(there)
    assert owner is not None

    def export() -> None:
        try:
            fd, offset = owner.export_dma_buf(there.data_ptr(), there.numel())
            size_bytes = os.fstat(fd).st_size
            os.close(fd)
            said.append("exported" if size_bytes == 0 or size_bytes >= offset + there.numel() else "too little")
        except OSError as error:
            said.append(str(error))

    for _ in range(2):
        thread = threading.Thread(target=export)
        thread.start()
        thread.join(60)
        export()
    assert len(said) == 4 and "too little" not in said and all(said)
    figure(f"dma-buf: {sorted(set(said))}", float(said.count("exported")), limit=4.0)


def test_an_install_without_room_for_small_tensors_together_still_arrives(place, clients):
    trainer, rollout = clients("trainer"), clients("rollout")
    host = {f"t{n}": torch.full((500,), n % 256, dtype=torch.uint8) for n in range(300)}
    live = {name: place.put(torch.zeros_like(tensor), name) for name, tensor in host.items()}
    trainer.publish(1, host)
    if place.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-9)
        taken = []  # what torch has cached would do
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                taken.append(torch.empty(512, dtype=torch.uint8, device=place.torch_device))
    else:
        place.simulation.fail("scratch", 1000)
    try:
        rollout.replicate(live, 1)
    finally:
        if place.is_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(place.content(live[name]) == place.content(tensor) for name, tensor in host.items())
    place.check()
