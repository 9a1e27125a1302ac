"""The trial of installing updates with the files that an engine has read: when it is made, and what it must not change.

The models here are small stand-ins; real engines are in test_from_disk.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from tensorhub_plugins.vllm.worker import cpu, extension, intake, reload
from tensorhub_plugins.vllm.worker.plan import Given

FILES = {"weight": torch.arange(16.0).reshape(4, 4)}


class Derives(torch.nn.Module):
    """A model that keeps a sum of its weights where neither parameters nor buffers are."""

    lags = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))
        self.loads = 0
        self.load(FILES)
        self.kept = [self.weight.detach().sum(0)]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        before = self.weight.detach().sum(0)
        with torch.no_grad():
            self.weight.copy_(weights["weight"])
        self.loads += 1
        self.kept = [before if self.lags else self.weight.detach().sum(0)]


class Lags(Derives):
    """One whose sum is that of the version before."""

    lags = True


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_all(model: Any, vllm_config: Any, weights: Any, **_: Any) -> None:
        model.load(dict(weights))

    taken = SimpleNamespace(
        learn=lambda shapes: None, given=lambda given: given, rehearse=lambda *_: None, plan_for=lambda shapes: None
    )
    monkeypatch.setattr(intake, "Contract", lambda *_: taken)
    monkeypatch.setattr(intake, "Quantizer", lambda *_: taken)
    monkeypatch.setattr(intake, "_on_disk", lambda *_: Given.of(FILES))
    monkeypatch.setattr(intake, "_loader", lambda _: SimpleNamespace(get_all_weights=lambda *_: FILES.items()))
    monkeypatch.setattr(reload, "reload_checkpoint", load_all)
    monkeypatch.setattr(cpu, "packed_experts", lambda model: [])


@pytest.mark.parametrize("kind", [Derives, Lags])
def test_what_is_derived_beside_the_weights_is_what_it_was_after_a_trial(kind: type[Derives]) -> None:
    """Of one that lags it was made of the trial's noise, and answered so until the second update."""
    model = kind()
    intake.keep_tried(model, SimpleNamespace(model_config=None), lambda message: [message])
    assert torch.equal(model.weight, FILES["weight"]) and torch.equal(model.kept[0], FILES["weight"].sum(0))
    assert (intake.KEPT in vars(model)) == (kind is Derives), "the control: what follows at once needs no second read"


def test_the_trial_is_made_once_and_not_when_somebody_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients may have replaced the weights since, and the trial would have brought those of the files back."""
    model, tried = Derives(), []
    monkeypatch.setattr(extension.intake, "is_from_files", lambda config: True)
    monkeypatch.setattr(extension, "engine_gather", lambda config: (lambda message: [message], 0))
    monkeypatch.setattr(extension.intake, "keep_tried", lambda *given: tried.append(given[0]))
    runner = SimpleNamespace(model=model, get_model=lambda: model)
    worker = SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace())
    for _ in range(2):
        assert extension._begin(lambda: "specs", worker) == "specs"
    assert tried == [model]
