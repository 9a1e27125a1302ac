"""The material of the conformance suite: tensors, garbage, and the report of a broken promise."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.staging import host_copy
from tensorhub_plugins.core.memory.tensors import flat_bytes
from tensorhub_plugins.core.transports import Link, LinkProgress

SEGMENT_SIZE_BYTES = 997  # a prime: cuts tensors and elements anywhere
FAR_S = 60.0  # a deadline that must not be needed
NEAR_S = 0.5  # a deadline that must be kept
MIDDLE_S = (1.0, 10.0, 50.0)  # the same, with time for half a transfer before: the first that is enough
POISON = 0xA5
GARBAGE = (
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # a TLS greeting
    b"\xff" * 4096,
    bytes(4096),
)
GROWTH_SIZE_BYTES_MAX = 16 << 20  # what garbage may make a source allocate


class ConformanceError(AssertionError):
    """The transport broke a promise."""


def sample_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return one of every dtype torch has and can hold plainly, of odd sizes, some strided, some empty, one big."""
    dtypes = sorted(
        {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    )
    tensors = {
        f"dtype.{dtype}": make_tensor(dtype, (3, 1 + index % 7, 5), seed=seed * 1000 + index)
        for index, dtype in enumerate(dtypes)
        if not dtype.startswith(("q", "bits"))  # quantized ones have parameters beside their bytes
    }
    tensors["big"] = make_tensor("float32", (37, 2001), seed=seed)
    tensors["empty"] = torch.empty(0, 7, dtype=torch.bfloat16)
    tensors["scalar"] = make_tensor("float64", (), seed=seed + 1)
    tensors["transposed"] = make_tensor("bfloat16", (31, 17), seed=seed + 2).t()
    tensors["permuted"] = make_tensor("int16", (3, 4, 1, 5), seed=seed + 3).permute(3, 0, 2, 1)
    tensors["zz.last"] = make_tensor("uint8", (1,), seed=seed + 4)
    return tensors


def blank_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same dtypes, shapes and strides, every byte 0xA5."""
    return {name: _like(tensor) for name, tensor in tensors.items()}


def make_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random content of this dtype and shape, on the CPU, the same for the same seed."""
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    content = bytearray(random.Random(seed).randbytes(count * kind.itemsize))
    if kind is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    return _over(content, kind, shape, None)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    content = bytearray([POISON]) * (tensor.numel() * tensor.element_size())
    return _over(content, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _over(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None
) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    storage = torch.frombuffer(content, dtype=torch.uint8).clone().untyped_storage()  # aligned as torch wants it
    view = torch.empty(0, dtype=dtype)
    if stride is None:
        stride = tuple(torch.empty(shape, device="meta").stride())
    return view.set_(storage, 0, shape, stride)


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of what it came from, and with them what their frames keep alive."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def raw(tensor: torch.Tensor) -> bytes:
    """Return a dense tensor's bytes in memory order, read without any code that is tested here."""
    if tensor.device.type != "cpu":
        tensor = host_copy(flat_bytes(tensor), torch.uint8)
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def moves_to(manifest: Manifest, offsets: Sequence[int]) -> list[Move]:
    """Return the moves of whole tensors to these offsets of a target's stream; -1: not wanted."""
    wanted = zip(manifest.tensors, manifest.offsets, offsets, strict=True)
    return [Move(start, offset, spec.size_bytes) for spec, start, offset in wanted if offset >= 0 and spec.size_bytes]


def read_equal(link: Link, segments: Sequence[int], target: Slab, **options: Any) -> Iterator[int]:
    """Read by `link.read` into a target with the source's layout."""
    return link.read(segments, target, [Move(0, 0, target.size_bytes)], **options)


def require(condition: bool, message: str) -> None:
    """ConformanceError with this message unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def require_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """ConformanceError unless names and bytes are equal."""
    wrong = [name for name, tensor in expected.items() if raw(got[name]) != raw(tensor)]
    require(not wrong, f"tensors {wrong[:5]} ({len(wrong)} of {len(expected)}) arrived with other bytes")


@contextlib.contextmanager
def raises(kind: type[BaseException], what: str) -> Iterator[None]:
    """ConformanceError unless the block raises this."""
    try:
        yield
    except kind:
        return
    raise ConformanceError(f"{kind.__name__} was due: {what}")


def far() -> float:
    """Return a deadline that no case reaches."""
    return time.monotonic() + FAR_S


def near() -> float:
    """Return a deadline that a case waits for."""
    return time.monotonic() + NEAR_S


def resources() -> tuple[int, ...]:
    """Return how many threads and descriptors this process has, and how many bytes of memory it shares with others."""
    fds = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.split()[1].endswith("s")]
    return threading.active_count(), fds, sum(int(end, 16) - int(start, 16) for start, end in ranges)


@contextlib.contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how much Python's memory grew at most, touched or not."""
    grown = 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield lambda: grown
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def waits_since(progress: LinkProgress, instant: float) -> bool:
    """Return whether the source has reported since this instant that it waits."""
    return progress.waiting_at > instant


def longer_than(items: Sequence[object], count: int) -> bool:
    """Return whether there are more than so many."""
    return len(items) > count


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """Yield what is logged meanwhile, line by line."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)
