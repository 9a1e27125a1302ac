"""What loaders get of a tensor of which only regions are here: its numbers there, an error elsewhere, and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorhub_plugins.vllm.worker.conversion import NOISE_LENGTH, noise_like
from tensorhub_plugins.vllm.worker.partial import NotEnough, Partial, whole
from tensorhub_plugins.vllm.worker.plan import Given, Held, Plan, Region

SHAPE = torch.Size([8, 6])
HOST = torch.device("cpu")
ROWS, COLUMNS = Region((2, 0), (3, 6)), Region((0, 4), (8, 2))


def numbers() -> torch.Tensor:
    return torch.arange(48.0).view(SHAPE)


def partial(*regions: Region) -> torch.Tensor:
    held = [Held(region, region.of(numbers()).contiguous()) for region in regions]
    return Partial.of(held, torch.float32, SHAPE, HOST)


READS: dict[str, tuple[Region, Callable[[torch.Tensor], Any]]] = {
    "rows": (ROWS, lambda t: t[2:5]),
    "a row": (ROWS, lambda t: t[3]),
    "narrow": (COLUMNS, lambda t: t.narrow(1, 5, 1)),
    "chunks": (COLUMNS, lambda t: t.chunk(3, dim=1)[2]),
    "transposed": (COLUMNS, lambda t: t.t()[4:]),
    "computed": (ROWS, lambda t: t[2:5] * 2 + 1),
    "another kind": (ROWS, lambda t: t[2:5].to(torch.bfloat16)),
    "joined": (ROWS, lambda t: torch.cat([t[2:3], t[4:5]])),
    "a number": (ROWS, lambda t: t[4, 1].item()),
    "the device": (COLUMNS, lambda t: t.to(HOST)[:, 4:]),
    "its data": (COLUMNS, lambda t: t.data[:, 4:].contiguous()),
}


@pytest.mark.parametrize("how", READS)
def test_what_is_here_is_read_as_of_the_whole(how: str) -> None:
    region, read = READS[how]
    mine, theirs = read(partial(region)), read(numbers())
    if isinstance(theirs, float):
        assert mine == theirs
        return
    target = torch.zeros(theirs.shape, dtype=theirs.dtype)
    target.copy_(mine)
    assert torch.equal(target, theirs)
    with pytest.raises(NotEnough):  # the control: of another place
        target.copy_(read(partial(Region((7, 0), (1, 1)))))


@pytest.mark.parametrize(
    "does",
    [
        lambda t: t[1:4] + 0,
        lambda t: t + 0,
        lambda t: t[2, 3:5].sum() + t[5].sum(),
        lambda t: t[2:4].mul_(2),  # what was fetched is not changed
    ],
)
def test_what_is_not_here_cannot_be_read_and_nothing_is_written(does: Callable[[torch.Tensor], Any]) -> None:
    tensor = partial(ROWS)
    with pytest.raises(NotEnough):
        does(tensor)
    assert torch.equal(tensor[2:5] + 0, numbers()[2:5])


@pytest.mark.parametrize("around", [lambda t: t.numpy(), lambda t: t.data_ptr(), lambda t: t.untyped_storage()[0]])
def test_there_is_no_way_around_it(around: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((NotEnough, RuntimeError, TypeError, NotImplementedError)):
        around(partial(ROWS))


def test_elements_are_counted_without_reading_them() -> None:
    torch.empty(SHAPE, device="meta").copy_(partial())
    with pytest.raises(NotEnough):  # the control
        torch.empty(SHAPE).copy_(partial())


def test_its_bytes_are_numbers_of_another_size_where_all_is_here() -> None:
    tensor = partial(Region((0, 0), tuple(SHAPE)))
    assert torch.equal(tensor.view(torch.uint8)[1:] + 0, numbers().view(torch.uint8)[1:])
    with pytest.raises(NotEnough):
        partial(ROWS).view(torch.uint8)[2:5] + 0


def test_whole_tensors_are_given_as_they_are_and_others_take_no_memory() -> None:
    mine = numbers()
    given = Given(
        {"a": (Held(Region((0, 0), tuple(SHAPE)), mine),)}, {"a": (mine.dtype, SHAPE), "b": (mine.dtype, SHAPE)}
    )
    found = dict(whole(given, given.shapes, HOST))
    assert found["a"] is mine and isinstance(found["b"], Partial) and found["b"].shape == SHAPE


def test_noise_takes_the_memory_of_one_tensor() -> None:
    """However many there are; only what is needed of each, and no two regions alike."""
    shapes = {f"{k}": (torch.bfloat16, torch.Size([1000, 1000])) for k in range(50)}
    tensors = dict(whole(noise_like(Given({}, shapes), None, HOST), shapes, HOST))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert tensors["0"].untyped_storage().nbytes() == 2 * (1_000_000 + NOISE_LENGTH)
    needed = {"0": (Region((0, 0), (5, 1000)), Region((100, 0), (5, 1000)))}
    noise = noise_like(Given({}, shapes), Plan(shapes, (), needed, frozenset()), HOST)
    assert noise.held.keys() == {"0"}
    first, second = (tensor for _, tensor in noise.held["0"])
    assert first.shape == (5, 1000) and not torch.equal(first, second)
    assert first.untyped_storage().nbytes() == 2 * (5 * 1000 + NOISE_LENGTH)
