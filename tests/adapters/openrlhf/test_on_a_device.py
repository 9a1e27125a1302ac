"""OpenRLHF's trainer rank where it has a device, on the simulated one: a publish costs the training no wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf", reason="the adapter imports OpenRLHF")

from hub_limits import AT_ONCE  # noqa: E402
from simulated import Simulation  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from tensorhub_plugins.core import Client, Publisher, start_server  # noqa: E402
from tensorhub_plugins.core.device.graph_capture import acting  # noqa: E402
from tensorhub_plugins.core.memory.downloads import Downloads  # noqa: E402
from tensorhub_plugins.openrlhf import config, policy_ranks  # noqa: E402


def rank_of(device: Simulation, address: str, in_background: bool | None) -> Any:
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    for parameter in model.parameters():
        parameter.data = device.put(parameter.data)
    rank = policy_ranks.PolicyModelActor.__new__(policy_ranks.PolicyModelActor)
    rank.actor = SimpleNamespace(model=SimpleNamespace(module=model))
    rank._is_sharded = rank._by_parts = False
    rank._steps = policy_ranks.checkpoint_names.steps(model, policy_ranks.parts.shape_of)
    specs = [spec for step in rank._steps for spec in policy_ranks._specs(step)]
    client = Client(address, run="r", model="actor", replica="trainer")
    rank._publisher = Publisher(
        client,
        rank=0,
        ranks=1,
        worker="trainer/0",
        keep=1,
        timeout_s=10,
        model=specs,
        in_background=in_background,
    )
    return rank


@pytest.mark.parametrize("chosen", [None, False])
def test_the_next_step_waits_on_the_device_and_not_on_the_host(monkeypatch: pytest.MonkeyPatch, chosen: Any) -> None:
    """The control: with in_background=0 the host waits, and gives memory back before."""
    waits: list[str] = []
    trains, is_queued, wait = acting(), threading.Event(), Downloads.wait

    def waits_first(downloads: Downloads) -> None:
        if acting() == trains:
            waits.append("wait")
        elif not is_queued.wait(20):
            raise TimeoutError
        wait(downloads)

    released: list[bool] = []
    monkeypatch.setattr(policy_ranks, "release_cached_memory", lambda: released.append(True))
    with Simulation(5) as device, start_server(limits=AT_ONCE) as server:
        rank = rank_of(device, server.address, chosen)
        weights = dict(rank.actor.model.module.named_parameters())
        for tensor in weights.values():
            device.kernel(tensor, 7, "default")
        monkeypatch.setattr(Downloads, "wait", waits_first)
        metrics = rank.tensorhub_publish(1)
        assert metrics["tensorhub/publish/bytes"] and (bool(waits), bool(released)) == (chosen is False,) * 2
        for tensor in weights.values():  # the next step
            device.kernel(tensor, 99, "default")
        is_queued.set()
        with Client(server.address, run="r", model="actor", replica="rollout") as rollout:
            found = rollout.fetch(rollout.wait(1, timeout_s=20)).tensors()
            assert all(set(tensor.view(torch.uint8).flatten().tolist()) == {7} for tensor in found.values())
        device.check()
        rank._publisher.close()


def test_it_is_an_option() -> None:
    assert config.parse("tensorhub").in_background is None
    assert config.parse("tensorhub://10.0.0.1:7070?in_background=0").in_background is False
