"""What vLLM's worker does on its device, and the store keeps out of. No engine is started."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from simulated import Simulation

from tensorhub_plugins.core import Slab, gate
from tensorhub_plugins.vllm.worker import weights
from tensorhub_plugins.vllm.worker.extension import hook

PATIENCE_S = 20.0


class Captures:
    """A worker that captures graphs in its warm-up, while another thread of its process serves the weights."""

    def __init__(self, simulation: Simulation, serve: Any) -> None:
        self._simulation, self._serve = simulation, serve

    def execute_model(self, scheduled: Any) -> None: ...

    def compile_or_warm_up_model(self) -> str:
        with self._simulation.capturing():
            self.server = threading.Thread(target=self._serve)
            self.server.start()
            while self.server.is_alive() and not gate.waiting:
                self.server.join(0.01)
        return "warm"


def test_digests_of_large_tensors_pin_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """N19: an embedding of 1.1 GB took 2 GiB of pinned memory for good."""
    with Simulation(0) as simulation:
        content, pinned = torch.arange(9 << 20), []
        buffer = simulation.devices[0].buffer
        monkeypatch.setattr(simulation.devices[0], "buffer", lambda size: pinned.append(size) or buffer(size))
        of_device = weights.digest(simulation.put(content, "embedding"))
        assert of_device == weights.digest(content) == xxhash.xxh3_128_hexdigest(content.numpy().data)
        assert max(pinned) <= 32 << 20 < content.nbytes == sum(pinned)


@pytest.mark.parametrize("hooked", [True, False])
def test_weights_are_not_served_while_graphs_are_captured(hooked: bool) -> None:
    """A4. The control: a worker that is not hooked loses its capture."""
    with Simulation(0) as simulation:
        slab = Slab.adopt({"w": simulation.put(torch.zeros(100), "w")})
        faults: list[RuntimeError] = []

        def serve() -> None:
            try:
                slab.manifest()
            except RuntimeError as error:
                faults.append(error)

        kind: Any = type("Worker", (Captures,), {"compile_or_warm_up_model": Captures.compile_or_warm_up_model})
        if hooked:
            hook(kind)
        worker = kind(simulation, serve)
        assert worker.compile_or_warm_up_model() == "warm"
        worker.server.join(PATIENCE_S)
        assert not worker.server.is_alive() and not gate.closed
        assert [str(fault) for fault in faults] == (
            [] if hooked else ["operation not permitted when stream is capturing"]
        )


def test_a_warm_up_that_fails_leaves_the_device_to_others() -> None:
    class Worker:
        def compile_or_warm_up_model(self) -> None:
            assert gate.closed
            raise ValueError("out of memory")

    hook(Worker)
    with pytest.raises(ValueError, match="out of memory"):
        Worker().compile_or_warm_up_model()
    assert not gate.closed


@pytest.mark.parametrize("joins", [True, False])
def test_the_device_is_the_engines_from_the_load_to_the_end_of_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """A4: vLLM captures graphs before its warm-up, too, to measure their memory. The control: without a store."""
    load_format = pytest.importorskip("tensorhub_plugins.vllm.load_format", exc_type=ImportError)
    model = torch.nn.Linear(3, 3)

    def nothing(*_: object, **__: object) -> None: ...

    joining = SimpleNamespace(lora=(), draft=None)
    stands_in: dict[str, Any] = {
        "parse": lambda *_: (SimpleNamespace(disk="never"), joining if joins else None),
        "initialize_model": lambda **_: model,
        "join": nothing,
        "_read": lambda *_: True,
    }
    stands_in |= dict.fromkeys(["extend", "_start_from_disk", "process_weights_after_loading"], nothing)
    for name, call in stands_in.items():
        monkeypatch.setattr(load_format, name, call)
    loader: Any = load_format.TensorHubModelLoader
    monkeypatch.setattr(loader, "load_weights", nothing)
    model_config = SimpleNamespace(dtype=torch.float32)
    vllm_config = SimpleNamespace(model_config=model_config, load_config=SimpleNamespace(load_format="tensorhub"))
    load_config = SimpleNamespace(device="cpu", model_loader_extra_config={})
    try:
        assert not gate.closed
        assert loader(load_config).load_model(vllm_config, model_config) is model
        assert gate.closed == joins
    finally:
        gate.open()


@pytest.mark.parametrize("given", [None, 30.0])
def test_a_start_lasts_as_long_as_it_advances_unless_it_is_told_how_long(
    given: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N2: no wait in which an engine works is judged by seconds. Here the first read works for hours, in vain."""
    load_format = pytest.importorskip("tensorhub_plugins.vllm.load_format", exc_type=ImportError)
    from tensorhub_plugins.vllm.config import StartConfig

    began, asked = time.monotonic(), []
    monkeypatch.setattr(load_format.time, "monotonic", lambda: began)
    monkeypatch.setattr(load_format.work, "last_at", lambda: began + (3000.0 if asked else 0.0))
    held = [SimpleNamespace(version=version, visible=True) for version in (2,)]
    monkeypatch.setattr(load_format, "_versions", lambda joining: held)

    class Updater:
        position, gather = SimpleNamespace(shard=0), staticmethod(lambda vote: [vote])

        def resolve(self, timeout_s: float, refused: Any) -> int:
            assert timeout_s > 0
            return 1 + len(asked)

        def poll(self) -> dict[str, Any]:
            return {"error_kind": "VersionGone"}

        def update(self, version: int, timeout_s: float, *, in_place: bool, grows: bool) -> dict[str, Any]:
            asked.append((version, grows))
            assert timeout_s == 600.0 if given is None else timeout_s <= given
            report = {"sources": ["trainer/0"], "size_bytes": 1, "transports": ["tcp"]}
            is_second = len(asked) == 2
            return {"installed": is_second, "error": "lost", "report": report, "layout": "checkpoint", "seconds": 1.0}

    assert load_format._read(StartConfig(start_timeout_s=given), None, Updater())
    assert asked == [(1, given is None), (2, given is None)]


def test_zeros_on_a_device_are_written_by_the_thread_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A16: on another thread's stream they would come after what is computed from them."""
    load_format = pytest.importorskip("tensorhub_plugins.vllm.load_format", exc_type=ImportError)
    threads: list[str] = []

    def zeroed(*_: object) -> None:
        threads.append(threading.current_thread().name)

    def parameter(device: str) -> Any:
        return SimpleNamespace(device=torch.device(device), is_meta=False, zero_=zeroed)

    monkeypatch.setattr(torch, "_foreach_zero_", zeroed)
    model: Any = SimpleNamespace(parameters=lambda: [parameter("cuda"), parameter("cuda")])
    load_format._fill_with_zeros(model)
    assert threads == [threading.current_thread().name]
    host = torch.nn.Linear(3, 3)
    load_format._fill_with_zeros(host)
    assert not host.weight.any() and not host.bias.any()
