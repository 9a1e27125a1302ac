"""Models that compute with other memory than an install writes are refused by name, before anything stops."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm_engines import Engine, EngineError, checkpoint, wait_until
from vllm_toys import Engines, Toy, conversion, engines, toy_checkpoint

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.vllm.worker import weights
from tensorhub_plugins.vllm.worker.addresses import ELSEWHERE, Addresses, check_config, check_copies

__all__ = ["conversion", "engines"]

heavy = pytest.mark.heavy
TIMEOUT_S = 60.0


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(3))
        self.scratch = {"ones": torch.ones(16 * 8), "noise": torch.randn(16 * 8), "few": torch.arange(8)}


def config(path: str = "", value: Any = None) -> Any:
    """What vLLM has, with this at this path."""
    whole = SimpleNamespace(
        offload_config=SimpleNamespace(
            prefetch=SimpleNamespace(offload_group_size=0), uva=SimpleNamespace(cpu_offload_gb=0)
        ),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(inductor_compile_config={"freezing": False}),
    )
    *above, last = path.split(".")
    at: Any = whole
    for name in above:
        at = at[name] if isinstance(at, dict) else vars(at).setdefault(name, SimpleNamespace())
    if isinstance(at, dict):
        at[last] = value
    elif path:
        setattr(at, last, value)
    return whole


@pytest.mark.parametrize(
    ("path", "value", "option"),
    [
        ("offload_config.prefetch.offload_group_size", 2, "--offload-group-size 2"),
        ("offload_config.uva.cpu_offload_gb", 1.5, "--cpu-offload-gb 1.5"),
        ("engram_config", SimpleNamespace(cpu_offload=True), "--engram-config"),
        ("kernel_config.monokernel", True, "--monokernel"),
        ("cache_config.calculate_kv_scales", True, "--calculate-kv-scales"),
        ("load_config.load_format", "ipc_cache", "--load-format ipc_cache"),
        ("compilation_config.inductor_compile_config.freezing", True, "--freezing"),
    ],
)
def test_options_that_move_weights_are_refused_by_name(path: str, value: Any, option: str) -> None:
    check_config(config())
    with pytest.raises(UsageError, match=option):
        check_config(config(path, value))
    assert path in {each[0] for each in ELSEWHERE}


def test_an_offloader_is_refused_whatever_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import offloader

    class Swapping(offloader.BaseOffloader):
        def wrap_modules(self, modules_generator: Any, prefix: str = "") -> Any:
            return list(modules_generator)

    monkeypatch.setattr(offloader.base, "_instance", Swapping())
    with pytest.raises(UsageError, match="Swapping"):
        check_config(config())


def rebound(model: Layers) -> None:
    model.layers[1].weight.data = model.layers[1].weight.data.clone()


def swapped(model: Layers) -> None:
    model.layers[1] = torch.nn.Linear(16, 8)


def shared(model: Layers) -> None:
    model.layers[1].weight = model.layers[2].weight


def taken_away(model: Layers) -> None:
    del model.layers[1].weight


@pytest.mark.parametrize("move", [rebound, swapped, shared, taken_away])
def test_weights_that_have_moved_are_named(move: Callable[[Layers], None]) -> None:
    model = Layers()
    addresses = Addresses(model)
    with torch.no_grad():
        model.layers[1].weight.fill_(3)  # the control: what is written stays where it is
    addresses.check()
    move(model)
    with pytest.raises(UsageError, match=r"layers\.1\.weight"):
        addresses.check()


class Wrapped(torch.nn.Module):
    """As vLLM wraps a layer for LoRA adapters."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


def test_names_are_made_only_for_a_model_that_is_not_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were, twice in every pause."""
    model, made = Layers(), []
    addresses, all_tensors = Addresses(model), weights.all_tensors
    first = addresses.tensors()
    monkeypatch.setattr(weights, "all_tensors", lambda *args: made.append(1) or all_tensors(*args))
    addresses.check(search=False)
    assert not made and addresses.tensors() is first
    changes: list[Callable[[], object]] = [
        lambda: model.layers.__setitem__(1, Wrapped(model.layers[1])),
        lambda: model.layers[0].register_buffer("late", torch.ones(3)),
        lambda: setattr(model.layers[0], "W_UV", torch.ones(3)),
        lambda: setattr(model.layers[0], "W_UV", torch.ones(3)),
        lambda: model.layers[0].register_parameter("later", torch.nn.Parameter(torch.ones(2))),
    ]
    for change in changes:
        change()
        made.clear()
        addresses.check(search=False)
        assert made == [1]
        found = addresses.tensors()
        where = {name: tensor.data_ptr() for name, tensor in weights.tensors(model).items()}
        assert {name: tensor.data_ptr() for name, tensor in found.items()} == where
        made.clear()
        addresses.check(search=False)
        assert not made and addresses.tensors() is found


def test_what_is_derived_may_be_replaced_where_no_graph_was_captured() -> None:
    model = Layers()
    model.layers[0].W_UV = torch.randn(8)
    captured, eager = Addresses(model), Addresses(model, eager=True)
    model.layers[0].W_UV = torch.randn(8)
    eager.check()
    with pytest.raises(UsageError, match=r"layers\.0\.W_UV"):
        captured.check()


def test_weights_that_were_written_into_the_kv_cache_are_named() -> None:
    from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention

    model = Layers()
    sinks = model.layers[1].attn = StaticSinkAttention.__new__(StaticSinkAttention)
    torch.nn.Module.__init__(sinks)
    with pytest.raises(UsageError, match=r"layers\.1\.attn wrote weights into the KV cache"):
        Addresses(model)


def kept_in_a_closure(model: Layers, copy: torch.Tensor) -> None:
    layer = model.layers[1]
    layer.forward = lambda given: torch.nn.functional.linear(given, copy.view(8, 16))


def kept_by_a_hook(model: Layers, copy: torch.Tensor) -> None:
    model.layers[1].register_forward_pre_hook(lambda layer, given: layer.weight.data.copy_(copy.view(8, 16)))


def kept_in_a_list(model: Layers, copy: torch.Tensor) -> None:
    model.packed = [SimpleNamespace(storage=copy)]


@pytest.mark.parametrize("keep", [kept_in_a_closure, kept_by_a_hook, kept_in_a_list])
@pytest.mark.parametrize(
    "change",
    [torch.clone, lambda t: t.t().contiguous(), lambda t: t.flatten().flip(0), lambda t: t.double()],
    ids=["the same", "transposed", "another order", "another float"],
)
def test_a_second_copy_of_a_weight_is_named(
    keep: Callable[[Layers, torch.Tensor], None], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = Layers()
    weight = model.layers[1].weight.detach()
    check_copies(model)
    keep(model, change(weight + 1))  # the control: other numbers of that shape
    check_copies(model)
    keep(model, change(weight))
    with pytest.raises(UsageError, match=r"layers\.1\.weight"):
        check_copies(model)


def test_views_and_ties_are_no_copies() -> None:
    model = Layers()
    model.layers[2].weight = model.layers[1].weight
    model.views = [model.layers[0].weight.detach().t(), model.layers[1].weight.data[:4]]
    with torch.no_grad():
        model.layers[0].bias.fill_(1)
    check_copies(model)


def test_an_updater_refuses_before_anything_is_written(conversion: None, engines: Engines) -> None:
    updater, trainer = engines("rollout"), engines.trainer()
    with trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        updater.start_fetch(1, TIMEOUT_S)
        wait_until(lambda: updater.poll()["state"] == "ready", "fetched")
        model: Toy = updater.model
        where = model.fused.data
        model.fused.data = model.fused.data.clone()
        with pytest.raises(UsageError, match="fused"):
            updater.prepare_install(TIMEOUT_S)
        result = updater.install(1, TIMEOUT_S)
        assert (result["installed"], result["broken"], updater.poll()["version"]) == (False, None, 0)
        assert not where.any()
        assert not model.fused.any()
        model.fused.data = where  # the control: back where it was
        assert updater.install(1, TIMEOUT_S)["installed"]


# --- engines ---


@heavy
def test_an_engine_that_swaps_its_weights_says_so_at_the_start(models: Any, bare: Any, hub: Server) -> None:
    """Joined before the offloader has its way, as `--load-format tensorhub` does, and after, as with a connect."""
    joining = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout", "serve_from": "live"}
    start = {"load_format": "tensorhub", "model_loader_extra_config": joining, "own_core": False}
    with Client(hub.address, run="test", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models("llama", 1)))
        with pytest.raises(EngineError, match=r"offload-group-size 2|moves weights while the engine runs"):
            Engine(bare("llama"), extension=None, offload_group_size=2, **start)
        with (
            Engine(models("llama", 1), cpu_offload_gb=1) as engine,
            pytest.raises(EngineError, match="--cpu-offload-gb"),
        ):
            engine.call("tensorhub_connect", joining)


@heavy
@pytest.mark.parametrize("when", ["before the warm-up", "while it runs"])
def test_an_engine_whose_weights_are_refilled_keeps_the_version_it_has(
    when: str, models: Any, bare: Any, hub: Server
) -> None:
    """What the options do not show. The control is the same engine without an offloader of its own."""
    joining = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout", "serve_from": "live"}
    start = {"load_format": "tensorhub", "model_loader_extra_config": joining}
    with Client(hub.address, run="test", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models("llama", 1)))
        if when == "before the warm-up":
            with pytest.raises(EngineError, match=r"not where they were when it joined.*layers\.1"):
                Engine(bare("llama"), extension="vllm_faults.OffloadingExtension", **start)
            return
        with Engine(bare("llama"), extension="vllm_faults.FaultyExtension", **start) as engine:
            answers = engine.generate()
            trainer.publish(2, checkpoint(models("llama", 2)))
            engine.call("tensorhub_start_fetch", 2, TIMEOUT_S)
            wait_until(lambda: engine.call("tensorhub_poll")["state"] == "ready", "fetched")
            engine.call("tensorhub_test_offload", 1)
            with pytest.raises(EngineError, match=r"not where they were when it joined.*layers\.1"):
                engine.call("tensorhub_prepare_install", TIMEOUT_S)
            engine.ask("pause")
            result = engine.call("tensorhub_install", 2, TIMEOUT_S)
            assert not result["installed"] and result["broken"] is None
            engine.ask("resume")
            assert engine.generate() == answers
            assert engine.call("tensorhub_poll")["version"] == 1
