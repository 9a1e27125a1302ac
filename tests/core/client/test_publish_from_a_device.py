"""What a publish costs the training: copies that are queued behind it and in front of its next step, and no wait."""

from __future__ import annotations

import threading

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core import CorruptBytes, Held, UsageError, contiguous_spec, spec_of
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.device.graph_capture import acting
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.memory import pinning, staging
from tensorhub_plugins.core.memory.downloads import FILLED_FROM_BYTES, HOST_THREADS_MAX, Downloads
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import flat_bytes

SIZE = 30_000
COUNT = 5


@pytest.fixture
def device():
    with Simulation(2, piece_size_bytes=20_000) as simulation:
        yield simulation


@pytest.fixture
def publisher_of(stage, device):
    made = []

    def make(**options):
        model = [contiguous_spec(f"w{number}", torch.uint8, [SIZE]) for number in range(COUNT)]
        options = {"model": model, **options}
        client = stage.client("trainer")
        publisher = Publisher(client, rank=0, ranks=1, worker="trainer/0", keep=2, timeout_s=10, **options)
        made.append(publisher)
        assert pinning.wait_for_background(60)  # a copy to memory that is not pinned is begun by the thread that waits
        return publisher

    yield make
    for publisher in made:
        publisher.close()


def gathered(device, waits):
    """Tensor after tensor in the same memory, as frameworks gather them; how often the host had waited before each."""
    memory = device.put(torch.zeros(SIZE, dtype=torch.uint8), "gathered")
    for number in range(COUNT):
        waits.append(device.calls["wait"])
        device.kernel(memory, number + 1, "default")
        yield f"w{number}", memory


def contents(client, version):
    fetched = client.fetch(version)
    return {name: set(tensor.view(torch.uint8).tolist()) for name, tensor in fetched.tensors().items()}


WHOLE = {f"w{number}": {number + 1} for number in range(COUNT)}


# --- B1: the next gather ---


@pytest.mark.parametrize("keeps", [True, False])
def test_the_next_gather_does_not_wait_for_the_copies_of_the_last_ones(stage, device, publisher_of, monkeypatch, keeps):
    """It may go into the same memory. The control: without a copy on the device it is written while it is read."""
    if not keeps:
        later = Slab.write_later
        monkeypatch.setattr(Slab, "write_later", lambda *given, stays=False, **how: later(*given, stays=True, **how))
    device.random.random = lambda: 1.0  # nothing runs that nobody waits for
    waits: list[int] = []
    publisher_of().publish(1, gathered(device, waits))
    assert waits == [0] * COUNT
    if keeps:
        assert contents(stage.client("rollout"), 1) == WHOLE
        device.check()
    else:
        with pytest.raises(AssertionError, match=r"unordered: copy .* reads gathered\[0:\], kernel sets 2 .* writes"):
            device.check()


def test_copies_take_the_room_that_they_may(device):
    def scratch():
        return sum(region.stop - region.start for region in device._regions if region.name == "scratch")

    sources = {f"w{number}": device.put(torch.full((40_000,), number, dtype=torch.uint8)) for number in range(6)}
    sources["large"] = device.put(torch.full((150_000,), 7, dtype=torch.uint8))
    device.random.random = lambda: 1.0
    with Slab.allocate([spec_of(name, tensor) for name, tensor in sources.items()], pin=False) as slab:
        with Downloads(100_000) as downloads:
            for name, tensor in sources.items():
                if name == "w5":
                    device.fail("scratch")  # then it is waited for, as what is larger than the room
                slab.write_later(name, tensor, downloads)
                assert scratch() <= 100_000
                assert scratch() or name != "w0"
            assert device.content(slab.tensors()["large"]) == bytes([7]) * 150_000
        assert all(device.content(slab.tensors()[name]) == device.content(sources[name]) for name in sources)
    device.check()


def test_what_is_cast_is_cast_on_the_device(device, monkeypatch):
    """Half the bytes come here, of a slice whose rows lie apart, too."""
    driver, came = device.devices[0]._driver, []
    copy = driver.copy

    def counted(source, target, stream):
        came.append(target.nbytes if device.of(target) is None else 0)
        copy(source, target, stream)

    monkeypatch.setattr(driver, "copy", counted)
    weight = torch.randn(100, 64)
    live = device.put(weight, "w")
    specs = [contiguous_spec("w", torch.bfloat16, [100, 64]), contiguous_spec("columns", torch.bfloat16, [100, 16])]
    for room in (1 << 20, 0):
        with Slab.allocate(specs, pin=False) as slab:
            with Downloads(room) as downloads:
                slab.write_later("w", live, downloads)
                slab.write_later("columns", live[:, 16:32], downloads)
            assert torch.equal(slab.tensors()["w"], weight.bfloat16())
            assert torch.equal(slab.tensors()["columns"], weight[:, 16:32].bfloat16())
            assert sum(came) == slab.size_bytes == 100 * (64 + 16) * 2
            came.clear()
            with pytest.raises(UsageError, match=r"'w' is float32\[100, 64\], the slab expects bfloat16"):
                slab.write("w", live)
    device.check()


# --- the next step ---


@pytest.fixture
def nobody_waits(device, monkeypatch):
    """On the thread that trains, or on one whose call it waits for."""
    driver, trains = device.devices[0]._driver, acting()

    def on_another_thread(call):
        def checked(*given):
            assert acting() != trains, f"the training waits: {call.__name__}"
            return call(*given)

        return checked

    monkeypatch.setattr(driver, "wait", on_another_thread(driver.wait))
    monkeypatch.setattr(driver, "synchronize", on_another_thread(driver.synchronize))


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("optimizer", ["default", "a stream of its own"])
def test_the_next_step_follows_the_copies_on_the_device(
    stage, device, publisher_of, nobody_waits, monkeypatch, optimizer, in_parts
):
    """Nothing waits on the host. The control: an optimizer on another stream is named."""
    is_queued, wait = threading.Event(), Downloads.wait
    monkeypatch.setattr(Downloads, "wait", lambda downloads: is_queued.wait(20) and wait(downloads))
    publisher = publisher_of(in_background=True)
    weights = {f"w{number}": device.put(torch.zeros(SIZE, dtype=torch.uint8), f"w{number}") for number in range(COUNT)}
    for number, tensor in enumerate(weights.values()):
        device.kernel(tensor, number + 1, "default")
    if in_parts:
        publisher.publish_parts(1, [Held(spec_of(name, tensor), tensor) for name, tensor in weights.items()])
    else:
        publisher.publish(1, weights.items())
    for tensor in weights.values():
        device.kernel(tensor, 99, optimizer)
    is_queued.set()
    publisher.settle()
    if optimizer == "default":
        assert contents(stage.client("rollout"), 1) == WHOLE
        device.check()
    else:
        with pytest.raises(AssertionError, match=r"unordered: copy .* reads w\d\[0:\], kernel sets 99 .* writes w"):
            device.check()


def test_the_control_of_waiting(device, publisher_of, nobody_waits):
    """One that does not publish in the background waits, and is caught."""
    with pytest.raises(AssertionError, match="the training waits"):
        publisher_of().publish(1, gathered(device, []))


def test_versions_in_the_background_follow_each_other(stage, device, publisher_of):
    publisher, rollout = publisher_of(in_background=True, dtype=None), stage.client("rollout")
    for version in (1, 2, 3):
        metrics = publisher.publish(version, gathered(device, []))
        assert metrics["tensorhub/publish/bytes"] == COUNT * SIZE
    publisher.settle()
    assert contents(rollout, 3) == WHOLE
    device.check()


def test_without_room_on_the_device_a_publish_waits_and_is_right(stage, device, publisher_of):
    device.room_size_bytes = SIZE - 1
    publisher = publisher_of(in_background=True)
    publisher.publish(1, gathered(device, []))
    assert device.calls["scratch"] == 0
    publisher.settle()
    assert contents(stage.client("rollout"), 1) == WHOLE
    device.check()


def test_what_no_step_has_needed_is_all_that_a_publish_takes(device, publisher_of):
    """N6: what is free after a step is not free in the next one. The control: as much as is asked for."""
    taken = []
    for room, asked in ((2 * SIZE, None), (0, 4 * SIZE), (1 << 40, None)):
        device.room_size_bytes = room
        publisher = publisher_of(in_background=True, device_room_bytes=asked, model=[])
        scratch, most = device.scratch, []

        def counted(index, size_bytes, stream, scratch=scratch, most=most):
            made = scratch(index, size_bytes, stream)
            most.append(sum(r.stop - r.start for r in device._regions if r.name == "scratch"))
            return made

        device.scratch = counted
        publisher.publish(
            1, [(f"w{number}", device.put(torch.zeros(SIZE, dtype=torch.uint8))) for number in range(COUNT)]
        )
        publisher.publish(2, gathered(device, []))
        publisher.settle()
        device.scratch = scratch
        taken.append(max(most))
    assert SIZE <= taken[0] <= 2 * SIZE < taken[1] <= 4 * SIZE < COUNT * SIZE <= taken[2]
    device.check()


def test_one_allocation_that_fails_is_the_last(stage, device, publisher_of):
    """N6: each makes torch return what it has cached for the training, and wait."""
    publisher = publisher_of(in_background=True)
    device.fail("scratch")
    tried = []
    for version in (1, 2, 3):
        publisher.publish(version, gathered(device, []))
        publisher.settle()
        tried.append(device.calls["scratch"])
    assert tried == [1, 1, 1] and contents(stage.client("rollout"), 3) == WHOLE
    device.check()


@pytest.mark.parametrize("threads", [min(HOST_THREADS_MAX, cores()), 1])
def test_offloaded_parts_are_cast_by_several_threads(monkeypatch, threads):
    """N8: one casts 3 to 5 GB/s, and a step waits for it. Each thread waits for all others; the control is one part."""
    together, fill = threading.Barrier(threads), staging.fill

    def at_once(target, source):
        together.wait(20)
        fill(target, source)

    monkeypatch.setattr(staging, "fill", at_once)
    weight = torch.randn(threads, FILLED_FROM_BYTES // 4)
    with Slab.allocate([contiguous_spec("w", torch.bfloat16, weight.shape)]) as slab, Downloads() as downloads:
        slab.write_later("w", weight, downloads)
        assert torch.equal(slab.tensors()["w"], weight.bfloat16())


def test_what_fails_in_the_background_is_said_by_the_next_call(device, publisher_of):
    publisher = publisher_of(in_background=True)
    publisher.publish(1, gathered(device, []))
    publisher.publish(1, [(f"w{number}", torch.zeros(SIZE, dtype=torch.uint8)) for number in range(COUNT)])
    with pytest.raises(UsageError, match="other weights were given for a version that is already published"):
        publisher.publish(2, gathered(device, []))
    publisher.publish(2, gathered(device, []))  # it has been said
    publisher.settle()
    device.check()


def test_a_rollback_lets_what_still_comes_of_the_former_attempt_end(stage, device, publisher_of, monkeypatch):
    publisher, may_go = publisher_of(begins=True, in_background=True), threading.Event()
    publisher.publish(1, gathered(device, []))
    publisher.settle()
    publish, wait_for = publisher.client.publish, calls.wait_for
    monkeypatch.setattr(publisher.client, "publish", lambda *a, **k: may_go.wait(10) and publish(*a, **k))
    monkeypatch.setattr(calls, "wait_for", lambda *a, **k: may_go.set() or wait_for(*a, **k))
    publisher.publish(2, gathered(device, []))
    publisher.begin(0)
    publisher.publish(1, gathered(device, []))
    publisher.settle()
    assert contents(stage.client("rollout"), publisher.version(1)) == WHOLE


def test_metrics_in_the_background_are_of_what_was_taken_and_of_the_version_before(device, publisher_of):
    publisher = publisher_of(in_background=True)
    first, second = (publisher.publish(version, gathered(device, [])) for version in (1, 2))
    assert first["tensorhub/publish/bytes"] == publisher.whole_size_bytes == SIZE * COUNT
    assert "tensorhub/publish/seconds" not in first and second["tensorhub/publish/seconds"] > 0


# --- digests on the way ---


@pytest.fixture
def usual_segments(stage, monkeypatch):
    """Not the stage's small ones: those that a slab is cut into."""
    monkeypatch.setattr(Slab.manifest, "__defaults__", (None,))


def cast_weights():
    """fp32 masters, of which several share a segment."""
    return {f"w{number}": torch.full((300, 200 + number), 1.0 + number) for number in range(4)}


def publish_cast(device, publisher_of, **options):
    weights = cast_weights()
    model = [contiguous_spec(name, torch.bfloat16, weight.shape) for name, weight in weights.items()]
    publisher = publisher_of(model=model, dtype=torch.bfloat16, in_background=True, **options)
    publisher.publish(1, [(name, device.put(weight, name)) for name, weight in weights.items()])
    publisher.settle()
    return weights


def test_the_host_digests_nothing_that_was_digested_on_the_device(
    stage, device, publisher_of, monkeypatch, usual_segments
):
    """Readers take the digests for right, which are those of all bytes that they got."""
    digests, of_host = Slab._digests, []
    monkeypatch.setattr(Slab, "_digests", lambda slab, *given: of_host.append(slab) or digests(slab, *given))
    weights = publish_cast(device, publisher_of)
    assert of_host == []
    arrived = stage.client("rollout").fetch(1).tensors()
    assert all(torch.equal(arrived[name], weight.bfloat16()) for name, weight in weights.items())
    device.check()


@pytest.mark.parametrize("on_the_device", [True, False])
def test_what_is_damaged_on_its_way_to_the_host_is_found(
    stage, device, publisher_of, monkeypatch, usual_segments, on_the_device
):
    """By the readers. The control: digests of the host's memory are those of the damage, and nobody finds it."""
    if not on_the_device:
        monkeypatch.setattr(Downloads, "digests", lambda downloads, size: None)
    hosts, begin = [], Downloads._begin
    monkeypatch.setattr(
        Downloads,
        "_begin",
        lambda self, *given, **how: hosts.append(flat_bytes(given[2])) or begin(self, *given, **how),
    )
    wait = Downloads.wait

    def damage(downloads):
        wait(downloads)
        if hosts:
            hosts.pop()[100] ^= 1
            hosts.clear()

    monkeypatch.setattr(Downloads, "wait", damage)
    weights = publish_cast(device, publisher_of)
    rollout = stage.client("rollout")
    if on_the_device:
        with pytest.raises(CorruptBytes):
            rollout.fetch(1, timeout_s=10)
    else:
        arrived = rollout.fetch(1).tensors()
        assert sum(not torch.equal(arrived[name], weight.bfloat16()) for name, weight in weights.items()) == 1


def test_memory_is_pinned_before_the_first_version(stage, device, publisher_of):
    """N12: for two versions, where the model is known; else it is allocated before the first step, by `prepare`."""
    publisher = publisher_of()
    assert pinning.wait_for_background(60) and len(device.registered) == 2
    waits = []
    for version in (1, 2):
        publisher.publish(version, gathered(device, waits))
    assert len(device.registered) == 2 and device.pageable_bytes == 0
    device.check()


def test_parts_have_their_memory_before_the_first_step(stage, device, publisher_of):
    publisher = publisher_of(model=[], in_background=True)
    weight = device.put(torch.arange(SIZE, dtype=torch.uint8), "w")
    held = [Held(contiguous_spec("w", torch.uint8, [SIZE]), weight, None)]
    publisher.prepare(held)
    assert pinning.wait_for_background(60) and len(device.registered) == 2
    publisher.publish_parts(1, held)
    publisher.settle()
    assert len(device.registered) == 2 and device.pageable_bytes == 0


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_training_does_not_wait_for_copies_to_memory_that_is_not_pinned(stage, device, publisher_of, is_pinned):
    """N12: such a copy returns when it is done. It is begun by the thread that waits for it."""
    if not is_pinned:
        device.registers_at_most = 0
    driver, threads = device.devices[0]._driver, set()
    copy = driver.copy

    def copies(source, target, stream):
        if device.of(target) is None:
            threads.add(threading.current_thread().name)
        return copy(source, target, stream)

    driver.copy = copies
    publisher = publisher_of(in_background=True)
    assert pinning.wait_for_background(60)
    publisher.publish(1, gathered(device, []))
    publisher.settle()
    assert is_pinned == (threading.main_thread().name in threads) and threads
    arrived = stage.client("rollout").fetch(1).tensors()
    assert [set(tensor.tolist()) for tensor in arrived.values()] == [{number + 1} for number in range(COUNT)]
    slab = publisher.client.find(publisher.client.serving()[0]).slab
    assert is_pinned == (slab.unpinned == "")
    device.check()
