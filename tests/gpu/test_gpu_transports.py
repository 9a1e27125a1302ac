"""Every transport with tensors on the device; cuda_ipc between processes that die: rows 1, 8 and 20 of the suite."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_place
import ipc_devices
import pytest
import torch
from gpu_peer import content, cuda_reader, source
from gpu_place import values
from transport_helpers import KEY, soon, until
from transport_suite import SimpleShelf
from transport_suite.material import read_equal
from transport_suite.peers import Peer

from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import NotServable, Offer, create

pytestmark = pytest.mark.heavy  # where there is no GPU tests/core/transports shows the same on the simulated device

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
TRIED = ("tcp", "shm", "cuda_ipc")


@pytest.fixture(scope="module")
def conforming():
    """conforming("gpu", "tcp"): a process in which that transport is tried; those of a GPU at the same time."""
    begun = {}

    def process(name, transport):
        if (name, transport) not in begun:
            for each in TRIED if name == "gpu" else [transport]:
                begun[name, each] = begin_conforming(name, each)
        return begun[name, transport]

    yield process
    for each in begun.values():
        each.kill()
        each.communicate()


def begin_conforming(name, transport):
    # tests/conftest.py, which says where modules are, is not read where this folder is run by itself.
    places = [HERE, HERE.parent / "support", HERE.parents[1], os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(str(place) for place in places if place)
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_LAUNCH_BLOCKING": "1"}
    command = [sys.executable, HERE / "conform.py", name, transport]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRIED)
def test_conformance(place, conforming, transport):
    if not place.is_gpu and transport != "tcp":
        pytest.skip("tests/core/transports runs it on the simulated device")
    ran = conforming("gpu" if place.is_gpu else "stand-in", transport)
    told, problems = ran.communicate(timeout=600)
    assert ran.returncode == 0, problems[-4000:]
    assert len(json.loads(told.splitlines()[-1])["passed"]) >= 20


# --- cuda_ipc: what CUDA itself has to bear out ---


@pytest.fixture
def reader(place):
    with contextlib.closing(create("cuda_ipc") if place.is_gpu else ipc_devices.apart()) as reader:
        yield reader


def kind_of(place):
    return "gpu" if place.is_gpu else "stand-in"


def blank(place, size_bytes):
    """A slab on the device, and its tensor."""
    tensors = {"w": torch.zeros(size_bytes, dtype=torch.uint8)}
    return (gpu_place.adopt_on_gpu if place.is_gpu else ipc_devices.adopt)(tensors), tensors["w"]


def begin(reader, endpoint, slab, *, digests=True):
    """A reading of everything, and its link."""
    link = reader.connect(endpoint, deadline=soon(120))
    link.digests = digests
    manifest = link.open(KEY, 1, deadline=soon(120))
    return link, manifest, read_equal(link, range(manifest.segment_count), slab, deadline=soon(120))


@pytest.mark.parametrize("digests", [True, False])
def test_between_two_processes(place, reader, figure, digests):
    size_bytes = place.size(8 * GIB, 9_000_000)
    slab, live = blank(place, size_bytes)
    with slab, source(kind_of(place), size_bytes) as other:
        taken = []
        for _ in range(4):  # the first one opens the memory
            link, manifest, reading = begin(reader, other.endpoint, slab, digests=digests)
            began = time.perf_counter()
            for segment in reading:
                assert not digests or link.digest(segment) == manifest.digest(segment)
            taken.append(time.perf_counter() - began)
            assert link.check(deadline=soon())
            link.close()
        assert place.content(live) == place.content(content(size_bytes))
        if place.is_gpu:
            beside = torch.empty_like(live)
            bare = place.timed(lambda: beside.copy_(live))
            what = f"cuda_ipc, GB/s{'' if digests else ', without digests'}"
            ratio = figure(what, size_bytes / min(taken[1:]) / 1e9, limit=size_bytes / bare / 1e9)
            place.judge(digests or ratio >= 0.2, f"{what}: {ratio:.2f} of a device copy")
    place.check()


@pytest.mark.smoke
def test_into_host_memory(place, reader):
    size_bytes = place.size(2 * GIB, 9_000_000)
    with source(kind_of(place), size_bytes) as other:
        link = reader.connect(other.endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        with Slab.allocate(manifest.tensors) as slab:
            got = list(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))
            assert sorted(got) == list(range(manifest.segment_count))
            assert torch.equal(slab.tensors()["w"], content(size_bytes))
        link.close()
    place.check()


@pytest.mark.parametrize("digests", [True, False])
def test_what_is_withdrawn_in_mid_copy_is_never_yielded(place, reader, digests):
    """The owner overwrites its memory the moment withdraw() returns."""
    size_bytes = place.size(4 * GIB, 40_000_000)
    expected = content(size_bytes)
    with source(kind_of(place), size_bytes) as other:
        for after in range(place.size(5, 2)):
            slab, live = blank(place, size_bytes)
            with slab:
                link, manifest, reading = begin(reader, other.endpoint, slab, digests=digests)
                got = [next(reading) for _ in range(1 + after)]
                other.ask("withdraw", waits=False)
                with contextlib.suppress(SourceLost):
                    got += reading
                link.close()
                whole = place.content(live)
                for segment in got:
                    start, stop = manifest.segment_range(segment)
                    assert whole[start:stop] == place.content(expected[start:stop]), f"segment {segment} is torn"
            other.hear()
            other.ask("offer")
    place.check()


def test_a_source_killed_in_mid_copy_costs_the_read_and_nothing_else(place, reader):
    """What CUDA calls undefined: the owner's memory goes while it is open here. The reader's device must live on."""
    size_bytes = place.size(4 * GIB, 40_000_000)
    before = gpu_place.free_bytes() if place.is_gpu else 0
    for after in range(place.size(5, 2)):
        slab, live = blank(place, size_bytes)
        with slab, source(kind_of(place), size_bytes) as other:
            link, manifest, reading = begin(reader, other.endpoint, slab, digests=False)
            got = [next(reading) for _ in range(1 + after)]
            other.process.kill()
            with contextlib.suppress(SourceLost):
                got += reading
            link.close()
            whole, expected = place.content(live), place.content(content(size_bytes))
            for segment in got:
                start, stop = manifest.segment_range(segment)
                assert whole[start:stop] == expected[start:stop], f"segment {segment} is torn"
        del slab, live, link, reading
    answer = place.put(torch.arange(1000))
    assert place.content(answer) == place.content(torch.arange(1000))  # no sticky error of CUDA
    if place.is_gpu:
        del answer
        torch.cuda.empty_cache()
        until(lambda: gpu_place.free_bytes() > before - (512 << 20))
    place.check()


def test_memory_goes_when_its_owner_lets_go_of_it(place, reader):
    """An open handle would keep it."""
    size_bytes = place.size(4 * GIB, 9_000_000)
    slab, _ = blank(place, size_bytes)
    with slab, source(kind_of(place), size_bytes) as other:
        link, _, reading = begin(reader, other.endpoint, slab)
        list(reading)
        link.check(deadline=soon())
        link.close()
        del link, reading
        held = gpu_place.free_bytes() if place.is_gpu else 0
        assert len(reader._open.values()) == 1
        other.ask("free")
        until(lambda: not reader._open.values())
        if place.is_gpu:
            until(lambda: gpu_place.free_bytes() >= held + size_bytes * 9 // 10)
    place.check()


def test_memory_without_a_handle_is_refused(place, reader):
    """expandable_segments:True in the source."""
    with source("expandable" if place.is_gpu else "pool", 9_000_000) as other:
        link = reader.connect(other.endpoint, deadline=soon())
        with pytest.raises(NotServable, match="expandable segments"):
            link.open(KEY, 1, deadline=soon())
        link.close()


def test_a_reader_killed_in_mid_copy_leaves_the_source_free(place):
    """Its memory can be overwritten at once, and be read by others."""
    size_bytes = place.size(GIB, 40_000_000)
    tensors = {"w": content(size_bytes)}
    slab = (gpu_place.adopt_on_gpu if place.is_gpu else ipc_devices.adopt)(tensors)
    make = cuda_reader if place.is_gpu else ipc_devices.apart
    with slab, contextlib.closing(make()) as served:
        offer = Offer(KEY, slab.manifest(4 << 20), slab)
        offer.mark_all_ready()
        endpoint = served.serve(SimpleShelf(offer))
        peer = Peer()
        assert len(peer.ask("read", make, endpoint, KEY, 1)) == 1
        peer.kill()
        assert offer.wait_no_readers(soon(20))
        offer.withdraw()
        tensors["w"].fill_(9)
        assert values(place.content(tensors["w"])) == {9}
    place.check()
