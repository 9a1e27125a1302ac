"""Memory that other processes of this host use in place, so that a host holds one copy of what its workers share.

With the memory's file a borrower gets the end of a pipe, and keeps it open for as long as it uses the memory. It closes
when the borrower is done, or dies; until then the lender does not write to the memory (`Loans.any`). The lender may
die, too: the memory belongs to the kernel, and stays unchanged until the last process releases it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
from contextlib import suppress

import numpy as np
import torch

from tensorhub_plugins.core.memory.pinning import Pinned
from tensorhub_plugins.core.process_lifetime import Descriptor, close_in_children

MAP_FIXED, MAP_NORESERVE, MAP_FIXED_NOREPLACE = 0x10, 0x4000, 0x100000  # mman.h: not all are in Python's mmap


_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p


class Loans:
    """The lender's side of one block: one pipe, however many borrow. Any thread may call."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._end = -1  # our end, to which nothing is ever written

    def lend(self) -> Loan:
        """Return the other end, for a borrower, which owns it: the loan lasts until every copy of it is closed."""
        with self._guard:
            if self._end < 0:
                theirs, self._end = os.pipe()
                return Loan(theirs)
            return Loan(os.open(f"/proc/self/fd/{self._end}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    @property
    def any(self) -> bool:
        """Return whether a process still uses the memory."""
        with self._guard:
            return self._end >= 0 and not is_over(self._end)

    def close(self) -> None:
        """Release the lender's end: the memory is not ours any more, even if it is still in use. Idempotent."""
        with self._guard:
            end, self._end = self._end, -1
        if end >= 0:
            os.close(end)


class Loan:
    """A borrower's end of the pipe, which it takes over. It closes with the last tensor over the memory, or before. A
    forked child does not keep it: it would outlive the loan, and block all writes to the memory."""

    def __init__(self, fd: int) -> None:
        self._end = Descriptor(fd)
        self._guard = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, to be passed on; -1 after it was closed."""
        return self._end.number

    def lend(self) -> Loan:
        """Return another end, for one more borrower of the same memory. Raise OSError after this one was closed."""
        with self._guard:
            return Loan(os.dup(self._end.number))

    def close(self) -> None:
        """End the loan, so that the owner may write to the memory again. Idempotent."""
        with self._guard:
            self._end.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, TypeError):  # at the interpreter's end
            self.close()


class Borrowed:
    """A block of another process, for as long as it is used. Takes the descriptors over.

    memory: uint8, all of it, mapped; it keeps the loan alive, whatever becomes of this object. It must not be written
    to while other processes have it mapped, too. fd: the block's file. owner_liveness_fd: hangs up when the block is
    closed, or its owner dies: release a mapping kept for later then. pinned: its registration with a device."""

    def __init__(
        self, memory: torch.Tensor, fd: int, owner_liveness_fd: int, loan: Loan, pinned: Pinned | None = None
    ) -> None:
        self.memory = memory
        self.fd, self.owner_liveness_fd = fd, owner_liveness_fd
        self.pinned, self._loan = pinned, loan

    def lend(self) -> Loan:
        """Return another end of the loan's pipe. See `Loan.lend`."""
        return self._loan.lend()

    def drop(self) -> None:
        """Stop handing out the memory; existing tensors over it stay valid."""
        fds = (self.fd, self.owner_liveness_fd)
        self.fd = self.owner_liveness_fd = -1
        self.memory = torch.empty(0, dtype=torch.uint8)  # a reference to the slab must not keep it mapped
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """End the loan, so that the owner may write again, even if tensors over the memory are left. Idempotent."""
        self.drop()
        self._loan.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, TypeError):  # half made, or at the interpreter's end
            self.drop()


class KeptFromChildren:
    """A mapping of another process's memory, for as long as this object lives, that forked children do not have.

    A child has no loan, so the memory's owner writes the next version there, and the child would silently read that
    through its copies of these tensors. So a child that touches them dies of SIGSEGV; and its address range stays
    reserved, so that nothing else is mapped there, which could be mistaken for these tensors or unmapped with them."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._address = np.frombuffer(mapped, np.uint8).ctypes.data
        self._size_bytes = len(mapped)
        mapped.madvise(mmap.MADV_DONTFORK)
        close_in_children(self)

    def close(self) -> None:
        """Reserve the address range in a child, before the child does anything else."""
        map_at(self._address, self._size_bytes, replace=False)


def map_at(address: int, size_bytes: int, fd: int | None = None, *, replace: bool = True) -> None:
    """Map this file at the address, private to this process; None: nothing, so that each access ends in SIGSEGV.
    replace: what is mapped there now."""
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE | (MAP_FIXED if replace else MAP_FIXED_NOREPLACE)
    access = 0 if fd is None else mmap.PROT_READ | mmap.PROT_WRITE
    if fd is None:
        flags, fd = flags | mmap.MAP_ANONYMOUS, -1
    _mmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), access, flags, fd, ctypes.c_long(0))


def is_over(fd: int) -> bool:
    """Return whether every process has closed the other end of this pipe."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


@torch.inference_mode(False)
def bytes_over(memory: memoryview, *keeps: object) -> torch.Tensor:
    """Return uint8 over mapped memory, also read-only memory, of which torch would warn. keeps: objects that stay alive
    as long as the last tensor over it."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    buffer = (ctypes.c_char * len(memory)).from_address(address)
    buffer.keeps = (memory, *keeps)  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)
