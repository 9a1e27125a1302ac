"""When a checkpoint may be copied into a live model, and that a model for which it may not is always reloaded.

The models here are small stand-ins with a loader of their own: what is tested is what the trial with noise notices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorhub_plugins.vllm.worker import reload, weights
from tensorhub_plugins.vllm.worker.conversion import Conversion, noise_like
from tensorhub_plugins.vllm.worker.filler import NOISE_LENGTH
from tensorhub_plugins.vllm.worker.plan import Given

Weights = dict[str, torch.Tensor]
NAMES = {"embed.weight": (10, 4), "q.weight": (4, 4), "k.weight": (2, 4), "norm.weight": (4,), "norm2.weight": (4,)}


class Model(torch.nn.Module):
    """Fuses q and k, pads the embedding's rows, ties its head to it, keeps a table that no weight decides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk = torch.nn.Linear(4, 16, bias=False), torch.nn.Linear(4, 6, bias=False)
        self.norm, self.norm2 = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("derived", torch.zeros(4))
        self.reloads = 0

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.reloads += 1
        self.embed.weight[:10] = weights["embed.weight"]
        self.embed.weight[10:] = 0
        self.qk.weight[:4], self.qk.weight[4:] = weights["q.weight"], weights["k.weight"]
        self.norm.copy_(weights["norm.weight"])
        self.norm2.copy_(weights["norm2.weight"])

    def view(self) -> Weights:
        head = {"lm_head.weight": self.embed.weight[:10].detach()}
        qk, norms = self.qk.weight.detach(), {"norm.weight": self.norm.detach(), "norm2.weight": self.norm2.detach()}
        return {"embed.weight": head["lm_head.weight"], "q.weight": qk[:4], "k.weight": qk[4:], **norms, **head}


class Scales(Model):
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load({**weights, "norm.weight": weights["norm.weight"] + 1})


class Permutes(Model):
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load({**weights, "q.weight": weights["q.weight"].flip(0)})


class Swaps(Model):
    """Two tensors that are alike in every real checkpoint of a young model."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load({**weights, "norm.weight": weights["norm2.weight"], "norm2.weight": weights["norm.weight"]})


class Derives(Model):
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load(weights)
        self.derived.copy_(weights["k.weight"].sum(0))


class HidesOne(Model):
    """The view does not know of a tensor that is loaded."""

    def view(self) -> Weights:
        return {name: tensor for name, tensor in super().view().items() if name != "k.weight"}


class CannotTell(Model):
    def view(self) -> None:  # type: ignore[override]
        return None


@pytest.fixture(autouse=True)
def own_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_all(model: Model, vllm_config: Any, weights: Any) -> None:
        with torch.no_grad():
            model.load(dict(weights))

    monkeypatch.setattr(reload, "reload_checkpoint", load_all)
    monkeypatch.setattr(weights, "checkpoint_view", lambda model, vllm_config: model.view())


def checkpoint(seed: int, dtype: torch.dtype = torch.float32, **more: Callable[[], torch.Tensor]) -> Weights:
    """As of a young model: the norms are ones."""
    torch.manual_seed(seed)
    tensors = {name: (torch.randn if len(shape) > 1 else torch.ones)(shape).to(dtype) for name, shape in NAMES.items()}
    return {**tensors, **{name: make() for name, make in more.items()}}


def fresh(kind: type[Model], weights: Weights) -> dict[str, bytes]:
    model = kind()
    with torch.no_grad():
        model.load(weights)
    return state(model)


def state(model: Model) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights.tensors(model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_one_trial_checkpoints_are_copied(dtype: torch.dtype) -> None:
    model = Model()
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2, 3):
        assert conversion.install(checkpoint(seed, dtype)) == "copy"
        assert state(model) == fresh(Model, checkpoint(seed, dtype))
    assert model.reloads == 2  # both for the trial


def test_a_tied_head_is_not_copied_over_the_embedding() -> None:
    head = {"lm_head.weight": lambda: torch.full((10, 4), 7.0)}  # loaders skip it
    model = Model()
    assert Conversion(model, SimpleNamespace()).install(checkpoint(1, **head)) == "copy"
    assert state(model) == fresh(Model, checkpoint(1))


@pytest.mark.parametrize("kind", [Scales, Permutes, Swaps, Derives, HidesOne, CannotTell])
def test_what_is_more_than_a_copy_is_always_reloaded(kind: type[Model]) -> None:
    model = kind()
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2, 3):
        assert conversion.install(checkpoint(seed)) == "reload"
        assert state(model) == fresh(kind, checkpoint(seed))


@pytest.mark.parametrize("kind", [Scales, Permutes, Derives, HidesOne])
def test_copied_without_a_trial_it_would_be_wrong(kind: type[Model]) -> None:
    model = kind()
    conversion = Conversion(model, SimpleNamespace())
    conversion._tried = {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint(2).items()}
    conversion._copies_are_right = True
    assert conversion.install(checkpoint(2)) == "copy"
    assert state(model) != fresh(kind, checkpoint(2))


def test_another_checkpoint_is_put_to_the_test_anew() -> None:
    model = Model()
    conversion = Conversion(model, SimpleNamespace())
    for tried, dtype in enumerate((torch.float32, torch.bfloat16), 1):
        assert conversion.install(checkpoint(tried, dtype)) == "copy"
        assert state(model) == fresh(Model, checkpoint(tried, dtype))
        assert model.reloads == 2 * tried


def test_a_trial_that_fails_leaves_no_noise() -> None:
    class Chokes(Model):
        def load(self, weights: Mapping[str, torch.Tensor]) -> None:
            if self.reloads == 1:
                self.reloads += 1
                raise ValueError("out of memory")
            super().load(weights)

    model = Chokes()
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2):
        assert conversion.install(checkpoint(seed)) == "reload"
        assert state(model) == fresh(Model, checkpoint(seed))


def test_noise_is_unlike_itself() -> None:
    shapes = {"a": (torch.float32, torch.Size([3, NOISE_LENGTH])), "b": (torch.float32, torch.Size([NOISE_LENGTH]))}
    tensors, again = (dict(noise_like(Given({}, shapes), None).whole()) for _ in range(2))
    assert [(t.dtype, t.shape) for t in tensors.values()] == list(shapes.values())
    assert not torch.equal(tensors["a"][0], tensors["b"])
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_layers_without_weights_raise_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with reload.without_false_alarms():
        logger.warning("%s: Failed to load weights", "RotaryEmbedding")
        logger.warning("something else")
    logger.warning("%s: Failed to load weights", "the control")
    assert [record.getMessage() for record in caplog.records] == [
        "something else",
        "the control: Failed to load weights",
    ]
