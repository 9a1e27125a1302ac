"""What a checkpoint must hold: the comparison with the first one, and the count of what loaders have filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorhub_plugins.core import VersionRefused
from tensorhub_plugins.vllm.worker import checkpoint_contract
from tensorhub_plugins.vllm.worker.checkpoint_contract import Contract
from tensorhub_plugins.vllm.worker.fingerprint import ends_of
from tensorhub_plugins.vllm.worker.preserved import Untouched

BF16 = torch.bfloat16
FIRST = {
    "embed.weight": (BF16, torch.Size([10, 4])),
    "proj.weight": (BF16, torch.Size([4, 4])),
    "proj.bias": (BF16, torch.Size([4])),
    "steps": (torch.int64, torch.Size([])),
    "draft.weight": (BF16, torch.Size([2, 2])),
    "head.weight": (BF16, torch.Size([10, 4])),  # the same parameter as the embedding
    "up.bias": (BF16, torch.Size([4])),  # of a layer that has none
}
UNUSED, IGNORED, TIED = "draft.weight", "up.bias", ("embed.weight", "head.weight")


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> Contract:
    """After the first checkpoint, of which the loaders used all but one tensor."""

    def rehearse(model: Any, vllm_config: Any, tensors: Any) -> checkpoint_contract.Rehearsal:
        return checkpoint_contract.Rehearsal(
            checkpoint_contract.shapes_of(tensors), frozenset(tensors.keys() - {UNUSED, IGNORED}), (TIED,), (IGNORED,)
        )

    monkeypatch.setattr(checkpoint_contract, "rehearse", rehearse)
    made = Contract(torch.nn.Module(), None)
    made.check({"whatever": torch.zeros(1)})  # nothing to compare with yet
    made.rehearse({"another": torch.zeros(1)})  # refused by another worker, or not installed: not accepted
    made.rehearse(tensors_of(FIRST))
    made.check({"whatever": torch.zeros(1)})
    made.accept()
    return made


def tensors_of(shapes: Any) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}


def changed(**changes: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    shapes = {**FIRST, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in shapes.items() if value is not None}


@pytest.mark.parametrize(
    "shapes",
    [
        FIRST,
        dict(reversed(FIRST.items())),
        changed(proj__weight=(torch.float32, torch.Size([4, 4]))),  # a copy converts it
        changed(draft__weight=None),  # nobody took anything from it
        changed(head__weight=None),  # its twin is there
        changed(embed__weight=None),
    ],
)
def test_what_fills_the_model_in_the_same_way_is_taken(shapes: Any, accepted: Contract) -> None:
    accepted.check(tensors_of(shapes))
    accepted.rehearse(tensors_of(shapes))


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (changed(proj__bias=None), r"1 tensors are missing: proj.bias bfloat16\[4\]"),
        (changed(proj__scale=(BF16, torch.Size([1]))), r"1 tensors are unknown: proj.scale bfloat16\[1\]"),
        (
            changed(proj__weight=(BF16, torch.Size([4, 5]))),
            r"proj.weight is bfloat16\[4, 5\], not bfloat16\[4, 4\]",
        ),
        (changed(proj__weight=(BF16, torch.Size([16]))), r"proj.weight is bfloat16\[16\]"),
        (changed(proj__weight=(torch.int32, torch.Size([4, 4]))), "proj.weight is int32"),
        (changed(proj__weight=(torch.float8_e4m3fn, torch.Size([4, 4]))), "proj.weight is float8_e4m3fn"),
        (changed(steps=(torch.float32, torch.Size([]))), "steps is float32"),
        ({}, "5 tensors are missing"),
        (changed(head__weight=None, embed__weight=None), "2 tensors are missing: embed.weight"),
        (changed(**{f"x{k}": (BF16, torch.Size([1])) for k in range(9)}), r"9 tensors are unknown: .*, \.\.\."),
    ],
)
def test_anything_else_is_refused_by_name(shapes: Any, says: str, accepted: Contract) -> None:
    with pytest.raises(VersionRefused, match=says):
        accepted.check(tensors_of(shapes))
    with pytest.raises(VersionRefused, match=says):
        accepted.rehearse(tensors_of(shapes))


@pytest.mark.parametrize(
    ("name", "says"),
    [("head.weight", "embed.weight and head.weight are one parameter.*differ"), ("up.bias", "up.bias is not zero")],
)
def test_values_that_cannot_be_held_are_refused(name: str, says: str, accepted: Contract) -> None:
    given = tensors_of(FIRST)
    given[name][0] = 1
    with pytest.raises(VersionRefused, match=says):
        accepted.check(given)
    given[name][0] = 0
    accepted.check(given)


def test_a_bias_that_is_used_under_another_name_may_come_twice(accepted: Contract) -> None:
    given = tensors_of(FIRST)
    given["up.bias"][0] = given["proj.bias"][0] = 1
    accepted.check(given)
    given["proj.bias"][1] = 1
    with pytest.raises(VersionRefused, match="up.bias is not zero"):
        accepted.check(given)


def box(view: torch.Tensor) -> checkpoint_contract.Strided:
    return view.storage_offset(), tuple(view.shape), tuple(view.stride())


@pytest.mark.parametrize(
    ("views", "filled"),
    [
        (lambda t: [], 0),
        (lambda t: [t], 24),
        (lambda t: [t[:3], t[3:]], 24),
        (lambda t: [t[:, :2], t[:, 2:]], 24),
        (lambda t: [t.t()], 24),
        (lambda t: [t[:3], t[:3]], 12),  # the same rows twice
        (lambda t: [t[:4], t[2:5]], 20),  # 16 and 12 elements: as many as there are, and a row is missing
        (lambda t: [t[:, :3], t[:5]], 23),
        (lambda t: [t[0], t.view(-1)[10:]], 18),
    ],
)
def test_elements_are_counted_once(views: Any, filled: int) -> None:
    tensor = torch.zeros(6, 4)
    place = checkpoint_contract.Place("p", torch.nn.Module(), tensor.shape, tensor.dtype, tensor.numel(), tensor)
    place.boxes.update(box(view) for view in views(tensor))
    assert place.filled == filled


def test_a_transposed_parameter_is_counted_too() -> None:
    tensor = torch.zeros(4, 6).t()
    place = checkpoint_contract.Place("p", torch.nn.Module(), tensor.shape, tensor.dtype, tensor.numel(), tensor)
    place.boxes.add(box(tensor))
    assert place.filled == 24


class Fused(torch.nn.Module):
    """Loads in every way that models have: through temporaries, one by one, by reading a number."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(4, 4))
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "both":
                self.qk.data.copy_(torch.cat([tensor[2:], tensor[:2]]).clone().t())
            elif name == "number":
                self.scale.data.fill_(tensor.item())
            elif name == "twice":
                self.qk.data[:2] = tensor.to(torch.float32) * 2
            elif name != "skipped":
                raise KeyError(name)


def recorded(model: Fused, weights: dict[str, torch.Tensor]) -> checkpoint_contract._Recorder:
    places = {
        checkpoint_contract._storage(p): checkpoint_contract.Place(n, model, p.shape, p.dtype, p.numel(), p)
        for n, p in model.named_parameters()
    }
    recorder = checkpoint_contract._Recorder(places)
    with torch.no_grad(), recorder:
        model.load_weights(recorder.watched(weights))
    return recorder


def test_tensors_are_followed_through_what_loaders_make_of_them() -> None:
    given = {"both": torch.zeros(4, 4), "skipped": torch.zeros(2), "number": torch.tensor(2.0)}
    recorder = recorded(Fused(), given)
    assert recorder.used == {"both", "number"}
    assert not recorder.wrong_kinds


class AsksForAllFirst(Fused):
    def load_weights(self, weights: Any) -> None:
        super().load_weights(list(weights))


def test_tensors_of_one_block_of_memory_are_told_apart() -> None:
    """As they come from a slab."""
    block = torch.zeros(32)
    given = {"both": block[:16].view(4, 4), "skipped": block[16:20], "number": block[20]}
    assert recorded(Fused(), given).used == {"both", "number"}
    tensors = {name: tensor for name, tensor in given.items() if name != "number"}
    assert recorded(AsksForAllFirst(), tensors).used == {"both"}
    assert recorded(AsksForAllFirst(), given).used == given.keys()  # whose number it was cannot be told: any may be it


def test_what_is_left_of_a_tensor_is_seen() -> None:
    """Loaders cut a tensor that is too large to size, and ranks take a part each."""

    class Cuts(Fused):
        def load_weights(self, weights: Any) -> None:
            for _, tensor in weights:
                self.qk.data.copy_(tensor.narrow(0, self.start, 4))

    def left_over(rows: int, start: int, *, is_first: bool, is_last: bool) -> list[str]:
        model = Cuts()
        model.start = start
        return recorded(model, {"q": torch.zeros(rows, 4)}).left_over(lambda _: (is_first, is_last))

    alone = {"is_first": True, "is_last": True}
    assert left_over(4, 0, **alone) == []
    assert left_over(6, 0, **alone) == ["q float32[6, 4]"]
    assert left_over(6, 2, **alone) == ["q float32[6, 4]"]
    assert left_over(8, 0, is_first=True, is_last=False) == [] == left_over(8, 4, is_first=False, is_last=True)
    assert left_over(12, 4, is_first=False, is_last=False) == []
    assert left_over(10, 4, is_first=False, is_last=True) == ["q float32[10, 4]"]
    assert left_over(10, 2, is_first=True, is_last=False) == ["q float32[10, 4]"]


def test_data_parallel_ranks_share_experts_and_nothing_else() -> None:
    expert, other = "layers.0.mlp.experts.3.up_proj.weight", "layers.0.mlp.shared_experts.up_proj.weight"
    both = (True, True)
    ranks = {"tp": 0, "tp_size": 2, "pp": 1, "pp_size": 2, "dp": 1, "dp_size": 2}
    assert ends_of(ranks, expert) == (False, False) and ends_of(ranks, other) == (True, False)
    assert ends_of({**ranks, "tp": 1}, expert) == (False, True) == ends_of({**ranks, "tp": 1}, other)
    assert ends_of({**ranks, "dp": 0}, expert) == (True, False)
    alone = {name: rank for name, rank in ranks.items() if not name.startswith("dp")} | {"tp_size": 1}
    assert ends_of(alone, expert) == both == ends_of(alone, other)


def test_tensors_that_fill_one_place_are_found() -> None:
    class Twice(Fused):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                if not name.endswith("bias"):
                    self.qk.data.copy_(tensor)

    given = {"b.weight": torch.zeros(4, 4), "a.weight": torch.ones(4, 4), "b.bias": torch.zeros(4)}
    recorder = recorded(Twice(), given)
    assert recorder.tied(heads=False) == (("a.weight", "b.weight"),) and recorder.ignored_biases() == ("b.bias",)


def test_a_parameter_that_is_made_from_another_is_seen() -> None:
    """BERT's head is tied by a copy after everything was loaded: a reload has nothing there to copy."""

    class Copies(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Parameter(torch.zeros(4, 4))

        def load_weights(self, weights: Any) -> None:
            super().load_weights(weights)
            self.head.data.copy_(self.qk.data)

    class Derives(Copies):
        """vLLM makes a classifier of two rows of a tied head: the new embedding is not there when a reload asks."""

        def load_weights(self, weights: Any) -> None:
            Fused.load_weights(self, weights)
            rows = self.qk.data[[1]].float() - self.qk.data[[2]].float()
            self.head.data.copy_(torch.zeros(4, 4).add_(rows))

    class OnlyLooksLikeIt(Copies):
        def load_weights(self, weights: Any) -> None:
            for _, tensor in weights:
                self.head.data.copy_(torch.zeros_like(self.qk.data).copy_(tensor))

    assert recorded(Copies(), {"both": torch.zeros(4, 4)}).copies == ["head from qk"]
    assert recorded(Derives(), {"both": torch.zeros(4, 4)}).copies == ["head from qk"]
    assert recorded(OnlyLooksLikeIt(), {"both": torch.zeros(4, 4)}).copies == []
    assert recorded(Fused(), {"both": torch.zeros(4, 4)}).copies == []


class Derives(Fused):
    """Keeps what it makes of its parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [torch.zeros(4)]

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.sums[0].copy_(self.qk.data.sum(0))
        torch.add(self.qk.data[0], 1, out=self.sums[0])
        other = torch.zeros(4)
        torch._foreach_copy_([other, self.sums[0]], [torch.ones(4), self.qk.data[0]])
        torch._foreach_add_([other, self.sums[0]], [torch.ones(4), self.qk.data[0]])
        torch._foreach_mul_(self.sums, 2.0)
        assert set(other.tolist()) == {2.0}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_rehearsal_writes_nothing_beside_the_parameters(device: str) -> None:
    """That is of the version that answers meanwhile."""
    model = Derives()
    with Untouched(model):
        model.qk = torch.nn.Parameter(torch.ones(4, 4, device=device))
        given = {"both": torch.ones(4, 4)}
        assert recorded(model, given).used == {"both"}
        assert not model.sums[0].any()
    if device == "cpu":
        recorded(model, given)
        assert model.sums[0].any()  # the control
    else:
        with pytest.raises((NotImplementedError, RuntimeError)):
            recorded(model, given)


def test_what_is_loaded_many_at_a_time_is_as_one_by_one() -> None:
    class Together(Fused):
        def load_weights(self, weights: Any) -> None:
            (both,) = (tensor for _, tensor in weights)
            torch._foreach_copy_([self.qk.data[:2], self.qk.data[2:]], [both[:2], both[2:]])

    class OneByOne(Fused):
        def load_weights(self, weights: Any) -> None:
            (both,) = (tensor for _, tensor in weights)
            self.qk.data[:2].copy_(both[:2])
            self.qk.data[2:].copy_(both[2:])

    given = {"both": torch.ones(4, 4)}
    plans = [recorded(model, given).plan((), ()) for model in (Together(), OneByOne())]
    assert plans[0] == plans[1] and len(plans[0].pieces) == 2


def test_a_head_that_loaders_skip_is_still_the_embedding() -> None:
    class SkipsTheHead(Fused):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                if not name.startswith("lm_head"):
                    self.qk.data.copy_(tensor)

    given = {"model.embed_tokens.weight": torch.zeros(4, 4), "lm_head.weight": torch.zeros(4, 4)}
    tied = (("lm_head.weight", "model.embed_tokens.weight"),)
    assert recorded(SkipsTheHead(), given).tied(heads=True) == tied
    assert recorded(SkipsTheHead(), given).tied(heads=False) == ()  # another stage has it, or nobody needs one
    given["lm_head.weight"] = torch.zeros(2, 4)  # of something else
    assert recorded(SkipsTheHead(), given).tied(heads=True) == ()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).to(BF16), True),
        (torch.tensor([1.0, 2.001]), torch.tensor([1.0, 2.001]).to(BF16), False),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), True),
    ],
)
def test_tied_tensors_are_compared_by_value(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert checkpoint_contract._same_values(one, other) == same


def test_a_number_of_another_kind_is_seen_where_it_lands() -> None:
    assert recorded(Fused(), {"both": torch.zeros(4, 4, dtype=torch.int32)}).wrong_kinds == [
        "both is int32, qk is float32"
    ]
    # A loader that converts it by itself knows what it does.
    assert not recorded(Fused(), {"twice": torch.zeros(2, 4, dtype=torch.int32)}).wrong_kinds
