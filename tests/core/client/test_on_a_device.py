"""Versions that are published from a device's memory and read into it, while others use it: on the simulated one."""

from __future__ import annotations

import threading

import pytest
import torch
from client_stage import until
from simulated import POISON, Simulation
from transport_suite import sample_tensors

from tensorhub_plugins.core import CorruptBytes, Held, Turns, UsageError, same_bytes, spec_of
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.memory.staging import copy_all

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SEEDS = range(4)


@pytest.fixture
def device(request):
    with Simulation(getattr(request, "param", 0), piece_size_bytes=50_000) as simulation:
        yield simulation


@pytest.fixture(params=[True, False], ids=["waits", "control"])
def waits(request, monkeypatch):
    """Whether work of others on the device is waited for."""
    if not request.param:
        monkeypatch.setattr(Device, "synchronize", lambda self: None)
    return request.param


def there(device, tensors):
    return {name: device.put(tensor, name) for name, tensor in tensors.items()}


def content(device, tensors):
    return {name: device.content(tensor) for name, tensor in tensors.items()}


def assert_equal(device, found, expected):
    assert content(device, found) == content(device, expected)


def judge(device, waits):
    """Nothing is unordered; without the waits it is, and said."""
    if waits:
        device.check()
    else:
        with pytest.raises(
            AssertionError, match=r"unordered: kernel.* of stream 0/optimizer .*, (copy|lanes_of) .* of stream 0/"
        ):
            device.check()


@pytest.mark.parametrize("device", SEEDS, indirect=True)
@pytest.mark.parametrize("copy", [True, False])
def test_a_publish_waits_for_what_still_writes(stage, device, copy, waits):
    """A12: an optimizer on a stream of its own. Without the wait half a step is published, with the digests of that."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    weights = there(device, sample_tensors(1))
    device.kernel(weights["big"], 7, "optimizer")
    trainer.publish(1, weights, copy=copy)
    judge(device, waits)
    if waits:
        found = rollout.fetch(1).tensors()
        assert set(content(device, found)["big"]) == {7}
        assert_equal(device, found, weights)
        device.check()


@pytest.mark.parametrize("device", SEEDS, indirect=True)
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_rank_waits_for_what_still_writes(stage, device, in_parts, waits):
    weights = there(device, {"a": torch.zeros(30_000), "b": torch.zeros(7)})
    publisher = Publisher(
        stage.client("trainer"), rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10,
        model=[spec_of(name, tensor) for name, tensor in weights.items()],
    )  # fmt: skip
    device.kernel(weights["b"], 7, "optimizer")
    if in_parts:
        publisher.publish_parts(1, [Held(spec_of(name, tensor), tensor) for name, tensor in weights.items()])
    else:
        publisher.publish(1, weights.items())
    judge(device, waits)
    if waits:
        assert_equal(device, stage.client("rollout").fetch(1).tensors(), weights)
    publisher.close()


# --- host memory that a device still writes ---


def by_write(trainer, coming):
    slab = trainer.allocate(spec_of(name, tensor) for name, tensor in coming())
    for name, tensor in coming():
        slab.write(name, tensor)
    trainer.publish(1, slab)


def by_views(device, trainer):
    """Into a slab of the client's own, which is pinned."""
    slab = trainer.allocate(spec_of(name, torch.zeros(3000, dtype=torch.uint8)) for name in "ab")
    for tensor in slab.tensors().values():
        device.offload(tensor, 7)
    slab.mark_written()
    trainer.publish(1, slab)


def by_a_rank(trainer, weights, *, in_background=False, in_parts=False):
    publisher = Publisher(
        trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10, in_background=in_background
    )
    if in_parts:
        publisher.publish_parts(1, (Held(spec_of(name, tensor), tensor) for name, tensor in weights))
    else:
        publisher.publish(1, weights)
    publisher.settle()
    publisher._retired.put(None)  # not closed: the version stays
    assert publisher._retiring is None or publisher._retiring.join() is None


def cast(trainer, coming):
    """As FSDP1's buffers are; bytes of 7 as int16."""
    held = (Turns(0, 1).one_of_all(name, tensor.view(torch.int16), torch.int32) for name, tensor in coming())
    publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10)
    publisher.publish_parts(1, held)
    publisher._retired.put(None)
    assert publisher._retiring is None or publisher._retiring.join() is None


ENTRANCES = {
    "copy": lambda device, trainer, coming: trainer.publish(1, dict(coming())),
    "in place": lambda device, trainer, coming: trainer.publish(1, dict(coming()), copy=False),
    "in place, no digests": lambda device, trainer, coming: trainer.publish(1, dict(coming()), copy=False),
    "write": lambda device, trainer, coming: by_write(trainer, coming),
    "views": lambda device, trainer, coming: by_views(device, trainer),
    "rank": lambda device, trainer, coming: by_a_rank(trainer, list(coming())),
    "rank, one by one": lambda device, trainer, coming: by_a_rank(trainer, coming()),
    "rank, background": lambda device, trainer, coming: by_a_rank(trainer, coming(), in_background=True),
    "parts": lambda device, trainer, coming: by_a_rank(trainer, coming(), in_parts=True),
    "parts, background": lambda device, trainer, coming: by_a_rank(
        trainer, coming(), in_parts=True, in_background=True
    ),
    "parts, cast": lambda device, trainer, coming: cast(trainer, coming),
}  # fmt: skip


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_publish_waits_for_host_memory_that_a_device_still_writes(stage, device, entrance, waits):
    """As that of parameters which verl has just offloaded. Without the wait whatever was there before is published,
    with the digests of that."""
    options = {"verify": False} if "no digests" in entrance else {}
    trainer, rollout = stage.client("trainer", **options), stage.client("rollout", **options)
    kept = {}

    def coming():
        for name in "ab":
            if name not in kept:
                kept[name] = torch.zeros(3000, dtype=torch.uint8)
                device.offload(kept[name], 7)
            yield name, kept[name]

    device.random.random = lambda: 1.0  # nothing runs that nobody waits for
    ENTRANCES[entrance](device, trainer, coming)
    assert not waits or not any(map(device.is_coming, kept.values()))
    found = rollout.fetch(1).tensors()
    expected = {name: {7 if waits else POISON} for name in "ab"}
    if entrance == "parts, cast":
        expected = {name: {value for each in values for value in (0x0101 * each,)} for name, values in expected.items()}
    assert {name: set(tensor.tolist()) for name, tensor in found.items()} == expected


def test_the_devices_are_waited_for_once_for_tensors_that_are_all_there(stage, device):
    """There may be 150,000 of them, in host memory beside others on the device."""
    trainer, before = stage.client("trainer"), device.calls["synchronize"]
    trainer.publish(1, {**{str(k): torch.ones(1) for k in range(1000)}, "there": device.put(torch.ones(1))})
    assert device.calls["synchronize"] - before <= 3


def test_host_memory_is_waited_for_on_every_device(stage):
    """The thread that publishes may have chosen another one than that which writes."""
    with Simulation(0, count=2) as simulation:
        simulation.random.random = lambda: 1.0
        weight = torch.zeros(3000, dtype=torch.uint8)
        simulation.offload(weight, 7, device=1)
        assert simulation.is_coming(weight)
        stage.client("trainer").publish(1, {"w": weight})
        assert not simulation.is_coming(weight)


def test_host_memory_that_is_read_into_is_waited_for(stage, device, waits):
    """Without it what was offloaded before comes after the new bytes, and over them."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"w": torch.ones(3000, dtype=torch.uint8)})
    live = torch.zeros(3000, dtype=torch.uint8)
    device.random.random = lambda: 1.0
    device.offload(live, 7)
    rollout.replicate({"w": live}, 1)
    device.devices[0]._driver.synchronize()
    assert set(live.tolist()) == {1 if waits else 7}


@pytest.mark.parametrize("device", SEEDS, indirect=True)
def test_weights_do_not_change_under_a_forward_pass(stage, device, waits):
    """A11: what was queued before sees the old weights, all of them, and then they are replaced in place."""
    trainer, rollout, third = (stage.client(name) for name in ("trainer", "rollout", "third"))
    new, old = sample_tensors(1), sample_tensors(2)
    trainer.publish(1, new)
    live = there(device, old)
    answers = [device.reading_kernel(live["big"], "optimizer") for _ in range(3)]
    rollout.replicate(live, 1)
    judge(device, waits)
    if waits:
        assert answers == [[device.content(old["big"])]] * 3
        assert_equal(device, live, new)
        trainer.unpublish(1)
        assert_equal(device, third.fetch(1).tensors(), new)  # from the device, on a stream of its own
        device.check()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_from_device_to_device(stage, device, transport):
    trainer, rollout = (stage.client(name, transports=(transport, "tcp")) for name in ("trainer", "rollout"))
    weights, live = there(device, sample_tensors(1)), there(device, sample_tensors(2))
    trainer.publish(1, weights, copy=False)
    rollout.replicate(live)
    assert_equal(device, live, weights)
    device.check()


def test_readers_of_this_host_share_one_copy_of_a_devices_memory(stage, device):
    """B7: it comes here once, and they map it: the lone first reader too, and who comes later."""
    clients = [stage.client(name, transports=("shm", "tcp")) for name in ("trainer", "one", "two")]
    weights = there(device, sample_tensors(1))
    clients[0].publish(1, weights, copy=False)
    copies = []
    for rollout in clients[1:]:
        before = device.calls["copy"]
        fetched = rollout.fetch(1)
        copies.append(device.calls["copy"] - before)
        assert set(fetched.report.transports) == {"shm"}
        assert_equal(device, fetched.tensors(), weights)
    assert copies[0] > 0 == copies[1]
    trainer_alone = stage.client("three", transports=("tcp",)).fetch(1)  # the control: these do copy
    assert_equal(device, trainer_alone.tensors(), weights)
    assert device.calls["copy"] - before > 0
    device.check()


def test_borrowed_memory_is_pinned_once_and_as_long_as_its_owner_has_it(stage, device):
    """For all versions that come in it, and only to be read: it is another worker's."""
    first, second = (stage.client(name, transports=("shm", "tcp")) for name in ("one", "two"))
    first.retain(0)
    new = {"big": torch.arange(100_000)}
    registered = []
    for version in (1, 2):
        first.publish(version, new, "runtime:f")
        fetched = second.fetch(version, ("runtime:f",), borrow=True)
        assert fetched.slab.kind == "borrowed" and pinning.wait_for_background(60)
        assert fetched.slab.copying_device is not None
        registered.append(dict(device.registered))
        assert len(device.read_only) == 1
        live = there(device, {"big": torch.zeros(100_000, dtype=torch.int64)})
        copy_all([(live[name], tensor) for name, tensor in fetched.tensors().items()])
        assert_equal(device, live, new)
        with pytest.raises(RuntimeError, match="invalid argument"):  # the control: so it would notice a write
            copy_all([(fetched.tensors()["big"], live["big"])])
        device.faults.clear()
        first.unpublish(version)
        fetched.release()
    assert registered[0] == registered[1] and len(registered[0]) == 2  # the owner's, and the borrower's mapping of it
    del fetched
    first.close()
    until(lambda: pinning.wait_for_background(60) and not device.registered)
    device.check()


@pytest.mark.parametrize("layout", ["runtime:f", "checkpoint"])
def test_what_is_borrowed_is_copied_fast_by_cards_that_pin_nothing_read_only(stage, device, layout):
    """N4: most do not. And nothing pins a checkpoint's private mapping. The control is the reader's report."""
    device.pins_read_only = False
    trainer, first, second = (stage.client(name, transports=("shm", "tcp")) for name in ("trainer", "one", "two"))
    new = {"big": torch.randn(300, 400), "small": torch.randn(7)}
    trainer.retain(0)
    trainer.publish(1, new, layout)
    assert first.fetch(1, (layout,), serve=True).unpinned is None
    trainer.unpublish(1)
    fetched = second.fetch(1, (layout,), borrow=True)
    assert fetched.slab.kind == "borrowed" and pinning.wait_for_background(60)
    assert ("801" if layout != "checkpoint" else "private mapping") in fetched.unpinned
    live = there(device, {name: torch.zeros_like(tensor) for name, tensor in new.items()})
    copy_all([(live[name], tensor) for name, tensor in fetched.tensors().items()])
    assert_equal(device, live, new)
    assert device.pageable_bytes == 0
    device.check()


def test_a_publish_in_place_does_not_wait_for_what_is_queued_afterwards(stage, device):
    """B11: readers are served by a stream of its own, not behind the next forward pass."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    weights = there(device, sample_tensors(1))
    trainer.publish(1, weights, copy=False)
    activations = device.put(torch.zeros(100), "activations")
    device.random.random = lambda: 1.0  # nothing runs that nobody waits for
    passes = device.reading_kernel(weights["big"], "default")
    device.kernel(activations, 3, "default")
    assert_equal(device, rollout.fetch(1).tensors(), weights)
    assert passes == []
    device.check()


def test_a_read_does_not_wait_until_its_memory_is_pinned(stage, device, monkeypatch):
    """A5: however long that takes, no source is lost over it."""
    goes_on = threading.Event()
    monkeypatch.setattr(pinning, "_populate", lambda memory: goes_on.wait(60))
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    new = sample_tensors(1)
    trainer.publish(1, new)
    fetched = rollout.fetch(1, timeout_s=30)
    assert_equal(device, fetched.tensors(), new)
    assert not device.registered
    goes_on.set()
    assert pinning.wait_for_background(60) and device.registered


def test_tied_weights_of_a_device_are_compared(stage, device):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    one, other = torch.full((10_000,), 1, dtype=torch.uint8), torch.full((10_000,), 2, dtype=torch.uint8)
    trainer.publish(1, {"embed": one, "head": one})
    trainer.publish(2, {"embed": one, "head": other})
    live = device.put(torch.zeros(10_000, dtype=torch.uint8), "embed")
    rollout.replicate({"embed": live, "head": live}, 1)
    assert same_bytes(live, one) and not same_bytes(other, live)
    rollout.unpublish(1)
    with pytest.raises(UsageError, match="'embed' and 'head' are the same memory"):
        rollout.replicate({"embed": live, "head": live}, 2)
    device.check()


def test_only_what_is_damaged_is_read_again(stage, device):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    new = {"w": torch.arange(100_000, dtype=torch.int32)}
    trainer.publish(1, new)
    live = there(device, new)
    device.kernel(live["w"][50_000:50_001], 0xFF, "default")
    report = rollout.replicate(live, 1, repair=True)
    assert 0 < sum(report.sources.values()) < 400_000
    assert_equal(device, live, new)
    device.check()


def test_a_publish_that_fails_for_want_of_memory_publishes_nothing(stage, device):
    trainer = stage.client("trainer")
    weights = there(device, sample_tensors(1))
    for copy in (True, False):
        device.fail("copy", 1 if copy else 2)  # in place: where the digests are taken, and where the bytes come here
        with pytest.raises(torch.OutOfMemoryError):
            trainer.publish(1, weights, copy=copy)
        assert trainer.serving() == []
    trainer.publish(1, weights)
    device.check()


def test_a_read_whose_copies_fail_says_so_and_can_be_repeated(stage, device):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    new = sample_tensors(1)
    trainer.publish(1, new)
    live = there(device, sample_tensors(2))
    device.fail("copy", 10_000)
    with pytest.raises(torch.OutOfMemoryError):
        rollout.replicate(live, 1, timeout_s=5)
    assert rollout.serving() == []
    device._fails.clear()
    rollout.replicate(live, 1)
    assert_equal(device, live, new)
    device.check()


def test_a_source_that_changes_its_memory_is_found_out(stage, device):
    """The contract is broken: what is read are not the bytes that were published."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    weights = there(device, {"w": torch.zeros(1000)})
    trainer.publish(1, weights, copy=False)
    device.kernel(weights["w"], 7, "optimizer")
    device.devices[0].synchronize()
    with pytest.raises(CorruptBytes):
        rollout.fetch(1, timeout_s=5)
