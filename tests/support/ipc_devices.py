"""Processes of the conformance suite whose tensors lie on a simulated device that other processes can open."""

from __future__ import annotations

import contextlib
import itertools
import os

from simulated_ipc import SharedSimulation, SimulatedIpc

from tensorhub_plugins.core.transports.cuda_ipc.transport import CudaIpcTransport

_simulations: list[SharedSimulation] = []  # of this process; the last one counts
_numbers = itertools.count()


def simulation() -> SharedSimulation:
    """Return this process's simulation, made by the first call."""
    if not _simulations:
        _begin()
    return _simulations[-1]


def _begin():
    _simulations.append(SharedSimulation(0))
    _simulations[-1].__enter__()


@contextlib.contextmanager
def simulated():
    """Yield the devices of this process, which end with the block."""
    _begin()
    try:
        yield simulation()
    finally:
        _simulations.pop().__exit__()


def apart():
    """Return a transport that counts as a process of its own: it opens the memory of others here."""
    return CudaIpcTransport(ipc=SimulatedIpc(simulation(), f"{os.getpid()}-{next(_numbers)}"))


def together():
    """Return a transport of this process: memory of this process is not opened."""
    return CudaIpcTransport(ipc=SimulatedIpc(simulation()))


def adopt(tensors):
    return simulation().adopt_in_place(tensors)
