"""Drop-in mode with tensors larger than verl's bucket, through verl's own sender and receiver.

A CPU has no handles to memory: in their place torch pickles whole storages, so that a message shows what was handed on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

import verl

from tensorhub_plugins.core import UsageError, start_server
from tensorhub_plugins.verl import trainer


def _transfer() -> ModuleType:
    """verl's module alone: its package wants a vLLM that is called so."""
    file = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


transfer = _transfer()
MIB = 1 << 20
NAMES = iter(range(1000))


@pytest.fixture
def address() -> Iterator[str]:
    with start_server() as server:
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


def hand_on(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, torch.Tensor], list[int]]:
    """What verl's receiver gets of a version that our engine yields, and the sizes of the sender's messages."""
    names = iter(["rollout_standalone_0CheckpointEngineWorker_0:0"])
    monkeypatch.setattr(trainer, "_actor_name", lambda: next(names))
    make = trainer.TensorHubCheckpointEngine
    publisher, rollout = make(MIB, is_master=True, hub=address, run="r"), make(MIB, hub=address, run="r")
    rollout.init_process_group(address)
    publisher.init_process_group(address)
    asyncio.run(publisher.send_weights(iter(weights().items()), global_steps=0))
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
    monkeypatch.setattr(trainer, "_actor_name", lambda: "rollout_standalone_0CheckpointEngineWorker_0:0")
    make = trainer.TensorHubCheckpointEngine
    publisher, rollout = make(MIB, is_master=True, hub=address, run="r"), make(MIB, hub=address, run="r")
    rollout.init_process_group(address)
    publisher.init_process_group(address)
    asyncio.run(publisher.send_weights(iter(weights().items()), global_steps=0))
    came: list[str] = []

    async def take(received: AsyncIterator[tuple[str, torch.Tensor]]) -> None:
        async for name, _ in received:
            came.append(name)

    with pytest.raises(UsageError, match=r"embedding \(3 MiB\): set .*update_weights_bucket_megabytes=3$"):
        asyncio.run(take(rollout.receive_weights(global_steps=0)))
    assert came == []
    publisher._client.close()
    rollout._client.close()
