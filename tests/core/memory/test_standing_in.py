"""Tensors that have no bytes of their own, or several shapes: refused by name, whatever is done with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorhub_plugins.core.client.allowed import Allowed
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import check_tensors


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, torch says
        return torch.nested.nested_tensor([torch.zeros(2, 1), torch.zeros(3, 1)], layout=layout)


def freed(some: slice, left: int) -> torch.Tensor:
    """As FSDP frees what it has gathered."""
    tensor = torch.zeros(8, 4)[some]
    tensor.untyped_storage().resize_(left)
    return tensor


MADE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "fake": (fake, "is a FakeTensor without memory"),
    "nested": (lambda: nested(torch.strided), "is nested"),
    "jagged": (lambda: nested(torch.jagged), "is nested"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "without memory"),
    "zero": (lambda: torch._efficientzerotensor(3), "without memory"),
    "freed": (lambda: freed(slice(None), 0), "was freed"),
    "freed in part": (lambda: freed(slice(4, None, 2), 96), "was freed"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), "do not say all"),
    "mkldnn": (lambda: torch.zeros(3, 3).to_mkldnn(), "do not say all"),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_only_stands_for_a_tensor_is_refused(kind: str) -> None:
    make, words = MADE[kind]
    tensors = {"right": torch.zeros(2), "wrong": make()}
    assert Allowed.begin(None, tensors).timeout_s > 0
    for work in (check_tensors, Slab.adopt):
        with pytest.raises(UsageError, match=f"'wrong'.*{words}"):
            work(tensors)
    check_tensors({"right": torch.zeros(2)})


def test_what_vmap_hands_out_is_refused() -> None:
    def look(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UsageError, match="'wrong'.*without memory"):
            check_tensors({"wrong": tensor})
        return tensor

    torch.vmap(look)(torch.zeros(3, 2))
