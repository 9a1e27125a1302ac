"""The store on tensors of a device with protected addresses. Run by test_protected_device.py, in a process of its own:
a pointer that is used as one of the host ends that process.

Everything is real: clients, hub, transports, and torch's own dispatch of a device that it does not know.
"""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import protected
import pytest
import rdma_fakes
import torch
from client_processes import tensors_of
from client_stage import module_hub, small_segments, stage
from transport_suite import blank_like, check_transport, sample_tensors

from tensorhub_plugins.core import Held, Part, UsageError, contiguous_spec, copy_all, flat_bytes, same_bytes
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.device import devices, drivers
from tensorhub_plugins.core.memory.adoption import Adoption
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import shaped_as
from tensorhub_plugins.core.transports.cuda_ipc.driver import CudaIpc, NotShareable
from tensorhub_plugins.core.transports.cuda_ipc.memory import Exports
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.registration import Registry
from tensorhub_plugins.core.transports.rdma.transport import RdmaTransport
from tensorhub_plugins.core.transports.rdma.verbs import Nic
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.tcp import TcpTransport
from tensorhub_plugins.vllm.worker import partial as of_partial
from tensorhub_plugins.vllm.worker import weights as of_vllm
from tensorhub_plugins.vllm.worker.plan import Given, Region, held_whole
from tensorhub_plugins.vllm.worker.plan import Held as Kept
from tensorhub_plugins.vllm.worker.reload import upload

__all__ = ["module_hub", "small_segments", "stage"]

DEVICE = protected.take(os.environ["PROTECTED_DEVICE"])
needs_ours = pytest.mark.skipif(DEVICE != "protected", reason="what only our own device has")

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def there(tensors, device=DEVICE):
    """Return copies on the device, with their strides: as bytes, as torch does not copy every dtype."""
    return {name: shaped_as(each, flat_bytes(each).to(device)) for name, each in tensors.items()}


def assert_same(found, expected):
    """Check names, dtypes, shapes and every byte, wherever they are; copied by torch alone."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(flat_bytes(got).cpu(), flat_bytes(tensor).cpu()), name


# --- publish, and read on the host ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("copy", [True, False])
def test_every_dtype_is_published_and_fetched(stage, copy, transport):
    trainer, rollout = (stage.client(name, transports=(transport, "tcp")) for name in ("trainer", "rollout"))
    weights = sample_tensors(1)
    trainer.publish(1, there(weights), copy=copy)
    fetched = rollout.fetch(1)
    assert_same(fetched.tensors(), weights)
    assert set(fetched.report.transports) == {transport}
    assert trainer.recheck(1) == ()


def test_digests_are_those_of_the_same_bytes_on_the_host(stage):
    weights = sample_tensors(1)
    with Slab.adopt(weights) as here, Slab.adopt(there(weights)) as slab:
        assert slab.addresses() is None and slab.device is not None
        for algorithm in ("xxh3_128", "blake3"):
            assert slab.manifest(4096, algorithm=algorithm) == here.manifest(4096, algorithm=algorithm)


def test_a_write_to_what_is_published_in_place_is_found(stage):
    trainer = stage.client("trainer")
    weights = there(sample_tensors(1))
    trainer.publish(1, weights, copy=False)
    weights["big"][3, 5] += 1
    assert trainer.recheck(1) == ("big",)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_rank_publishes_what_it_gathers(stage, in_background, dtype):
    weights = {"a": torch.randn(300, 64), "b": torch.randn(64, 30).t(), "c": torch.randn(())}
    publisher = Publisher(
        stage.client("trainer"), rank=0, ranks=1, worker="trainer/0", keep=2, timeout_s=10, dtype=dtype,
        in_background=in_background,
    )  # fmt: skip
    for version in (1, 2, 3):
        publisher.publish(version, there(weights).items())
        publisher.settle()
        fetched = stage.client(f"rollout-{version}").fetch(version).tensors()
        assert_same(fetched, {name: each.to(dtype or each.dtype).contiguous() for name, each in weights.items()})
    publisher.close()


@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_publish_their_parts(stage, in_background):
    whole = torch.randn(100, 64)
    spec = contiguous_spec("w", whole.dtype, whole.shape)
    held = {
        0: Held(spec, there({"": whole})[""][:, :20], Part((100, 64), (0, 0))),
        1: Held(spec, there({"": whole})[""][:, 20:], Part((100, 64), (0, 20))),
    }
    ranks = [
        Publisher(
            stage.client("trainer", shard=rank, shard_count=2), rank=rank, ranks=2, worker=f"trainer/{rank}", keep=1,
            timeout_s=10, in_background=in_background,
        )
        for rank in held
    ]  # fmt: skip
    for rank, publisher in enumerate(ranks):
        publisher.publish_parts(1, [held[rank]])
    for publisher in ranks:
        publisher.settle()
    rollout = stage.client("rollout")
    assert_same(rollout.fetch(1).tensors(), {"w": whole})
    rows = there({"w": torch.zeros(30, 64)})
    rollout.replicate(rows, 1, parts={"w": Part((100, 64), (50, 0))}, serve=False)
    assert_same(rows, {"w": whole[50:80]})
    for publisher in ranks:
        publisher.close()


# --- into live tensors ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_live_tensors_are_read_into_and_served_on(stage, transport):
    """Test install="direct": from the host to a device, and from that device to another one."""
    trainer, rollout, third = (stage.client(name, transports=(transport,)) for name in ("trainer", "one", "two"))
    trainer.retain(0)
    weights = sample_tensors(1)
    trainer.publish(1, weights)
    live, others = there(blank_like(weights)), there(blank_like(weights), f"{DEVICE}:1")
    rollout.replicate(live, 1)
    assert_same(live, weights)
    trainer.unpublish(1)
    report = third.replicate(others, 1)
    assert_same(others, weights)
    assert set(report.sources) == {"one/0"} and {each.device.index for each in others.values()} == {1}


def test_damaged_live_tensors_are_repaired(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    weights = tensors_of(1)
    trainer.publish(1, weights)
    live = there(weights)
    live["embed"][7] += 1
    report = rollout.replicate(live, 1, repair=True)
    assert_same(live, weights)
    assert 0 < sum(report.sources.values()) < report.size_bytes


def test_what_was_fetched_is_copied_over_live_tensors(stage):
    """Test install="staged"."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    weights = sample_tensors(1)
    trainer.publish(1, there(weights))
    fetched, live = rollout.fetch(1).tensors(), there(blank_like(weights))
    copy_all((flat_bytes(live[name]), flat_bytes(each)) for name, each in fetched.items())
    assert_same(live, weights)
    assert all(same_bytes(live[name], each) for name, each in weights.items())


def test_an_engines_model_takes_what_was_fetched(stage):
    """Test the same with the adapter's own code, for every place where a model keeps weights."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(7, 5), "b": torch.nn.Linear(7, 5), "c": torch.nn.BatchNorm1d(3)})
    model.to(DEVICE)
    model["b"].weight = model["a"].weight
    model["a"].W_UV = torch.randn(4, 6).t().to(DEVICE)
    live = of_vllm.tensors(model)
    assert "a.weight" in live and "b.weight" not in live and {each.device.type for each in live.values()} == {DEVICE}
    expected = {name: each.detach().cpu() for name, each in live.items()}
    stage.client("peer").publish(1, expected, "runtime:f")
    for each in live.values():
        each.detach().zero_()
    of_vllm.copy_tensors(live, stage.client("rollout").fetch(1, ("runtime:f",)).tensors())
    assert_same(live, expected)
    assert [of_vllm.digest(each) for each in live.values()] == [of_vllm.digest(each) for each in expected.values()]


@pytest.mark.parametrize("together", [True, False])
def test_what_a_layer_is_loaded_from_goes_to_the_device_at_once(monkeypatch, together):
    """N20: of an expert that is cut by rows, one that is cut by columns, and one that is whole, no more than the pieces
    that are needed, without a wait for each. The control: loaders that get what is in host memory."""
    whole = {name: torch.randn(60, 8) for name in ("rows", "columns", "all", "other")}
    regions = {"rows": [Region((10, 0), (20, 8))], "columns": [Region((0, 2), (60, 3)), Region((0, 6), (60, 1))]}
    here = {name: [Kept(each, each.of(whole[name]).contiguous()) for each in cut] for name, cut in regions.items()}
    shapes = {name: (torch.float32, each.shape) for name, each in whole.items()}
    loaded = dict(
        of_partial.whole(Given({**here, "all": held_whole(whole["all"])}, shapes), whole, torch.device(DEVICE, 0))
    )
    calls = [{"param": None, "loaded_weight": each, "shard_id": 0} for name, each in loaded.items() if name != "other"]
    waits, copied = [], []
    wait, copy = devices.Device.synchronize, drivers.Plain.copy

    def noted(driver, source, target, stream):
        copied.append((source.device.type, target.device.type, target.nbytes))
        copy(driver, source, target, stream)

    monkeypatch.setattr(devices.Device, "synchronize", lambda device: (waits.append(device), wait(device)))
    monkeypatch.setattr(drivers.Plain, "copy", noted)
    if together:
        upload(calls, torch.device(DEVICE, 0))
        assert len(waits) == 1 and copied == [("cpu", DEVICE, 20 * 32), ("cpu", DEVICE, 720), ("cpu", DEVICE, 240),
                                              ("cpu", DEVICE, 60 * 32)]  # fmt: skip
        assert {each["loaded_weight"].device.type for each in calls} == {DEVICE}
    rows, columns, all_ = (each["loaded_weight"] for each in calls)
    found = {"rows": rows[10:30], "left": columns[:, 2:5], "right": columns[:, 6:7], "all": all_[3:]}
    live = {name: torch.empty(each.shape, device=DEVICE) for name, each in found.items()}
    for name, each in found.items():
        live[name].copy_(each)
    assert len(waits) == (1 if together else 3)  # what is whole is torch's own copy, for which it waits
    expected = {"rows": whole["rows"][10:30], "left": whole["columns"][:, 2:5], "right": whole["columns"][:, 6:7]}
    assert_same(live, {name: each.contiguous() for name, each in {**expected, "all": whole["all"][3:]}.items()})
    with pytest.raises(of_partial.NotEnough):
        live["left"].copy_(columns[:, 3:6])


def test_where_there_is_no_room_loaders_get_what_is_in_host_memory(monkeypatch):
    calls = [{"loaded_weight": torch.ones(3)}, {"loaded_weight": torch.ones(3)}]
    empty = torch.empty

    def full(*given, **how):
        if "device" in how:
            raise torch.OutOfMemoryError("injected")
        return empty(*given, **how)

    monkeypatch.setattr(torch, "empty", full)
    upload(calls, torch.device(DEVICE, 0))
    assert {each["loaded_weight"].device.type for each in calls} == {"cpu"}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_another_process_reads_what_lies_on_the_device(stage, transport):
    trainer, worker = (make(name, transports=(transport,)) for make, name in ((stage.client, "t"), (stage.worker, "w")))
    trainer.publish(1, there(tensors_of(1)), copy=False)
    assert worker.call("follow", 30.0) == (1, True)


@needs_ours
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make, processes", [(TcpTransport, True), (ShmTransport, True), (RdmaTransport, False)])
def test_transports_conform_between_such_devices(make, processes):
    """Test also two processes that each have a device, one of which is killed or frozen."""
    with rdma_fakes.installed():
        options = {"slabs": "adopted", "adopt": protected.adopt, "adopt_in_peers": protected.adopt}
        report = check_transport(make, processes=processes, patience_s=60.0, **options)
    assert len(report.passed) > 20, report


# --- what is known of live tensors ---


def test_the_same_tensors_are_adopted_once():
    tensors = there({"w": torch.ones(10), "transposed": torch.ones(3, 4).t()})
    tensors["tied"] = tensors["w"]
    first = Adoption.of(tensors)
    assert Adoption.of(tensors) is first and first.ties == {"w": "tied"}
    tensors["w"].set_(*there({"": torch.zeros(10)}).values())  # it lies elsewhere now
    assert Adoption.of(tensors) is not first


@needs_ours
def test_memory_that_was_taken_away_is_damaged(stage):
    """Resize the storage, as FSDP does with what it has gathered."""
    trainer = stage.client("trainer")
    weights = there({"w": torch.ones(1000)})
    trainer.publish(1, weights, copy=False)
    weights["w"].untyped_storage().resize_(0)
    assert trainer.recheck(1) == ("w",)


def test_two_devices_are_not_one_shard():
    tensors = {**there({"a": torch.ones(3)}), **there({"b": torch.ones(3)}, f"{DEVICE}:1")}
    with pytest.raises(UsageError, match=rf"several devices \(\['{DEVICE}:0', '{DEVICE}:1'\]\): adopt one shard each"):
        Slab.adopt(tensors)


# --- what would need its pointers ---


def test_cuda_ipc_refuses_it_before_cuda_is_asked():
    """Test that it is refused: its index means another device to CUDA."""
    with Slab.adopt(there({"w": torch.ones(10)})) as slab:
        exports = Exports(CudaIpc("no-such-library.so"))
        with pytest.raises(NotShareable, match=f"{DEVICE}:0 is no CUDA device"):
            exports.of(slab)


class Card:
    """A card that registers what the kernel can read, as it must to pin it."""

    def register(self, address, size_bytes):
        end, begin = os.pipe()
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.write(begin, ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)) != size_bytes:
                error = ctypes.get_errno()
                raise OSError(error, f"ibv_reg_mr: {os.strerror(error)}")
        finally:
            os.close(end)
            os.close(begin)
        return SimpleNamespace(address=address, lkey=1, rkey=2)


def test_rdma_registers_none_of_it():
    """Test that it is refused. The control: the same bytes on the host are registered."""
    nic = object.__new__(Nic)
    nic.port, nic.card, nic.acquire, nic.release = rdma_fakes.PORT, Card(), lambda: None, lambda: None
    weights = {"w": torch.ones(100)}
    with Slab.adopt(there(weights)) as slab, Slab.adopt(weights) as here:
        reason = f"of {DEVICE}:0 with fake0: .*Bad address.*; as a dma-buf.*this device's memory is not exported"
        with pytest.raises(VerbsError, match=reason):
            Registry([nic]).of(slab).offer()
        assert Registry([nic]).of(here).offer()


# --- what is queued on it ---


@pytest.fixture(params=[True, False], ids=["waits", "control"])
def waits(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(devices.Device, "synchronize", lambda self: None)
    return request.param


@needs_ours
@pytest.mark.parametrize("way", ["copy", "in place", "publisher"])
def test_a_publish_waits_for_what_the_device_still_writes(stage, way, waits):
    """Test the wait. The control: without it the old bytes are published."""
    trainer = stage.client("trainer")
    weights = there({"w": torch.zeros(100, dtype=torch.uint8)})
    torch.ops.protected_device.later(weights["w"], 7)
    if way == "publisher":
        publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10)
        publisher.publish(1, weights.items())
    else:
        trainer.publish(1, weights, copy=way == "copy")
    assert set(stage.client("rollout").fetch(1).tensors()["w"].tolist()) == {7 if waits else 0}
    if way == "publisher":
        publisher.close()
    torch.accelerator.synchronize(weights["w"].device)  # what is left of the control


@needs_ours
@pytest.mark.parametrize("way", ["copy", "in place", "publisher"])
def test_a_publish_waits_for_host_memory_that_the_device_still_writes(stage, way, waits):
    """Test the same for a queued copy into host memory."""
    trainer = stage.client("trainer")
    weights = {"w": torch.zeros(100, dtype=torch.uint8)}
    torch.ops.protected_device.later(weights["w"], 7)
    if way == "publisher":
        publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=10)
        publisher.publish(1, weights.items())
    else:
        trainer.publish(1, weights, copy=way == "copy")
    assert set(stage.client("rollout").fetch(1).tensors()["w"].tolist()) == {7 if waits else 0}
    if way == "publisher":
        publisher.close()
    torch.accelerator.synchronize(DEVICE)  # what is left of the control


@needs_ours
def test_what_is_queued_on_live_tensors_does_not_come_after_the_new_bytes(stage, waits):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"w": torch.ones(100, dtype=torch.uint8)})
    live = there({"w": torch.zeros(100, dtype=torch.uint8)})
    torch.ops.protected_device.later(live["w"], 7)
    rollout.replicate(live, 1)
    torch.accelerator.synchronize(live["w"].device)
    assert set(live["w"].cpu().tolist()) == {1 if waits else 7}
