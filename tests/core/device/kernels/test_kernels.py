"""What is computed on a device is what the host computes, bit for bit: by torch here, by Triton in its interpreter."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
import xxhash
from interpreted import IS_INTERPRETED, run_by_triton, was_triton
from simulated import Simulation

from tensorhub_plugins.core import Slab
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.kernels import launch, xxh3
from tensorhub_plugins.core.device.kernels.moving import move

SEEDS = range(1 if IS_INTERPRETED else 6)  # a kernel's program takes the interpreter 10 ms
ODD = [241, 248, 255, 256, 1000, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 3333, 100_003]


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="this is it")
def test_triton_computes_the_same() -> None:
    run_by_triton(__file__)


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def expected_digests(content, size):
    return b"".join(xxhash.xxh3_128_digest(content[start : start + size]) for start in range(0, len(content), size))


# --- digests ---


def digests(flats):
    """As of segments of a device, all of one size."""
    size = flats[0].numel()
    lanes = torch.empty(len(flats) * xxh3.LANES_SIZE_BYTES, dtype=torch.uint8)
    xxh3.lanes_of(flats, [lanes], torch.from_numpy)
    _, tail = xxh3.tail_start(size)
    tails = np.stack([flat[tail:].numpy() for flat in flats])
    return xxh3.finish(lanes.numpy().view(np.uint64).reshape(len(flats), -1), tails, size)


@pytest.mark.parametrize("count", [1, 5])
def test_digests_are_those_of_xxhash(count: int) -> None:
    """From 241 bytes on, at every length of the last block and stripe."""
    for size in [*ODD, *range(248, 1900, 107), 64 << 10]:
        flats = [random_bytes(size, seed) for seed in range(count)]
        assert digests(flats) == b"".join(xxhash.xxh3_128_digest(bytes(flat.tolist())) for flat in flats), size


def test_a_digest_that_is_wrong_is_found(monkeypatch) -> None:
    """The control: one bit of what has been summed up."""
    finish = xxh3.finish
    flat = random_bytes(2048)
    monkeypatch.setattr(xxh3, "finish", lambda lanes, *given: finish(lanes ^ np.uint64(1), *given))
    assert digests([flat]) != xxhash.xxh3_128_digest(bytes(flat.tolist()))


# --- many small runs ---


@pytest.mark.parametrize("seed", range(6))
def test_runs_are_moved_whatever_their_sizes_and_alignments(seed: int) -> None:
    chance = random.Random(seed)
    sizes = chance.choices([1, 2, 7, 8, 16, 24, 100, 4096, 8192, 8193, 20_001] if seed else [8, 16, 8192, 8200], k=60)
    memory, runs = random_bytes(400_000, seed), []
    at = 0
    for size in sizes:
        at += chance.choice([0, 1, 3, 8] if seed else [0, 8])
        runs.append(memory[at : at + size])
        at += size
    expected = torch.cat(runs)
    one = torch.zeros(sum(sizes) + 2, dtype=torch.uint8)
    shift = 0 if seed < 3 else 1
    move(runs, [one[shift : shift + sum(sizes)]], torch.from_numpy)
    assert torch.equal(one[shift : shift + sum(sizes)], expected) and not one[:shift].any()
    assert not one[shift + sum(sizes) :].any()
    before = memory.clone()
    for run in runs:
        run.zero_()
    move([one[shift : shift + sum(sizes)]], runs, torch.from_numpy)
    assert torch.equal(memory, before)


# --- where Triton does not work ---


def test_where_triton_fails_torch_goes_on(monkeypatch, caplog) -> None:
    """Without a C compiler, for example. It is said, and not tried again."""
    pytest.importorskip("triton")
    tried = []

    def refuse(name):
        tried.append(name)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launch, "_failures", [])
    monkeypatch.setattr(launch, "import_module", refuse)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    flat = random_bytes(3000)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert digests([flat]) == xxhash.xxh3_128_digest(bytes(flat.tolist()))
    assert len(tried) == 1 and "Failed to find C compiler" in caplog.text


# --- the digests of a slab, where it lies ---


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Large and tiny, some of them of odd sizes, so that segments lie in one piece, in several, and anywhere."""
    chance = random.Random(seed)
    sizes = [40_000, *chance.choices([1, 2, 16, 300, 4096, 10_001], k=20), 30_000, 5]
    return {f"w{number:02}": random_bytes(size, seed + number) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("segment_size_bytes", [*([] if IS_INTERPRETED else [256]), 4096, 16_384, 1 << 20])
def test_a_devices_slab_has_the_digests_of_the_hosts(seed: int, segment_size_bytes: int) -> None:
    host = weights(seed)
    with Simulation(seed) as simulation, Slab.adopt(host) as here:
        expected = here.manifest(segment_size_bytes)
        with Slab.adopt({name: simulation.put(tensor, name) for name, tensor in host.items()}) as there:
            assert there.manifest(segment_size_bytes).digests == expected.digests
            copies = simulation.calls["copy"]
            assert there.damaged(expected) == []
        whole, rest = divmod(here.size_bytes, segment_size_bytes)
        assert copies == bool(whole) + bool(rest)  # of lanes and tails: no segment came here
        simulation.check()


def test_several_groups_of_segments(monkeypatch) -> None:
    from tensorhub_plugins.core.memory import device_digests

    host = weights(1)
    for scratch, at_once in ((1, 1000), (10_000, 1000), (1 << 20, 3))[: len(SEEDS)]:
        groups = device_digests._groups
        monkeypatch.setattr(
            device_digests, "_groups", lambda segments, s=scratch, n=at_once, g=groups: g(segments, s, n)
        )
        with Simulation(1) as simulation, Slab.adopt(host) as here:
            with Slab.adopt({name: simulation.put(tensor, name) for name, tensor in host.items()}) as slab:
                assert slab.manifest(4096).digests == here.manifest(4096).digests
            simulation.check()
        monkeypatch.undo()


def test_damage_is_found_where_it_lies() -> None:
    host = {"w": random_bytes(100_000)}
    with Simulation(2) as simulation:
        live = simulation.put(host["w"], "w")
        with Slab.adopt({"w": live}) as slab:
            manifest = slab.manifest(4096)
            simulation.kernel(live[50_000:50_001], int(host["w"][50_000]) ^ 1, "default")
            simulation.devices[0].synchronize()
            assert slab.damaged(manifest) == [50_000 // 4096]


@pytest.mark.parametrize("waits", [True, False])
def test_digests_are_of_what_has_been_written(monkeypatch, waits: bool) -> None:
    """The control: without the wait the kernels that write and those that digest are named."""
    if not waits:
        monkeypatch.setattr(Device, "synchronize", lambda self: None)
    with Simulation(3) as simulation:
        live = {"w": simulation.put(torch.zeros(100_000, dtype=torch.uint8), "w")}
        simulation.kernel(live["w"], 7, "optimizer")
        with Slab.adopt(live) as slab:
            found = slab.manifest(4096).digests
        if waits:
            assert found == expected_digests(b"\7" * 100_000, 4096)
            simulation.check()
        else:
            with pytest.raises(AssertionError, match=r"unordered: kernel sets 7 .* writes w\[0:\], lanes_of .* reads"):
                simulation.check()


@pytest.mark.parametrize("why", ["scratch", "launch", "short", "uneven", "blake3"])
def test_what_cannot_be_digested_there_is_digested_here(why: str) -> None:
    host, algorithm = {"w": random_bytes(5000)}, "blake3" if why == "blake3" else "xxh3_128"
    segment_size_bytes = {"short": 240, "uneven": 1001}.get(why, 1024)
    with Simulation(0) as simulation, Slab.adopt(host) as here:
        simulation.fail(why)
        with Slab.adopt({"w": simulation.put(host["w"])}) as there:
            found = there.manifest(segment_size_bytes, algorithm=algorithm).digests
        assert found == here.manifest(segment_size_bytes, algorithm=algorithm).digests
        simulation.check()


def test_it_was_triton() -> None:
    """The control of the interpreter's run."""
    assert was_triton() == IS_INTERPRETED
