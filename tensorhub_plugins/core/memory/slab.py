"""One shard's memory, seen as one flat stream of bytes.

A slab turns tensors into the stream that `values` describes and back. Two kinds:

* adopted: the live tensors themselves (a model's parameters), wherever they lie, CPU or accelerator;
* allocated: one block the tensors are written into, an anonymous memfd, so that it can be passed to a reader on the
  same host and nothing is left behind when this process is killed.

Where the bytes lie
    `place(specs)` says where each tensor lies in an allocated block. It is a pure function of the specs, so that
    whoever is passed the block knows its layout from the manifest alone. Neighbours in the stream that are neighbours
    in memory form one *run*; everything below works on runs, found by bisection. A model whose tensor sizes are
    multiples of 64 bytes is a single run, 5,000 tiny adopted tensors are 5,000.

Host and device
    On the CPU `readable` and `writable` hand out the memory itself: a socket sends from it and receives into it. Device
    memory is staged through pinned host memory; a range is committed to the device when `writable` is left without an
    exception, and not at all otherwise.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import (
    DIGEST_SIZE_BYTES,
    NO_DIGESTS,
    Manifest,
    TensorSpec,
    remembered_of_table,
    segment_size_for,
    shared_table,
    stream_offsets,
)
from tensorhub_plugins.core.types import (
    is_text,
)

# 30 GB/s on one core where memcpy reaches 13, releases the GIL, and sees two swapped blocks (an XOR or a sum does not).
DIGESTER = xxhash.xxh3_128

ALIGNMENT_BYTES = 64  # a cache line, the widest vector, and what torch's own allocator gives
COPY_GIL_SIZE_BYTES = 32 << 10  # below it letting go of the GIL costs more than the copy (4 KiB: 13 us against 0.8)
ADOPTIONS_MAX = 4  # sets of tensors that are remembered: a worker publishes one, reads into one or two
DIGEST_THREADS_MAX = 4  # two cores already read at the memory's speed here; more help on hosts with many channels
DIGEST_THREADS_FROM_BYTES = 64 << 20  # below it starting threads costs more than it saves
DIGEST_SIZE_AT_ONCE_BYTES = 16 << 20  # to hand a piece to a thread and back takes as long as to read 1 MB

Extents: TypeAlias = "npt.NDArray[np.uint64]"  # [n, 2]: where pieces of a stream lie, address and size in bytes of each

_log = logging.getLogger(__name__)


class Slab:
    """The registered memory of one shard. Make one with `adopt` or `allocate`.

    Ranges are stream offsets in bytes, [start, stop). Reading and writing may happen in several threads at once;
    that nobody writes what others read is the publisher's contract, not the slab's.
    """

    specs: tuple[TensorSpec, ...]
    size_bytes: int
    kind: Literal["adopted", "allocated"]
    ties: Mapping[str, str]  # of adopted tensors: name -> the first other name of the very same memory

    def __init__(
        self,
        kind: Literal["adopted", "allocated"],
        specs: tuple[TensorSpec, ...],
        runs: _Runs,
        *,
        tensors: dict[str, torch.Tensor],
        staging: torch.device | None = None,
        fd: int = -1,
        pinned: int = 0,
    ) -> None:
        """Private: use `adopt` or `allocate`."""
        self.kind = kind
        self.specs = specs
        self.size_bytes = runs.size_bytes
        self._runs = runs
        self._tensors = tensors
        self._unwritten = dict.fromkeys(tensors) if kind == "allocated" else {}
        self._staging = staging
        self._fd = fd
        self._lifeline, self._alive = os.pipe() if fd >= 0 else (-1, -1)
        self._pinned = pinned  # address of memory registered with CUDA, 0: none
        # What adopted views point into, whatever becomes of the tensors.
        self._storages = list(map(torch.Tensor.untyped_storage, tensors.values())) if kind == "adopted" else []
        self.ties: Mapping[str, str] = {}
        self._closed = False
        self._lock = threading.Lock()

    # --- two ways to get one ---

    @classmethod
    def adopt(cls, tensors: Mapping[str, torch.Tensor], *, scratch: Mapping[str, torch.Tensor] | None = None) -> Slab:
        """Take live tensors as they are: read and written in place, never copied.

        Each must be dense (any permutation of contiguous, no overlap with itself, no holes) and all must be on the CPU
        or on one device. Two names may be the same memory (tied weights, see `ties`), but may not overlap in part.
        UsageError names the tensor otherwise.

        scratch: for some of the names a host tensor of the same kind, which holds their bytes instead. See tied.py.
        """
        found = _Adoption.of(tensors)
        named, runs = dict(tensors), found.runs
        instead = {name: tensor for name, tensor in scratch.items() if name in named} if scratch else {}
        if instead:
            named.update(instead)
            runs = found.runs_with(instead)
        slab = cls("adopted", found.specs, runs, tensors=named, staging=found.staging)
        slab.ties = found.ties
        return slab

    @classmethod
    def allocate(cls, specs: Iterable[TensorSpec], *, pin: bool | None = None) -> Slab:
        """One zeroed block of host memory for these tensors, mappable by other processes of this host.

        pin: register the block with CUDA (None: where CUDA is there and allows it; True: or raise UsageError). Where
        the system has no memfd the block is private memory and `shared_fd` is None.
        """
        ordered = _in_order(specs)
        places, extent = place(ordered)
        fd = _sealed_memfd(max(extent, mmap.PAGESIZE))
        if fd >= 0:
            block = mmap.mmap(fd, max(extent, mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    block.madvise(mmap.MADV_HUGEPAGE)  # half the time for the first write, where the kernel allows it
                except OSError:
                    _log.debug("no huge pages for shared memory here")
            memory = memoryview(block)
            base = _block(memory)
        else:
            base = _block(None, max(extent, 1))
            memory = _memory(base)
        try:
            pinned = _pin(base, required=bool(pin)) if pin is not False else 0
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        tensors = {spec.name: _view(base, spec, at) for spec, at in zip(ordered, places, strict=True)}
        runs = [
            _Run(span.start, span.size_bytes, base.data_ptr() + span.place, memory[span.slice], None)
            for span in spans(ordered)
        ]
        return cls("allocated", ordered, _Runs(runs), tensors=tensors, fd=fd, pinned=pinned)

    # --- tensors ---

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, sharing the slab's memory. Keep none of them beyond `close` of an allocated slab."""
        self._check_open()
        return dict(self._tensors)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` in under `name`: same dtype and shape (or UsageError), any device, any strides."""
        target = self._target(name)
        spec = self._spec_of[name]
        _check_plain(name, tensor)
        if tensor.is_meta:
            raise UsageError(f"tensor {name!r} is on the meta device: it has no bytes to write")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise UsageError(
                f"tensor {name!r} is {dtype}{list(tensor.shape)}, the slab expects {spec.dtype}{list(spec.shape)}"
            )
        with (
            torch.inference_mode()
        ):  # the only mode in which both a model's inference tensors and others can be written
            if tensor.is_conj() or tensor.is_neg() or _stride_of(tensor) != spec.stride:
                target.copy_(tensor)
            elif spec.size_bytes:
                _copy_flat(_flat(tensor), _flat(target))  # also for packed dtypes, for which torch has no copy
        with self._lock:
            self._unwritten.pop(name, None)

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Names of an allocated slab's tensors that nobody has written since it was allocated or `expect_writes`."""
        with self._lock:
            return tuple(self._unwritten)

    def mark_written(self, names: Iterable[str] | None = None) -> None:
        """These tensors (None: all) were filled by other means than `write`: through their views, or by a reader."""
        with self._lock:
            for name in tuple(self._unwritten) if names is None else names:
                self._unwritten.pop(name, None)

    def expect_writes(self) -> None:
        """Start over: every tensor counts as unwritten. For a slab that is used again for another version."""
        with self._lock:
            self._unwritten = dict.fromkeys(self._tensors)

    @cached_property
    def _spec_of(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    # --- bytes ---

    @property
    def shared_fd(self) -> int | None:
        """The memfd behind an allocated slab, its file descriptor still owned by the slab; None: not shareable."""
        return self._fd if self._fd >= 0 and not self._closed else None

    @property
    def lifeline_fd(self) -> int | None:
        """The end of a pipe for whoever is passed `shared_fd`. It hangs up when the slab is closed, or its process
        dies: then the memory is to be let go. Still owned by the slab."""
        return self._lifeline if self._lifeline >= 0 and not self._closed else None

    def readable(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of a stream range, in order: the memory itself on the CPU, a host copy of device memory."""
        self._check_range(start, stop)
        if self._staging is None:
            return self._pieces(start, stop)
        host = self._host_buffer(stop - start)
        at = 0
        for flat in self._flats(start, stop):
            host[at : at + flat.numel()].copy_(flat, non_blocking=True)
            at += flat.numel()
        self._synchronize()
        return [_memory(host)]

    @contextmanager
    def writable(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        """Memory to receive a stream range into, in order. Device memory is written when the block ends well."""
        with self.writable_ranges([(start, stop)]) as views:
            yield views

    @contextmanager
    def writable_ranges(self, ranges: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
        """`writable` for several stream ranges at once, their views one after the other."""
        for start, stop in ranges:
            self._check_range(start, stop)
        if self._staging is None:
            yield [view for start, stop in ranges for view in self._pieces(start, stop)]
            return
        hosts = [self._host_buffer(stop - start) for start, stop in ranges]
        yield [_memory(host) for host in hosts]
        for (start, stop), host in zip(ranges, hosts, strict=True):
            at = 0
            for flat in self._flats(start, stop):
                flat.copy_(host[at : at + flat.numel()], non_blocking=True)
                at += flat.numel()
        self._synchronize()

    def digest(self, start: int, stop: int) -> bytes:
        """Digest of a stream range: 16 bytes that depend on every byte and on its position."""
        return digest_of(self.readable(start, stop))

    def manifest(
        self, segment_size_bytes: int | None = None, *, threads: int | None = None, digests: bool = True
    ) -> Manifest:
        """Names, sizes and the digest of every segment, from the bytes as they are now.

        segment_size_bytes, threads: None picks by size. digests: False for a manifest without them. On an accelerator
        this first waits for the work queued on the device, so that it is the finished bytes that are described.
        """
        self._check_open()
        if segment_size_bytes is None:
            segment_size_bytes = segment_size_for(self.size_bytes)
        if segment_size_bytes <= 0:
            raise UsageError(f"segment_size_bytes must be positive, not {segment_size_bytes}")
        if self._staging is not None and self._staging.type == "cuda":
            torch.cuda.synchronize(self._staging)
        if not digests:
            return Manifest(self.specs, os.urandom(DIGEST_SIZE_BYTES), segment_size_bytes, NO_DIGESTS)
        starts = range(0, self.size_bytes, segment_size_bytes)

        def digests_of(part: range) -> bytes:
            stops = (min(start + segment_size_bytes, self.size_bytes) for start in part)
            return b"".join(map(self.digest, part, stops))

        if threads is None:
            big = self.size_bytes >= DIGEST_THREADS_FROM_BYTES
            threads = min(DIGEST_THREADS_MAX, os.cpu_count() or 1) if big else 1
        if threads > 1:
            with ThreadPoolExecutor(threads, thread_name_prefix="tensorhub-digest") as pool:
                step = max(1, DIGEST_SIZE_AT_ONCE_BYTES // segment_size_bytes)
                joined = b"".join(pool.map(digests_of, (starts[i : i + step] for i in range(0, len(starts), step))))
        else:
            joined = digests_of(starts)
        return Manifest(self.specs, joined, segment_size_bytes)

    def addresses(self, start: int = 0, stop: int | None = None) -> Extents | None:
        """Where a stream range lies in this process's memory; None on a device."""
        stop = self.size_bytes if stop is None else stop
        self._check_range(start, stop)
        if self._staging is not None:
            return None
        if stop - start == self.size_bytes:
            return self._runs.extents
        if start == stop:
            return self._runs.extents[:0]
        return cut_extents(self._runs.extents, *self._cut(start, stop))

    # --- the end ---

    def close(self) -> None:
        """Let go of the memory; twice is fine. It returns to the system when the last view of it has gone."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pinned:
                _cudart().cudaHostUnregister(self._pinned)
            for fd in (self._fd, self._lifeline, self._alive):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._lifeline = self._alive = -1
            self._tensors = {}
            self._runs = _Runs([])

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A slab dropped without close must not leak its descriptor; at interpreter exit there is nothing to save, and
        # nothing of this module left to do it with.
        if not is_finalizing() and hasattr(self, "_lock"):
            self.close()

    def __repr__(self) -> str:
        return f"<Slab {self.kind}, {len(self.specs)} tensors, {self.size_bytes} bytes{', closed' * self._closed}>"

    # --- inside ---

    def _target(self, name: str) -> torch.Tensor:
        self._check_open()
        target = self._tensors.get(name)
        if target is None:
            raise UsageError(f"tensor {name!r} is not in this slab of {len(self.specs)} tensors")
        return target

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the slab is closed")

    def _check_range(self, start: int, stop: int) -> None:
        self._check_open()
        if not 0 <= start <= stop <= self.size_bytes:
            raise UsageError(f"range [{start}, {stop}) is outside the slab's {self.size_bytes} bytes")

    def _cut(self, start: int, stop: int) -> tuple[int, int, int, int]:
        """The runs that hold a range that is not empty, as indices [first, last), where in the first one it begins, and
        where in the last one it ends."""
        starts = self._runs.starts
        first = bisect_right(starts, start) - 1
        last = bisect_left(starts, stop)
        return first, last, start - starts[first], stop - starts[last - 1]

    def _pieces(self, start: int, stop: int) -> list[memoryview]:
        if start == stop:
            return []
        first, last, skip, take = self._cut(start, stop)
        views = self._runs.views[first:last]  # whole runs: thousands of tiny tensors cost one slice
        views[-1] = views[-1][:take]
        views[0] = views[0][skip:]
        return views

    def _flats(self, start: int, stop: int) -> list[torch.Tensor]:
        if start == stop:
            return []
        first, last, skip, take = self._cut(start, stop)
        flats = [_block(run.view) if run.flat is None else run.flat for run in self._runs.all[first:last]]
        flats[-1] = flats[-1][:take]
        flats[0] = flats[0][skip:]
        return flats

    def _host_buffer(self, size_bytes: int) -> torch.Tensor:
        # Torch caches pinned blocks, so that this costs little after the first time, and frees them by itself.
        pinned = self._staging is not None and self._staging.type == "cuda"
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _synchronize(self) -> None:
        if self._staging is not None and self._staging.type == "cuda":
            torch.cuda.current_stream(self._staging).synchronize()


class _Adoption:
    """What adopting these tensors has found out, kept for the next time: a training loop publishes the same ones in
    every step, and to look at thousands of them takes longer than to read their bytes. It keeps no memory: its views
    are good as long as the tensors still lie where they lay, which is looked at, and somebody has these."""

    _kept: ClassVar[deque[_Adoption]] = deque(maxlen=ADOPTIONS_MAX)
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> _Adoption:
        """Raise UsageError naming a tensor that cannot be adopted."""
        with cls._lock:
            candidates = list(cls._kept) if hasattr(tensors, "values") else []
        for kept in candidates:
            if kept._is_of(tensors):
                return kept
        found = cls(tensors)
        if found.staging is None:
            with cls._lock:
                cls._kept.append(found)
        return found

    @torch.inference_mode(False)  # as for `_flat`
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        specs: list[TensorSpec] = []
        runs: list[_Run] = []
        extents: list[tuple[str, int, int, str]] = []  # device, address, size, name
        devices: set[torch.device] = set()
        start = 0
        for name in check_tensors(tensors):
            tensor = tensors[name]
            spec = spec_of(name, tensor)
            specs.append(spec)
            if not spec.size_bytes:
                continue
            if tensor.is_meta:
                raise UsageError(f"tensor {name!r} is on the meta device: it has no bytes to read or write")
            address, on_host = tensor.data_ptr(), tensor.device.type == "cpu"
            extents.append((str(tensor.device), address, spec.size_bytes, name))
            devices.add(tensor.device)
            view = _memory_at(address, spec.size_bytes) if on_host else None
            runs.append(_Run(start, spec.size_bytes, address, view, None if on_host else _flat_view(tensor)))
            start += spec.size_bytes
        self.ties = _ties_of(extents)
        if len(devices) > 1:
            names = sorted(map(str, devices))
            raise UsageError(f"one shard's tensors lie on several devices ({names}): adopt one shard each")
        self.staging = next((device for device in devices if device.type != "cpu"), None)
        self.specs = shared_table(tuple(specs))
        self.runs = _Runs(runs)
        self._names = list(tensors)
        self._traits = [[list(map(trait, some)) for trait in _TRAITS] for some in _some_at_a_time(tensors)]
        self._tensors = [weakref.ref(tensor, self._forget) for tensor in tensors.values()]

    def runs_with(self, scratch: Mapping[str, torch.Tensor]) -> _Runs:
        """The runs, those of these names in other memory of the host."""
        with_bytes = (spec for spec in self.specs if spec.size_bytes)
        runs = []
        for spec, run in zip(with_bytes, self.runs.all, strict=True):
            if spec.name in scratch:
                flat = _flat(scratch[spec.name])
                run = _Run(run.start, run.size_bytes, flat.data_ptr(), _memory(flat), None)
            runs.append(run)
        return _Runs(runs)

    def _is_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """The very same tensors (none of ours has died: see `_forget`), and none was given other memory or shape."""
        return self._names == list(tensors) and all(
            list(map(trait, some)) == before  # who they are comes first: others may not have the rest of it
            for some, traits in zip(_some_at_a_time(tensors), self._traits, strict=True)
            for trait, before in zip(_TRAITS, traits, strict=True)
        )

    def _forget(self, _: object) -> None:
        # With no name of this module: it is empty already when the last tensors die with the interpreter.
        try:  # noqa: SIM105
            self._kept.remove(self)
        except ValueError:
            pass


# All there is to a tensor but its bytes.
_TRAITS: tuple[Callable[[torch.Tensor], Any], ...] = (
    id,
    torch.Tensor.data_ptr,
    attrgetter("dtype", "shape"),
    torch.Tensor.stride,
)


def _some_at_a_time(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """So many that there is no line of Python for each of them, and so few that they are still in the cache when the
    next trait is asked for."""
    rest = iter(tensors.values())
    while some := list(islice(rest, 256)):
        yield some


class Span(NamedTuple):
    """Stream bytes that are contiguous in an allocated block: [start, start + size_bytes) of the stream, at `place`."""

    start: int
    size_bytes: int
    place: int

    @property
    def slice(self) -> slice:
        return slice(self.place, self.place + self.size_bytes)


class _Run(NamedTuple):
    """Stream bytes that are contiguous in memory: [start, start + size_bytes)."""

    start: int
    size_bytes: int
    address: int
    view: memoryview | None  # host memory, which the slab keeps alive; None on a device
    flat: torch.Tensor | None  # uint8, on a device


class _Runs:
    """All of one slab, in the stream's order, as it takes to find those of a range."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self.all = runs
        self.starts = [run.start for run in runs]
        self.views = [run.view for run in runs if run.view is not None]  # none for a device
        self.size_bytes = sum(run.size_bytes for run in runs)

    @cached_property
    def extents(self) -> Extents:
        """Of thousands it takes milliseconds, and once."""
        extents = np.array([(run.address, run.size_bytes) for run in self.all], np.uint64).reshape(-1, 2)
        extents.flags.writeable = False
        return extents


# --- pure functions ---


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a dense tensor, or raise UsageError that names it."""
    _check_plain(name, tensor)
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"tensor {name!r} is a lazy conjugate or negation: pass tensor.resolve_conj().resolve_neg()")
    shape = tuple(tensor.shape)
    stride = _stride_of(tensor)
    if stride is not None and not _is_dense(shape, stride):
        raise UsageError(
            f"tensor {name!r} of shape {list(shape)} and strides {list(tensor.stride())} has holes or overlaps itself: "
            "pass a contiguous copy"
        )
    size_bytes = tensor.numel() * tensor.element_size()
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), shape, size_bytes, stride)


def contiguous_spec(name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorSpec:
    """Describe a contiguous tensor that need not be there yet."""
    shape = tuple(shape)
    return TensorSpec(name, str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize)


@remembered_of_table
def place(specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Where each tensor of an allocated block begins, in bytes, and how long the block is. Part of the shm protocol."""
    ends = accumulate((_aligned(spec.size_bytes) for spec in specs), initial=0)
    *places, extent = ends
    return tuple(places), extent


@remembered_of_table
def spans(specs: Sequence[TensorSpec]) -> list[Span]:
    """An allocated block's layout as few spans as possible: neighbours without a gap between them are one."""
    merged: list[Span] = []
    for spec, start, at in zip(specs, stream_offsets(specs), place(specs)[0], strict=True):
        if not spec.size_bytes:
            continue
        if merged and merged[-1].place + merged[-1].size_bytes == at:
            merged[-1] = merged[-1]._replace(size_bytes=merged[-1].size_bytes + spec.size_bytes)
        else:
            merged.append(Span(start, spec.size_bytes, at))
    return merged


def check_tensors(tensors: object) -> list[str]:
    """The names, sorted. UsageError unless it is a mapping of text to tensor, which says what is wrong."""
    if not all(hasattr(tensors, method) for method in ("keys", "values", "__getitem__")):
        what = "pass its state_dict()" if hasattr(tensors, "state_dict") else "pass a mapping of name to tensor"
        raise UsageError(f"the tensors are a {type(tensors).__name__}: {what}")
    mapping = cast("Mapping[str, torch.Tensor]", tensors)
    for name, tensor in zip(mapping.keys(), mapping.values(), strict=True):
        check_tensor(name, tensor)
    return sorted(mapping.keys())


def check_tensor(name: object, tensor: object) -> None:
    """UsageError that says what is wrong with the name, or with what it names."""
    if type(name) is not str:
        raise UsageError(f"the name {name!r:.80} of a tensor is a {type(name).__name__}: pass a plain str")
    if not is_text(name):
        raise UsageError(
            f"the name {name!r:.80} of a tensor holds half a surrogate pair, which no message can: rename it"
        )
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name!r} is a {type(tensor).__name__}, not a tensor: leave it out")


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    check_tensor(name, tensor)
    if hasattr(tensor, "to_local") or hasattr(tensor, "__tensor_flatten__"):
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__}, a wrapper around other tensors: pass those "
            "(a DTensor's full_tensor() or to_local())"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f"tensor {name!r} is {tensor.layout} {tensor.dtype}: its bytes do not say all that it holds")


def digest_of(views: Iterable[memoryview]) -> bytes:
    """Digest of these bytes, one after the other."""
    digester = DIGESTER()
    for view in views:
        digester.update(view)
    result: bytes = digester.digest()
    return result


def cut_extents(extents: Extents, first: int, last: int, skip: int, take: int) -> Extents:
    """A copy of those in [first, last), without the first `skip` bytes, and with `take` bytes of the last one as it was
    before that."""
    part: Extents = extents[first:last].copy()
    part[-1, 1] = take
    part[0, 0] += np.uint64(skip)
    part[0, 1] -= np.uint64(skip)
    return part


def copy_views(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy between two lists of views, equally long in bytes but cut differently; without the GIL where that pays."""
    if len(sources) == len(targets) == 1:
        _copy(sources[0], targets[0])
        return
    rest = iter(sources)
    source = memoryview(b"")
    for target in targets:
        at = 0
        while at < len(target):
            if not len(source):
                source = next(rest)
                continue
            count = min(len(source), len(target) - at)
            _copy(source[:count], target[at : at + count])
            source = source[count:]
            at += count


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < COPY_GIL_SIZE_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _copy_flat(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == target.device.type == "cpu":
        _copy(_memory(source), _memory(target))
    else:
        target.copy_(source)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None when contiguous, else the strides in elements, those of dimensions of size 1 (which mean nothing) as 1."""
    if tensor.is_contiguous():
        return None
    return tuple(s if n != 1 else 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _in_order(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specs sorted by name, checked: they may come from a peer, and memory is handed out by what they say."""
    ordered = tuple(sorted(specs, key=lambda spec: spec.name))
    if ordered == specs:
        ordered = specs  # a manifest's table stays the very object that `place` and `spans` remember
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise UsageError(f"tensor {one.name!r} is there twice")
    for spec in ordered:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"tensor {spec.name!r} is {spec.dtype!r}, which torch {torch.__version__} does not know")
        if min(spec.shape, default=0) < 0 or spec.size_bytes != math.prod(spec.shape) * dtype.itemsize:
            raise UsageError(f"tensor {spec.name!r} claims {spec.size_bytes} bytes for {spec.dtype}{list(spec.shape)}")
        if spec.stride is not None and (
            len(spec.stride) != len(spec.shape) or not spec.size_bytes or not _is_dense(spec.shape, spec.stride)
        ):
            raise UsageError(f"tensor {spec.name!r} has strides {spec.stride} that do not fit its shape {spec.shape}")
    return ordered


def _ties_of(extents: list[tuple[str, int, int, str]]) -> dict[str, str]:
    """Which names are the same memory as another, and which other is the first of them. A partial overlap is refused:
    it would let one tensor's update tear another's."""
    ties: dict[str, str] = {}
    for (device, address, size, name), (other_device, other, other_size, other_name) in pairwise(sorted(extents)):
        if device == other_device and other < address + size:
            if (address, size) != (other, other_size):
                raise UsageError(
                    f"tensors {name!r} and {other_name!r} overlap in part: adopt that memory under one name"
                )
            ties[other_name] = ties.get(name, name)
    return ties


def _memory(flat: torch.Tensor) -> memoryview:
    """A uint8 host tensor's own memory."""
    array: Any = flat.numpy()
    return memoryview(array)


def _memory_at(address: int, size_bytes: int) -> memoryview:
    """Host memory that others keep alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


# The three below make normal tensors even when the caller is in inference mode (engines call us from there): a tensor
# born in it could not be written by anybody outside of it, our own threads included.


@torch.inference_mode(False)
def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return _flat_view(tensor)


def _flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's storage as uint8[size_bytes]; works for every dtype, packed ones too."""
    size_bytes = tensor.numel() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.element_size(),
        (size_bytes,),
        (1,),
    )


@torch.inference_mode(False)
def _block(memory: memoryview | None, size_bytes: int = 0) -> torch.Tensor:
    """uint8 over this memory, or over new and private memory."""
    if memory is None:
        return torch.zeros(size_bytes, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


@torch.inference_mode(False)
def _view(base: torch.Tensor, spec: TensorSpec, at: int) -> torch.Tensor:
    """The tensor of `spec` whose bytes begin at `base[at]`."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    stride = spec.stride or tuple(accumulate(spec.shape[:0:-1], lambda a, b: a * max(b, 1), initial=1))[::-1]
    view = torch.empty(0, dtype=dtype, device=base.device)
    return view.set_(base.untyped_storage(), at // dtype.itemsize, spec.shape, stride if spec.shape else ())


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
    _log.warning("CUDA cannot pin %d bytes (error %d): copies to the device will be slower", base.numel(), int(error))
    return 0
