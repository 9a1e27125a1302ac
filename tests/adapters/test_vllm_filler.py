"""Memory for tensors of which loaders take a small part: what lies around it, and how often it is made."""

from __future__ import annotations

import pytest
import torch

from tensorhub_plugins.vllm.worker.conversion import noise_like
from tensorhub_plugins.vllm.worker.filler import BLOCK_SIZE_BYTES_MAX, NOISE_LENGTH, NONSENSE, ZERO, Filler
from tensorhub_plugins.vllm.worker.plan import Given, Held, Plan, Region

SHAPE = torch.Size([64, 32])
LEFT, RIGHT = Region((0, 0), (64, 8)), Region((0, 24), (64, 8))


def checkpoint(count: int, *regions: Region, filler: int) -> Given:
    held = {f"{k}": tuple(Held(each, torch.full(each.shape, k + 1.0)) for each in regions) for k in range(count)}
    return Given(held, {name: (torch.float32, SHAPE) for name in held}, filler=filler)


@pytest.mark.parametrize("byte", [ZERO, NONSENSE])
def test_around_its_regions_each_tensor_has_the_filler(byte: int) -> None:
    """The second and later ones are in the memory of the first."""
    for k, (_, whole) in enumerate(checkpoint(5, LEFT, RIGHT, filler=byte).whole()):
        assert LEFT.of(whole).unique().tolist() == RIGHT.of(whole).unique().tolist() == [k + 1.0]
        assert set(whole[:, 8:24].contiguous().numpy().tobytes()) == {byte}


@pytest.mark.parametrize(("kept", "made"), [(False, 1), (True, 5)], ids=["let go of", "the control: kept"])
def test_memory_is_made_once_for_tensors_that_follow_one_another(
    kept: bool, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, sizes = Filler._filled, []
    monkeypatch.setattr(Filler, "_filled", lambda self, size: sizes.append(size) or filled(self, size))
    views = []
    for _, whole in checkpoint(5, LEFT, filler=NONSENSE).whole():
        if kept:
            views.append(whole[:1])  # a view is enough
        del whole
    assert sizes == [SHAPE.numel() * 4] * made
    assert [view[0, 0].item() for view in views] == ([1.0, 2.0, 3.0, 4.0, 5.0] if kept else [])


def test_memory_of_other_regions_is_not_reused() -> None:
    filler = Filler(NONSENSE)
    for region in (LEFT, RIGHT):
        whole = filler.tensor(torch.float32, SHAPE, (region,))
        region.of(whole).zero_()
        assert int((whole == 0).sum()) == 64 * 8
        del whole


def test_noise_takes_the_memory_of_one_tensor() -> None:
    """However many there are; of large ones only what is needed, and no two regions alike."""
    shapes = {f"{k}": (torch.bfloat16, torch.Size([1000, 1000])) for k in range(50)}
    tensors = dict(noise_like(Given({}, shapes), None).whole())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert tensors["0"].untyped_storage().nbytes() == 2 * (1_000_000 + NOISE_LENGTH)
    large = torch.Size([BLOCK_SIZE_BYTES_MAX // 2000, 1001])
    needed = {"w": (Region((0, 0), (5, 1001)), Region((100, 0), (5, 1001)))}
    shapes = {"w": (torch.bfloat16, large), "v": (torch.bfloat16, large)}
    noise = noise_like(Given({}, shapes), Plan(shapes, (), needed, frozenset()))
    assert noise.held.keys() == {"w"}
    first, second = (tensor for _, tensor in noise.held["w"])
    assert first.shape == (5, 1001) and not torch.equal(first, second)
    assert first.untyped_storage().nbytes() == 2 * (5 * 1001 + NOISE_LENGTH)
