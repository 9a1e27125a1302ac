"""A block of host memory for the tensors of a table: an anonymous file that readers on the same host can map.

An anonymous memfd leaves nothing behind when this process is killed. Where each tensor lies in it follows from the
table alone (`TensorTable.block_offsets`).
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
from tensorhub_plugins.core.memory.runs import Run, Runs, memory_of
from tensorhub_plugins.core.memory.tensors import is_dense

logger = logging.getLogger(__name__)


class Block:
    """Zeroed memory laid out by a table: `tensors` by name, and the `runs` of the stream.

    fd: of the memfd, -1 where the system has none and the memory is private to this process. Owned by who closes it.
    """

    def __init__(self, table: TensorTable, *, pin: bool | None = None, deadline: float = NEVER) -> None:
        """pin: register the memory with CUDA (None: where CUDA is there and allows it; True: or raise UsageError).

        DeadlineExceeded when so many tensors take longer. UsageError for specs that do not hold together: they may come
        from a peer, and memory is handed out by what they say."""
        _check_specs(until(deadline, table))
        size_bytes = table.block_size_bytes
        self.fd = _sealed_memfd(max(size_bytes, mmap.PAGESIZE))
        if self.fd >= 0:
            mapped = mmap.mmap(self.fd, max(size_bytes, mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    mapped.madvise(mmap.MADV_HUGEPAGE)  # half the time for the first write, where the kernel allows it
                except OSError:
                    logger.debug("no huge pages for shared memory here")
            memory = memoryview(mapped)
            base = _bytes_over(memory)
        else:
            base = _bytes_over(None, max(size_bytes, 1))
            memory = memory_of(base)
        self.pinned = 0  # the address, 0: not pinned
        try:
            self.tensors = {
                spec.name: _tensor_at(base, spec, offset)
                for spec, offset in zip(until(deadline, table), table.block_offsets, strict=True)
            }
            self.pinned = _pin(base, required=bool(pin)) if pin is not False else 0
        except BaseException:
            if self.fd >= 0:
                os.close(self.fd)
            raise
        self.runs = Runs(
            [
                Run(span.start, span.size_bytes, base.data_ptr() + span.offset, memory[span.slice])
                for span in table.spans
            ]
        )


def unpin(address: int) -> None:
    """Undo what `Block.pinned` says was done; 0: nothing was."""
    if address:
        _cudart().cudaHostUnregister(address)


def _check_specs(table: Iterable[TensorSpec]) -> None:
    for spec in table:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype) or spec.dtype.startswith("q"):  # quantized: its bytes do not say all
            raise UsageError(f"tensor {spec.name!r} is {spec.dtype!r}: torch {torch.__version__} makes no such tensor")
        if min(spec.shape, default=0) < 0 or spec.size_bytes != math.prod(spec.shape) * dtype.itemsize:
            raise UsageError(f"tensor {spec.name!r} claims {spec.size_bytes} bytes for {spec.dtype}{list(spec.shape)}")
        if spec.stride is not None and (
            len(spec.stride) != len(spec.shape) or not spec.size_bytes or not is_dense(spec.shape, spec.stride)
        ):
            raise UsageError(f"tensor {spec.name!r} has strides {spec.stride} that do not fit its shape {spec.shape}")


# Both make normal tensors even when the caller is in inference mode (engines call us from there): a tensor made in it
# could not be written outside of it, not even by our own threads.


@torch.inference_mode(False)
def _bytes_over(memory: memoryview | None, size_bytes: int = 0) -> torch.Tensor:
    """uint8 over this memory, or over new and private memory."""
    if memory is None:
        return torch.zeros(size_bytes, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


@torch.inference_mode(False)
def _tensor_at(base: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor of `spec` whose bytes begin at `base[offset]`."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    stride = spec.stride or tuple(accumulate(spec.shape[:0:-1], lambda a, b: a * max(b, 1), initial=1))[::-1]
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), offset // dtype.itemsize, spec.shape, stride if spec.shape else ())


def _sealed_memfd(size_bytes: int) -> int:
    """An anonymous file of this size, -1 where there are none. Sealed, as one that shrinks kills who has it mapped."""
    if not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create("tensorhub", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _cudart() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()


def _pin(base: torch.Tensor, *, required: bool) -> int:
    """Register memory with CUDA and return its address; 0 when that is not possible and not required."""
    if not torch.cuda.is_available():
        if required:
            raise UsageError("pin=True, but torch finds no CUDA device")
        return 0
    error = _cudart().cudaHostRegister(base.data_ptr(), base.numel(), 0)
    if int(error) == 0:
        return base.data_ptr()
    if required:
        raise UsageError(f"CUDA cannot pin {base.numel()} bytes (error {int(error)}): raise the locked-memory limit")
    logger.warning("CUDA cannot pin %d bytes (error %d): copies to the device will be slower", base.numel(), int(error))
    return 0
