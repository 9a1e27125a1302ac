"""The interface of a computation, and the choice of its implementation.

A computation is a function of the memory that it reads, the memory that it writes, both uint8, contiguous and on one
device, and of a way to upload a small table. It only queues, on the current stream. Triton runs it where it is
installed and the memory is a CUDA device's, or where its interpreter (TRITON_INTERPRET=1) works on the host's; else
torch does, with the same bytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

Upload: TypeAlias = Callable[[npt.NDArray[Any]], torch.Tensor]
Computation: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Upload], None]


def done_by_triton(memory: torch.Tensor, launch: Callable[[Any], None]) -> bool:
    """Call launch(by_triton) if Triton can compute on this memory, and return whether it did. After one failure, for
    want of a C compiler for example, it is not tried again."""
    if _failures or not (_has_triton() and (memory.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")):
        return False
    try:
        launch(import_module("tensorhub_plugins.core.device.kernels.by_triton"))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _failures.append(f"{type(error).__name__}: {error}")
        logger.warning("Triton does not work here, torch computes instead: %s", _failures[0])
        return False
    return True


def addresses_of(flats: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return int64[n]: the address of each."""
    return np.fromiter((flat.data_ptr() for flat in flats), np.int64, len(flats))


_failures: list[str] = []


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
