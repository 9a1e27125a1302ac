"""verl's engine where the trainer has a device, on the simulated one: a publish costs the training no wait."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from hub_limits import AT_ONCE  # noqa: E402
from simulated import Simulation  # noqa: E402

from tensorhub_plugins.core import Client, UsageError, start_server  # noqa: E402
from tensorhub_plugins.core.device.graph_capture import acting  # noqa: E402
from tensorhub_plugins.core.memory.downloads import Downloads  # noqa: E402
from tensorhub_plugins.verl import trainer  # noqa: E402
from tensorhub_plugins.verl.versions import version_of_step  # noqa: E402

SIZE = 30_000
NAMES = ("a", "b", "c")


@pytest.fixture
def device():
    with Simulation(3, piece_size_bytes=20_000) as simulation:
        yield simulation


@pytest.fixture
def address():
    with start_server(limits=AT_ONCE) as server:
        yield server.address


@pytest.fixture
def training(address):
    made = []

    def make(**options):
        made.append(trainer.TensorHubCheckpointEngine(1 << 20, is_master=True, hub=address, run="r", **options))
        made[-1].init_process_group(address)
        return made[-1]

    yield make
    for engine in made:
        engine._publisher.close()


def weights_of(device, value):
    weights = {name: device.put(torch.zeros(SIZE, dtype=torch.uint8), name) for name in NAMES}
    for tensor in weights.values():
        device.kernel(tensor, value, "default")
    return weights


def send(engine, weights, step):
    return asyncio.run(engine.send_weights(iter(weights.items()), global_steps=step))


def counted(call, found, thread):
    def counts(*given):
        if acting() == thread:
            found.append(call.__name__)
        return call(*given)

    return counts


def waits_of(device, monkeypatch):
    """Those of the thread that trains."""
    driver, trains, found = device.devices[0]._driver, acting(), []
    for name in ("wait", "synchronize"):
        monkeypatch.setattr(driver, name, counted(getattr(driver, name), found, trains))
    return found


@pytest.mark.parametrize("chosen", [None, False])
def test_the_next_step_waits_on_the_device_and_not_on_the_host(address, device, training, monkeypatch, chosen):
    """The control: with in_background=False the host waits."""
    is_queued, wait = threading.Event(), Downloads.wait
    engine = training(in_background=chosen)
    send(engine, weights_of(device, 1), 0)  # which tensors there are; verl does so before the first step
    engine._publisher.settle()
    if chosen is None:
        monkeypatch.setattr(Downloads, "wait", lambda downloads: is_queued.wait(20) and wait(downloads))
    weights = weights_of(device, 7)
    waits = waits_of(device, monkeypatch)
    send(engine, weights, 1)
    assert bool(waits) == (chosen is False)
    for tensor in weights.values():  # the next step: before any copy has been waited for
        device.kernel(tensor, 99, "default")
    is_queued.set()
    with Client(address, run="r", model="actor", replica="rollout") as rollout:
        found = rollout.fetch(rollout.wait(version_of_step(1), timeout_s=20)).tensors()
        assert {name: set(tensor.tolist()) for name, tensor in found.items()} == {name: {7} for name in NAMES}
    device.check()


def test_what_fails_in_the_background_is_said_at_once_and_by_the_next_update(device, training, monkeypatch, caplog):
    engine = training()
    weights = weights_of(device, 7)
    real = engine._client.publish
    monkeypatch.setattr(engine._client, "publish", lambda *a, **k: (_ for _ in ()).throw(UsageError("the hub is full")))
    with caplog.at_level(logging.ERROR):
        send(engine, weights, 0)
        with pytest.raises(UsageError, match="the hub is full"):
            send(engine, weights, 1)
    assert "a version was not published" in caplog.text and "the hub is full" in caplog.text
    monkeypatch.setattr(engine._client, "publish", real)
    assert send(engine, weights, 1)
    engine._publisher.settle()
