"""Who waits for whom on the device, and who does not: rows 2, 3, 4, 15, 17 and 26 of the suite. Bytes are compared."""

from __future__ import annotations

import random
import time

import pytest
import torch
from gpu_place import CYCLES_A_MS, values

from recipes.bench.gpu.machine import shapes_of
from tensorhub_plugins.core import Held, Publisher, contiguous_spec
from tensorhub_plugins.core.device.devices import Device

GIB = 1 << 30


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_published_was_finished(place, clients, copy):
    """An optimizer on a stream of its own still writes when publish is called."""
    trainer, rollout = clients("trainer"), clients("rollout")
    weights = {"w": place.random(place.size(GIB, 10_000), 1)}
    place.fill_late(weights["w"], 7)
    trainer.publish(1, weights, copy=copy)
    assert values(place.content(rollout.fetch(1).tensors()["w"])) == {7}
    place.check()


def test_without_the_wait_half_a_step_is_published(place, clients, monkeypatch):
    """The control."""
    monkeypatch.setattr(Device, "synchronize", lambda self: None)
    trainer = clients("trainer")
    weights = {"w": place.random(place.size(GIB, 10_000), 1)}
    place.fill_late(weights["w"], 7, ms=500)
    trainer.publish(1, weights, copy=True)
    found = values(place.content(clients("rollout").fetch(1).tensors()["w"]))
    monkeypatch.undo()
    if place.is_gpu:
        assert found != {7}
    else:
        with pytest.raises(AssertionError, match="unordered: kernel"):
            place.check()


@pytest.mark.parametrize("way", ["a copy", "in place", "parts"])
def test_host_memory_that_is_published_was_written(place, clients, way):
    """Of weights that were offloaded with non_blocking=True a moment ago."""
    rollout, weights = clients("rollout"), {"w": place.offload_late(place.size(GIB, 10_000), 7, ms=200)}
    publish(clients("trainer"), weights, way)
    assert values(place.content(rollout.fetch(1).tensors()["w"])) == {7}


def publish(trainer, weights, way):
    """Version 1, as a trainer's rank does in one of these ways."""
    if way != "parts":
        trainer.publish(1, weights, copy=way == "a copy")
        return
    publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=120)
    specs = {name: contiguous_spec(name, each.dtype, each.shape) for name, each in weights.items()}
    publisher.publish_parts(1, [Held(specs[name], each) for name, each in weights.items()])
    publisher.settle()


@pytest.mark.heavy  # it imports verl
def test_what_verl_has_just_offloaded_is_published_as_it_was(place, clients):
    """verl's own function, which says that the host must not read what it returns without a wait."""
    utils = pytest.importorskip("verl.utils.fsdp_utils", exc_type=ImportError)
    model = torch.nn.Linear(place.size(16_384, 50), place.size(16_384, 50), bias=False, device=place.torch_device)
    with torch.no_grad():
        model.weight.fill_(1.0)
        if place.is_gpu:
            torch.cuda._sleep(200 * CYCLES_A_MS)
        model.weight.fill_(2.0)
    utils.offload_fsdp2_model_to_cpu(model, empty_cache=False)
    assert model.weight.device.type == "cpu" and (model.weight.is_pinned() or not place.is_gpu)
    publish(clients("trainer"), {"w": model.weight.data}, "parts")
    assert clients("rollout").fetch(1).tensors()["w"].unique().tolist() == [2.0]


def test_without_the_wait_memory_is_published_that_was_not_written(place, clients, monkeypatch):
    """The control."""
    monkeypatch.setattr(Device, "synchronize", lambda self: None)
    if not place.is_gpu:
        place.simulation.random.random = lambda: 1.0  # nothing runs that nobody waits for
    weights = {"w": place.offload_late(place.size(GIB, 10_000), 7, ms=500)}
    publish(clients("trainer"), weights, "a copy")
    assert values(place.content(clients("rollout").fetch(1).tensors()["w"])) != {7}
    monkeypatch.undo()
    place.device.synchronize()


def test_what_was_queued_before_an_install_reads_the_old_weights(place, clients):
    trainer, rollout = clients("trainer"), clients("rollout")
    size_bytes = place.size(GIB, 10_000)
    new, live = place.random(size_bytes, 1), place.random(size_bytes, 2)
    old = place.content(live)
    trainer.publish(1, {"w": new})
    answers = [place.read_late(live, ms=200) for _ in range(3)]
    rollout.replicate({"w": live}, 1)
    assert all(answer() == old for answer in answers)
    assert place.content(live) == place.content(new)
    place.check()


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
def test_a_chain_from_the_optimizer_to_the_next_steps(place, clients, figure, transport):
    """Weights of a 7B model, by one transport: an optimizer's stream still writes when they are published, in place or
    in the background, and queued steps still read when they are installed; the next step overwrites what was published.
    """
    sizes = enumerate(shapes_of(place.size(28, 1), is_small=not place.is_gpu))
    shapes = {f"w{number:03}": shape for number, shape in sizes}
    only = (transport,) if place.is_gpu or transport != "cuda_ipc" else ("cuda_ipc", "shm", "tcp")
    trainer, rollout = (clients(name, transports=only) for name in ("trainer", "rollout"))
    trained, live = (
        {name: place.put(torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()} for _ in range(2)
    )
    specs = [contiguous_spec(name, tensor.dtype, tensor.shape) for name, tensor in trained.items()]
    publisher = Publisher(
        trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=120, model=specs, in_background=True
    )
    for version in (1, 2, 3):
        for number, tensor in enumerate(trained.values()):
            place.fill_late(tensor, (number + version) % 251, "default", ms=0.1)
        began = time.perf_counter()
        if transport == "cuda_ipc":  # which reads where they are
            trainer.publish(version, trained, copy=False)
        else:
            publisher.publish(version, trained.items())
            publisher.settle()
        steps = {name: place.read_late(live[name], "forward", ms=20) for name in sorted(live)[:2]}
        report = rollout.replicate(live, version, serve=False)
        assert not place.is_gpu or set(report.transports) == {transport}
        figure(f"the chain by {transport}, s", time.perf_counter() - began)
        for name, read in steps.items():
            number = list(trained).index(name)
            assert values(read()) == ({(number + version - 1) % 251} if version > 1 else {0}), "a queued step saw both"
        for number, (name, tensor) in enumerate(live.items()):
            found = tensor.view(torch.uint8).view(-1)[:: place.size(997, 1)]
            assert values(place.content(found.contiguous())) == {(number + version) % 251}, name
        if transport == "cuda_ipc":
            trainer.unpublish(version)  # then the next step may write
    publisher.close()
    place.check()


def test_readers_do_not_wait_for_the_forward_pass(place, clients, figure):
    """Half a second of work is queued behind the publish; a reader is nearly as fast as without."""
    trainer, rollout = clients("trainer"), clients("rollout", transports=("tcp",))
    weights = {"w": place.random(place.size(2 * GIB, 100_000), 1)}
    trainer.publish(1, weights, copy=False)

    def seconds() -> float:
        began = time.perf_counter()
        found = rollout.fetch(1)
        taken = time.perf_counter() - began
        assert place.content(found.tensors()["w"]) == expected
        rollout.unpublish(1)
        return taken

    expected = place.content(weights["w"])
    seconds()  # allocates
    idle = min(seconds() for _ in range(3))
    passes = [place.read_late(weights["w"], "default", ms=100) for _ in range(5)]
    began = time.perf_counter()
    found = rollout.fetch(1)
    busy = time.perf_counter() - began
    assert all(each() == expected for each in passes)
    assert place.content(found.tensors()["w"]) == expected
    figure("fetch beside a forward pass, s", busy, limit=idle)
    place.judge(busy <= 1.5 * idle, f"{busy:.3f} s beside a forward pass, {idle:.3f} s without")
    place.check()


@pytest.mark.parametrize("direction", ["down", "up"])
def test_copies_are_as_fast_as_one_bare_pinned_copy(place, figure, direction):
    size_bytes = place.size(4 * GIB, 300_000)
    there, host = place.random(size_bytes, 1), place.device.buffer(size_bytes)
    if direction == "up":
        host.copy_(torch.frombuffer(bytearray(place.content(place.random(size_bytes, 2))), dtype=torch.uint8))
    expected = place.content(there if direction == "down" else host)
    device = place.device
    taken = place.timed(
        (lambda: device.down([there], host)) if direction == "down" else lambda: device.up(host, [there])
    )
    assert place.content(host) == place.content(there) == expected
    if place.is_gpu:
        one, other = (host, there) if direction == "down" else (there, host)
        bare = place.timed(lambda: one.copy_(other, non_blocking=True))
        name = {"down": "D2H", "up": "H2D"}[direction]
        ratio = figure(f"{name}, GB/s", size_bytes / taken / 1e9, limit=size_bytes / bare / 1e9)
        place.judge(ratio >= 0.9, f"{name} at {ratio:.2f} of a bare pinned copy")
    place.check()


@pytest.mark.parametrize(("count", "size_bytes", "ms"), [(5000, 8000, 10), (36_000, 4096, 80)])
def test_many_small_tensors_are_copied_together(place, figure, count, size_bytes, ms):
    count = place.size(count, 300)
    whole = place.random(count * size_bytes, 1)
    flats = [whole[at * size_bytes : (at + 1) * size_bytes] for at in range(count)]
    host = place.device.buffer(count * size_bytes)
    down = place.timed(lambda: place.device.down(flats, host))
    assert place.content(host) == place.content(whole)
    other = place.random(count * size_bytes, 2)
    others = [other[at * size_bytes : (at + 1) * size_bytes] for at in range(count)]
    up = place.timed(lambda: place.device.up(host, others))
    assert place.content(other) == place.content(whole)
    for direction, taken in (("down", down), ("up", up)):
        figure(f"{count} tensors of {size_bytes} bytes {direction}, ms", taken * 1e3, limit=ms)
        place.judge(taken * 1e3 <= ms, f"{count} tensors {direction} took {taken * 1e3:.1f} ms")
    place.check()


def test_random_schedules(place, clients):
    """Publishes, reads, installs and unpublishes in random orders, with work of others queued in between."""
    chance = random.Random(1)
    size_bytes = place.size(64 << 20, 20_000)
    trainer = clients("trainer")
    rollouts = [clients(f"rollout-{number}") for number in range(2)]
    weights = [place.random(size_bytes, seed) for seed in range(3)]
    live = [place.random(size_bytes, 10 + number) for number in range(2)]
    for version in range(1, place.size(151, 9)):
        source = chance.choice(weights)
        place.fill_late(source, chance.randrange(256), chance.choice(["optimizer", "default"]), ms=1.0)
        trainer.publish(version, {"w": source}, copy=chance.random() < 0.5)
        expected = place.content(source)
        for number in chance.sample(range(2), chance.randint(1, 2)):
            rollout = rollouts[number]
            if chance.random() < 0.5:
                assert place.content(rollout.fetch(version).tensors()["w"]) == expected
            else:
                place.read_late(live[number], chance.choice(["forward", "default"]), ms=1.0)
                rollout.replicate({"w": live[number]}, version)
                assert place.content(live[number]) == expected
            rollout.unpublish(version)
        trainer.unpublish(version)
    place.check()
