"""Pages are made by several threads, each of which writes zeros at a few GB/s. See tests/core/test_device.py, too."""

from __future__ import annotations

import threading

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of

PATIENCE_S = 20.0
SIZE = 1 << 17


@pytest.mark.parametrize("pieces", [min(pinning.POPULATE_THREADS_MAX, cores()), 1])
def test_pages_are_made_by_several_threads(monkeypatch, pieces):
    """Each waits for all others. The control: memory of one piece is made by one."""
    made, together = [], threading.Barrier(pieces)

    def populate(memory):
        together.wait(PATIENCE_S)
        made.append((threading.current_thread().name, memory.numel()))

    monkeypatch.setattr(pinning, "_populate", populate)
    monkeypatch.setattr(pinning.Pinned, "piece_size_bytes", SIZE // pieces)
    with Simulation(0), Slab.allocate([spec_of("w", torch.zeros(SIZE, dtype=torch.uint8))], pin=True):
        assert {name for name, _ in made} == {"tensorhub-pages"}
        assert sum(size_bytes for _, size_bytes in made) == SIZE
