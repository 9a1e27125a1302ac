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
from contextlib import ExitStack
from functools import cache
from itertools import accumulate

import torch

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
from tensorhub_plugins.core.memory.runs import Run, Runs, memory_of
from tensorhub_plugins.core.memory.tensors import dtype_of, is_dense

logger = logging.getLogger(__name__)

NOTHING = -1, (-1, -1)  # descriptors


class Block:
    """Zeroed memory laid out by a table: `tensors` by name, and the `runs` of the stream.

    fd: the memfd, or -1 where the system has none and the memory is private to this process. liveness: the pipe that
    comes with it, see `Slab.owner_liveness_fd`. `close` closes them, unless another object has taken them over."""

    def __init__(self, table: TensorTable, *, deadline: float = NEVER, over: torch.Tensor | None = None) -> None:
        """Allocate the memory. Raise DeadlineExceeded when so many tensors take longer, UsageError for specs that are
        inconsistent: they may come from a peer, and decide how memory is handed out. over: existing memory, uint8."""
        _check_specs(until(deadline, table))
        size_bytes = table.block_size_bytes
        if over is not None and over.numel() < size_bytes:
            raise UsageError(f"{size_bytes} bytes of tensors in memory of {over.numel()}")
        mapped_size_bytes = max(size_bytes, mmap.PAGESIZE)
        self.fd, self.liveness = _shareable(mapped_size_bytes) if over is None else NOTHING
        try:
            if self.fd >= 0:
                mapped = mmap.mmap(self.fd, mapped_size_bytes)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    try:
                        mapped.madvise(mmap.MADV_HUGEPAGE)  # half the time for the first write, where it is allowed
                    except OSError:
                        logger.debug("no huge pages for shared memory here")
                memory = memoryview(mapped)
                base = _bytes_over(memory)
            else:
                base = _bytes_over(None, max(size_bytes, 1)) if over is None else over
                memory = memory_of(base)
            self.memory = base  # all of it, uint8
            self.borders = table.block_borders
            self.tensors = {
                spec.name: _tensor_at(base, spec, offset)
                for spec, offset in zip(until(deadline, table), table.block_offsets, strict=True)
            }
            self.runs = Runs(
                [
                    Run(span.start, span.size_bytes, base.data_ptr() + span.offset, memory[span.slice])
                    for span in until(deadline, table.spans)
                ]
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptors, unless another object has taken them over."""
        for each in (self.fd, *self.liveness):
            if each >= 0:
                os.close(each)


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
    """Return uint8 over this memory, or over new, private memory."""
    if memory is None:
        return torch.zeros(size_bytes, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


@torch.inference_mode(False)
def _tensor_at(base: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    dtype = dtype_of(spec)
    stride = spec.stride or tuple(accumulate(spec.shape[:0:-1], lambda a, b: a * max(b, 1), initial=1))[::-1]
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), offset // dtype.itemsize, spec.shape, stride if spec.shape else ())


def _shareable(size_bytes: int) -> tuple[int, tuple[int, int]]:
    """Make an anonymous file of this size, and a pipe; return NOTHING where the system has none: private memory does.

    The file is sealed: shrinking it would kill every process that has it mapped."""
    if not hasattr(os, "memfd_create"):
        return NOTHING
    with ExitStack() as opened:
        try:
            fd = os.memfd_create("tensorhub", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.callback(os.close, fd)
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            pipe = os.pipe()
        except OSError as error:
            _log_private(str(resources.refusal(error, forbidden=True) or error))
            return NOTHING
        opened.pop_all()
    return fd, pipe


@cache
def _log_private(why: str) -> None:
    """Log this once for each reason."""
    logger.warning("no memory file, so readers of this host copy by address, or over tcp, and share nothing: %s", why)
