"""What a desk check could not settle (recipes/bench/gpu/README.md has its ten tests): pinning beside a
neighbour's decoding, a training loop that has no room, a source that captures, a start behind a killed engine,
borrowing in another process, and the order by torch's own sanitizer."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_neighbours import beside, borrow, fill, pin
from gpu_place import NO_GPU, free_bytes, host_free_bytes
from hub_limits import AT_ONCE

from recipes.bench.gpu.engine import Engine
from tensorhub_plugins.core import Publisher, contiguous_spec, gate
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.vllm.worker import memory_need

GIB = 1 << 30


# --- a neighbour ---


@pytest.mark.timeout(600)
def test_a_neighbours_pinning_does_not_stop_the_steps_here(place, figure):
    """One registration holds locks of the driver that all processes of a host want: pieces let others in between."""
    engine = Engine(place.torch_device, layers=place.size(24, 3), width=place.size(1024, 32))
    engine.capture()

    def steps(until: Any) -> list[float]:
        taken = []
        while not until(len(taken)):
            began = time.perf_counter()
            engine.step()
            if place.is_gpu:
                torch.cuda.mem_get_info()  # what a neighbour of one that pinned at once stood in
            engine.finish()
            taken.append(time.perf_counter() - began)
        return taken

    kind = "gpu" if place.is_gpu else "stand-in"
    pinned_bytes = place.size(64 * GIB, 1 << 20)
    if place.is_gpu and host_free_bytes() < pinned_bytes + 16 * GIB:
        pytest.skip(f"it pins 64 GiB, and this host has {host_free_bytes() / GIB:.0f} GiB free")
    with beside(pin, kind, pinned_bytes) as (_, pipe):
        idle = steps(lambda count: count >= place.size(2000, 20))
        pipe.send("pin")
        busy = steps(lambda count: count and pipe.poll())
        seconds = pipe.recv()
    figure("64 GiB pinned by a neighbour, s", seconds)
    longest = figure("longest step beside it, ms", max(busy) * 1e3, limit=max(idle) * 1e3)
    figure("median step beside it, ms", statistics.median(busy) * 1e3, limit=statistics.median(idle) * 1e3)
    place.judge(max(busy) < 0.25 or longest < 3, f"a step takes {max(busy):.2f} s while a neighbour pins")
    assert engine.mixed == 0


# --- room ---


def test_a_training_loop_without_room_is_as_if_nothing_were_published(place, clients, figure):
    """Steps that need 92 % of the device: a publish in the background takes what none has needed, or nothing."""
    count, size_bytes = 4, place.size(GIB, 50_000)
    weights = {f"w{number}": place.random(size_bytes, number) for number in range(count)}
    model = [contiguous_spec(name, torch.uint8, [size_bytes]) for name in weights]
    publisher = Publisher(
        clients("trainer"), rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=120, model=model, in_background=True
    )
    assert pinning.wait_for_background(60)
    rollout, peaks = clients("rollout"), []
    activations = int(0.92 * torch.cuda.mem_get_info()[1]) - count * size_bytes if place.is_gpu else 1000
    for version in range(place.size(20, 3)):
        if place.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        held = [torch.empty(activations // 8, dtype=torch.uint8, device=place.torch_device) for _ in range(8)]
        del held
        for tensor in weights.values():
            place.fill_late(tensor, version % 250, "default", ms=1.0)
        if version:  # the first step is without one
            publisher.publish(version, weights.items())
        peaks.append(torch.cuda.max_memory_allocated() if place.is_gpu else 0)
    publisher.settle()
    found = rollout.fetch(version).tensors()
    assert all(set(tensor[::997].tolist()) == {version % 250} for tensor in found.values())
    publisher.close()
    figure("peak of a step beside publishes, GB", max(peaks[1:]) / 1e9, limit=peaks[0] / 1e9)
    assert max(peaks[1:]) <= peaks[0] + place.size(4 * GIB + GIB // 4, 0)
    place.check()


class Snapshot:
    """As vLLM's, of the device or of a driver that frees a tenth of it each time that it is asked."""

    def __init__(self, place: Any) -> None:
        self._place, self.free_memory, self.total_memory = place, 0, 100
        self.measure()

    def measure(self) -> None:
        if self._place.is_gpu:
            self.free_memory, self.total_memory = torch.cuda.mem_get_info()
        else:
            self.free_memory += 10


def test_a_start_behind_a_killed_engine_waits_for_its_memory(place, figure):
    utilization = 0.8
    if place.is_gpu:
        torch.cuda.empty_cache()
        with beside(fill, utilization - 0.05) as (process, _):
            assert free_bytes() < utilization * torch.cuda.mem_get_info()[1], "the control: it is not there"
            process.kill()
    began = time.perf_counter()
    snapshot, config = Snapshot(place), SimpleNamespace(gpu_memory_utilization=utilization)
    found = memory_need.request_memory(lambda snapshot, _: int(snapshot.free_memory), snapshot, config)
    assert found >= utilization * snapshot.total_memory
    figure("memory of a killed process is free again after, s", time.perf_counter() - began)


# --- captures ---


def test_a_source_that_captures_is_waited_for(place, clients):
    """It is asked for its live weights when its gate is closed, as of an engine that starts. What dies while graphs are
    captured, events and pinned memory, breaks none."""
    source, reader = clients("source"), clients("reader", transports=("tcp",))
    weights = {"w": place.random(place.size(GIB, 100_000), 1)}
    expected = place.content(weights["w"])
    source.publish(1, weights, copy=False)
    engine = Engine(place.torch_device, layers=place.size(24, 3), width=place.size(1024, 32))
    for version in range(place.size(20, 2)):
        marks = [place.device.mark() for _ in range(10)]
        host = place.device.buffer(1 << 20)
        found: list[Any] = []
        fetching = threading.Thread(target=lambda found=found: found.append(reader.fetch(1, timeout_s=120)))
        gate.close()
        fetching.start()
        marks.clear()
        del host
        gate.open()
        engine.capture()
        engine.step()
        fetching.join(120)
        assert found and place.content(found[0].tensors()["w"]) == expected, version
        found[0].release()
        reader.unpublish(1)
    assert engine.mixed == 0
    place.check()


# --- borrowed memory, by another process ---

PINS_READ_ONLY = "CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED"  # 113 in cuda.h


def attribute() -> int:
    found = ctypes.c_int(-1)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(found), ctypes.c_int(113), ctypes.c_int(0))
    return found.value


@pytest.mark.gpu
def test_another_process_installs_from_borrowed_memory():
    """In a process of its own, as engines are. `test_gpu_sharing.py` does so in one process, also on the stand-in."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    from tensorhub_plugins.core import Client, start_server

    size_bytes = 4 * GIB
    weights = {"w": torch.arange(size_bytes // 4, dtype=torch.int32).view(torch.uint8)}
    names = {"transports": ("shm", "tcp"), "run": "gpu", "model": "actor"}
    with start_server(limits=AT_ONCE) as hub, Client(hub.address, replica="lender", **names) as lender:
        lender.publish(1, weights)
        with beside(borrow, hub.address, size_bytes) as (_, pipe):
            unpinned, seconds, total = pipe.recv()
    print(f"borrowed: {size_bytes / seconds / 1e9:.1f} GB/s, {unpinned or 'pinned'}; {PINS_READ_ONLY}: {attribute()}")
    assert total == int(weights["w"][::4099].sum())
    assert unpinned is None or "801" in unpinned, unpinned
    assert size_bytes / seconds > 10e9, "through pinned pieces by several threads, if it cannot be pinned"


# --- the sanitizers ---


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["torch's", "NVIDIA's"])
def test_the_order_is_right_by_sanitizers(which, tmp_path):
    """torch's compares what each stream touches; NVIDIA's looks at the kernels' memory."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    environment = dict(os.environ)
    if which == "torch's":
        command += [
            str(here / "test_gpu_order.py"),
            "-k",
            "gpu and (finished or install or written or chain) and not without",
        ]
        environment["TORCH_CUDA_SANITIZER"] = "1"
    else:
        tool = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
        if not tool.exists():
            pytest.skip(f"{tool} is not there: CUDA_HOME names where CUDA's tools are")
        command = [
            str(tool),
            "--error-exitcode=9",
            *command,
            str(here / "test_gpu_kernels.py"),
            "-k",
            "gpu and xxhashs",
        ]
    ran = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]


# --- vLLM on the device ---


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["dense", "moe", "fp8", "fp8-moe"])
def test_installs_of_vllms_layers_take_the_passes_that_the_cpu_says(kind):
    """One rank of a large model with one thread of torch, its layers on the device: seconds, passes and host memory."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    pytest.importorskip("vllm")
    pytest.importorskip("transformers")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DEVICE": "cuda"}
    command = [sys.executable, "-m", "recipes.bench.big.worker", kind, "15", "1"]
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stderr[-4000:]
    print(ran.stdout)
