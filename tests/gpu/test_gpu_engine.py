"""Installs into an engine with captured graphs (recipes/bench/gpu/engine.py): rows 3, 5, 6 and 25 of the suite."""

from __future__ import annotations

import statistics
import threading
import time

import pytest
import torch

from recipes.bench.gpu.engine import Engine, weights_of
from tensorhub_plugins.core import Slab


@pytest.fixture
def sizes(place):
    return {"layers": place.size(24, 3), "width": place.size(1024, 32)}


@pytest.fixture
def engine(place, sizes):
    engine = Engine(place.torch_device, **sizes)
    engine.capture()
    return engine


def output_of(place, sizes, version):
    """What a fresh engine with these weights computes."""
    fresh = Engine(place.torch_device, **sizes)
    for name, tensor in weights_of(version, **sizes).items():
        fresh.weights[name].copy_(tensor)
    fresh.capture()
    fresh.step()
    return fresh.output()


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_installs_between_replays(place, clients, sizes, engine, way):
    """Addresses stay, no step sees two versions, and what is computed is what a fresh engine computes."""
    trainer, rollout = clients("trainer"), clients("rollout")
    places = {name: tensor.data_ptr() for name, tensor in engine.weights.items()}
    last = place.size(40, 4)
    for version in range(1, last + 1):
        weights = weights_of(version, **sizes)
        trainer.publish(version, weights)
        for _ in range(3):
            engine.step()
        engine.prefill()
        if way == "direct":
            engine.finish()
            rollout.replicate(engine.weights, version, serve=False)
        else:
            arrived = rollout.fetch(version).tensors()
            engine.finish()
            for name, tensor in engine.weights.items():
                tensor.copy_(arrived[name])
            if place.is_gpu:
                torch.cuda.synchronize()
        assert engine.version == version % 256
        for name, tensor in weights.items():
            assert torch.equal(engine.weights[name].cpu(), tensor), name
        trainer.unpublish(version)
    engine.step()
    assert engine.mixed == 0
    assert {name: tensor.data_ptr() for name, tensor in engine.weights.items()} == places
    assert torch.equal(engine.output(), output_of(place, sizes, last))


def test_a_step_that_sees_two_versions_is_counted(place, engine):
    """The control of the count above."""
    engine.weights["layers.1.bias"][0] = 1.0
    if place.is_gpu:
        torch.cuda.synchronize()
    engine.step()
    assert engine.mixed == 1


def test_an_install_waits_for_steps_that_are_queued(place, clients, sizes, engine):
    """Nobody pauses the engine: its steps were queued before, and see the old weights, all of them."""
    trainer, rollout = clients("trainer"), clients("rollout")
    for version in range(1, place.size(25, 3)):
        trainer.publish(version, weights_of(version, **sizes))
        for _ in range(20):
            engine.step()
        rollout.replicate(engine.weights, version, serve=False)
        trainer.unpublish(version)
    assert engine.mixed == 0


def test_graphs_are_captured_while_weights_come_and_go(place, clients, sizes, engine):
    """A worker's threads fetch, digest and serve live weights; each capture is global, as vLLM's are."""
    trainer, rollout, peer = clients("trainer"), clients("rollout"), clients("peer")
    live = {name: tensor.clone() for name, tensor in engine.weights.items()}
    stop, problems, versions = threading.Event(), [], []

    def update() -> None:
        try:
            version = 0
            while not stop.is_set() or version < 3:
                version += 1
                weights = weights_of(version % 5, **sizes)
                trainer.publish(version, weights)
                rollout.replicate(live, version)
                found = peer.fetch(version).tensors()
                assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
                for client in (peer, rollout, trainer):
                    client.unpublish(version)
                versions.append(version)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    try:
        for _ in range(place.size(50, 3)):
            engine.capture()
            engine.step()
            engine.finish()
    finally:
        stop.set()
        thread.join(100)
    assert problems == [] and len(versions) >= 3 and engine.mixed == 0


def test_decoding_beside_a_fetch(place, clients, sizes, engine, figure):
    """Printed, not judged: the fetch is in the engine's own process here."""
    size_bytes = place.size(16 << 30, 1 << 20)
    trainer, rollout = clients("trainer"), clients("rollout")
    with Slab.adopt({"w": torch.zeros(size_bytes, dtype=torch.uint8)}) as slab:
        trainer.publish(1, slab.tensors(), copy=False)
        idle = latencies(engine, place.size(2000, 20))
        fetched = []
        thread = threading.Thread(target=lambda: fetched.append(rollout.fetch(1, timeout_s=300)))
        thread.start()
        busy = latencies(engine, place.size(2000, 20))
        thread.join(300)
        assert fetched and not fetched[0].tensors()["w"].any()
        for what, at in (("p50", 50), ("p99", 99)):
            figure(f"decode {what} beside a fetch, ms", percentile(busy, at) * 1e3, limit=percentile(idle, at) * 1e3)


def latencies(engine, steps):
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        engine.finish()
        taken.append(time.perf_counter() - began)
    return taken


def percentile(taken, at):
    return statistics.quantiles(taken, n=100)[at - 1]
