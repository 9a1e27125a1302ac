"""The digests of a stream that was cast and summed up as it was written are those of the bytes that came here."""

from __future__ import annotations

import random

import pytest
import torch
from simulated import Simulated, Simulation

from tensorhub_plugins.core import Slab, contiguous_spec
from tensorhub_plugins.core.device.kernels.casting import cast_at
from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.manifest import TensorTable
from tensorhub_plugins.core.memory import stream_copy
from tensorhub_plugins.core.memory.device_digests import digests_there
from tensorhub_plugins.core.memory.downloads import Downloads
from tensorhub_plugins.core.memory.stream_copy import StreamCopy

ROOM_SIZE_BYTES = 1 << 30


def masters(seed):
    """By name: a tensor, and what it is published as. Large and small ones, slices, some that keep their dtype."""
    chance, found = random.Random(seed), {}
    for number in range(12):
        rows, columns = chance.choice([(700, 256), (300, 100), (1, 1), (3, 7), (64, 1024), (1, 1000)])
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 * seed + number))
        dtype = chance.choice([torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32])
        found[f"w{number:02}"] = weight, dtype
    return found


def specs_of(found):
    return [contiguous_spec(name, dtype, weight.shape) for name, (weight, dtype) in found.items()]


def written(simulation, found, slab, downloads, *, order):
    """Queue all of them, the columns of some, as slices are."""
    for name in order:
        weight, _ = found[name]
        rows, columns = weight.shape
        wide = torch.zeros(rows, 2 * columns)
        wide[:, :columns] = weight
        live = simulation.put(wide, name)[:, :columns] if name.endswith("3") else simulation.put(weight, name)
        slab.write_later(name, live, downloads)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("summed_from", [0, 100_000, 1 << 30])
def test_they_are_the_digests_of_what_has_come(monkeypatch, seed: int, summed_from: int) -> None:
    """In any order, across tensors that share blocks and segments."""
    cast = []
    monkeypatch.setattr(StreamCopy.__init__, "__kwdefaults__", {"summed_from": summed_from})
    monkeypatch.setattr(stream_copy, "cast_at", lambda start: cast.append(start) or cast_at(start))
    found = masters(seed)
    order = random.Random(seed).sample(sorted(found), k=len(found))
    with Simulation(seed) as simulation, Slab.allocate(specs_of(found), pin=False) as slab:
        with Downloads(ROOM_SIZE_BYTES, digested=slab.specs) as downloads:
            written(simulation, found, slab, downloads, order=order)
        digests = downloads.digests(slab.segment_size_bytes)
        assert digests == slab.manifest().digests
        arrived = slab.tensors()
        assert all(torch.equal(arrived[name], weight.to(dtype)) for name, (weight, dtype) in found.items())
        assert downloads.digests(slab.segment_size_bytes) is None  # its memory is gone
        simulation.check()
    assert bool(cast) == (summed_from < 1 << 30)


def test_transposed_tensors_come_as_they_lie() -> None:
    weight = torch.randn(300, 100)
    twin = torch.empty(100, 300).t()
    spec = contiguous_spec("w", torch.float32, [300, 100])
    spec = type(spec)(spec.name, spec.dtype, spec.shape, spec.size_bytes, tuple(twin.stride()))
    with Simulation(0) as simulation, Slab.allocate([spec], pin=False) as slab:
        with Downloads(ROOM_SIZE_BYTES, digested=slab.specs) as downloads:
            slab.write_later("w", simulation.put(weight.t().contiguous().t(), "w"), downloads)
        assert downloads.digests(slab.segment_size_bytes) == slab.manifest().digests
        assert torch.equal(slab.tensors()["w"], weight)
        simulation.check()


def test_a_tensor_that_begins_at_an_odd_byte_is_cast_beside() -> None:
    """As one of three bytes comes before it. Where there is no room for that, it comes alone, and digests do not."""
    weight = torch.randn(300, 100)
    specs = [contiguous_spec("a", torch.uint8, [3]), contiguous_spec("w", torch.bfloat16, [300, 100])]
    for has_room in (True, False):
        with Simulation(0) as simulation, Slab.allocate(specs, pin=False) as slab:
            with Downloads(ROOM_SIZE_BYTES, digested=slab.specs) as downloads:
                slab.write_later("a", simulation.put(torch.tensor([1, 2, 3], dtype=torch.uint8), "a"), downloads)
                simulation.fail("nothing" if has_room else "scratch")
                slab.write_later("w", simulation.put(weight, "w"), downloads)
            assert torch.equal(slab.tensors()["w"], weight.bfloat16())
            assert downloads.digests(slab.segment_size_bytes) == (slab.manifest().digests if has_room else None)
            simulation.check()


@pytest.mark.parametrize("why", ["missing", "room", "scratch", "on the host", "another device"])
def test_without_all_of_it_there_are_none(why: str) -> None:
    """What was written has come all the same."""
    found = {"a": (torch.randn(50, 20), torch.bfloat16), "b": (torch.randn(3, 20), torch.float32)}
    specs = specs_of(found)
    with Simulation(0, count=2) as simulation, Slab.allocate(specs, pin=False) as slab:
        simulation.fail("scratch" if why == "scratch" else "nothing")
        with Downloads(1000 if why == "room" else ROOM_SIZE_BYTES, digested=slab.specs) as downloads:
            for name, (weight, _) in found.items():
                if why == "missing" and name == "b":
                    continue
                number = int(why == "another device" and name == "b")
                live = weight if (why, name) == ("on the host", "b") else simulation.put(weight, name, device=number)
                slab.write_later(name, live, downloads)
        assert downloads.digests(slab.segment_size_bytes) is None
        arrived = slab.tensors()
        for name, (weight, dtype) in found.items():
            assert (why, name) == ("missing", "b") or torch.equal(arrived[name], weight.to(dtype))
        simulation.check()


@pytest.mark.parametrize("waits", [True, False])
def test_digests_follow_what_was_written(monkeypatch, waits: bool) -> None:
    """On the device's own order. The control: without it, who casts and who digests are named."""
    if not waits:
        monkeypatch.setattr(Simulated, "order", lambda *given: None)
    weight = torch.randn(100, 100)
    with Simulation(3) as simulation:
        table = TensorTable.of([contiguous_spec("w", torch.bfloat16, weight.shape)])
        copy = StreamCopy(simulation.devices[0], table, summed_from=0)
        copy.write("w", simulation.put(weight, "w"), torch.empty(100, 100, dtype=torch.bfloat16))
        copy.digests(4096)
        if waits:
            simulation.check()
        else:
            with pytest.raises(AssertionError, match="unordered: cast .* writes scratch.*, mix .* reads scratch"):
                simulation.check()


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_still_summed_up_is_not_let_go_of(monkeypatch, waits: bool) -> None:
    """Where the device has no room for the rest any more: the training would get that memory at once, and the sums be
    written into what it has there. The control: without the wait this is named."""
    with Simulation(0) as simulation:
        table = TensorTable.of([contiguous_spec("w", torch.bfloat16, [5000])])
        copy = StreamCopy(simulation.devices[0], table)
        live = torch.randn(5000).bfloat16()
        copy.write("w", simulation.put(live, "w"), torch.empty(5000, dtype=torch.bfloat16))
        simulation.fail("scratch")
        if not waits:
            monkeypatch.setattr(Simulated, "wait", lambda *given: None)
        assert copy.digests(4096) is None
        del copy
        if waits:
            simulation.check()
        else:
            with pytest.raises(AssertionError, match="let go of: scratch.*, while sum_up .* may still touch it"):
                simulation.check()


def test_known_digests_are_good_until_the_next_write() -> None:
    with Slab.allocate([contiguous_spec("w", torch.uint8, [1000])], pin=False) as slab:
        for change in (
            lambda: slab.write("w", torch.ones(1000, dtype=torch.uint8)),
            slab.mark_written,
            slab.expect_writes,
        ):
            slab.know_digests(bytes(16))
            assert slab.manifest().digests == bytes(16)
            assert slab.manifest(512).digests != bytes(16) != slab.manifest(algorithm="blake3").digests
            change()
            assert slab.manifest().digests != bytes(16)


def test_a_group_of_segments_is_queued_before_the_last_one_is_finished() -> None:
    """N13: to finish one takes as long as the device takes for the next. The control is each digest."""
    size = 512
    content = torch.randint(0, 256, (2_500 * size + 300,), dtype=torch.uint8)
    with Simulation(4) as simulation:
        live = simulation.put(content, "w")
        driver, order = simulation.devices[0]._driver, []
        launch, wait = driver.launch, driver.wait
        driver.launch = lambda what, *of, **how: (order.append(what.__name__), launch(what, *of, **how))
        driver.wait = lambda event: (order.append("wait"), wait(event))
        joined = digests_there(simulation.devices[0], lambda start, stop: [live[start:stop]], len(content), size)
        simulation.check()
    assert [each for each in order if each != "move"] == [
        "lanes_of",
        "lanes_of",
        "wait",
        *["lanes_of", "wait"] * 2,
        *["wait"] * 1,
    ]
    pieces = torch.split(content, size)
    assert joined == b"".join(digest_of([memoryview(piece.numpy())]) for piece in pieces)
