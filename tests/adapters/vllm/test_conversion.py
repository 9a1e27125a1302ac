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

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.worker import cpu, kinds, reload, weights
from tensorhub_plugins.vllm.worker.conversion import NOISE_LENGTH, Conversion, noise_like
from tensorhub_plugins.vllm.worker.partial import NotEnough, whole
from tensorhub_plugins.vllm.worker.plan import Given, Piece, Plan, layer_of, shapes_of, whole_region

Weights = dict[str, torch.Tensor]
HOST = torch.device("cpu")
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
        places = {"q.weight": self.qk.weight[:4], "k.weight": self.qk.weight[4:]}
        places |= {"norm.weight": self.norm, "norm2.weight": self.norm2, "embed.weight": self.embed.weight[:10]}
        for name in places.keys() & weights.keys():
            places[name].copy_(weights[name])
        self.embed.weight[10:] = 0


class Scales(Model):
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load({name: tensor + (name == "norm.weight") for name, tensor in weights.items() if name in NAMES})


class Permutes(Model):
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load({name: tensor.flip(0) if name == "q.weight" else tensor for name, tensor in weights.items()})


class Swaps(Model):
    """Two tensors that are alike in every real checkpoint of a young model."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        swapped = {"norm.weight": "norm2.weight", "norm2.weight": "norm.weight"}
        super().load({swapped.get(name, name): tensor for name, tensor in weights.items()})


class Derives(Model):
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load(weights)
        if "k.weight" in weights:
            self.derived.copy_(weights["k.weight"].sum(0))


class Keeps(Model):
    """What it computes with is neither a parameter nor a buffer."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load(weights)
        self.kept = [self.qk.weight.detach().sum(0)]


class Pads(Model):
    """The padding of its rows is made of them."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load(weights)
        self.embed.weight[10:] = self.embed.weight[0]


@pytest.fixture(autouse=True)
def own_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_all(model: Model, vllm_config: Any, weights: Any, **_: Any) -> None:
        with torch.no_grad():
            model.load(dict(weights))

    monkeypatch.setattr(reload, "reload_checkpoint", load_all)
    monkeypatch.setattr(cpu, "packed_experts", lambda model: [])


def planned(tensors: Weights, *, wrong: bool = False) -> Given:
    """With the plan that a rehearsal would make. wrong: two elements of one layer are where the other one belongs."""
    pieces = []
    for name, to, row in (
        ("embed.weight", "embed.weight", 0),
        ("q.weight", "qk.weight", 0),
        ("k.weight", "qk.weight", 4),
        ("norm.weight", "norm", 0),
        ("norm2.weight", "norm2", 0),
    ):
        box = whole_region(tensors[name].shape).box_in(tensors[name].shape)
        pieces.append(Piece(name, box, to, (4 * row, *box[1:])))
    if wrong:
        _, shape, strides = pieces.pop().written
        for start, at, count in ((0, 1, 1), (1, 0, 1), (2, 2, 2)):
            pieces.append(Piece("norm2.weight", (start, (count,), strides), "norm2", (at, (count,), strides)))
    needed = {name: (whole_region(tensors[name].shape),) for name in NAMES}
    return Given.of(tensors, Plan(shapes_of(tensors), tuple(pieces), needed, frozenset()))


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
        assert conversion.install(planned(checkpoint(seed, dtype))) == "copy"
        assert state(model) == fresh(Model, checkpoint(seed, dtype))
    assert model.reloads == 2  # both for the trial


def test_a_tied_head_is_not_copied_over_the_embedding() -> None:
    head = {"lm_head.weight": lambda: torch.full((10, 4), 7.0)}  # loaders skip it
    model = Model()
    assert Conversion(model, SimpleNamespace()).install(planned(checkpoint(1, **head))) == "copy"
    assert state(model) == fresh(Model, checkpoint(1))


@pytest.mark.parametrize("kind", [Scales, Permutes, Swaps, Derives, Keeps, Pads])
def test_what_is_more_than_a_copy_is_always_reloaded(kind: type[Model]) -> None:
    model = kind()
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2, 3):
        assert conversion.install(planned(checkpoint(seed))) == "reload"
        assert state(model) == fresh(kind, checkpoint(seed))


@pytest.mark.parametrize("kind", [Scales, Permutes, Swaps, Derives, Pads])
def test_copied_without_a_trial_it_would_be_wrong(kind: type[Model]) -> None:
    model = kind()
    conversion = Conversion(model, SimpleNamespace())
    given = planned(distinct(2))
    conversion._tried, conversion._plan = given.shapes, given.plan
    assert conversion.install(given) == "copy"
    assert state(model) != fresh(kind, distinct(2))


def distinct(seed: int) -> Weights:
    return {name: torch.randn_like(tensor) for name, tensor in checkpoint(seed).items()}


def test_a_plan_that_is_wrong_in_one_layer_is_found_and_that_one_is_reloaded() -> None:
    """Although the norms of a young model are ones, so that the first version is right in any case."""
    for wrong, how in ((True, "reload"), (False, "copy")):
        model = Model()
        conversion = Conversion(model, SimpleNamespace())
        for version in (checkpoint(1), distinct(2)):
            assert conversion.install(planned(version, wrong=wrong)) == how
            assert state(model) == fresh(Model, version)
        assert conversion._process == ({layer_of("norm2")} if wrong else frozenset())


class Packing:
    """A quantization method whose kernel has the rows in another order."""


class Expert(torch.nn.Module):
    def __init__(self, *, lags: bool = False) -> None:
        super().__init__()
        self.weight, self.loads, self.lags = torch.nn.Parameter(torch.zeros(4, 4)), 0, lags
        self.quant_method = Packing()

    def load(self, weight: torch.Tensor) -> None:
        self.loads += 1
        kept = self.weight[0].clone()
        self.weight.copy_(weight.flip(0))
        if self.lags:
            self.weight[0] += kept


class Stack(torch.nn.Module):
    """Layers of one kind, but for one that lags: in its first row is something of the version before."""

    def __init__(self, count: int = 6, lag: int | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Expert(lags=number == lag) for number in range(count))

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        for number, layer in enumerate(self.layers):
            if (weight := weights.get(f"layers.{number}.weight")) is not None:
                layer.load(weight)

    def given(self, seed: int) -> Given:
        """With a plan of plain copies."""
        torch.manual_seed(seed)
        tensors = {f"layers.{number}.weight": torch.randn(4, 4) for number in range(len(self.layers))}
        box = whole_region((4, 4)).box_in((4, 4))
        pieces = tuple(Piece(name, box, name, box) for name in tensors)
        needed = {name: (whole_region((4, 4)),) for name in tensors}
        return Given.of(tensors, Plan(shapes_of(tensors), pieces, needed, frozenset()))

    def is_of(self, given: Given) -> bool:
        held = {name: one[0].tensor for name, one in given.held.items()}
        return all(torch.equal(live, held[name].flip(0)) for name, live in self.named_parameters())


@pytest.mark.parametrize("asks", [True, False])
def test_of_layers_of_one_kind_that_are_packed_two_are_put_to_the_test(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are loaded once, as in every later install. The control: if none is asked, they are found in the
    trial of all, which then begins again."""
    monkeypatch.setattr(kinds, "may_pack", lambda layer: asks and isinstance(layer, Expert))
    model = Stack()
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2, 3):
        given = model.given(seed)
        assert conversion.install(given) == "reload" and model.is_of(given)
        if seed == 1:
            assert [layer.loads for layer in model.layers] == ([4, 1, 1, 1, 1, 3] if asks else [5, 3, 3, 3, 3, 5])
    assert conversion._process == {f"layers.{number}" for number in range(6)} and not conversion.hidden


@pytest.mark.parametrize("lag", [0, 3, 5])
def test_a_packed_layer_that_keeps_something_is_noticed_wherever_it_is(lag: int) -> None:
    """It is of another kind than those around it, as an attribute shows."""
    model = Stack(lag=lag)
    with pytest.raises(UsageError, match=f"1 tensors of this model do not follow an update: layers.{lag}.weight"):
        Conversion(model, SimpleNamespace()).install(Given.of(model.given(1).tensors))
    with pytest.raises(NotEnough, match=f"it is not enough for layers.{lag}.weight"):
        conversion = Conversion(model, SimpleNamespace())
        conversion._prove(model.given(1), model.given(1).plan)


def kinds_of(model: Stack) -> list[list[str]]:
    layers = [f"layers.{number}" for number in range(6)]
    return kinds.Kinds(model, layers).of_layers(layers)


def test_layers_are_of_one_kind_by_code_and_geometry() -> None:
    model = Stack()
    assert [len(names) for names in kinds_of(model)] == [6]
    model.layers[1].weight = torch.nn.Parameter(torch.zeros(4, 4).t())
    model.layers[2].weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    model.layers[3].quant_method = object()
    model.layers[4].quant_method.kernel = Packing()
    found = kinds_of(model)
    assert sorted(map(len, found)) == [1, 1, 1, 1, 2] and ["layers.0", "layers.5"] in found


def test_a_number_that_some_layers_share_makes_a_kind_and_one_that_counts_them_does_not() -> None:
    model = Stack()
    for number, layer in enumerate(model.layers):
        layer.number, layer.prefix, layer.quant_method.scale = number, f"layers.{number}", 0.5 * number
    assert kinds_of(model) == [[f"layers.{number}" for number in range(6)]]
    for layer in model.layers:
        layer.quant_method.rows = 2 if layer is model.layers[3] else 4
    assert sorted(map(len, kinds_of(model))) == [1, 5] and ["layers.3"] in kinds_of(model)


@pytest.mark.parametrize("number", [2, 4])
def test_a_layer_that_lags_for_a_number_is_noticed(number: int) -> None:
    model = Stack()
    for k, layer in enumerate(model.layers):
        layer.lags = 1 if k == number else 0
    with pytest.raises(UsageError, match=f"1 tensors of this model do not follow an update: layers.{number}.weight"):
        Conversion(model, SimpleNamespace()).install(Given.of(model.given(1).tensors))
    with pytest.raises(NotEnough, match=f"it is not enough for layers.{number}.weight"):
        Conversion(model, SimpleNamespace())._prove(model.given(1), model.given(1).plan)


def test_without_a_plan_it_is_reloaded_and_put_to_the_test() -> None:
    for kind, hidden in ((Model, ()), (Keeps, ("kept.0",))):
        model = kind()
        conversion = Conversion(model, SimpleNamespace())
        for seed in (1, 2):
            assert conversion.install(checkpoint(seed)) == "reload"
            assert state(model) == fresh(kind, checkpoint(seed)) and conversion.hidden == hidden


def test_what_follows_one_version_late_is_refused() -> None:
    class Lags(Model):
        def load(self, weights: Mapping[str, torch.Tensor]) -> None:
            self.derived.copy_(self.qk.weight.detach().sum(0)[:4])
            super().load(weights)

    with pytest.raises(UsageError, match="1 tensors of this model do not follow an update: derived"):
        Conversion(Lags(), SimpleNamespace()).install(distinct(1))
    model = Lags()  # the control: here what it is made of is copied before
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2):
        assert conversion.install(planned(distinct(seed))) == "reload"
        assert torch.equal(model.derived, model.qk.weight.sum(0))


def test_a_loader_that_reads_more_than_the_plan_gets_all() -> None:
    class Peeks(Model):
        def load(self, weights: Mapping[str, torch.Tensor]) -> None:
            self.seen = float(weights["more"][1])
            super().load(weights)

    given = planned(checkpoint(1, more=lambda: torch.ones(2)))
    partly = Given({name: held for name, held in given.held.items() if name != "more"}, given.shapes, plan=given.plan)
    with pytest.raises(NotEnough):
        Conversion(Peeks(), SimpleNamespace()).install(partly)
    model = Peeks()
    assert Conversion(model, SimpleNamespace()).install(given) == "reload"
    assert state(model) == fresh(Peeks, checkpoint(1, more=lambda: torch.ones(2)))


def test_another_checkpoint_is_put_to_the_test_anew() -> None:
    model = Model()
    conversion = Conversion(model, SimpleNamespace())
    for tried, dtype in enumerate((torch.float32, torch.bfloat16), 1):
        assert conversion.install(planned(checkpoint(tried, dtype))) == "copy"
        assert state(model) == fresh(Model, checkpoint(tried, dtype))
        assert model.reloads == 2 * tried


def test_a_trial_that_fails_leaves_no_noise() -> None:
    class Chokes(Model):
        def load(self, weights: Mapping[str, torch.Tensor]) -> None:
            if self.reloads == 0:
                self.reloads += 1
                raise ValueError("out of memory")
            super().load(weights)

    model = Chokes()
    conversion = Conversion(model, SimpleNamespace())
    for seed in (1, 2):
        assert conversion.install(planned(checkpoint(seed))) == "reload"
        assert state(model) == fresh(Model, checkpoint(seed))


def test_noise_is_unlike_itself() -> None:
    shapes = {"a": (torch.float32, torch.Size([3, NOISE_LENGTH])), "b": (torch.float32, torch.Size([NOISE_LENGTH]))}
    tensors, again = (dict(whole(noise_like(Given({}, shapes), None, HOST), shapes, HOST)) for _ in range(2))
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
