"""Memory that other processes of this host use where it lies, so that a host holds one copy of what its workers share.

With the memory's file a borrower gets the end of a pipe, and keeps it for as long as it uses the memory. It closes when
the borrower is done, or dies; until then its lender writes nothing there (`Loans.any`). The lender may die, too: the
memory is the kernel's, and stays as it is until the last of them lets go of it.
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
from tensorhub_plugins.core.process import Descriptor, close_in_children

MAP_NORESERVE, MAP_FIXED_NOREPLACE = 0x4000, 0x100000  # mman.h: the mmap module has the latter from Python 3.13 on


class Loans:
    """The lender's side, of one block: one pipe, however many borrow. Any thread may call."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._end = -1  # ours, to which nothing is ever written

    def lend(self) -> Loan:
        """The other end, for a borrower: it counts until that, and every copy of it, is closed. The caller owns it."""
        with self._guard:
            if self._end < 0:
                theirs, self._end = os.pipe()
                return Loan(theirs)
            return Loan(os.open(f"/proc/self/fd/{self._end}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    @property
    def any(self) -> bool:
        """Whether somebody still uses the memory."""
        with self._guard:
            return self._end >= 0 and not is_over(self._end)

    def close(self) -> None:
        """The memory is not ours any more, whoever uses it. Idempotent."""
        with self._guard:
            end, self._end = self._end, -1
        if end >= 0:
            os.close(end)


class Loan:
    """A borrower's end of the pipe, which it takes over. It closes with the last tensor over the memory, or before. A
    forked child does not keep it: it would outlive the loan, and nobody might write to the memory any more."""

    def __init__(self, fd: int) -> None:
        self._end = Descriptor(fd)
        self._guard = threading.Lock()

    def fileno(self) -> int:
        """To be passed on; -1 when it was given back."""
        return self._end.number

    def lend(self) -> Loan:
        """For one more borrower of the same owner's memory; OSError when it was given back."""
        with self._guard:
            return Loan(os.dup(self._end.number))

    def close(self) -> None:
        """The owner may write to the memory again. Idempotent."""
        with self._guard:
            self._end.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, TypeError):  # at the interpreter's end
            self.close()


class Borrowed:
    """A block of another process, as long as it is used. Takes the descriptors over.

    memory: uint8, all of it, mapped; `keeps` what must stay with it: the loan, whatever becomes of this. Nothing may be
    written to it where others here have it mapped, too. fd: of its file. owner_liveness_fd: hangs up when the block is
    closed, or its owner dies: a mapping that is kept for later is to be let go then. pinned: for which device it is.
    """

    def __init__(
        self, memory: torch.Tensor, fd: int, owner_liveness_fd: int, loan: Loan, pinned: Pinned | None = None
    ) -> None:
        self.memory = memory
        self.fd, self.owner_liveness_fd = fd, owner_liveness_fd
        self.pinned = pinned
        self._loan = loan

    def lend(self) -> Loan:
        """See `Loan.lend`."""
        return self._loan.lend()

    def drop(self) -> None:
        """Nobody is handed the memory from here any more; tensors over it stay what they are."""
        fds = (self.fd, self.owner_liveness_fd)
        self.fd = self.owner_liveness_fd = -1
        self.memory = torch.empty(0, dtype=torch.uint8)  # whoever still knows the slab must not keep it mapped
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """Its owner may write there again, whoever has tensors over it. Idempotent."""
        self.drop()
        self._loan.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, TypeError):  # half made, or at the interpreter's end
            self.drop()


class KeptFromChildren:
    """A mapping of another process' memory, as long as this object lives: a forked child does not have it.

    The child has no loan, either, so the memory's owner writes the next version there. The child would read that under
    tensors of this one, without a word. So whoever touches them there dies of SIGSEGV; and nothing else comes to lie at
    their addresses, which they could be taken for, or which they would unmap in the end."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._address = np.frombuffer(mapped, np.uint8).ctypes.data
        self._size_bytes = len(mapped)
        self._map = ctypes.CDLL(None, use_errno=True).mmap
        self._map.restype = ctypes.c_void_p
        mapped.madvise(mmap.MADV_DONTFORK)
        close_in_children(self)

    def close(self) -> None:
        """In a child, before it does anything else."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
        size_bytes = ctypes.c_size_t(self._size_bytes)
        self._map(ctypes.c_void_p(self._address), size_bytes, 0, flags, -1, ctypes.c_long(0))


def is_over(fd: int) -> bool:
    """Whether nobody has the other end of this pipe any more."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


@torch.inference_mode(False)
def bytes_over(memory: memoryview, *keeps: object) -> torch.Tensor:
    """uint8 over mapped memory, also over some that must not be written, of which torch would warn. keeps: stays as
    long as the last tensor over it."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    buffer = (ctypes.c_char * len(memory)).from_address(address)
    buffer.keeps = (memory, *keeps)  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)
