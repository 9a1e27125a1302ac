"""One shard's memory, seen as one flat stream of bytes.

A slab turns tensors into the stream that `manifest` describes and back. Four kinds:

* adopted: the live tensors themselves (a model's parameters), wherever they lie, CPU or accelerator;
* allocated: one block the tensors are written into, an anonymous memfd, so that it can be passed to a reader on the
  same host and nothing is left behind when this process is killed;
* view: what one source shard holds, in parts, of the tensors of allocated slabs. See assembly.py.
* borrowed: an allocated slab of another process of this host, used in place and never written. See loans.py.

On the CPU `readable` and `writable` hand out the memory itself: a socket sends from it and receives into it. Device
memory is copied through pinned host memory; a range is committed to the device when `writable` is left without an
exception, and not at all otherwise. So is a range of a view that holds columns of a matrix, which lie in thousands of
pieces.
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Literal, TypeAlias
from weakref import WeakSet

import msgspec
import numpy as np
import torch

from tensorhub_plugins.core.deadline import NEVER, check_time, until
from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.digests import DIGEST_SIZE_BYTES, NO_DIGESTS, XXH3, digest_of
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest, TensorSpec, TensorTable, segment_size_for
from tensorhub_plugins.core.memory import staging
from tensorhub_plugins.core.memory.adoption import Adoption
from tensorhub_plugins.core.memory.block import NOTHING, Block
from tensorhub_plugins.core.memory.copying import (
    DIGEST_SIZE_AT_ONCE_BYTES,
    copy_views,
    digests_of_segments,
    digests_of_view,
)
from tensorhub_plugins.core.memory.device_digests import digests_there
from tensorhub_plugins.core.memory.downloads import Downloads
from tensorhub_plugins.core.memory.loans import Borrowed, Loan, Loans
from tensorhub_plugins.core.memory.pinning import Pinned, pin_block
from tensorhub_plugins.core.memory.runs import Extents, Runs, can_be_read, mapped, memory_of
from tensorhub_plugins.core.memory.tensors import check_plain, flat_bytes, held, span_of
from tensorhub_plugins.core.process_lifetime import Descriptor, OfThisProcess

Kind: TypeAlias = Literal["adopted", "allocated", "view", "borrowed"]


class Slab(OfThisProcess):
    """The registered memory of one shard. Make one with `adopt` or `allocate`.

    Ranges are stream offsets in bytes, [start, stop). Several threads may read and write at once; that nothing is
    written while it is read is the publisher's contract, not the slab's."""

    specs: TensorTable
    size_bytes: int
    kind: Kind
    ties: Mapping[str, str]  # of adopted tensors: name -> the first other name of the very same memory

    def __init__(
        self,
        kind: Kind,
        specs: TensorTable,
        runs: Runs,
        *,
        tensors: Mapping[str, torch.Tensor],
        shared: tuple[int, tuple[int, int]] = NOTHING,
        pinned: Pinned | None = None,
        borrowed: Borrowed | None = None,
    ) -> None:
        """Initialize a slab. Private: use `adopt`, `allocate` or `borrow`, or `assembly.view_of`."""
        self.kind, self.specs = kind, specs
        self.size_bytes = runs.size_bytes
        # Slabs of the same tensors at the same addresses share this object: what is known of their memory (that a
        # network card has it registered, say) can be keyed by it, weakly.
        self.runs = runs
        self._tensors = tensors
        self._unwritten = dict.fromkeys(tensors) if kind == "allocated" else {}
        self._has_views = kind == "adopted"  # their holders may have queued copies to them
        self.device: devices.Device | None = None  # that it lies on; None: host memory, handed out as it is
        self._flats: list[torch.Tensor] = []  # one for each run, where copies are handed out
        self._fd, (self._owner_liveness, alive) = shared
        self._alive = Descriptor(alive)
        self._pinned = pinned
        self._loans = Loans()
        self.borrowed = borrowed  # the loan that a borrowed slab lies in
        # The storages of adopted views, by run, kept whatever becomes of the tensors; and where their memory is.
        with_bytes = [tensors[spec.name] for spec in specs if spec.size_bytes] if kind == "adopted" else []
        self._storages = list(map(torch.Tensor.untyped_storage, with_bytes))
        self._addresses = list(map(torch.UntypedStorage.data_ptr, self._storages))
        self.ties: Mapping[str, str] = {}
        self._known: bytes | None = None  # its digests, known without reading a byte
        self._closed = self._is_to_close = False
        self._offers = WeakSet[object]()  # the claims of its offers, perhaps of several clients
        self._lock = threading.Lock()

    # --- three ways to get one ---

    @classmethod
    def adopt(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        scratch: Mapping[str, torch.Tensor] | None = None,
        deadline: float = NEVER,
    ) -> Slab:
        """Adopt live tensors as they are: read and written in place, never copied.

        Each must be dense (any permutation of contiguous, no overlap with itself, no holes) and all must be on the CPU
        or on one device. Two names may be the same memory (tied weights, see `ties`), but may not overlap in part.
        Raise UsageError that names the tensor otherwise, DeadlineExceeded when so many take longer.

        scratch: for some of the names, a host tensor of the same kind that holds their bytes instead. See tied.py."""
        named = held(tensors, deadline)
        found = Adoption.of(named, deadline)
        runs = found.runs
        instead = {name: tensor for name, tensor in scratch.items() if name in named} if scratch else {}
        if instead:
            named.update(instead)
            runs = found.runs_with(instead)
        slab = cls("adopted", found.specs, runs, tensors=named)
        slab.ties = found.ties
        if found.device is not None:
            slab._copy_through_host(found.device, deadline)
        return slab

    @classmethod
    def allocate(
        cls,
        specs: Iterable[TensorSpec],
        *,
        pin: bool | None = None,
        device: devices.Device | None = None,
        ahead: bool = False,
        deadline: float = NEVER,
    ) -> Slab:
        """Allocate one zeroed block of host memory for these tensors, mappable by other processes of this host.

        pin: None: register the block with `device` (None: the calling thread's) in the background, where this process
        uses one; True: register it at once, or raise UsageError. ahead: it is written later, and its pages are made in
        the background in any process, as the first write to a page takes much longer than the next. Where the system
        has no memfd, the block is private memory and `shared_fd` is None."""
        table = TensorTable.of(specs)
        made = Block(table, deadline=deadline)
        pinned = None if pin is False else pin_block(made, device, required=bool(pin), ahead=ahead)
        return cls("allocated", table, made.runs, tensors=made.tensors, shared=(made.fd, made.liveness), pinned=pinned)

    @classmethod
    def borrow(cls, specs: Iterable[TensorSpec], borrowed: Borrowed, *, deadline: float = NEVER) -> Slab:
        """Return the allocated slab of these tensors that another process of this host lends: read, and never written.
        `close` ends the loan. Errors as of `allocate`."""
        table = TensorTable.of(specs)
        made = Block(table, deadline=deadline, over=borrowed.memory)
        return cls("borrowed", table, made.runs, tensors=made.tensors, borrowed=borrowed, pinned=borrowed.pinned)

    # --- tensors ---

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors by name, sharing the slab's memory. Keep none of them beyond `close` of an allocated slab.

        names: only those of them that the slab has; None: all."""
        self._check_open()
        self._has_views = True
        if names is None:
            return dict(self._tensors)
        return {name: self._tensors[name] for name in names if name in self._tensors}

    def write(self, name: str, tensor: torch.Tensor, *, deadline: float = NEVER) -> None:
        """Copy `tensor` in under `name`: same dtype and shape (or UsageError), any device, any strides. Wait for queued
        work first, also for a device's copy into a host tensor. Raise DeadlineExceeded when the copy takes longer: the
        tensor counts as not written then."""
        devices.settle_host([tensor])
        check_time(deadline)
        target = self._target_of(name, tensor)
        with torch.inference_mode(), Downloads() as downloads:  # that mode can write inference tensors and normal ones
            if devices.of(target) is not None:
                staging.copy_all([staging.as_bytes(target, tensor)])
            elif devices.of(tensor) is None:
                downloads.fill(tensor, target, deadline)
            else:
                downloads.add(tensor, target, stays=True)
        self.mark_written([name])

    def write_later(
        self, name: str, tensor: torch.Tensor, downloads: Downloads, *, stays: bool = False, deadline: float = NEVER
    ) -> None:
        """Do as `write`, with a cast to the dtype here, of `settled` memory. A device's tensor has arrived when
        `downloads` have."""
        check_time(deadline)
        target = self._target_of(name, tensor, casts=True)
        with torch.inference_mode():
            if devices.of(tensor) is None:
                downloads.fill(tensor, target, deadline)
            else:
                downloads.add(tensor, target, name=name, stays=stays)
        self.mark_written([name])

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Return the names of an allocated slab's tensors not written since it was allocated or `expect_writes`."""
        return tuple(self._unwritten)

    def check_writable(self) -> None:
        """Raise UsageError that names a tensor in host memory that this process cannot write, if that is known."""
        shut = [] if self.runs.may_be_written or not self.runs.views else mapped(lambda access, _: access[1:2] != b"w")
        starts, with_bytes = [start for start, _ in shut], (spec for spec in self.specs if spec.size_bytes)
        for spec, run in zip(with_bytes, self.runs.all if shut else (), strict=False):
            before = bisect_left(starts, run.address + run.size_bytes) - 1
            if before >= 0 and shut[before][1] > run.address:
                raise UsageError(
                    f"tensor {spec.name!r} cannot be read into: this process may not write its memory, maybe a file "
                    "that is mapped for reading: read into a clone of it"
                )
        self.runs.may_be_written = True

    def mark_written(self, names: Iterable[str] | None = None) -> None:
        """Mark these tensors (None: all) as filled by other means than `write`: through their views, or by a reader."""
        # Without a lock, which a caller that is interrupted here would keep: each step is done whole or not at all.
        self._known = None
        for name in tuple(self._unwritten) if names is None else names:
            self._unwritten.pop(name, None)

    def expect_writes(self) -> None:
        """Start over: every tensor counts as unwritten. For a slab that is reused for another version."""
        self._has_views = False
        self._known = None
        self._unwritten = dict.fromkeys(self._tensors)

    @property
    def segment_size_bytes(self) -> int:
        """Return the default size of the segments that `manifest` digests."""
        return segment_size_for(self.size_bytes)

    def know_digests(self, digests: bytes | None) -> None:
        """Set the XXH3-128 of each segment of `segment_size_bytes`, joined, as taken during the transfer of the
        expected bytes; None: unknown. `manifest` uses them without reading a byte, until the next write."""
        self._known = digests

    # --- bytes ---

    @property
    def shared_fd(self) -> int | None:
        """Return the memfd behind an allocated slab, which still owns the descriptor; None: not shareable."""
        fd = self._fd if self.borrowed is None else self.borrowed.fd
        return fd if fd >= 0 and not self._closed else None

    @property
    def owner_liveness_fd(self) -> int | None:
        """Return the end of a pipe for a process that is passed `shared_fd`. It hangs up when the slab is closed, or
        its owner dies: the memory must be released then. The slab still owns the descriptor."""
        fd = self._owner_liveness if self.borrowed is None else self.borrowed.owner_liveness_fd
        return fd if fd >= 0 and not self._closed else None

    def lend(self) -> Loan:
        """Return what a process that is passed `shared_fd` must keep open for as long as it uses the memory in place:
        the memory is not written to until then. The caller closes its own end."""
        self._check_open()
        return self._loans.lend() if self.borrowed is None else self.borrowed.lend()

    @property
    def is_lent(self) -> bool:
        """Return whether others use the memory in place: it must not be written to."""
        return self._loans.any

    @property
    def is_closed(self) -> bool:
        """Return whether it is closed, or will be when it is not offered any more."""
        return self._is_to_close

    def readable(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes of a stream range, in order: the memory itself on the CPU, a host copy of device memory."""
        self._check_range(start, stop)
        if self.device is None:
            return self.runs.pieces(start, stop)
        host = self.device.buffer(stop - start)
        self.device.down(self._cut_flats(start, stop), host)
        return [memory_of(host)]

    def read_into(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        """Copy a stream range into host memory of the same size; from a device without an intermediate copy."""
        if self.device is None or len(views) != 1:
            copy_views(self.readable(start, stop), views)
            return
        self._check_range(start, stop)
        self.device.down(self._cut_flats(start, stop), torch.frombuffer(views[0], dtype=torch.uint8))

    @contextmanager
    def writable(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        """Provide memory to receive a stream range into, in order. Device memory is written if the block succeeds."""
        with self.writable_ranges([(start, stop)]) as views:
            yield views

    @contextmanager
    def writable_ranges(
        self, ranges: Sequence[tuple[int, int]], host: torch.Tensor | None = None
    ) -> Iterator[list[memoryview]]:
        """Do as `writable` for several stream ranges at once, their views one after the other. host: uint8 memory, at
        least as large, from which copies to the slab's device are fast; None: a buffer of the device's own."""
        for start, stop in ranges:
            self._check_range(start, stop)
        self._check_writable()
        if self.device is None:
            with self.runs.receiving(ranges) as views:
                yield views
            return
        size_bytes = sum(stop - start for start, stop in ranges)
        host = self.device.buffer(size_bytes) if host is None else host[:size_bytes]
        yield [memory_of(part) for part in torch.split(host, [stop - start for start, stop in ranges])]
        self.device.up(host, [flat for start, stop in ranges for flat in self._cut_flats(start, stop)])

    def digest(self, start: int, stop: int, algorithm: str = XXH3) -> bytes:
        """Return the digest of a stream range: 16 bytes that depend on every byte and on its position."""
        step = DIGEST_SIZE_AT_ONCE_BYTES  # a device's pinned memory is kept, in the size that was asked for
        pieces = (self.readable(at, min(at + step, stop)) for at in range(start, stop, step))
        return digest_of(chain.from_iterable(pieces), algorithm)

    def manifest(
        self,
        segment_size_bytes: int | None = None,
        *,
        threads: int | None = None,
        algorithm: str = XXH3,
        deadline: float = NEVER,
    ) -> Manifest:
        """Return names, sizes and the digest of every segment, from the bytes as they are now.

        segment_size_bytes, threads: None picks by size. algorithm: one of digests.py, including none. Where an
        accelerator is used this first waits for the work queued on it, so that the finished bytes are described; for
        host memory, too, unless only `write` has filled it. Raise DeadlineExceeded when so many bytes take longer."""
        self._check_open()
        if segment_size_bytes is None:
            segment_size_bytes = self.segment_size_bytes
        if segment_size_bytes <= 0:
            raise UsageError(f"segment_size_bytes must be positive, not {segment_size_bytes}")
        if self.device is not None:
            self.device.synchronize()
        elif self._has_views:
            devices.settle_host(islice(self._tensors.values(), 1))
        if algorithm == NO_DIGESTS:
            return Manifest(self.specs, os.urandom(DIGEST_SIZE_BYTES), segment_size_bytes, NO_DIGESTS)
        joined = self._known if (algorithm, segment_size_bytes) == (XXH3, self.segment_size_bytes) else None
        if joined is None:
            joined = self._digests(segment_size_bytes, algorithm, threads, deadline)
        return Manifest(self.specs, joined, segment_size_bytes, algorithm)

    def damaged(
        self, manifest: Manifest, segments: Sequence[int] | None = None, *, deadline: float = NEVER
    ) -> list[int]:
        """Return which of these segments (None: all) do not have the bytes that the manifest's digests were taken of.

        manifest: of this same stream. Without digests there is nothing to compare: none are found."""
        self._check_open()
        gone = self.gone(manifest, segments, deadline=deadline)
        if gone or not manifest.has_digests:
            return gone  # there is nothing left to read, or to compare
        digest = partial(self.digest, algorithm=manifest.digest_algorithm)
        if segments is None:
            found = self._digests(manifest.segment_size_bytes, manifest.digest_algorithm, deadline=deadline)
            if found == manifest.digests:
                return []
            now = msgspec.structs.replace(manifest, digests=found)
            return [k for k in range(manifest.segment_count) if now.digest(k) != manifest.digest(k)]
        return [k for k in until(deadline, segments, 1) if digest(*manifest.segment_range(k)) != manifest.digest(k)]

    def gone(self, manifest: Manifest, segments: Sequence[int] | None = None, *, deadline: float = NEVER) -> list[int]:
        """Return which of these segments (None: all) of adopted tensors are not there any more: to read their memory,
        which was freed or is the rest of a mapped file that was cut off, would end the process."""
        wanted = range(manifest.segment_count) if segments is None else segments
        adopted = until(deadline, wanted, 1) if self.kind == "adopted" else ()
        return [k for k in adopted if not self.is_there(*manifest.segment_range(k))]

    def is_there(self, start: int, stop: int) -> bool:
        """Return whether this range can be read, as far as the system says: its memory was not taken away by a resize,
        as FSDP does, and its file not cut off. Memory of our own always can."""
        self._check_range(start, stop)
        if self.kind != "adopted" or start == stop:
            return True
        first, last, _, _ = self.runs.cut(start, stop)
        if list(map(torch.UntypedStorage.data_ptr, self._storages[first:last])) != self._addresses[first:last]:
            return False
        return self.device is not None or not self.runs.is_of_files or can_be_read(self.addresses(start, stop))

    def addresses(self, start: int = 0, stop: int | None = None) -> Extents | None:
        """Return where a stream range lies in this process's memory; None on a device, or where it is scattered."""
        stop = self.size_bytes if stop is None else stop
        self._check_range(start, stop)
        return (
            None if self.device is not None or self.runs.is_scattered(start, stop) else self.runs.addresses(start, stop)
        )

    def extents(self, deadline: float = NEVER) -> Extents:
        """Return all memory of the slab, in any order; for a view the extents of its whole tensors."""
        if self.kind != "view":
            return self.runs.extents
        tensors = until(deadline, self._tensors.values())
        addresses = [(tensor.data_ptr(), span_of(tensor)) for tensor in tensors]
        return np.array(addresses, np.uint64).reshape(-1, 2)

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by name, for inspection: do not keep them."""
        return self._tensors

    @property
    def copying_device(self) -> devices.Device | None:
        """Return the device that copies from and to it: its own, or the one that its host memory is pinned for."""
        return self._pinned.device if self.device is None and self._pinned is not None else self.device

    @property
    def unpinned(self) -> str:
        """Return what of its host memory could not be pinned, and why, as text for users; "": all is, or no device
        copies it."""
        if self._pinned is None and self.borrowed is not None and devices.here() is not None:
            return "what it borrows and may write to: it has a private mapping of that"
        return "" if self._pinned is None else self._pinned.reason

    def flats(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the device memory of a stream range, in order, as uint8 tensors. Only for a slab on a device."""
        self._check_range(start, stop)
        return self._cut_flats(start, stop)

    # --- the end ---

    def close(self) -> None:
        """Release the memory; idempotent. It returns to the system when the last view of it is gone. What is offered
        to others is closed when it is not offered any more: its readers would find nothing there."""
        with self._lock:
            self._is_to_close = True
            if self._closed or self._offers:
                return
            self._closed = True
            if self.borrowed is not None:
                self.borrowed.close()
            elif self._pinned is not None:
                self._pinned.release()
            self._loans.close()
            self._alive.close()
            for fd in (self._fd, self._owner_liveness):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._owner_liveness = -1
            self._tensors = {}
            self.runs, self._flats = Runs([]), []

    def begin_offer(self, claim: object) -> None:
        """Stay open until `end_offer` of this claim, or its end."""
        with self._lock:
            self._offers.add(claim)

    def end_offer(self, claim: object) -> None:
        """End an offer; with the last one the slab is closed, if it was to be. Idempotent."""
        with self._lock:
            self._offers.discard(claim)
        if self._is_to_close:
            self.close()

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A slab dropped without close must not leak its descriptor; at interpreter exit there is nothing to save, and
        # nothing of this module left to do it with. Borrowed memory stays as it is for tensors over it.
        if not is_finalizing() and hasattr(self, "_lock") and getattr(self, "borrowed", None) is None:
            self.close()

    def __repr__(self) -> str:
        return f"<Slab {self.kind}, {len(self.specs)} tensors, {self.size_bytes} bytes{', closed' * self._closed}>"

    # --- inside ---

    def _target_of(self, name: str, tensor: torch.Tensor, *, casts: bool = False) -> torch.Tensor:
        """Return the slab's tensor of this name. Raise UsageError if there is none, or it is of another kind."""
        self._check_open()
        self._check_writable()
        spec = self.specs.get(name)
        if spec is None:
            raise UsageError(f"tensor {name!r} is not in this slab of {len(self.specs)} tensors")
        check_plain(name, tensor)
        if tensor.is_meta:
            raise UsageError(f"tensor {name!r} is on the meta device: it has no bytes to write")
        dtype = spec.dtype if casts else str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise UsageError(
                f"tensor {name!r} is {dtype}{list(tensor.shape)}, the slab expects {spec.dtype}{list(spec.shape)}"
            )
        return self._tensors[name]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the slab is closed")

    def _check_writable(self) -> None:
        if self.borrowed is not None:
            raise UsageError("the slab is another worker's, which lends it to be read: copy what is to be changed")

    def _check_range(self, start: int, stop: int) -> None:
        self._check_open()
        if not 0 <= start <= stop <= self.size_bytes:
            raise UsageError(f"range [{start}, {stop}) is outside the slab's {self.size_bytes} bytes")

    def _digests(
        self, segment_size_bytes: int, algorithm: str, threads: int | None = None, deadline: float = NEVER
    ) -> bytes:
        """Return the digests of all segments, joined."""
        if self.device is not None:
            return self._digests_of(self.device, segment_size_bytes, algorithm, threads, deadline)
        digest = partial(self.digest, algorithm=algorithm)
        return digests_of_segments(digest, self.size_bytes, segment_size_bytes, threads=threads, deadline=deadline)

    def _digests_of(
        self, device: devices.Device, segment_size_bytes: int, algorithm: str, threads: int | None, deadline: float
    ) -> bytes:
        """Do the same for memory of a device: its digests are taken there, or while the next piece is copied."""
        if algorithm == XXH3:
            there = digests_there(device, self._cut_flats, self.size_bytes, segment_size_bytes)
            if there is not None:
                return there
        step = max(device.piece_size_bytes // segment_size_bytes, 1) * segment_size_bytes
        ranges = [(start, min(start + step, self.size_bytes)) for start in range(0, self.size_bytes, step)]
        joined = []
        for host in device.pieces(self._cut_flats, until(deadline, ranges, 1)):
            joined.append(digests_of_view(memory_of(host), segment_size_bytes, algorithm, threads))
        return b"".join(joined)

    def _copy_through_host(self, device: devices.Device, deadline: float = NEVER) -> None:
        """Hand out and receive copies: memory of this device cannot be handed out itself."""
        self.device = device
        self._flats = [flat_bytes(self._tensors[spec.name]) for spec in until(deadline, self.specs) if spec.size_bytes]

    def _cut_flats(self, start: int, stop: int) -> list[torch.Tensor]:
        if start == stop:
            return []
        first, last, skip, take = self.runs.cut(start, stop)
        flats = self._flats[first:last]
        flats[-1] = flats[-1][:take]
        flats[0] = flats[0][skip:]
        return flats
