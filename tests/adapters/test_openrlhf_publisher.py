"""The trainer side against a real hub: ranks that share a model, snapshots, versions that go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensorhub_plugins.core import CHECKPOINT, Client, NotPublished, TensorSpec, UsageError, start_server
from tensorhub_plugins.openrlhf.publisher import Publisher

SHAPES = {"b": (64, 32), "a": (7,), "d": (128, 64), "c": (), "e": (3, 3, 3)}


@pytest.fixture
def address() -> Iterator[str]:
    with start_server() as server:
        yield server.address


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


def publisher(address: str, rank: int = 0, ranks: int = 1, keep: int = 2) -> Publisher:
    client = Client(address, run="r", model="actor", replica="trainer", shard=rank, shard_count=ranks)
    specs = [TensorSpec(n, "bfloat16", s, 2 * torch.Size(s).numel()) for n, s in SHAPES.items()]
    return Publisher(client, specs, rank=rank, ranks=ranks, keep=keep, deadline_s=10)


def read(address: str, version: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    with Client(address, run="r", model="actor", replica="reader") as client:
        fetched = client.fetch(version, (CHECKPOINT,), deadline_s=10)
        return {name: tensor.clone() for name, tensor in fetched.tensors().items()}, fetched.report.sources


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_serves_its_share_and_together_they_are_the_model(address: str, ranks: int) -> None:
    publishers = [publisher(address, rank, ranks) for rank in range(ranks)]
    for version in (1, 2, 3):
        model = weights(version)
        metrics = [one.publish(version, iter(model.items())) for one in publishers]
        assert sum(m["tensorhub/publish_bytes"] for m in metrics) == sum(t.nbytes for t in model.values())
        tensors, sources = read(address, version)
        assert sorted(tensors) == sorted(model)
        assert all(torch.equal(tensors[name], model[name]) for name in model)
        assert sorted(sources) == [f"trainer/{rank}" for rank in range(ranks)]
    for one in publishers:
        one.close()


def test_a_version_of_which_a_rank_is_missing_is_not_visible(address: str) -> None:
    ranks = [publisher(address, rank, 2) for rank in range(2)]
    ranks[0].publish(1, weights(1).items())
    with Client(address, run="r", model="actor", replica="reader") as client:
        with pytest.raises(NotPublished):
            client.wait(1, deadline_s=0.3)
        ranks[1].publish(1, weights(1).items())
        assert client.wait(1, deadline_s=10) == 1
    for one in ranks:
        one.close()


def test_the_optimizer_may_change_the_weights_at_once(address: str) -> None:
    one = publisher(address)
    model = weights(1)
    before = {name: tensor.clone() for name, tensor in model.items()}
    one.publish(1, model.items())
    for tensor in model.values():
        tensor.add_(1)
    tensors, _ = read(address, 1)
    assert all(torch.equal(tensors[name], before[name]) for name in model)
    assert not torch.equal(tensors["d"], model["d"])  # the comparison would see a change
    one.close()


def test_old_versions_go(address: str) -> None:
    one = publisher(address, keep=1)
    for version in (1, 2, 3):
        one.publish(version, weights(version).items())
    with Client(address, run="r", model="actor", replica="reader") as client:
        for _ in range(200):  # they are withdrawn in the background
            held = [info.version for info in client.versions() if info.layouts]
            if held == [3]:
                break
            with pytest.raises(NotPublished):
                client.wait(4, deadline_s=0.05)
        assert held == [3]
    one.close()


def test_a_parameter_that_was_not_gathered_is_an_error_that_names_it(address: str) -> None:
    one = publisher(address)
    model = weights(1)
    del model["d"]
    with pytest.raises(UsageError, match="'d'"):
        one.publish(1, model.items())
    one.close()
