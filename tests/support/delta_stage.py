"""Versions and readers of the tests of deltas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorhub_plugins.core import Location
from tensorhub_plugins.core.client.changes import Changes
from tensorhub_plugins.core.deltas import native
from tensorhub_plugins.core.deltas.cache import _Worth
from tensorhub_plugins.core.deltas.pace import Pace

HERE, THERE, ELSEWHERE = (Location(host=name) for name in "abc")
SIZE = 1 << 20


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    """SIZE bytes of several dtypes, in many segments."""
    make = torch.Generator().manual_seed(seed)
    return {
        "bf16": torch.randn(SIZE // 4, generator=make).to(torch.bfloat16),
        "fp32": torch.randn(SIZE // 16, generator=make),
        "fp8": torch.randn(SIZE // 4, generator=make).to(torch.float8_e4m3fn),
    }


def stepped(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.01) -> dict[str, torch.Tensor]:
    """The next version: that share of the elements has moved by one in the last place."""
    make = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).clone()
        bits += (torch.rand(bits.shape, generator=make) < share).to(bits.dtype)
        found[name] = bits.view(tensor.dtype)
    return found


def versions(count: int, share: float = 0.01) -> list[dict[str, torch.Tensor]]:
    made = [weights()]
    while len(made) < count:
        made.append(stepped(made[-1], len(made), share))
    return made


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def follow(client: Any, version: int, **options: Any) -> Any:
    """Fetch a version, serve it, and only then let the one before go, as an engine does."""
    fetched = client.fetch(version, serve=True, **options)
    for key in client.serving():
        if key.version < version:
            client.unpublish(key.version)
    return fetched


def converter_and_peer(stage: Any, **options: Any) -> tuple[Any, Any]:
    return stage.client("converter", location=HERE, **options), stage.client("peer", location=THERE)


@pytest.fixture
def compiled_first() -> None:
    """The compiler runs now and not beside a test."""
    native.begin()


@pytest.fixture
def as_on_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within this host deltas save no time: they are taken all the same."""
    monkeypatch.setattr(Changes, "asked", lambda self, rate: None)
    monkeypatch.setattr(_Worth, "is_worth", lambda self, rate: True)
    monkeypatch.setattr(Pace, "takes_deltas", lambda self: True)
