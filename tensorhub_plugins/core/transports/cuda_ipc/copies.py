"""Copies of device memory to device memory, many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

import torch

from tensorhub_plugins.core.device import SMALL_SIZE_BYTES, Device
from tensorhub_plugins.core.drivers import Driver, Stream
from tensorhub_plugins.core.kernels.moving import move

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # source, target: uint8 of one size, on devices


def copy_pairs(device: Device, stream: Stream, pairs: Iterable[Pair]) -> None:
    """Copy each source to its target, and return when all have arrived. Small ones that follow each other are copied
    together."""
    with device.calling() as driver:
        try:
            for is_small, group in groupby(pairs, lambda pair: pair[0].numel() < SMALL_SIZE_BYTES):
                some = list(group)
                if is_small and len(some) > 1:
                    _copy_together(driver, stream, [source for source, _ in some], [target for _, target in some])
                else:
                    for source, target in some:
                        driver.copy(source, target, stream)
        finally:  # after an error too: memory that is released must not be written any more
            driver.wait(driver.record(stream))


def _copy_together(
    driver: Driver, stream: Stream, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    if _are_neighbours(targets):
        driver.launch(move, sources, [_joined(targets)], stream)
    elif _are_neighbours(sources):
        driver.launch(move, [_joined(sources)], targets, stream)
    else:
        beside = driver.scratch(sum(source.numel() for source in sources), stream)
        driver.launch(move, sources, [beside], stream)
        driver.launch(move, [beside], targets, stream)


def _are_neighbours(flats: Sequence[torch.Tensor]) -> bool:
    storage = flats[0].untyped_storage().data_ptr()
    return all(
        one.data_ptr() + one.numel() == other.data_ptr() and other.untyped_storage().data_ptr() == storage
        for one, other in pairwise(flats)
    )


def _joined(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor over all of these neighbours in one storage."""
    return torch.as_strided(flats[0], (sum(flat.numel() for flat in flats),), (1,))
